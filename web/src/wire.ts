/** What `/v1/engine/live` sends: `octavo/server/frames.py` writes it, and says what it means. */

/** id, name, choice, prompt, cached, computed, tokens, most, preemptions, drafted, accepted,
 * arrival, first token, late */
export type RowLine = [
  number, string, number, number, number, number, number, number, number, number, number,
  number, number | null, 0 | 1,
];

/** id, name, choice, tokens, preemptions, seconds waited, why, detail */
export type WaitLine = [number, string, number, number, number, number, string, number];

/** number, started, seconds, predicted, least, rows (id, tokens, id, tokens, ...), or 0: as before */
export type StepLine = [number, number, number, number | null, number | null, number[] | 0];

/** finished, ttft, tpot, prompt, output, cached, finish */
export type EndLine = [number, number | null, number | null, number, number, number, string];

export interface About {
  version: number;
  model: string;
  octavo: string;
  policy: string;
  block_size: number;
  num_blocks: number;
  max_rows: number;
  max_tokens: number;
  max_context: number;
  prefix_caching: boolean;
  chat: boolean;
}

export type Counters = Record<string, number>;

export interface Moment {
  now: number;
  rows: RowLine[];
  waiting: number;
  queue: WaitLine[];
  counters: Counters;
  floored: boolean;
}

interface Changes {
  tables: [number, number[]][];
  parents: [number, number][];
  ended: EndLine[];
}

export type Hello = { kind: "hello" } & About & Changes & Partial<Moment>;
export type Frame = { kind: "frame"; steps: StepLine[] } & Changes & Moment;
export type Message = Hello | Frame;

/** The data of server-sent events, one after another, as they come. */
export async function* events(body: ReadableStream<Uint8Array>): AsyncGenerator<string> {
  const reader = body.pipeThrough(new TextDecoderStream() as unknown as TransformStream<Uint8Array, string>).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      rest += value;
      let end: number;
      while ((end = rest.indexOf("\n\n")) >= 0) {
        const block = rest.slice(0, end);
        rest = rest.slice(end + 2);
        const data = block
          .split("\n")
          .filter((line) => line.startsWith("data:"))
          .map((line) => line.slice(5).trimStart())
          .join("\n");
        if (data) yield data;
      }
    }
  } finally {
    void reader.cancel().catch(() => undefined);
  }
}
