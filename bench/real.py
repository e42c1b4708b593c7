"""Deadlines on the real CPU engine: what the scheduler's goals are, measured on this machine.

    python bench/real.py COMMAND [options]

The shipped Azure sample, prompts and outputs at an eighth of their length, on one model in this
process (`bench/ground.py`); requests come when they are due whatever the engine does. Deadlines:
ten times the first token and five times the pace of one request alone on this machine. A seed is a
place in the trace. Real runs are kept in --out and never made twice: a command that stopped for its
--budget goes on where it was. Run it on an idle machine; each run says how long its threads stood
in the run queue.

steptime    the same shapes again and again (what no model can beat), and the model beside it
search      the best fixed setting of fcfs in the simulator (no real run, but for the first)
goodput     the best fixed setting of fcfs, searched in the simulator and then on the engine; its
            knee (90 % in time, runs of 60 s); at 1.4 times the knee fcfs and slo with admission, in
            turn, for 120 s each (--seconds): what fcfs cannot do is then a queue that grows
admission   of goodput's runs: promises kept, forecasts of first tokens, false refusals
fidelity    the simulator beside the engine at 0.5 and 0.9 of the knee
replayed    every run that is kept, simulated at its own speed
fairness    one tenant alone, and beside one that sends ten times as much
door        a real server and a client: how soon it refuses, and whether Retry-After is true
ranking     policies as the engine and as the simulator rank them
"""

from __future__ import annotations

import argparse
import json
import random
import time
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from doorstep import server, visit
from ground import (
    WATCH,
    Cell,
    Contestant,
    Ground,
    Ledger,
    OutOfTime,
    contestant,
    hold_off,
    visits_of,
)

from octavo.core.batch import Batch, Row, SampleSpec, Want
from octavo.core.request import Request, SamplingParams
from octavo.core.steptime import Coefficients, StepFeatures, StepModel
from octavo.sim.fleet import Fleet
from octavo.sim.report import met, words
from octavo.tables import show_table

HELD = 0.9  # of requests in time: what the knee is
OVER = 1.4  # of the knee
VICTIM = 0.25  # of the knee: what the tenant asks that another floods
CHUNKS, ROWS = (16, 24, 32, 48, 64, 128, 512), (4, 16, 64)  # of fcfs, searched
BEST = 2  # settings of fcfs that are tried on the engine
SLO = Contestant("slo+admission")
SHARP, STRIDE = 1.04, 1.15  # how near the knee is to be found, and how it is looked for
# Rows (start, tokens, wants): the shapes whose times are taken again and again.
SHAPES = {
    "1 decode": [(128, 1, 1)],
    "4 decodes": [(200, 1, 1)] * 4,
    "8 decodes": [(128, 1, 1)] * 8,
    "16 decodes": [(128, 1, 1)] * 16,
    "64 of a prompt": [(0, 64, 0)],
    "4 decodes + 48": [(200, 1, 1)] * 4 + [(64, 48, 0)],
    "8 decodes + 128": [(128, 1, 1)] * 8 + [(0, 128, 1)],
    "256 of a prompt": [(0, 256, 1)],
}
# The machine that is simulated: at the speed of the run's first 30 %, or as it changed in the run.
WAYS = (("one speed", float("inf")), ("own speed", 0.5))
KINDS = ("mean", "P50", "P90", "P99")
Table = tuple[str, list[str], list[list[str]]]
Found = tuple[Cell, list[Table]]


# ---- steptime ----


