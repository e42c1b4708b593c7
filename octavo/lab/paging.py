"""`octavo lab paging`: how many requests fit into the same KV memory.

A burst of requests is served with a small KV pool, reserved in three ways: the whole context for
each (the classic engine), prompt + output for each (which no engine can know beforehand), and
blocks of 32 tokens as they are needed (PagedAttention, Kwon et al. 2023). The kernels are the same
in all three: only who is let in differs.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from math import inf
from statistics import fmean
from typing import Any

from octavo import plots
from octavo.assembly import Assembly
from octavo.core.policy import Occupancy, Policy, fcfs, while_rows_last
from octavo.core.request import Event, Request, Sequence
from octavo.core.scheduler import Scheduler
from octavo.errors import InvalidRequest
from octavo.lab import stage
from octavo.lab.finding import Finding, Sheet
from octavo.lab.stage import Clock, Setting, Trial, Watch
from octavo.neighbours import Neighbours, busy_note
from octavo.sim.workload import Sizes

NAMES = {
    "context": "contiguous, whole context",
    "exact": "contiguous, prompt + output (foreseen)",
    "blocks": "blocks of {} tokens",
}


LEAST = 12  # requests of a run


@dataclass(frozen=True, slots=True)
class Plan:
    """pool: tokens of KV memory. context: tokens that a request may have, and that the classic
    engine reserves."""

    pool: int = 4096
    context: int = 2048
    requests: int = 40
    repeats: int = 3
    prompt: Sizes = field(default_factory=lambda: Sizes(96, 0.7, 512))
    output: Sizes = field(default_factory=lambda: Sizes(64, 0.8, 256))
    seed: int = 0
    seconds: float = stage.SECONDS  # all rounds together may take about so long

    def count(self, alone: float) -> int:
        """Requests of a run where one takes so many seconds in the slowest way."""
        return min(self.requests, max(LEAST, int(self.seconds / (len(NAMES) * alone))))

    def __post_init__(self) -> None:
        if self.pool < self.context:
            raise InvalidRequest("--pool must hold one --context at least", "pool")


@dataclass(slots=True)
class Books:
    """What was reserved and what of it computed, after every step: (seconds, sequences, reserved
    tokens, computed tokens)."""

    way: str
    context: int
    size: int
    steps: list[tuple[float, int, int, int]] = field(default_factory=list)

    def look(self, scheduler: Scheduler, _: list[Event], now: float) -> None:
        live = list(stage.blocks_of(scheduler))
        held = {
            "context": self.context * len(live),
            "exact": sum(end for _, _, end in live),
            "blocks": self.size * sum(blocks for _, blocks, _ in live),
        }[self.way]
        self.steps.append((now, len(live), held, sum(done for done, _, _ in live)))


def _setting(way: str, plan: Plan, size: int, running: list[Scheduler]) -> Setting:
    """running: where the scheduler will be found, for who must look at it."""
    blocks = plan.pool // size

    def foreseen() -> Policy:
        def admits(seq: Sequence, batch: Occupancy) -> bool:
            taken = sum(other.max_len for other in running[-1].running)
            return while_rows_last(seq, batch) and taken + seq.max_len <= plan.pool

        return dataclasses.replace(fcfs(), name="foreseen", admits=admits)

    if way == "context":
        return Setting(way, rows=plan.pool // plan.context, blocks=blocks)
    return Setting(way, foreseen if way == "exact" else fcfs, blocks=blocks)


def measure(
    assembly: Assembly, plan: Plan, watch: Watch = lambda _: None, clock: Clock = Clock()
) -> dict[str, Any]:
    """Run the plan; plain values."""
    neighbours, size = Neighbours(), assembly.executor.capacity.block_size
    stage.warm(assembly)
    seed = f"paging {plan.seed}"
    visits = stage.drawn(seed, plan.requests, inf, plan.prompt, plan.output)
    wanted = stage.requests(visits, assembly.door.vocab_size, seed)
    few = wanted[: min(LEAST, plan.requests)]

    def play(way: str, wanted: list[Request]) -> tuple[Trial, Books]:
        running: list[Scheduler] = []
        books = Books(way, plan.context, size)
        engine = _setting(way, plan, size, running).engine(assembly.executor)
        running.append(engine.scheduler)
        return stage.play(engine, wanted, clock, books.look), books

    watch(f"{len(few)} requests, to know how long they take")
    count = plan.count(play("context", few)[0].seconds / len(few))
    visits, wanted = visits[:count], wanted[:count]
    found = stage.in_turn(
        list(NAMES),
        stage.Rounds(plan.repeats, plan.seconds, clock),
        lambda way, _: play(way, wanted),
        watch,
        lambda way: NAMES[way].format(size),
    )
    return {
        "model": assembly.name,
        "pool": plan.pool,
        "context": plan.context,
        "requests": count,
        "asked": {"requests": plan.requests, "rounds": plan.repeats},
        "had": {"requests": count, "rounds": len(found["blocks"])},
        "block_size": size,
        "mean_tokens": fmean(v.prompt + v.output for v in visits),
        "ways": {way: _way(runs) for way, runs in found.items()},
        "neighbours": neighbours.share(),
    }


def _way(runs: list[tuple[Trial, Books]]) -> dict[str, Any]:
    middle, trials = stage.middle, [trial for trial, _ in runs]
    return {
        "output_tokens_per_s": middle(t.tokens_per_s for t in trials),
        "e2e_p50_s": middle(stage.quantile(t.e2es, 0.5) for t in trials),
        "most_at_once": max(n for _, b in runs for _, n, _, _ in b.steps),
        "mean_at_once": fmean(fmean(n for _, n, _, _ in b.steps if n) for _, b in runs),
        "waste": fmean(_waste(b) for _, b in runs),
        "preemptions": fmean(t.counters["preemptions"] for t in trials),
        "steps": runs[-1][1].steps,
    }


def _waste(books: Books) -> float:
    """Share of the reserved memory that held nothing, over all steps."""
    held = sum(held for _, _, held, _ in books.steps)
    return 1.0 - sum(done for _, _, _, done in books.steps) / held


# ---- what it shows ----

HEAD = ("reservation", "empty", "at once", "at most", "tokens/s", "E2E P50 ms", "preemptions")


def finding(values: dict[str, Any]) -> Finding:
    rows = tuple(
        (
            _name(way, values), f"{one['waste']:.1%}", f"{one['mean_at_once']:.1f}",
            str(one["most_at_once"]), stage.shown(one["output_tokens_per_s"]),
            stage.shown(one["e2e_p50_s"], 1e3), f"{one['preemptions']:.1f}",
        )
        for way, one in values["ways"].items()
    )  # fmt: skip
    title = (
        f"{values['model']}: {values['requests']} requests at once, {values['mean_tokens']:.0f} "
        f"tokens each on average, in {values['pool']} tokens of KV memory; "
        f"{stage.spread(values['had']['rounds'])}"
    )
    says = (_says(values), *stage.shortened(values), *busy_note(values))
    return Finding(values, (Sheet(title, HEAD, rows),), says, lambda path: draw(values, path))


def _name(way: str, values: dict[str, Any]) -> str:
    return NAMES[way].format(values["block_size"])


def _ratio(values: dict[str, Any], key: str) -> float:
    ways = values["ways"]
    first, last = ways["context"][key], ways["blocks"][key]
    if isinstance(first, dict):
        first, last = first["median"], last["median"]
    return float(last / first)


def _says(values: dict[str, Any]) -> str:
    ways = values["ways"]
    ceiling = values["pool"] / values["mean_tokens"]
    return (
        f"Reserving the whole context of {values['context']} tokens leaves "
        f"{ways['context']['waste']:.0%} of what is reserved empty; blocks leave "
        f"{ways['blocks']['waste']:.1%}, less than one block a sequence. So the same memory holds "
        f"{_ratio(values, 'mean_at_once'):.1f} times the requests at once and writes "
        f"{_ratio(values, 'output_tokens_per_s'):.1f} times the tokens a second. Even an engine "
        f"that foresaw every length would leave {ways['exact']['waste']:.0%} empty, for output "
        "that is not there yet. The ceiling: requests of this length fill the pool when "
        f"{ceiling:.0f} are at their ends at once; more fit while they grow."
    )


# ---- the picture ----


def draw(values: dict[str, Any], path: str) -> None:
    """Reserved and computed memory over time, a panel for each way."""
    ways = values["ways"]
    drawing, panels = plots.figure(1, len(ways), width=13, height=4.8)
    end = max(one["steps"][-1][0] for one in ways.values())
    for axes, (way, one) in zip(panels, ways.items(), strict=True):
        now, _, held, done = zip(*one["steps"], strict=True)
        axes.fill_between(now, held, step="post", color="#f3c9a8", lw=0, label="reserved, empty")
        axes.fill_between(now, done, step="post", color=plots.COLOURS[0], lw=0, label="computed")
        axes.axhline(values["pool"], color=plots.INK, lw=1.2, ls=(0, (4, 3)))
        axes.set_xlim(0, end)
        axes.set_ylim(0, values["pool"] * 1.3)
        axes.set_title(_name(way, values), fontsize=11)
        axes.text(
            0.98, 0.985,
            f"{one['mean_at_once']:.0f} at once, {one['waste']:.0%} empty\n"
            f"{one['output_tokens_per_s']['median']:.0f} tokens/s",
            transform=axes.transAxes, ha="right", va="top", fontsize=10, linespacing=1.4,
        )  # fmt: skip
        axes.set_xlabel("seconds")
    panels[0].set_ylabel("tokens of KV memory")
    panels[0].annotate("the pool", (0, values["pool"]), xytext=(4, 4), fontsize=9,
                       textcoords="offset points")  # fmt: skip
    handles, labels = panels[0].get_legend_handles_labels()
    drawing.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=9)
    plots.headline(
        drawing,
        f"In the same memory, blocks hold {_ratio(values, 'mean_at_once'):.1f} times the requests "
        "of a contiguous cache",
        f"{values['model']}, {values['requests']} requests in a burst; the last run of each",
    )
    plots.save(drawing, path)
