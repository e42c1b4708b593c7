"""Octavo beside what a user would pick instead: the same work, one machine, one run, in turn.

    python bench/compare.py all                          every model and cell, five repeats
    python bench/compare.py smollm2-135m --cells chat    one model, one cell
    python bench/compare.py all --budget 60              begin no repeat that would end later
    python bench/compare.py report --plot bars.png       what has been measured so far
    python bench/compare.py peers                        the engines and their settings

Cells: single (one stream of 128 tokens), batch8 (8 streams of 128 tokens), prefill (512 tokens);
chat and shared_prefix (16 at once; over each engine's own HTTP server, OpenVINO in process).

In a repeat every engine has its turn, in an order that rotates. Before a turn the others' processes
are stopped and the machine must be idle (at most 20 s are waited; what others took then and during
the turn is kept), and the engine gets the cell's first requests once, short and unmeasured. Before
each of Octavo's turns the machine's peaks are measured, and the cell's ceiling computed from them
(ceilings.py).

A repeat is appended to --out when it has ended, so a run that was cut goes on where it stood; the
repeats go round the cells, so that a run cut short has something of each. All repeats count; after
a change of Octavo give another --out (a report that mixes builds says so).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import report as reporting
from ceilings import Ceilings, ceilings_of
from engines import Engine, Figures, stop_all
from installs import say
from machine import Others, wait_idle
from peers import CANNOT, CELLS, MAKERS, TABLE, engines
from report import CONTROL, Record, load
from workloads import Job, build, corpus

MODELS = ("smollm2-135m", "gemma-3-270m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b")
CONCURRENCY = {"chat": 16, "shared_prefix": 16, "batch8": 8}
FAILURES = (RuntimeError, OSError, KeyError, ValueError, IndexError)


def build_id() -> str:
    """Twelve digits that change with Octavo's sources or its compiled kernels."""
    import octavo
    from octavo.kernels import _cpu

    package = Path(str(octavo.__file__)).parent
    files = [*sorted(package.rglob("*.py")), Path(str(_cpu.__file__))]
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


class Comparison:
    """One model's sitting: its engines, started; its text; its ceilings."""

    def __init__(self, model: str, args: argparse.Namespace, running: list[Engine]) -> None:
        from octavo.models import hub
        from octavo.models.tokenizer import load_tokenizer
        from octavo.models.weights import open_checkpoint

        self.model, self.args, self.running = model, args, running
        self.path = hub.resolve(model)
        tokenizer = load_tokenizer(open_checkpoint(self.path))
        self.ids = corpus(tokenizer.encode)
        self.bos = tokenizer.bos_id if tokenizer.add_bos else None
        self.ceilings: Ceilings = ceilings_of(self.path)
        self.sitting = f"{int(time.time())}-{os.getpid()}"
        self.warmed: set[tuple[str, str]] = set()
        self.build = build_id()

    def jobs(self, cell: str, salt: int) -> list[Job]:
        jobs = build(cell, self.ids, self.bos, salt)
        return jobs if cell == "batch8" else jobs[: self.args.limit]

    def start(self, cells: set[str]) -> None:
        """Start the engines that serve `cells`; those that cannot be had are left out, and said."""
        args = self.args
        wanted = [peer for peer in args.peers if not self.barred(peer)]
        for engine in engines(args.home, self.path, args.threads, wanted, cells):
            if any(part in engine.name for part in args.skip):
                continue
            say(f"starting {engine.name} on {self.model}")
            self.running.append(engine)  # first: what ends this in mid-start must end it too
            try:
                engine.start()
            except FAILURES as error:
                say(f"  left out: {error}")
                self.running.pop().stop()
                continue
            engine.rest()

    def barred(self, peer: str) -> bool:
        reason = CANNOT.get((peer, self.model))
        if reason:
            say(f"{peer} is not run on {self.model}: {reason}")
        return bool(reason)

    def repeat(self, cell: str, number: int) -> None:
        """Every engine's turn; all records of the repeat are kept once it has ended."""
        group = [engine for engine in self.running if cell in engine.serves]
        jobs = self.jobs(cell, time.time_ns())
        k = number % max(1, len(group))
        records = []
        for engine in group[k:] + group[:k]:
            begun = time.monotonic()
            try:
                figures = self.turn(engine, cell, jobs)
            except FAILURES as error:
                say(f"  {engine.name} {cell}: failed: {error}")
                continue
            record: Record = {"model": self.model, "cell": cell, "engine": engine.name}
            record |= {"repeat": number, "sitting": self.sitting, "build": self.build}
            record |= {"requests": len(jobs), "threads": self.args.threads}
            record |= figures | {"turn_s": time.monotonic() - begun}
            records.append(record)
            rate, taken = figures["output_tok_s"], figures["others_during"]
            of = figures.get("ceiling_tok_s")
            part = f", {rate / of:.0%} of {of:.1f}" if of else ""
            say(f"  {self.model} {cell} #{number} {engine.name}: {rate:.1f} ({taken:.0%}{part})")
        with self.args.out.open("a") as f:
            f.writelines(json.dumps(record) + "\n" for record in records)

    def turn(self, engine: Engine, cell: str, jobs: list[Job]) -> Figures:
        """One engine's figures on `jobs`, and what the machine was like before them."""
        at_once = CONCURRENCY.get(cell, 1)
        engine.wake()
        try:
            if (engine.name, cell) not in self.warmed:
                engine.warm(cell, self.jobs(cell, time.time_ns()), at_once)
                self.warmed.add((engine.name, cell))
            engine.rest()
            taken, waited = wait_idle()
            about = {"others_busy": taken, "waited_s": waited}
            if engine.name == CONTROL:
                peaks = self.ceilings.measure(self.args.threads)
                about |= peaks
                about["ceiling_tok_s"] = self.ceilings.rate(cell, jobs, at_once, peaks)
            others = Others(engine.group)
            engine.wake()
            figures = engine.run(cell, jobs, at_once)
            return figures | about | {"others_during": others.share()}
        finally:
            engine.rest()


