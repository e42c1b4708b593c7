/** The numbers that an operator looks at first, each with its last two minutes. */
import type { JSX } from "preact";
import { Canvas, count, quantile, share, time, type Surface } from "../draw";
import { engine, tick, type Sample } from "../engine";

const LATEST = 48; // sequences whose times are drawn
const SPAN = [20, 120] as const; // seconds that a curve shows, at least and at most

function curve(of: (sample: Sample) => number | null, colour: "write" | "read" | "cached" | "quiet", top?: () => number) {
  return ({ ctx, width, height, ink }: Surface) => {
    const samples = engine.samples;
    if (samples.length < 2) return;
    const now = engine.now;
    const span = Math.min(Math.max(now - samples[0]!.at, SPAN[0]), SPAN[1]);
    const most = top ? top() : Math.max(1e-9, ...samples.map((sample) => of(sample) ?? 0));
    ctx.beginPath();
    let first = 0;
    let last = 0;
    let began = false;
    for (const sample of samples) {
      const value = of(sample);
      if (value === null || now - sample.at > span) continue;
      const x = width * (1 - (now - sample.at) / span);
      const y = height - 1 - (height - 3) * Math.min(1, value / most);
      if (began) ctx.lineTo(x, y);
      else ctx.moveTo((first = x), y);
      began = true;
      last = x;
    }
    ctx.strokeStyle = ink[colour];
    ctx.lineWidth = 1.25;
    ctx.lineJoin = "round";
    ctx.stroke();
    ctx.lineTo(last, height);
    ctx.lineTo(first, height);
    ctx.globalAlpha = 0.14;
    ctx.fillStyle = ink[colour];
    ctx.fill();
    ctx.globalAlpha = 1;
  };
}

/** How long the latest ones waited, one after another. */
function latest(which: "ttft" | "tpot", colour: "write" | "read") {
  return ({ ctx, width, height, ink }: Surface) => {
    const values = engine.times()[which].slice(-LATEST);
    if (values.length < 2) return;
    const most = Math.max(1e-9, ...values);
    ctx.fillStyle = ink[colour];
    values.forEach((value, i) => {
      ctx.beginPath();
      ctx.arc(2 + ((width - 4) * i) / (values.length - 1), height - 2 - ((height - 4) * value) / most, 1.4, 0, 7);
      ctx.fill();
    });
  };
}

/** Each with its own unit, as the figure above them has; where there is room for one, the last. */
function pair(p90: number, p99: number): JSX.Element {
  return (
    <>
      <span class="roomy">p90 {time(p90)} · </span>p99 {time(p99)}
    </>
  );
}

interface CellProps {
  name: string;
  value: string;
  unit?: string;
  note: string | JSX.Element;
  draw: (surface: Surface) => void;
}

function Cell({ name, value, unit, note, draw }: CellProps): JSX.Element {
  return (
    <div class="cell">
      <dt>{name}</dt>
      <dd>
        <b>{value}</b>
        {unit && <small> {unit}</small>}
      </dd>
      <Canvas label={`${name}, lately`} height={22} draw={draw} when={() => tick.value} />
      <p>{note}</p>
    </div>
  );
}

const CURVES = {
  written: curve((s) => s.written, "write"),
  read: curve((s) => s.read, "read"),
  running: curve((s) => s.running, "write", () => Math.max(4, ...engine.samples.map((s) => Math.max(s.running, s.waiting)))),
  held: curve((s) => s.held, "write", () => engine.about?.num_blocks ?? 1),
  hit: curve((s) => s.hit, "cached", () => 1),
  asked: curve((s) => s.asked, "quiet"),
  ttft: latest("ttft", "read"),
  tpot: latest("tpot", "write"),
};

/** What went wrong since the server started; answers are counted, of which a request may want several. */
function troubles(): string {
  const said = ["failed", "aborted"].filter((name) => engine.counters[name]).map((name) => `${count(engine.counters[name]!)} ${name}`);
  const refused = engine.counters["refused"];
  if (refused) said.push(`${count(refused)} refused before`);
  return said.join(", ") || "all well";
}

export function Vitals(): JSX.Element {
  void tick.value;
  const about = engine.about;
  const sample = engine.samples.at(-1);
  const fresh = engine.samples.slice(-2);
  const mean = (of: (s: Sample) => number) => (fresh.length ? fresh.reduce((sum, s) => sum + of(s), 0) / fresh.length : 0);
  const { ttft, tpot } = engine.times();
  ttft.sort((a, b) => a - b);
  tpot.sort((a, b) => a - b);
  const tails = (times: number[]) =>
    times.length ? pair(quantile(times, 0.9)!, quantile(times, 0.99)!) : "nobody has come so far";
  const prompts = engine.counters["prompt_tokens"] ?? 0;
  const drafted = engine.counters["drafted_tokens"] ?? 0;
  const held = sample ? engine.held : 0;
  return (
    <dl class="vitals">
      <Cell name="Writes" value={count(mean((s) => s.written))} unit="tok/s" draw={CURVES.written}
        note={drafted ? `${share(engine.counters["accepted_tokens"] ?? 0, drafted)} of guesses held` : "tokens generated"} />
      <Cell name="Reads" value={count(mean((s) => s.read))} unit="tok/s" draw={CURVES.read} note="prompt tokens" />
      <Cell name="Running" value={String(engine.running.length)} unit={about ? `of ${about.max_rows}` : ""} draw={CURVES.running}
        note={engine.waiting ? `${engine.waiting} waiting` : "nobody waits"} />
      <Cell name="First token" value={time(quantile(ttft, 0.5))} unit="p50" draw={CURVES.ttft} note={tails(ttft)} />
      <Cell name="Each token" value={time(quantile(tpot, 0.5))} unit="p50" draw={CURVES.tpot} note={tails(tpot)} />
      <Cell name="Memory held" value={share(held, about?.num_blocks ?? 0)} draw={CURVES.held}
        note={about ? `${count(held)} of ${count(about.num_blocks)} blocks` : ""} />
      <Cell name="Prompts cached" value={share(engine.counters["cached_tokens"] ?? 0, prompts)} draw={CURVES.hit} note={`of ${count(prompts)} tokens`} />
      <Cell name="Answers" value={count(engine.counters["added"] ?? 0)} unit="begun" draw={CURVES.asked} note={troubles()} />
    </dl>
  );
}
