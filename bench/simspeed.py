"""How fast the simulator is: simulated seconds in a second of one core.

    python bench/simspeed.py TRACE.csv [--seconds 3600] [--policies fcfs,slo] [--chunk 512]

Setting: that of `bench/goodput.py` (step times of Llama-3.1-8B on an RTX PRO 6000, 2 % noise, TTFT
2 s and TPOT 50 ms), the trace at its own rate, without gaps between tokens being kept. Every step
is one of the real scheduler's. Wall time is what it took, processor time what it took of a core;
they differ where others used the machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

from goodput import BLOCK, KNOWN, KV_TOKENS, NOISE, ROWS, SLO, STEP

from octavo.core.executor import Capacity
from octavo.sim.executor import Fitted
from octavo.sim.fleet import Fleet, Spec, wanting
from octavo.sim.workload import Workload, read
from octavo.tables import show_table


def simulated(load: Workload, policy: str, chunk: int) -> dict[str, float]:
    made, _, gate = policy.partition("+")
    tokens = chunk if made == "fcfs" else max(chunk, 2048)  # who cuts chunks by time needs no cap
    capacity = Capacity(KV_TOKENS // BLOCK, BLOCK, tokens, ROWS, max(tokens, ROWS), 32768)
    spec = Spec(policy, capacity, Fitted(STEP), KNOWN[made], noise=NOISE, admits=bool(gate))
    fleet = Fleet([spec], prefix_caching=False, keep_gaps=False)
    wall, cpu = time.perf_counter(), time.process_time()
    run = fleet.run(load, wanting(SLO))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    steps = run.counters["steps"]
    return {"seconds": run.seconds, "wall_s": wall, "cpu_s": cpu, "steps": steps,
            "rows": run.counters["rows"] / steps}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--seconds", type=float, default=3600.0, help="Of the trace.")
    parser.add_argument("--policies", default="fcfs,slo,slo+admission")
    parser.add_argument("--chunk", type=int, default=512, help="Tokens of a step, for fcfs.")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    load = read(args.trace).window(0.0, args.seconds)
    names = args.policies.split(",")
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(args.repeats):
        for name in names:
            runs[name].append(simulated(load, name, args.chunk))
    rows = []
    for name, made in runs.items():
        one = {key: statistics.median(run[key] for run in made) for key in made[0]}
        rows.append([
            name, f"{one['seconds']:.0f}", f"{one['wall_s']:.2f}", f"{one['cpu_s']:.2f}",
            f"{one['seconds'] / one['wall_s']:.0f}", f"{one['seconds'] / one['cpu_s']:.0f}",
            f"{1e6 * one['cpu_s'] / one['steps']:.0f}", f"{one['rows']:.1f}",
        ])  # fmt: skip
    if args.json:
        print(json.dumps(runs))
        return
    head = ["policy", "simulated s", "wall s", "cpu s", "x real time", "x of a core's",
            "us a step", "rows a step"]  # fmt: skip
    show_table(f"{load.name}: {len(load)} requests, {load.rate:.2f}/s", head, rows)


if __name__ == "__main__":
    main()
