"""The workloads every engine is given: the same token ids, the same number of tokens to make.

The text is English prose that ships inside Python (`pydoc_data.topics`), so nothing is fetched.
Everything is a function of (name, tokenizer, salt). Lengths do not depend on the tokenizer, so
that models see the same shape of work. The salt replaces two tokens near the start of every prompt
(the same two in one run): a prefix cache helps inside a run, as in life, and never between runs.

    chat            64 requests, prompt ~ lognormal(120, 0.8) in 8..600,
                    output ~ lognormal(80, 0.7) in 4..300
    shared_prefix   48 requests, one 512-token prefix, 30..80 tokens of their own, 48 output tokens
    single          one request, 16 in, 128 out: one stream
    batch8          8 requests, 16 in, 128 out: independent streams
    prefill         one request, 512 in, 1 out
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

Encode = Callable[[str], list[int]]
NAMES = ("chat", "shared_prefix", "single", "batch8", "prefill")
SEED = 1729


@dataclass(frozen=True)
class Job:
    """One request: token ids to read, and how many tokens to make (end-of-text ignored)."""

    prompt: list[int]
    max_tokens: int


def corpus(encode: Encode) -> list[int]:
    from pydoc_data import topics

    return encode("\n\n".join(topics.topics[name] for name in sorted(topics.topics)))


def _lognormal(rng: random.Random, median: float, sigma: float, low: int, high: int) -> int:
    return max(low, min(high, round(rng.lognormvariate(math.log(median), sigma))))


def build(name: str, ids: list[int], bos: int | None = None, salt: int = 0) -> list[Job]:
    """The jobs of workload `name` over the corpus `ids`; `bos` leads and is counted."""
    shape = random.Random(f"shape {name} {SEED}")
    text = random.Random(f"text {name} {SEED}")
    salted = random.Random(f"salt {salt}")
    head = ([] if bos is None else [bos]) + [salted.choice(ids), salted.choice(ids)]

    def window(n: int) -> list[int]:
        start = text.randrange(len(ids) - n)
        return ids[start : start + n]

    def prompt(n: int) -> list[int]:
        return (head + window(max(0, n - len(head))))[:n]

    if name == "chat":
        return [
            Job(prompt(_lognormal(shape, 120, 0.8, 8, 600)), _lognormal(shape, 80, 0.7, 4, 300))
            for _ in range(64)
        ]
    if name == "shared_prefix":
        prefix = prompt(512)
        return [Job(prefix + window(shape.randint(30, 80)), 48) for _ in range(48)]
    if name == "single":
        return [Job(prompt(16), 128)]
    if name == "batch8":
        return [Job(prompt(16), 128) for _ in range(8)]
    if name == "prefill":
        return [Job(prompt(512), 1)]
    raise ValueError(f"unknown workload {name!r}: one of {', '.join(NAMES)}")
