"""Tables and paragraphs at the terminal: whole in every width, for a figure that is cut is wrong.

One rule for all tables. Where a table is wider than the terminal, its headings go over several
lines; where that is not enough, its columns are printed in several parts, each of which repeats the
first column. What is too wide by itself is text, and goes on in the next line. Into a pipe or a
file a table goes as it is, however wide.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click

WIDEST = 100  # of a paragraph: longer lines are hard to read
GAPS = (3, 2)  # between columns: what is pleasant, what is enough
INDENT = 2
ROOM = 50  # columns that text needs beside something

Row = Sequence[str]


def terminal_width() -> int | None:
    """Columns of the terminal that the output goes to; None where it goes elsewhere."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def paragraph(text: str, **style: Any) -> None:
    """Text in lines that fit. style: as `click.secho` takes it."""
    click.secho(textwrap.fill(text, min(WIDEST, terminal_width() or WIDEST)), **style)


def plain_table(head: Row, rows: Sequence[Row]) -> None:
    """Plain columns of text: they can be read, cut and grepped."""
    for number, part in enumerate(parts(head, rows, terminal_width(), (2,))):
        if number:
            click.echo()
        for line, cells in enumerate(part.rows):
            for text in part.lines(cells, right=False):
                click.secho(text, bold=line == 0)


def show_table(title: str, head: Row, rows: Sequence[Row], *, foot: int = 0) -> None:
    """A table under a title: the first column left, the others right; the last `foot` rows are
    set apart from those above."""
    width, indent = terminal_width(), " " * INDENT
    if title:
        click.secho(textwrap.fill(title, width) if width else title, bold=True)
    for part in parts(head, rows, None if width is None else width - INDENT):
        click.echo()
        for number, cells in enumerate(part.rows):
            if foot and number == len(part.rows) - foot:
                click.echo(indent + part.rule)
            for text in part.lines(cells):
                click.secho(indent + text, bold=number == 0)
            if number == 0:
                click.echo(indent + part.rule)
    click.echo()


def beside(start: str, used: int, text: str) -> None:
    """A line that starts with `start`, which takes `used` columns, and text beside it; on a narrow
    terminal beneath it."""
    width = terminal_width()
    text = text.replace("\n", " ")
    if width is None or used + GAPS[1] + _width(text) <= width:
        return click.echo(f"{start}{' ' * GAPS[1]}{text}".rstrip())
    indent = " " * (used + GAPS[1] if width - used >= ROOM else 2 * GAPS[1])
    lines = _broken(text, max(width - len(indent), 1))
    if width - used >= ROOM:
        click.echo(f"{start}{' ' * GAPS[1]}{lines.pop(0)}")
    else:
        click.echo(start.rstrip())
    for line in lines:
        click.echo(indent + line)


@dataclass(frozen=True, slots=True)
class Part:
    """Some columns of a table. rows: the headings first. widths: of its columns, which no line of
    a cell exceeds."""

    rows: tuple[tuple[str, ...], ...]
    widths: tuple[int, ...]
    gap: int

    @property
    def width(self) -> int:
        return sum(self.widths) + self.gap * (len(self.widths) - 1)

    @property
    def rule(self) -> str:
        return "─" * self.width

    def lines(self, cells: Row, right: bool = True) -> list[str]:
        """A row as lines of text; a heading's last line is next to the figures."""
        split = [_broken(cell, wide) for cell, wide in zip(cells, self.widths, strict=True)]
        most, below = max(len(own) for own in split), cells is self.rows[0]
        lines = []
        for at in range(most):
            texts = []
            for number, (own, wide) in enumerate(zip(split, self.widths, strict=True)):
                index = at - (most - len(own)) if below else at
                text = own[index] if 0 <= index < len(own) else ""
                texts.append(_padded(text, wide, right and number > 0))
            lines.append((" " * self.gap).join(texts).rstrip())
        return lines


def parts(
    head: Row, rows: Sequence[Row], width: int | None, gaps: Sequence[int] = GAPS
) -> list[Part]:
    """A table in as few parts as `width` columns have room for; None is any width."""
    table = [tuple(head), *(tuple(row) for row in rows)]
    columns = list(zip(*table, strict=True))
    whole = [max(map(_width, column)) for column in columns]
    least = [_least(column) for column in columns]
    if width is not None:
        first = min(least[0], max(width // 2, 1))
        least = [first, *(min(wide, max(width - first - gaps[-1], 1)) for wide in least[1:])]
    for widths in (whole, least):
        for gap in gaps:
            if width is None or sum(widths) + gap * (len(widths) - 1) <= width:
                return [_part(table, widths, width, gap)]
    assert width is not None
    return [
        _part([[row[i] for i in own] for row in table], [least[i] for i in own], width, gaps[-1])
        for own in _shared(least, width, gaps[-1])
    ]


def _part(table: Sequence[Row], widths: Sequence[int], width: int | None, gap: int) -> Part:
    """Of these columns. What room there is left makes the highest headings lower."""
    wide = list(widths)
    spare = (width or 0) - sum(wide) - gap * (len(wide) - 1)
    while spare > 0:
        heights = [len(_broken(name, own)) for name, own in zip(table[0], wide, strict=True)]
        highest = heights.index(max(heights))
        if heights[highest] == 1:
            break
        wide[highest] += 1
        spare -= 1
    return Part(tuple(tuple(row) for row in table), tuple(wide), gap)


def _shared(widths: Sequence[int], width: int, gap: int) -> list[list[int]]:
    """Which columns each part has: the first, and others in their order, in as few parts as there
    can be, about equally wide."""

    def filled(limit: int) -> list[list[int]]:
        found, used = [[0]], widths[0]
        for number, wide in enumerate(widths[1:], 1):
            if used + gap + wide > limit and len(found[-1]) > 1:
                found.append([0])
                used = widths[0]
            found[-1].append(number)
            used += gap + wide
        return found

    def widest(found: list[list[int]]) -> int:
        return max(sum(widths[i] for i in own) + gap * (len(own) - 1) for own in found)

    fewest = len(filled(width))
    made = (filled(limit) for limit in range(1, width + 1))
    return next(found for found in made if len(found) == fewest and widest(found) <= width)


def _least(column: Sequence[str]) -> int:
    """The width of a column whose heading is broken between its words."""
    return max(*map(_width, column[1:]), *map(_width, column[0].split()), 0, 0)


def _broken(text: str, width: int) -> list[str]:
    """Lines of a cell: itself, or where it is too wide between its words."""
    if _width(text) <= width:
        return [text]
    return textwrap.wrap(text, width, break_on_hyphens=False) or [""]


def _padded(text: str, width: int, right: bool) -> str:
    space = " " * (width - _width(text))
    return space + text if right else text + space


def _width(text: str) -> int:
    from rich.cells import cell_len

    return cell_len(text)
