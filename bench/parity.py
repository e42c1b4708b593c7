"""A real run of the CPU engine, recorded, and what the simulator makes of it.

    python bench/parity.py [--model NAME] [--rate R] [--seconds S] [--out FILE]

1. Parity: the recorded calls on a new scheduler; every step must be planned the same, the steps
   with guessed tokens too.
2. Free run: a second recording of the same arrivals, now without guesses (which of them hold is the
   model's affair, and the simulator has no model), and the same in virtual time; errors of TTFT,
   TPOT and E2E beside the real run. The step model learns from the first 30 % of the steps and
   keeps to their speed, or to the speed that the machine had from half second to half second.

One process, no server: the driver adds what has arrived, pumps and drains, as the server's engine
thread does.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from array import array
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from ground import Paced

from octavo.assembly import assemble
from octavo.config import EngineConfig
from octavo.core.engine import Engine
from octavo.core.policy import fcfs
from octavo.core.request import Request, SamplingParams
from octavo.core.stats import Timing
from octavo.core.steptime import Coefficients, StepModel
from octavo.lab import stage
from octavo.lab.stage import Setting
from octavo.sim.fleet import Fleet, Run, Spec
from octavo.sim.recording import Recorder, Recording, open_recording, replay, workload
from octavo.sim.workload import Workload, read

SAMPLE = Path(__file__).parent / "data/azure_conv_sample.csv.gz"
SCALE = 1 / 8  # of prompts and outputs: a small model on few cores
TRAIN = 0.3


def requests(
    load: Workload, vocabulary: int, start: float, *, guesses: bool = True
) -> list[Request]:
    draw = random.Random(7)
    made = []
    for number, item in enumerate(load.items):
        prompt = array("i", (draw.randrange(vocabulary) for _ in range(item.prompt)))
        params = SamplingParams(
            max_tokens=item.output, temperature=0.0, ignore_eos=True,
            speculation=None if guesses else False,
        )  # fmt: skip
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
    model = StepModel(Coefficients(**recording.head["prior"]))
    model.calibrate(steps[:cut])
    errors = [model.usual(f) / s - 1 for f, s in steps[cut:]]
    return model, {
        "steps": len(steps),
        "median": statistics.median(map(abs, errors)),
        "mean": statistics.mean(map(abs, errors)),
        "bias": statistics.mean(errors),
    }


def simulated(recording: Recording, model: StepModel, window: float) -> Run:
    """The recorded arrivals on a machine of that model, at the speed of the recorded one: of its
    first 30 % (`window` inf), or of each `window` seconds."""
    start = min(line["arrival_s"] for line in recording.of("add"))
    steps = [
        [*line["features"], line["started"] - start, line["finished"] - start]
        for line in recording.of("step")
    ]
    machine = Paced(model, steps, window)
    fleet = Fleet([Spec("real", recording.capacity, machine, fcfs)], prefix_caching=False)
    machine.executor = fleet.replicas[0].executor
    return fleet.run(workload(recording))


def errors(truth: dict[str, list[float]], run: Run) -> Iterator[str]:
    for name in ("ttft", "tpot", "e2e"):
        sim = np.array([v for o in run.outcomes if (v := getattr(o, name)) is not None])
        own = np.array(truth[name])
        cells = [f"mean {own.mean() * 1e3:.1f} ms {sim.mean() / own.mean() - 1:+.1%}"]
        for q in (50, 90, 99):
            error = np.percentile(sim, q) / np.percentile(own, q) - 1
            cells.append(f"P{q} {np.percentile(own, q) * 1e3:.1f} ms {error:+.1%}")
        yield f"  {name.upper():5} {'  '.join(cells)}"


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
    stage.warm(made)

    def recorded(*, guesses: bool) -> tuple[Recording, list[Timing]]:
        prior = made.engine.scheduler.model.prior
        setting = Setting("parity", model=lambda: StepModel(prior))
        scheduler = setting.engine(made.executor).scheduler
        if guesses:
            scheduler.drafter = made.engine.scheduler.drafter
        with args.out.open("w") as file:
            engine = Recorder(Engine(made.executor, scheduler), file.write)
            start = time.monotonic() + 0.5
            wanted = requests(load, made.door.vocab_size, start, guesses=guesses)
            real = drive(engine, wanted)
        return open_recording(args.out), real

    for guesses in (True, False):
        recording, real = recorded(guesses=guesses)
        same = replay(recording, fcfs)
        how = "with guesses" if guesses else "without guesses"
        print(f"{len(load)} requests at {load.rate:.2f}/s {how}: {same.same} of {same.steps} steps "
              f"and {same.rows} rows planned the same {same.differs}", flush=True)  # fmt: skip
    model, fit = trained(recording)
    print("step model, held out:", json.dumps(fit))
    for name, window in (("the first 30 %'s", float("inf")), ("each half second's", 0.5)):
        print(f"at {name} speed")
        print(*errors(times(real), simulated(recording, model, window)), sep="\n")


if __name__ == "__main__":
    main()
