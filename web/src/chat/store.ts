/** Conversations: what was said, how it was asked for, and the one stream that may be running. */
import { computed, signal } from "@preact/signals";
import { engine, mine } from "../engine";
import { greet, model, post, Refusal } from "../api";
import { events } from "../wire";

export interface Call {
  id: string;
  name: string;
  args: string;
}

export interface Reply {
  id: string;
  text: string;
  reasoning: string;
  calls: Call[];
  finish: string | null; // OpenAI's, or "stopped", or "failed"
  error: string;
  hopeless?: boolean; // refused for what was asked: the same again would be refused again
  prompt: number;
  written: number;
  cached: number;
  first: number | null; // milliseconds
  took: number | null;
}

export type Turn =
  | { role: "user"; text: string }
  | { role: "assistant"; replies: Reply[]; pick: number }
  | { role: "tool"; id: string; name: string; text: string };

export interface Settings {
  system: string;
  temperature: number;
  top_p: number;
  top_k: number;
  min_p: number;
  max_tokens: number | null;
  seed: number | null;
  repetition_penalty: number;
  presence_penalty: number;
  frequency_penalty: number;
  stop: string;
  tools: string;
  logprobs: boolean;
}

export interface Conversation {
  id: string;
  at: number;
  turns: Turn[];
  settings: Settings;
}

/** A token of a reply: its text, how likely it was, and what else might have come. */
export interface Token {
  text: string;
  logprob: number;
  top: { text: string; logprob: number }[];
}

export const DEFAULTS: Settings = {
  system: "",
  temperature: 0.3,
  top_p: 0.95,
  top_k: 0,
  min_p: 0,
  max_tokens: null,
  seed: null,
  repetition_penalty: 1,
  presence_penalty: 0,
  frequency_penalty: 0,
  stop: "",
  tools: "",
  logprobs: true,
};

/** What a server takes for granted: not sent. */
const NEUTRAL: Partial<Settings> = { top_p: 1, top_k: 0, min_p: 0, repetition_penalty: 1, presence_penalty: 0, frequency_penalty: 0 };
const STORE = "octavo.conversations";
const CURRENT = "octavo.conversation";
const MOST = 200;

export const conversations = signal<Conversation[]>(load());
export const current = signal<string>(localStorage.getItem(CURRENT) ?? "");
/** Counts changes inside conversations: what shows them looks at it. */
export const changed = signal(0);
export const streaming = signal<Reply | null>(null);
/** Tokens by reply; they are not kept when the page is left. */
export const tokens = new Map<string, Token[]>();
export const draft = signal("");
export const conversation = computed(() => conversations.value.find((one) => one.id === current.value) ?? null);

let stopper: AbortController | null = null;
let saving = 0;

function load(): Conversation[] {
  try {
    const found = JSON.parse(localStorage.getItem(STORE) ?? "[]") as Conversation[];
    return found.filter((one) => Array.isArray(one.turns)).map((one) => ({ ...one, settings: { ...DEFAULTS, ...one.settings } }));
  } catch {
    return [];
  }
}

function save(): void {
  window.clearTimeout(saving);
  saving = window.setTimeout(saveNow, 400);
}

/** Newest first; the oldest go if the browser has no more room. */
export function saveNow(): void {
  let kept = conversations.value.filter((one) => one.turns.length).slice(0, MOST);
  for (;;) {
    try {
      localStorage.setItem(STORE, JSON.stringify(kept));
      localStorage.setItem(CURRENT, current.value);
      return;
    } catch {
      if (!kept.length) return;
      kept = kept.slice(0, Math.floor(kept.length * 0.8));
    }
  }
}

function touch(): void {
  changed.value++;
  save();
}

const freshId = () => Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16).padStart(2, "0")).join("");

export function title(one: Conversation): string {
  const first = one.turns.find((turn) => turn.role === "user");
  return first?.role === "user" ? first.text.trim().split("\n")[0]!.slice(0, 80) : "New conversation";
}

/** A new conversation with the settings of the one before. */
export function begin(): Conversation {
  stop();
  const settings = { ...(conversation.value?.settings ?? conversations.value[0]?.settings ?? DEFAULTS) };
  const made: Conversation = { id: freshId(), at: Date.now(), turns: [], settings };
  conversations.value = [made, ...conversations.value.filter((one) => one.turns.length)];
  current.value = made.id;
  return made;
}

export function open(id: string): void {
  if (id === current.value) return;
  stop();
  current.value = id;
  save();
}

export function remove(id: string): void {
  if (id === current.value) stop();
  conversations.value = conversations.value.filter((one) => one.id !== id);
  if (id === current.value) current.value = conversations.value[0]?.id ?? "";
  save();
}

