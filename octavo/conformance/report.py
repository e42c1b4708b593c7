"""What is said of a run: a table for people, JSON and JUnit for machines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import click

from octavo.conformance.book import Finding, Verdict
from octavo.tables import beside

STYLES: dict[Verdict, dict[str, Any]] = {
    Verdict.PASS: {"fg": "green"},
    Verdict.FAIL: {"fg": "red", "bold": True},
    Verdict.NOT_OFFERED: {"dim": True},
    Verdict.UNCLEAR: {"fg": "yellow"},
}
# What XML 1.0 cannot hold, even escaped.
_UNPRINTABLE = dict.fromkeys([*range(9), 11, 12, *range(14, 32), *range(0xD800, 0xE000)], "?")


def failures(findings: Sequence[Finding], basis: str | None = None) -> list[Finding]:
    """Those that failed, of one basis or of both."""
    failed = [f for f in findings if f.verdict is Verdict.FAIL]
    return [f for f in failed if basis is None or f.check.basis == basis]


def summary(findings: Sequence[Finding]) -> str:
    """One line: how many of each verdict, failures by what demands the behaviour."""
    counts = Counter(finding.verdict for finding in findings)
    spec, practice = (len(failures(findings, basis)) for basis in ("spec", "practice"))
    judged = counts[Verdict.PASS] + counts[Verdict.FAIL]
    apart = (
        (counts[Verdict.NOT_OFFERED], "not offered by this server or model"),
        (counts[Verdict.UNCLEAR], "without an occasion to see"),
    )
    rest = "".join(f"; {count} more {what}" for count, what in apart if count)
    return (
        f"{counts[Verdict.PASS]} of {judged} pass, {spec} fail what the specification says, "
        f"{practice} what clients rely on{rest}"
    )


def as_dict(url: str, model: str, findings: Sequence[Finding]) -> dict[str, Any]:
    """The report as JSON; times in seconds."""
    return {
        "url": url,
        "model": model,
        "counts": Counter(str(finding.verdict) for finding in findings),
        "checks": [
            {
                "name": finding.check.name,
                "group": finding.check.group,
                "verdict": str(finding.verdict),
                "basis": finding.check.basis,
                "evidence": finding.evidence,
                "words": finding.check.words,
                "source": finding.check.source,
                "seconds": round(finding.seconds, 3),
            }
            for finding in findings
        ],
    }


def show(findings: Sequence[Finding], *, everything: bool) -> None:
    """A line for each, then for each failure what should hold and who says so. everything:
    evidence of what passed too."""
    names = max((len(finding.check.name) for finding in findings), default=0) + 2
    verdicts = max(map(len, Verdict))
    group = ""
    for finding in findings:
        if finding.check.group != group:
            group = finding.check.group
            click.secho(group, bold=True)
        verdict = click.style(str(finding.verdict), **STYLES[finding.verdict])
        pad = " " * (verdicts - len(finding.verdict))
        told = finding.evidence if everything or finding.verdict is not Verdict.PASS else ""
        start = f"  {finding.check.name}".ljust(names)
        beside(f"{start}  {verdict}{pad}", names + 2 + verdicts, told)
    click.echo()
    for finding in failures(findings):
        click.secho(f"{finding.check.name}: ", fg="red", bold=True, nl=False)
        click.echo(f"{finding.check.words}  [{finding.check.source}]")
    click.secho(summary(findings), bold=True)


def write_junit(path: str, url: str, findings: Sequence[Finding]) -> None:
    """JUnit's XML, as CI systems read it: not offered and unclear are skipped tests."""
    counts = Counter(finding.verdict for finding in findings)
    skipped = counts[Verdict.NOT_OFFERED] + counts[Verdict.UNCLEAR]
    suite = ElementTree.Element(
        "testsuite",
        name=f"octavo conformance {url}".translate(_UNPRINTABLE),
        tests=str(len(findings)),
        failures=str(counts[Verdict.FAIL]),
        skipped=str(skipped),
        errors="0",
        time=f"{sum(finding.seconds for finding in findings):.3f}",
    )
    for finding in findings:
        check = finding.check
        case = ElementTree.SubElement(
            suite,
            "testcase",
            classname=f"conformance.{check.group}",
            name=check.name,
            time=f"{finding.seconds:.3f}",
        )
        evidence = finding.evidence.translate(_UNPRINTABLE)
        if finding.verdict is Verdict.FAIL:
            failure = ElementTree.SubElement(case, "failure", message=evidence, type=check.basis)
            failure.text = f"{check.words}\n{check.source}"
        elif finding.verdict is not Verdict.PASS:
            what = f"{finding.verdict}: {evidence}"
            ElementTree.SubElement(case, "skipped", message=what)
    Path(path).write_bytes(ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True))