def steptime(ground: Ground, _: argparse.Namespace) -> Found:
    noise = ground.measured({"run": "noise"}, partial(again_and_again, ground, 12.0))
    floor = [[name, f"{1e3 * c['median_s']:.2f}", f"{c['off']:.1%}", f"{c['held']:.1%}",
              f"{c['p90']:.1%}"] for name, c in noise["shapes"].items()]  # fmt: skip
    cell = ground.steps()
    frozen, live = held_out(cell)
    rows = [["the first 30 %, then frozen", *_errors(frozen)]]
    rows.append(["each before it was seen", *_errors(live)])
    seen = [run for run in ground.ledger.cells.values() if "step_error" in run]
    for run in seen[-12:]:
        e = run["step_error"]
        rows.append([f"a real run, {e['steps']} steps", f"{e['median']:.1%}", f"{e['mean']:.1%}",
                     f"{e['bias']:+.1%}", f"{e['mean_bias']:+.1%}"])  # fmt: skip
    tables: list[Table] = [
        ("the same shape again and again", ["shape", "ms", "off its median", "off the first half's",
                                            "P90"], floor),
        ("step model, held out", ["", "median", "mean", "bias (median)", "bias (mean)"], rows),
    ]  # fmt: skip
    return {"noise": noise, "frozen": frozen, "live": live}, tables


def again_and_again(ground: Ground, seconds: float) -> Cell:
    """Each shape in turn; medians, and how far the times are off."""
    executor, times = ground.assembly.executor, {name: list[float]() for name in SHAPES}
    batches = {name: batch_of(rows) for name, rows in SHAPES.items()}
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for name, batch in batches.items():
            executor.submit(batch)
            result = executor.collect()
            times[name].append(result.finished - result.started)
    found = {}
    for name, values in times.items():
        taken = np.array(values[1:])
        half = len(taken) // 2
        off = np.abs(taken / np.median(taken) - 1)
        held = np.abs(taken[half:] / np.median(taken[:half]) - 1)
        found[name] = {
            "median_s": float(np.median(taken)), "off": float(np.median(off)),
            "held": float(np.median(held)), "p90": float(np.percentile(off, 90)),
        }  # fmt: skip
    return {"shapes": found}


