"""`octavo bench step`: where the whole wall time of real steps goes, to the last part.

Prompts run through the engine as they do for everybody; every step is watched from outside. The
parts of a phase add up to its wall time: each op's computing, the barriers (their number times
what a barrier costs when nobody is late), imbalance (the other waiting at barriers), sampling and
setting steps up, the Python between steps (processor time of the driving thread), and idling
(the rest: the thread stood still, waiting or without a processor).
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from octavo.assembly import Assembly
from octavo.benchmark import roofline
from octavo.benchmark.kernels import Again, Watch, step_shape
from octavo.ceilings import Ceilings, reread
from octavo.core.batch import Batch, StepResult
from octavo.core.engine import Engine
from octavo.core.request import SamplingParams
from octavo.errors import InvalidRequest
from octavo.llm import LLM
from octavo.ops.table import RowShape, StepShape
from octavo.runtime.cpu import Spent

SEED = 20260229


@dataclass(frozen=True, slots=True)
class Plan:
    """`concurrency` prompts of `prompt` random tokens at once, `output` tokens each."""

    prompt: int = 512
    output: int = 64
    concurrency: tuple[int, ...] = (1, 16)

    def __post_init__(self) -> None:
        if self.output < 2 or self.prompt < 1:
            raise InvalidRequest("a bench needs --output of at least 2 and --prompt of at least 1")


class Watcher:
    """An executor around the real one that keeps the shape of each step and when it ran.

    cpu_s: processor time of the driving thread inside the steps.
    """

    def __init__(self, executor: Any) -> None:
        self.inner = executor
        self.capacity = executor.capacity
        self.reset()

    def reset(self) -> None:
        self.shapes: list[tuple[RowShape, ...]] = []
        self.step_s = self.cpu_s = 0.0
        self.inner.reset_timing()

    def submit(self, batch: Batch) -> None:
        rows = (RowShape(r.start, len(r.tokens), len(r.outputs)) for r in batch.rows)
        self.shapes.append(tuple(rows))
        self.inner.submit(batch)

    def collect(self) -> StepResult:
        cpu, start = time.thread_time(), time.perf_counter()
        result: StepResult = self.inner.collect()
        self.step_s += time.perf_counter() - start
        self.cpu_s += time.thread_time() - cpu
        return result

    def ready_at(self) -> float | None:
        ready: float | None = self.inner.ready_at()
        return ready


@dataclass(frozen=True, slots=True)
class Span:
    """What was watched of one phase. wall_s, cpu_s: of the driving thread, from end to end;
    step_s, step_cpu_s: the part of them inside the executor's collect."""

    shapes: tuple[tuple[RowShape, ...], ...]
    spent: Spent
    wall_s: float
    cpu_s: float
    step_s: float
    step_cpu_s: float


def measure(
    assembly: Assembly,
    plan: Plan,
    ceilings: Ceilings,
    watch: Watch = lambda _: None,
    again: Again = reread,
) -> dict[str, Any]:
    """Run the plan; the report as plain values. again: as in `kernels.measure`."""
    watcher = Watcher(assembly.executor)
    engine = Engine(watcher, assembly.engine.scheduler)
    llm = LLM.over(replace(assembly, engine=engine))
    _run(llm, watcher, replace(plan, prompt=8, output=2), 1)
    cells, best = [], 0.0
    for at_once in plan.concurrency:
        watch(f"{at_once} at once")
        before = again(ceilings)
        prefill, decode = _run(llm, watcher, plan, at_once)
        roof = max(before, again(ceilings), key=lambda found: found.all.dram)
        best = max(best, roof.all.dram)
        for phase, span in (("prefill", prefill), ("decode", decode)):
            cells.append({"phase": phase, "concurrency": at_once} | account(assembly, span, roof))
    return {
        "model": assembly.name,
        "threads": ceilings.threads,
        "isa": ceilings.isa,
        "act": assembly.config.act,
        "prompt": plan.prompt,
        "output": plan.output,
        "ceilings": replace(ceilings, all=replace(ceilings.all, dram=best)).as_dict(),
        "cases": cells,
    }


