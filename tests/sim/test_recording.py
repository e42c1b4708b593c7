"""A recorded run runs again the same way, and what differs is named."""

from __future__ import annotations

import json
import random
from array import array
from pathlib import Path

import pytest

from octavo.core.drafter import PromptLookup
from octavo.core.engine import Engine
from octavo.core.executor import Capacity
from octavo.core.policy import Policy, fcfs, priority, sjf
from octavo.core.request import NO_SLO, FinishReason, Request, SamplingParams, Slo
from octavo.core.scheduler import Scheduler
from octavo.core.slo import slo
from octavo.core.steptime import Coefficients
from octavo.errors import BadFile, ContextOverflow
from octavo.sim.executor import TOKEN, Fitted, SimulatedExecutor
from octavo.sim.recording import (
    Recorder,
    Recording,
    explained,
    model_of,
    open_recording,
    replay,
)
from octavo.sim.workload import read

CAPACITY = Capacity(60, 16, 128, 8, 128, 640)
SECONDS = Coefficients(fixed=0.004, token=0.0002)


class Stops:
    """A watcher that says stop after a few tokens and drops the last."""

    def __init__(self) -> None:
        self.left = 4

    def advance(self, tokens: tuple[int, ...]) -> tuple[int, FinishReason | None]:
        self.left -= len(tokens)
        return (len(tokens), None) if self.left > 0 else (0, FinishReason.STOP)

    def mask(self, position: int) -> None:
        return None

    def ahead(self, draft: array[int]) -> list[None]:
        return [None] * len(draft)

    def forced(self) -> tuple[int, ...]:
        return ()


def request(draw: random.Random, number: int, now: float) -> Request:
    prompt = array("i", [7] * 32 * draw.randrange(3))  # shared beginnings
    prompt.extend(draw.randrange(50) for _ in range(draw.randrange(1, 90)))
    kind = draw.randrange(4)
    params = SamplingParams(
        max_tokens=draw.randrange(1, 40),
        n=2 if kind == 1 else 1,
        prompt_logprobs=0 if kind == 2 else None,
    )
    return Request(
        f"r{number}", prompt, params, now, number,
        stop_ids=frozenset({TOKEN}) if draw.randrange(9) == 0 else frozenset(),
        priority=draw.randrange(3), watcher=Stops if kind == 3 else None,
        slo=Slo(ttft=draw.choice((0.05, 0.5)), tpot=0.02) if draw.randrange(2) else NO_SLO,
    )  # fmt: skip


def recorded(path: Path, policy: Policy, seed: int = 1) -> Recording:
    """Some load with preemptions, aborts, refusals, stops and several choices, in virtual time."""
    draw = random.Random(seed)
    executor = SimulatedExecutor(CAPACITY, Fitted(SECONDS), noise=0.2, seed=seed)
    with path.open("w") as file:
        scheduler = Scheduler(CAPACITY, policy, drafter=PromptLookup())
        engine = Recorder(Engine(executor, scheduler), file.write, "tiny")
        now, number = 0.0, 0
        while number < 80 or engine.has_work:
            while number < 80 and draw.random() < 0.5:
                engine.add(request(draw, number, now))
                number += 1
            if draw.random() < 0.05:
                engine.abort(f"r{draw.randrange(max(1, number))}", now)
            executor.now = now
            engine.pump(now)
            engine.drain(now)
            now = max(now, executor._free) + 0.001 * draw.random()
        with pytest.raises(ContextOverflow):
            engine.add(Request("long", array("i", [1] * 700), SamplingParams(), now, 0))
    return open_recording(path)


@pytest.mark.parametrize("policy", [fcfs, priority, sjf, slo])
def test_a_recorded_run_is_planned_the_same_step_by_step(tmp_path: Path, policy: type) -> None:
    recording = recorded(tmp_path / "run.jsonl", policy())
    found = replay(recording, policy)
    assert found.identical, found.differs
    assert found.steps == sum(1 for _ in recording.of("step")) > 200
    assert recording.head["policy"] == policy().name
    drafted = sum(
        len(tokens) > 1 for line in recording.of("step") for _, tokens, *_ in line["results"]
    )
    assert drafted > 5


