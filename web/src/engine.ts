/** The engine as the page knows it: frames in, a picture of now and of the latest steps out. */
import { signal } from "@preact/signals";
import { ask, model, Refusal, version as octavo } from "./api";
import { events, type About, type Counters, type EndLine, type Frame, type Hello, type Message, type StepLine } from "./wire";

/** A sequence: one choice of one request. Times on the server's clock, in seconds. */
export interface Seq {
  id: number;
  name: string;
  choice: number;
  prompt: number;
  cached: number;
  computed: number;
  tokens: number;
  most: number;
  preemptions: number;
  drafted: number;
  accepted: number;
  arrival: number;
  first: number | null;
  late: boolean;
}

export interface Waiting {
  id: number;
  name: string;
  choice: number;
  tokens: number;
  preemptions: number;
  waited: number;
  why: string;
  detail: number;
}

/** One step. x0, x1: where it stands on the axis of busy time, on which idle gaps are cut short. */
export interface Step {
  no: number;
  seconds: number;
  predicted: number | null;
  least: number | null;
  ids: number[];
  counts: number[];
  tokens: number;
  cut: boolean;
  x0: number;
  x1: number;
}

/** A sequence's stay in a lane, and the parts of it that are drawn. */
export interface Stay {
  id: number;
  lane: number;
  x0: number;
  x1: number;
  cached: number;
  live: boolean;
  /** prompt tokens read in one step */
  reads: { x0: number; x1: number; count: number }[];
  /** steps in which it wrote a token each, joined together */
  writes: { x0: number; x1: number }[];
  /** steps that carried guesses beside the token */
  guesses: { x0: number; x1: number; count: number }[];
}

export interface Sample {
  at: number;
  written: number;
  read: number;
  running: number;
  waiting: number;
  held: number;
  hit: number | null;
  asked: number;
}

export type Link = "off" | "connecting" | "live" | "lost";

const CUT = 0.25; // seconds: a longer pause between two steps is drawn as a cut
const GAP = 0.06; // seconds of the axis that a cut takes
const STEPS = 12_000;
const KEPT = 30; // seconds of busy time
const SAMPLE = 0.5;
const SAMPLES = 240;
const ENDED = 512;
const EARLY = 8; // tokens after the first from which a running sequence's pace counts
const FREE = -2;

export class Engine {
  about: About | null = null;
  now = 0;
  seqs = new Map<number, Seq>(); // those that run, and some that ran
  running: number[] = [];
  queue: Waiting[] = [];
  waiting = 0;
  counters: Counters = {};
  floored = false;
  tables = new Map<number, number[]>();
  /** Of each block: what precedes it in its prefix; -1 none, -2 it cannot be read. */
  parents = new Int32Array(0);
  /** Of each block: how many sequences hold it. */
  refs = new Uint16Array(0);
  steps: Step[] = [];
  stays: Stay[] = [];
  ended: EndLine[] = [];
  samples: Sample[] = [];
  lanes = 0;
  treeChanged = 0;
  private seats = new Map<number, Stay>();
  private taken: boolean[] = [];
  private lastRows: number[] = [];
  private lastEnd = -1;
  private busy = 0;
  private base: { at: number; counters: Counters } | null = null;

  take(message: Message): void {
    if (message.kind === "hello") this.hello(message);
    else this.frame(message);
  }

  private hello(hello: Hello): void {
    const again = (hello.counters?.["steps"] ?? 0) < (this.counters["steps"] ?? 0);
    if (again || this.about?.model !== hello.model || this.about.num_blocks !== hello.num_blocks) this.forget();
    const { version, model, octavo, policy, block_size, num_blocks, max_rows, max_tokens, max_context, prefix_caching, chat } = hello;
    this.about = { version, model, octavo, policy, block_size, num_blocks, max_rows, max_tokens, max_context, prefix_caching, chat };
    this.tables.clear();
    this.parents = new Int32Array(num_blocks).fill(FREE);
    this.refs = new Uint16Array(num_blocks);
    this.ended = [];
    this.base = null;
    this.lastRows = [];
    this.change(hello);
    if (hello.rows) this.moment(hello as unknown as Frame);
  }

  private forget(): void {
    this.seqs.clear();
    this.steps = [];
    this.stays = [];
    this.samples = [];
    this.seats.clear();
    this.taken = [];
    this.lastEnd = -1;
    this.busy = 0;
    this.counters = {};
  }

  private frame(frame: Frame): void {
    this.now = frame.now;
    for (const row of frame.rows) this.learn(row);
    for (const line of frame.steps) this.step(line);
    this.change(frame);
    this.moment(frame);
    this.trim();
  }

  private change(message: { tables: [number, number[]][]; parents: [number, number][]; ended: EndLine[] }): void {
    for (const [id, table] of message.tables) this.tables.set(id, table);
    for (const [block, parent] of message.parents) this.parents[block] = parent;
    if (message.parents.length || message.tables.length) this.treeChanged++;
    this.ended.push(...message.ended);
    if (this.ended.length > ENDED) this.ended.splice(0, this.ended.length - ENDED);
  }

