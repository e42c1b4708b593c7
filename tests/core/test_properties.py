"""The laws of the core over random workloads (ARCHITECTURE, section 3)."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.core.endurance import POLICIES, endure
from tests.core.workload import run


@pytest.mark.parametrize("block", range(8))
def test_every_request_gives_its_own_tokens_and_ends_and_no_block_leaks(block: int) -> None:
    totals: Counter[str] = Counter()
    for seed in range(block * 250, (block + 1) * 250):
        try:
            totals.update({k: int(v) for k, v in run(seed).snapshot().items()})
        except AssertionError as error:
            raise AssertionError(f"workload {seed}: {error}") from error
    # The workloads must reach what they are for.
    for name in (
        "preemptions",
        "evictions",
        "held",
        "aborted",
        "failed",
        "expired",
        "cached_tokens",
    ):
        assert totals[name] > 20, name
    assert totals["accepted_tokens"] > 1000
    assert totals["drafted_tokens"] > totals["accepted_tokens"] + 1000


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_long_run_under_everything_at_once_stays_clean(policy: str, depth: int) -> None:
    totals = endure(policy, 700, depth=depth)
    assert totals["ended"] > 100
    assert totals["cached_tokens"] > 0
