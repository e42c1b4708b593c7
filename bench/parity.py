"""A real run of the CPU engine, recorded, and what the simulator makes of it.

    python bench/parity.py [--model NAME] [--rate R] [--seconds S] [--out FILE]

1. Parity: the recorded calls on a new scheduler; every step must be planned the same.
2. Free run: the same arrivals in virtual time, with a step model fitted to the first 30 % of the
   steps; errors of TTFT, TPOT, E2E and throughput beside the real run. One process, no server: the
   driver adds what has arrived, pumps and drains, as the server's engine thread does.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from array import array
from pathlib import Path

import numpy as np

from octavo.assembly import assemble
from octavo.config import EngineConfig
from octavo.core.policy import fcfs
from octavo.core.request import Request, SamplingParams
from octavo.core.stats import Timing
from octavo.core.steptime import StepModel
from octavo.sim.executor import Learned
from octavo.sim.fleet import Fleet, Spec
from octavo.sim.recording import Recorder, Recording, open_recording, replay, workload
from octavo.sim.workload import Workload, read

SAMPLE = Path(__file__).parent / "data/azure_conv_sample.csv.gz"
SCALE = 1 / 8  # of prompts and outputs: a small model on few cores
TRAIN = 0.3


def requests(load: Workload, vocabulary: int, start: float) -> list[Request]:
    draw = random.Random(7)
    made = []
    for number, item in enumerate(load.items):
        prompt = array("i", (draw.randrange(vocabulary) for _ in range(item.prompt)))
        params = SamplingParams(max_tokens=item.output, temperature=0.0, ignore_eos=True)
        made.append(Request(item.id, prompt, params, start + item.at, number))
    return made


def drive(engine: Recorder, waiting: list[Request]) -> list[Timing]:
    """In real time, on one thread."""
    timings = list[Timing]()
    queue = waiting[::-1]
    while queue or engine.has_work:
        now = time.monotonic()
        while queue and queue[-1].arrival <= now:
            engine.add(queue.pop())
        if not engine.has_work:
            time.sleep(max(0.0, queue[-1].arrival - now))
            continue
        engine.pump(now)
        engine.drain(time.monotonic())
        timings += engine.scheduler.stats.take_timings()
    return timings


def times(timings: list[Timing]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"ttft": [], "tpot": [], "e2e": []}
    for t in timings:
        assert t.first_token is not None
        found["ttft"].append(t.first_token - t.queued)
        found["e2e"].append(t.finished - t.queued)
        if t.num_output > 1:
            found["tpot"].append((t.finished - t.first_token) / (t.num_output - 1))
    return found


def trained(recording: Recording) -> tuple[StepModel, dict[str, float]]:
    """A model of the first steps, and its error on the others."""
    steps = recording.steps()
    cut = int(TRAIN * len(steps))
    model = StepModel()
    for features, seconds in steps[:cut]:
        model.observe(features, seconds)
    errors = [model.predict(f) / s - 1 for f, s in steps[cut:]]
    ends = [line["finished"] for line in recording.of("step")]
    starts = [line["started"] for line in recording.of("step")]
    # What lies between two steps is the host's; idle time is not.
    gaps = sorted(b - a for a, b in zip(ends, starts[1:], strict=False))
    model.gap = gaps[len(gaps) // 2]
    return model, {
        "steps": len(steps),
        "median": statistics.median(map(abs, errors)),
        "mean": statistics.mean(map(abs, errors)),
        "bias": statistics.mean(errors),
        "gap_s": model.gap,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rate", type=float, default=3.0)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--out", type=Path, default=Path("bench/out/parity.jsonl"))
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    load = read(SAMPLE).lengths(SCALE).at_rate(args.rate).window(0.0, args.seconds)
    made = assemble(EngineConfig(model=args.model, prefix_caching=False))
    with args.out.open("w") as file:
        engine = Recorder(made.engine, file.write)
        real = drive(engine, requests(load, made.door.vocab_size, time.monotonic() + 0.5))
    recording = open_recording(args.out)
    parity = replay(recording, fcfs)
    print(f"{len(load)} requests at {load.rate:.2f}/s: {parity.same} of {parity.steps} steps and "
          f"{parity.rows} rows planned the same {parity.differs}")  # fmt: skip
    model, fit = trained(recording)
    print("step model, held out:", json.dumps(fit))
    spec = Spec("real", recording.capacity, Learned(model), fcfs)
    run = Fleet([spec], prefix_caching=False).run(workload(recording))
    truth = times(real)
    for name in ("ttft", "tpot", "e2e"):
        sim = np.array([v for o in run.outcomes if (v := getattr(o, name)) is not None])
        own = np.array(truth[name])
        cells = [f"mean {own.mean() * 1e3:.1f} ms {sim.mean() / own.mean() - 1:+.1%}"]
        for q in (50, 90, 99):
            error = np.percentile(sim, q) / np.percentile(own, q) - 1
            cells.append(f"P{q} {np.percentile(own, q) * 1e3:.1f} ms {error:+.1%}")
        print(f"  {name.upper():5} {'  '.join(cells)}")


if __name__ == "__main__":
    main()
