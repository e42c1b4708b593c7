"""What an experiment hands over, and how it is shown: tables, a paragraph, a picture, or JSON."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click

from octavo import plots
from octavo.tables import paragraph, show_table
from octavo.terminal import echo_json


@dataclass(frozen=True, slots=True)
class Sheet:
    """A table: the first column is left-aligned."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Finding:
    """values: all that was measured, for --json. says: paragraphs, made from the values. draw:
    writes the picture."""

    values: dict[str, Any]
    sheets: tuple[Sheet, ...]
    says: tuple[str, ...]
    draw: Callable[[str], None]


def conduct(experiment: Callable[[], Finding], plot: str | None, as_json: bool) -> None:
    """Run an experiment and show what it found. Without matplotlib a plot is refused at once."""
    if plot:
        plots.require()
    found = experiment()
    if plot:
        found.draw(plot)
    if as_json:
        return echo_json(found.values)
    for sheet in found.sheets:
        show_table(sheet.title, sheet.head, sheet.rows)
    for text in found.says:
        paragraph(text)
        click.echo()
    if plot:
        click.echo(f"drawn: {plot}")
