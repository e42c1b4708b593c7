"""Tables at the terminal: no figure is ever cut, and no line is wider than the terminal."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo import tables
from octavo.cli import cli
from octavo.conformance import checks, report
from octavo.conformance.book import CHECKS, Finding, Verdict

WIDTHS = (40, 60, 80, 100, 120, 200)
WORDS = st.text("abc 0123/%.", min_size=0, max_size=24).map(lambda text: " ".join(text.split()))
FIGURES = st.from_regex(r"-|\d{1,3}(,\d{3}){0,2}(\.\d{1,3})?%?", fullmatch=True)


@st.composite
def made(draw: Any) -> tuple[list[str], list[list[str]]]:
    wide = draw(st.integers(1, 12))
    head = draw(st.lists(WORDS, min_size=wide, max_size=wide))
    row = st.tuples(WORDS, *([FIGURES] * (wide - 1))).map(list)
    return head, draw(st.lists(row, min_size=1, max_size=4))


@given(made(), st.integers(32, 160))
@settings(max_examples=150, deadline=None)
def test_at_any_width_every_figure_is_whole_and_stands_under_its_heading(
    table: tuple[list[str], list[list[str]]], width: int
) -> None:
    head, rows = table
    parts = tables.parts(head, rows, width)
    seen = [name for number, part in enumerate(parts) for name in part.rows[0][number > 0 :]]
    assert seen == head, "each column is there once, in order; the first in every part"
    for part in parts:
        assert part.width <= width
        for cells in part.rows[1:]:
            lines = part.lines(cells)
            assert max(map(len, lines)) <= width
            end = len(lines[0])
            for figure in reversed(cells[1:]):
                assert lines[0][:end].endswith(figure), (figure, lines)
                end = len(lines[0][:end].removesuffix(figure).rstrip()) if figure else end


@given(made())
@settings(max_examples=50, deadline=None)
def test_where_there_is_no_terminal_a_table_is_whole_and_its_headings_on_one_line(
    table: tuple[list[str], list[list[str]]],
) -> None:
    (only,) = tables.parts(*table, None)
    assert only.rows == (tuple(table[0]), *map(tuple, table[1]))
    assert all(len(only.lines(row)) == 1 for row in only.rows)


def test_a_table_is_parted_only_where_broken_headings_are_not_enough() -> None:
    head = ["hardware", "GB/s", "weights GB", "KV KB/token", "prefill tok/s"]
    rows = [["h100", "2680", "16.06", "131.1", "46,171"]]
    heights = [len(tables.parts(head, rows, w)[0].lines(head)) for w in (70, 50, 42)]
    counts = [len(tables.parts(head, rows, w)) for w in (70, 50, 42, 30)]
    assert counts == [1, 1, 1, 2]
    assert heights[0] == 1


@pytest.fixture(params=WIDTHS)
def narrow(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """A terminal of so many columns."""
    monkeypatch.setattr(tables, "terminal_width", lambda: request.param)
    return int(request.param)


COMMANDS = (
    ["roofline", "llama-3.1-8b"],
    ["roofline"],
    ["simulate", "poisson:rate=2,seconds=4", "--slo-ttft", "900", "--rate", "1,2"],
    ["simulate", "poisson:rate=2,seconds=4"],
    ["plan", "poisson:rate=2,seconds=4", "-m", "llama-3.1-8b", "-H", "l4,h100", "--slo-ttft",
     "2000", "--slo-tpot", "100", "--seeds", "2"],
)  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_commands_show_the_same_figures_in_every_width(command: list[str], narrow: int) -> None:
    shown = CliRunner().invoke(cli, command)
    assert shown.exit_code == 0, shown.output
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "terminal_width", lambda: None)
        whole = CliRunner().invoke(cli, command)
    figure = re.compile(r"\d[\d,.]*%?")
    quick = re.compile(r"\S+x real time")  # differs from run to run
    assert "…" not in shown.stdout
    found, wanted = (
        set(figure.findall(quick.sub("", text))) for text in (shown.stdout, whole.stdout)
    )
    assert wanted <= found
    in_tables = [line for line in shown.stdout.splitlines() if line.startswith("  ")]
    if command[0] == "roofline" and len(command) > 1:
        assert max(map(len, in_tables)) <= narrow


def test_a_report_of_conformance_stays_within_the_terminal(
    narrow: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert checks, "they enter the book as they are imported"
    draw = random.Random(7)
    findings = [
        Finding(check, draw.choice(list(Verdict)), "what was seen, and where it was " * 4, 0.1)
        for check in list(CHECKS.values())[:12]
    ]
    report.show(findings, everything=True)
    lines = capsys.readouterr().out.partition("\n\n")[0].splitlines()
    text = " ".join(" ".join(lines).split())
    for finding in findings:
        assert finding.check.name in text
    assert text.count("and where it was") == 4 * len(findings)
    longest = max(len(finding.check.name) for finding in findings)
    assert max(map(len, lines)) <= max(narrow, longest + 2 + len("not offered") + 4)
