/** The KV pool, block by block. */
import { signal } from "@preact/signals";
import type { JSX } from "preact";
import { useRef } from "preact/hooks";
import { Canvas, FONT, hatch, share, type Point, type Surface } from "../draw";
import { engine, pointed, tick } from "../engine";
import { AboutSeq, title } from "./about";
import { Panel } from "./panel";
import { tip, tipAt } from "../tip";

const TALL = 236; // pixels at most
const pitch = signal({ cell: 14, columns: 1, rows: 1, group: 1, height: 120, blocks: 0 });
const chosen = signal<number | null>(null);

/** How many blocks are drawn: a large pool's end, which nobody has needed yet, is only counted. */
function needed(): number {
  const all = engine.refs.length;
  let top = all;
  while (top > 0 && !engine.refs[top - 1] && engine.parents[top - 1] === -2) top--;
  let shown = 192;
  while (shown < top * 1.05) shown *= 1.5;
  return Math.min(all, Math.ceil(Math.max(shown, pitch.peek().blocks)));
}

/** The largest cells with which all blocks fit; if even small ones do not, a cell is several. */
function lay(width: number, blocks: number): void {
  let cell = 18;
  let group = 1;
  const rows = () => Math.ceil(Math.ceil(blocks / group) / Math.max(1, Math.floor(width / cell)));
  while (rows() * cell > TALL) {
    if (cell > 5) cell--;
    else group++;
  }
  const next = { cell, columns: Math.max(1, Math.floor(width / cell)), rows: rows(), group, height: rows() * cell + 1, blocks };
  if (JSON.stringify(next) !== JSON.stringify(pitch.peek())) pitch.value = next;
}

function draw({ ctx, width, ink }: Surface): void {
  const blocks = needed();
  if (!blocks) return;
  lay(width, blocks);
  const { cell, columns, group } = pitch.peek();
  const side = cell - (cell > 7 ? 2 : 1);
  const own = new Set(pointed.value === null ? [] : engine.tables.get(pointed.value));
  const dim = own.size > 0;
  const shadeOf = new Map<number, number>();
  let shade = 0;
  for (const table of engine.tables.values()) {
    for (const block of table) shadeOf.set(block, shade);
    shade = (shade + 1) % 2;
  }
  ctx.font = `${Math.min(10, side - 3)}px ${FONT}`;
  ctx.textAlign = "center";
  ctx.textBaseline = "middle";
  for (let at = 0; at * group < blocks; at++) {
    const block = busiest(at * group, Math.min(blocks, (at + 1) * group));
    const x = (at % columns) * cell;
    const y = Math.floor(at / columns) * cell;
    const refs = engine.refs[block]!;
    ctx.globalAlpha = dim && !own.has(block) ? 0.3 : 1;
    if (refs > 0) {
      ctx.fillStyle = refs > 1 ? ink.shared : ink.write;
      if (refs === 1 && shadeOf.get(block)) ctx.globalAlpha *= 0.72;
      ctx.fillRect(x, y, side, side);
      if (refs > 1 && side >= 11) {
        ctx.fillStyle = ink.paper;
        ctx.fillText(String(refs), x + side / 2, y + side / 2 + 0.5);
      }
    } else if (engine.parents[block]! !== -2) {
      ctx.fillStyle = ink.cachedSoft;
      ctx.fillRect(x, y, side, side);
      if (side >= 5) hatch(ctx, ink.cached, x, y, side, side, 4);
    } else {
      ctx.fillStyle = ink.free;
      ctx.fillRect(x, y, side, side);
    }
    if (chosen.value !== null && Math.floor(chosen.value / group) === at) {
      ctx.globalAlpha = 1;
      ctx.strokeStyle = ink.ink;
      ctx.lineWidth = 1.5;
      ctx.strokeRect(x - 0.5, y - 0.5, side + 1, side + 1);
    }
  }
  ctx.globalAlpha = 1;
}

/** Of the blocks that share a cell, the one that says most. */
function busiest(from: number, to: number): number {
  let best = from;
  for (let block = from + 1; block < to; block++) {
    const better = engine.refs[block]! - engine.refs[best]! || engine.parents[block]! - engine.parents[best]!;
    if (better > 0) best = block;
  }
  return best;
}

function AboutBlock({ block }: { block: number }): JSX.Element {
  const size = engine.about!.block_size;
  const holders = engine.holders(block);
  const readable = engine.parents[block]! !== -2;
  if (!holders.length)
    return (
      <>
        <b>block {block}</b>
        <span>{readable ? "cached: whoever begins alike may have it; else the longest unused goes first" : "free"}</span>
      </>
    );
  const place = engine.tables.get(holders[0]!)!.indexOf(block);
  return (
    <>
      <b>block {block}</b>
      <span>
        tokens {place * size} to {(place + 1) * size - 1}
        {holders.length > 1 ? ` of ${holders.length} sequences` : ""}
      </span>
      {holders.length === 1 ? <AboutSeq id={holders[0]!} /> : <span>{holders.slice(0, 8).map((id) => title(engine.seqs.get(id)!)).join(", ")}{holders.length > 8 ? ", …" : ""}</span>}
    </>
  );
}

export function Memory(): JSX.Element {
  void tick.value;
  const box = useRef<HTMLDivElement>(null);
  const { own, shared, cached, free, saved } = engine.blocks();
  const about = engine.about;
  const all = about?.num_blocks ?? 0;

  const point = (at: Point | null) => {
    const { cell, columns, group } = pitch.value;
    const index = at ? (Math.floor(at.y / cell) * columns + Math.min(columns - 1, Math.floor(at.x / cell))) * group : -1;
    if (!at || index < 0 || index >= pitch.value.blocks) {
      chosen.value = pointed.value = tip.value = null;
      return;
    }
    const block = busiest(index, Math.min(all, index + group));
    chosen.value = block;
    const holders = engine.holders(block);
    pointed.value = holders.length === 1 ? holders[0]! : null;
    tipAt(box.current, at.x, at.y, <AboutBlock block={block} />);
  };

  return (
    <Panel
      id="memory"
      title="Memory, in blocks"
      explain={
        <>
          <em>Paging.</em> What a model remembers of a text lies in blocks of {about?.block_size ?? 32} tokens. A sequence takes one when it needs one,
          wherever one is free: nothing is set aside for what may never be written.
        </>
      }
      aside={about && <span>{(all * about.block_size).toLocaleString("en")} tokens in {all.toLocaleString("en")} blocks</span>}
    >
      <div ref={box} class="stage">
        <Canvas
          label={`${own} blocks held by one sequence, ${shared} shared, ${cached} cached, ${free} free`}
          height={pitch.value.height}
          draw={draw}
          point={point}
          stride={{ x: pitch.value.cell, y: pitch.value.cell }}
          when={() => [tick.value, pointed.value, chosen.value, pitch.value]}
        />
      </div>
      <p class="legend">
        <span><i class="box write" /> {own} of one sequence</span>
        <span><i class="box shared" /> {shared} shared{saved > 0 && `, ${saved} saved`}</span>
        <span><i class="box cached" /> {cached} cached</span>
        <span><i class="box free" /> {free} free ({share(free, all)})</span>
        {pitch.value.blocks < all && <span>not drawn: {(all - pitch.value.blocks).toLocaleString("en")} that nobody has needed yet</span>}
        {pitch.value.group > 1 && <span>a square is {pitch.value.group} blocks</span>}
      </p>
    </Panel>
  );
}
