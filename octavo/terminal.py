"""What commands share at the terminal: loading with a bar, notes, the words of options."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

import click

from octavo.config import EngineConfig, holds_something, parse_bytes, show_bytes
from octavo.core.request import MAX_SLO, shown
from octavo.errors import ContextOverflow, InvalidRequest, in_words

if TYPE_CHECKING:
    from octavo.assembly import Assembly
    from octavo.llm import LLM

CONFIG = f"{__name__}.config"  # where a context keeps what --config named


def assembled(config: EngineConfig, quiet: bool, **more: Any) -> Assembly:
    """A model ready to run; bars on a terminal unless quiet."""
    from octavo.assembly import assemble
    from octavo.llm import loading_bar

    if quiet or not sys.stderr.isatty():
        return assemble(config, **more)
    with loading_bar() as told:
        return assemble(config, progress=told, **more)


def loaded(config: EngineConfig, quiet: bool) -> LLM:
    """An LLM, likewise."""
    from octavo.llm import LLM, MAX_WAITING

    if warning := crowded(config.threads):
        click.secho(f"warning: {warning}", fg="yellow", err=True)
    return LLM.over(assembled(config, quiet, max_waiting=MAX_WAITING))


def crowded(threads: int | None) -> str | None:
    """What is to be said where more threads are asked for than there are processors for them."""
    cores = len(os.sched_getaffinity(0))
    if threads is None or threads <= cores:
        return None
    return (
        f"--threads {threads}, but this process may use {cores} "
        f"processor{'s' * (cores > 1)}: every step waits for all threads, so this is slower than "
        f"--threads {cores}, the more so the more there are"
    )


EXPLAINED = "As `octavo serve --help` explains them."


class Knob(click.Option):
    """An option that --help shows under a section of its own. brief: by its name alone, among
    those of its section, for it is not what the command is about."""

    def __init__(
        self, *args: Any, section: str | None = None, brief: bool = False, **more: Any
    ) -> None:
        super().__init__(*args, **more)
        self.section = section
        self.brief = brief


class OurCommand(click.Command):
    """A command that writes no file over what it reads, nor over another that it writes, nor a log
    over an earlier one. It tells a wrong command line from work that failed; its own options come
    first in --help, what many commands share after them."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Options": []}
        names: list[str] = []
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if not isinstance(param, click.Option) or record is None:
                continue
            if isinstance(param, Knob) and param.brief:
                names.append(" / ".join([*param.opts, *param.secondary_opts]))
                continue
            section = getattr(param, "section", None) or "Options"
            sections.setdefault(section, []).append(record)
        for section, records in sections.items():
            with formatter.section(section):
                formatter.write_dl(records)
        if names:
            with formatter.section("And of the engine"):
                formatter.write_text(f"{', '.join(names)}. {EXPLAINED}")

    def invoke(self, ctx: click.Context) -> Any:
        """What an option cannot be is wrong with the command line, whoever finds it (exit code 2);
        what a command meets while it works is not."""
        try:
            return super().invoke(ctx)
        except InvalidRequest as error:
            options = {one.name for one in self.params if isinstance(one, click.Option)}
            if isinstance(error, ContextOverflow) or error.param not in options:
                raise
            raise click.UsageError(str(error), ctx) from error

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            rest = super().parse_args(ctx, args)
        except InvalidRequest as error:  # in the file of --config
            raise click.UsageError(str(error), ctx) from error
        named = {"config": ctx.meta.get(CONFIG), **ctx.params}  # that is read and not passed on
        given = [(one, value) for one in self.params
                 if isinstance(value := named.get(one.name or ""), str)]  # fmt: skip
        for param, path in given:
            for other, value in given:
                if isinstance(param.type, OutputFile) and other is not param and _one(path, value):
                    raise click.BadParameter(
                        f"{path} is {other.get_error_hint(ctx)} too", ctx, param
                    )
            kind = param.type
            if isinstance(kind, OutputFile) and kind.log and (size := holds_something(path)):
                held = f"{path} is there already, with {show_bytes(size)} that would be lost"
                raise click.BadParameter(f"{held}: give another name", ctx, param)
        return rest


def _one(path: str, other: str) -> bool:
    """Whether both are the same file; a terminal or /dev/null may be written twice."""
    if os.path.exists(path) and os.path.exists(other):
        return os.path.isfile(path) and os.path.samefile(path, other)
    return os.path.realpath(path) == os.path.realpath(other)  # a link may lead to what will be


