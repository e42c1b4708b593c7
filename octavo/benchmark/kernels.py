"""`octavo bench kernels`: every op of the loaded program, in steps of chosen shapes.

A step is made by hand and given to the executor as it is, so shapes are exact: `batch` sequences
that each have `context` tokens in the cache decode one more, or one sequence prefills `tokens`.
Each is run until `seconds` have passed; an op's time is the median over the steps of its time
in all layers, averaged over the threads, waiting at its barriers included.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from octavo.assembly import Assembly
from octavo.benchmark import roofline
from octavo.ceilings import Ceilings, reread
from octavo.core.batch import Batch, Row, SampleSpec, Want
from octavo.core.request import SamplingParams
from octavo.errors import InvalidRequest
from octavo.ops.table import KV_DTYPES, RowShape, StepShape

LEAST_STEPS = 5
Watch = Callable[[str], None]
Again = Callable[[Ceilings], Ceilings]


@dataclass(frozen=True, slots=True)
class Case:
    """One shape of step: `batch` rows of `tokens` new tokens after `context` cached ones."""

    phase: str  # "decode" or "prefill"
    batch: int
    tokens: int
    context: int

    @property
    def name(self) -> str:
        if self.phase == "decode":
            return f"decode, batch {self.batch}, context {self.context}"
        after = f" after {self.context}" if self.context else ""
        return f"prefill, {self.tokens} tokens{after}"

    @property
    def rows(self) -> tuple[RowShape, ...]:
        return (RowShape(self.context, self.tokens, 1),) * self.batch


@dataclass(frozen=True, slots=True)
class Plan:
    """Decode at every batch size with every context; prefill of every number of tokens."""

    batch: tuple[int, ...] = (1, 4, 16)
    context: tuple[int, ...] = (512,)
    tokens: tuple[int, ...] = (64, 512)
    seconds: float = 1.0

    def cases(self) -> Iterator[Case]:
        for context in self.context:
            for batch in self.batch:
                yield Case("decode", batch, 1, context)
        for tokens in self.tokens:
            yield Case("prefill", 1, tokens, 0)


@dataclass(frozen=True, slots=True)
class Timed:
    """Medians over a case's steps, in seconds: of the whole call, and of each instruction
    (`names`: the program's, then "sample" and "begin"), of which `wait` at barriers."""

    steps: int
    seconds: float
    names: tuple[str, ...]
    each: tuple[float, ...]
    wait: float

    def of(self, name: str) -> float:
        return sum(s for n, s in zip(self.names, self.each, strict=True) if n == name)


def measure(
    assembly: Assembly,
    plan: Plan,
    ceilings: Ceilings,
    watch: Watch = lambda _: None,
    again: Again = reread,
) -> dict[str, Any]:
    """Run every case that fits the engine; the report as plain values.

    again: measures the memory anew around each case; the better of the two counts.
    """
    cases, left_out, best = [], [], 0.0
    for case in plan.cases():
        if why := misfit(assembly, case):
            left_out.append({"case": case.name, "why": why})
            continue
        watch(case.name)
        timed, roof = time_under(assembly, case, plan.seconds, ceilings, again)
        cases.append(report(assembly, case, timed, roof))
        best = max(best, roof.all.dram)
    if not cases:
        raise InvalidRequest("no case fits: " + "; ".join(c["why"] for c in left_out))
    return {
        "model": assembly.name,
        "threads": ceilings.threads,
        "isa": ceilings.isa,
        "act": assembly.config.act,
        "ceilings": replace(ceilings, all=replace(ceilings.all, dram=best)).as_dict(),
        "cases": cases,
        "left_out": left_out,
    }


def misfit(assembly: Assembly, case: Case) -> str | None:
    """Why the engine cannot run a case, or None."""
    most = assembly.executor.capacity
    end = case.context + case.tokens
    blocks = case.batch * -(-end // most.block_size)
    if case.batch > most.max_rows:
        return f"{case.batch} rows are more than --max-rows {most.max_rows}"
    if case.batch * case.tokens > most.max_tokens:
        return f"{case.batch * case.tokens} tokens exceed --max-batch-tokens {most.max_tokens}"
    if end > most.max_context:
        return f"{end} tokens are beyond the context of {most.max_context}"
    if blocks > most.num_blocks:
        return f"{blocks} blocks of KV are more than the pool's {most.num_blocks}: --kv-memory"
    return None


def batch_of(assembly: Assembly, case: Case) -> Batch:
    """The step itself: each row has blocks of its own and wants its next token, greedy."""
    size = assembly.executor.capacity.block_size
    each = -(-(case.context + case.tokens) // size)
    draw = np.random.default_rng(case.tokens)
    rows = []
    for i in range(case.batch):
        ids = draw.integers(0, assembly.door.vocab_size, case.tokens)
        spec = SampleSpec(SamplingParams(temperature=0), 0, 0)
        table = array("i", range(i * each, (i + 1) * each))
        tokens = array("i", [int(id) for id in ids])
        rows.append(Row(i, case.context, tokens, table, (Want(case.tokens - 1, spec),)))
    return Batch(0, tuple(rows))


def time_case(assembly: Assembly, case: Case, seconds: float) -> Timed:
    """Run a case's step again and again for about `seconds`."""
    executor: Any = assembly.executor
    batch = batch_of(assembly, case)
    executor.fill_kv(sum(len(row.block_table) for row in batch.rows))
    executor.submit(batch)
    executor.collect()
    each: list[Any] = []
    wholes: list[float] = []
    waits: list[float] = []
    end = time.perf_counter() + seconds
    while len(wholes) < LEAST_STEPS or time.perf_counter() < end:
        executor.reset_timing()
        executor.submit(batch)
        executor.collect()
        spent = executor.spent()
        each.append((spent.busy + spent.wait).mean(axis=0))
        waits.append(float(spent.wait.mean(axis=0).sum()))
        wholes.append(spent.seconds)
    return Timed(
        len(wholes),
        float(np.median(wholes)),
        spent.instructions,
        tuple(float(s) for s in np.median(np.array(each), axis=0)),
        float(np.median(waits)),
    )


def time_under(
    assembly: Assembly, case: Case, seconds: float, ceilings: Ceilings, again: Again
) -> tuple[Timed, Ceilings]:
    """A case's times, and the ceilings with the memory as it was around it."""
    before = again(ceilings)
    timed = time_case(assembly, case, seconds)
    return timed, max(before, again(ceilings), key=lambda roof: roof.all.dram)


def report(assembly: Assembly, case: Case, timed: Timed, ceilings: Ceilings) -> dict[str, Any]:
    """A case's ops beside their roofs."""
    shape = step_shape(assembly, case.rows)
    asked = roofline.demands(assembly.program, shape, ceilings, assembly.config.act)
    found = roofline.dots([asked], timed.each[: len(asked)])
    least = sum(d.least_s for d in asked)
    return {
        "case": case.name,
        "phase": case.phase,
        "batch": case.batch,
        "tokens": case.tokens,
        "context": case.context,
        "steps": timed.steps,
        "seconds": timed.seconds,
        "wait_s": timed.wait,
        "dram_bytes_per_s": ceilings.all.dram,
        "least_s": least,
        "fraction": least / timed.seconds,
        "ops": [dot.as_dict(timed.seconds) for dot in found],
        "sample_s": timed.of("sample"),
        "begin_s": timed.of("begin"),
        "naive_attention_intensity": roofline.naive_intensity(assembly.program, shape),
    }


def step_shape(assembly: Assembly, rows: tuple[RowShape, ...]) -> StepShape:
    """Rows as a step of this engine, with its kind of KV cache."""
    return StepShape(rows, KV_DTYPES[assembly.config.kv_dtype])
