"""The step log: what lacks room is told of while something can be done about it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from octavo.core.steptime import LOG, Observation, StepFeatures, StepModel
from octavo.server.steplog import MOST
from tests.server.house import House, completion, inside, outside


@pytest.mark.parametrize("free", [0, MOST - 1])
def test_a_disk_without_room_for_the_step_log_is_told_of_once_and_the_server_goes_on(
    free: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("octavo.server.steplog.EVERY", 0.001)
    monkeypatch.setattr("os.statvfs", lambda _: SimpleNamespace(f_bavail=free, f_frsize=1))

    async def main() -> list[int]:
        async with inside(House(step_log=str(tmp_path / "steps.jsonl"))) as client:
            return [(await client.post("/v1/completions", json=completion())).status_code
                    for _ in range(3)]  # fmt: skip

    assert asyncio.run(main()) == [200] * 3
    told = [r for r in caplog.records if "steps.jsonl" in r.getMessage()]
    assert [r.levelname for r in told] == ["WARNING"]
    assert "4.00 MiB" in told[0].getMessage()


def test_room_that_is_there_is_not_spoken_of_nor_what_is_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main(path: str) -> None:
        async with inside(House(step_log=path)) as client:
            await client.post("/v1/completions", json=completion())

    sizes = SimpleNamespace(f_bavail=MOST, f_frsize=1)
    monkeypatch.setattr("os.statvfs", lambda _: sizes)
    asyncio.run(main(str(tmp_path / "steps.jsonl")))
    sizes.f_bavail = 0
    asyncio.run(main("/dev/null"))
    assert not [r for r in caplog.records if r.levelname == "WARNING"]


def test_a_step_log_that_is_lost_at_the_end_keeps_nobody_from_stopping(
    caplog: pytest.LogCaptureFixture,
) -> None:
    house = House(port=0, step_log="/dev/full")
    house.admission.model.observe(StepFeatures(tokens=1), 0.01)
    with outside(house) as served:
        assert httpx.post(served.url + "/v1/completions", json=completion()).status_code == 200
    (told,) = [r for r in caplog.records if "/dev/full" in r.getMessage()]
    assert "lost: No space left on device" in told.getMessage()


def test_a_line_of_the_step_log_is_no_longer_than_is_reckoned_with() -> None:
    model = StepModel()
    most = StepFeatures(*[123456789.123456789] * 5)
    model.steps.append(Observation(most, 1.2345678901234567e-05, 1.2345678901234567e-05))
    assert all(len(line) + 1 < MOST / LOG for line in model.log())


def test_steps_of_another_server_stay_and_ones_own_are_beside_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "steps.jsonl"
    house = House(step_log=str(path))
    house.admission.model.observe(StepFeatures(tokens=1), 0.01)
    path.write_text("another's\n")
    (tmp_path / "steps.jsonl.1").write_text("a third's\n")
    house.app.write_step_log()
    assert path.read_text() == "another's\n"
    assert (tmp_path / "steps.jsonl.1").read_text() == "a third's\n"
    assert len((tmp_path / "steps.jsonl.2").read_text().splitlines()) == 1
    (told,) = [r for r in caplog.records if r.levelname == "WARNING"]
    assert "steps.jsonl.2" in told.getMessage()
