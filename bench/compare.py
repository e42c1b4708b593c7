"""Octavo beside what a user would pick instead: the same work, one machine, one run, in turn.

    python bench/compare.py all                          every model and cell, five repeats
    python bench/compare.py smollm2-135m --cells chat    one model, one cell
    python bench/compare.py report                       the table of what has been measured so far

Cells: chat and shared_prefix (16 at once; over each engine's own HTTP server, OpenVINO in
process), single (one stream) and prefill (512 tokens) in each engine's library. In a repeat every
engine has its turn, in an order that rotates; the figure is the median, the spread is shown, every
repeat is kept.

Each repeat of each cell is appended to --out when it ends, so a run that was cut goes on where it
stood. Octavo itself runs in every repeat: it is the control. Figures of another sitting are kept
beside new ones only if the control of that sitting agrees with this one's within 10 %; if not, the
cell is measured again whole.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path

from peers import Engine, engines, say
from workloads import build, corpus

MODELS = {
    "smollm2-135m": ("llama", "openvino", "vllm"),
    "qwen2.5-coder-0.5b": ("llama",),
    "qwen2.5-coder-1.5b": ("llama",),
    "gemma-3-270m": ("llama",),
}
CELLS = ("single", "prefill", "chat", "shared_prefix")
CONCURRENCY = {"chat": 16, "shared_prefix": 16}
CONTROL = "octavo"
Record = dict[str, object]


def busy() -> float:
    """Share of the machine that others took, sampled over half a second (1.0 = all of it)."""

    def read() -> tuple[int, int]:
        with open("/proc/stat") as f:
            fields = [int(x) for x in f.readline().split()[1:9]]
        return sum(fields), fields[3] + fields[4]

    total, idle = read()
    time.sleep(0.5)
    total2, idle2 = read()
    return 1.0 - (idle2 - idle) / max(1, total2 - total)


def load(path: Path) -> list[Record]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def measure(model: str, cells: list[str], args: argparse.Namespace) -> None:
    """Fill in the repeats that are missing for `model`, appending each to args.out."""
    from octavo.models import hub
    from octavo.models.tokenizer import load_tokenizer
    from octavo.models.weights import open_checkpoint

    path = hub.resolve(model)
    tokenizer = load_tokenizer(open_checkpoint(path))
    ids = corpus(tokenizer.encode)
    bos = tokenizer.bos_id if tokenizer.add_bos else None
    wanted = [p for p in MODELS[model] if p in args.peers]
    sitting = f"{int(time.time())}-{os.getpid()}"
    todo = [c for c in cells if missing(load(args.out), model, c, args.repeats)]
    if not todo:
        say(f"{model}: nothing left to measure")
        return
    running: list[Engine] = []
    try:
        for engine in engines(args.home, path, args.threads, wanted):
            skipped = any(part in engine.name for part in args.skip)
            if set(engine.serves) & set(todo) and not skipped:
                say(f"starting {engine.name} on {model}")
                try:
                    engine.start()
                except (RuntimeError, OSError) as error:
                    say(f"  left out: {error}")
                    continue
                running.append(engine)
        for cell in todo:
            group = [e for e in running if cell in e.serves]
            for repeat in range(args.repeats):
                jobs = build(cell, ids, bos, salt=repeat + int(time.time()))[: args.limit]
                k = repeat % len(group)
                for engine in group[k:] + group[:k]:
                    others = busy()
                    try:
                        result = engine.run(cell, jobs, CONCURRENCY.get(cell, 1))
                    except (RuntimeError, OSError, KeyError) as error:
                        say(f"  {engine.name} {cell}: failed: {error}")
                        continue
                    record: Record = {"model": model, "cell": cell, "engine": engine.name}
                    record |= {"repeat": repeat, "sitting": sitting, "others_busy": others}
                    record["requests"] = len(jobs)
                    with args.out.open("a") as f:
                        f.write(json.dumps(record | result) + "\n")
                    rate = result["output_tok_s"]
                    say(f"  {model} {cell} #{repeat} {engine.name}: {rate:.1f} (busy {others:.0%})")
    finally:
        for engine in running:
            engine.stop()


def missing(records: list[Record], model: str, cell: str, repeats: int) -> bool:
    """Whether this cell lacks a sitting with all its repeats of the control."""
    counts: dict[object, int] = defaultdict(int)
    for r in records:
        if (r["model"], r["cell"], r["engine"]) == (model, cell, CONTROL):
            counts[r["sitting"]] += 1
    return max(counts.values(), default=0) < repeats


def merged(records: list[Record]) -> dict[tuple[str, str], dict[str, list[float]]]:
    """(model, cell) -> engine -> rates: the latest sitting, and a peer's earlier one if it lacks
    that peer and the two controls agree within 10 %."""
    by_cell: dict[tuple[str, str], dict[str, dict[str, list[float]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    for r in records:
        rates = by_cell[str(r["model"]), str(r["cell"])][str(r["sitting"])][str(r["engine"])]
        rates.append(float(r["output_tok_s"]))  # type: ignore[arg-type]
    out = {}
    for key, sittings in by_cell.items():
        order = sorted(sittings, key=lambda s: int(s.split("-")[0]))
        latest = dict(sittings[order[-1]])
        control = latest.get(CONTROL)
        for earlier in reversed(order[:-1]):
            theirs = sittings[earlier].get(CONTROL)
            if not control or not theirs:
                continue
            if abs(statistics.median(theirs) / statistics.median(control) - 1) > 0.10:
                continue
            for engine, rates in sittings[earlier].items():
                latest.setdefault(engine, rates)
        out[key] = latest
    return out


def report(records: list[Record]) -> None:
    """Print a table to look at, then one JSON line for machines."""
    cells = merged(records)
    lines = []
    for model, cell in sorted(cells):
        rates = cells[model, cell]
        peers = {e: statistics.median(v) for e, v in rates.items() if e != CONTROL}
        best = max(peers.values(), default=float("nan"))
        print(f"\n{model}  {cell}  (tok/s; median, min..max of repeats; ratio to the best peer)")
        for engine, values in sorted(rates.items(), key=lambda kv: -statistics.median(kv[1])):
            middle = statistics.median(values)
            spread = f"{min(values):8.1f} ..{max(values):8.1f}  n={len(values)}"
            ratio = f"  {middle / best:5.2f}x" if engine == CONTROL and peers else ""
            print(f"  {engine:28s} {middle:8.1f}   {spread}{ratio}")
            row = {"model": model, "cell": cell, "engine": engine, "median": middle}
            lines.append(row | {"min": min(values), "max": max(values), "n": len(values)})
    print("\n" + json.dumps(lines))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=[*MODELS, "all", "report"])
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=list(CELLS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--skip", nargs="*", default=[], help="engines with this in their name")
    parser.add_argument("--limit", type=int, help="only the first N requests of a workload")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--peers", nargs="*", default=["llama", "openvino", "vllm"])
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    parser.add_argument("--home", type=Path, default=cache / "octavo-bench")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out" / "compare.jsonl")
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.home.mkdir(parents=True, exist_ok=True)
    if args.model != "report":
        for model in MODELS if args.model == "all" else [args.model]:
            measure(model, args.cells, args)
    report(load(args.out))


if __name__ == "__main__":
    sys.exit(main())
