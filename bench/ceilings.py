"""The most that this machine allows in a cell, from peaks measured just before it.

`octavo.ops.cost` counts what a step must move and multiply, whoever runs it: the weights as they
are stored in the file once a step, K and V in bf16, every product. Peaks: the best read bandwidth
of all threads over a buffer as large as the weights that a step reads (what stays in the last
cache counts), and the best int8 and bf16 rates.

single, batch8   one decode step of 1 or 8 rows at their mean context
prefill          the prompt in steps of 512 tokens
chat,            all prompt tokens in full steps of 512 (a prefix that all share once), and after
shared_prefix    that all decoding at the full concurrency and the mean context. An engine that
                 decodes in the prefill's steps could save a few reads of the weights (under 5 %
                 of the decode steps in chat); none is charged for HTTP, text, or a last request
                 that decodes alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from workloads import Job

from octavo.ceilings import measure_ceilings
from octavo.models.weights import open_checkpoint
from octavo.ops.cost import Hardware, cost
from octavo.ops.program import Program
from octavo.ops.table import RowShape, StepShape
from octavo.ops.trace import trace
from octavo.runtime.cpu import CpuOptions

TRIES = 4
BLOCK = 16  # tokens of a KV block: prefixes are shared in whole ones
Peaks = dict[str, float]


@dataclass(frozen=True)
class Ceilings:
    """Of one model."""

    program: Program
    max_tokens: int

    def measure(self, threads: int, seconds: float = 1.0) -> Peaks:
        """This machine's peaks now, over a buffer as large as what a decode step reads.

        A measurement in which the threads shared a core (together not much faster than one alone)
        would be a roof too low: it is made again, and the best of each counts.
        """
        step = StepShape((RowShape(0, 1, 1),))
        nbytes = cost(self.program, step, Hardware("", 1.0, 1.0, 1.0)).work.weight_bytes
        best: Peaks = {}
        for _ in range(TRIES):
            found = measure_ceilings(threads, seconds=seconds, nbytes=int(nbytes))
            rates = found.all
            peaks = {
                "read_bytes_per_s": rates.dram,
                "int8_ops_per_s": rates.int8,
                "bf16_ops_per_s": rates.bf16,
            }
            best = {key: max(best.get(key, 0.0), peaks[key]) for key in peaks}
            if min(rates.int8 / found.one.int8, rates.bf16 / found.one.bf16) > 0.9 * threads:
                break
        return best

    def seconds(self, rows: list[RowShape], peaks: Peaks) -> float:
        """The least that one step takes."""
        here = Hardware(
            "here", peaks["read_bytes_per_s"], peaks["int8_ops_per_s"], peaks["bf16_ops_per_s"]
        )
        return cost(self.program, StepShape(tuple(rows)), here).seconds

    def prefill(self, pieces: Iterable[tuple[int, int]], peaks: Peaks) -> float:
        """Seconds for prompts of which tokens start..end are to be read, in full steps."""
        total, step, left = 0.0, list[RowShape](), self.max_tokens
        for start, end in pieces:
            while start < end:
                size = min(left, end - start)
                step.append(RowShape(start, size, int(start + size == end)))
                start, left = start + size, left - size
                if not left:
                    total += self.seconds(step, peaks)
                    step, left = [], self.max_tokens
        return total + (self.seconds(step, peaks) if step else 0.0)

    def decode(self, jobs: list[Job], at_once: int, peaks: Peaks) -> tuple[int, float]:
        """Tokens after the first ones, and seconds for them at `at_once` rows a step."""
        tokens = sum(job.max_tokens - 1 for job in jobs)
        where = sum((len(j.prompt) + j.max_tokens // 2) * (j.max_tokens - 1) for j in jobs)
        rows = [RowShape(where // max(1, tokens), 1, 1)] * min(at_once, len(jobs))
        return tokens, tokens / len(rows) * self.seconds(rows, peaks)

    def rate(self, cell: str, jobs: list[Job], at_once: int, peaks: Peaks) -> float:
        """Tokens per second in a cell at most, counted as the cell counts them."""
        columns = zip(*(job.prompt for job in jobs), strict=False)
        shared = sum(1 for _ in takewhile(lambda tokens: len(set(tokens)) == 1, columns))
        shared = shared // BLOCK * BLOCK if len(jobs) > 1 else 0
        pieces = [(shared if i else 0, len(job.prompt)) for i, job in enumerate(jobs)]
        if cell == "prefill":
            return sum(len(job.prompt) for job in jobs) / self.prefill(pieces, peaks)
        tokens, decoding = self.decode(jobs, at_once, peaks)
        if cell in ("single", "batch8"):
            return tokens / decoding
        return sum(job.max_tokens for job in jobs) / (self.prefill(pieces, peaks) + decoding)


def ceilings_of(model: Path) -> Ceilings:
    """The ceilings of a model file, with the activations that Octavo would choose for it."""
    checkpoint = open_checkpoint(model)
    program = trace(checkpoint.config)
    stored = {part for spec in program.weights for part in spec.parts}
    types = {part: checkpoint.tensor(part).type for part in stored}
    return Ceilings(program.typed(types), CpuOptions().max_tokens)
