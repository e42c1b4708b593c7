/** The chat. */
import { signal } from "@preact/signals";
import type { JSX } from "preact";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { model } from "../api";
import { time } from "../draw";
import { Markdown } from "./markdown";
import { SettingsDialog } from "./settings";
import {
  begin, changed, conversation, conversations, current, draft, giveResult, open, pick, regenerate, remove, send, stop, streaming, takeBack, title, tokens,
  type Call, type Reply, type Turn,
} from "./store";
import { tokenLeaf, Words } from "./words";

export const listOpen = signal(false);
export const settingsOpen = signal(false);
const doubts = signal(false);

function Meta({ reply, turn, last }: { reply: Reply; turn: Turn & { role: "assistant" }; last: boolean }): JSX.Element {
  const busy = streaming.value === reply;
  const rate = reply.took !== null && reply.first !== null && reply.written > 1 ? (reply.written - 1) / ((reply.took - reply.first) / 1e3) : null;
  const [copied, setCopied] = useState(false);
  const copy = () => {
    void navigator.clipboard?.writeText(reply.text).then(() => {
      setCopied(true);
      setTimeout(() => setCopied(false), 1500);
    });
  };
  return (
    <div class="meta">
      {turn.replies.length > 1 && (
        <span class="versions">
          <button class="plain" aria-label="The answer before" disabled={turn.pick === 0 || busy} onClick={() => pick(turn, turn.pick - 1)}>‹</button>
          {turn.pick + 1}/{turn.replies.length}
          <button class="plain" aria-label="The next answer" disabled={turn.pick === turn.replies.length - 1 || busy} onClick={() => pick(turn, turn.pick + 1)}>›</button>
        </span>
      )}
      {!busy && last && !reply.hopeless && <button class="plain" onClick={regenerate} title="Another answer (r)">regenerate</button>}
      {!busy && last && reply.hopeless && <button class="plain" onClick={takeBack} title="Ask differently">edit the question</button>}
      {!busy && reply.text && <button class="plain" onClick={copy}>{copied ? "copied" : "copy"}</button>}
      {!busy && (tokens.get(reply.id)?.length ?? 0) > 0 && (
        <button class="plain" aria-pressed={doubts.value} onClick={() => (doubts.value = !doubts.value)} title="Underline what the model was unsure of">doubts</button>
      )}
      {!busy && reply.written > 0 && (
        <span class="num">
          {reply.written} tokens{rate !== null && ` · ${rate.toFixed(0)} tok/s`}
          {reply.first !== null && ` · first after ${time(reply.first / 1e3)}`}
          {reply.cached > 0 && ` · ${reply.cached} of ${reply.prompt} prompt tokens cached`}
        </span>
      )}
      {reply.finish === "length" && <span class="note">cut at the limit of tokens</span>}
      {reply.finish === "stopped" && <span class="note">stopped</span>}
    </div>
  );
}

function CallCard({ call, result, ready }: { call: Call; result: string | null; ready: boolean }): JSX.Element {
  let args = call.args;
  try {
    args = JSON.stringify(JSON.parse(call.args), null, 2);
  } catch {
    // still coming, or not JSON: shown as it is
  }
  const submit = (event: SubmitEvent) => {
    event.preventDefault();
    giveResult(call, String(new FormData(event.currentTarget as HTMLFormElement).get("result") ?? ""));
  };
  return (
    <figure class="call">
      <figcaption>
        calls <b>{call.name}</b>
      </figcaption>
      <pre tabIndex={0}>{args}</pre>
      {result !== null && <pre class="result">{result}</pre>}
      {result === null && ready && (
        <form onSubmit={submit}>
          <input name="result" placeholder="What the tool answered" aria-label={`Result of ${call.name}`} autocomplete="off" />
          <button>give</button>
        </form>
      )}
    </figure>
  );
}

/** An error is in view when it comes, however long the question above it is. */
function Trouble({ text }: { text: string }): JSX.Element {
  const own = useRef<HTMLParagraphElement>(null);
  useEffect(() => own.current!.scrollIntoView({ block: "nearest" }), [text]);
  return (
    <p class="trouble" role="alert" ref={own}>
      {text}
    </p>
  );
}

function Answer({ turn, last, results }: { turn: Turn & { role: "assistant" }; last: boolean; results: Map<string, string> }): JSX.Element {
  const reply = turn.replies[turn.pick]!;
  const busy = streaming.value === reply;
  const logged = tokens.get(reply.id) ?? [];
  const leaf = logged.length ? tokenLeaf(reply.text, logged) : undefined;
  return (
    <article class={`answer ${doubts.value ? "doubts" : ""}`} aria-busy={busy}>
      {reply.reasoning && (
        <details class="thought" open={busy && !reply.text}>
          <summary>{busy && !reply.text ? "thinks …" : "thought"}</summary>
          <Markdown source={reply.reasoning} />
        </details>
      )}
      <Words tokens={logged}>
        <Markdown source={reply.text} leaf={leaf} stamp={logged.length > 0} />
      </Words>
      {reply.calls.map((call) => (
        <CallCard key={call.id} call={call} result={results.get(call.id) ?? null} ready={!busy && last} />
      ))}
      {busy && !reply.text && !reply.reasoning && <span class="pulse" role="status" aria-label="Waiting for the first token" />}
      {reply.error && <Trouble text={reply.error} />}
      <Meta reply={reply} turn={turn} last={last} />
    </article>
  );
}

