/** The engine, live. */
import type { JSX } from "preact";
import { model } from "../api";
import { link, rewatch, tick, trouble } from "../engine";
import { Batch } from "./batch";
import { demoing, demoTrouble, startDemo } from "./demo";
import { Latency } from "./latency";
import { Memory } from "./memory";
import { Queue } from "./queue";
import { Tree } from "./tree";
import { Vitals } from "./vitals";

export function EngineView(): JSX.Element {
  return (
    <main class="engine" aria-label="The engine, live">
      <div class="strip">
        <h1>The engine</h1>
        <p>
          {link.value === "live" ? <>as it runs <b>{model.value}</b></> : link.value === "lost" ? <>not connected: {trouble.value}</> : "connecting …"}
        </p>
        {link.value === "lost" && <button onClick={rewatch}>try again</button>}
        {link.value === "live" && (
          <button class="demo" onClick={() => void startDemo()} aria-pressed={demoing.value}>
            {demoing.value ? "Stop the sample conversations" : "Start sample conversations"}
          </button>
        )}
      </div>
      {demoTrouble.value && <p class="trouble" role="alert">{demoTrouble.value}</p>}
      {tick.value > 0 && (
        <div class={`panels ${link.value === "lost" ? "stale" : ""}`}>
          <Vitals />
          <Batch />
          <Memory />
          <Tree />
          <Queue />
          <Latency />
        </div>
      )}
    </main>
  );
}