  private learn(row: Frame["rows"][number]): void {
    const [id, name, choice, prompt, cached, computed, tokens, most, preemptions, drafted, accepted, arrival, first, late] = row;
    this.seqs.set(id, { id, name, choice, prompt, cached, computed, tokens, most, preemptions, drafted, accepted, arrival, first, late: late === 1 });
  }

  private moment(frame: Frame): void {
    this.now = frame.now;
    for (const row of frame.rows) this.learn(row);
    this.running = frame.rows.map((row) => row[0]);
    this.waiting = frame.waiting;
    this.queue = frame.queue.map(([id, name, choice, tokens, preemptions, waited, why, detail]) => ({
      id, name, choice, tokens, preemptions, waited, why, detail,
    }));
    this.counters = frame.counters;
    this.floored = frame.floored;
    const runs = new Set(this.running);
    for (const id of this.tables.keys()) if (!runs.has(id)) this.tables.delete(id);
    this.refs.fill(0);
    for (const table of this.tables.values()) for (const block of table) this.refs[block]!++;
    for (const [id, stay] of this.seats) {
      if (runs.has(id)) stay.x1 = Math.max(stay.x1, this.busy);
      else this.leave(stay);
    }
    this.sample();
  }

  private step([no, started, seconds, predicted, least, rows]: StepLine): void {
    const pairs = rows === 0 ? this.lastRows : rows;
    this.lastRows = pairs;
    const pause = this.lastEnd < 0 ? 0 : Math.max(0, started - this.lastEnd);
    const cut = pause > CUT;
    const x0 = this.busy + (cut ? GAP : pause);
    const x1 = x0 + Math.max(seconds, 1e-4);
    this.lastEnd = started + seconds;
    this.busy = x1;
    const step: Step = { no, seconds, predicted, least, ids: [], counts: [], tokens: 0, cut, x0, x1 };
    const present = new Set<number>();
    for (let i = 0; i < pairs.length; i += 2) {
      const id = pairs[i]!;
      const count = pairs[i + 1]!;
      present.add(id);
      step.ids.push(id);
      step.counts.push(count);
      step.tokens += Math.abs(count);
    }
    for (const [id, stay] of this.seats) if (!present.has(id) && !this.seqs.has(id)) this.leave(stay);
    for (let i = 0; i < step.ids.length; i++) this.row(step.ids[i]!, step.counts[i]!, step);
    this.steps.push(step);
  }

  private row(id: number, count: number, step: Step): void {
    const stay = this.seats.get(id) ?? this.enter(id, step.x0);
    stay.x1 = step.x1;
    if (count > 1) {
      stay.reads.push({ x0: step.x0, x1: step.x1, count });
      return;
    }
    const last = stay.writes.at(-1);
    if (last && step.x0 - last.x1 < GAP * 0.9 && !step.cut && (stay.reads.at(-1)?.x0 ?? -1) < last.x1 - 1e-6) last.x1 = step.x1;
    else stay.writes.push({ x0: step.x0, x1: step.x1 });
    if (count < 0) stay.guesses.push({ x0: step.x0, x1: step.x1, count: -count - 1 });
  }

  private enter(id: number, x0: number): Stay {
    let lane = this.taken.indexOf(false);
    if (lane < 0) lane = this.taken.length;
    this.taken[lane] = true;
    const stay: Stay = { id, lane, x0, x1: x0, cached: this.seqs.get(id)?.cached ?? 0, live: true, reads: [], writes: [], guesses: [] };
    this.seats.set(id, stay);
    this.stays.push(stay);
    return stay;
  }

  private leave(stay: Stay): void {
    stay.live = false;
    this.seats.delete(stay.id);
    this.taken[stay.lane] = false;
    while (this.taken.length && !this.taken.at(-1)) this.taken.pop();
  }

  private trim(): void {
    const from = this.busy - KEPT;
    if (this.steps.length > STEPS || (this.steps[0] && this.steps[0].x1 < from - 5)) {
      this.steps = this.steps.filter((step) => step.x1 >= from).slice(-STEPS);
      this.stays = this.stays.filter((stay) => stay.live || stay.x1 >= from);
      for (const stay of this.stays) {
        if (stay.x0 >= from) continue;
        stay.reads = stay.reads.filter((part) => part.x1 >= from);
        stay.writes = stay.writes.filter((part) => part.x1 >= from);
        stay.guesses = stay.guesses.filter((part) => part.x1 >= from);
      }
    }
    if (this.seqs.size > 4000) {
      const needed = new Set([...this.running, ...this.stays.map((stay) => stay.id)]);
      for (const id of this.seqs.keys()) if (!needed.has(id)) this.seqs.delete(id);
    }
  }

