"""What a grammar costs: the rows beside it, its own row, and a mask.

A batch of 16 plain streams, with one of them held to a JSON schema, with all of them; and one
stream alone, plain and held: seconds a step, in turn, medians. Speculation is off, prompts are
short, no stream ends. Python's time for a mask is part of a step, so it is all there.

    python bench/grammar.py [MODEL]
"""

from __future__ import annotations

import json
import statistics
import sys
import time

from octavo.core.engine import Engine
from octavo.core.request import SamplingParams, StructuredOutputs
from octavo.core.scheduler import Scheduler
from octavo.door import Door
from octavo.grammar.compiled import Grammars
from octavo.models.hub import resolve
from octavo.models.tokenizer import load_tokenizer
from octavo.models.weights import open_checkpoint
from octavo.runtime.cpu import CpuExecutor, CpuOptions

TOKENS, REPEATS = 48, 4
PEOPLE = StructuredOutputs(
    json={
        "type": "array",
        "minItems": 100,
        "items": {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "age": {"type": "integer"},
                "likes": {"type": "array", "items": {"enum": ["tea", "coffee", "water"]}},
            },
            "required": ["name", "age", "likes"],
            "additionalProperties": False,
        },
    }
)


class Bench:
    """One model, and batches of it."""

    def __init__(self, model: str) -> None:
        checkpoint = open_checkpoint(resolve(model))
        self.tokenizer = load_tokenizer(checkpoint)
        self.executor = CpuExecutor(checkpoint, CpuOptions(kv_bytes=256 << 20))
        grammars = Grammars(self.tokenizer, checkpoint.config.vocab_size)
        self.door = Door(
            self.tokenizer,
            self.executor.capacity,
            checkpoint.config.vocab_size,
            "",
            False,
            grammars,
        )

    def step_seconds(self, plain: int, held: int) -> float:
        """The median decode step of so many rows."""
        engine = Engine(self.executor, Scheduler(self.executor.capacity, prefix_caching=False))
        prompt = self.tokenizer.encode("A list of people in JSON:")
        for i in range(plain + held):
            outputs = PEOPLE if i < held else None
            params = SamplingParams(
                max_tokens=TOKENS, seed=i, ignore_eos=True, structured_outputs=outputs
            )
            engine.add(self.door.request(f"r{i}", prompt, params, arrival=0.0))
        times = []
        while engine.has_work:
            started = time.perf_counter()
            engine.pump(0.0)
            engine.drain(0.0)
            times.append(time.perf_counter() - started)
        return statistics.median(times[2:])

    def mask_seconds(self) -> list[float]:
        """Of each mask of one text under the schema."""
        watcher = self.door.grammars.watcher(PEOPLE)()  # type: ignore[union-attr]
        text = '[{"name": "Ann Lee", "age": 42, "likes": ["tea", "water"]}, {"name": "Bo Hansson",'
        times = []
        for token in self.tokenizer.encode(text, bos=False):
            started = time.perf_counter()
            watcher.mask(0)
            times.append(time.perf_counter() - started)
            watcher.advance((token,))
        return times


def main() -> None:
    bench = Bench(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m")
    masks = bench.mask_seconds()
    cases = {"16 plain": (16, 0), "15 + 1 held": (15, 1), "16 held": (0, 16), "1 plain": (1, 0),
             "1 held": (0, 1)}  # fmt: skip
    found: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(REPEATS):
        for name, (plain, held) in cases.items():
            found[name].append(bench.step_seconds(plain, held))
    steps = {name: statistics.median(times) for name, times in found.items()}
    for name, seconds in steps.items():
        rows = sum(cases[name])
        print(f"{name:12} {seconds * 1e3:7.2f} ms a step {rows / seconds:7.0f} tok/s")
    print(
        f"a mask: median {statistics.median(masks) * 1e6:.0f} us, highest {max(masks) * 1e6:.0f} us"
    )
    print(json.dumps({"steps": steps, "masks": masks, "all": found}))


if __name__ == "__main__":
    main()
