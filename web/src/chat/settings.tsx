/** How the next answer is asked for. Kept with the conversation. */
import type { JSX } from "preact";
import { Dialog } from "../dialog";
import { changed, conversation, conversations, DEFAULTS, settle, tools, type Settings } from "./store";

type Numbers = { [K in keyof Settings]: Settings[K] extends number | null ? K : never }[keyof Settings];

interface Knob {
  name: Numbers;
  label: string;
  help: string;
  min: number;
  max: number;
  step: number;
  empty?: string;
}

const KNOBS: Knob[] = [
  { name: "temperature", label: "Temperature", help: "0 takes the likeliest; 1 is the model’s own distribution.", min: 0, max: 2, step: 0.05 },
  { name: "top_p", label: "Top p", help: "Keep the smallest set with this probability.", min: 0.01, max: 1, step: 0.01 },
  { name: "top_k", label: "Top k", help: "Keep the k likeliest; 0 keeps all.", min: 0, max: 200, step: 1 },
  { name: "min_p", label: "Min p", help: "Drop what is less likely than this share of the likeliest.", min: 0, max: 1, step: 0.01 },
  { name: "max_tokens", label: "Most tokens", help: "Empty: until the model stops.", min: 1, max: 1_000_000, step: 1, empty: "no limit" },
  { name: "seed", label: "Seed", help: "Repeats an answer exactly.", min: 0, max: 2 ** 31 - 1, step: 1, empty: "random" },
  { name: "repetition_penalty", label: "Repetition penalty", help: "Above 1: what is there already becomes less likely.", min: 0.5, max: 2, step: 0.05 },
  { name: "presence_penalty", label: "Presence penalty", help: "For words that were used at all.", min: -2, max: 2, step: 0.1 },
  { name: "frequency_penalty", label: "Frequency penalty", help: "For words, by how often they were used.", min: -2, max: 2, step: 0.1 },
];

function Field({ knob, value }: { knob: Knob; value: number | null }): JSX.Element {
  const { name, label, help, min, max, step, empty } = knob;
  const set = (event: Event) => {
    const input = event.target as HTMLInputElement;
    const number = input.valueAsNumber;
    if (Number.isNaN(number)) settle({ [name]: empty ? null : DEFAULTS[name] });
    else settle({ [name]: Math.min(Math.max(number, min), max) });
  };
  return (
    <label class="knob">
      <span>{label}</span>
      {!empty && <input type="range" aria-hidden="true" tabIndex={-1} min={min} max={max} step={step} value={value ?? min} onInput={set} />}
      <input type="number" name={name} min={min} max={max} step={step} value={value ?? ""} placeholder={empty} onChange={set} />
      <small>{help}</small>
    </label>
  );
}

export function SettingsDialog({ onClose }: { onClose: () => void }): JSX.Element {
  void changed.value;
  const settings = conversation.value?.settings ?? conversations.value[0]?.settings ?? DEFAULTS;
  let wrong = "";
  try {
    if (settings.tools.trim()) tools(settings.tools);
  } catch (error) {
    wrong = error instanceof Error ? error.message : "";
  }
  const text = (name: "system" | "stop" | "tools") => (event: Event) => settle({ [name]: (event.target as HTMLTextAreaElement).value });
  return (
    <Dialog title="How to answer" onClose={onClose}>
      <label class="field">
        <span>System prompt</span>
        <textarea name="system" rows={3} value={settings.system} onInput={text("system")} placeholder="Who the model is, and how it should answer." />
      </label>
      <div class="knobs">
        {KNOBS.map((knob) => (
          <Field key={knob.name} knob={knob} value={settings[knob.name]} />
        ))}
      </div>
      <label class="check">
        <input type="checkbox" name="logprobs" checked={settings.logprobs} onChange={(e) => settle({ logprobs: e.currentTarget.checked })} />
        <span>Ask how likely each token was, and show it where the pointer is</span>
      </label>
      <label class="field">
        <span>Stop at</span>
        <textarea name="stop" rows={2} value={settings.stop} onInput={text("stop")} placeholder="Texts that end the answer, one a line (four at most)." />
      </label>
      <label class="field">
        <span>Tools</span>
        <textarea name="tools" class="mono" rows={4} spellcheck={false} value={settings.tools} onInput={text("tools")}
          placeholder='[{"name": "weather", "description": "…", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}]' />
        {wrong && <small class="wrong">{wrong}</small>}
      </label>
      <footer>
        <button onClick={() => settle({ ...DEFAULTS })}>Defaults</button>
        <button class="main" onClick={onClose}>Done</button>
      </footer>
    </Dialog>
  );
}
