"""The policies by the names that people give them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from octavo.core.fair import fair
from octavo.core.policy import Policy, fcfs, priority, sjf, static
from octavo.core.slo import slo

POLICIES: dict[str, Callable[[], Policy]] = {
    "fcfs": fcfs,
    "priority": priority,
    "sjf": sjf,
    "fair": fair,
    "slo": slo,
    "fair-slo": lambda: fair(within=slo()),
    "static": static,
}


def policy_of(name: str, weights: Mapping[str, float] | None = None) -> Policy:
    """The policy of that name; `weights`: shares of tenants, for those that are fair;
    read whenever they are needed. KeyError."""
    if weights is not None and name in ("fair", "fair-slo"):
        return fair(weights, slo() if name == "fair-slo" else None)
    return POLICIES[name]()
