"""`octavo bench offline`: how fast a loaded model is, beside what this machine could do at most.

Every cell sends `concurrency` prompts of random tokens at once and lets each write `output` tokens,
greedy, with no stop and no prefix cache. Prefill is counted until the last first token, decode
after it. The roof is the cost of the same program at the machine's measured ceilings, a step for
every token. So nothing is guessed unless it is asked for: with `--speculation auto` speed may pass
the roof, and the share of guessed tokens is told.
"""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass
from typing import Any

from octavo.ceilings import Ceilings, hardware, measure_ceilings
from octavo.core.request import SamplingParams
from octavo.errors import InvalidRequest
from octavo.llm import LLM
from octavo.neighbours import Neighbours
from octavo.ops.cost import cost
from octavo.ops.table import KV_DTYPES, RowShape, StepShape

SEED = 20260229


@dataclass(frozen=True, slots=True)
class Plan:
    """Which cells to measure: every prompt length with every concurrency, `repeat` times."""

    prompt: tuple[int, ...] = (512,)
    output: int = 64
    concurrency: tuple[int, ...] = (1, 16)
    repeat: int = 3

    def __post_init__(self) -> None:
        if self.output < 2 or self.repeat < 1:
            raise InvalidRequest("a bench needs --output of at least 2 and --repeat of at least 1")


@dataclass(frozen=True, slots=True)
class Run:
    """Seconds of one run: until all first tokens, after that, and per request. guessed: tokens
    that speculation saved a step each."""

    prefill: float
    decode: float
    decoded: int
    ttft: float
    tpot: float
    guessed: int


def measure(llm: LLM, plan: Plan, ceilings: Ceilings | None = None) -> dict[str, Any]:
    """Run the plan; the report as plain values. ceilings: measured here if not given."""
    config, around = llm.config, Neighbours()
    if ceilings is None:
        ceilings = measure_ceilings(config.threads, config.isa)
    _warm(llm)
    cells = []
    for prompt in plan.prompt:
        for at_once in plan.concurrency:
            runs = [_run(llm, prompt, plan.output, at_once, i) for i in range(plan.repeat)]
            cells.append(_cell(llm, (prompt, plan.output, at_once), runs, ceilings))
    return {
        "model": llm.assembly.name,
        "threads": config.threads,
        "isa": config.isa,
        "speculation": config.speculation,
        "ceilings": ceilings.as_dict(),
        "repeat": plan.repeat,
        "neighbours": around.share(),
        "cells": cells,
    }


def _warm(llm: LLM) -> None:
    llm.generate([[1] * 8], SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))


def _prompts(llm: LLM, length: int, count: int, run: int) -> list[list[int]]:
    draw = random.Random(f"{SEED} {length} {count} {run}")
    top = llm.assembly.door.vocab_size
    return [[draw.randrange(top) for _ in range(length)] for _ in range(count)]


def _run(llm: LLM, prompt: int, output: int, at_once: int, run: int) -> Run:
    params = SamplingParams(max_tokens=output, temperature=0, ignore_eos=True)
    prompts = _prompts(llm, prompt, at_once, run)
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    decoded = guessed = 0
    start = time.perf_counter()
    for piece in llm.stream(prompts, params):
        now = time.perf_counter()
        if piece.error is not None:
            raise InvalidRequest(piece.error)
        first.setdefault(piece.prompt_index, now)
        last[piece.prompt_index] = now
        if piece.finish_reason is not None:
            guessed += piece.num_accepted
        if len(first) == at_once:
            decoded += len(piece.token_ids)
    begun = max(first.values())
    end = max(last.values())
    # The step that brought the last first token counts as prefill, all its tokens with it.
    decoded -= sum(1 for at in first.values() if at == begun)
    tpots = [(last[i] - first[i]) / (output - 1) for i in first]
    ttft = statistics.mean(at - start for at in first.values())
    return Run(begun - start, end - begun, decoded, ttft, statistics.mean(tpots), guessed)


def _cell(
    llm: LLM, shape: tuple[int, int, int], runs: list[Run], ceilings: Ceilings
) -> dict[str, Any]:
    prompt, output, at_once = shape
    prefill = statistics.median(prompt * at_once / run.prefill for run in runs)
    decode = statistics.median(run.decoded / run.decode for run in runs)
    prefill_roof, decode_roof = roofs(llm, shape, ceilings)
    return {
        "prompt": prompt,
        "output": output,
        "concurrency": at_once,
        "prefill_tokens_per_s": prefill,
        "prefill_roof_tokens_per_s": prefill_roof,
        "prefill_share": prefill / prefill_roof,
        "decode_tokens_per_s": decode,
        "decode_roof_tokens_per_s": decode_roof,
        "decode_share": decode / decode_roof,
        "ttft_s": statistics.median(run.ttft for run in runs),
        "guessed_share": statistics.median(run.guessed for run in runs) / (output * at_once),
        "tpot_s": statistics.median(run.tpot for run in runs),
    }


def roofs(llm: LLM, shape: tuple[int, int, int], ceilings: Ceilings) -> tuple[float, float]:
    """(prefill, decode) tokens per second that the machine's ceilings allow."""
    prompt, output, at_once = shape
    capacity, program = llm.assembly.door.capacity, llm.assembly.program
    machine = hardware(ceilings, program, llm.config.act)

    kv = KV_DTYPES[llm.config.kv_dtype]

    def seconds(rows: list[RowShape]) -> float:
        return cost(program, StepShape(tuple(rows), kv), machine).seconds

    prefill, left, row = 0.0, prompt * at_once, list[RowShape]()
    while left:
        budget, row = capacity.max_tokens, []
        while budget and left and len(row) < capacity.max_rows:
            done = -left % prompt
            size = min(budget, prompt - done)
            row.append(RowShape(done, size, int(done + size == prompt)))
            budget, left = budget - size, left - size
        prefill += seconds(row)
    rows = min(at_once, capacity.max_rows)
    decode = seconds([RowShape(prompt + output // 2, 1, 1)] * rows)
    return prompt * at_once / prefill, rows / decode