def batch_of(rows: list[tuple[int, int, int]]) -> Batch:
    greedy, made, block = SampleSpec(SamplingParams(temperature=0), 0, 0), list[Row](), 0
    draw = random.Random(0)
    for number, (start, count, wanted) in enumerate(rows):
        end = block + -(-(start + count) // 16)
        tokens = array("i", [draw.randrange(1000, 9000) for _ in range(count)])
        wants = (Want(count - 1, greedy),) if wanted else ()
        made.append(Row(number, start, tokens, array("i", range(block, end)), wants))
        block = end
    return Batch(1, tuple(made))


def held_out(cell: Cell) -> tuple[Cell, Cell]:
    """Errors on the last 70 %: of a model that learned from the first 30 %, and of one that goes on
    learning."""
    steps = [(StepFeatures(*row[:5]), row[6] - row[5]) for row in cell["steps"]]
    cut = int(0.3 * len(steps))
    model = StepModel(Coefficients(**cell["prior"]))
    model.calibrate(steps[:cut])
    frozen = [model.usual(f) / s - 1 for f, s in steps[cut:]]
    live = []
    for features, seconds in steps[cut:]:
        live.append(model.predict(features) / seconds - 1)
        model.observe(features, seconds)
    return error_of(frozen), error_of(live)


def error_of(errors: list[float]) -> Cell:
    return {
        "median": float(np.median(np.abs(errors))), "mean": float(np.mean(np.abs(errors))),
        "bias": float(np.median(errors)), "mean_bias": float(np.mean(errors)), "steps": len(errors),
    }  # fmt: skip


def _errors(e: Cell) -> list[str]:
    return [f"{e['median']:.1%}", f"{e['mean']:.1%}", f"{e['bias']:+.1%}", f"{e['mean_bias']:+.1%}"]


# ---- goodput ----


def candidates(ground: Ground) -> list[tuple[float, Contestant]]:
    """Settings of fcfs with their knees in the simulator, best first; of each chunk the best."""

    def find() -> Cell:
        found = []
        for chunk in CHUNKS:
            for rows in ROWS:
                who = Contestant("fcfs", chunk, rows)
                found.append([ground.knee(who, HELD, [0, 1]), chunk, rows])
                ground.say(f"  {who.name}: {found[-1][0]:.2f}/s in the simulator")
        return {"knees": sorted(found, reverse=True)}

    key = {"model": ground.name, "simulated": "knees", "slo": str(ground.slo),
           "seconds": ground.probe}  # fmt: skip
    cell = ground.ledger.get(key, find)
    best: dict[int, tuple[float, Contestant]] = {}
    for knee, chunk, rows in cell["knees"]:
        best.setdefault(chunk, (knee, Contestant("fcfs", chunk, rows)))
    return sorted(best.values(), reverse=True)


def search(ground: Ground, _: argparse.Namespace) -> Found:
    rows = [[who.name, f"{knee:.2f}"] for knee, who in candidates(ground)]
    title = "knees of fcfs in the simulator, the best rows of each chunk"
    return {"knees": rows}, [(title, ["setting", "requests/s"], rows)]


def knee_of(
    ground: Ground, args: argparse.Namespace
) -> tuple[float, list[Contestant], list[list[str]]]:
    """The best knee on the engine, the settings tried, the best first, and what was seen."""
    if args.knee and args.best:
        return args.knee, args.best, []
    tried, best = candidates(ground)[:BEST], 0.0
    if args.knee:
        return args.knee, [who for _, who in tried], []
    rows: list[list[str]] = []

    def holds(who: Contestant, rate: float) -> bool:
        one = ground.real(who, rate, seed=0, seconds=ground.probe)
        rows.append([who.name, f"{rate:.2f}", f"{one['attainment']:.1%}", f"{one['goodput']:.2f}",
                     f"{one['queue_delay_s']:.2f}"])  # fmt: skip
        return bool(one["attainment"] >= HELD)

    for guess, who in list(tried):
        held = lost = 0.0
        rate = round(max(guess, SHARP * best), 2)
        while not (held and lost) or lost > SHARP * held:
            if holds(who, rate):
                held = rate
            else:
                lost = rate
            if lost and lost <= SHARP * best:
                break  # it is not the best
            rate = (held + lost) / 2 if held and lost else held * STRIDE or lost / STRIDE
            rate = round(rate, 2)
        if held > best:
            best = held
            tried.sort(key=lambda one: one[1] != who)  # the best first
    return best, [who for _, who in tried], rows


def only_knee(ground: Ground, args: argparse.Namespace) -> float:
    """The same without the settings, which need no look either where --knee says it."""
    return args.knee or knee_of(ground, args)[0]


def goodput(ground: Ground, args: argparse.Namespace) -> Found:
    knee, tried, ladder = knee_of(ground, args)
    rate, runs = OVER * knee, dict[str, list[Cell]]()
    field = [*(tried if args.knee else tried[:1]), SLO]
    for seed in range(args.seeds):
        k = seed % len(field)
        for who in (*field[k:], *field[:k]):
            runs.setdefault(who.name, []).append(ground.real(who, rate, seed))
    rows = [[name, *_fared(cells)] for name, cells in runs.items()]
    means = [float(np.mean([c["goodput"] for c in runs[who.name]])) for who in field]
    ratio = means[-1] / max(means[:-1])
    head = ["setting", "goodput/s", "in time", "refused", "TTFT P50", "TTFT P99", "TPOT P50",
            "in the run queue s"]  # fmt: skip
    slo = ground.slo
    title = (
        f"{OVER:g} x the knee of {knee:.2f}/s; {words(slo)}; {args.seeds} seeds: "
        f"{ratio:.2f}x the best fcfs"
    )
    tables: list[Table] = [
        ("fcfs on the engine", ["setting", "rate", "in time", "goodput/s", "queue s"], ladder),
        (title, head, rows),
    ]
    return {"knee": knee, "ratio": ratio, "runs": runs}, tables


def _fared(cells: list[Cell]) -> list[str]:
    def each(read: Callable[[Cell], float], form: str) -> str:
        return " ".join(format(read(c), form) for c in cells)

    return [
        each(lambda c: c["goodput"], ".2f"), each(lambda c: c["attainment"], ".0%"),
        each(lambda c: c["sent"] - c["served"], ".0f"),
        each(lambda c: 1e3 * c["ttft"]["P50"], ".0f"),
        each(lambda c: 1e3 * c["ttft"]["P99"], ".0f"),
        each(lambda c: 1e3 * c["tpot"]["P50"], ".1f"), each(lambda c: c["queue_delay_s"], ".2f"),
    ]  # fmt: skip


# ---- admission ----


def admission(ground: Ground, args: argparse.Namespace) -> Found:
    knee = only_knee(ground, args)
    cells = []
    for times in (0.9, OVER):
        for seed in range(args.seeds):
            cells.append((times, ground.real(SLO, times * knee, seed)))
    rows, out = [], []
    for times, cell in cells:
        one = promised(cell)
        out.append({"times": times, **one, "queue_delay_s": cell["queue_delay_s"]})
        rows.append([f"{times:g}x", f"{one['kept']}/{one['admitted']}", f"{one['share']:.1%}",
                     f"{one['forecast']:.0%}", f"{1e3 * one['p90_s']:.0f}",
                     " ".join(f"{us:.0f}" for us in cell["gate_us"]),
                     f"{cell['queue_delay_s']:.2f}"])  # fmt: skip
    head = ["load", "kept", "share", "forecasts near", "P90 off ms", "gate us P50 P90 P99",
            "in the run queue s"]  # fmt: skip
    tables: list[Table] = [("promises (near: within 15 % or 50 ms)", head, rows)]
    if not args.no_false:
        found, more = false_refusals(ground, args, OVER * knee)
        return {"runs": out, "false": found}, [*tables, more]
    return {"runs": out}, tables


def promised(cell: Cell) -> Cell:
    """What became of those that were let in."""
    let_in = [r for r in cell["rows"] if r["refused"] is None]
    told = [(r["forecast"], r["ttft"]) for r in let_in if r["forecast"] and r["ttft"]]
    off = [abs(forecast - took) for forecast, took in told]
    near = [gap <= max(0.05, 0.15 * took) for gap, (_, took) in zip(off, told, strict=True)]
    kept = sum(r["met"] for r in let_in)
    return {
        "admitted": len(let_in), "kept": kept, "share": kept / max(1, len(let_in)),
        "forecast": float(np.mean(near)) if near else 1.0,
        "p90_s": float(np.percentile(off, 90)) if off else 0.0,
    }  # fmt: skip


class _Spare:
    """A gate that lets one of them in whatever it thinks."""

    def __init__(self, gate: Any, spared: str) -> None:
        self._gate, self._spared = gate, spared

    def judge(self, request: Request, now: float) -> Request:
        return request if request.id == self._spared else self._gate.judge(request, now)


def false_refusals(ground: Ground, args: argparse.Namespace, rate: float) -> tuple[Cell, Table]:
    """Of each request that was refused: would it have met its deadlines, and nobody else have lost
    theirs by it? In the simulator every one of them; on the engine every eighth is let in."""
    rows, found = [], []
    for seed in range(args.seeds):
        load = ground.load(rate, seed)

        def run(spared: str, load: Any = load, seed: int = seed) -> tuple[set[str], set[str]]:
            fleet = Fleet([ground.spec(SLO, noise=0.03)], seed=seed, prefix_caching=False)
            fleet.replicas[0].gate = _Spare(fleet.replicas[0].gate, spared)  # type: ignore[assignment]
            ended = ground.simulate(fleet, load).outcomes
            good = {o.item.id for o in ended if met(ground.slo, o)}
            return good, {o.item.id for o in ended if o.refused}

        good, refused = run("")
        fair = alone = 0
        for name in sorted(refused):
            with_it, _ = run(name)
            alone += name in with_it
            fair += name in with_it and len(with_it) > len(good)
        cell = ground.real(SLO, rate, seed, anyway=8)
        forced = [r for r in cell["rows"] if r["forced"]]
        one = {"seed": seed, "sent": len(load), "refused": len(refused), "would_have_met": alone,
               "and_harmed_nobody": fair, "let_in_anyway": len(forced),
               "of_these_met": sum(r["met"] for r in forced)}  # fmt: skip
        found.append(one)
        rows.append([str(seed), str(len(load)), str(len(refused)),
                     f"{alone} ({alone / max(1, len(refused)):.0%})",
                     f"{fair} ({fair / len(load):.1%} of sent)",
                     f"{one['of_these_met']} of {len(forced)}"])  # fmt: skip
    head = [
        "seed",
        "sent",
        "refused",
        "would have met",
        "and more in time in all",
        "engine: let in anyway, met",
    ]
    return {"runs": found}, ("refused, and what would have become of them", head, rows)


# ---- fidelity ----


def fidelity(ground: Ground, args: argparse.Namespace) -> Found:
    knee, tried, _ = knee_of(ground, args)
    who, rows, out = tried[0], [], []
    for times in (0.5, 0.9):
        for seed in range(args.seeds):
            real = [ground.real(who, times * knee, seed, repeat) for repeat in range(args.repeats)]
            for way, window in WAYS:
                made = [
                    ground.simulated(who, times * knee, seed, machine=ground.paced(cell, window))
                    for cell in real
                ]
                found = list(_compared(real, made))
                out += [{"times": times, "seed": seed, "way": way, **one} for one in found]
                rows.append([f"{times:g}x", str(seed), way, *(one["shown"] for one in found)])
    head = ["load", "seed", "simulated with", *(f"{n} {k}" for n in ("TTFT", "TPOT", "E2E")
                                                for k in KINDS), "req/s"]  # fmt: skip
    tables: list[Table] = [(f"{who.name}: simulator beside the engine, {args.repeats} repeats each "
                            "(median error; ! outside)", head, rows)]  # fmt: skip
    for way, _ in WAYS:
        mine = [one for one in out if one["way"] == way]
        ok, strict = (sum(one[k] for one in mine) for k in ("ok", "strict"))
        tables.append((f"{way}: {strict} of {len(mine)} within 5 % / 3 %, {ok} with the repeats' "
                       "own spread x 1.5", [], []))  # fmt: skip
    return {"cells": out}, tables


def replayed(ground: Ground, _: argparse.Namespace) -> Found:
    """Every real run that is kept, simulated with what was known of the machine."""
    rows, out = [], []
    for text, cell in ground.ledger.cells.items():
        key = json.loads(text)
        if "steps" not in cell or "goodput" not in cell or key["anyway"]:
            continue
        ground.seconds = key["seconds"]
        who, rate = contestant(key["run"].replace(" ", ":")), key["rate"]
        for way, window in WAYS:
            machine = ground.paced(cell, window)
            made = ground.simulated(who, rate, key["seed"], machine=machine)
            found = list(_compared([cell], [made]))
            out.append({"key": key, "way": way, "cells": found})
            ok = sum(one["strict"] for one in found)
            share = f"{cell['attainment']:.0%} {made['attainment']:.0%}"
            means = [one["shown"] for one in found if "mean" in one["what"]] + [found[-1]["shown"]]
            rows.append([f"{who.name} {rate:.2f}/s {key['seed']}", way, share, *means, str(ok)])
    head = ["run", "simulated with", "in time, simulated", "TTFT mean", "TPOT mean", "E2E mean",
            "req/s", f"of {3 * len(KINDS) + 1} within 5 %, 3 %"]  # fmt: skip
    return {"runs": out}, [("kept runs, simulated", head, rows)]


def _compared(real: list[Cell], made: list[Cell]) -> Iterator[Cell]:
    for name, bound in (("ttft", 0.05), ("tpot", 0.03), ("e2e", 0.03)):
        for kind in KINDS:
            pair = [[c[name][kind] for c in cells] for cells in (real, made)]
            yield {"what": f"{name} {kind}", **compare(*pair, bound)}
    pair = [[c["throughput"] for c in cells] for cells in (real, made)]
    yield {"what": "throughput", **compare(*pair, 0.03)}


def compare(real: list[float], made: list[float], bound: float) -> Cell:
    """Of the simulator, run by run: the median of its errors; within the bound, or 1.5 times the
    spread that the real repeats have among themselves."""
    error = float(np.median([m / r - 1 for m, r in zip(made, real, strict=True)]))
    spread = (max(real) - min(real)) / float(np.median(real))
    strict = abs(error) <= bound
    ok = bool(strict or abs(error) <= 1.5 * spread)
    shown = f"{error:+.1%}{'' if strict else '~' if ok else '!'}"
    return {"real": real, "simulated": made, "error": error, "spread": spread,
            "strict": strict, "ok": ok, "shown": shown}  # fmt: skip


# ---- fairness ----


def fairness(ground: Ground, args: argparse.Namespace) -> Found:
    knee = only_knee(ground, args)
    rate, rows, out = VICTIM * knee, [], {}
    for who in args.policies or [*map(contestant, ("fair:32", "fair-slo", "fcfs:32"))]:
        cells = {}
        for name, times in (("alone", 0), ("flooded", 10)):
            key = {"run": f"flood {who.name}", "times": times, "rate": round(rate, 3),
                   "seconds": ground.seconds}  # fmt: skip
            cells[name] = ground.measured(key, partial(flooded, ground, who, rate, times))
        ratio = cells["flooded"]["p99_s"] / cells["alone"]["p99_s"]
        out[who.name] = {**cells, "ratio": ratio}
        taken = [cells[name][k] for name in cells for k in ("p50_s", "p99_s")]
        rows.append([who.name, *(f"{1e3 * t:.0f}" for t in taken), f"{ratio:.2f}x"])
    head = ["policy", "alone P50 ms", "P99", "flooded P50", "P99", "P99 ratio"]
    return out, [(f"TTFT of a tenant at {rate:.2f}/s beside one at ten times that", head, rows)]


def flooded(ground: Ground, who: Contestant, rate: float, times: int) -> Cell:
    ground.say(f"  {who.name}, {times} times as much beside it")
    visits = visits_of(ground.load(rate, 0), ground.slo, "victim")
    if times:
        flood = visits_of(ground.load(times * rate, 1), ground.slo, "flood")
        visits = sorted([*visits, *flood], key=lambda visit: visit.at)
    cell = ground.play(who, visits)
    taken = [r["ttft"] for r in cell["rows"] if r["tenant"] == "victim" and r["ttft"] is not None]
    return {"p50_s": float(np.median(taken)), "p99_s": float(np.percentile(taken, 99)),
            "number": len(taken), "seconds": cell["seconds"]}  # fmt: skip


# ---- ranking ----


def ranking(ground: Ground, args: argparse.Namespace) -> Found:
    knee, tried, _ = knee_of(ground, args)
    best = max(tried, key=lambda who: ground.real(who, OVER * knee, 0)["goodput"])
    field = [best, *(best._replace(policy=name) for name in ("sjf", "priority", "fair"))]
    field += [Contestant("slo"), SLO]
    rows, found = [], []
    for who in field:
        real = [ground.real(who, OVER * knee, seed) for seed in range(args.seeds)]
        seen = {"real": real}
        for way, window in WAYS:
            machines = [ground.paced(cell, window) for cell in real]
            seen[way] = [
                ground.simulated(who, OVER * knee, seed, machine=machine)
                for seed, machine in enumerate(machines)
            ]
        seen["steady"] = [ground.simulated(who, OVER * knee, n) for n in range(args.seeds)]
        shares = {w: float(np.mean([c["attainment"] for c in cells])) for w, cells in seen.items()}
        found.append({"policy": who.name, **shares})
        rows.append([who.name, *(f"{share:.1%}" for share in shares.values())])
    ways = [name for name in found[0] if name not in ("policy", "real")]
    tau = {w: kendall([one["real"] for one in found], [one[w] for one in found]) for w in ways}
    head = ["policy", "in time", *(f"simulated, {way}" for way in ways)]
    said = ", ".join(f"{tau[way]:.2f} ({way})" for way in ways)
    title = f"{OVER:g} x the knee, {args.seeds} seeds: Kendall tau {said}"
    return {"tau": tau, "policies": found}, [(title, head, rows)]


def kendall(a: list[float], b: list[float]) -> float:
    """Kendall's tau: agreeing pairs minus disagreeing ones, of all."""
    pairs = [(i, j) for i in range(len(a)) for j in range(i)]
    signs = [np.sign(a[i] - a[j]) * np.sign(b[i] - b[j]) for i, j in pairs]
    return float(sum(signs) / len(pairs))


# ---- door ----


def door(ground: Ground, args: argparse.Namespace) -> Found:
    knee = only_knee(ground, args)
    found, rows = [], []
    key = {"run": "door", "rate": round(OVER * knee, 3), "seconds": ground.seconds}
    for seed in range(args.seeds):
        run = partial(_door, ground, OVER * knee, seed)
        one = ground.measured(key | {"seed": seed}, run)
        found.append(one)
        took = one["refusal_ms"] or dict.fromkeys(("P50", "P90", "P99", "P100"), float("nan"))
        rows.append([
            str(seed), f"{one['kept']}/{one['served']}", str(one["refused"]),
            *(f"{took[k]:.1f}" for k in ("P50", "P90", "P99", "P100")),
            f"{one['let_in']} of {one['retried']}", f"{one['lag_p99_ms']:.1f}",
        ])  # fmt: skip
    head = ["seed", "kept", "refused", "refused within ms: P50", "P90", "P99", "most",
            "came again, let in", "client late P99 ms"]  # fmt: skip
    return {"runs": found}, [(f"a server at {OVER:g} x the knee, the client's clock", head, rows)]


def _door(ground: Ground, rate: float, seed: int) -> Cell:
    log = ground.ledger.path.with_suffix(".server.log")
    with server(ground.name, log) as (url, process):
        found = visit(url, process, ground.name, ground.load(rate, seed), ground.slo, WATCH)
    hold_off(max(found["others"]))
    return found | {"neighbours": float(np.mean(found["others"]))}


COMMANDS = {
    "steptime": steptime, "goodput": goodput, "admission": admission, "fidelity": fidelity,
    "fairness": fairness, "ranking": ranking, "search": search,
    "door": door,
    "replayed": replayed,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--seconds", type=float, default=120.0, help="Of arrivals in a run.")
    parser.add_argument("--probe", type=float, default=60.0, help="The same, looking for a knee.")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3, help="Of a real run, for fidelity.")
    parser.add_argument("--knee", type=float, help="Requests a second; skips the search for it.")
    parser.add_argument(
        "--best",
        nargs="*",
        type=contestant,
        help="Beside --knee: the settings of fcfs to beat, the best first: fcfs:CHUNK[xROWS].",
    )
    parser.add_argument(
        "--policies", nargs="*", type=contestant, help="For fairness: POLICY[:CHUNK[xROWS]]."
    )
    parser.add_argument("--no-false", action="store_true", help="Admission without the replays.")
    parser.add_argument("--budget", type=float, default=1e9, help="Seconds of real runs.")
    parser.add_argument("--out", type=Path, default=Path("bench/out/real.jsonl"))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    for name in ("seconds", "probe", "seeds", "repeats", "budget", "knee"):
        if (given := getattr(args, name)) is not None and not given > 0:  # a NaN is not
            parser.error(f"--{name} must be above 0, got {given:g}")
    if args.best and args.knee is None:
        parser.error("--best says which settings had the knee: give --knee too")
    if args.policies and args.command != "fairness":
        parser.error(f"--policies is for fairness, not for {args.command}")
    if args.out.is_dir():
        parser.error(f"--out is a file of runs, and {args.out} is a folder")
    ground = Ground(args.model, Ledger(args.out), args.seconds, args.budget, args.probe)
    try:
        values, tables = COMMANDS[args.command](ground, args)
    except OutOfTime as error:
        ground.say(f"{error}; run it again to go on")
        return
    if args.json:
        print(json.dumps(values))
        return
    for title, head, rows in tables:
        if rows:
            show_table(title, head, rows)
        else:
            print(title)


if __name__ == "__main__":
    main()
