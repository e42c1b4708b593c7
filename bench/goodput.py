"""Goodput of scheduling policies in the simulator: how much of an overload is served in time.

    python bench/goodput.py TRACE.csv [--policies slo,slo+admission] [--chunks 256,512,1024,2048]

Setting: one replica with the step times of Llama-3.1-8B on an RTX PRO 6000 (a linear fit of
measured operators), 2 % noise, TTFT 2 s and TPOT 50 ms. The first 240 s of the Azure conversation
trace are compressed to each offered rate. The knee of each is the highest rate with 90 % (99 %) of
requests in time, by bisection. Baselines are swept over their step budget, and the best counts.
Goodput is good requests over the whole duration, drain included; a refused request is a miss.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from octavo.core.executor import Capacity
from octavo.core.request import Slo
from octavo.core.steptime import Coefficients
from octavo.sim import cli
from octavo.sim.executor import Fitted
from octavo.sim.fleet import Fleet, Spec, wanting
from octavo.sim.report import Report, compare_table, report
from octavo.sim.workload import Workload, read
from octavo.tables import show_table

# 7.5 ms + 52 us a token, but at least 12.5 ms; the floor is written as a bend at 96 tokens.
STEP = Coefficients(
    fixed=12.5e-3, token=1e-12, context=0.095e-6, area=0.0008e-6, decode=8e-6,
    bend=52e-6, knee=5.0 / 0.052,
)  # fmt: skip
SLO = Slo(ttft=2.0, tpot=0.050)
NOISE = 0.02
KV_TOKENS = 530_000
BLOCK = 16
ROWS = 256
SECONDS = 240.0
KNOWN = cli.policies()
TIMES = (0.9, 1.4, 2.1, 3.0)  # of the best static knee


class Bench:
    """One trace, any policy at any rate."""

    def __init__(self, load: Workload, seed: int) -> None:
        self.load, self.seed = load, seed
        self.runs = 0

    def at(self, rate: float, policy: str, chunk: int, name: str) -> Report:
        made, _, gate = policy.partition("+")
        capacity = Capacity(KV_TOKENS // BLOCK, BLOCK, chunk, ROWS, max(chunk, ROWS), 32768)
        spec = Spec(name, capacity, Fitted(STEP), KNOWN[made], noise=NOISE, admits=bool(gate))
        fleet = Fleet([spec], seed=self.seed, prefix_caching=False, keep_gaps=False)
        self.runs += 1
        return report(fleet.run(self.load.at_rate(rate), wanting(SLO)), SLO, name)

    def knee(self, share: float, policy: str, chunk: int) -> float:
        """The highest rate at which so many are in time, to 1 %."""
        low, high = 4.0, 12.0
        while high - low > 0.01 * low:
            middle = (low + high) / 2
            if self.at(middle, policy, chunk, "").attainment >= share:
                low = middle
            else:
                high = middle
        return low


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--policies", default="slo,slo+admission")
    parser.add_argument("--chunks", default="256,512,1024,2048")
    parser.add_argument("--knee", type=float, help="Skip the search: the best static knee.")
    parser.add_argument("--knees", action="store_true", help="Only search the knees.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    chunks = [int(word) for word in args.chunks.split(",")]
    load = read(args.trace).window(0.0, SECONDS)
    bench = Bench(load, args.seed)
    settings = [("fcfs", chunk) for chunk in chunks]
    settings += [(name, 2048) for name in args.policies.split(",") if name]
    knee = args.knee
    if knee is None:
        for name, chunk in settings:
            knees = [bench.knee(share, name, chunk) for share in (0.9, 0.99)]
            print(f"{name} {chunk}: {knees[0]:.2f}/s at 90 %, {knees[1]:.2f}/s at 99 %", flush=True)
            if name == "fcfs":
                knee = max(knee or 0.0, knees[0])
    assert knee is not None
    if args.knees:
        return
    reports = []
    for times in TIMES:
        for name, chunk in settings:
            label = f"{name} {chunk} at {times:g}x"
            reports.append(bench.at(times * knee, name, chunk, label))
    show_table(f"{load.name}, the best static knee is {knee:.2f}/s", *compare_table(reports))
    if args.json:
        args.json.write_text(json.dumps([one.as_dict() for one in reports]))


if __name__ == "__main__":
    main()