class OurGroup(click.Group):
    """A group of commands that names the nearest where there is none of that name, and lists each
    with its whole first sentence."""

    command_class = OurCommand

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        found = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, one.get_short_help_str(limit=160)) for name, one in found
                                if one is not None and not one.hidden])  # fmt: skip

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            known = self.list_commands(ctx)
            near = difflib.get_close_matches(args[0], known, 3, 0.5)
            hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(known)}"
            raise click.UsageError(f"no command is called {args[0]!r}: {hint}", ctx) from error


def config_file(command: Any) -> Any:
    """The option --config FILE: a TOML file of the command's own flags; those that are given on
    the command line win."""

    def read(ctx: click.Context, _: click.Parameter, path: str | None) -> None:
        if path is not None and not ctx.resilient_parsing:
            known = {str(p.name): p for p in ctx.command.params if isinstance(p, click.Option)}
            ctx.meta[CONFIG] = path
            ctx.default_map = {**(ctx.default_map or {}), **settings(path, known)}

    text = "Take flags from this TOML file, e.g. max-queue = 64; those given here win."
    return click.option(
        "--config",
        type=click.Path(dir_okay=False),
        is_eager=True,
        expose_value=False,
        callback=read,
        help=text,
    )(command)


def settings(path: str, known: Mapping[str, click.Option]) -> dict[str, Any]:
    """The flags of a TOML file by parameter. Raises `InvalidRequest` naming what is wrong."""
    import tomllib
    from pathlib import Path

    try:
        found = tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise InvalidRequest(f"--config {path}: {in_words(error)}", "config") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidRequest(f"--config {path}: not TOML: {error}", "config") from None
    names = {name: option for name, option in known.items() if name not in ("config", "help")}
    values: dict[str, Any] = {}
    for given, value in found.items():
        name = given.replace("-", "_")
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            hint = f"; did you mean {near[0].replace('_', '-')}?" if near else ""
            raise InvalidRequest(f"{path}: unknown setting {given!r}{hint}", "config")
        if name in values:
            raise InvalidRequest(f"{path}: {given!r} is given twice", "config")
        values[name] = _setting(f"{path}: {given}", value, names[name])
    return values


def _setting(where: str, value: Any, option: click.Option) -> Any:
    """A value that the flag would take as it is: click would round 1.5 to 1, and 2 to true."""
    if option.multiple:
        given = value if isinstance(value, list) else [value]
        if not all(isinstance(item, str) for item in given):
            raise InvalidRequest(f"{where} must be text, or a list of texts", "config")
        return given
    if option.is_flag:
        wanted, kind = isinstance(value, bool), "true or false"
    elif isinstance(option.type, click.types.IntParamType):
        wanted, kind = type(value) is int, "a whole number"
    elif isinstance(option.type, click.types.FloatParamType):
        wanted, kind = type(value) in (int, float), "a number"
    else:
        wanted, kind = type(value) in (int, str), "text"
    if not wanted:
        raise InvalidRequest(f"{where} must be {kind}, got {value!r}", "config")
    return value


def note(text: str, quiet: bool = False) -> None:
    """A word beside the output, on stderr, dim."""
    if not quiet:
        click.secho(text, dim=True, err=True)


