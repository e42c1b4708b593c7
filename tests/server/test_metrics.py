"""/metrics: one table, real help, vLLM's names on request; OpenTelemetry's spans and metrics."""

from __future__ import annotations

import builtins
import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from octavo.errors import InvalidRequest
from octavo.server.metrics import E2E, ENGINE, TPOT, TTFT, VLLM, Metrics, document
from octavo.server.telemetry import Telemetry
from tests.server.house import PATIENCE, House, chat, inside
from tests.server.test_life import CHAT

pytestmark = pytest.mark.anyio
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "METRICS.md"
DASHBOARD = Path(__file__).resolve().parents[2] / "deploy" / "grafana.json"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def families(metrics: Metrics) -> dict[str, Any]:
    return {f.name: f for f in text_string_to_metric_families(metrics.page().decode())}


async def served(vllm: str | None = None) -> Metrics:
    """The metrics of a house that has answered three requests, one of them in the cache."""
    house = House()
    metrics = Metrics(house.engine.snapshot, vllm)
    house.app.service.metrics = metrics
    async with inside(house) as client:
        for _ in range(3):
            answer = await client.post(CHAT, json=chat("x" * 50, max_tokens=5, ignore_eos=True))
            assert answer.status_code == 200
    return metrics


async def test_all_that_the_engine_counts_is_in_the_table_with_help() -> None:
    house = House()
    known = {row.key for row in ENGINE}
    assert set(house.engine.snapshot()) <= known, "say in ENGINE what it means"
    assert len({row.name for row in ENGINE}) == len(ENGINE)
    for family in families(await served()).values():
        assert len(family.documentation) > 10, family.name
        assert family.name.startswith(("octavo_", "process_"))


def test_the_document_is_the_table() -> None:
    assert DOCUMENT.read_text() == document(), (
        "write it: python -c 'from octavo.server.metrics import document; "
        'print(document(), end="")\' > docs/METRICS.md'
    )


async def test_every_series_is_in_the_document() -> None:
    """What is scraped, by its whole name: bucket, sum and count of histograms, and nothing more."""
    known = set(re.findall(r"^\| `(\w+)` \| (\w+)", document(), re.M))
    names = {name for name, kind in known if kind != "histogram"}
    for name, kind in known:
        if kind == "histogram":
            names |= {f"{name}_{end}" for end in ("bucket", "sum", "count")}
    page = (await served()).page().decode()
    there = set(re.findall(r"^(octavo_\w+)", page, re.M))
    assert there <= names, there - names
    assert "_created" not in page


async def test_histograms_count_requests_and_sequences() -> None:
    found = families(await served())
    for name in ("time_to_first_token_seconds", "queue_time_seconds", "prefill_time_seconds"):
        samples = {s.name: s.value for s in found[f"octavo_{name}"].samples}
        assert samples[f"octavo_{name}_count"] == 3
    outputs = {s.name: s.value for s in found["octavo_sequence_generation_tokens"].samples}
    assert outputs["octavo_sequence_generation_tokens_sum"] == 15
    waits = found["octavo_queue_wait_seconds"].samples
    assert {s.labels["reason"] for s in waits if s.name.endswith("_total")} == {"turn"}


async def test_vllms_names_carry_the_same_values_and_its_labels() -> None:
    found = families(await served("tiny"))
    ours = {v: k for k, v in VLLM.items() if k != "octavo_prefix_cache_queries"}
    ours["vllm:prefix_cache_queries"] = "octavo_prompt_tokens"
    assert {name for name in found if name.startswith("vllm:")} == set(ours)
    for theirs, own in ours.items():
        again = [(s.name[len(theirs) :], s.value) for s in found[theirs].samples]
        first = [(s.name[len(own) :], s.value) for s in found[own].samples]
        assert again == first
        for sample in found[theirs].samples:
            assert (sample.labels["model_name"], sample.labels["engine"]) == ("tiny", "0")
    reasons = {s.labels["finished_reason"] for s in found["vllm:request_success"].samples}
    assert reasons == {"length"}
    assert not any(name.startswith("vllm:") for name in families(await served()))


async def test_whatever_is_refused_is_counted_by_its_code_where_one_looks_for_it() -> None:
    house = House(max_queue=1)
    async with inside(house) as client:
        assert (await client.post(CHAT, json=chat(n=0))).status_code == 400
        assert (await client.get("/nowhere")).status_code == 404
        house.app.service.occupancy.enter()
        for _ in range(3):
            assert (await client.post(CHAT, json=chat())).status_code == 503
        house.app.service.occupancy.leave()
        assert (await client.post(CHAT, json=chat(max_tokens=1))).status_code == 200
    found = families(house.app.service.metrics)["octavo_refusals"].samples
    counted = {s.labels["code"]: s.value for s in found if s.name.endswith("_total")}
    assert counted == {"invalid_value": 1, "not_found": 1, "server_overloaded": 3}
    for row in ENGINE:  # these are part of it, and say which
        if row.key in ("refused", "capped", "unattainable"):
            assert re.search("scheduler|--max-queued-tokens|deadlines", row.help)


async def test_the_dashboard_asks_for_metrics_that_are_there() -> None:
    page = (await served()).page().decode()
    there = set(re.findall(r"^(octavo_\w+|process_\w+)", page, re.M))
    board = json.loads(DASHBOARD.read_text())
    asked = {
        name
        for panel in board["panels"]
        for target in panel.get("targets", ())
        for name in re.findall(r"\b(?:octavo|process)_\w+", target["expr"])
    }
    assert len(asked) > 15
    # Labelled counters are there from their first count on.
    later = {"octavo_deadline_sequences_total", "octavo_ttft_forecast_ratio_bucket"}
    later.add("octavo_refusals_total")
    assert asked - later <= there, asked - there
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)


