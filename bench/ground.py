"""The frame of `bench/real.py`: one trace, one model, any contestant, on the real engine or in the
simulator; every real run is kept in a file, so that what was measured is not measured again.
"""

from __future__ import annotations

import copy
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from octavo.assembly import Assembly, assemble
from octavo.config import EngineConfig
from octavo.core.admission import Admission
from octavo.core.batch import Batch
from octavo.core.executor import Capacity
from octavo.core.margin import Margin
from octavo.core.policies import POLICIES
from octavo.core.request import Request, Slo
from octavo.core.scheduler import Scheduler
from octavo.core.steptime import Coefficients, StepFeatures, StepModel
from octavo.errors import Overloaded, TooTight
from octavo.lab import stage
from octavo.lab.stage import Clock, Setting, Trial, Visit
from octavo.neighbours import Neighbours
from octavo.sim.executor import Learned, SimulatedExecutor
from octavo.sim.fleet import Fleet, Spec
from octavo.sim.fleet import Run as SimRun
from octavo.sim.report import met
from octavo.sim.workload import Workload, read

SAMPLE = Path(__file__).parent / "data/azure_conv_sample.csv.gz"
SCALE = 1 / 8  # of prompts and outputs: a small model on few cores
STRIDE = 613  # requests of the sample between the beginnings of two seeds
LEARNED = 20.0  # seconds of arrivals, under each of three policies, that models learn from
ALONE = 9  # times that one request runs alone
TTFT, TPOT = 10.0, 5.0  # deadlines, in multiples of what a request takes alone
ADMISSION = "+admission"
WATCH = 3.0  # seconds between two looks at what others take
CROWDED = 0.08  # of the machine that others took: such a run says nothing
Cell = dict[str, Any]


class Contestant(NamedTuple):
    """policy: its name, with "+admission" where the second gate judges. chunk: tokens of a step at
    most; rows: sequences at most; 0: all that the engine takes."""

    policy: str
    chunk: int = 0
    rows: int = 0

    @property
    def name(self) -> str:
        size = f" {self.chunk or 'all'}x{self.rows or 'all'}" if self.chunk or self.rows else ""
        return self.policy + size

    @property
    def gated(self) -> bool:
        return self.policy.endswith(ADMISSION)

    @property
    def plain(self) -> str:
        return self.policy.removesuffix(ADMISSION)


def contestant(text: str) -> Contestant:
    """POLICY[+admission][:CHUNK[xROWS]]. Raises ValueError."""
    policy, _, size = text.partition(":")
    if policy.removesuffix(ADMISSION) not in POLICIES:
        raise ValueError(f"no policy is called {policy!r}: there are {', '.join(POLICIES)}")
    chunk, _, rows = size.partition("x")
    return Contestant(policy, int(chunk or 0), int(rows or 0))


