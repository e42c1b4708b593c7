/** A sequence in words, wherever it is pointed at. */
import type { JSX } from "preact";
import { engine, mine, type Seq } from "../engine";
import { time } from "../draw";

export function title(seq: { name: string; choice: number }): string {
  return seq.choice ? `${seq.name}·${seq.choice + 1}` : seq.name;
}

export function isMine(seq: { name: string } | undefined): boolean {
  return seq !== undefined && mine.value !== "" && mine.value.endsWith(seq.name);
}

export function phase(seq: Seq): "read" | "write" {
  return seq.computed < seq.tokens - 1 ? "read" : "write";
}

export function AboutSeq({ id }: { id: number }): JSX.Element {
  const seq = engine.seqs.get(id);
  if (!seq) return <b>sequence {id}</b>;
  const runs = engine.running.includes(id);
  const table = engine.tables.get(id);
  const written = seq.tokens - seq.prompt;
  return (
    <>
      <b>
        {title(seq)}
        {isMine(seq) ? " · yours" : ""}
      </b>
      <span class={runs ? phase(seq) : "over"}>
        {!runs ? "has ended" : phase(seq) === "read" ? `reads: ${seq.computed} of ${seq.tokens} tokens` : `writes: ${written} so far`}
      </span>
      <span>
        prompt {seq.prompt}
        {seq.cached ? `, ${seq.cached} of them cached` : ""}
      </span>
      {table && <span>{table.length} blocks</span>}
      {seq.first !== null && <span>first token after {time(seq.first - seq.arrival)}</span>}
      {seq.drafted > 0 && (
        <span>
          {seq.accepted} of {seq.drafted} guesses held
        </span>
      )}
      {seq.preemptions > 0 && <span>made way {seq.preemptions === 1 ? "once" : `${seq.preemptions} times`}</span>}
    </>
  );
}
