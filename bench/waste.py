"""How much of the KV memory holds nothing: blocks against contiguous reservation, on real lengths.

    python bench/waste.py [--blocks 1456] [--context 8192]

Runs the scheduler itself (no arithmetic: the executor answers at once) over the shipped sample of
the Azure conversation trace and looks, after every step, at what each running sequence holds and
what of it is computed. Contiguous reservation is reckoned for the same sequences in the same
steps: the whole context each (the classic engine), or, kinder, exactly prompt + output each (which
no engine can know). The pool of 1,456 blocks is 1 GiB of KV of SmolLM2-135M (23,040 bytes a token).
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
from array import array
from pathlib import Path

from octavo.core.batch import Batch, RowResult, StepResult
from octavo.core.executor import Capacity
from octavo.core.request import Request, SamplingParams
from octavo.core.scheduler import Scheduler

SAMPLE = Path(__file__).parent / "data" / "azure_conv_sample.csv.gz"


def trace(path: Path = SAMPLE) -> list[tuple[float, int, int]]:
    """(arrival in seconds, prompt tokens, output tokens) of each request."""
    with gzip.open(path, "rt") as f:
        rows = list(csv.reader(f))[1:]
    return [(float(at), int(read), int(made)) for at, read, made in rows]


def answer(batch: Batch) -> StepResult:
    rows = {row.seq_id: RowResult((0,) if row.outputs else ()) for row in batch.rows}
    return StepResult(batch.step, rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=1456)
    parser.add_argument("--context", type=int, default=8192)
    args = parser.parse_args()
    size = 32
    capacity = Capacity(args.blocks, size, 512, 256, 256, args.context)
    scheduler = Scheduler(capacity, max_waiting=1 << 20)
    for i, (_, read, made) in enumerate(trace()):
        prompt = array("i", [i + 1, *[7] * (read - 1)])  # the first token makes every prompt unique
        params = SamplingParams(max_tokens=made, ignore_eos=True)
        scheduler.add(Request(str(i), prompt, params, float(i), seed=i))
    held = computed = whole = exact = 0
    most_blocks = most_whole = steps = 0
    while (batch := scheduler.schedule(0.0)) is not None:
        scheduler.commit(batch, answer(batch), 0.0)
        live = [s for s in scheduler.running if s.block_table]
        held += size * sum(len(s.block_table) for s in live)
        computed += sum(s.num_computed for s in live)
        whole += args.context * len(live)
        exact += sum(s.max_len for s in live)
        most_blocks = max(most_blocks, len(live))
        most_whole = args.blocks * size // args.context
        steps += 1
    figures = {
        "steps": steps,
        "waste_blocks": 1 - computed / held,
        "waste_whole_context": 1 - computed / whole,
        "waste_exact_reservation": 1 - computed / exact,
        "most_at_once_blocks": most_blocks,
        "most_at_once_whole_context": most_whole,
    }
    print(f"{len(trace())} requests, {steps} steps, pool of {args.blocks} blocks of {size} tokens")
    print(f"  blocks                       {figures['waste_blocks']:7.2%} of held memory wasted,")
    print(f"                               up to {most_blocks} sequences at once")
    print(f"  contiguous, whole context    {figures['waste_whole_context']:7.2%} wasted,")
    print(f"                               at most {most_whole} sequences in the same memory")
    print(f"  contiguous, prompt + output  {figures['waste_exact_reservation']:7.2%} wasted")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