  /** Rates over the last half second, for the small curves. */
  private sample(): void {
    const base = this.base;
    if (base === null || this.now < base.at) {
      this.base = { at: this.now, counters: this.counters };
      return;
    }
    const seconds = this.now - base.at;
    if (seconds < SAMPLE) return;
    const since = (name: string) => (this.counters[name] ?? 0) - (base.counters[name] ?? 0);
    const prompt = since("prompt_tokens");
    const written = since("output_tokens");
    this.samples.push({
      at: this.now,
      written: written / seconds,
      read: Math.max(0, since("computed_tokens") - written - since("drafted_tokens") + since("accepted_tokens")) / seconds,
      running: this.running.length,
      waiting: this.waiting,
      held: this.held,
      hit: prompt > 0 ? since("cached_tokens") / prompt : null,
      asked: since("added") / seconds,
    });
    if (this.samples.length > SAMPLES) this.samples.shift();
    this.base = { at: this.now, counters: this.counters };
  }

  // ---- questions ----

  get end(): number {
    return this.busy;
  }

  get held(): number {
    let count = 0;
    for (const refs of this.refs) if (refs) count++;
    return count;
  }

  /** How many blocks are free, of one sequence, of several, and kept for whoever begins alike. */
  blocks(): { free: number; own: number; shared: number; cached: number; saved: number } {
    const found = { free: 0, own: 0, shared: 0, cached: 0, saved: 0 };
    for (let i = 0; i < this.refs.length; i++) {
      const refs = this.refs[i]!;
      if (refs === 1) found.own++;
      else if (refs > 1) {
        found.shared++;
        found.saved += refs - 1;
      } else if (this.parents[i]! !== FREE) found.cached++;
      else found.free++;
    }
    return found;
  }

  laneOf(id: number): number | undefined {
    return this.seats.get(id)?.lane;
  }

  stayIn(lane: number, x: number): Stay | undefined {
    return this.stays.findLast((stay) => stay.lane === lane && stay.x0 <= x && (stay.x1 >= x || stay.live));
  }

  occupants(): Stay[] {
    return [...this.seats.values()];
  }

  holders(block: number): number[] {
    const found: number[] = [];
    for (const [id, table] of this.tables) if (table.includes(block)) found.push(id);
    return found;
  }

  /** Times to the first token, and for each one after it, of those of late. */
  times(): { ttft: number[]; tpot: number[] } {
    const ttft: number[] = [];
    const tpot: number[] = [];
    for (const [, first, each] of this.ended.slice(-256)) {
      if (first !== null) ttft.push(first);
      if (each !== null) tpot.push(each);
    }
    for (const id of this.running) {
      const seq = this.seqs.get(id)!;
      if (seq.first === null) continue;
      ttft.push(seq.first - seq.arrival);
      const after = seq.tokens - seq.prompt - 1;
      if (after >= EARLY) tpot.push((this.now - seq.first) / after);
    }
    return { ttft, tpot };
  }
}

export const engine = new Engine();
/** Counts frames: what draws the engine looks at it. */
export const tick = signal(0);
export const link = signal<Link>("off");
export const trouble = signal("");
/** The sequence that is pointed at, wherever on the page. */
export const pointed = signal<number | null>(null);
/** The request that the chat waits for, as the engine names it. */
export const mine = signal("");
export const paused = signal(false);

const FORBIDDEN = 60_000;
let round = 0; // odd: watching
let abort: AbortController | null = null;
let wake: () => void = () => undefined;

/** Watch, or do not: a hidden page costs the server nothing. */
export function watch(on: boolean): void {
  if (on === (round % 2 === 1)) return;
  round++;
  abort?.abort();
  if (on) void keepWatching(round);
  else link.value = "off";
}

/** Try again now, e.g. with another key. */
export function rewatch(): void {
  abort?.abort();
  wake();
}

async function keepWatching(own: number): Promise<void> {
  let pause = 500;
  link.value = "connecting";
  while (own === round) {
    const stop = (abort = new AbortController());
    try {
      const answer = await ask("v1/engine/live", { signal: stop.signal });
      for await (const data of events(answer.body!)) {
        take(JSON.parse(data) as Message);
        pause = 500;
      }
      trouble.value = "the server ended the stream";
    } catch (error) {
      trouble.value = error instanceof Refusal ? error.message : "the server cannot be reached";
      if (stop.signal.aborted) pause = 0;
      // A key that may not watch will not be allowed to a moment later.
      if (error instanceof Refusal && error.status === 403) pause = FORBIDDEN;
    }
    if (own !== round) break;
    link.value = "lost";
    await new Promise<void>((done) => {
      wake = done;
      setTimeout(done, pause);
    });
    pause = pause === FORBIDDEN ? 500 : Math.min(Math.max(pause, 250) * 2, 5000);
  }
}

function take(message: Message): void {
  engine.take(message);
  if (engine.about) {
    model.value = engine.about.model;
    octavo.value = engine.about.octavo;
  }
  link.value = "live";
  trouble.value = "";
  if (!paused.value) tick.value++;
}
