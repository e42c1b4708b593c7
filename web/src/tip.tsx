/** The one tooltip of the engine's view: what the pointer, or the keyboard's cursor, is on. */
import { signal } from "@preact/signals";
import type { ComponentChildren, JSX } from "preact";
import { useLayoutEffect, useRef } from "preact/hooks";

interface Tip {
  x: number;
  y: number;
  body: ComponentChildren;
}

export const tip = signal<Tip | null>(null);

/** Show it beside a point of an element. */
export function tipAt(element: Element | null, x: number, y: number, body: ComponentChildren): void {
  if (!element) return;
  const box = element.getBoundingClientRect();
  tip.value = { x: box.left + x, y: box.top + y, body };
}

export function TipLayer(): JSX.Element {
  const layer = useRef<HTMLDivElement>(null);
  const shown = tip.value;
  useLayoutEffect(() => {
    const element = layer.current;
    if (!element || !shown) return;
    const { width, height } = element.getBoundingClientRect();
    const left = shown.x + 14 + width > innerWidth - 8 ? shown.x - 14 - width : shown.x + 14;
    const top = shown.y + 16 + height > innerHeight - 8 ? shown.y - 12 - height : shown.y + 16;
    element.style.left = `${Math.max(8, left)}px`;
    element.style.top = `${Math.max(8, top)}px`;
  });
  return (
    <div class="tip" role="status" ref={layer} hidden={!shown}>
      {shown?.body}
    </div>
  );
}
