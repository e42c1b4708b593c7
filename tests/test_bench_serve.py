"""`octavo bench serve`: known timing is reported as it was, in virtual time; framing by the RFC."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo import cli
from octavo.benchmark import load, serve, wire
from octavo.benchmark.load import Ask
from octavo.benchmark.serve import Plan
from octavo.core.request import Slo
from octavo.core.slo import slo as slo_policy
from octavo.errors import InvalidRequest
from octavo.sim import workload as workloads
from octavo.sim.workload import Item, Workload
from tests import virtual
from tests.server.house import House, outside

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
TARGET = wire.Target("server", 80)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(message: Any) -> bytes:
    text = message if isinstance(message, str) else json.dumps(message)
    return chunk(b"data: " + text.encode() + b"\n\n")


def piece(text: str, finish: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish}]})


@dataclass
class Server:
    """First text after `first` seconds, further ones every `gap`; every `refuse`-th is told to go.
    cost: seconds in which the client's own loop stands still at each connection."""

    first: float = 0.25
    gap: float = 0.05
    refuse: int = 0
    cost: float = 0.0
    asked: list[dict[str, Any]] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    begun: list[float] = field(default_factory=list)
    open: int = 0
    most: int = 0

    async def dial(self, make: Callable[[], asyncio.Protocol]) -> None:
        protocol = make()
        loop: Any = asyncio.get_running_loop()
        if self.cost:
            loop.advance(self.cost)
        protocol.connection_made(Wire(self, protocol))  # type: ignore[arg-type]

    def plan(self, body: dict[str, Any]) -> list[tuple[float, bytes]]:
        if self.refuse and len(self.asked) % self.refuse == 0:
            said = b'{"error":{"message":"come back"}}'
            head = b"HTTP/1.1 503 Busy\r\nretry-after: 7\r\ncontent-length: %d\r\n\r\n" % len(said)
            return [(0.01, head + said)]
        n = body["max_tokens"]
        usage = {"prompt_tokens": 11, "completion_tokens": n,
                 "prompt_tokens_details": {"cached_tokens": 3},
                 "completion_tokens_details": {"accepted_prediction_tokens": 2}}  # fmt: skip
        out = [(0.0, HEAD), (self.first, piece("a"))]
        out += [(self.first + self.gap * i, piece("b")) for i in range(1, n)]
        end = self.first + self.gap * (n - 1)
        out.append((end, piece("", "length") + event({"choices": [], "usage": usage})))
        return [*out, (end + 1.0, event("[DONE]") + b"0\r\n\r\n")]


class Wire:
    def __init__(self, server: Server, protocol: asyncio.Protocol) -> None:
        self._server, self._protocol = server, protocol

    def write(self, message: bytes) -> None:
        server, loop = self._server, asyncio.get_running_loop()
        head, _, body = message.partition(b"\r\n\r\n")
        server.asked.append(json.loads(body))
        server.heads.append(head.decode())
        server.begun.append(loop.time())
        server.open += 1
        server.most = max(server.most, server.open)
        for after, data in server.plan(server.asked[-1]):
            loop.call_later(after, self._protocol.data_received, data)
        loop.call_later(after, self.close)

    def close(self) -> None:
        if self._protocol is not None:
            protocol, self._protocol = self._protocol, None  # type: ignore[assignment]
            self._server.open -= 1
            protocol.connection_lost(None)

    def abort(self) -> None:
        self.close()


def workload(*arrivals: float, output: int = 5) -> Workload:
    items = tuple(Item(f"r{i}", at, 20, output) for i, at in enumerate(arrivals))
    return Workload("test", items)


def conduct(server: Server, plan: Plan) -> tuple[dict[str, Any], list[load.Outcome]]:
    result: tuple[dict[str, Any], list[load.Outcome]] = virtual.run(
        serve.conduct(TARGET, server.dial, plan)
    )
    return result


def test_times_are_the_servers() -> None:
    server = Server(first=0.25, gap=0.05)
    plan = Plan(workload(0.0, 0.1, 5.0), Ask("m", slo=Slo(ttft=0.3, tpot=0.04)), warmup=0)
    report, found = conduct(server, plan)
    for one in found:
        assert one.ttft == pytest.approx(0.25)
        assert one.tpot == pytest.approx(0.05)
        assert one.e2e == pytest.approx(0.45)
        assert list(one.gaps) == pytest.approx([0.05] * 4)
        assert (one.tokens, one.prompt, one.cached, one.finish) == (5, 11, 3, "length")
    assert report["attainment"] == {"ttft": 1.0, "tpot": 0.0, "all": 0.0}
    assert report["seconds"] == pytest.approx(5.0 + 0.45 + 1.0)  # until its connection ended
    assert report["output_tokens_per_s"] == pytest.approx(15 / 6.45)
    assert report["most_at_once"] == server.most == 2
    assert (report["guessed_tokens"], report["cached_tokens"]) == (6, 9)
    assert report["valid"]
    json.dumps(report)


