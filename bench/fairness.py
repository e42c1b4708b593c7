"""A flood beside a quiet tenant, in the simulator: how much longer the quiet one waits.

    python bench/fairness.py [--policies fair:64,fair-slo+admission] [--rate 1.45] [--out FILE]

The machine, the trace and the deadlines are those of `bench/real.py`: its step times come from that
file of real runs (what is missing there is measured first). One tenant sends RATE requests a
second, alone and then beside another that sends ten times as much, from each of so many places of
the trace. What `bench/real.py fairness` does on the engine, more often than an engine could. With a
door (`+admission`) a request is in time if it was let in and kept; promises are those of both.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
from ground import Contestant, Ground, Ledger, contestant

from octavo.sim.fleet import Fleet, Outcome
from octavo.sim.report import met
from octavo.sim.workload import Workload
from octavo.tables import show_table

NOISE = 0.03
QUIET, FLOOD = "quiet", "flood"


def beside(ground: Ground, rate: float, times: float, place: int) -> Workload:
    """The quiet tenant's requests, and so many times as many of the other's."""
    load = ground.load(rate, place)
    items = [item._replace(tenant=QUIET, id=f"q{item.id}") for item in load.items]
    if times:
        other = ground.load(times * rate, place + 1).items
        items += [item._replace(tenant=FLOOD, id=f"f{item.id}") for item in other]
    return replace(load, items=tuple(sorted(items, key=lambda item: item.at)))


def outcomes(
    ground: Ground, who: Contestant, load: Workload, seed: int
) -> dict[str, list[Outcome]]:
    fleet = Fleet([ground.spec(who, NOISE)], seed=seed, prefix_caching=False)
    found: dict[str, list[Outcome]] = {QUIET: [], FLOOD: []}
    for one in ground.simulate(fleet, load).outcomes:
        found[one.item.tenant].append(one)
    return found


def ttfts(made: list[Outcome]) -> list[float]:
    return [one.ttft for one in made if one.ttft is not None]


def row(ground: Ground, who: Contestant, rate: float, places: int) -> list[str]:
    alone, flooded, times = list[float](), list[float](), list[float]()
    paces, in_time, kept = list[bool](), list[bool](), list[bool]()
    for place in range(places):
        solo = outcomes(ground, who, beside(ground, rate, 0, place), place)
        both = outcomes(ground, who, beside(ground, rate, 10, place), place)
        pair = [float(np.percentile(ttfts(made[QUIET]), 99)) for made in (solo, both)]
        alone, flooded = [*alone, pair[0]], [*flooded, pair[1]]
        times.append(pair[1] / pair[0])
        in_time += [met(ground.slo, one) for one in both[QUIET]]
        kept += [met(ground.slo, one) for one in both[QUIET] + both[FLOOD] if not one.refused]
        most = ground.slo.tpot or float("inf")
        paces += [one.tpot <= most for one in both[FLOOD] if one.tpot is not None]
    return [
        who.name, f"{1e3 * np.mean(alone):.0f}", f"{1e3 * np.mean(flooded):.0f}",
        f"{np.mean(times):.2f} ({min(times):.2f} to {max(times):.2f})",
        f"{np.mean(in_time):.0%}", f"{np.mean(paces):.0%}",
        f"{sum(kept)} of {len(kept)}" if who.gated else "",
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policies", default="fair:64,fair-slo,fcfs:64")
    parser.add_argument("--rate", type=float, default=1.45, help="Of the quiet one, a second.")
    parser.add_argument("--places", type=int, default=10, help="In the trace.")
    parser.add_argument("--seconds", type=float, default=20.0, help="Of arrivals in a run.")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--out", type=Path, default=Path("bench/out/real.jsonl"))
    args = parser.parse_args()
    ground = Ground(args.model, Ledger(args.out), args.seconds, 1e9)
    rows = [
        row(ground, contestant(name), args.rate, args.places) for name in args.policies.split(",")
    ]
    head = ["policy", "alone P99 ms", "flooded P99", "times as long", "quiet: in time",
            "flood: paces kept", "promises kept"]  # fmt: skip
    title = (
        f"TTFT of a tenant at {args.rate:g}/s beside one at ten times that, {args.places} places"
    )
    show_table(title, head, rows)


if __name__ == "__main__":
    main()
