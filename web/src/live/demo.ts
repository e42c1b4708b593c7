/** Sample conversations, for those who want to see the engine work: real requests, from this page. */
import { signal } from "@preact/signals";
import { model, post, Refusal } from "../api";

const AT_ONCE = 4; // a browser has six connections; the chat and the live view need theirs
const SYSTEM =
  "You are the assistant of a small public library. You answer in plain words, in whole sentences, and you say so when you " +
  "are not sure. You know the shelves, the opening hours (Monday to Saturday, nine to six), the reading group on Thursdays, " +
  "and how to borrow, renew and reserve books. You never invent titles. Visitors are of every age; be kind and be brief.";
const QUESTIONS = [
  "Which books about the sea would you give to a child of ten?",
  "How do I renew a book that I left at home?",
  "I liked Jane Austen. What should I read next, and why?",
  "Explain to me how a library keeps track of a million books.",
  "When does the reading group meet, and what happens there?",
  "My son wants to know why the sky is blue. Where do we look?",
  "Could you write a short note that thanks our volunteers?",
  "What is the difference between a novel and a novella?",
  "Tell me a very short story about a lost library card.",
  "How were books made before there was printing?",
];

export const demoing = signal(false);
export const demoTrouble = signal("");
let stop: AbortController | null = null;

export function stopDemo(): void {
  stop?.abort();
}

/** About forty sequences over half a minute: several at once, with one beginning, of many lengths. */
export async function startDemo(): Promise<void> {
  if (demoing.value) return stopDemo();
  demoing.value = true;
  demoTrouble.value = "";
  stop = new AbortController();
  const own = stop;
  let next = 0;
  const runner = async (delay: number) => {
    await new Promise((done) => setTimeout(done, delay));
    while (next < QUESTIONS.length && !own.signal.aborted) await one(next++, own.signal);
  };
  try {
    await Promise.all(Array.from({ length: AT_ONCE }, (_, i) => runner(i * 500)));
  } catch (error) {
    if (!own.signal.aborted) demoTrouble.value = error instanceof Refusal ? error.message : "the server cannot be reached";
  } finally {
    own.abort();
    demoing.value = false;
  }
}

async function one(number: number, signal: AbortSignal): Promise<void> {
  const body = {
    model: model.value,
    messages: [
      { role: "system", content: SYSTEM },
      { role: "user", content: QUESTIONS[number] },
    ],
    max_tokens: 48 + ((number * 53) % 5) * 40,
    temperature: 0.8,
    n: 3 + (number % 5),
  };
  try {
    await (await post("v1/chat/completions", body, signal)).arrayBuffer();
  } catch (error) {
    // A server may allow fewer choices: then one will do.
    if (!(error instanceof Refusal) || error.status !== 400) throw error;
    await (await post("v1/chat/completions", { ...body, n: 1 }, signal)).arrayBuffer();
  }
}
