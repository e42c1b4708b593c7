"""The command `octavo conformance`."""

from __future__ import annotations

import http.client
import json
import sys
from collections.abc import Iterator, Sequence

import click

from octavo.conformance import checks as _filled  # noqa: F401  (fills the book)
from octavo.conformance import report
from octavo.conformance.book import CHECKS, Check, Finding, chosen, run
from octavo.conformance.probe import Probe, Settings, short
from octavo.conformance.wire import Wire, key_in
from octavo.errors import InvalidRequest
from octavo.terminal import OurCommand, OutputFile, unreached


@click.command(
    cls=OurCommand,
    epilog="""\b
Examples:
  octavo conformance http://127.0.0.1:8000
  octavo conformance http://127.0.0.1:8000 --heavy --junit report.xml
  octavo conformance https://api.example.org --api-key-file key.txt --model small
  octavo conformance http://127.0.0.1:8080 --only framing --only stop-strings
  octavo conformance --list
  octavo conformance http://127.0.0.1:8000 --json | jq '.checks[] | select(.verdict == "fail")'
""",
)
@click.argument("url", required=False)
@click.option("--model", "-m", help="Model to ask for (default: the first of /v1/models).")
@click.option(
    "--api-key-file",
    "--key-file",
    "api_key_file",
    type=click.Path(exists=True, dir_okay=False),
    help="File with the API key: its first line, or the last word of it. (--key-file is its name "
    "of before.)",
)
@click.option("--only", multiple=True, metavar="NAME", help="Run this check or group alone.")
@click.option("--skip", multiple=True, metavar="NAME", help="Leave this check or group out.")
@click.option("--heavy", is_flag=True, help="Also those that fill the server for seconds.")
@click.option("--timeout", default=120.0, show_default=True, help="Seconds to wait for a byte.")
@click.option("--flood", default=400, show_default=True, help="Requests that fill the server.")
@click.option("--verbose", "-v", is_flag=True, help="Show the evidence of what passes too.")
@click.option("--list", "listing", is_flag=True, help="List the checks and what they demand.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--junit",
    type=OutputFile(),
    help="Write JUnit XML here too.",
)
def conformance(
    url: str | None, model: str | None, api_key_file: str | None, only: tuple[str, ...],
    skip: tuple[str, ...], heavy: bool, timeout: float, flood: int, verbose: bool,
    listing: bool, as_json: bool, junit: str | None,
) -> None:  # fmt: skip
    """Does the server at URL behave as clients of the OpenAI API expect?

    Some behaviours are the specification's words ("spec"), others are what clients have learnt to
    rely on ("practice"); the report says which. What a server does not have is "not offered", what
    this model gave no occasion to see is "unclear"; neither is a failure. Exit code 1 if a check
    fails, or the server cannot be reached.

    The files and responses that it makes there it deletes again; its one batch stays in the
    server's list, for the API cannot delete a batch.
    """
    try:
        checks = chosen(only, skip, heavy)
    except KeyError as error:
        raise click.UsageError(f"{error.args[0]!r} is no check and no group; see --list") from None
    if listing:
        _list(checks if only or skip else list(CHECKS.values()), as_json)
        return
    if url is None:
        raise click.UsageError("give the URL of a server, such as http://127.0.0.1:8000")
    wire = Wire(url, key_in(api_key_file, "api_key_file"), timeout)
    try:
        found = model or _model(wire)
    except (OSError, http.client.HTTPException) as error:
        why = unreached(wire.host, wire.port, error)
        raise click.ClickException(f"{url} cannot be reached: {why}") from error
    probe = Probe(wire, found, Settings(flood=flood))
    findings = list(_told(run(probe, checks), checks, quiet=as_json))
    if junit is not None:
        report.write_junit(junit, url, findings)
    if as_json:
        click.echo(json.dumps(report.as_dict(url, found, findings)))
    else:
        report.show(findings, everything=verbose)
        if not (only or skip or heavy):
            left = sum(one.heavy for one in CHECKS.values())
            click.echo(
                f"{left} heavy checks, which fill the server for seconds, were left out: --heavy"
            )
    sys.exit(1 if report.failures(findings) else 0)


def _list(checks: Sequence[Check], as_json: bool) -> None:
    if as_json:
        fields = ("name", "group", "basis", "heavy", "words", "source")
        click.echo(json.dumps([{name: getattr(one, name) for name in fields} for one in checks]))
        return
    for one in checks:
        heavy = ", heavy" if one.heavy else ""
        click.echo(f"{click.style(one.name, bold=True)}  ({one.group}, {one.basis}{heavy})")
        click.echo(f"    {one.words}\n    {click.style(one.source, dim=True)}")


def _model(wire: Wire) -> str:
    answer = wire.ask("GET", "/v1/models")
    models = (answer.json or {}).get("data") if isinstance(answer.json, dict) else None
    if not models:
        raise InvalidRequest(
            f"/v1/models answered {answer.status}: {short(answer.body)}; give --model"
        )
    return str(models[0]["id"])


def _told(
    findings: Iterator[Finding], checks: Sequence[Check], *, quiet: bool
) -> Iterator[Finding]:
    """Say which check runs; only where somebody watches."""
    if quiet or not sys.stderr.isatty():
        yield from findings
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description:28}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=len(checks))
        for one in checks:
            bar.update(task, description=one.name)
            yield next(findings)
            bar.advance(task)
