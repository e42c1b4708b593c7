/** Markdown as elements, never as HTML: what a model writes cannot become markup or a request.
 *
 * Raw HTML is shown as the text it is, an image as a link, and only http, https and mailto are linked.
 * Every piece of text knows where in the source it stands, so that a reader can ask about its tokens.
 */
import type { ComponentChildren, JSX } from "preact";
import { Component } from "preact";
import { useState } from "preact/hooks";

/** Shows the source from one place to another; `from` and `to` are offsets in it. */
export type Leaf = (from: number, to: number) => ComponentChildren;

interface Line {
  text: string;
  at: number;
}

type Block =
  | { kind: "heading"; level: number; lines: Line[] }
  | { kind: "code"; language: string; lines: Line[] }
  | { kind: "quote"; blocks: Block[] }
  | { kind: "list"; ordered: boolean; start: number; items: Block[][] }
  | { kind: "table"; head: Line[]; rows: Line[][]; align: string[] }
  | { kind: "rule" }
  | { kind: "text"; lines: Line[] };

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^\s`]*)/;
const HEADING = /^ {0,3}(#{1,6})(?:\s+|$)/;
const RULE = /^ {0,3}(?:(?:-\s*){3,}|(?:\*\s*){3,}|(?:_\s*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,8})([-*+]|\d{1,9}[.)])(\s+|$)/;
const DELIMITERS = /^ {0,3}\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;
const DEEPEST = 12;
const REACH = 4000; // characters in which the end of an emphasis is sought

function cut(line: Line, count: number): Line {
  return { text: line.text.slice(count), at: line.at + count };
}

function starts(line: Line): boolean {
  const { text } = line;
  return FENCE.test(text) || HEADING.test(text) || RULE.test(text) || QUOTE.test(text) || ITEM.test(text);
}

function parse(lines: Line[], depth: number): Block[] {
  const blocks: Block[] = [];
  let i = 0;
  while (i < lines.length) {
    const line = lines[i]!;
    if (!line.text.trim()) {
      i++;
      continue;
    }
    const [block, next] = (depth < DEEPEST && special(lines, i, depth)) || paragraph(lines, i);
    blocks.push(block);
    i = next;
  }
  return blocks;
}

function special(lines: Line[], i: number, depth: number): [Block, number] | null {
  const line = lines[i]!;
  const { text } = line;
  const fence = FENCE.exec(text);
  if (fence) return code(lines, i, fence);
  const heading = HEADING.exec(text);
  if (heading) {
    const body = cut(line, heading[0].length);
    return [{ kind: "heading", level: heading[1]!.length, lines: [{ ...body, text: body.text.replace(/\s+#+\s*$/, "") }] }, i + 1];
  }
  if (RULE.test(text)) return [{ kind: "rule" }, i + 1];
  if (QUOTE.test(text)) {
    const inside: Line[] = [];
    while (i < lines.length && QUOTE.test(lines[i]!.text)) {
      inside.push(cut(lines[i]!, QUOTE.exec(lines[i]!.text)![0].length));
      i++;
    }
    return [{ kind: "quote", blocks: parse(inside, depth + 1) }, i];
  }
  if (ITEM.test(text)) return list(lines, i, depth);
  return isTable(lines, i) ? table(lines, i) : null;
}

function isTable(lines: Line[], i: number): boolean {
  const second = lines[i + 1]?.text ?? "";
  return lines[i]!.text.includes("|") && second.includes("|") && DELIMITERS.test(second);
}

function code(lines: Line[], i: number, fence: RegExpExecArray): [Block, number] {
  const closing = new RegExp(`^ {0,3}${fence[1]![0] === "`" ? "`" : "~"}{${fence[1]!.length},}\\s*$`);
  const body: Line[] = [];
  i++;
  while (i < lines.length && !closing.test(lines[i]!.text)) body.push(lines[i++]!);
  return [{ kind: "code", language: fence[2]!, lines: body }, i + 1];
}

function list(lines: Line[], i: number, depth: number): [Block, number] {
  const marker = ITEM.exec(lines[i]!.text)!;
  const indent = marker[1]!.length;
  const ordered = /\d/.test(marker[2]!);
  const items: Block[][] = [];
  while (i < lines.length) {
    const found = ITEM.exec(lines[i]!.text);
    if (!found || RULE.test(lines[i]!.text) || /\d/.test(found[2]!) !== ordered || found[1]!.length > indent + 1 || found[1]!.length < indent) break;
    const inner = found[1]!.length + found[2]!.length + 1;
    const body = [cut(lines[i]!, Math.min(found[0].length, lines[i]!.text.length))];
    i++;
    while (i < lines.length) {
      const { text } = lines[i]!;
      const lead = text.length - text.trimStart().length;
      if (!text.trim()) {
        const after = lines[i + 1]?.text ?? "";
        if (!after.trim() || after.length - after.trimStart().length < inner - 1) break;
      } else if (lead < inner - 1 && (starts(lines[i]!) || !lines[i - 1]!.text.trim())) break;
      body.push(cut(lines[i]!, Math.min(lead, inner)));
      i++;
    }
    items.push(parse(body, depth + 1));
    while (i < lines.length && !lines[i]!.text.trim() && ITEM.test(lines[i + 1]?.text ?? "")) i++;
  }
  return [{ kind: "list", ordered, start: ordered ? parseInt(marker[2]!, 10) : 1, items }, i];
}

function cells(line: Line): Line[] {
  const found: Line[] = [];
  let from = line.text.length - line.text.trimStart().length;
  if (line.text[from] === "|") from++;
  let inCode = false;
  for (let i = from; i <= line.text.length; i++) {
    if (line.text[i] === "`") inCode = !inCode;
    if (i < line.text.length && (line.text[i] !== "|" || line.text[i - 1] === "\\" || inCode)) continue;
    const raw = line.text.slice(from, i);
    if (i < line.text.length || raw.trim()) {
      const lead = raw.length - raw.trimStart().length;
      found.push({ text: raw.trim(), at: line.at + from + lead });
    }
    from = i + 1;
  }
  return found;
}

