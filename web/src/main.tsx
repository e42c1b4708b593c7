/** The page: a chat, the engine behind it, or both side by side. */
import { effect, signal } from "@preact/signals";
import { render, type JSX } from "preact";
import { useEffect } from "preact/hooks";
import { askingKey, greet, keepKey, key, model, needsKey, version } from "./api";
import { ChatView, focusComposer, listOpen, settingsOpen } from "./chat/view";
import { begin, regenerate, saveNow, stop, streaming } from "./chat/store";
import { Dialog } from "./dialog";
import { theme } from "./draw";
import { link, paused, rewatch, tick, watch } from "./engine";
import { zoom } from "./live/batch";
import { startDemo } from "./live/demo";
import { EngineView } from "./live/view";
import { tip, TipLayer } from "./tip";
import "./style.css";

type View = "chat" | "both" | "engine";
const VIEWS: { id: View; name: string; hint: string }[] = [
  { id: "chat", name: "Chat", hint: "1" },
  { id: "both", name: "Both", hint: "2" },
  { id: "engine", name: "Engine", hint: "3" },
];
const NARROW = matchMedia("(max-width: 900px)");
const DARK = matchMedia("(prefers-color-scheme: dark)");

const narrow = signal(NARROW.matches);
const view = signal<View>(fromHash() ?? "both");
const mode = signal(localStorage.getItem("octavo.theme") ?? "auto");
const explains = signal(localStorage.getItem("octavo.explain") !== "no");
const help = signal(false);
const hidden = signal(document.hidden);

function fromHash(): View | null {
  const name = location.hash.slice(1);
  return VIEWS.find((one) => one.id === name)?.id ?? null;
}

/** What is shown: two columns need room. */
function shown(): View {
  return narrow.value && view.value === "both" ? "chat" : view.value;
}

function show(to: View): void {
  view.value = to;
  tip.value = null;
  history.replaceState(null, "", `#${to}`);
}

NARROW.addEventListener("change", () => (narrow.value = NARROW.matches));
addEventListener("hashchange", () => (view.value = fromHash() ?? view.value));
addEventListener("pagehide", saveNow);
document.addEventListener("visibilitychange", () => (hidden.value = document.hidden));

function applyTheme(): void {
  theme.value = mode.value === "auto" ? (DARK.matches ? "dark" : "light") : (mode.value as "light" | "dark");
  document.documentElement.dataset["theme"] = theme.value;
}

DARK.addEventListener("change", applyTheme);
effect(() => {
  localStorage.setItem("octavo.theme", mode.value);
  applyTheme();
});
effect(() => {
  localStorage.setItem("octavo.explain", explains.value ? "yes" : "no");
  document.documentElement.classList.toggle("expert", !explains.value);
});

// A page that nobody looks at costs the engine nothing; a short look away does not count.
let leaving = 0;
effect(() => {
  const on = shown() !== "chat" && !hidden.value && !needsKey.value;
  clearTimeout(leaving);
  if (on) watch(true);
  else leaving = window.setTimeout(() => watch(false), hidden.value ? 20_000 : 0);
});

function nextTheme(): void {
  mode.value = { auto: theme.value === "dark" ? "light" : "dark", light: "dark", dark: "light" }[mode.value] ?? "auto";
}

const SHORTCUTS: Record<string, [string, () => void]> = {
  "1": ["the chat", () => show("chat")],
  "2": ["both", () => show("both")],
  "3": ["the engine", () => show("engine")],
  "/": ["write to the model", () => { if (shown() === "engine") show("chat"); requestAnimationFrame(focusComposer); }],
  n: ["new conversation", () => { begin(); if (shown() === "engine") show("chat"); requestAnimationFrame(focusComposer); }],
  r: ["another answer", regenerate],
  c: ["conversations", () => (listOpen.value = !listOpen.value)],
  s: ["settings of the chat", () => (settingsOpen.value = true)],
  p: ["hold the engine’s picture, or go on", hold],
  "[": ["shorter span of time", () => zoom(-1)],
  "]": ["longer span of time", () => zoom(1)],
  x: ["start sample conversations, or stop them", () => void startDemo()],
  e: ["explanations on or off", () => (explains.value = !explains.value)],
  d: ["dark or light", nextTheme],
  "?": ["this list", () => (help.value = true)],
};