class Ledger:
    """Results by key, a line of JSON each; what is there is not made again."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.cells: dict[str, Cell] = {}
        for line in path.read_text().splitlines() if path.exists() else ():
            row = json.loads(line)
            if "void" not in row:
                self.cells[_key(row["key"])] = row["value"]

    def get(self, key: Cell, make: Callable[[], Cell]) -> Cell:
        found = self.cells.get(_key(key))
        if found is None:
            found = self.cells[_key(key)] = make()
            self.write({"key": key, "value": found})
        return found

    def write(self, row: Cell) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def _key(key: Cell) -> str:
    return json.dumps(key, sort_keys=True)


class OutOfTime(Exception):
    """No more runs now: the budget is spent, or others have the machine."""


class Ground:
    """budget: seconds of real runs before `OutOfTime`; seconds: of arrivals in a run; probe: in one
    that only asks whether a rate is held."""

    def __init__(
        self, model: str, ledger: Ledger, seconds: float, budget: float, probe: float = 60.0
    ) -> None:
        self.name, self.ledger, self.seconds, self.probe = model, ledger, seconds, probe
        self._end = time.monotonic() + budget
        self.sample = owned(read(SAMPLE).lengths(SCALE))
        self._fitted: StepModel | None = None

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def load(self, rate: float, seed: int, seconds: float | None = None) -> Workload:
        """Consecutive requests of the sample, from another place for each seed, their gaps
        stretched to `rate` on average."""
        items, count = self.sample.items, max(2, round(rate * (seconds or self.seconds)))
        first = seed * STRIDE % max(1, len(items) - count - 1)
        return self.sample.window(items[first].at, items[first + count].at).at_rate(rate)

    # ---- the real engine ----

    @cached_property
    def assembly(self) -> Assembly:
        made = assemble(EngineConfig(model=self.name, prefix_caching=False, kv_memory=1 << 30))
        stage.warm(made)
        return made

    def measured(self, key: Cell, make: Callable[[], Cell]) -> Cell:
        """A cell of the ledger, or a real run. One beside others who took much of the machine says
        nothing: it is kept as void, and the command ends."""
        key = {"model": self.name} | key

        def run() -> Cell:
            if time.monotonic() > self._end:
                raise OutOfTime("the budget is spent")
            before, others, begun = run_queue_delay(), Neighbours(), time.monotonic()
            value = make()
            value = {
                "queue_delay_s": run_queue_delay() - before,
                "neighbours": others.share(),
                "wall_s": time.monotonic() - begun,
            } | value  # a run that has more than this process knows better who others are
            if (value["neighbours"] or 0.0) >= CROWDED:
                self.ledger.write({"key": key, "void": True, "value": value})
                raise OutOfTime(f"others took {value['neighbours']:.0%} of the machine")
            return value

        return self.ledger.get(key, run)

    def alone(self) -> Cell:
        """What one request of the median size takes with nobody beside it: medians, seconds."""

        def make() -> Cell:
            prompt = int(np.median([i.prompt for i in self.sample.items]))
            output = int(np.median([i.output for i in self.sample.items]))
            found = []
            for number in range(ALONE):
                made = [Visit(0.0, prompt, max(8, output))]
                wanted = stage.requests(made, self.assembly.door.vocab_size, f"alone {number}")
                engine = Setting("alone").engine(self.assembly.executor)
                found.append(stage.play(engine, wanted).timings[0])
            ttft = float(np.median([t.ttft for t in found]))
            tpot = float(np.median([t.tpot for t in found]))
            return {"prompt": prompt, "output": output, "ttft_s": ttft, "tpot_s": tpot}

        return self.measured({"run": "alone"}, make)

    @property
    def slo(self) -> Slo:
        one = self.alone()
        return Slo(ttft=round(TTFT * one["ttft_s"], 3), tpot=round(TPOT * one["tpot_s"], 4))

    def steps(self, rate: float = 4.0, seed: int = 5) -> Cell:
        """Shapes and seconds of the steps of a run that no other one uses: what models of this
        machine learn from."""

        def make() -> Cell:
            rows: list[list[float]] = []
            prior = self.assembly.engine.scheduler.model.prior
            visits = visits_of(self.load(rate, seed, LEARNED), Slo(ttft=1.0, tpot=0.03))
            for policy, chunk in (("slo", None), ("fcfs", 64), ("fcfs", None)):
                model = StepModel(prior)
                setting = Setting(policy, POLICIES[policy], tokens=chunk, model=lambda m=model: m)
                engine = setting.engine(self.assembly.executor)
                engine.scheduler.witness = lambda batch, result: rows.append(
                    [*StepFeatures.of(batch), result.started, result.finished]
                )
                wanted = stage.requests(visits, self.assembly.door.vocab_size, "steps")
                stage.play(engine, wanted)
            capacity = {n: getattr(self.assembly.executor.capacity, n) for n in Capacity.__slots__}
            return {"steps": rows, "prior": asdict(prior), "capacity": capacity}

        return self.measured({"run": "steps", "rate": rate, "seed": seed}, make)

    def fitted(self) -> StepModel:
        """A model that has seen those steps; a copy."""
        if self._fitted is None:
            cell = self.steps()
            model = StepModel(Coefficients(**cell["prior"]))
            seen = [(StepFeatures(*row[:5]), row[6] - row[5]) for row in cell["steps"]]
            model.calibrate(seen)
            pairs = zip(cell["steps"], cell["steps"][1:], strict=False)
            gaps = [after[5] - before[6] for before, after in pairs]
            model.gap = float(np.median([gap for gap in gaps if 0.0 <= gap < 0.005]))
            self._fitted = model
        return copy.deepcopy(self._fitted)

    def real(
        self, who: Contestant, rate: float, seed: int, repeat: int = 0, *, anyway: int = 0,
        seconds: float | None = None,
    ) -> Cell:  # fmt: skip
        """One run on the real engine. anyway: of those that would be refused every so many-th is
        let in all the same, to see what becomes of it. seconds: of arrivals, if not as always."""
        key = {
            "run": who.name, "rate": round(rate, 3), "seed": seed, "repeat": repeat,
            "seconds": seconds or self.seconds, "anyway": anyway,
        }  # fmt: skip

        def make() -> Cell:
            self.say(f"  {who.name} at {rate:.2f}/s, seed {seed}, repeat {repeat}")
            visits = visits_of(self.load(rate, seed, seconds), self.slo)
            return self.play(who, visits, anyway)

        return self.measured(key, make)

    def margin(self) -> Margin:
        """The margin with which the latest gated run ended: a server's lives on."""
        ends = [cell["margin"] for cell in self.ledger.cells.values() if "margin" in cell]
        return Margin(*ends[-1][1:]) if ends else Margin()

    def play(self, who: Contestant, visits: list[Visit], anyway: int = 0) -> Cell:
        """Visits on a new scheduler, and all that is worth knowing about them."""
        setting = Setting(
            who.name, POLICIES[who.plain], rows=who.rows or None, tokens=who.chunk or None,
            model=self.fitted,
        )  # fmt: skip
        engine = setting.engine(self.assembly.executor)
        margin = engine.scheduler.margin
        known = self.margin() if who.gated else Margin(1.0)
        margin.factor = before = known.factor
        margin.exceeded = known.exceeded
        wanted = stage.requests(visits, self.assembly.door.vocab_size, "real")
        gate = Gate(engine.scheduler, who.gated, anyway)
        seen, begun, times = (
            len(engine.scheduler.model.steps),
            time.monotonic(),
            list[list[float]](),
        )
        engine.scheduler.witness = lambda batch, result: times.append(  # noqa: ARG005
            [round(result.started - begun, 6), round(result.finished - begun, 6)]
        )
        trial = stage.play(engine, wanted, Clock(), gate.look, gate)
        found = list(engine.scheduler.model.steps)[seen:]
        errors = [step.predicted / step.seconds - 1 for step in found]
        return {
            **summary(visits, trial),
            "rows": rows_of(visits, wanted, trial, gate),
            **({"margin": [before, margin.factor, margin.exceeded]} if who.gated else {}),
            "gate_us": [float(q) * 1e6 for q in np.percentile(gate.took, (50, 90, 99))]
            if gate.took
            else None,
            "decision_us": [float(q) * 1e6 for q in np.percentile(gate.decided, (50, 90, 99))]
            if gate.decided
            else None,
            "step_error": {
                "median": float(np.median(np.abs(errors))),
                "mean": float(np.mean(np.abs(errors))),
                "bias": float(np.median(errors)),
                "mean_bias": float(np.mean(errors)),
                "steps": len(errors),
            },
            "preemptions": trial.counters["preemptions"],
            "steps": [[*o.features, *at] for o, at in zip(found, times, strict=True)],
        }

    # ---- the simulator ----

    def paced(self, cell: Cell, window: float = 0.5) -> Paced:
        """The machine of a real run: its model from the steps of other runs, its speed through time
        from its own."""
        return Paced(self.fitted(), cell["steps"], window)

    def spec(self, who: Contestant, noise: float = 0.0) -> Spec:
        capacity = Capacity(**self.steps()["capacity"])
        given = {"max_tokens": who.chunk or capacity.max_tokens}
        given["max_rows"] = who.rows or capacity.max_rows
        return Spec(
            who.name, replace(capacity, **given), Learned(self.fitted()), POLICIES[who.plain],
            noise=noise, admits=who.gated,
        )  # fmt: skip

    def simulated(
        self, who: Contestant, rate: float, seed: int, noise: float = 0.0,
        machine: Paced | None = None, seconds: float | None = None,
    ) -> Cell:  # fmt: skip
        spec = self.spec(who, noise)
        if machine is not None:
            spec = spec._replace(seconds=machine)
        fleet = Fleet([spec], seed=seed, prefix_caching=False)
        if machine is not None:
            machine.executor = fleet.replicas[0].executor
        run = self.simulate(fleet, self.load(rate, seed, seconds))
        return simulated_summary(run, self.slo)

    def simulate(self, fleet: Fleet, load: Workload) -> SimRun:
        slo = self.slo
        return fleet.run(load, lambda _: {"slo": slo})

    def knee(self, who: Contestant, share: float, seeds: list[int], low: float = 1.0) -> float:
        """The highest rate at which so many are in time in the simulator, to 2 %; as long as a
        probe on the engine."""

        def holds(rate: float) -> bool:
            runs = [self.simulated(who, rate, seed, seconds=self.probe) for seed in seeds]
            found = [run["attainment"] for run in runs]
            return float(np.mean(found)) >= share

        high = low
        while holds(high) and high < 64:
            low, high = high, high * 1.5
        while high - low > 0.02 * low:
            middle = (low + high) / 2
            low, high = (middle, high) if holds(middle) else (low, middle)
        return low


