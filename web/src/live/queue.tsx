/** Who waits, for how long, and why. */
import type { JSX } from "preact";
import { time } from "../draw";
import { engine, pointed, tick, type Waiting } from "../engine";
import { isMine, title } from "./about";
import { Panel } from "./panel";

function why(one: Waiting): string {
  const of = engine.seqs.get(one.detail);
  switch (one.why) {
    case "twin":
      return of ? `${title(of)} is computing the prompt they share` : "another computes the prompt they share";
    case "rows":
      return `all ${engine.about?.max_rows ?? ""} rows are taken`;
    case "tokens":
      return "this step’s tokens are spent";
    case "blocks":
      return `${one.detail} blocks needed; the rest is kept for those that run`;
    case "time":
      return "promises to running streams leave no time";
    case "group":
      return "static batching: the group must end first";
    case "preemption":
      return "somebody has just had to make way";
    default:
      return one.detail > 0 ? `its turn: ${one.detail} before it` : "joins at the next step";
  }
}

export function Queue(): JSX.Element {
  void tick.value;
  const more = engine.waiting - engine.queue.length;
  return (
    <Panel
      id="queue"
      title="Waiting"
      explain={<>Who has no place in the batch yet, and what for. Order: <em>{engine.about?.policy ?? "…"}</em>.</>}
      aside={<b class="number">{engine.waiting}</b>}
    >
      {engine.queue.length === 0 ? (
        <p class="empty">Nobody waits. Who comes now joins at the next step.</p>
      ) : (
        <ol class="waiting">
          {engine.queue.map((one) => (
            <li
              key={one.id}
              class={pointed.value === one.id ? "pointed" : ""}
              onPointerEnter={() => (pointed.value = one.id)}
              onPointerLeave={() => (pointed.value = null)}
            >
              <b class={isMine(one) ? "mine" : ""}>{isMine(one) ? "yours" : title(one)}</b>
              <span class="num">{one.tokens} tok</span>
              <span class="num">{time(one.waited)}</span>
              <span class="why">
                {why(one)}
                {one.preemptions > 0 && " (made way before)"}
              </span>
            </li>
          ))}
          {more > 0 && <li class="more">and {more} more</li>}
        </ol>
      )}
    </Panel>
  );
}