function hold(): void {
  paused.value = !paused.value;
  if (!paused.value) tick.value++;
}

addEventListener("keydown", (event) => {
  const target = event.target as HTMLElement;
  if (event.key === "Escape" && streaming.value && !document.querySelector("dialog[open]")) return stop();
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  if (/^(INPUT|TEXTAREA|SELECT)$/.test(target.tagName)) {
    if (event.key === "Escape") target.blur();
    return;
  }
  const found = SHORTCUTS[event.key];
  if (!found) return;
  event.preventDefault();
  found[1]();
});

function Help(): JSX.Element {
  return (
    <Dialog title="Keys" onClose={() => (help.value = false)}>
      <dl class="keys">
        {Object.entries(SHORTCUTS).map(([name, [words]]) => (
          <div key={name}>
            <dt><kbd>{name}</kbd></dt>
            <dd>{words}</dd>
          </div>
        ))}
        <div><dt><kbd>Enter</kbd></dt><dd>send; with Shift a new line</dd></div>
        <div><dt><kbd>Esc</kbd></dt><dd>stop the answer, close, leave a field</dd></div>
        <div><dt><kbd>↑</kbd></dt><dd>in an empty field: take the last question back</dd></div>
        <div><dt><kbd>← →</kbd></dt><dd>in an answer or a picture that has the focus: walk through it</dd></div>
      </dl>
    </Dialog>
  );
}

function KeyDialog(): JSX.Element {
  const submit = (event: SubmitEvent) => {
    event.preventDefault();
    const data = new FormData(event.currentTarget as HTMLFormElement);
    keepKey(String(data.get("key") ?? "").trim(), data.get("remember") !== null);
    void start();
  };
  return (
    <Dialog title="This server asks for a key" class="narrow" onClose={() => (askingKey.value = false)}>
      <form onSubmit={submit}>
        {key() && <p class="trouble" role="alert">The key that was given is not valid here.</p>}
        <label class="field">
          <span>API key</span>
          <input name="key" type="password" autocomplete="off" required spellcheck={false} autofocus />
        </label>
        <label class="check">
          <input type="checkbox" name="remember" />
          <span>Keep it in this browser; else it is forgotten with this tab</span>
        </label>
        <footer><button class="main">Enter</button></footer>
      </form>
    </Dialog>
  );
}

async function start(): Promise<void> {
  try {
    await greet();
    if (link.value === "lost") rewatch();
  } catch {
    if (!needsKey.value) setTimeout(() => void start(), 2000);
  }
}

function Head(): JSX.Element {
  const state = { live: "live", lost: "not connected", connecting: "connecting", off: "" }[link.value];
  return (
    <header class="head">
      <span class="brand">
        Octavo
        {version.value && <small> {version.value}</small>}
      </span>
      <span class="served">{model.value}</span>
      {state && <span class={`state ${link.value}`} role="status">{state}{paused.value ? ", held" : ""}</span>}
      {needsKey.value && <button onClick={() => (askingKey.value = true)}>Enter a key</button>}
      <span class="grow" />
      <nav aria-label="View" class="views">
        {VIEWS.filter((one) => one.id !== "both" || !narrow.value).map((one) => (
          <button key={one.id} aria-pressed={shown() === one.id} onClick={() => show(one.id)} title={`${one.name} (${one.hint})`}>
            {one.name}
          </button>
        ))}
      </nav>
      <button class="plain wide-only" aria-pressed={explains.value} onClick={() => (explains.value = !explains.value)} title="Explanations (e)">{explains.value ? "hide help" : "explain"}</button>
      <button class="plain" onClick={nextTheme} title="Dark or light (d)" aria-label="Dark or light">{theme.value === "dark" ? "☀" : "☾"}</button>
      <button class="plain" onClick={() => (help.value = true)} title="Keys (?)" aria-label="Keys">?</button>
    </header>
  );
}

function Page(): JSX.Element {
  const now = shown();
  useEffect(() => void start(), []);
  return (
    <div class="page" data-view={now}>
      <Head />
      {now !== "engine" && <ChatView />}
      {now !== "chat" && <EngineView />}
      <TipLayer />
      {help.value && <Help />}
      {askingKey.value && <KeyDialog />}
    </div>
  );
}

render(<Page />, document.getElementById("page")!);
