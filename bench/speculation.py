"""What speculation by prompt lookup is worth: the same requests with and without, in turn.

    python bench/speculation.py [--model NAME] [--streams 1 8] [--repeats 5]

edit        a source file (Python's own library) and the request to repeat it with one name changed
summarise   a passage of documentation and the request to retell it
chat        short questions, sampled at temperature 1: little to look up
surprise    the chat, with a drafter that always guesses wrong: the worst case

Every repeat runs both variants one after the other on one engine without a prefix cache, the order
rotating. Times are of decoding alone (from the step after the last first token), medians. Tokens
are compared: they must be equal. The drafter learns from repeat to repeat, as in a server.
"""

from __future__ import annotations

import argparse
import inspect
import json
import statistics
import textwrap
import time
from array import array
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from octavo import LLM, SamplingParams
from octavo.core.drafter import Drafter, NoDrafter, PromptLookup
from octavo.core.request import Sequence


class Wrong(PromptLookup):
    """Finds a place for every token, and says the wrong thing."""

    def lookup(self, seq: Sequence, most: int) -> tuple[int, array[int]]:
        super().lookup(seq, most)
        return self.max_ngram, array("i", [(seq.tokens[-1] * 31 + 7) % 1000 + 100] * most)


class Work(NamedTuple):
    """Requests of one kind."""

    prompts: list[list[int]]
    params: SamplingParams


def sources() -> list[str]:
    """Functions of the standard library, of middling length."""
    found = [inspect.getsource(f) for _, f in inspect.getmembers(textwrap, inspect.isfunction)]
    found += [inspect.getsource(f) for _, f in inspect.getmembers(statistics, inspect.isfunction)]
    return [text for text in found if 500 < len(text) < 1600]


def passages() -> list[str]:
    from pydoc_data import topics

    return [text[:1500] for _, text in sorted(topics.topics.items()) if len(text) > 3000]


QUESTIONS = [
    "What would you pack for a week in the mountains?",
    "Why do cats purr?",
    "Invent a name for a café and say what it serves.",
    "Tell me about a day in the life of a lighthouse keeper.",
    "How does bread rise?",
    "Write a limerick about rain.",
    "What makes a good neighbour?",
    "Describe the smell of a library.",
]


def works(llm: LLM, streams: int, tokens: int) -> dict[str, Work]:
    def ask(texts: Iterable[str]) -> list[list[int]]:
        asked = [llm.chat_ids([{"role": "user", "content": text}]) for text in texts]
        return [asked[i % len(asked)] for i in range(streams)]

    greedy = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    warm = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, seed=1)
    edit = [
        f"Rename the first argument to `value`. Answer with the whole file.\n```python\n{text}```"
        for text in sources()
    ]
    retell = [f"Summarise this in five sentences:\n\n{text}" for text in passages()]
    return {
        "edit": Work(ask(edit), greedy),
        "summarise": Work(ask(retell), greedy),
        "chat": Work(ask(QUESTIONS), warm),
        "surprise": Work(ask(QUESTIONS), warm),
    }


def decode(
    llm: LLM, work: Work, drafter: Drafter, clock: Callable[[], float]
) -> tuple[float, list[tuple[int, ...]], tuple[int, int, int]]:
    """Time from the step after the last first token to the end; the tokens; steps, guesses, and
    guesses that held."""
    engine, door = llm.assembly.engine, llm.assembly.door
    scheduler = engine.scheduler
    scheduler.drafter = drafter
    counters = scheduler.stats.counters
    before = counters.steps, counters.drafted_tokens, counters.accepted_tokens
    made: dict[str, tuple[int, ...]] = {}
    for i, prompt in enumerate(work.prompts):
        made[str(i)] = ()
        engine.add(door.request(str(i), prompt, work.params, arrival=0.0))
    start = 0.0
    while engine.has_work:
        engine.pump(0.0)
        for event in engine.drain(0.0):
            made[event.request_id] += event.tokens
        if not start and all(made.values()):
            start = clock()
    spent = clock() - start
    after = counters.steps, counters.drafted_tokens, counters.accepted_tokens
    steps, drafted, accepted = (x - y for x, y in zip(after, before, strict=True))
    return spent, list(made.values()), (steps, drafted, accepted)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument(
        "--cpu", action="store_true", help="One thread, and its processor time: for a busy machine."
    )
    args = parser.parse_args()
    threads = 1 if args.cpu else None
    llm = LLM(args.model, prefix_caching=False, kv_memory=1 << 29, threads=threads)
    clock = time.process_time if args.cpu else time.perf_counter
    out = []
    print(args.model, "(processor time of one thread)" if args.cpu else "")
    print("streams  work        plain s  guessed s  speedup  steps  drafted  held   repeats")
    for streams in args.streams:
        for name, work in works(llm, streams, args.tokens).items():
            out.append(cell(llm, name, work, args.repeats, clock))
    print(json.dumps({"bench": "speculation", "model": args.model, "cells": out}))


def cell(
    llm: LLM, name: str, work: Work, repeats: int, clock: Callable[[], float]
) -> dict[str, Any]:
    """Both variants in turn, the order rotating; prints a line."""
    drafters: dict[str, Drafter] = {
        "plain": NoDrafter(),
        "guessed": Wrong() if name == "surprise" else PromptLookup(),
    }
    seen: dict[str, list[float]] = {variant: [] for variant in drafters}
    tokens, grown = set(), (0, 0, 0)
    for repeat in range(repeats):
        for variant in list(drafters) if repeat % 2 else list(reversed(drafters)):
            spent, made, counts = decode(llm, work, drafters[variant], clock)
            seen[variant].append(spent)
            tokens.add(tuple(made))
            grown = counts if variant == "guessed" else grown
    assert len(tokens) == 1, "speculation changed tokens"
    steps, drafted, accepted = grown
    plain, guessed = (statistics.median(seen[v]) for v in ("plain", "guessed"))
    ratios = [p / g for p, g in zip(seen["plain"], seen["guessed"], strict=True)]
    print(
        f"{len(work.prompts):7}  {name:10} {plain:8.3f} {guessed:10.3f} {plain / guessed:8.2f}x"
        f" {steps:6} {drafted:8} {accepted / max(1, drafted):5.0%}   "
        f"{[round(r, 2) for r in ratios]}",
        flush=True,
    )
    return {
        "streams": len(work.prompts), "work": name, "plain_s": seen["plain"],
        "guessed_s": seen["guessed"], "speedup": plain / guessed, "steps": steps,
        "drafted": drafted, "accepted": accepted,
    }  # fmt: skip


if __name__ == "__main__":
    main()
