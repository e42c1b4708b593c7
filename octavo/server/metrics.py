"""Prometheus metrics: names `octavo_*`, histograms with OpenTelemetry's GenAI buckets.

Nothing is observed per token: histograms grow once per request, and the
engine's own counters and gauges are read when scraped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from octavo.core.request import FinishReason
from octavo.core.stats import Timing

TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
TPOT = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
RATIO = (0.25, 0.5, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.15, 1.2, 1.3, 1.5, 2.0, 4.0)
E2E = tuple(0.01 * 2**i for i in range(14))

Snapshot = Callable[[], dict[str, float]]


# Names of what is known to the engine; anything else it counts is octavo_engine_NAME_total.
_GAUGES = {
    "running": ("requests_running", "Sequences being computed."),
    "waiting": ("requests_waiting", "Sequences in the queue."),
    "blocks": ("kv_blocks", "KV blocks of the pool."),
    "blocks_held": ("kv_blocks_held", "KV blocks of running sequences."),
    "blocks_cached": ("kv_blocks_cached", "KV blocks kept for the prefix cache alone."),
    "kv_reserve": ("kv_reserve_ratio", "Share of the expected output that is kept free."),
    "steptime_error": ("step_time_error_ratio", "Mean error of predicted step times, of late."),
    "steptime_bias": ("step_time_bias_ratio", "The same with its sign; above 0 is pessimistic."),
    "steptime_gamma": ("step_time_margin_ratio", "What predictions are multiplied with to decide."),
    "steptime_drifting": ("step_time_drifting", "1 while predictions are far off and relearned."),
    "steptime_gap_seconds": ("step_gap_seconds", "Time between two steps, of late."),
}
_COUNTERS = {
    "prompt_tokens": ("prompt_tokens", "Prompt tokens admitted, cached ones included."),
    "cached_tokens": ("cached_tokens", "Of those, found in the prefix cache."),
    "output_tokens": ("generation_tokens", "Tokens generated."),
    "preemptions": ("preemptions", "Sequences whose blocks were taken for another."),
    "drafts": ("spec_decode_drafts", "Rows of a step that carried guessed tokens."),
    "drafted_tokens": ("spec_decode_draft_tokens", "Tokens guessed and checked."),
    "accepted_tokens": ("spec_decode_accepted_tokens", "Of those, the ones that held."),
    "unattainable": ("requests_unattainable", "Requests refused: deadlines could not be met."),
    "degraded": ("requests_degraded", "Requests let in without the deadlines they asked for."),
    "expired": ("sequences_expired", "Sequences dropped unstarted, past their deadline."),
}


_PLACE = "accepted_at_"  # a counter for each place in a draft: accepted_at_1, accepted_at_2, ...


class EngineCollector:
    """The engine's counters and gauges, read when scraped."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Any]:
        places = CounterMetricFamily(
            "octavo_spec_decode_accepted_tokens_per_pos",
            "Guessed tokens that held, by their place in the draft (0 is the first).",
            labels=("position",),
        )
        for name, value in self._snapshot().items():
            if name.startswith(_PLACE):
                places.add_metric((str(int(name.removeprefix(_PLACE)) - 1),), value)
            elif name in _GAUGES:
                known, text = _GAUGES[name]
                yield GaugeMetricFamily(f"octavo_{known}", text, value=value)
            else:
                words = f"Engine: {name.replace('_', ' ')}."
                known, text = _COUNTERS.get(name, (f"engine_{name}", words))
                yield CounterMetricFamily(f"octavo_{known}", text, value=value)
        yield places


class Metrics:
    """One server's metrics, in a registry of its own."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(snapshot))  # type: ignore[arg-type]
        self.http = self._counter("http_requests", "HTTP responses.", ("path", "status"))
        self.requests = self._counter("requests", "Requests by how they ended.", ("finish",))
        self.ttft = self._histogram("time_to_first_token_seconds", "Arrival to first token.", TTFT)
        self.tpot = self._histogram("time_per_output_token_seconds", "After the first.", TPOT)
        self.queue = self._histogram("queue_time_seconds", "Arrival to first step.", TTFT)
        self.e2e = self._histogram("request_duration_seconds", "Arrival to last token.", E2E)
        self.forecast = self._histogram(
            "ttft_forecast_ratio", "Time to first token, actual to predicted.", RATIO
        )
        self.deadlines = self._counter(
            "deadline_sequences", "Sequences with deadlines, by whether all were met.", ("met",)
        )

    def ended(self, timing: Timing) -> None:
        """A sequence has ended: what it waited, and what had been promised."""
        if timing.first_scheduled is not None:
            self.queue.observe(timing.first_scheduled - timing.queued)
        if timing.slo and timing.finish is not FinishReason.ABORT:
            self.deadlines.labels(str(timing.met).lower()).inc()
        if timing.predicted is not None and timing.ttft is not None and timing.choice == 0:
            self.forecast.observe(timing.ttft / max(timing.predicted.ttft, 1e-6))

    def _counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(f"octavo_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"octavo_{name}", text, buckets=buckets, registry=self.registry)

    def page(self) -> bytes:
        """The text that Prometheus reads."""
        text: bytes = generate_latest(self.registry)
        return text
