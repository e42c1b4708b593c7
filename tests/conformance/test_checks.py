"""A suite judges its author too kindly: each check must catch a fault that was planted for it, and
find none where there is none."""

from __future__ import annotations

import pytest

from octavo.conformance import checks as _filled  # noqa: F401
from octavo.conformance.book import CHECKS, Finding, Verdict, chosen, run
from octavo.conformance.checks.refusals import BAD, ELSEWHERE
from octavo.conformance.probe import CHAT, Probe, Settings
from octavo.conformance.wire import Wire
from tests.conformance.fake import KEY, Fake

QUICK = Settings(quiet=1.0, freed=1.0, flood=130, wait=10.0)


def findings(fake: Fake, *names: str) -> dict[str, Finding]:
    with fake.standing():
        probe = Probe(Wire(fake.url, KEY, timeout=60.0), "fake", QUICK)
        return {f.check.name: f for f in run(probe, chosen(names, (), heavy=True))}


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_catches_the_fault_that_is_planted_for_it(name: str) -> None:
    found = findings(Fake(name), name)[name]
    assert found.verdict is Verdict.FAIL, found.evidence


def test_what_the_checks_made_in_the_server_is_gone_when_they_are_over() -> None:
    for fault in ("", "files", "batches", "responses"):
        fake = Fake(fault) if fault else Fake()
        findings(fake, "files", "batches", "responses", "responses-stream")
        assert fake.batches, "there was one to run"
        assert not fake.files, fault
        assert not fake.responses, fault


RANGES = [(CHAT, name, value) for name, value in BAD if type(value) in (int, float)]
RANGES += [(path, name, value) for path, _, name, value in ELSEWHERE]


@pytest.mark.parametrize("taken", RANGES, ids=str)
def test_each_end_of_each_range_is_tried(taken: tuple[str, str, float]) -> None:
    found = findings(Fake(takes=taken), "bad-values-refused")["bad-values-refused"]
    assert found.verdict is Verdict.FAIL
    assert f"{taken[1]}: {taken[2]!r} -> " in found.evidence


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_passes_where_there_is_no_fault(name: str) -> None:
    found = findings(Fake(), name)[name]
    assert found.verdict is Verdict.PASS, found.evidence
