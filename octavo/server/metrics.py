"""Prometheus metrics: one table of names, `octavo_*`; buckets are OpenTelemetry's for GenAI.

Nothing is observed per token: histograms grow once per request or sequence, and the engine's own
counters and gauges are read when scraped. With `--vllm-metric-names` what means the same is there
under vLLM's names too, so that dashboards made for it work; what would mean something else is not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
)
from prometheus_client.samples import Sample

from octavo.core.request import FinishReason
from octavo.core.stats import Timing

TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
TPOT = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
RATIO = (0.25, 0.5, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.15, 1.2, 1.3, 1.5, 2.0, 4.0)
E2E = tuple(0.01 * 2**i for i in range(14))
TOKENS = tuple(float(k * 10**e) for e in range(6) for k in (1, 2, 5))

Snapshot = Callable[[], dict[str, float]]


class Row(NamedTuple):
    """One of the engine's numbers: its name there and in Prometheus, and what it says."""

    key: str
    name: str
    help: str
    gauge: bool = False


ENGINE = (
    Row("running", "requests_running", "Sequences being computed.", True),
    Row("waiting", "requests_waiting", "Sequences in the queue.", True),
    Row("blocks", "kv_blocks", "KV blocks of the pool.", True),
    Row("blocks_held", "kv_blocks_held", "KV blocks of running sequences.", True),
    Row("blocks_cached", "kv_blocks_cached", "KV blocks kept for the prefix cache alone.", True),
    Row("evictions", "engine_evictions", "Cached KV blocks taken for other tokens."),
    Row("kv_reserve", "kv_reserve_ratio", "Share of the expected output that is kept free.", True),
    Row("steptime_error", "step_time_error_ratio", "Mean error of predicted step times.", True),
    Row(
        "steptime_bias",
        "step_time_bias_ratio",
        "Mean signed error of predicted step times; above 0: too long.",
        True,
    ),
    Row("steptime_gamma", "step_time_margin_ratio", "Factor on predicted step times.", True),
    Row("steptime_pace", "step_time_pace_ratio", "Step times of now beside the usual.", True),
    Row("steptime_drifting", "step_time_drifting", "1 while predictions are relearned.", True),
    Row("steptime_gap_seconds", "step_gap_seconds", "Time between two steps, of late.", True),
    Row("admission_margin", "admission_margin_ratio", "Factor on forecast first tokens.", True),
    Row("prompt_tokens", "prompt_tokens", "Prompt tokens admitted, cached ones included."),
    Row("cached_tokens", "cached_tokens", "Prompt tokens found in the prefix cache."),
    Row("output_tokens", "generation_tokens", "Tokens generated and kept."),
    Row("preemptions", "preemptions", "Sequences whose blocks were taken for another."),
    Row("drafts", "spec_decode_drafts", "Rows of a step that carried guessed tokens."),
    Row("drafted_tokens", "spec_decode_draft_tokens", "Tokens guessed and checked."),
    Row("accepted_tokens", "spec_decode_accepted_tokens", "Guessed tokens that held."),
    Row(
        "unattainable", "requests_unattainable", "Requests refused at the door for their deadlines."
    ),
    Row("degraded", "requests_degraded", "Requests let in without their deadlines."),
    Row("expired", "sequences_expired", "Sequences dropped unstarted, past their deadline."),
    Row("steps", "engine_steps", "Steps computed."),
    Row("rows", "engine_rows", "Rows of all steps: sequences that a step carried."),
    Row("outputs", "engine_outputs", "Positions that were sampled or scored."),
    Row("computed_tokens", "engine_computed_tokens", "Tokens computed, guesses included."),
    Row(
        "recomputed_tokens", "engine_recomputed_tokens", "Tokens computed again, for a preemption."
    ),
    Row("requests", "engine_requests", "Requests that the scheduler took."),
    Row(
        "refused",
        "engine_refused",
        "Requests that came as far as the scheduler and that it refused; for all "
        "that were refused see octavo_refusals_total.",
    ),
    Row(
        "capped",
        "engine_capped",
        "Requests refused at the door for --max-queued-tokens, --max-queued-seconds or "
        "--max-tenant-tokens.",
    ),
    Row("added", "engine_added", "Sequences queued."),
    Row("admitted", "engine_admitted", "Sequences that were let into a step."),
    Row("held", "engine_held", "Times one waited for another to compute a shared prefix."),
    Row("stopped", "engine_stopped", "Sequences that ended by a stop token, text or grammar."),
    Row("length", "engine_length", "Sequences that ended by their length."),
    Row("tool_calls", "engine_tool_calls", "Sequences that ended by calling a tool."),
    Row("aborted", "engine_aborted", "Sequences that were aborted."),
    Row("failed", "engine_failed", "Sequences that failed by themselves."),
    Row("padding_tokens", "engine_padding_tokens", "What padded batches would have added."),
    Row("busy_seconds", "engine_busy_seconds", "Seconds of steps."),
)
_ROWS = {row.key: row for row in ENGINE}
_PLACE = "accepted_at_"  # a counter for each place in a draft: accepted_at_1, accepted_at_2, ...