@contextlib.contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr once two seconds have passed, on a terminal."""
    if not sys.stderr.isatty():
        yield lambda *_: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    started, bar, task = time.monotonic(), None, None
    try:

        def told(done: int, total: int) -> None:
            nonlocal bar, task
            if bar is None and time.monotonic() - started > 2.0:
                bar = Progress(*columns, console=Console(stderr=True), transient=True)
                task = bar.add_task(what, total=total)
                bar.start()
            if bar is not None and task is not None:
                bar.update(task, completed=done)

        yield told
    finally:
        if bar is not None:
            bar.stop()


def counted(_: click.Context, __: click.Parameter, value: str) -> tuple[int, ...]:
    """An option's callback: whole numbers from 1, separated by commas."""
    try:
        numbers = tuple(int(word) for word in value.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise click.BadParameter(f"give whole numbers from 1, such as 1,4,16, not {shown(value)}")
    return numbers


def numbers(flag: str, default: str, text: str) -> Callable[[Any], Any]:
    """A click option that takes whole numbers, such as 1,4,16."""
    return click.option(flag, default=default, callback=counted, show_default=True, help=text)


def as_json(command: Any) -> Any:
    """The option --json."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


class OutputFile(click.Path):
    """A file to be written. Where that cannot be is said at once, not after minutes of work. log:
    it is what a run leaves behind, and does not take the place of another's."""

    def __init__(self, log: bool = False) -> None:
        super().__init__(dir_okay=False, writable=True)
        self.log = log

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        path = os.fsdecode(super().convert(value, param, ctx))
        if not path:
            self.fail("an empty name is no file's", param, ctx)
        if path == "-":
            self.fail("- is no file; /dev/stdout is one", param, ctx)
        at = os.path.realpath(path)  # where a link to no file yet has it made
        folder = os.path.dirname(path) or "."
        if not os.path.isdir(folder):
            self.fail(f"{path}: there is no folder {folder}", param, ctx)
        if not os.path.exists(at):
            try:
                with open(at, "xb"):
                    pass
                os.remove(at)
            except OSError as error:
                self.fail(f"{path} cannot be written: {in_words(error)}", param, ctx)
        return path


class Milliseconds(click.ParamType):  # type: ignore[type-arg]
    """How soon something is wanted."""

    name = "ms"

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        try:
            found = float(value)
        except ValueError:
            found = 0.0
        if not 0.0 < found <= MAX_SLO * 1e3:  # a NaN is not
            self.fail(f"{value} is no time: give milliseconds above 0, at most a day", param, ctx)
        return found


class Size(click.ParamType):  # type: ignore[type-arg]
    """Bytes, in whatever unit."""

    name = "size"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        try:
            return parse_bytes(value)
        except InvalidRequest as error:
            self.fail(str(error), param, ctx)


def options(
    cls: type,
    *,
    skip: tuple[str, ...] = (),
    chats: bool = False,
    brief: bool = False,
    **defaults: Any,
) -> Callable[[Any], Any]:
    """A decorator that adds one click option per field of `cls`, in the fields' order. skip: those
    that change nothing for this command. chats: whether it has a use for those that are about
    chats. brief: --help names those that have no letter, and explains them elsewhere. defaults: of
    this command, where they are others than the fields' own."""

    def add(command: Any) -> Any:
        sections = _sections(cls)
        for item in reversed(dataclasses.fields(cls)):
            hint, meta = _annotation(cls, item.name), item.metadata
            if item.name in skip or (meta.get("chats") and not chats):
                continue
            flag = "--" + item.name.replace("_", "-")
            default = defaults.get(item.name, item.default)
            extra: dict[str, Any] = {"help": meta["help"], "default": default}
            extra |= {"cls": Knob, "section": sections[item.name]}
            extra["brief"] = brief and "short" not in meta and item.name not in defaults
            if "metavar" in meta:
                extra["metavar"] = meta["metavar"]
            extra["show_default"] = default not in (None, ())
            if hint is bool:
                flag = f"{flag}/--no-{flag[2:]}"
            elif meta.get("size"):
                extra["type"] = Size()
                if default is not None:
                    extra["default"] = show_bytes(default).replace(".00 ", "")
            elif meta.get("output"):
                extra["type"] = OutputFile(log=meta["output"] == "log")
            elif get_origin(hint) is Literal:
                extra["type"] = click.Choice(get_args(hint))
            elif get_origin(hint) is tuple:
                extra |= {"multiple": True, "type": get_args(hint)[0]}
            else:
                extra["type"] = hint
            names = (flag, meta["short"]) if "short" in meta else (flag,)
            command = click.option(*names, **extra)(command)
        return command

    return add


def _sections(cls: type) -> dict[str, str | None]:
    """The section of each field: its own, or that of the field before it."""
    found: dict[str, str | None] = {}
    section = None
    for item in dataclasses.fields(cls):
        section = found[item.name] = item.metadata.get("section", section)
    return found


def _annotation(cls: type, name: str) -> Any:
    """A field's type with `| None` taken off."""
    hint = get_type_hints(cls)[name]
    if isinstance(hint, UnionType):
        hint = next(arg for arg in get_args(hint) if arg is not type(None))
    return hint


def unreached(host: str, port: int, error: Exception) -> str:
    """Why there is no server, and what can be done about it."""
    if isinstance(error, ConnectionRefusedError):
        return f"nobody listens there; `octavo serve --port {port}` starts a server"
    if isinstance(error, socket.gaierror):
        return f"no host is called {host}"
    return in_words(error) or type(error).__name__


def plot_option(command: Any) -> Any:
    """The option --plot FILE."""
    text = "Draw it into this file (PNG, SVG or PDF, by its name); needs matplotlib."
    return click.option("--plot", type=OutputFile(), help=text)(command)


def refuse_given(flags: Iterable[str], why: str) -> None:
    """Refuse those of the running command's flags that somebody gave: nothing given is ignored.
    flags: names of parameters. Raises `click.UsageError`."""
    ctx = click.get_current_context()
    given = [
        max(p.opts, key=len)
        for p in ctx.command.params
        if p.name in set(flags)
        and ctx.get_parameter_source(str(p.name)) is not click.core.ParameterSource.DEFAULT
    ]
    if given:
        raise click.UsageError(f"{why}: leave out {', '.join(given)}", ctx)


def echo_json(report: Any) -> None:
    click.echo(json.dumps(report))
