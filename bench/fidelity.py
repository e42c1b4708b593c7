"""The simulator against published runs of vLLM that it did not learn from.

    python bench/fidelity.py FOLDER [--json]

FOLDER holds LLMServingSim's bench examples and operator profiles (github.com/casys-kaist/
LLMServingSim, MIT): per-request times of vLLM 0.19 on one RTX 4090 and one RTX PRO 6000, and
measured operator times of the same model. Requests arrive when the engine queued them, lengths are
forced, prefixes cached as vLLM does by default (a request that was preempted finds what is left of
its own blocks), blocks admitted by its rule (ours keeps some free and preempts a seventh as often),
and steps take what the profile says, times one factor. The factor is fitted on the first 40
requests that finish and on nothing else; the errors are over all 300.

What contexts that differ add to attention was measured on the RTX 4090; on the other card, whose
table is not in the folder, it is taken to depend on decodes for each multiprocessor.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection
from pathlib import Path

import numpy as np

from octavo.core.executor import Capacity
from octavo.core.policy import fcfs
from octavo.core.request import Sequence
from octavo.core.reserve import Reserve
from octavo.sim.executor import Scaled
from octavo.sim.fleet import Fleet, Outcome, Spec
from octavo.sim.operators import read_operators, read_skew
from octavo.sim.workload import Item, Workload

FIRST = 40
LAYERS = 32
# vLLM's own settings, from the runs' meta files; KV tokens of the PRO 6000 run are not published
# (it never filled: its log shows 0 % throughout), so any large number serves.
RUNS = {
    "RTX4090": Capacity(2588, 16, 2048, 256, 2048, 32768),
    "RTXPRO6000": Capacity(33125, 16, 2048, 128, 2048, 131072),
}


def measured(path: Path) -> tuple[Workload, list[dict[str, float]]]:
    rows = [json.loads(line) for line in path.open()]
    rows.sort(key=lambda row: row["queued_ts"])
    start = rows[0]["queued_ts"]
    items = tuple(
        Item(row["request_id"], row["queued_ts"] - start, row["input_toks"], row["output_toks"])
        for row in rows
    )
    times = [
        {
            "ttft": row["first_token_ts"] - row["queued_ts"],
            "tpot": (row["last_token_ts"] - row["first_token_ts"]) / (row["output_toks"] - 1),
            "e2e": row["last_token_ts"] - row["queued_ts"],
            "end": row["last_token_ts"] - start,
        }
        for row in rows
        if row["output_toks"] > 1
    ]
    return Workload(path.name.split(".")[0], items), times


MULTIPROCESSORS = {"RTX4090": 128, "RTXPRO6000": 188}
SKEW = "RTX4090"


def spec_of(folder: Path, card: str) -> Spec:
    def prefix(name: str) -> Path:
        return folder / f"profile_{name}_Llama-3.1-8B_bf16_tp1"

    skew = read_skew(prefix(SKEW), MULTIPROCESSORS[card] / MULTIPROCESSORS[SKEW])
    return Spec(card, RUNS[card], read_operators(prefix(card), LAYERS, skew), fcfs)


class Unreserved(Reserve):
    """vLLM's rule: nothing is kept free for the growth of what runs."""

    def growth(self, running: Collection[Sequence], block_size: int) -> float:
        return 0.0

    def most_growth(self, running: int, block_size: int) -> float:
        return 0.0


def simulated(load: Workload, spec: Spec) -> tuple[list[dict[str, float]], float, float]:
    fleet = Fleet([spec], keep_gaps=False)
    fleet.replicas[0].scheduler.reserve = Unreserved()
    run = fleet.run(load)
    made = [_times(o) for o in run.outcomes if o.num_output > 1]
    return made, run.seconds / run.wall_seconds, run.counters["preemptions"]


def _times(o: Outcome) -> dict[str, float]:
    assert o.ttft is not None
    assert o.tpot is not None
    assert o.e2e is not None
    return {"ttft": o.ttft, "tpot": o.tpot, "e2e": o.e2e, "end": o.item.at + o.e2e}


def fit(load: Workload, truth: list[dict[str, float]], spec: Spec) -> float:
    """The factor on durations at which the first 40 to finish have the TPOT that they had."""
    early = sorted(range(len(truth)), key=lambda i: truth[i]["end"])[:FIRST]
    real = sum(truth[i]["tpot"] for i in early)
    factor = 1.0
    for _ in range(6):
        made, _, _ = simulated(load, spec._replace(seconds=Scaled(spec.seconds, factor)))
        factor *= real / sum(made[i]["tpot"] for i in early)
    return factor


def errors(truth: list[dict[str, float]], made: list[dict[str, float]]) -> dict[str, float]:
    found = {}
    for name in ("ttft", "tpot", "e2e"):
        real, sim = (np.array([row[name] for row in rows]) for rows in (truth, made))
        found[f"{name} mean"] = sim.mean() / real.mean() - 1
        for q in (50, 90, 99):
            found[f"{name} P{q}"] = np.percentile(sim, q) / np.percentile(real, q) - 1
    ends = [max(row["end"] for row in rows) for rows in (truth, made)]
    found["throughput"] = ends[0] / ends[1] - 1
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    out = []
    for card in RUNS:
        load, truth = measured(args.folder / f"{card}_Llama-3.1-8B.vllm.requests.jsonl")
        spec = spec_of(args.folder, card)
        factor = fit(load, truth, spec)
        for scale in (1.0, factor):
            made, speed, preempted = simulated(
                load, spec._replace(seconds=Scaled(spec.seconds, scale))
            )
            found = errors(truth, made)
            out.append({"card": card, "scale": scale, "preemptions": preempted, **found})
            if not args.json:
                how = "nothing fitted" if scale == 1.0 else f"one factor {scale:.4f}"
                print(f"{card}, {how}: {preempted:.0f} preemptions, {speed:.0f}x real time")
                for name in ("ttft", "tpot", "e2e"):
                    kinds = ("mean", "P50", "P90", "P99")
                    row = "  ".join(f"{k} {found[f'{name} {k}']:+.1%}" for k in kinds)
                    print(f"  {name.upper():5} {row}")
                print(f"  throughput {found['throughput']:+.1%}")
    if args.json:
        print(json.dumps(out))


if __name__ == "__main__":
    main()
