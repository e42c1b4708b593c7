/** The batch through time: lanes of sequences above, how long each step took below, on one axis. */
import { signal } from "@preact/signals";
import type { JSX } from "preact";
import { useRef } from "preact/hooks";
import { Canvas, FONT, hatch, quantile, roundUp, time, type Point, type Surface } from "../draw";
import { engine, paused, pointed, tick, type Step } from "../engine";
import { AboutSeq, isMine, phase, title } from "./about";
import { Panel } from "./panel";
import { tip, tipAt } from "../tip";

const LANES = 8; // at least
const AXIS = 18; // pixels below
const CHART = 96;
const PAD = 10; // between lanes and chart
const HEAD = 14; // above the lanes
const WINDOWS = [1, 2, 4, 8, 16];

export const seconds = signal(4);
const size = signal({ lanes: LANES, pitch: 18 });

export function zoom(by: 1 | -1): void {
  const at = WINDOWS.indexOf(seconds.value) + by;
  seconds.value = WINDOWS[Math.min(Math.max(at, 0), WINDOWS.length - 1)]!;
}

interface Frame {
  left: number;
  right: number;
  top: number;
  bottom: number;
  from: number;
  scale: number;
}

let held = LANES; // lanes shrink only after a while

function frameOf(width: number, height: number): Frame {
  const left = width < 560 ? 74 : 132;
  const right = width - 4;
  return { left, right, top: HEAD, bottom: height - CHART - AXIS - PAD, from: engine.end - seconds.value, scale: (right - left) / seconds.value };
}

function plan(): void {
  const seen = engine.stays.reduce((most, stay) => (stay.x1 > engine.end - seconds.value ? Math.max(most, stay.lane + 1) : most), LANES);
  held = seen > held ? seen : Math.max(seen, held - 1);
  const pitch = held <= 12 ? 18 : held <= 20 ? 14 : held <= 36 ? 10 : Math.max(4, Math.floor(360 / held));
  if (size.value.lanes !== held || size.value.pitch !== pitch) size.value = { lanes: held, pitch };
}

function draw({ ctx, width, height, ink }: Surface, at: Point | null): void {
  const f = frameOf(width, height);
  const { lanes, pitch } = size.value;
  const x = (value: number) => f.left + (value - f.from) * f.scale;
  ctx.font = `10.5px ${FONT}`;
  ctx.textBaseline = "middle";
  for (let lane = 0; lane < lanes; lane++) {
    ctx.fillStyle = ink.faint;
    ctx.fillRect(f.left, f.top + lane * pitch + pitch / 2, f.right - f.left, 1);
  }
  ctx.save();
  ctx.beginPath();
  ctx.rect(f.left, 0, f.right - f.left, height);
  ctx.clip();
  drawStays(ctx, f, x, ink);
  drawSteps(ctx, f, x, height, ink, at);
  ctx.restore();
  drawLabels(ctx, f, ink);
  drawAxis(ctx, f, height, ink);
}