def _run(llm: LLM, watcher: Watcher, plan: Plan, at_once: int) -> tuple[Span, Span]:
    """The steps until the last first token, and those after it."""
    draw = random.Random(f"{SEED} {at_once}")
    top = llm.assembly.door.vocab_size
    prompts = [[draw.randrange(top) for _ in range(plan.prompt)] for _ in range(at_once)]
    params = SamplingParams(max_tokens=plan.output, temperature=0, ignore_eos=True)
    pieces = llm.stream(prompts, params)
    clock = _Clock(watcher)
    begun: set[int] = set()
    for piece in pieces:
        if piece.error is not None:
            raise InvalidRequest(piece.error)
        begun.add(piece.prompt_index)
        if len(begun) == at_once:
            break
    prefill = clock.lap()
    for _ in pieces:
        pass
    return prefill, clock.lap()


class _Clock:
    """Times of the driving thread since the last lap, with what the watcher saw meanwhile."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._start()

    def _start(self) -> None:
        self._watcher.reset()
        self._wall, self._cpu = time.perf_counter(), time.thread_time()

    def lap(self) -> Span:
        wall, cpu = time.perf_counter() - self._wall, time.thread_time() - self._cpu
        w = self._watcher
        span = Span(tuple(w.shapes), w.inner.spent(), wall, cpu, w.step_s, w.cpu_s)
        self._start()
        return span


def account(assembly: Assembly, span: Span, ceilings: Ceilings) -> dict[str, Any]:
    """The parts of a phase's wall time, which add up to it, and its ops beside their roofs."""
    program, spent = assembly.program, span.spent
    count = len(program.instrs)
    busy, wait = spent.busy.mean(axis=0), spent.wait.mean(axis=0)
    shapes = [step_shape(assembly, rows) for rows in span.shapes]
    asked = [roofline.demands(program, shape, ceilings, assembly.config.act) for shape in shapes]
    found = roofline.dots(asked, [float(s) for s in busy[:count]])
    parts = {dot.op: dot.seconds for dot in found}
    parts |= {"sample": float(busy[count]), "set up": float(busy[count + 1])}
    parts |= _lost(span, float(wait.sum()), ceilings.barrier_s)
    least = sum(d.least_s for step in asked for d in step)
    wall = span.wall_s
    return {
        "steps": len(shapes),
        "tokens": sum(shape.num_tokens for shape in shapes),
        "wall_s": wall,
        "dram_bytes_per_s": ceilings.all.dram,
        "least_s": least,
        "fraction": least / wall if wall else 0.0,
        "barriers": float(spent.barriers.sum()) / max(spent.steps, 1),
        "parts": parts,
        "ops": [dot.as_dict(wall) for dot in found],
        "naive_attention_intensity": _naive(assembly, shapes),
        "python_share": parts["python"] / wall if wall else 0.0,
    }


def _lost(span: Span, waited: float, barrier_s: float) -> dict[str, float]:
    """Time in which nothing was computed. The remainder closes the account."""
    spent = span.spent
    barriers = min(float(spent.barriers.sum()) * barrier_s, waited)
    inside = float((spent.busy + spent.wait).mean(axis=0).sum())
    outside_cpu = max(0.0, span.cpu_s - span.step_cpu_s)
    # Encoding the step and decoding its results is Python too, inside collect.
    python = min(outside_cpu + max(0.0, span.step_s - inside), span.wall_s - inside)
    return {
        "barriers": barriers,
        "imbalance": waited - barriers,
        "python": max(0.0, python),
        "idle": span.wall_s - inside - max(0.0, python),
    }


def _naive(assembly: Assembly, shapes: Iterable[StepShape]) -> float:
    """The intensity of naive attention in the last of the steps."""
    last: Sequence[StepShape] = tuple(shapes)[-1:]
    return roofline.naive_intensity(assembly.program, last[0]) if last else 0.0


def total(parts: dict[str, float]) -> float:
    """Of all parts: the wall time."""
    return float(np.sum(list(parts.values())))