def test_an_open_loop_does_not_wait_for_answers() -> None:
    server = Server(first=100.0)
    arrivals = [0.0, 0.5, 0.51, 3.0]
    _, found = conduct(server, Plan(workload(*arrivals), Ask("m"), warmup=0, timeout=1000.0))
    start = server.begun[0]
    assert [at - start for at in server.begun] == pytest.approx(arrivals)
    assert server.most == 4
    assert max(one.lag for one in found) == pytest.approx(0.0, abs=1e-6)


def test_a_closed_loop_keeps_so_many_busy() -> None:
    server = Server()
    report, found = conduct(server, Plan(workload(*[0.0] * 9), Ask("m"), concurrency=3, warmup=0))
    assert server.most == report["most_at_once"] == 3
    each = 0.25 + 4 * 0.05 + 1.0
    assert report["seconds"] == pytest.approx(3 * each)
    assert {round(one.ttft or 0, 6) for one in found} == {0.25}
    assert report["offered_per_s"] is None


def test_refusals_are_apart_and_meet_nothing() -> None:
    slo = Slo(ttft=1.0)
    server = Server(refuse=2)
    report, found = conduct(server, Plan(workload(*range(6)), Ask("m", slo=slo), warmup=0))
    assert (report["served"], report["refused"], report["failed"]) == (3, 3, 0)
    assert report["attainment"]["all"] == 0.5
    assert report["kept"] == 1.0
    assert report["goodput_per_s"] == pytest.approx(3 / report["seconds"])
    assert report["retry_after_s"]["p50"] == 7
    assert report["ttft_s"]["number"] == 3
    assert [one.refused for one in found] == [False, True] * 3


def test_without_objectives_nothing_is_attained_and_nothing_is_good() -> None:
    report, _ = conduct(Server(refuse=2), Plan(workload(*range(6)), Ask("m"), warmup=0))
    for name in ("attainment", "kept", "goodput_per_s"):
        assert report[name] is None
    assert report["served"] == 3


def test_a_server_that_takes_no_deadlines_is_not_told_them_and_is_judged_all_the_same() -> None:
    said = b'{"error":{"message":"x-slo-ttft-ms needs a server started otherwise"}}'
    head = b"HTTP/1.1 400 No\r\ncontent-length: %d\r\n\r\n" % len(said)

    class Deadlineless(Server):
        def plan(self, body: dict[str, Any]) -> list[tuple[float, bytes]]:
            told = "x-slo" in self.heads[-1]
            return [(0.01, head + said)] if told else super().plan(body)

    server = Deadlineless()
    plan = Plan(workload(0.0, 1.0), Ask("m", slo=Slo(ttft=9.0)), warmup=1)
    report, found = conduct(server, plan)
    assert (report["failed"], report["slo_told"]) == (0, False)
    assert report["attainment"]["ttft"] == 1.0
    assert all(o.served for o in found)
    assert ["x-slo" in head for head in server.heads] == [True, False, False, False]


def test_who_may_come_later_who_never_and_what_broke_are_counted_apart() -> None:
    said = b'{"error":{"message":"too tight","code":"slo_unattainable"}}'
    statuses = [400, 503, 429, 400, 404, 500, 503]
    left = iter(statuses)

    class Strict(Server):
        def plan(self, body: dict[str, Any]) -> list[tuple[float, bytes]]:
            head = b"HTTP/1.1 %d No\r\ncontent-length: %d\r\n\r\n" % (next(left), len(said))
            return [(0.01, head + said)]

    load_ = workload(*map(float, range(7)))
    report, found = conduct(Strict(), Plan(load_, Ask("m", slo=Slo(ttft=1.0)), warmup=0))
    names = ("served", "refused", "bad_requests", "failed")
    assert [report[name] for name in names] == [0, 3, 3, 1]
    assert report["refusals"] == {"503": 2, "429": 1}
    assert report["errors"] == {"HTTP 500: too tight": 1}
    assert report["bad_request_errors"] == {"HTTP 400: too tight": 2, "HTTP 404: too tight": 1}
    rows = [serve.row(one, 0.0, Slo(ttft=1.0)) for one in found]
    assert [row["bad_request"] for row in rows] == [status in (400, 404) for status in statuses]
    assert {row["error_code"] for row in rows} == {"slo_unattainable"}


