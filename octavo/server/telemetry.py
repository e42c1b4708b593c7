"""OpenTelemetry, if it is asked for and installed: spans and metrics of requests
by the GenAI conventions (semantic-conventions-genai, status Development), sent by OTLP over HTTP.

A request's span, a child of the caller's (`traceparent`), has its phases as children: queue,
prefill, decode. It is made when the request is over, from its `Trace`; so nothing is added to a
step, and no text is ever in it. Sending happens in the SDK's own threads, behind bounded queues.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from typing import Any

from octavo.errors import InvalidRequest, install
from octavo.server.metrics import E2E, TPOT, TTFT
from octavo.server.traces import Trace

OPERATIONS = {"/v1/completions": "text_completion", "/v1/embeddings": "embeddings"}
INSTALL = f"--otel-endpoint needs OpenTelemetry, which is not installed: {install('otel')}"
FAILED = ("error", "abort")
LAST = 2.0  # seconds that what is left may take to be sent at the end

log = logging.getLogger("octavo")


class Telemetry:
    """Hears of every request that is over. exporters: (spans, metrics) instead of OTLP's."""

    def __init__(
        self, endpoint: str, model: str, version: str, exporters: tuple[Any, Any] | None = None
    ) -> None:
        """Raises `InvalidRequest` where OpenTelemetry is not installed."""
        try:
            from opentelemetry.sdk.metrics import MeterProvider
            from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor

            spans, metrics = exporters if exporters is not None else _otlp(endpoint)
        except ImportError:
            raise InvalidRequest(INSTALL, "otel_endpoint") from None
        self.model = model
        self._endpoint = endpoint
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # what fails, `_Told` says
        told: Any = functools.partial(_Told, endpoint)
        spans, metrics = told("spans", spans), told("metrics", metrics)
        resource = Resource.create({"service.name": "octavo", "service.version": version})
        self._traces = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._traces.add_span_processor(BatchSpanProcessor(spans))
        reader = PeriodicExportingMetricReader(metrics)
        self._metrics = MeterProvider([reader], resource=resource, shutdown_on_exit=False)
        self._tracer = self._traces.get_tracer("octavo", version)
        meter = self._metrics.get_meter("octavo", version)
        self._duration, self._ttft, self._tpot = (
            meter.create_histogram(
                f"gen_ai.server.{name}", "s", text, explicit_bucket_boundaries_advisory=list(edges)
            )
            for name, text, edges in (
                ("request.duration", "Arrival to last token.", E2E),
                ("time_to_first_token", "Arrival to first token.", TTFT),
                ("time_per_output_token", "Seconds for each token after the first.", TPOT),
            )
        )

    def request(self, trace: Trace) -> None:
        """A request is over. Only those that reached the engine are told."""
        if not trace.completion or trace.finished is None or trace.arrival is None:
            return
        labels = {
            "gen_ai.operation.name": OPERATIONS.get(trace.path, "chat"),
            "gen_ai.provider.name": "octavo",
            "gen_ai.request.model": self.model,
            "gen_ai.response.model": self.model,
        }
        if trace.outcome in FAILED or trace.status >= 400:
            labels["error.type"] = trace.outcome or str(trace.status)
        self._duration.record(trace.finished - trace.arrival, labels)
        if trace.ttft is not None:
            self._ttft.record(trace.ttft, labels)
        if trace.tpot is not None:
            self._tpot.record(trace.tpot, labels)
        self._span(trace, labels)

    def _span(self, trace: Trace, labels: dict[str, str]) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier = {"traceparent": trace.parent} if trace.parent else {}
        above = TraceContextTextMapPropagator().extract(carrier)
        name = f"{labels['gen_ai.operation.name']} {self.model}"
        span = self._tracer.start_span(
            name, above, SpanKind.SERVER, start_time=_ns(trace, trace.started)
        )
        span.set_attributes(labels | _facts(trace))
        if "error.type" in labels:
            span.set_status(Status(StatusCode.ERROR))
        inside = set_span_in_context(span)
        for phase, begin, end in _phases(trace):
            part = self._tracer.start_span(phase, inside, start_time=_ns(trace, begin))
            part.end(_ns(trace, end))
        assert trace.finished is not None
        span.end(_ns(trace, trace.finished))

    def close(self) -> None:
        """Send what is left, but for no longer than `LAST`: where nobody listens the SDK tries
        again and again, whatever time it is given."""
        ends = (self._traces.shutdown, self._metrics.shutdown)
        threads = [threading.Thread(target=end, daemon=True) for end in ends]
        for thread in threads:
            thread.start()
        until = time.monotonic() + LAST
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        if any(thread.is_alive() for thread in threads):
            log.warning("--otel-endpoint %s: what it had not taken yet is lost", self._endpoint)


class _Told:
    """An exporter whose failures are a line in our log: one when they begin, one when they end."""

    def __init__(self, endpoint: str, what: str, exporter: Any) -> None:
        self._exporter = exporter
        self._what = what
        self._endpoint = endpoint
        self._failing = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._exporter, name)

    def export(self, *given: Any, **more: Any) -> Any:
        sent = False
        try:
            result = self._exporter.export(*given, **more)
            sent = result.name == "SUCCESS"
            return result
        finally:
            self._tell(not sent)

    def _tell(self, failing: bool) -> None:
        if failing and not self._failing:
            text = "--otel-endpoint %s takes no %s: they are lost until it does"
            log.warning(text, self._endpoint, self._what)
        elif self._failing and not failing:
            log.info("--otel-endpoint %s takes %s again", self._endpoint, self._what)
        self._failing = failing


def _otlp(endpoint: str) -> tuple[Any, Any]:
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    url = endpoint.rstrip("/")
    return OTLPSpanExporter(f"{url}/v1/traces"), OTLPMetricExporter(f"{url}/v1/metrics")


def _ns(trace: Trace, at: float) -> int:
    """A moment on the driver's clock in Unix nanoseconds."""
    return int((trace.wall + at - trace.started) * 1e9)


def _facts(trace: Trace) -> dict[str, Any]:
    """What is known beside labels; numbers and ids."""
    found: dict[str, Any] = {
        "gen_ai.response.id": trace.completion,
        "gen_ai.request.stream": trace.stream,
        "gen_ai.response.finish_reasons": [t.finish.value for t in trace.timings],
        "gen_ai.usage.input_tokens": trace.num_prompt,
        "gen_ai.usage.output_tokens": trace.num_output,
        "gen_ai.usage.cache_read.input_tokens": trace.num_cached,
        "http.response.status_code": trace.status,
        "octavo.request.id": trace.id,
        "octavo.preemptions": sum(t.num_preemptions for t in trace.timings),
    }
    if trace.ttft is not None:
        found["gen_ai.response.time_to_first_chunk"] = trace.ttft
    for timing in trace.timings[:1]:
        if timing.record is not None:
            for why, seconds in timing.record.waits.items():
                found[f"octavo.wait.{why.value}"] = seconds
    return found


def _phases(trace: Trace) -> list[tuple[str, float, float]]:
    """(name, begin, end) of queue, prefill and decode, each over all sequences."""
    started = [t.first_scheduled for t in trace.timings if t.first_scheduled is not None]
    firsts = [t.first_token for t in trace.timings if t.first_token is not None]
    if not started or trace.arrival is None:
        return []
    found = [("queue", trace.arrival, min(started))]
    if firsts:
        found.append(("prefill", min(started), min(firsts)))
        found.append(("decode", min(firsts), max(t.finished for t in trace.timings)))
    return found