# ---- OpenTelemetry -------------------------------------------------------------------------------


async def test_a_request_is_a_span_with_its_phases_and_three_measurements() -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader, MetricExporter
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    seen: list[Any] = []

    class Kept(MetricExporter):
        def export(self, data: Any, timeout_millis: float = 0, **_: Any) -> Any:
            seen.append(data)
            from opentelemetry.sdk.metrics.export import MetricExportResult

            return MetricExportResult.SUCCESS

        def shutdown(self, timeout_millis: float = 0, **_: Any) -> None: ...

        def force_flush(self, timeout_millis: float = 0) -> bool:
            return True

    assert InMemoryMetricReader
    spans = InMemorySpanExporter()
    telemetry = Telemetry("http://unused", "tiny", "0.1", (spans, Kept()))
    house = House()
    house.app.send_telemetry(telemetry)
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    parent = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"}
    async with inside(house) as client:
        answer = await client.post(CHAT, json=chat("a secret", max_tokens=4), headers=parent)
        await client.get("/v1/models")
        telemetry._traces.force_flush()
        found = {span.name: span for span in spans.get_finished_spans()}
    assert set(found) == {"chat tiny", "queue", "prefill", "decode"}
    root = found["chat tiny"]
    assert root.context.trace_id == int(trace_id, 16)
    assert root.parent.span_id == int("b7ad6b7169203331", 16)
    assert root.attributes["gen_ai.response.id"] == answer.json()["id"]
    assert root.attributes["gen_ai.usage.output_tokens"] == 4
    assert root.attributes["gen_ai.provider.name"] == "octavo"
    assert root.attributes["gen_ai.response.finish_reasons"] == ("length",)
    for name in ("queue", "prefill", "decode"):
        assert found[name].parent.span_id == root.context.span_id
        assert root.start_time <= found[name].start_time <= found[name].end_time <= root.end_time
    assert found["queue"].end_time == found["prefill"].start_time
    assert "secret" not in root.to_json()
    measured = {
        metric.name: metric
        for data in seen
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }
    edges = {
        "gen_ai.server.request.duration": E2E,
        "gen_ai.server.time_to_first_token": TTFT,
        "gen_ai.server.time_per_output_token": TPOT,
    }
    assert set(measured) == set(edges)
    for name, buckets in edges.items():
        (point,) = measured[name].data.data_points
        assert point.count == 1
        assert tuple(point.explicit_bounds) == pytest.approx(buckets)
        assert measured[name].unit == "s"


class Down:
    """What takes nothing, but for a while; `halt` says how long it does not even answer."""

    def __init__(self, success: Any, failure: Any, halt: threading.Event) -> None:
        self.results, self.halt = (failure, success), halt
        self.up = False
        self._preferred_temporality = self._preferred_aggregation = None

    def export(self, *_: Any, **__: Any) -> Any:
        self.halt.wait(PATIENCE)
        return self.results[self.up]

    def shutdown(self, *_: Any, **__: Any) -> None: ...

    def force_flush(self, *_: Any, **__: Any) -> bool:
        return True


def down(halt: threading.Event) -> tuple[Down, Down]:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.metrics.export import MetricExportResult
    from opentelemetry.sdk.trace.export import SpanExportResult

    kinds: Any = (SpanExportResult, MetricExportResult)
    spans, metrics = (Down(kind.SUCCESS, kind.FAILURE, halt) for kind in kinds)
    return spans, metrics


async def test_a_collector_that_is_down_is_told_of_once_in_a_short_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    (halt := threading.Event()).set()
    both = down(halt)
    telemetry = Telemetry("http://127.0.0.1:1", "tiny", "0.1", both)
    house = House()
    house.app.send_telemetry(telemetry)
    caplog.set_level("INFO")
    async with inside(house) as client:
        for up in (False, False, True, True):
            both[0].up = both[1].up = up
            await client.post(CHAT, json=chat(max_tokens=2))
            telemetry._traces.force_flush()
            telemetry._metrics.force_flush()
    told = [r.getMessage() for r in caplog.records if "otel" in r.getMessage()]
    assert sorted(told) == [
        f"--otel-endpoint http://127.0.0.1:1 {said}"
        for said in (
            "takes metrics again",
            "takes no metrics: they are lost until it does",
            "takes no spans: they are lost until it does",
            "takes spans again",
        )
    ]
    assert not [r for r in caplog.records if r.name.startswith(("opentelemetry", "urllib3"))]


def test_a_collector_that_does_not_answer_keeps_nobody_from_stopping(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("octavo.server.telemetry.LAST", 0.01)
    halt = threading.Event()
    telemetry = Telemetry("http://127.0.0.1:1", "tiny", "0.1", down(halt))
    telemetry._tracer.start_span("one").end()
    telemetry._duration.record(1.0, {})
    telemetry.close()
    assert not halt.is_set()  # it is still waited for, by none of ours
    assert [r.getMessage() for r in caplog.records] == [
        "--otel-endpoint http://127.0.0.1:1: what it had not taken yet is lost"
    ]
    halt.set()


def test_without_opentelemetry_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *more: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ImportError(name)
        return real(name, *more)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(InvalidRequest, match="pip install opentelemetry-sdk"):
        Telemetry("http://localhost:4318", "tiny", "0.1")