def test_deadlines_that_nobody_could_keep_do_not_end_the_run_before_it_begins() -> None:
    said = b'{"error":{"message":"too tight","code":"slo_unattainable"}}'
    head = b"HTTP/1.1 400 No\r\ncontent-length: %d\r\n\r\n" % len(said)

    class Tight(Server):
        def plan(self, body: dict[str, Any]) -> list[tuple[float, bytes]]:
            return [(0.01, head + said)]

    plan = Plan(workload(0.0, 1.0), Ask("m", slo=Slo(ttft=0.001)), warmup=1)
    assert conduct(Tight(), plan)[0]["bad_requests"] == 2


def test_a_client_that_is_late_makes_the_run_void() -> None:
    server = Server(cost=0.05)
    report, _ = conduct(server, Plan(workload(*[0.0] * 8), Ask("m"), warmup=0))
    assert not report["valid"]
    assert any("sent late" in fault for fault in report["faults"])


def test_what_never_ends_is_given_up_and_told() -> None:
    server = Server(first=50.0)
    report, found = conduct(server, Plan(workload(0.0), Ask("m"), warmup=0, timeout=10.0))
    assert report["failed"] == 1
    assert "10 s" in (found[0].error or "")
    assert server.open == 0


def test_objectives_go_with_the_request_unless_they_are_kept_here() -> None:
    server, slo = Server(), Slo(ttft=0.5, e2e=2.0)
    conduct(server, Plan(workload(0.0), Ask("m", slo=slo), warmup=0))
    conduct(server, Plan(workload(0.0), Ask("m", slo=slo, slo_headers=False), warmup=0))
    with_, without = server.heads
    assert "x-slo-ttft-ms: 500\r\n" in with_ + "\r\n"
    assert "x-slo-e2e-ms: 2000" in with_
    assert "x-slo" not in without


def test_bodies_ask_for_what_the_workload_says() -> None:
    server = Server()
    ask = Ask("m", vocab=600, more={"top_k": 1})
    conduct(server, Plan(workload(0.0, output=3), ask, warmup=0))
    conduct(server, Plan(workload(0.0), Ask("m", chat=True, ignore_eos=False), warmup=0))
    ids, chat = server.asked
    assert ids["max_tokens"] == 3
    assert ids["top_k"] == 1
    assert ids["ignore_eos"]
    assert len(ids["prompt"]) == 20
    assert all(512 <= i < 600 for i in ids["prompt"])
    assert len(chat["messages"][0]["content"].split()) == 20
    assert "ignore_eos" not in chat


def test_equal_blocks_are_equal_text_and_nothing_else_is() -> None:
    one = Item("a", 0.0, 40, 1, blocks=(7, 8))
    two = Item("b", 0.0, 40, 1, blocks=(7, 9))
    made = [load.prompt_of(item, 16, "s", 1000) for item in (one, two)]
    assert made[0][:16] == made[1][:16]
    assert made[0][16:32] != made[1][16:32]
    assert made[0][32:] != made[1][32:]
    assert load.prompt_of(one, 16, "s", 1000) == made[0]
    assert load.prompt_of(one, 16, "other", 1000)[:16] != made[0][:16]
    assert [len(m) for m in made] == [40, 40]


def test_rows_can_be_sent_again(tmp_path: Path) -> None:
    slo = Slo(ttft=0.3)
    _, found = conduct(Server(), Plan(workload(0.0, 0.5, 2.0), Ask("m", slo=slo), warmup=0))
    serve.write_rows(found, slo, tmp_path / "rows.jsonl")
    again = workloads.read(tmp_path / "rows.jsonl")
    assert [item.at for item in again.items] == pytest.approx([0.0, 0.5, 2.0])
    assert {(item.prompt, item.output) for item in again.items} == {(11, 5)}
    first = json.loads((tmp_path / "rows.jsonl").read_text().splitlines()[0])
    assert first["met"] is first["ttft_met"] is True
    assert first["times_s"] == pytest.approx([0.25, 0.3, 0.35, 0.4, 0.45])