function drawStays(ctx: CanvasRenderingContext2D, f: Frame, x: (value: number) => number, ink: Surface["ink"]): void {
  const { pitch } = size.value;
  const tall = Math.max(3, pitch - (pitch > 8 ? 3 : 1));
  const thin = Math.max(2, Math.round(tall * 0.5));
  const chosen = pointed.value;
  for (const stay of engine.stays) {
    if (stay.x1 < f.from) continue;
    const top = f.top + stay.lane * pitch + (pitch - tall) / 2;
    const middle = top + (tall - thin) / 2;
    const dim = chosen !== null && chosen !== stay.id;
    ctx.globalAlpha = dim ? 0.28 : 1;
    const end = Math.max(x(stay.x1), x(stay.x0) + 2);
    ctx.fillStyle = ink.writeSoft;
    ctx.fillRect(x(stay.x0), middle, end - x(stay.x0), thin);
    ctx.fillStyle = ink.write;
    for (const run of stay.writes) {
      if (run.x1 >= f.from) ctx.fillRect(x(run.x0), middle, Math.max(1, x(run.x1) - x(run.x0)), thin);
    }
    for (const run of stay.guesses) {
      if (run.x1 >= f.from) ctx.fillRect(x(run.x0), top, Math.max(1, x(run.x1) - x(run.x0) - 0.5), tall);
    }
    for (const part of stay.reads) {
      if (part.x1 < f.from) continue;
      const wide = Math.max(2, x(part.x1) - x(part.x0) - 0.75);
      ctx.fillStyle = ink.read;
      ctx.fillRect(x(part.x0), top, wide, tall);
      const text = String(part.count);
      if (wide > 8 + text.length * 6 && pitch >= 12) {
        ctx.fillStyle = ink.paper;
        ctx.textAlign = "center";
        ctx.fillText(text, x(part.x0) + wide / 2, top + tall / 2 + 0.5);
      }
    }
    if (stay.cached > 0 && x(stay.x0) > f.left - 8) {
      const wide = Math.min(16, 4 + Math.sqrt(stay.cached));
      ctx.fillStyle = ink.paper;
      ctx.fillRect(x(stay.x0) - wide, top, wide - 1, tall);
      ctx.fillStyle = ink.cachedSoft;
      ctx.fillRect(x(stay.x0) - wide, top, wide - 1, tall);
      hatch(ctx, ink.cached, x(stay.x0) - wide, top, wide - 1, tall, 3);
    }
    if (!stay.live) {
      ctx.fillStyle = ink.ink;
      ctx.fillRect(end - 1.5, top, 1.5, tall);
    }
  }
  ctx.globalAlpha = 1;
}

function visible(from: number): Step[] {
  const steps = engine.steps;
  let low = 0;
  let high = steps.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle]!.x1 < from) low = middle + 1;
    else high = middle;
  }
  return steps.slice(low);
}

let scaleTop = 0.01;

/** The axis' end: a step far beyond the others is cut, and marked, rather than flatten them all. */
function ceiling(steps: Step[]): number {
  const times = steps.flatMap((step) => [step.seconds, step.predicted ?? 0]).sort((a, b) => a - b);
  const most = times.at(-1) ?? 0;
  return Math.max(1e-4, Math.min(most, 1.6 * (quantile(times, 0.98) ?? 0)) * 1.05);
}

function drawSteps(ctx: CanvasRenderingContext2D, f: Frame, x: (value: number) => number, height: number, ink: Surface["ink"], at: Point | null): void {
  const base = height - AXIS;
  const steps = visible(f.from);
  scaleTop = roundUp(ceiling(steps));
  const y = (value: number) => base - (CHART - 4) * Math.min(1, value / scaleTop);
  ctx.fillStyle = ink.faint;
  ctx.fillRect(f.left, y(scaleTop / 2), f.right - f.left, 1);
  ctx.fillRect(f.left, y(scaleTop), f.right - f.left, 1);
  for (const step of steps) {
    const wide = Math.max(0.5, x(step.x1) - x(step.x0) - (f.scale * step.seconds > 4 ? 1 : 0));
    ctx.fillStyle = step.counts.some((count) => count > 1) ? ink.readSoft : ink.writeSoft;
    ctx.fillRect(x(step.x0), y(step.seconds), wide, base - y(step.seconds));
    if (step.seconds > scaleTop) {
      ctx.fillStyle = ink.warn;
      ctx.fillRect(x(step.x0), y(scaleTop), wide, 2);
    }
    if (step.cut) drawCut(ctx, x(step.x0) - 3, f.top, base, ink);
  }
  line(ctx, steps, x, y, (step) => step.least, ink.cached, 1.5);
  line(ctx, steps, x, y, (step) => step.predicted, ink.ink, 1);
  if (at && at.x >= f.left) {
    const step = steps.find((one) => x(one.x1) >= at.x);
    if (step) {
      ctx.fillStyle = ink.hover;
      ctx.fillRect(x(step.x0), f.top, Math.max(1, x(step.x1) - x(step.x0)), base - f.top);
    }
  }
  ctx.fillStyle = ink.line;
  ctx.fillRect(f.left, base, f.right - f.left, 1);
}