def test_another_policy_is_seen_at_the_step_where_it_decides_otherwise(tmp_path: Path) -> None:
    found = replay(recorded(tmp_path / "run.jsonl", priority()), fcfs)
    assert not found.identical
    assert found.same < found.steps
    assert found.differs.startswith("step ")


def test_a_changed_log_is_a_difference(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    recorded(path, fcfs())
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    steps[40]["rows"][0][1] += 1
    path.write_text("\n".join(json.dumps(line) for line in lines))
    assert (
        replay(open_recording(path), fcfs).differs
        == "step 41, sequence " + str(steps[40]["rows"][0][0]) + ": start differ"
    )


def test_a_recording_is_a_trace_with_the_same_sharing(tmp_path: Path) -> None:
    recording = recorded(tmp_path / "run.jsonl", fcfs())
    load = read(tmp_path / "run.jsonl")
    assert len(load) == sum(line["n"] for line in recording.of("add"))
    items = {item.id: item for item in load.items}
    for line in recording.of("add"):
        name = line["request_id"] if line["n"] == 1 else f"{line['request_id']}.0"
        assert items[name].prompt == len(line["prompt"])
    assert {item.blocks[0] for item in load.items} != {item.blocks for item in load.items}
    assert all(request.prompt for _, request in load.requests())


def test_a_recording_teaches_a_step_model(tmp_path: Path) -> None:
    recording = recorded(tmp_path / "run.jsonl", fcfs())
    model = model_of(recording)
    shapes = [features for features, _ in recording.steps()][-50:]
    errors = [abs(model.predict(f) / SECONDS.seconds(f) - 1) for f in shapes]
    assert sorted(errors)[25] < 0.15  # less than the 20 % of noise in every step that it saw


def disturbed(path: Path, every: int, longer: float) -> Recording:
    """A recording of which one step in so many took so much longer."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for number, line in enumerate(line for line in lines if line["kind"] == "step"):
        line["finished"] += longer * (number % every == every - 1)
    path.write_text("\n".join(json.dumps(line, separators=(",", ":")) for line in lines) + "\n")
    return open_recording(path)


def test_steps_that_their_shapes_explain_raise_no_doubts(tmp_path: Path) -> None:
    found = explained(recorded(tmp_path / "run.jsonl", fcfs()))
    assert found.steps > 200
    assert (found.far, found.far_share) == (0, 0.0)
    assert found.explained == pytest.approx(1.0, abs=0.1)
    assert 0.05 < found.error < 0.2  # of 20 % noise
    assert found.doubts() == ""


def test_steps_that_a_neighbour_held_up_are_counted_with_their_time(tmp_path: Path) -> None:
    recorded(tmp_path / "run.jsonl", fcfs())
    recording = disturbed(tmp_path / "run.jsonl", 60, 1.0)
    found, times = explained(recording), [seconds for _, seconds in recording.steps()]
    late = [seconds for seconds in times if seconds > 1.0]
    assert found.far == len(late) == 3
    assert found.far_share == pytest.approx(sum(late) / sum(times))
    assert found.explained == pytest.approx(1.0 - found.far_share, abs=0.1)
    assert found.error < 0.2  # the others are foretold as ever
    said = found.doubts()
    for word in ("3 of", f"{found.far_share:.0%} of all time", "too hopeful", "Record again"):
        assert word in said


def test_a_share_of_all_steps_that_is_slower_is_doubted_too(tmp_path: Path) -> None:
    """No step of it is far off, and the time is not explained all the same."""
    recorded(tmp_path / "run.jsonl", fcfs())
    found = explained(disturbed(tmp_path / "run.jsonl", 3, 0.018))
    assert found.far_share < 0.5
    assert found.doubts()


def test_few_steps_are_said_to_be_few(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    recorded(path, fcfs())
    kept, steps = [], 0
    for line in path.read_text().splitlines():
        steps += '"kind":"step"' in line
        if steps > 20:
            break
        kept.append(line)
    path.write_text("\n".join(kept) + "\n")
    assert "20 recorded steps are too few" in explained(open_recording(path)).doubts()


def test_what_is_no_recording_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"kind":"add"}\n')
    with pytest.raises(BadFile, match="not a recording"):
        open_recording(path)
    path.write_text("{")
    with pytest.raises(BadFile, match="line 1"):
        open_recording(path)