class Paced:
    """Durations of a machine whose speed changes: what a model of the long run says, times how long
    the steps of a real run took beside that, at the same time. Of sums, for a queue feels the few
    long steps as well. window: seconds that are one; inf: the first 30 % of the steps are the
    speed of the whole run."""

    def __init__(self, model: StepModel, steps: list[list[float]], window: float) -> None:
        self.model = model
        self.executor: SimulatedExecutor | None = None
        self._window = window
        whole = window == float("inf")
        took: dict[int, float] = {}
        usual: dict[int, float] = {}
        for *shape, started, finished in steps[: int(0.3 * len(steps)) + 1] if whole else steps:
            slot = 0 if whole else int(started / window)
            took[slot] = took.get(slot, 0.0) + finished - started
            usual[slot] = usual.get(slot, 0.0) + model.usual(StepFeatures(*shape))
        self._speeds = {slot: took[slot] / usual[slot] for slot in took}
        self._mean = sum(took.values()) / sum(usual.values())
        gaps = [b[5] - a[6] for a, b in pairwise(steps)]
        self.gap = float(np.mean([gap for gap in gaps if gap < 0.005]))

    def __call__(self, batch: Batch) -> float:
        now = self.executor.now if self.executor is not None else 0.0
        slot = 0 if self._window == float("inf") else int(now / self._window)
        speed = self._speeds.get(slot, self._mean)
        return speed * self.model.usual(StepFeatures.of(batch)) + self.gap