function line(
  ctx: CanvasRenderingContext2D, steps: Step[], x: (v: number) => number, y: (v: number) => number,
  of: (step: Step) => number | null, colour: string, width: number,
): void {
  ctx.strokeStyle = colour;
  ctx.lineWidth = width;
  ctx.beginPath();
  let open = false;
  for (const step of steps) {
    const value = of(step);
    if (value === null || step.cut) open = false;
    if (value === null) continue;
    if (open) ctx.lineTo(x(step.x0), y(value));
    else ctx.moveTo(x(step.x0), y(value));
    ctx.lineTo(x(step.x1), y(value));
    open = true;
  }
  ctx.stroke();
}

function drawCut(ctx: CanvasRenderingContext2D, x: number, top: number, bottom: number, ink: Surface["ink"]): void {
  ctx.strokeStyle = ink.line;
  ctx.lineWidth = 1;
  ctx.setLineDash([2, 3]);
  ctx.beginPath();
  ctx.moveTo(Math.round(x) + 0.5, top);
  ctx.lineTo(Math.round(x) + 0.5, bottom);
  ctx.stroke();
  ctx.setLineDash([]);
}

function drawLabels(ctx: CanvasRenderingContext2D, f: Frame, ink: Surface["ink"]): void {
  const { pitch } = size.value;
  ctx.font = `10px ${FONT}`;
  ctx.fillStyle = ink.quiet;
  ctx.textAlign = "left";
  ctx.fillText(f.left < 100 ? "seq." : "sequence", 0, 6);
  ctx.textAlign = "right";
  ctx.fillText("tokens", f.left - 8, 6);
  const every = pitch >= 10 ? 1 : Math.ceil(10 / pitch);
  ctx.font = `${pitch >= 12 ? 10.5 : 9.5}px ${FONT}`;
  for (const stay of engine.occupants()) {
    const seq = engine.seqs.get(stay.id);
    const y = f.top + stay.lane * pitch + pitch / 2 + 0.5;
    if (!seq || (stay.lane % every && pointed.value !== stay.id)) continue;
    const own = isMine(seq);
    ctx.fillStyle = own ? ink.mine : pointed.value === stay.id ? ink.ink : ink.quiet;
    ctx.textAlign = "left";
    const name = own ? "yours" : title(seq).slice(f.left < 100 ? -4 : -10);
    ctx.fillText(name, 0, y);
    ctx.textAlign = "right";
    const reads = phase(seq) === "read";
    ctx.fillStyle = reads ? ink.read : ink.quiet;
    ctx.fillText(reads ? `${seq.computed}/${seq.tokens}` : String(seq.tokens - seq.prompt), f.left - 8, y);
  }
}

function drawAxis(ctx: CanvasRenderingContext2D, f: Frame, height: number, ink: Surface["ink"]): void {
  const base = height - AXIS;
  ctx.font = `10px ${FONT}`;
  ctx.fillStyle = ink.quiet;
  ctx.textAlign = "right";
  ctx.textBaseline = "middle";
  ctx.fillText(time(scaleTop), f.left - 8, base - CHART + 5);
  ctx.fillText("0", f.left - 8, base - 3);
  ctx.textAlign = "left";
  if (f.left > 100) ctx.fillText("step time", 0, base - CHART + 5);
  ctx.textBaseline = "alphabetic";
  const each = seconds.value / 4;
  for (let i = 0; i <= 4; i++) {
    ctx.textAlign = i === 0 ? "left" : i === 4 ? "right" : "center";
    const words = i === 4 ? "now" : `−${each * (4 - i)} s`;
    ctx.fillText(words, f.left + ((f.right - f.left) * i) / 4, height - 4);
  }
}

function AboutStep({ step }: { step: Step }): JSX.Element {
  const reads = step.counts.filter((count) => count > 1);
  const writes = step.counts.length - reads.length;
  const guesses = step.counts.reduce((sum, count) => sum + (count < 0 ? -count - 1 : 0), 0);
  return (
    <div class="also">
      <b>step {step.no.toLocaleString("en")}</b>
      <span>
        {writes > 0 && `${writes} write`}
        {writes > 0 && reads.length > 0 && ", "}
        {reads.length > 0 && `${reads.length} read ${reads.reduce((a, b) => a + b, 0)} tokens`}
        {guesses > 0 && `, ${guesses} guesses`}
      </span>
      <span>
        {time(step.seconds)}
        {step.predicted !== null && `, predicted ${time(step.predicted)}`}
        {step.least !== null && `, at least ${time(step.least)}`}
      </span>
    </div>
  );
}

