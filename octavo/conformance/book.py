"""The book of checks, and how they are run."""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from octavo.conformance.probe import Failed, NotOffered, Probe, Unclear, short

Basis = Literal["spec", "practice"]
Body = Callable[[Probe], str]


class Verdict(StrEnum):
    PASS = "pass"
    FAIL = "fail"
    NOT_OFFERED = "not offered"
    UNCLEAR = "unclear"


@dataclass(frozen=True)
class Check:
    """One behaviour. words: what must hold, as its source says it. basis: whether the specification
    demands it, or what clients have learnt to rely on. heavy: it fills the server for seconds."""

    name: str
    group: str
    words: str
    source: str
    body: Body
    basis: Basis = "spec"
    heavy: bool = False


@dataclass(frozen=True)
class Finding:
    """What came of a check."""

    check: Check
    verdict: Verdict
    evidence: str
    seconds: float


CHECKS: dict[str, Check] = {}


def check(
    name: str, words: str, source: str, *, basis: Basis = "spec", heavy: bool = False
) -> Callable[[Body], Body]:
    """Enter a function into the book; its module is the group."""

    def enter(body: Body) -> Body:
        assert name not in CHECKS, name
        group = body.__module__.rpartition(".")[2]
        CHECKS[name] = Check(name, group, words, source, body, basis, heavy)
        return body

    return enter


def chosen(only: Sequence[str], skip: Sequence[str], heavy: bool) -> list[Check]:
    """The checks to run, in the book's order. `only` and `skip` are names or groups; what `only`
    names is run, heavy or not. Raises KeyError with a word that is neither."""
    known = set(CHECKS) | {one.group for one in CHECKS.values()}
    for word in (*only, *skip):
        if word not in known:
            raise KeyError(word)
    return [
        one
        for one in CHECKS.values()
        if (not only or {one.name, one.group} & set(only))
        and not {one.name, one.group} & set(skip)
        and (heavy or not one.heavy or one.name in only)
    ]


def run(probe: Probe, checks: Sequence[Check]) -> Iterator[Finding]:
    """Run them one after another; nothing that a server does ends the run. What a check made there
    is deleted when it is over."""
    for one in checks:
        start = time.monotonic()
        try:
            verdict, evidence = Verdict.PASS, one.body(probe)
        except Failed as failure:
            verdict, evidence = Verdict.FAIL, str(failure)
        except NotOffered as absence:
            verdict, evidence = Verdict.NOT_OFFERED, str(absence)
        except Unclear as doubt:
            verdict, evidence = Verdict.UNCLEAR, str(doubt)
        except TimeoutError:
            verdict, evidence = Verdict.FAIL, f"no byte for {probe.wire.timeout:g} s"
        except (OSError, http.client.HTTPException) as error:
            verdict, evidence = Verdict.FAIL, f"the connection broke: {error!r}"
        except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
            # Checks read answers as the specification shapes them; what is not there is a failure.
            verdict, evidence = Verdict.FAIL, f"the answer lacks what it must have: {error!r}"
        seconds = time.monotonic() - start
        probe.tidy()
        yield Finding(one, verdict, short(evidence, 400), seconds)
