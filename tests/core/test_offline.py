"""Laws of offline requests: the others do not notice them, and they end all the same."""

from __future__ import annotations

import pytest

from octavo.core.fair import fair
from octavo.core.offline import SIP, behind
from octavo.core.policy import Policy, fcfs, priority, sjf
from octavo.core.request import FinishReason, Request, State, Tier
from octavo.core.slo import slo
from tests.core.machine import Machine, ask

POLICIES = {"fcfs": fcfs, "priority": priority, "sjf": sjf, "slo": slo, "fair": fair}


class House(Machine):
    """A machine that knows the rows of its last step by name; every request has one choice."""

    def __init__(self, policy: Policy, **capacity: int) -> None:
        super().__init__(policy, **capacity)
        self.names: list[str] = []

    def add(self, *requests: Request) -> None:
        super().add(*requests)
        self.names += [request.id for request in requests]

    def step(self) -> dict[str, int]:
        """A turn; the tokens of each request in its batch."""
        count = len(self.batches)
        self.turn()
        rows = [row for batch in self.batches[count:] for row in batch.rows]
        return {self.names[row.seq_id]: len(row.tokens) for row in rows}

    def finishes(self) -> dict[str, FinishReason | None]:
        return {name: event.finish for (name, _), event in self.ends().items()}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_one_row_of_offline_work_is_in_a_step_while_somebody_waits(policy) -> None:
    machine = House(behind(policy()))
    for i in range(8):
        machine.add(ask(f"off{i}", 5, 60, tier=Tier.BATCH))
    for _ in range(4):
        machine.turn()
    running = [s for s in machine.scheduler.running if s.request.tier is Tier.BATCH]
    assert len(running) == 8, "with the house to themselves all of them run"
    machine.add(ask("online", 6, 10, arrival=1.0))
    machine.step()  # it joins a step in which all of them have their row
    while "online" not in machine.finishes():
        offline = [name for name in machine.step() if name.startswith("off")]
        assert len(offline) == 1
    machine.run()
    assert set(machine.finishes().values()) == {FinishReason.LENGTH}


def test_no_online_request_waits_for_an_offline_one_that_came_before() -> None:
    machine = House(behind(fcfs()), max_rows=4)
    for i in range(20):
        machine.add(ask(f"off{i}", 5, 3, tier=Tier.BATCH))
    machine.add(ask("online", 5, 3, arrival=100.0))
    machine.run()
    order = [event.request_id for event in machine.events if event.finish]
    assert order[0] == "online"


def test_offline_work_gives_its_blocks_to_online_work_first() -> None:
    machine = House(behind(fcfs()), num_blocks=24, block_size=4, max_context=96)
    for i in range(2):
        machine.add(ask(f"off{i}", 8, 30, tier=Tier.BATCH))
    for _ in range(6):
        machine.turn()
    machine.add(ask("online", 78, 10, arrival=1.0))
    assert machine.step()["online"] == 64, "it joins at once"
    machine.run()
    preempted = {e.request_id for e in machine.events if e.num_preemptions}
    assert "off1" in preempted
    assert "online" not in preempted
    assert set(machine.finishes().values()) == {FinishReason.LENGTH}


def test_an_offline_request_ends_under_an_endless_online_load() -> None:
    machine = House(behind(fcfs()), max_rows=8)
    machine.add(ask("off", 40, 12, tier=Tier.BATCH))
    for i in range(400):
        if i % 3 == 0:
            machine.add(ask(f"on{i}", 4, 9, arrival=float(i)))
        machine.turn()
        if "off" in machine.finishes():
            break
    assert machine.finishes()["off"] is FinishReason.LENGTH


def test_a_long_offline_prompt_goes_in_sips_beside_online_work() -> None:
    machine = House(behind(fcfs()), max_tokens=64)
    machine.add(ask("online", 4, 40))
    machine.turn()
    machine.add(ask("off", 200, 2, tier=Tier.BATCH))
    sips = []
    while "online" not in machine.finishes():
        sips.append(machine.step().get("off", 0))
    assert max(sips) == SIP


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_online_steps_are_the_same_as_without_offline_work_but_for_that_row(policy) -> None:
    """Tokens of online requests in each step, with and without offline ones in the house."""

    def steps(with_offline: bool) -> list[dict[str, int]]:
        machine = House(behind(policy()), num_blocks=512)
        for i in range(6 if with_offline else 0):
            machine.add(ask(f"off{i}", 5, 50, tier=Tier.BATCH))
        found = []
        for i in range(6):
            machine.add(ask(f"on{i}", 6 + i, 8))
        for _ in range(40):
            rows = machine.step()
            found.append({name: count for name, count in rows.items() if name.startswith("on")})
        return [step for step in found if step]

    assert steps(True) == steps(False)


def test_what_stands_still_is_running_and_keeps_its_place() -> None:
    machine = House(behind(fcfs()))
    machine.add(ask("off0", 5, 40, tier=Tier.BATCH))
    machine.add(ask("off1", 5, 40, tier=Tier.BATCH))
    machine.turn()
    machine.turn()
    machine.add(ask("online", 5, 20, arrival=1.0))
    machine.turn()
    machine.turn()
    still = [s for s in machine.scheduler.running if s.request.id == "off1"]
    assert still
    assert still[0].state is State.RUNNING
    before = len(still[0].tokens)
    machine.turn()
    assert len(still[0].tokens) == before
    machine.scheduler.check()


def test_policies_keep_their_names_and_what_they_do_for_others() -> None:
    for make in POLICIES.values():
        plain: Policy = make()
        wrapped = behind(plain)
        assert wrapped.name == plain.name
        assert wrapped.timed == plain.timed
