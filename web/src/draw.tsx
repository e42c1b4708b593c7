/** A canvas that keeps its size, sharpness and colours, and is drawn when what it shows changes. */
import { effect, signal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import type { JSX } from "preact";

export const theme = signal<"light" | "dark">("light");

export interface Inks {
  paper: string; ink: string; quiet: string; faint: string; line: string; hover: string;
  write: string; writeSoft: string; read: string; readSoft: string; shared: string; sharedSoft: string;
  cached: string; cachedSoft: string; free: string; warn: string; mine: string;
}

const NAMES: (keyof Inks)[] = [
  "paper", "ink", "quiet", "faint", "line", "hover", "write", "writeSoft", "read", "readSoft",
  "shared", "sharedSoft", "cached", "cachedSoft", "free", "warn", "mine",
];
let inks: Inks | null = null;
let inksOf = "";

/** The colours of the style sheet, for canvases. */
export function colours(): Inks {
  if (inks === null || inksOf !== theme.value) {
    const style = getComputedStyle(document.documentElement);
    const read = (name: string) => style.getPropertyValue(`--${name.replace(/[A-Z]/g, (c) => "-" + c.toLowerCase())}`).trim();
    inks = Object.fromEntries(NAMES.map((name) => [name, read(name)])) as unknown as Inks;
    inksOf = theme.value;
  }
  return inks;
}

export const FONT = 'ui-sans-serif, system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif';
export const MONO = 'ui-monospace, "SF Mono", "Cascadia Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace';

export interface Surface {
  ctx: CanvasRenderingContext2D;
  width: number;
  height: number;
  ink: Inks;
}

export interface Point {
  x: number;
  y: number;
}

interface Props {
  label: string;
  height: number;
  class?: string;
  draw: (surface: Surface, at: Point | null) => void;
  /** The pointer is there, or the keyboard's cursor, or nothing is. */
  point?: (at: Point | null, width: number) => void;
  /** Pixels that an arrow key moves the cursor by. */
  stride?: { x: number; y: number };
  /** Read the signals that make it stale. */
  when: () => unknown;
}

export function Canvas(props: Props): JSX.Element {
  const canvas = useRef<HTMLCanvasElement>(null);
  const latest = useRef(props);
  latest.current = props;
  const at = useRef<Point | null>(null);
  const request = useRef(0);

  const redraw = () => {
    request.current = 0;
    const element = canvas.current;
    if (!element || document.hidden) return;
    const width = element.clientWidth;
    const height = element.clientHeight;
    if (!width || !height) return;
    const scale = Math.min(window.devicePixelRatio || 1, 2);
    if (element.width !== Math.round(width * scale) || element.height !== Math.round(height * scale)) {
      element.width = Math.round(width * scale);
      element.height = Math.round(height * scale);
    }
    const ctx = element.getContext("2d")!;
    ctx.setTransform(scale, 0, 0, scale, 0, 0);
    ctx.clearRect(0, 0, width, height);
    latest.current.draw({ ctx, width, height, ink: colours() }, at.current);
  };
  const soon = () => {
    if (!request.current) request.current = requestAnimationFrame(redraw);
  };
  const move = (to: Point | null) => {
    at.current = to;
    latest.current.point?.(to, canvas.current?.clientWidth ?? 0);
    soon();
  };

  useEffect(() => {
    const stop = effect(() => {
      void theme.value;
      latest.current.when();
      soon();
    });
    const sizes = new ResizeObserver(soon);
    sizes.observe(canvas.current!);
    return () => {
      stop();
      sizes.disconnect();
      cancelAnimationFrame(request.current);
    };
  }, []);
  useEffect(soon);

  const onKeyDown = (event: KeyboardEvent) => {
    const stride = props.stride;
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (!stride || (!step && event.key !== "Escape")) return;
    event.preventDefault();
    if (!step) return move(null);
    const box = canvas.current!;
    const from = at.current ?? { x: box.clientWidth - stride.x, y: stride.y / 2 };
    move({
      x: Math.min(Math.max(from.x + step[0]! * stride.x, 1), box.clientWidth - 1),
      y: Math.min(Math.max(from.y + step[1]! * stride.y, 1), box.clientHeight - 1),
    });
  };

  return (
    <canvas
      ref={canvas}
      class={props.class}
      style={{ height: `${props.height}px` }}
      role="img"
      aria-label={props.label}
      tabIndex={props.stride ? 0 : undefined}
      onPointerMove={props.point ? (e) => move({ x: e.offsetX, y: e.offsetY }) : undefined}
      onPointerLeave={props.point ? () => move(null) : undefined}
      onBlur={props.point ? () => move(null) : undefined}
      onKeyDown={props.stride ? onKeyDown : undefined}
    />
  );
}

/** A pattern of diagonal lines: what is only kept looks different from what is used, in any eye. */
export function hatch(ctx: CanvasRenderingContext2D, colour: string, x: number, y: number, w: number, h: number, gap = 4): void {
  ctx.save();
  ctx.beginPath();
  ctx.rect(x, y, w, h);
  ctx.clip();
  ctx.strokeStyle = colour;
  ctx.lineWidth = 1;
  ctx.beginPath();
  for (let i = -h; i < w + h; i += gap) {
    ctx.moveTo(x + i, y + h);
    ctx.lineTo(x + i + h, y);
  }
  ctx.stroke();
  ctx.restore();
}

/** A round number at or above. */
export function roundUp(value: number): number {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map((n) => n * power).find((n) => n >= value * 0.999)!;
}

export function quantile(sorted: number[], q: number): number | null {
  if (!sorted.length) return null;
  const at = q * (sorted.length - 1);
  const low = sorted[Math.floor(at)]!;
  return low + (sorted[Math.ceil(at)]! - low) * (at - Math.floor(at));
}

export function time(seconds: number | null | undefined): string {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds >= 100) return `${seconds.toFixed(0)} s`;
  if (seconds >= 1) return `${seconds.toFixed(seconds >= 10 ? 1 : 2)} s`;
  const ms = seconds * 1e3;
  return `${ms >= 100 ? ms.toFixed(0) : ms >= 10 ? ms.toFixed(0) : ms.toFixed(1)} ms`;
}

export function count(value: number): string {
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)} M`;
  if (value >= 1e4) return `${(value / 1e3).toFixed(value >= 1e5 ? 0 : 1)} k`;
  return value >= 100 || Number.isInteger(value) ? value.toFixed(0) : value.toFixed(value >= 10 ? 0 : 1);
}

export function share(part: number, whole: number): string {
  if (!whole) return "–";
  const percent = (100 * part) / whole;
  return `${percent > 0 && percent < 10 ? percent.toFixed(1) : percent.toFixed(0)} %`;
}