# vLLM's names of what means the same (vllm/v1/metrics), and labels that are called otherwise there.
# Not there: vllm:inter_token_latency_seconds is of each token, and here nothing is per token.
VLLM = {
    "octavo_requests_running": "vllm:num_requests_running",
    "octavo_requests_waiting": "vllm:num_requests_waiting",
    "octavo_kv_usage_ratio": "vllm:kv_cache_usage_perc",
    "octavo_prompt_tokens": "vllm:prompt_tokens",
    "octavo_generation_tokens": "vllm:generation_tokens",
    "octavo_preemptions": "vllm:num_preemptions",
    "octavo_prefix_cache_queries": "vllm:prefix_cache_queries",
    "octavo_cached_tokens": "vllm:prefix_cache_hits",
    "octavo_spec_decode_drafts": "vllm:spec_decode_num_drafts",
    "octavo_spec_decode_draft_tokens": "vllm:spec_decode_num_draft_tokens",
    "octavo_spec_decode_accepted_tokens": "vllm:spec_decode_num_accepted_tokens",
    "octavo_spec_decode_accepted_tokens_per_pos": "vllm:spec_decode_num_accepted_tokens_per_pos",
    "octavo_sequences": "vllm:request_success",
    "octavo_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "octavo_time_per_output_token_seconds": "vllm:request_time_per_output_token_seconds",
    "octavo_request_duration_seconds": "vllm:e2e_request_latency_seconds",
    "octavo_queue_time_seconds": "vllm:request_queue_time_seconds",
    "octavo_prefill_time_seconds": "vllm:request_prefill_time_seconds",
    "octavo_decode_time_seconds": "vllm:request_decode_time_seconds",
    "octavo_sequence_prompt_tokens": "vllm:request_prompt_tokens",
    "octavo_sequence_generation_tokens": "vllm:request_generation_tokens",
}
VLLM_LABELS = {"finish": "finished_reason"}


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
        found = self._snapshot()
        for name, value in found.items():
            if name.startswith(_PLACE):
                places.add_metric((str(int(name.removeprefix(_PLACE)) - 1),), value)
                continue
            words = f"Engine: {name.replace('_', ' ')}."
            row = _ROWS.get(name, Row(name, f"engine_{name}", words))
            kind = GaugeMetricFamily if row.gauge else CounterMetricFamily
            yield kind(f"octavo_{row.name}", row.help, value=value)
        yield places
        used = found.get("blocks_held", 0.0) / max(found.get("blocks", 0.0), 1.0)
        yield GaugeMetricFamily(
            "octavo_kv_usage_ratio", "Share of the KV pool that running sequences hold.", value=used
        )


class Plain:
    """A registry's families without `_created`, the moment at which each series began: that many
    more series, of which Prometheus makes nothing."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            family.samples = [s for s in family.samples if not s.name.endswith("_created")]
            yield family


class VllmNames:
    """The same families again under vLLM's names, with the labels its dashboards select by."""

    def __init__(self, registry: Plain, model: str) -> None:
        self._registry = registry
        self._labels = {"model_name": model, "engine": "0"}

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            name = VLLM.get(family.name)
            if name is not None:
                yield self._renamed(family, name)
            if family.name == "octavo_prompt_tokens":
                yield self._renamed(family, VLLM["octavo_prefix_cache_queries"])

    def _renamed(self, family: Metric, name: str) -> Metric:
        made = Metric(name, family.documentation, family.type)
        for sample in family.samples:
            labels = {VLLM_LABELS.get(k, k): v for k, v in sample.labels.items()} | self._labels
            rest = sample.name[len(family.name) :]
            made.samples.append(Sample(name + rest, labels, sample.value))
        return made


