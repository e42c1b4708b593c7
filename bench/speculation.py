"""What speculation by prompt lookup is worth, and what it costs where it is worth nothing: the same
requests with and without, in turn.

    python bench/speculation.py [--model NAME] [--streams 1 8] [--work edit trap] [--repeats 5]

edit        a source file (Python's own library) and the request to repeat it with one name changed
summarise   a passage of documentation and the request to retell it
prose       short questions: little to look up
random      random tokens, and more of them at a temperature of 3: nothing to look up
trap        the prose, with a drafter that always finds a place and always says the wrong thing

The first three greedily and at temperature 0.8. Every repeat runs both variants one after the other
on one engine, without a prefix cache unless --cached, the order rotating, and a third time without
guesses: how far that is from the first says how much of a ratio is the machine's. Ratios are of
decoding alone (from the step after the last first token) and of all of it (total): medians and
quartiles of the repeats.
Tokens are compared: they must be equal. The drafter learns from repeat to repeat, as in a server.
"""

from __future__ import annotations

import argparse
import inspect
import json
import random
import statistics
import textwrap
import time
from array import array
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from octavo import LLM, SamplingParams
from octavo.core.drafter import Drafter, NoDrafter, PromptLookup
from octavo.core.ngrams import LONGEST
from octavo.core.request import Sequence


class Wrong(PromptLookup):
    """Finds a place for every token, and says the wrong thing."""

    def lookup(self, seq: Sequence, most: int) -> tuple[int, array[int]]:
        super().lookup(seq, most)
        return LONGEST, array("i", [(seq.tokens[-1] * 31 + 7) % 1000 + 100] * most)


class Work(NamedTuple):
    """Requests of one kind."""

    name: str
    temperature: float
    prompts: list[list[int]]


class Run(NamedTuple):
    """Seconds of decoding and of all; the tokens; steps, guesses and guesses that held."""

    decode: float
    total: float
    made: tuple[tuple[int, ...], ...]
    steps: int
    drafted: int
    accepted: int


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


def works(llm: LLM, streams: int) -> list[Work]:
    def ask(texts: Iterable[str]) -> list[list[int]]:
        asked = [llm.chat_ids([{"role": "user", "content": text}]) for text in texts]
        return [asked[i % len(asked)] for i in range(streams)]

    edit = ask(
        f"Rename the first argument to `value`. Answer with the whole file.\n```python\n{text}```"
        for text in sources()
    )
    retell = ask(f"Summarise this in five sentences:\n\n{text}" for text in passages())
    prose = ask(QUESTIONS)
    draw = random.Random(20260229)
    top = llm.assembly.door.vocab_size
    noise = [[draw.randrange(top) for _ in range(64)] for _ in range(streams)]
    made = [
        Work(name, temperature, prompts)
        for name, prompts in (("edit", edit), ("summarise", retell), ("prose", prose))
        for temperature in (0.0, 0.8)
    ]
    return [*made, Work("random", 3.0, noise), Work("trap", 0.8, prose)]


