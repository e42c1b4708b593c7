/** A reply's text as its tokens: each can be asked how likely it was, and what else might have come. */
import type { ComponentChildren, JSX } from "preact";
import { tip, tipAt } from "../tip";
import type { Leaf } from "./markdown";
import type { Token } from "./store";

/** Where each token stands in the text: [from, to); tokens that are not in it stand nowhere. */
export function align(text: string, tokens: Token[]): { from: number[]; to: number[] } {
  const from: number[] = [];
  const to: number[] = [];
  let at = 0;
  for (const token of tokens) {
    from.push(at);
    if (token.text && text.startsWith(token.text, at)) at += token.text.length;
    to.push(at);
  }
  return { from, to };
}

/** Shows pieces of the text as spans, one for each token. */
export function tokenLeaf(text: string, tokens: Token[]): Leaf {
  const { from, to } = align(text, tokens);
  return (start, end) => {
    const out: ComponentChildren[] = [];
    let low = 0;
    let high = to.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (to[middle]! <= start) low = middle + 1;
      else high = middle;
    }
    let at = start;
    for (let i = low; i < tokens.length && from[i]! < end && at < end; i++) {
      const stop = Math.min(end, to[i]!);
      if (stop <= at) continue;
      out.push(
        <span class={`t ${doubt(tokens[i]!.logprob)}`} data-t={i}>
          {text.slice(at, stop)}
        </span>,
      );
      at = stop;
    }
    if (at < end) out.push(text.slice(at, end));
    return out;
  };
}

function doubt(logprob: number): string {
  const p = Math.exp(logprob);
  return p > 0.9 ? "" : p > 0.5 ? "d1" : p > 0.2 ? "d2" : "d3";
}

function visible(text: string): string {
  return text.replace(/ /g, "␣").replace(/\n/g, "⏎").replace(/\t/g, "⇥") || "(nothing)";
}

function percent(logprob: number): string {
  const p = 100 * Math.exp(logprob);
  return p >= 99.95 ? "100 %" : p >= 10 ? `${p.toFixed(0)} %` : p >= 0.1 ? `${p.toFixed(1)} %` : "< 0.1 %";
}

function AboutToken({ token }: { token: Token }): JSX.Element {
  const others = token.top.some((one) => one.text === token.text) ? token.top : [{ text: token.text, logprob: token.logprob }, ...token.top];
  return (
    <div class="alternatives">
      {others.slice(0, 6).map((one) => (
        <div class={one.text === token.text ? "chosen" : ""}>
          <code>{visible(one.text)}</code>
          <meter min={0} max={1} value={Math.exp(one.logprob)} />
          <span>{percent(one.logprob)}</span>
        </div>
      ))}
    </div>
  );
}

function showToken(span: HTMLElement, tokens: Token[]): void {
  const token = tokens[Number(span.dataset["t"])];
  if (!token) return;
  for (const old of document.querySelectorAll(".t.at")) old.classList.remove("at");
  span.classList.add("at");
  tipAt(span, 0, span.offsetHeight - 8, <AboutToken token={token} />);
}

function hide(): void {
  tip.value = null;
  for (const old of document.querySelectorAll(".t.at")) old.classList.remove("at");
}

/** Its text can be pointed at, and walked through with the arrow keys. */
export function Words({ tokens, children }: { tokens: Token[]; children: ComponentChildren }): JSX.Element {
  const over = (event: PointerEvent) => {
    const span = (event.target as HTMLElement).closest<HTMLElement>("[data-t]");
    if (span) showToken(span, tokens);
    else hide();
  };
  const walk = (event: KeyboardEvent) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape" && tip.value) {
      hide();
      event.stopPropagation();
    }
    if (!by || event.target !== event.currentTarget) return;
    const spans = [...(event.currentTarget as HTMLElement).querySelectorAll<HTMLElement>("[data-t]")];
    const at = spans.findIndex((span) => span.classList.contains("at"));
    const next = spans[at < 0 ? (by > 0 ? 0 : spans.length - 1) : Math.min(Math.max(at + by, 0), spans.length - 1)];
    if (!next) return;
    event.preventDefault();
    next.scrollIntoView({ block: "nearest" });
    showToken(next, tokens);
  };
  return (
    <div class="words" tabIndex={tokens.length ? 0 : undefined} aria-label={tokens.length ? "Reply; arrow keys walk its tokens" : undefined}
      onPointerOver={over} onPointerLeave={hide} onKeyDown={walk} onBlur={hide}>
      {children}
    </div>
  );
}