export function settle(change: Partial<Settings>): void {
  const one = conversation.value ?? begin();
  Object.assign(one.settings, change);
  touch();
}

export function send(text: string): void {
  if (streaming.value || !text.trim()) return;
  const one = conversation.value ?? begin();
  one.turns.push({ role: "user", text });
  one.at = Date.now();
  conversations.value = [one, ...conversations.value.filter((other) => other !== one)];
  void answer(one);
}

/** The result of a call, as a user gives it; once all are there, the model goes on. */
export function giveResult(call: Call, text: string): void {
  const one = conversation.value;
  if (!one || streaming.value) return;
  one.turns.push({ role: "tool", id: call.id, name: call.name, text });
  const last = one.turns.findLast((turn) => turn.role === "assistant");
  const calls = last?.role === "assistant" ? last.replies[last.pick]!.calls : [];
  const given = new Set(one.turns.flatMap((turn) => (turn.role === "tool" ? [turn.id] : [])));
  if (calls.every((each) => given.has(each.id))) void answer(one);
  else touch();
}

/** Another answer to the same question; the old ones stay. */
export function regenerate(): void {
  const one = conversation.value;
  if (!one || streaming.value) return;
  const at = one.turns.findLastIndex((turn) => turn.role === "assistant");
  const last = one.turns[at];
  if (last?.role !== "assistant" || last.replies[last.pick]!.hopeless) return;
  one.turns.length = at + 1;
  void answer(one, at);
}

export function pick(turn: Turn, index: number): void {
  if (turn.role === "assistant") turn.pick = index;
  touch();
}

/** Take the last question back, to be asked differently. */
export function takeBack(): void {
  const one = conversation.value;
  if (!one) return;
  stop();
  const at = one.turns.findLastIndex((turn) => turn.role === "user");
  const turn = one.turns[at];
  if (turn?.role !== "user") return;
  draft.value = turn.text;
  one.turns.length = at;
  touch();
}

export function stop(): void {
  stopper?.abort();
}

function messages(one: Conversation, before: number): unknown[] {
  const system = one.settings.system.trim() ? [{ role: "system", content: one.settings.system }] : [];
  const said = one.turns.slice(0, before).map((turn) => {
    if (turn.role === "user") return { role: "user", content: turn.text };
    if (turn.role === "tool") return { role: "tool", tool_call_id: turn.id, content: turn.text };
    const reply = turn.replies[turn.pick]!;
    const calls = reply.calls.map(({ id, name, args }) => ({ id, type: "function", function: { name, arguments: args } }));
    return { role: "assistant", content: reply.text || (calls.length ? null : ""), ...(calls.length ? { tool_calls: calls } : {}) };
  });
  return [...system, ...said];
}

function request(one: Conversation, before: number): Record<string, unknown> {
  const { settings } = one;
  const body: Record<string, unknown> = {
    model: model.value,
    stream: true,
    stream_options: { include_usage: true },
    temperature: settings.temperature,
  };
  for (const [name, value] of Object.entries(NEUTRAL)) {
    const own = settings[name as keyof Settings];
    if (own !== value) body[name] = own;
  }
  if (settings.seed !== null) body["seed"] = settings.seed;
  if (settings.max_tokens !== null) body["max_tokens"] = settings.max_tokens;
  const stops = settings.stop.split("\n").filter(Boolean);
  if (stops.length) body["stop"] = stops;
  if (engine.about?.chat === false) {
    const said = messages(one, before) as { content: string | null }[];
    const logprobs = settings.logprobs ? { logprobs: 5 } : {};
    return { ...body, ...logprobs, prompt: said.map((each) => each.content ?? "").join("\n"), max_tokens: settings.max_tokens ?? 256 };
  }
  if (settings.logprobs) Object.assign(body, { logprobs: true, top_logprobs: 5 });
  if (settings.tools.trim()) body["tools"] = tools(settings.tools);
  return { ...body, messages: messages(one, before) };
}

/** Raises an Error that says what is wrong with them. */
export function tools(text: string): unknown[] {
  let parsed: unknown;
  try {
    parsed = JSON.parse(text);
  } catch (error) {
    throw new Error(`the tools are not JSON: ${error instanceof Error ? error.message : ""}`);
  }
  if (!Array.isArray(parsed)) throw new Error("the tools must be a JSON array of functions");
  return parsed.map((one: Record<string, unknown>) => (one["type"] === "function" ? one : { type: "function", function: one }));
}