def run(llm: LLM, work: Work, tokens: int, drafter: Drafter, clock: Callable[[], float]) -> Run:
    """Let every stream write `tokens` tokens."""
    engine, door = llm.assembly.engine, llm.assembly.door
    scheduler = engine.scheduler
    scheduler.drafter = drafter
    params = SamplingParams(
        temperature=work.temperature, max_tokens=tokens, ignore_eos=True, seed=1
    )
    counters = scheduler.stats.counters
    before = counters.steps, counters.drafted_tokens, counters.accepted_tokens
    made: dict[str, tuple[int, ...]] = {}
    begun = clock()
    for i, prompt in enumerate(work.prompts):
        made[str(i)] = ()
        engine.add(door.request(str(i), prompt, params, arrival=0.0))
    start = 0.0
    while engine.has_work:
        engine.pump(0.0)
        for event in engine.drain(0.0):
            made[event.request_id] += event.tokens
        if not start and all(made.values()):
            start = clock()
    end = clock()
    after = counters.steps, counters.drafted_tokens, counters.accepted_tokens
    grown = (x - y for x, y in zip(after, before, strict=True))
    return Run(end - start, end - begun, tuple(made.values()), *grown)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--work", nargs="+", help="Kinds to run, such as edit@0.8 or trap.")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument(
        "--cached",
        action="store_true",
        help="With a prefix cache: prompts are read once, so streams begin with less to spend.",
    )
    parser.add_argument(
        "--cpu", action="store_true", help="One thread, and its processor time: for a busy machine."
    )
    args = parser.parse_args()
    llm = LLM(
        args.model,
        prefix_caching=args.cached,
        kv_memory=1 << 29,
        threads=1 if args.cpu else None,
    )
    clock = time.process_time if args.cpu else time.perf_counter
    out = []
    print(args.model, "(processor time of one thread)" if args.cpu else "")
    print(
        "streams  work           speedup (quartiles)     total   control (quartiles)    plain tok/s"
        "  steps  drafted  held"
    )
    for streams in args.streams:
        for work in works(llm, streams):
            full = f"{work.name}@{work.temperature:g}"
            if args.work is None or {work.name, full} & set(args.work):
                out.append(cell(llm, work, args.repeats, args.tokens, clock))
    print(json.dumps({"bench": "speculation", "model": args.model, "cells": out}))


def cell(
    llm: LLM, work: Work, repeats: int, tokens: int, clock: Callable[[], float]
) -> dict[str, Any]:
    """Both variants in turn, the order rotating; prints a line."""
    drafters: dict[str, Drafter] = {
        "plain": NoDrafter(),
        "guessed": Wrong() if work.name == "trap" else PromptLookup(),
        "control": NoDrafter(),
    }
    runs: dict[str, list[Run]] = {variant: [] for variant in drafters}
    names = list(drafters)
    for repeat in range(repeats):
        turn = names[repeat % 3 :] + names[: repeat % 3]
        for variant in turn if repeat % 2 else reversed(turn):
            runs[variant].append(run(llm, work, tokens, drafters[variant], clock))
    assert len({each.made for all in runs.values() for each in all}) == 1, "other tokens"
    decode, total = ratios(runs, "guessed", "decode"), ratios(runs, "guessed", "total")
    control, last = ratios(runs, "control", "decode"), runs["guessed"][-1]
    streams, name = len(work.prompts), f"{work.name}@{work.temperature:g}"
    rate = streams * (tokens - 1) / statistics.median(each.decode for each in runs["plain"])
    print(
        f"{streams:7}  {name:13} {shown(decode)} {statistics.median(total):8.2f}x"
        f"  {shown(control)} {rate:10.0f} {last.steps:6} {last.drafted:8}"
        f" {last.accepted / max(1, last.drafted):5.0%}",
        flush=True,
    )
    return {
        "streams": streams, "work": work.name, "temperature": work.temperature,
        "speedup": statistics.median(decode), "speedup_total": statistics.median(total),
        "control": statistics.median(control), "plain_tokens_per_s": rate,
        "decode_s": {name: [round(each.decode, 4) for each in all] for name, all in runs.items()},
        "steps": last.steps, "drafted": last.drafted, "accepted": last.accepted,
    }  # fmt: skip


def ratios(runs: dict[str, list[Run]], variant: str, what: str) -> list[float]:
    """How many times faster than plain the variant was, for each repeat."""
    pairs = zip(runs["plain"], runs[variant], strict=True)
    return [getattr(plain, what) / getattr(other, what) for plain, other in pairs]


def shown(values: list[float]) -> str:
    """Median and quartiles."""
    low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return f"{statistics.median(values):6.2f}x ({low:.2f} .. {high:.2f})"


if __name__ == "__main__":
    main()