function table(lines: Line[], i: number): [Block, number] {
  const head = cells(lines[i]!);
  const align = cells(lines[i + 1]!).map(({ text }) => (text.endsWith(":") ? (text.startsWith(":") ? "center" : "right") : ""));
  const rows: Line[][] = [];
  i += 2;
  while (i < lines.length && lines[i]!.text.includes("|")) rows.push(cells(lines[i++]!));
  return [{ kind: "table", head, rows, align }, i];
}

function paragraph(lines: Line[], i: number): [Block, number] {
  const body = [lines[i++]!];
  while (i < lines.length && lines[i]!.text.trim() && !starts(lines[i]!) && !isTable(lines, i)) body.push(lines[i++]!);
  return [{ kind: "text", lines: body }, i];
}

// ---- what stands within a line ----

const SAFE = /^(?:https?:\/\/|mailto:)[^\s<>"]+$/i;
const BARE = /^https?:\/\/[^\s<>"'`\])]*[^\s<>"'`\]).,;:!?*_~]/i;
const LINK = /^\[((?:[^[\]\\]|\\.|\[[^\]]*\])*)\]\(\s*<?([^\s<>()]*(?:\([^\s<>()]*\)[^\s<>()]*)*)>?(?:\s+(?:"[^"]*"|'[^']*'))?\s*\)/;

function Outside({ to, children }: { to: string; children: ComponentChildren }): JSX.Element {
  return (
    <a href={to} target="_blank" rel="noopener noreferrer nofollow" referrerpolicy="no-referrer">
      {children}
    </a>
  );
}

/** The inline elements of some lines, joined; their text goes through `leaf`. */
class Inline {
  private text: string;
  private starts: { from: number; at: number }[] = [];

  constructor(lines: Line[], private leaf: Leaf) {
    let joined = "";
    for (const [i, line] of lines.entries()) {
      if (i) joined += "\n";
      const body = i < lines.length - 1 ? line.text.trimEnd() : line.text;
      const lead = body.length - body.trimStart().length;
      this.starts.push({ from: joined.length, at: line.at + lead });
      joined += body.trimStart();
    }
    this.text = joined;
  }

  all(): ComponentChildren[] {
    return this.between(0, this.text.length, 0);
  }

  private plain(from: number, to: number): ComponentChildren[] {
    const out: ComponentChildren[] = [];
    let i = this.starts.findLastIndex((start) => start.from <= from);
    while (from < to) {
      const start = this.starts[i]!;
      const end = Math.min(to, (this.starts[i + 1]?.from ?? Infinity) - 1);
      if (end > from) out.push(this.leaf(start.at + from - start.from, start.at + end - start.from));
      from = end;
      if (from < to) {
        out.push(<br />);
        from++;
        i++;
      }
    }
    return out;
  }

  private between(from: number, to: number, depth: number): ComponentChildren[] {
    const out: ComponentChildren[] = [];
    let begun = from;
    let i = from;
    while (i < to) {
      const found = depth < DEEPEST ? this.element(i, to, depth) : null;
      if (found) {
        out.push(...this.plain(begun, i), found.element);
        i = begun = found.end;
      } else i++;
    }
    out.push(...this.plain(begun, to));
    return out;
  }

  private element(i: number, to: number, depth: number): { element: ComponentChildren; end: number } | null {
    switch (this.text[i]) {
      case "\\":
        return /[!-/:-@[-`{-~]/.test(this.text[i + 1] ?? "") && i + 1 < to ? { element: this.plain(i + 1, i + 2), end: i + 2 } : null;
      case "`":
        return this.code(i, to);
      case "!":
        return this.text[i + 1] === "[" ? this.link(i + 1, to, depth, true) : null;
      case "[":
        return this.link(i, to, depth, false);
      case "*":
      case "_":
      case "~":
        return this.emphasis(i, to, depth);
      case "h":
        return this.bare(i, to);
      default:
        return null;
    }
  }

  private code(i: number, to: number): { element: ComponentChildren; end: number } | null {
    const ticks = /^`+/.exec(this.text.slice(i, i + 16))![0];
    let end = this.text.indexOf(ticks, i + ticks.length);
    while (end >= 0 && this.text[end + ticks.length] === "`") end = this.text.indexOf(ticks, end + ticks.length + 1);
    if (end < 0 || end >= to) return null;
    return { element: <code>{this.plain(i + ticks.length, end)}</code>, end: end + ticks.length };
  }

  private link(i: number, to: number, depth: number, image: boolean): { element: ComponentChildren; end: number } | null {
    const found = LINK.exec(this.text.slice(i, Math.min(to, i + REACH)));
    if (!found) return null;
    const target = found[2]!;
    const label = image ? this.plain(i + 1, i + 1 + found[1]!.length) : this.between(i + 1, i + 1 + found[1]!.length, depth + 1);
    const words = image ? ["image: ", found[1] ? label : target] : label;
    const end = i + found[0].length;
    if (!SAFE.test(target)) return { element: <span title={target}>{words}</span>, end };
    return { element: <Outside to={target}>{words}</Outside>, end };
  }

  private bare(i: number, to: number): { element: ComponentChildren; end: number } | null {
    if (i > 0 && /[\w/]/.test(this.text[i - 1]!)) return null;
    const found = BARE.exec(this.text.slice(i, Math.min(to, i + 2000)));
    if (!found) return null;
    const end = i + found[0].length;
    return { element: <Outside to={found[0]}>{this.plain(i, end)}</Outside>, end };
  }

  private emphasis(i: number, to: number, depth: number): { element: ComponentChildren; end: number } | null {
    const mark = this.text[i]!;
    let run = 1;
    while (run < 3 && this.text[i + run] === mark) run++;
    if (mark === "~" && run !== 2) return null;
    const before = this.text[i - 1] ?? " ";
    const after = this.text[i + run] ?? " ";
    if (/\s/.test(after) || (mark === "_" && /\w/.test(before))) return null;
    const marks = mark.repeat(run);
    let end = this.text.indexOf(marks, i + run + 1);
    while (end >= 0 && end < to && end - i < REACH) {
      const next = this.text[end + run] ?? " ";
      const closes = !/\s/.test(this.text[end - 1]!) && next !== mark && this.text[end - 1] !== mark && !(mark === "_" && /\w/.test(next));
      if (closes) {
        const inside = this.between(i + run, end, depth + 1);
        const element =
          mark === "~" ? <del>{inside}</del> : run === 1 ? <em>{inside}</em> : run === 2 ? <strong>{inside}</strong> : <strong><em>{inside}</em></strong>;
        return { element, end: end + run };
      }
      end = this.text.indexOf(marks, end + 1);
    }
    return null;
  }
}

// ---- elements ----

function Code({ language, lines, leaf }: { language: string; lines: Line[]; leaf: Leaf }): JSX.Element {
  const [copied, setCopied] = useState(false);
  const copy = () => {
    void navigator.clipboard?.writeText(lines.map((line) => line.text).join("\n")).then(() => {
      setCopied(true);
      setTimeout(() => setCopied(false), 1500);
    });
  };
  return (
    <figure class="code">
      <figcaption>
        <span>{language || "text"}</span>
        <button class="plain" onClick={copy}>
          {copied ? "copied" : "copy"}
        </button>
      </figcaption>
      <pre tabIndex={0}>
        <code>
          {lines.map((line, i) => [i > 0 && "\n", line.text && leaf(line.at, line.at + line.text.length)])}
        </code>
      </pre>
    </figure>
  );
}

function show(block: Block, leaf: Leaf): JSX.Element {
  const inline = (lines: Line[]) => new Inline(lines, leaf).all();
  switch (block.kind) {
    case "heading": {
      const Tag = `h${Math.min(6, block.level + 2)}` as "h3";
      return <Tag>{inline(block.lines)}</Tag>;
    }
    case "code":
      return <Code language={block.language} lines={block.lines} leaf={leaf} />;
    case "quote":
      return <blockquote>{block.blocks.map((one) => show(one, leaf))}</blockquote>;
    case "list": {
      const items = block.items.map((item) => (
        <li>{item.length === 1 && item[0]!.kind === "text" ? inline(item[0]!.lines) : item.map((one) => (one.kind === "text" ? <p>{inline(one.lines)}</p> : show(one, leaf)))}</li>
      ));
      return block.ordered ? <ol start={block.start}>{items}</ol> : <ul>{items}</ul>;
    }
    case "table":
      return (
        <div class="wide" tabIndex={0}>
          <table>
            <thead>
              <tr>{block.head.map((cell, i) => <th class={block.align[i]}>{inline([cell])}</th>)}</tr>
            </thead>
            <tbody>
              {block.rows.map((row) => (
                <tr>{row.map((cell, i) => <td class={block.align[i]}>{inline([cell])}</td>)}</tr>
              ))}
            </tbody>
          </table>
        </div>
      );
    case "rule":
      return <hr />;
    case "text":
      return <p>{inline(block.lines)}</p>;
  }
}

/** Blocks of the outermost level, by their lines: all but the last stand still while text streams. */
function pieces(source: string): Line[][] {
  const out: Line[][] = [[]];
  let at = 0;
  let fence: RegExp | null = null;
  for (const text of source.split("\n")) {
    const found = FENCE.exec(text);
    if (fence?.test(text)) fence = null;
    else if (!fence && found) fence = new RegExp(`^ {0,3}${found[1]![0] === "`" ? "`" : "~"}{${found[1]!.length},}\\s*$`);
    // A blank line ends a piece, but not inside code or a list, which may go on after it.
    if (!fence && !text.trim() && out.at(-1)!.length && !out.at(-1)!.some((line) => ITEM.test(line.text))) out.push([]);
    else if (!fence && /^\S/.test(text) && !ITEM.test(text) && out.at(-1)!.length && !out.at(-1)!.at(-1)!.text.trim()) out.push([{ text, at }]);
    else out.at(-1)!.push({ text, at });
    at += text.length + 1;
  }
  return out.filter((lines) => lines.some((line) => line.text.trim()));
}

interface PieceProps {
  lines: Line[];
  source: string;
  leaf: Leaf;
  stamp: unknown;
}

class Piece extends Component<PieceProps> {
  override shouldComponentUpdate(next: PieceProps): boolean {
    return next.source !== this.props.source || next.stamp !== this.props.stamp;
  }

  override render({ lines, leaf }: PieceProps): JSX.Element {
    return <>{parse(lines, 0).map((block) => show(block, leaf))}</>;
  }
}

/** stamp: changes when `leaf` shows old text differently. */
export function Markdown({ source, leaf, stamp }: { source: string; leaf?: Leaf; stamp?: unknown }): JSX.Element {
  const plain: Leaf = (from, to) => source.slice(from, to);
  return (
    <>
      {pieces(source).map((lines) => {
        const own = lines.map((line) => line.text).join("\n");
        return <Piece key={lines[0]!.at} lines={lines} source={own} leaf={leaf ?? plain} stamp={stamp} />;
      })}
    </>
  );
}