def done(records: list[Record], model: str, cell: str, requests: int) -> set[int]:
    """The repeats that are there."""
    key = (model, cell, requests, CONTROL)
    found = [r for r in records if (r["model"], r["cell"], r["requests"], r["engine"]) == key]
    return {int(str(r["repeat"])) for r in found}


def expected(records: list[Record], model: str, cell: str, requests: int) -> float:
    """Seconds that the last repeat of this cell took; 0 if there was none."""
    key = (model, cell, requests)
    same = [r for r in records if (r["model"], r["cell"], r["requests"]) == key]
    last = [r for r in same if r["repeat"] == same[-1]["repeat"]] if same else []
    return sum(float(str(r.get("turn_s", 0.0))) for r in last)


def measure(model: str, args: argparse.Namespace, ends: float) -> None:
    """The repeats of `model` that are missing, as far as there is time."""
    running: list[Engine] = []
    sitting = Comparison(model, args, running)
    counts = {cell: len(sitting.jobs(cell, 0)) for cell in args.cells}

    def left() -> list[tuple[int, str]]:
        records = load(args.out)
        return [
            (number, cell)
            for number in range(args.repeats)
            for cell in args.cells
            if number not in done(records, model, cell, counts[cell])
        ]

    todo = left()
    if not todo:
        say(f"{model}: nothing left to measure")
        return
    try:
        sitting.start({cell for _, cell in todo})
        for number, cell in todo:
            seconds = expected(load(args.out), model, cell, counts[cell])
            if time.monotonic() + seconds > ends:
                say(f"no time for {model} {cell} #{number} ({seconds:.0f} s)")
                continue
            sitting.repeat(cell, number)
    finally:
        stop_all(running)


def show_peers() -> None:
    """The engines and their settings, for people."""
    import textwrap

    for peer in TABLE:
        print(f"{peer.name}  {peer.version}")
        for name, words in (
            ("weights", peer.weights),
            ("settings", peer.settings),
            ("cells", peer.how),
        ):
            print(textwrap.fill(f"{name:10}{words}", 98, initial_indent="  ",
                                subsequent_indent=" " * 12))  # fmt: skip
        for (part, model), reason in CANNOT.items():
            if part in peer.name.lower():
                print(textwrap.fill(f"not on {model}: {reason}", 98, initial_indent="  ! ",
                                    subsequent_indent=" " * 12))  # fmt: skip
        print()


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=[*MODELS, "all", "report", "peers"])
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=list(CELLS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--budget", type=float, default=float("inf"), metavar="MINUTES")
    parser.add_argument("--skip", nargs="*", default=[], help="engines with this in their name")
    parser.add_argument("--limit", type=int, help="only the first N requests of a workload")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--peers", nargs="*", choices=MAKERS, default=list(MAKERS))
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    parser.add_argument("--home", type=Path, default=cache / "octavo-bench")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out" / "compare.jsonl")
    parser.add_argument("--json", action="store_true", help="the report as one JSON line")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="and as a picture")
    return parser


def main() -> None:
    args = options().parse_args()
    if args.model == "peers":
        return show_peers()
    ends = time.monotonic() + 60 * args.budget
    # Ended from outside: what was started must end too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.home.mkdir(parents=True, exist_ok=True)
    if args.model != "report":
        for model in MODELS if args.model == "all" else [args.model]:
            measure(model, args, ends)
    records = load(args.out)
    reporting.report(records, args.json)
    if args.plot:
        reporting.plot(records, args.plot)
    return None


if __name__ == "__main__":
    main()
