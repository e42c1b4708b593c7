"""Steps that ask a machine how fast it is, before the first request: no model starts from nothing.

A few decodes and prompt chunks of different sizes are run on the real executor, on blocks that
nobody holds yet; what they write is in no index, so no request can ever read it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator

from octavo.core.batch import Batch, Row, SampleSpec, Want
from octavo.core.executor import Capacity, Executor
from octavo.core.request import SamplingParams
from octavo.core.steptime import StepFeatures, StepModel

# (decodes, their context, tokens of a prompt chunk, where it starts), small before large.
SHAPES = (
    (1, 32, 0, 0),
    (1, 32, 16, 0),
    (4, 32, 0, 0),
    (0, 0, 64, 0),
    (1, 512, 0, 0),
    (8, 256, 0, 0),
    (4, 256, 48, 0),
    (0, 0, 32, 480),
    (16, 32, 0, 0),
    (0, 0, 128, 0),
)
_GREEDY = SampleSpec(SamplingParams(temperature=0), 0, 0)


def probes(capacity: Capacity) -> Iterator[Batch]:
    """The shapes that fit, as batches."""
    for step, (decodes, context, chunk, start) in enumerate(SHAPES, 1):
        needed = [(context - 1, 1)] * decodes + ([(start, chunk)] if chunk else [])
        rows: list[Row] = []
        block = 0
        for i, (begin, count) in enumerate(needed):
            end = block + -(-(begin + count) // capacity.block_size)
            want = Want(count - 1, _GREEDY)
            table = array("i", range(block, end))
            rows.append(Row(i, begin, array("i", [0] * count), table, (want,)))
            block = end
        if (
            block <= capacity.num_blocks
            and len(rows) <= min(capacity.max_rows, capacity.max_outputs)
            and sum(count for _, count in needed) <= capacity.max_tokens
            and max(begin + count for begin, count in needed) <= capacity.max_context
        ):
            yield Batch(step, tuple(rows))


def learn_machine(
    executor: Executor, model: StepModel, clock: Callable[[], float], seconds: float = 0.8
) -> int:
    """Run the probes, again and again, for about so long; returns how many steps were seen.

    The very first warms up memory and is not counted.
    """
    end = clock() + seconds
    steps: list[tuple[StepFeatures, float]] = []
    while len(steps) < 1000 and clock() < end:
        for batch in probes(executor.capacity):
            executor.submit(batch)
            result = executor.collect()
            steps.append((StepFeatures.of(batch), result.finished - result.started))
            if clock() >= end:
                break
    del steps[:1]
    model.calibrate(steps)
    return len(steps)
