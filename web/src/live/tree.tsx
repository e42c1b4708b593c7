/** The prefix cache as the tree it is: what begins alike has the same blocks. */
import { signal } from "@preact/signals";
import type { JSX } from "preact";
import { useRef } from "preact/hooks";
import { Canvas, FONT, hatch, type Point, type Surface } from "../draw";
import { engine, pointed, tick } from "../engine";
import { title } from "./about";
import { Panel } from "./panel";
import { tip, tipAt } from "../tip";

const TALL = 236;
const LEAF = 13;
const MOST = Math.floor(TALL / LEAF);

/** Consecutive blocks with the same holders and no branch between them. */
interface Node {
  blocks: number[];
  depth: number;
  refs: number;
  kids: Node[];
  leaves: number;
  weight: number;
}

interface Placed {
  node: Node;
  x: number;
  y: number;
  w: number;
  h: number;
}

let roots: Node[] = [];
let rootsOf = -1;
let placed: Placed[] = [];
let hidden = { branches: 0, blocks: 0 };
const chosen = signal<Node | null>(null);

function grow(): void {
  if (rootsOf === engine.treeChanged) return;
  rootsOf = engine.treeChanged;
  const kids = new Map<number, number[]>();
  for (let block = 0; block < engine.parents.length; block++) {
    const parent = engine.parents[block]!;
    if (parent === -2) continue;
    const own = kids.get(parent);
    if (own) own.push(block);
    else kids.set(parent, [block]);
  }
  const build = (start: number, depth: number): Node => {
    const blocks = [start];
    const refs = engine.refs[start]!;
    let next = kids.get(start) ?? [];
    while (next.length === 1 && engine.refs[next[0]!]! === refs) {
      blocks.push(next[0]!);
      next = kids.get(next[0]!) ?? [];
    }
    const under = next.map((block) => build(block, depth + blocks.length)).sort(first);
    const weight = Math.max(refs, ...under.map((kid) => kid.weight));
    return { blocks, depth, refs, kids: under, weight, leaves: under.reduce((sum, kid) => sum + kid.leaves, 0) || 1 };
  };
  roots = (kids.get(-1) ?? []).map((block) => build(block, 0)).sort(first);
}

/** What is in use stands above what is only kept, and big trees above small ones. */
function first(a: Node, b: Node): number {
  return Math.sign(b.weight) - Math.sign(a.weight) || b.leaves - a.leaves || a.blocks[0]! - b.blocks[0]!;
}

/** Give each branch lines until they are spent; what gets none is counted. */
function place(width: number): void {
  placed = [];
  hidden = { branches: 0, blocks: 0 };
  const deepest = (node: Node): number => Math.max(node.depth + node.blocks.length, ...node.kids.map(deepest));
  const depth = Math.max(8, ...roots.map(deepest));
  const scale = width / depth;
  let line = 0;
  const put = (node: Node): number => {
    if (line >= MOST) {
      hide(node);
      return 0;
    }
    const top = line;
    const mine: Placed = { node, x: node.depth * scale, y: top * LEAF, w: node.blocks.length * scale, h: LEAF };
    placed.push(mine);
    for (const kid of node.kids) put(kid);
    if (line === top) line++;
    mine.h = (line - top) * LEAF;
    return line - top;
  };
  const hide = (node: Node) => {
    hidden.branches += node.leaves;
    const sum = (one: Node): number => one.blocks.length + one.kids.reduce((total, kid) => total + sum(kid), 0);
    hidden.blocks += sum(node);
  };
  for (const root of roots) put(root);
}

