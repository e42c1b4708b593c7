"""Failure cases that no other file has: a clock that jumps, a pool full to its last block."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from octavo.core.admission import Admission
from octavo.core.fair import fair
from octavo.core.policy import Policy, fcfs, priority, sjf
from octavo.core.request import Slo, State
from octavo.core.slo import slo
from octavo.errors import TooTight, Unattainable
from tests.core.machine import Machine, ask

POLICIES = [fcfs, priority, sjf, slo, fair, lambda: fair(within=slo())]
NAMES = ["fcfs", "priority", "sjf", "slo", "fair", "fair-slo"]


@pytest.mark.parametrize("make", POLICIES, ids=NAMES)
@pytest.mark.parametrize("jump", [-3600.0, 3600.0, 0.0])
def test_a_clock_that_jumps_loses_nothing_and_every_request_ends(
    make: Callable[[], Policy], jump: float
) -> None:
    """Ours is monotonic; a virtual machine that slept may still be told otherwise. What it makes of
    times may be wrong, not the tokens, nor that it ends."""
    rng, whole = random.Random(5), None
    for jumps in (False, True):
        machine = Machine(make(), num_blocks=60)
        door, names = Admission(machine.scheduler), []
        for turn in range(120):
            if turn % 3 == 0:
                promised = Slo(ttft=8e4, tpot=8e4) if turn % 2 else Slo()
                request = ask(
                    f"r{turn}", 20, 12, arrival=max(0.0, machine.now), tenant="ab"[turn % 2],
                    slo=promised,
                )  # fmt: skip
                try:
                    machine.add(door.judge(request, machine.now))
                    names.append((request.id, 0))
                except (TooTight, Unattainable):
                    assert jumps, "there was time enough"
            machine.turn()
            if jumps and rng.random() < 0.2:
                machine.now += rng.choice((jump, 0.5 * jump, -jump))
        machine.now = abs(machine.now) % 5000.0 if jumps else machine.now
        tokens = machine.run()
        assert set(names) <= set(machine.ends())
        assert all(len(tokens[name]) == 12 for name in names)
        if whole is not None:
            assert all(tokens[name] == whole[name] for name in names)
        whole = tokens
        machine.scheduler.check()
        assert machine.scheduler.blocks.num_held == 0


@pytest.mark.parametrize("make", POLICIES, ids=NAMES)
@pytest.mark.parametrize("caching", [False, True])
def test_a_pool_that_is_full_while_all_are_decoding_goes_on(
    make: Callable[[], Policy], caching: bool
) -> None:
    """Each wants one more block and none is left: the first by rank has it."""
    machine = Machine(make(), num_blocks=16, max_rows=4, prefix_caching=caching)
    machine.scheduler.reserve.rho = 0.0
    machine.add(*(ask(f"r{i}", 15, 17, tenant="ab"[i % 2]) for i in range(4)))
    full = 0
    while machine.engine.has_work:
        machine.scheduler.reserve.rho = 0.0
        running = machine.scheduler.running
        if len(running) > 1 and not machine.scheduler.blocks.num_available:
            full += all(seq.num_scheduled >= seq.num_prompt for seq in running)
        first = running[0] if running else None
        before = first.num_output if first else 0
        machine.turn()
        if first is not None and first.state is State.RUNNING:
            assert first.num_output > before or first.num_computed < first.num_prompt
        assert machine.now < 500, "no progress"
    assert full, "it was full"
    assert all(event.error is None for event in machine.ends().values())
    assert len(machine.ends()) == 4
    assert machine.scheduler.stats.counters.preemptions
