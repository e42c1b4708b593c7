"""What a run was worth, in the field's definitions.

TTFT: first token - arrival. TPOT: (E2E - TTFT) / (tokens - 1); below two tokens it is left out of
the distribution and counts as met (vLLM's bench). ITL: every gap between two tokens of a request,
pooled. Percentiles interpolate linearly. Goodput: requests that meet all objectives, a second, over
the whole duration with drain; refused and failed ones are never good. Attainment: good over all
sent. Beside it stands the share of good ones among those that were let in.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from octavo.core.request import NO_SLO, Slo
from octavo.errors import InvalidRequest
from octavo.sim.fleet import Outcome, Run

PERCENTILES = (50, 90, 95, 99)


def met(slo: Slo, outcome: Outcome) -> bool:
    """Whether a request was served in time by all objectives."""
    if outcome.refused or outcome.finished is None:
        return False
    ttft, tpot, e2e = outcome.ttft, outcome.tpot, outcome.e2e
    if slo.ttft is not None and (ttft is None or ttft > slo.ttft):
        return False
    if slo.tpot is not None and tpot is not None and tpot > slo.tpot:
        return False
    return slo.e2e is None or (e2e is not None and e2e <= slo.e2e)


def words(slo: Slo) -> str:
    """Objectives for people; "none" without any."""
    named = (("TTFT", slo.ttft), ("TPOT", slo.tpot), ("E2E", slo.e2e))
    return ", ".join(f"{name} {1e3 * v:g} ms" for name, v in named if v is not None) or "none"


class Spread(NamedTuple):
    """A distribution in the numbers that the field reports; NaN where nothing was measured."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    most: float
    number: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        array = values if isinstance(values, np.ndarray) else np.fromiter(values, float)
        if not len(array):
            return cls(math.nan, math.nan, math.nan, math.nan, math.nan, math.nan, 0)
        p50, p90, p95, p99 = (float(v) for v in np.percentile(array, PERCENTILES))
        return cls(float(array.mean()), p50, p90, p95, p99, float(array.max()), len(array))

    def as_dict(self) -> dict[str, float | None]:
        return {n: None if math.isnan(v) else v for n, v in self._asdict().items()}


@dataclass(frozen=True, slots=True)
class Report:
    """One run in numbers. Times in seconds, rates per second.

    seconds: first arrival to last end. attainment: of all sent. kept: good among those let in.
    hit_rate: prompt tokens that the prefix cache had. preemptions: per request. counters and
    gauges: as in `Run`.
    """

    name: str
    slo: Slo
    sent: int
    refused: int
    good: int
    seconds: float
    offered: float
    throughput: float
    output_tokens_per_s: float
    ttft: Spread
    tpot: Spread
    itl: Spread
    e2e: Spread
    hit_rate: float
    preemptions: float
    utilisation: float
    speedup: float
    dollars_per_million: float | None
    counters: dict[str, float]
    gauges: dict[str, tuple[float, ...]]

    @property
    def goodput(self) -> float:
        return self.good / self.seconds if self.seconds else 0.0

    @property
    def attainment(self) -> float:
        return self.good / self.sent if self.sent else 0.0

    @property
    def kept(self) -> float:
        admitted = self.sent - self.refused
        return self.good / admitted if admitted else 0.0

    def as_dict(self) -> dict[str, Any]:
        """For machines: all of it, NaN as null; what objectives decide is null without any."""
        slo = {"ttft_s": self.slo.ttft, "tpot_s": self.slo.tpot, "e2e_s": self.slo.e2e}
        plain = {
            name: getattr(self, name)
            for name in (
                "name", "sent", "refused", "good", "seconds", "offered", "throughput",
                "output_tokens_per_s", "goodput", "attainment", "kept", "hit_rate", "preemptions",
                "utilisation", "speedup", "dollars_per_million", "counters", "gauges",
            )
        }  # fmt: skip
        spreads = {f"{n}_s": getattr(self, n).as_dict() for n in ("ttft", "tpot", "itl", "e2e")}
        judged = {} if self.slo else dict.fromkeys(("good", "goodput", "attainment", "kept"))
        return {**plain, **judged, "slo": slo, **spreads}