BODY = [b'data: {"a": 1}\n\n', b"data: two\r\n\r\n", b": ping\n\n", b"data:three\n\n"]


@settings(derandomize=True, max_examples=200, deadline=None)
@given(cuts=st.lists(st.integers(0, 400), max_size=30), sizes=st.integers(1, 9))
def test_events_do_not_depend_on_how_bytes_arrive(cuts: list[int], sizes: int) -> None:
    """Chunks of the server and packets of the network may end anywhere."""
    body = b"".join(BODY)
    framed = HEAD + b"".join(chunk(body[i : i + sizes]) for i in range(0, len(body), sizes))
    framed += b"0\r\n\r\n"
    edges = sorted({0, len(framed), *(cut for cut in cuts if cut < len(framed))})
    pieces = [framed[a:b] for a, b in pairwise(edges)]
    answer = wire.read([float(i) for i in range(len(pieces))], pieces)
    assert answer.status == 200
    assert answer.whole
    assert [data for _, data in wire.events(answer.body)] == [b'{"a": 1}', b"two", b"three"]
    times = [at for at, _ in answer.body]
    assert times == sorted(times)


def test_answers_that_break_off_are_not_whole() -> None:
    framed = HEAD + chunk(b"data: x\n\n")
    assert not wire.read([0.0], [framed]).whole
    assert wire.read([0.0], [b"HTTP/1.1 200"]).status == 0
    short = wire.read([0.0], [b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nabc"])
    assert (short.whole, short.content) == (False, b"abc")
    with pytest.raises(ValueError, match="HTTP"):
        wire.read([0.0], [b"SSH-2.0\r\n\r\n"])


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("http://a:81/v1/", wire.Target("a", 81)),
        ("localhost:8000", wire.Target("localhost", 8000)),
        ("https://b/x/v1", wire.Target("b", 443, True, "/x")),
        ("http://[::1]:9", wire.Target("::1", 9)),
    ],
)
def test_addresses(url: str, target: wire.Target) -> None:
    assert wire.Target.of(url) == target


@pytest.mark.parametrize("url", ["ftp://a", "http://", "http://a:x", "http://a?b=c"])
def test_wrong_addresses_are_named(url: str) -> None:
    with pytest.raises(InvalidRequest, match="address"):
        wire.Target.of(url)


def test_our_own_server_is_measured(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows, plot = tmp_path / "rows.jsonl", tmp_path / "run.png"
    load_ = "poisson:rate=200,seconds=0.1,prompt=12,output=6,spread=0"
    with outside(House(port=0)) as house:
        words = ["bench", "serve", house.url + "/v1", "--load", load_, "--chat", "--json"]
        more = ["--requests-out", str(rows), "--plot", str(plot)]
        shown = CliRunner().invoke(cli.cli, [*words, *more])
        text = CliRunner().invoke(cli.cli, [*words[:-2], "--words", "--concurrency", "4"])
        refused = CliRunner().invoke(cli.cli, [*words, "--slo-ttft", "500", "--warmup", "0"])
        judged = CliRunner().invoke(cli.cli, [*words[:-1], "--slo-ttft", "60000"])
    report = json.loads(shown.stdout)
    assert report["model"] == "fake"
    assert report["served"] == report["sent"] == len(rows.read_text().splitlines())
    assert report["output_tokens"] == 6 * report["sent"]
    assert report["short"] == 0
    assert plot.stat().st_size > 20_000
    assert "tok/s written" in text.output
    assert "of the tokens written were guessed" in text.output
    # A number is no file's name, and the old name of the option no option.
    assert CliRunner().invoke(cli.cli, [*words, "--requests", "20"]).exit_code == 2
    # A server that keeps no deadlines says so, and that is shown.
    assert "--policy slo" in str(json.loads(refused.stdout)["bad_request_errors"])
    # So its callers' objectives are judged by the client alone, which it says.
    assert "100.0% of those let in; the server was not told" in judged.stdout
    assert "judged here alone" in judged.stderr


def test_a_server_that_keeps_deadlines_forecasts() -> None:
    with outside(House(port=0, policy=slo_policy())) as house:
        slo = Slo(ttft=20.0)
        report, found = serve.measure(house.url, Plan(workload(0.0), Ask("", chat=True, slo=slo)))
    assert report["attainment"]["all"] == 1.0
    assert found[0].predicted is not None


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(InvalidRequest, match="no server at"):
        serve.measure("http://127.0.0.1:9", Plan(workload(0.0), Ask("m")))