class Gate:
    """Admission as a server has it, in front of the scheduler. Who is refused does not come back:
    `door` has clients that do. anyway: every so many-th that is refused is let in all the same."""

    def __init__(self, scheduler: Scheduler, active: bool, anyway: int) -> None:
        self._gate = Admission(scheduler) if active else None
        self._anyway = anyway
        self.refused: dict[str, str] = {}
        self.forced: set[str] = set()
        self.forecast: dict[str, float] = {}
        self.decided: list[float] = []  # seconds until it was known who is let in
        self.took: list[float] = []  # and until that was answered
        self._watched, self._others = 0.0, Neighbours()

    def __call__(self, request: Request, now: float) -> Request | None:
        if self._gate is None:
            return request
        begun = time.perf_counter()
        try:
            verdict = self._gate.weigh((request,), now)
            self.decided.append(time.perf_counter() - begun)
            admitted = self._gate.answer(verdict)[0]
        except TooTight as error:  # an idle machine could not either: no use to come again
            self.refused[request.id] = str(error)
            return None
        except Overloaded as error:
            self.refused[request.id] = str(error)
            if self._anyway and len(self.refused) % self._anyway == 0:
                self.forced.add(request.id)
                return request
            return None
        finally:
            self.took.append(time.perf_counter() - begun)
        assert admitted.predicted is not None
        self.forecast[request.id] = admitted.predicted.ttft
        return admitted

    def look(self, _: Scheduler, __: object, done: float) -> None:
        if done > self._watched + WATCH:
            hold_off(self._others.share() or 0.0)
            self._watched, self._others = done, Neighbours()