def report(run: Run, slo: Slo = NO_SLO, name: str = "", warmup: float = 0.0) -> Report:
    """Numbers of a run. warmup: leave out the requests that arrive in so many first seconds."""
    kept = [o for o in run.outcomes if o.item.at >= warmup]
    if not kept:
        raise InvalidRequest(f"no request arrives after a warm-up of {warmup:g} s")
    seconds = max(run.seconds - warmup, 1e-9)
    served = [o for o in kept if not o.refused and o.finished is not None]
    tokens = sum(o.num_output for o in served)
    prompt = sum(o.item.prompt for o in served)
    cost = None
    if run.price is not None and tokens:
        cost = run.price * run.seconds / 3600.0 / tokens * 1e6
    return Report(
        name=name or run.workload.name,
        slo=slo,
        sent=len(kept),
        refused=sum(1 for o in kept if o.refused),
        good=sum(met(slo, o) for o in kept),
        seconds=seconds,
        offered=run.workload.rate,
        throughput=len(served) / seconds,
        output_tokens_per_s=tokens / seconds,
        ttft=Spread.of(t for o in served if (t := o.ttft) is not None),
        tpot=Spread.of(t for o in served if (t := o.tpot) is not None),
        itl=Spread.of(np.frombuffer(run.gaps, float) if len(run.gaps) else []),
        e2e=Spread.of(t for o in served if (t := o.e2e) is not None),
        hit_rate=sum(o.num_cached for o in served) / prompt if prompt else 0.0,
        preemptions=run.counters.get("preemptions", 0.0) / len(kept),
        utilisation=sum(run.busy) / (len(run.busy) * run.seconds) if run.seconds else 0.0,
        speedup=run.seconds / run.wall_seconds if run.wall_seconds else math.inf,
        dollars_per_million=cost,
        counters=dict(run.counters),
        gauges=dict(run.gauges),
    )


def row(outcome: Outcome, slo: Slo, name: str) -> dict[str, Any]:
    """One request of the run called `name`, for a log; a log of one run is a trace again. Times in
    seconds; output_tokens of a refused one are those that it asked for."""
    item = outcome.item
    served = not outcome.refused and outcome.finished is not None
    return {
        "run": name,
        "request_id": item.id,
        "arrival_s": item.at,
        "prompt_tokens": item.prompt,
        "output_tokens": outcome.num_output if served else item.output,
        "cached_tokens": outcome.num_cached,
        "tenant": item.tenant,
        "priority": item.priority,
        "replica": outcome.replica,
        "preemptions": outcome.num_preemptions,
        "refused": outcome.refused or None,
        "ttft_s": outcome.ttft,
        "tpot_s": outcome.tpot,
        "e2e_s": outcome.e2e,
        "met": met(slo, outcome) if slo else None,
    }


def times_table(one: Report) -> tuple[list[str], list[list[str]]]:
    """(head, rows) of a run's distributions, in milliseconds."""
    head = ["ms", "mean", "P50", "P90", "P95", "P99", "max"]
    rows = []
    for name in ("ttft", "tpot", "itl", "e2e"):
        spread: Spread = getattr(one, name)
        rows.append([name.upper(), *(_ms(v) for v in spread[:6])])
    return head, rows


def facts(one: Report) -> list[tuple[str, str]]:
    """A run's totals as (name, value) lines."""
    lines = [
        ("requests", f"{one.sent} sent at {one.offered:.2f}/s, {one.refused} refused"),
        ("time", f"{one.seconds:.1f} s simulated, {one.speedup:.0f}x real time"),
        ("throughput", f"{one.throughput:.2f} req/s, {one.output_tokens_per_s:.0f} tok/s written"),
        ("busy", f"{one.utilisation:.0%} of the time"),
        ("prefix cache", f"{one.hit_rate:.1%} of prompt tokens"),
        ("preemptions", f"{one.preemptions:.3f} a request"),
    ]
    if one.slo:
        lines += [
            ("objective", words(one.slo)),
            ("goodput", f"{one.goodput:.2f} req/s"),
            ("attainment", f"{one.attainment:.1%} of all sent, {one.kept:.1%} of those let in"),
        ]
    if one.dollars_per_million is not None:
        lines.append(("cost", f"${one.dollars_per_million:.2f} for a million written tokens"))
    return lines


def compare_table(reports: Sequence[Report]) -> tuple[list[str], list[list[str]]]:
    """(head, rows): one run a row, for what is compared most often."""
    head = ["run", "req/s", "goodput", "attained", "of let in", "refused", "TTFT P50", "TTFT P99",
            "TPOT P50", "TPOT P99", "tok/s"]  # fmt: skip
    rows = [
        [
            r.name, f"{r.offered:.2f}", *_judged(r), str(r.refused),
            _ms(r.ttft.p50), _ms(r.ttft.p99), _ms(r.tpot.p50), _ms(r.tpot.p99),
            f"{r.output_tokens_per_s:.0f}",
        ]
        for r in reports
    ]  # fmt: skip
    return head, rows


def _judged(one: Report) -> tuple[str, str, str]:
    """Goodput, attained, of let in; without objectives there is nothing to meet."""
    if not one.slo:
        return "-", "-", "-"
    return f"{one.goodput:.2f}", f"{one.attainment:.1%}", f"{one.kept:.1%}"


def _ms(seconds: float) -> str:
    if math.isnan(seconds):
        return "-"
    ms = 1e3 * seconds
    return f"{ms:.1f}" if ms < 100 else f"{ms:.0f}"
