"""The first of the requests of bench/hostile.py, at a server of the fake model, in seconds."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httptools
import httpx
import pytest

from tests.server.fakes import FakeExecutor
from tests.server.house import House, completion, outside, wait_for

BENCH = Path(__file__).resolve().parents[2] / "bench"
COUNT = 500


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    """The scripts as they see each other: siblings by bare name."""
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(BENCH))
        import hostile

        yield hostile
    for name in ("hostile", "hostile_cases", "served"):
        sys.modules.pop(name, None)


def test_what_is_sent_is_a_function_of_the_seed_and_holds_every_kind_and_field(
    bench: Any,
) -> None:
    cases = bench.cases
    first, again = [*cases(1100, 1)], [*cases(1100, 1)]
    assert first == again
    assert first[:200] != [*cases(200, 2)]
    kinds = {case.kind for case in first}
    assert len(kinds) >= len(sys.modules["hostile_cases"].KINDS)
    assert sum(case.kind == "field" for case in first) >= len(
        sys.modules["hostile_cases"].TARGETS
    ), "each of them once"


class Whole:
    """A parser's listener: whether a request came to its end."""

    done = False

    def on_message_complete(self) -> None:
        self.done = True


def test_what_is_owed_an_answer_is_http(bench: Any) -> None:
    for case in bench.cases(400, 3):
        if case.whole and not case.kind.startswith(("upload", "own header", "path")):
            heard = Whole()
            parser = httptools.HttpRequestParser(heard)
            parser.feed_data(b"".join(piece for piece in case.sends if isinstance(piece, bytes)))
            assert heard.done, case.kind


def test_hostile_requests_get_answers_and_leave_nothing(bench: Any, tmp_path: Path) -> None:
    house = House(FakeExecutor(seconds=0.0005), port=0, batch_dir=str(tmp_path))
    house.app.service.served = dataclasses.replace(house.app.service.served, name=bench.MODEL)
    tally = bench.Tally()

    async def attack(port: int) -> None:
        queue = enumerate(
            case for case in bench.cases(COUNT, 1) if not case.slow and case.kind != "huge"
        )

        async def client() -> None:
            for number, case in queue:
                tally.take(number, case, await bench.play("127.0.0.1", port, case))

        await asyncio.gather(*(client() for _ in range(16)))

    with outside(house):
        asked = completion("neighbour", model=bench.MODEL, ignore_eos=True)
        before = httpx.post(house.url + "/v1/completions", json=asked).json()["choices"]
        asyncio.run(attack(int(house.url.rsplit(":", 1)[1])))
        assert wait_for(lambda: not house.app.service.occupancy.live)
        assert house.idle()
        assert httpx.post(house.url + "/v1/completions", json=asked).json()["choices"] == before
        house.scheduler.check()
    assert not tally.faults
    assert not tally.unanswered
    assert not tally.unshaped


@pytest.mark.parametrize("status", [500, 502])
def test_a_fault_of_the_servers_own_is_one(bench: Any, status: int) -> None:
    case = next(case for case in bench.cases(50, 1) if case.whole)
    told = b'{"error":{"code":"internal_error"}}'
    for came in (bench.Came(status, b"", b"{}"), bench.Came(200, b"", told)):
        tally = bench.Tally()
        tally.take(0, case, came)
        assert tally.faults