async function answer(one: Conversation, at = one.turns.length): Promise<void> {
  const reply: Reply = {
    id: freshId(), text: "", reasoning: "", calls: [], finish: null, error: "", prompt: 0, written: 0, cached: 0, first: null, took: null,
  };
  const turn = one.turns[at];
  if (turn?.role === "assistant") turn.pick = turn.replies.push(reply) - 1;
  else one.turns.push({ role: "assistant", replies: [reply], pick: 0 });
  const own = (stopper = new AbortController());
  streaming.value = reply;
  tokens.set(reply.id, []);
  touch();
  const begun = performance.now();
  let frame = 0;
  const soon = () => {
    frame ||= requestAnimationFrame(() => {
      frame = 0;
      changed.value++;
    });
  };
  try {
    if (!model.value) await greet();
    const path = engine.about?.chat === false ? "v1/completions" : "v1/chat/completions";
    const body = (await post(path, request(one, at), own.signal)).body!;
    for await (const data of events(body)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data) as Chunk;
      if (chunk.error) throw new Error(chunk.error.message);
      mine.value = chunk.id ?? mine.value;
      if (reply.first === null && chunk.choices?.length) reply.first = performance.now() - begun;
      take(reply, chunk);
      soon();
    }
    reply.finish ??= "failed";
  } catch (error) {
    if (own.signal.aborted) reply.finish = "stopped";
    else {
      reply.finish = "failed";
      reply.error = said(error);
      reply.hopeless = error instanceof Refusal && error.status === 400;
    }
  } finally {
    cancelAnimationFrame(frame);
    reply.took = performance.now() - begun;
    if (streaming.value === reply) streaming.value = null;
    mine.value = "";
    touch();
  }
}

function said(error: unknown): string {
  if (error instanceof Refusal && error.retryAfter !== null) return `${error.message} (try again in ${error.retryAfter} s)`;
  if (error instanceof TypeError) return "the server cannot be reached";
  return error instanceof Error ? error.message : String(error);
}

interface Logged {
  token: string;
  logprob: number;
  bytes?: number[] | null;
  top_logprobs?: { token: string; logprob: number }[];
}

interface Chunk {
  id?: string;
  error?: { message: string };
  usage?: { prompt_tokens: number; completion_tokens: number; prompt_tokens_details?: { cached_tokens?: number } } | null;
  choices?: {
    text?: string;
    finish_reason?: string | null;
    logprobs?: { content?: Logged[] | null; tokens?: string[]; token_logprobs?: number[]; top_logprobs?: Record<string, number>[] } | null;
    delta?: {
      content?: string | null;
      reasoning_content?: string | null;
      reasoning?: string | null;
      tool_calls?: { index: number; id?: string; function?: { name?: string; arguments?: string } }[];
    };
  }[];
}

function take(reply: Reply, chunk: Chunk): void {
  if (chunk.usage) {
    reply.prompt = chunk.usage.prompt_tokens;
    reply.written = chunk.usage.completion_tokens;
    reply.cached = chunk.usage.prompt_tokens_details?.cached_tokens ?? 0;
  }
  const choice = chunk.choices?.[0];
  if (!choice) return;
  const { delta } = choice;
  reply.text += delta?.content ?? choice.text ?? "";
  reply.reasoning += delta?.reasoning_content ?? delta?.reasoning ?? "";
  for (const piece of delta?.tool_calls ?? []) {
    const call = (reply.calls[piece.index] ??= { id: "", name: "", args: "" });
    call.id = piece.id ?? call.id;
    call.name += piece.function?.name ?? "";
    call.args += piece.function?.arguments ?? "";
  }
  log(reply, choice.logprobs);
  if (choice.finish_reason) reply.finish = choice.finish_reason;
}

const decoders = new WeakMap<Reply, TextDecoder>();

function log(reply: Reply, found: NonNullable<Chunk["choices"]>[number]["logprobs"]): void {
  const out = tokens.get(reply.id)!;
  const decoder = decoders.get(reply) ?? new TextDecoder();
  decoders.set(reply, decoder);
  for (const one of found?.content ?? []) {
    const text = one.bytes ? decoder.decode(new Uint8Array(one.bytes), { stream: true }) : one.token;
    out.push({ text, logprob: one.logprob, top: (one.top_logprobs ?? []).map((each) => ({ text: each.token, logprob: each.logprob })) });
  }
  found?.tokens?.forEach((text, i) => {
    const top = Object.entries(found.top_logprobs?.[i] ?? {}).map(([word, logprob]) => ({ text: word, logprob }));
    out.push({ text, logprob: found.token_logprobs![i]!, top });
  });
}