/** The latest steps in words: how long, how well foreseen, how near to what the machine can do. */
function Verdict(): JSX.Element | null {
  void tick.value;
  const steps = engine.steps.slice(-64).filter((step) => step.predicted !== null);
  if (!steps.length) return null;
  const sum = (of: (step: Step) => number) => steps.reduce((total, step) => total + of(step), 0);
  const took = sum((step) => step.seconds);
  const off = sum((step) => Math.abs(step.predicted! - step.seconds)) / took;
  const least = steps.every((step) => step.least !== null) ? sum((step) => step.least!) : null;
  return (
    <span class="verdict">
      step {time(took / steps.length)} · forecast off by {Math.round(off * 100)} %
      {least !== null && ` · ${Math.round((100 * least) / took)} % of the machine’s limit`}
    </span>
  );
}

export function Batch(): JSX.Element {
  void tick.value;
  plan();
  const { lanes, pitch } = size.value;
  const height = lanes * pitch + CHART + AXIS + PAD + HEAD;
  const box = useRef<HTMLDivElement>(null);

  const point = (at: Point | null, width: number) => {
    const f = frameOf(width, height);
    if (!at) {
      pointed.value = null;
      tip.value = null;
      return;
    }
    const when = f.from + (at.x - f.left) / f.scale;
    const lane = Math.floor((at.y - f.top) / pitch);
    const inLanes = at.y < f.top + lanes * pitch;
    const stay = !inLanes ? undefined : at.x < f.left ? engine.occupants().find((one) => one.lane === lane) : engine.stayIn(lane, when);
    const step = at.x < f.left ? undefined : visible(f.from).find((one) => one.x1 >= when);
    pointed.value = stay?.id ?? null;
    if (!stay && !step) tip.value = null;
    else
      tipAt(box.current, at.x, at.y, (
        <>
          {stay && <AboutSeq id={stay.id} />}
          {step && <AboutStep step={step} />}
        </>
      ));
  };

  return (
    <Panel
      id="batch"
      title="The batch, step by step"
      explain={
        <>
          <em>Continuous batching.</em> Time runs to the right; a lane is one place in the batch. Each step computes the next token of everybody who
          writes and, beside them, a piece of the prompts that others read. Who ends leaves the place to the next at once: nobody waits for the longest.
        </>
      }
      aside={
        <>
          <Verdict />
          <span class="buttons">
            <button class="plain" onClick={() => zoom(-1)} title="Shorter span ([)" aria-label="Shorter span">−</button>
            <span class="span">{seconds.value} s</span>
            <button class="plain" onClick={() => zoom(1)} title="Longer span (])" aria-label="Longer span">+</button>
            <button class="plain" onClick={() => (paused.value = !paused.value)} aria-pressed={paused.value} title="Hold the picture (p)">
              {paused.value ? "go on" : "hold"}
            </button>
          </span>
        </>
      }
    >
      <p class="legend over">
        <span><i class="lane write" /> writes, a token a step</span>
        <span><i class="lane read" /> reads its prompt</span>
        <span><i class="box cached" /> found in the cache, not read</span>
        <span><i class="tick" /> ended</span>
      </p>
      <div ref={box} class="stage">
        <Canvas
          label={`${engine.running.length} sequences run: ${summary()}`}
          height={height}
          draw={draw}
          point={point}
          stride={{ x: 6, y: pitch }}
          when={() => [tick.value, seconds.value, size.value, pointed.value]}
        />
        {!engine.steps.length && <p class="empty">Nothing has run since this page was opened.</p>}
      </div>
      <p class="legend">
        <span><i class="bar soft" /> how long a step took</span>
        <span><i class="rule ink" /> predicted before it ran</span>
        <span><i class="rule cached" /> {engine.floored ? "the least this machine could need" : "the machine’s limit: measured when nothing runs"}</span>
      </p>
    </Panel>
  );
}

function summary(): string {
  const seqs = engine.running.map((id) => engine.seqs.get(id)!);
  const reads = seqs.filter((seq) => phase(seq) === "read").length;
  return `${seqs.length - reads} write, ${reads} read their prompts, ${engine.waiting} wait`;
}