def document() -> str:
    """The table of all metrics as Markdown: the text of docs/METRICS.md."""
    nothing = dict.fromkeys(_ROWS, 0.0)
    lines = [
        "# Metrics",
        "",
        "Generated from `octavo/server/metrics.py` (`document`). What `/metrics` says, and, with "
        "`--vllm-metric-names`, vLLM's name of what means the same. Beside these: `process_*` of "
        "Prometheus' own client. Histograms have `_bucket`, `_sum` and `_count`.",
        "",
        "| name | kind | labels | what it says | vLLM's name |",
        "|---|---|---|---|---|",
    ]
    metrics = Metrics(lambda: nothing)
    labels = {m._name: m._labelnames for m in vars(metrics).values() if hasattr(m, "_labelnames")}
    labels["octavo_spec_decode_accepted_tokens_per_pos"] = ("position",)
    for family in sorted(metrics.registry.collect(), key=lambda family: family.name):
        if not family.name.startswith("octavo_"):
            continue
        end = "_total" if family.type == "counter" else ""
        theirs = VLLM.get(family.name)
        cells = (
            f"`{family.name}{end}`",
            family.type,
            ", ".join(labels.get(family.name, ())),
            family.documentation,
            f"`{theirs}{end}`" if theirs else "",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _tasks() -> float:
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:  # asked for outside of a loop
        return 0.0


class Metrics:
    """One server's metrics, in a registry of its own."""

    def __init__(self, snapshot: Snapshot, vllm: str | None = None) -> None:
        """vllm: the model's name for metrics under vLLM's names too; None for ours alone."""
        self.snapshot = snapshot
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(snapshot))  # type: ignore[arg-type]
        ProcessCollector(registry=self.registry)
        plain = Plain(self.registry)
        self.pages: list[Any] = [plain] if vllm is None else [plain, VllmNames(plain, vllm)]
        loop = "Tasks of the server's event loop: what grows and stays grown is a leak."
        Gauge("octavo_event_loop_tasks", loop, registry=self.registry).set_function(_tasks)
        self.http = self._counter("http_requests", "HTTP responses.", ("path", "status"))
        self.refusals = self._counter(
            "refusals",
            "HTTP requests answered by an error, wherever that was found; code: of the answer.",
            ("code",),
        )
        self.requests = self._counter("requests", "Requests by how they ended.", ("finish",))
        self.ttft = self._histogram(
            "time_to_first_token_seconds", "Request: arrival to first token.", TTFT
        )
        self.tpot = self._histogram(
            "time_per_output_token_seconds",
            "Request: seconds a token after the first.",
            TPOT,
        )
        self.queue = self._histogram("queue_time_seconds", "Sequence: arrival to first step.", TTFT)
        self.e2e = self._histogram(
            "request_duration_seconds", "Request: arrival to last token.", E2E
        )
        self.forecast = self._histogram(
            "ttft_forecast_ratio", "Time to first token, actual to predicted.", RATIO
        )
        self.deadlines = self._counter(
            "deadline_sequences", "Sequences with deadlines, by whether all were met.", ("met",)
        )
        self.sequences = self._counter("sequences", "Sequences by how they ended.", ("finish",))
        self.waits = self._counter(
            "queue_wait_seconds", "Seconds that sequences waited, by what for.", ("reason",)
        )
        self.prefill = self._histogram(
            "prefill_time_seconds", "Sequence: first step to first token.", TTFT
        )
        self.decode = self._histogram("decode_time_seconds", "Sequence: first to last token.", E2E)
        self.prompts = self._histogram("sequence_prompt_tokens", "Sequence: prompt.", TOKENS)
        self.outputs = self._histogram("sequence_generation_tokens", "Sequence: output.", TOKENS)

    def ended(self, timing: Timing) -> None:
        """A sequence has ended: what it waited for, how long, and what had been promised."""
        self.sequences.labels(timing.finish.value).inc()
        if timing.record is not None:
            for why, seconds in timing.record.waits.items():
                self.waits.labels(why.value).inc(seconds)
        self._phases(timing)
        if timing.first_scheduled is not None:
            self.queue.observe(timing.first_scheduled - timing.queued)
        if timing.slo and timing.finish is not FinishReason.ABORT:
            self.deadlines.labels(str(timing.met).lower()).inc()
        if timing.predicted is not None and timing.ttft is not None and timing.choice == 0:
            self.forecast.observe(timing.ttft / max(timing.predicted.ttft, 1e-6))

    def _phases(self, timing: Timing) -> None:
        first, start = timing.first_token, timing.first_scheduled
        if first is None or start is None:
            return
        self.prefill.observe(first - start)
        self.prompts.observe(timing.num_prompt)
        if timing.finish not in (FinishReason.ABORT, FinishReason.ERROR):
            self.decode.observe(timing.finished - first)
            self.outputs.observe(timing.num_output)

    def _counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(f"octavo_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"octavo_{name}", text, buckets=buckets, registry=self.registry)

    def page(self) -> bytes:
        """The text that Prometheus reads."""
        return b"".join(generate_latest(one) for one in self.pages)
