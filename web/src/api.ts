/** Asking the server: the key, the model, and errors that say what was wrong. */
import { signal } from "@preact/signals";

const KEY = "octavo.key";

/** No key fits: nothing is asked until another is given; and whether it is being asked for. */
export const needsKey = signal(false);
export const askingKey = signal(false);
export const model = signal("");
export const version = signal("");

export class Refusal extends Error {
  constructor(
    message: string,
    readonly status: number,
    readonly code: string | null,
    readonly retryAfter: number | null,
  ) {
    super(message);
  }
}

export function key(): string {
  return sessionStorage.getItem(KEY) ?? localStorage.getItem(KEY) ?? "";
}

export function keepKey(value: string, remember: boolean): void {
  localStorage.removeItem(KEY);
  sessionStorage.removeItem(KEY);
  if (value) (remember ? localStorage : sessionStorage).setItem(KEY, value);
  needsKey.value = askingKey.value = false;
}

/** Like fetch, with the key; raises `Refusal`. Where no key fits, the page is told to ask for one. */
export async function ask(path: string, init: RequestInit = {}): Promise<Response> {
  const headers = new Headers(init.headers);
  const given = key();
  if (given) headers.set("authorization", `Bearer ${given}`);
  const answer = await fetch(path, { ...init, headers, credentials: "omit" });
  if (answer.ok) return answer;
  if (answer.status === 401) needsKey.value = askingKey.value = true;
  throw await refusal(answer);
}

async function refusal(answer: Response): Promise<Refusal> {
  let message = `the server answered ${answer.status}`;
  let code: string | null = null;
  try {
    const body = (await answer.json()) as { error?: { message?: string; code?: string } };
    message = body.error?.message ?? message;
    code = body.error?.code ?? null;
  } catch {
    // not one of ours: the status says enough
  }
  const wait = answer.headers.get("retry-after");
  return new Refusal(message, answer.status, code, wait === null ? null : Number(wait));
}

export function post(path: string, body: unknown, signal?: AbortSignal): Promise<Response> {
  return ask(path, {
    method: "POST",
    body: JSON.stringify(body),
    headers: { "content-type": "application/json" },
    signal: signal ?? null,
  });
}

/** Learn what is served. */
export async function greet(): Promise<void> {
  const list = (await (await ask("v1/models")).json()) as { data: { id: string }[] };
  model.value = list.data[0]?.id ?? "";
}