function Thread(): JSX.Element {
  void changed.value;
  const box = useRef<HTMLDivElement>(null);
  const follow = useRef(true);
  const one = conversation.value;
  useLayoutEffect(() => {
    const element = box.current!;
    if (follow.current) element.scrollTop = element.scrollHeight;
  });
  useEffect(() => {
    follow.current = true;
  }, [current.value, one?.turns.length]);
  const onScroll = () => {
    const element = box.current!;
    follow.current = element.scrollHeight - element.scrollTop - element.clientHeight < 60;
  };
  const turns = one?.turns ?? [];
  const results = new Map(turns.flatMap((turn) => (turn.role === "tool" ? [[turn.id, turn.text] as const] : [])));
  const lastAnswer = turns.findLastIndex((turn) => turn.role === "assistant");
  const lastQuestion = turns.findLastIndex((turn) => turn.role === "user");
  return (
    <div class="thread" ref={box} onScroll={onScroll} role="log" aria-label="Conversation" tabIndex={-1}>
      {!turns.length && <Welcome />}
      {turns.map((turn, i) =>
        turn.role === "user" ? (
          <article class="question" key={i}>
            <p>{turn.text}</p>
            {i === lastQuestion && !streaming.value && (
              <button class="plain" onClick={takeBack} title="Ask differently">edit</button>
            )}
          </article>
        ) : turn.role === "assistant" ? (
          <Answer key={i} turn={turn} last={i === lastAnswer} results={results} />
        ) : null,
      )}
    </div>
  );
}

const STARTERS = ["Why is the sky blue? Two sentences.", "Write a limerick about an octopus.", "List three uses of a paper clip, as a table."];

function Welcome(): JSX.Element {
  return (
    <div class="welcome">
      <h1>{model.value || "Octavo"}</h1>
      <p>Runs on this machine. What you write stays in this browser and in the server’s memory.</p>
      <div class="starters">
        {STARTERS.map((text) => (
          <button key={text} onClick={() => send(text)}>
            {text}
          </button>
        ))}
      </div>
    </div>
  );
}

export function focusComposer(): void {
  document.querySelector<HTMLTextAreaElement>(".composer textarea")?.focus();
}

function Composer(): JSX.Element {
  const area = useRef<HTMLTextAreaElement>(null);
  useLayoutEffect(() => {
    const element = area.current!;
    element.style.height = "auto";
    element.style.height = `${Math.min(element.scrollHeight, innerHeight * 0.4)}px`;
  }, [draft.value]);
  const go = () => {
    if (!draft.value.trim() || streaming.value) return;
    const text = draft.value;
    draft.value = "";
    send(text);
  };
  const onKeyDown = (event: KeyboardEvent) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      go();
    }
    if (event.key === "ArrowUp" && !draft.value && !streaming.value) {
      event.preventDefault();
      takeBack();
    }
  };
  return (
    <form
      class="composer"
      onSubmit={(event) => {
        event.preventDefault();
        go();
      }}
    >
      <textarea ref={area} rows={1} value={draft.value} placeholder="Write to the model" aria-label="Message" onInput={(e) => (draft.value = e.currentTarget.value)} onKeyDown={onKeyDown} />
      <div class="row">
        <button type="button" class="plain" onClick={() => (listOpen.value = !listOpen.value)} aria-expanded={listOpen.value}>
          Conversations
        </button>
        <button type="button" class="plain" onClick={() => { begin(); focusComposer(); }} title="New conversation (n)">
          New
        </button>
        <button type="button" class="plain" onClick={() => (settingsOpen.value = true)} title="Settings (s)">
          Settings
        </button>
        <span class="grow" />
        {streaming.value ? (
          <button type="button" class="main" onClick={stop} title="Stop (Esc)">
            Stop
          </button>
        ) : (
          <button class="main" disabled={!draft.value.trim()} title="Send (Enter)">
            Send
          </button>
        )}
      </div>
    </form>
  );
}

function List(): JSX.Element {
  void changed.value;
  return (
    <nav class="list" aria-label="Conversations">
      {conversations.value.filter((one) => one.turns.length).map((one) => (
        <div class={one.id === current.value ? "one open" : "one"} key={one.id}>
          <button class="plain" aria-current={one.id === current.value} onClick={() => { open(one.id); listOpen.value = false; }}>
            {title(one)}
            <small>{new Date(one.at).toLocaleString([], { dateStyle: "medium", timeStyle: "short" })}</small>
          </button>
          <button class="plain" aria-label={`Delete: ${title(one)}`} onClick={() => remove(one.id)}>
            ✕
          </button>
        </div>
      ))}
      {!conversations.value.some((one) => one.turns.length) && <p class="empty">Nothing yet. Conversations are kept in this browser alone.</p>}
    </nav>
  );
}

export function ChatView(): JSX.Element {
  return (
    <main class="chat" aria-label="Chat">
      {listOpen.value && <List />}
      <Thread />
      <Composer />
      {settingsOpen.value && <SettingsDialog onClose={() => (settingsOpen.value = false)} />}
    </main>
  );
}