def hold_off(share: float) -> None:
    """Raises OutOfTime where others take too much of the machine for the moment."""
    if share > 3 * CROWDED:
        raise OutOfTime(f"others take {share:.0%} of the machine")


# ---- figures ----


def owned(load: Workload) -> Workload:
    """With tenants and priorities, for the policies that look at them. One tenant has six requests
    in ten, one three, one the rest; priorities are 0, 1 and 2."""
    draw = random.Random("whose")
    items = [
        item._replace(tenant=draw.choices("abc", (6, 3, 1))[0], priority=draw.randrange(3))
        for item in load.items
    ]
    return replace(load, items=tuple(items))


def visits_of(load: Workload, slo: Slo, tenant: str = "") -> list[Visit]:
    return [
        Visit(i.at, i.prompt, max(1, i.output), tenant or i.tenant, i.priority, slo)
        for i in load.items
    ]


def run_queue_delay() -> float:
    """Seconds that this process's threads could have run and did not (Linux: schedstat)."""
    total = 0.0
    for task in Path("/proc/self/task").iterdir():
        try:
            total += float((task / "schedstat").read_text().split()[1]) / 1e9
        except OSError:
            continue
    return total


def summary(visits: list[Visit], trial: Trial) -> Cell:
    """A run in numbers; a refused request met nothing."""
    good = sum(t.met for t in trial.timings)
    return {
        "sent": len(visits),
        "served": len(trial.timings),
        "good": good,
        "seconds": trial.seconds,
        "attainment": good / len(visits),
        "goodput": good / trial.seconds,
        **spreads(
            [t.ttft for t in trial.timings if t.ttft is not None],
            [t.tpot for t in trial.timings if t.tpot is not None],
            [t.finished - t.queued for t in trial.timings],
        ),
        "throughput": len(trial.timings) / trial.seconds,
    }


def simulated_summary(run: SimRun, slo: Slo) -> Cell:
    served = [o for o in run.outcomes if not o.refused and o.finished is not None]
    good = sum(met(slo, o) for o in served)
    return {
        "sent": len(run.outcomes),
        "served": len(served),
        "good": good,
        "seconds": run.seconds,
        "attainment": good / len(run.outcomes),
        "goodput": good / run.seconds,
        **spreads(
            [o.ttft for o in served if o.ttft is not None],
            [o.tpot for o in served if o.tpot is not None],
            [o.e2e for o in served if o.e2e is not None],
        ),
        "throughput": len(served) / run.seconds,
    }


def spreads(ttft: list[float], tpot: list[float], e2e: list[float]) -> Cell:
    """mean, P50, P90 and P99 of each, seconds."""
    found: Cell = {}
    for name, values in (("ttft", ttft), ("tpot", tpot), ("e2e", e2e)):
        if values:
            p50, p90, p99 = (float(v) for v in np.percentile(values, (50, 90, 99)))
            found[name] = {"mean": float(np.mean(values)), "P50": p50, "P90": p90, "P99": p99}
    return found


def rows_of(visits: list[Visit], wanted: list[Request], trial: Trial, gate: Gate) -> list[Cell]:
    """Each request: what it was told, and what it had."""
    ended = {t.request_id: t for t in trial.timings}
    rows = []
    for visit, request in zip(visits, wanted, strict=True):
        t = ended.get(request.id)
        rows.append({
            "at": round(visit.at, 4), "prompt": visit.prompt, "output": visit.output,
            "tenant": visit.tenant, "refused": gate.refused.get(request.id),
            "forced": request.id in gate.forced, "forecast": gate.forecast.get(request.id),
            "ttft": None if t is None else t.ttft, "tpot": None if t is None else t.tpot,
            "met": t is not None and t.met,
        })  # fmt: skip
    return rows
