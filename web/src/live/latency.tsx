/** How long the latest requests waited for their first token, and for each further one. */
import type { JSX } from "preact";
import { Canvas, FONT, quantile, time, type Surface } from "../draw";
import { engine, tick } from "../engine";
import { Panel } from "./panel";

const MARKS = [0.5, 0.9, 0.99];
const DECADE = [1, 2, 5];

function strip(which: "ttft" | "tpot") {
  return ({ ctx, width, height, ink }: Surface) => {
    const values = engine.times()[which];
    const sorted = [...values].sort((a, b) => a - b);
    const base = height - 14;
    ctx.font = `10px ${FONT}`;
    ctx.fillStyle = ink.line;
    ctx.fillRect(0, base, width, 1);
    if (!sorted.length) return;
    const low = Math.log10(Math.max(1e-5, sorted[0]! * 0.8));
    const high = Math.max(low + 0.5, Math.log10(sorted.at(-1)! * 1.25));
    const x = (value: number) => 6 + ((width - 12) * (Math.log10(Math.max(value, 1e-5)) - low)) / (high - low);
    ctx.fillStyle = ink.quiet;
    ctx.textAlign = "center";
    ctx.textBaseline = "alphabetic";
    let free = -Infinity;
    for (let power = Math.floor(low); power <= high; power++)
      for (const digit of DECADE) {
        const at = digit * 10 ** power;
        const wide = ctx.measureText(time(at)).width;
        if (x(at) - wide / 2 < Math.max(free + 8, 0) || x(at) + wide / 2 > width) continue;
        ctx.fillText(time(at), x(at), height - 2);
        ctx.fillRect(x(at), base, 1, 3);
        free = x(at) + wide / 2;
      }
    ctx.fillStyle = which === "ttft" ? ink.read : ink.write;
    ctx.globalAlpha = 0.5;
    values.forEach((value, i) => {
      const y = 4 + ((i * 0.618034) % 1) * (base - 10);
      ctx.beginPath();
      ctx.arc(x(value), y, 2, 0, 7);
      ctx.fill();
    });
    ctx.globalAlpha = 1;
    ctx.fillStyle = ink.ink;
    for (const q of MARKS) ctx.fillRect(x(quantile(sorted, q)!) - 0.75, q === 0.5 ? 0 : base * 0.35, 1.5, q === 0.5 ? base : base * 0.65);
  };
}

const STRIPS = { ttft: strip("ttft"), tpot: strip("tpot") };

function Line({ which, name, words }: { which: "ttft" | "tpot"; name: string; words: string }): JSX.Element {
  const sorted = engine.times()[which].sort((a, b) => a - b);
  return (
    <div class="times">
      <h3>
        {name} <small>{words}</small>
      </h3>
      <p class="num">
        {MARKS.map((q) => (
          <span key={q}>
            <small>p{q * 100}</small> {time(quantile(sorted, q))}
          </span>
        ))}
      </p>
      <Canvas label={`${name} of the latest ${sorted.length} sequences`} height={52} draw={STRIPS[which]} when={() => tick.value} />
    </div>
  );
}

export function Latency(): JSX.Element {
  void tick.value;
  return (
    <Panel
      id="latency"
      title="How long people wait"
      explain={<>Each dot is one of the latest sequences; the bars are the median and the slowest tenth and hundredth.</>}
    >
      <Line which="ttft" name="TTFT" words="from asking to the first token" />
      <Line which="tpot" name="TPOT" words="from token to token" />
    </Panel>
  );
}