function draw({ ctx, width, ink }: Surface): void {
  grow();
  place(width);
  const own = new Set(pointed.value === null ? [] : engine.tables.get(pointed.value));
  const size = engine.about?.block_size ?? 32;
  ctx.font = `10.5px ${FONT}`;
  ctx.textBaseline = "middle";
  ctx.textAlign = "left";
  for (const { node, x, y, w, h } of placed) {
    const [left, top, wide, tall] = [x + 0.5, y + 0.5, Math.max(1.5, w - 1.5), h - 1.5];
    ctx.globalAlpha = own.size > 0 && !node.blocks.some((block) => own.has(block)) ? 0.3 : 1;
    ctx.fillStyle = node.refs > 1 ? ink.sharedSoft : node.refs === 1 ? ink.writeSoft : ink.cachedSoft;
    ctx.fillRect(left, top, wide, tall);
    const words = node.refs > 1 ? `${node.refs} × ${node.blocks.length * size}` : String(node.blocks.length * size);
    const room = wide > 12 + ctx.measureText(words).width;
    if (!node.refs) hatch(ctx, ink.cached, left, top, wide, tall, 5);
    else {
      ctx.fillStyle = node.refs > 1 ? ink.shared : ink.write;
      ctx.fillRect(left, top, Math.min(3, wide), tall);
    }
    if (room) {
      if (!node.refs) {
        ctx.fillStyle = ink.paper;
        ctx.fillRect(left + 4, top + tall / 2 - 5.5, ctx.measureText(words).width + 5, 11);
      }
      ctx.fillStyle = node.refs ? ink.ink : ink.cached;
      ctx.fillText(words, left + 7, top + tall / 2 + 0.5);
    }
    if (chosen.value?.blocks[0] === node.blocks[0]) {
      ctx.globalAlpha = 1;
      ctx.strokeStyle = ink.ink;
      ctx.lineWidth = 1.5;
      ctx.strokeRect(left, top, wide, tall);
    }
  }
  ctx.globalAlpha = 1;
}

function AboutNode({ node }: { node: Node }): JSX.Element {
  const size = engine.about!.block_size;
  const holders = engine.holders(node.blocks[0]!);
  const from = node.depth * size;
  return (
    <>
      <b>
        tokens {from} to {from + node.blocks.length * size - 1}
      </b>
      <span>{node.blocks.length} blocks, computed once</span>
      <span>
        {holders.length > 1
          ? `${holders.length} sequences read them: ${(holders.length - 1) * node.blocks.length} blocks saved`
          : holders.length === 1
            ? `held by ${title(engine.seqs.get(holders[0]!)!)}`
            : "nobody has them now; whoever begins alike gets them"}
      </span>
    </>
  );
}

export function Tree(): JSX.Element {
  void tick.value;
  const box = useRef<HTMLDivElement>(null);
  const about = engine.about;
  grow();
  const height = Math.max(5, Math.min(MOST, roots.reduce((sum, root) => sum + root.leaves, 0))) * LEAF + 1;
  const cached = engine.counters["cached_tokens"] ?? 0;

  const point = (at: Point | null) => {
    const hit = at && placed.find(({ x, y, w, h }) => at.x >= x && at.x < x + Math.max(w, 3) && at.y >= y && at.y < y + h);
    if (!at || !hit) {
      chosen.value = pointed.value = tip.value = null;
      return;
    }
    chosen.value = hit.node;
    const holders = engine.holders(hit.node.blocks[0]!);
    pointed.value = holders.length === 1 ? holders[0]! : null;
    tipAt(box.current, at.x, at.y, <AboutNode node={hit.node} />);
  };

  return (
    <Panel
      id="tree"
      title="What begins alike"
      explain={
        <>
          <em>Prefix caching.</em> Texts that begin with the same tokens have the same first blocks: computed once, <i class="key shared">shared</i> while
          several use them, <i class="key cached">kept</i> after, until the room is needed.
        </>
      }
      aside={<span>{cached.toLocaleString("en")} tokens not computed again</span>}
    >
      <div ref={box} class="stage">
        <Canvas
          label={`Prefix tree of ${roots.length} beginnings`}
          height={height}
          draw={draw}
          point={point}
          stride={{ x: 10, y: LEAF }}
          when={() => [tick.value, pointed.value, chosen.value]}
        />
        {!roots.length && (
          <p class="empty">{about && !about.prefix_caching ? "The prefix cache is off." : "No full block has been computed yet."}</p>
        )}
      </div>
      <p class="legend">
        <span>left to right: the text’s tokens; a branch: where texts part</span>
        {hidden.branches > 0 && <span>{hidden.branches} more branches with {hidden.blocks} blocks</span>}
      </p>
    </Panel>
  );
}
