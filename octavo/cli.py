"""The command line: run, chat, serve, pull, bench, lab, doctor; and the simulator's commands.

Flags come from the fields of `octavo.config`; what a command needs is imported when it runs, so
that `--help` answers at once. Errors that Octavo raises on purpose are one line. Exit code 2: the
command line is wrong; 1: what it asks for failed; 130: Ctrl-C ended it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import json
import logging
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import IO, TYPE_CHECKING, Any

import click

from octavo.benchmark.commands import bench
from octavo.config import (
    ONE_ANSWER,
    ONE_AT_A_TIME,
    EngineConfig,
    ServerConfig,
    TalkConfig,
    holds_something,
    show_bytes,
    take,
)
from octavo.errors import InvalidRequest, OctavoError, in_words
from octavo.lab.commands import lab
from octavo.tables import beside
from octavo.tables import plain_table as _table
from octavo.terminal import OurGroup, OutputFile, crowded, options, refuse_given
from octavo.terminal import assembled as _assemble
from octavo.terminal import config_file as _config_file
from octavo.terminal import loaded as _load
from octavo.terminal import note as _note

if TYPE_CHECKING:
    from octavo.assembly import Assembly
    from octavo.core.request import SamplingParams
    from octavo.llm import LLM, Piece
    from octavo.models.registry import NamedModel

EXAMPLES = """\b
Examples:
  octavo run "Write a haiku about the sea"
  echo "Summarise this: ..." | octavo run -
  octavo chat --system "You are a pirate"
  octavo serve --port 8000 --kv-memory 1GiB
  octavo bench offline --concurrency 1,16
  octavo lab flash
  octavo roofline llama-3.1-8b --hardware h100,l4
  octavo doctor
"""

INTERRUPTED = 130
NO_SYSTEM = "--system goes into a chat template"
MOST = 1024  # tokens of an answer of which nobody said how long it may be


class _Group(OurGroup):
    """Turns our errors into one line, whatever command raised them."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except OctavoError as error:
            raise click.ClickException(str(error)) from error
        except KeyboardInterrupt:
            click.echo("Interrupted.", err=True)
            ctx.exit(INTERRUPTED)
        except BrokenPipeError:
            sys.stderr.close()  # the reader of our output left: not an error
            ctx.exit(0)
        except MemoryError:
            raise click.ClickException("not enough memory for what was asked") from None
        except OSError as error:  # a full disk under our output
            named = f"{error.filename}: " if error.filename else ""
            raise click.ClickException(named + in_words(error)) from error


def _version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        import octavo

        click.echo(f"octavo {octavo.__version__}")
        ctx.exit()


@click.group(
    cls=_Group,
    epilog=EXAMPLES,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_version,
    help="Print the version.",
)
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Run and serve language models on this machine.

    Start with `octavo run "What is photosynthesis?"`: it fetches a small model (94 MiB) the first
    time.

    Exit codes: 1 where something failed, 2 where the command line is wrong, 130 after Ctrl-C.
    """
    if os.environ.get("NO_COLOR"):
        ctx.color = False


class _Elsewhere(click.Command):
    """A command that lives beside what it drives, and is imported when it is called."""

    def __init__(self, name: str, module: str, short_help: str) -> None:
        super().__init__(name, short_help=short_help)
        self.module = module

    def make_context(self, info_name: str | None, *args: Any, **more: Any) -> click.Context:
        command = vars(importlib.import_module(self.module))[str(self.name)]
        assert isinstance(command, click.Command)
        return command.make_context(info_name, *args, **more)


for _name, _module, _line in (
    ("conformance", "octavo.conformance.commands", "Does a server behave as clients expect?"),
    ("plan", "octavo.sim.cli", "The cheapest fleet that serves a trace within objectives."),
    ("roofline", "octavo.sim.cli", "What a model can do on a machine, without its weights."),
    ("simulate", "octavo.sim.cli", "Replay a trace in virtual time, over the engine's scheduler."),
):
    cli.add_command(_Elsewhere(_name, _module, _line))


def main() -> None:
    """Entry point of the `octavo` script."""
    # A stream that the caller closed is None in Python: reading gives nothing, writing is lost.
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    cli(prog_name="octavo")


# ---- run and chat ----


@cli.command(
    epilog="""\b
Examples:
  octavo run "What is photosynthesis?"
  octavo run -m ./model.gguf --temperature 0 "Once upon a time" --raw
  git log -5 | octavo run "Say in one sentence what was done:" -
  octavo run --json --seed 7 "Name three rivers" | jq .text
"""
)
@click.argument("prompt", nargs=-1, required=True)
@options(TalkConfig)
@options(EngineConfig, chats=True, skip=ONE_ANSWER)
@click.option("--raw", is_flag=True, help="Continue the text as it is, without chat template.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end.")
@click.option("--quiet", "-q", is_flag=True, help="Print nothing but the text.")
def run(prompt: tuple[str, ...], raw: bool, as_json: bool, quiet: bool, **flags: Any) -> None:
    """Answer PROMPT, streaming to stdout. "-" reads standard input."""
    engine, (talk, wanted) = take(EngineConfig, flags), _talk(flags)
    text = _utf8(" ".join(sys.stdin.read() if word == "-" else word for word in prompt))
    if not (text if raw else text.strip()):
        piped = "standard input gave no text" if "-" in prompt else 'give text, or "-" and a pipe'
        raise click.ClickException(f"the prompt is empty: {piped}")
    if raw and talk.system:
        raise click.UsageError(f"{NO_SYSTEM}, and --raw uses none: leave one of them out")
    if raw and engine.chat_template:
        raise click.UsageError("--raw uses no chat template: leave it or --chat-template out")
    start = time.monotonic()
    llm = _load(engine, quiet)
    if llm.assembly.template is None and not raw:
        if talk.system:
            raise click.ClickException(f"{NO_SYSTEM}, and this model has none")
        _note("this model has no chat template: the text is continued as it is", quiet)
    if raw or llm.assembly.template is None:
        ids = llm.tokenizer.encode(text)
    else:
        ids = llm.chat_ids(_messages(talk, text))
    params = _fitting(wanted, llm, len(ids))
    answer = _Answer(len(ids), start, by_room=params.max_tokens != (wanted.max_tokens or MOST))
    _watch(answer, llm.stream([ids], params), echo=not as_json)
    if as_json:
        click.echo(json.dumps(answer.report(llm)))
    else:
        click.echo()
        _note(answer.summary(), quiet)
    if answer.finish == "abort":
        sys.exit(INTERRUPTED)


def _utf8(text: str) -> str:
    """Refuses bytes that are no UTF-8, which Python reads as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise click.ClickException("the prompt is not valid UTF-8") from None
    return text


def _messages(talk: TalkConfig, text: str) -> list[dict[str, str]]:
    system = [{"role": "system", "content": talk.system}] if talk.system else []
    return [*system, {"role": "user", "content": text}]


def _talk(flags: dict[str, Any]) -> tuple[TalkConfig, SamplingParams]:
    """How to talk, and what an engine takes of that; what is wrong in it is told by its flag,
    before a model is loaded."""
    from octavo.core.request import SamplingParams

    talk = take(TalkConfig, flags)
    names = [item.name for item in dataclasses.fields(talk) if item.name != "system"]
    try:
        return talk, SamplingParams(**{name: getattr(talk, name) for name in names})
    except InvalidRequest as error:
        name = error.param or ""
        error.rename(f"--{name.replace('_', '-')}")
        raise InvalidRequest(str(error), name) from None


def _fitting(params: SamplingParams, llm: LLM, num_prompt: int) -> SamplingParams:
    """Without a --max-tokens there are as many as fit, at most MOST."""
    if params.max_tokens is not None:
        return params
    # A prompt that leaves no room is refused for that.
    room = max(1, min(MOST, llm.assembly.door.room - num_prompt))
    return dataclasses.replace(params, max_tokens=room)


class _Answer:
    """One answer, and its times in seconds since `start`. by_room: the context's end is its own."""

    def __init__(self, num_prompt: int, start: float, by_room: bool = False) -> None:
        self.num_prompt = num_prompt
        self.by_room = by_room
        self.start = start
        self.asked = time.monotonic()
        self.first = 0.0
        self.last = 0.0
        self.texts: list[str] = []
        self.num_tokens = 0
        self.num_drafted = 0
        self.num_accepted = 0
        self.finish = "abort"

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def take(self, piece: Piece) -> None:
        self.last = time.monotonic()
        self.first = self.first or self.last
        self.texts.append(piece.text)
        self.num_tokens += len(piece.token_ids)
        self.num_drafted, self.num_accepted = piece.num_drafted, piece.num_accepted
        if piece.finish_reason is not None:
            self.finish = piece.finish_reason
        if piece.error is not None:
            raise click.ClickException(piece.error)

    @property
    def tokens_per_s(self) -> float:
        return max(self.num_tokens - 1, 0) / max(self.last - self.first, 1e-9)

    def summary(self) -> str:
        wait = self.first - self.asked
        limit = "the end of the context" if self.by_room else "--max-tokens"
        why = f", ended by {limit}" if self.finish == "length" else ""
        if self.num_accepted:
            why = f", {self.num_accepted} of {self.num_drafted} guesses held{why}"
        return (
            f"{self.num_prompt} + {self.num_tokens} tokens, first after {wait:.2f} s, "
            f"then {self.tokens_per_s:.0f} tok/s{why}"
        )

    def report(self, llm: LLM) -> dict[str, Any]:
        return {
            "model": llm.assembly.name,
            "text": self.text,
            "finish_reason": self.finish,
            "prompt_tokens": self.num_prompt,
            "completion_tokens": self.num_tokens,
            "drafted_tokens": self.num_drafted,
            "accepted_tokens": self.num_accepted,
            "load_s": round(self.asked - self.start, 4),
            "ttft_s": round(self.first - self.asked, 4),
            "tokens_per_s": round(self.tokens_per_s, 2),
        }


def _watch(answer: _Answer, pieces: Iterator[Piece], *, echo: bool) -> None:
    """Read the pieces to the end, or to Ctrl-C, which ends the answer and nothing else."""
    try:
        for piece in pieces:
            answer.take(piece)
            if echo:
                sys.stdout.write(piece.text)
                sys.stdout.flush()
    except KeyboardInterrupt:
        answer.finish = "abort"
        pieces.close()  # type: ignore[attr-defined]


HELP = """\
/system TEXT   set the system message and start over    /reset  start over
/undo          take back the last exchange              /stats  speed of the last answer
/history       what was said                            /exit   leave (or /quit, Ctrl-D)
Ctrl-C ends an answer. A line that ends in \\ goes on in the next."""


@cli.command(
    epilog="""\b
Examples:
  octavo chat
  octavo chat -m qwen2.5-coder-0.5b --system "Answer in one sentence"
"""
)
@options(TalkConfig)
@options(EngineConfig, chats=True, skip=ONE_AT_A_TIME)
def chat(**flags: Any) -> None:
    """Talk with a model. /help lists the commands."""
    engine, (talk, wanted) = take(EngineConfig, flags), _talk(flags)
    llm = _load(engine, False)
    if llm.assembly.template is None:
        raise click.ClickException(
            f"{llm.assembly.name} has no chat template; try: octavo run --raw"
        )
    _note(f"{llm.assembly.name}. /help lists the commands, Ctrl-D leaves.", False)
    with _LineEditor():
        _Talk(llm, talk, wanted).loop()


class _Talk:
    """A conversation at the terminal."""

    def __init__(self, llm: LLM, talk: TalkConfig, wanted: SamplingParams) -> None:
        self.llm = llm
        self.wanted = wanted
        self.system = talk.system
        self.turns: list[dict[str, str]] = []
        self.last: _Answer | None = None

    @property
    def messages(self) -> list[dict[str, str]]:
        head = [{"role": "system", "content": self.system}] if self.system else []
        return head + self.turns

    def loop(self) -> None:
        while True:
            try:
                line = _read_line()
            except KeyboardInterrupt:
                click.echo()
                continue
            except EOFError:
                click.echo()
                return
            if line.startswith("/"):
                if not self.command(*line[1:].split(maxsplit=1)):
                    return
            elif line.strip():
                self.say(line)

    def say(self, text: str) -> None:
        """One exchange. A question that cannot be asked is taken back."""
        self.turns.append({"role": "user", "content": text})
        try:
            ids = self.llm.chat_ids(self.messages)
            params = _fitting(self.wanted, self.llm, len(ids))
            by_room = params.max_tokens != (self.wanted.max_tokens or MOST)
            answer = _Answer(len(ids), time.monotonic(), by_room)
            _watch(answer, self.llm.stream(ids, params), echo=True)
        except OctavoError as error:
            self.turns.pop()
            _note(str(error), False)
            return
        click.echo()
        self.turns.append({"role": "assistant", "content": answer.text})
        self.last = answer

    def command(self, name: str = "", rest: str = "") -> bool:
        """Do a slash command; false means to leave."""
        if name in ("exit", "quit"):
            return False
        if name == "reset":
            self.turns.clear()
        elif name == "system":
            self.system = rest or None
            self.turns.clear()
        elif name == "undo":
            del self.turns[-2:]
        elif name == "stats":
            _note(self.last.summary() if self.last else "nothing was said yet", False)
        elif name == "history":
            for turn in self.messages:
                click.echo(f"{turn['role']}: {turn['content']}")
        else:
            known = name in ("help", "")
            click.echo(HELP if known else f"no such command: /{name}\n{HELP}", err=True)
        return True


def _read_line() -> str:
    first, more = ("> ", ". ") if sys.stdin.isatty() else ("", "")
    lines = [input(first)]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(input(more))
    return "\n".join(lines)


class _LineEditor:
    """readline with a history that outlives the session, where there is readline."""

    def __enter__(self) -> None:
        try:
            import readline
        except ImportError:
            self.save: Callable[[], None] = lambda: None
            return
        from octavo.models.hub import cache_directory

        path = cache_directory() / "history"
        with contextlib.suppress(OSError):
            readline.read_history_file(path)
        readline.set_history_length(1000)

        def save() -> None:
            with contextlib.suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
                readline.write_history_file(path)
                path.chmod(0o600)

        self.save = save

    def __exit__(self, *_: object) -> None:
        self.save()


# ---- serve ----


@cli.command(
    epilog="""\b
Examples:
  octavo serve
  octavo serve -m qwen2.5-coder-0.5b --port 9000 --kv-memory 2GiB
  octavo serve --host 0.0.0.0 --api-key-file keys.txt
  octavo serve -m gemma-3-270m --chat-template chat.jinja
  octavo serve --policy slo --slo ttft=2,tpot=0.05
  octavo serve --config octavo.toml    its lines are flags: port = 9000
  octavo serve --batch-dir ./batches   and then: client.batches.create(...)
  octavo serve --record run.jsonl      and then: octavo simulate run.jsonl --check
"""
)
@options(EngineConfig, chats=True)
@options(ServerConfig)
@click.option(
    "--record",
    type=OutputFile(log=True),
    help="Write every request and step into this new file, for `octavo simulate`; it holds "
    "prompts. Speculation is off then.",
)
@_config_file
def serve(record: str | None, **flags: Any) -> None:
    """Serve a model over HTTP, in the shape of the OpenAI API."""
    from octavo.server import logs, memory

    engine, server = take(EngineConfig, flags), take(ServerConfig, flags)
    with logs.written(server.log_format, server.log_level):
        memory.steady()
        _serve(engine, server, record)


def _serve(engine: EngineConfig, server: ServerConfig, record: str | None) -> None:
    """From the keys to the last word."""
    import asyncio

    from octavo.server import certificate, logs, page
    from octavo.server import serve as serving
    from octavo.server.auth import Keys, exposed
    from octavo.server.deadlines import Deadlines

    if warning := crowded(engine.threads):
        logging.getLogger("octavo").warning(warning)
    # Keys, certificate, port before the model: what is wrong is known before a download.
    Deadlines.read(engine.policy in ("slo", "fair-slo"), server.slo)
    if record is not None and server.batch_dir is not None:
        raise click.UsageError("--record and --batch-dir: batches are not recorded; give one")
    context = certificate.context(server)
    keys, bound = Keys.read(server.api_key_file), serving.bind(server)
    if server.api_key_file is not None and exposed(server.api_key_file):
        others = "%s: others on this machine may read these API keys; chmod 600 keeps them yours"
        logging.getLogger("octavo").warning(others, server.api_key_file)
    start = time.monotonic()
    machine = server.log_format == "json"
    if record is not None and engine.speculation != "off":
        _told(machine, "note", "a recorded run does not speculate: guesses depend on the clock")
        engine = dataclasses.replace(engine, speculation="off")
    waiting = max(1024, 2 * server.max_inputs)  # a request of many texts must fit
    offline = server.batch_dir is not None
    made = _assemble(engine, machine, weights=keys.weights, offline=offline, max_waiting=waiting)
    recording = None if record is None else _Recording(record)
    if recording is not None:
        from octavo.sim.recording import Recorder

        made = dataclasses.replace(made, engine=Recorder(made.engine, recording.write, made.name))
    app = serving.application(made, server, keys)
    app.certificate = context

    def ready() -> None:
        if recording is not None:
            recording.begin()
        address = bound.getsockname()
        url = f"http{'s' if server.tls_cert else ''}://{_host(address[0])}:{address[1]}"
        seconds = time.monotonic() - start
        if machine:
            found = {"url": url, "model": app.service.served.name, "seconds": round(seconds, 3)}
            found["page"] = page.built()
            logs.say("serving", f"at {url}/v1", found | {"facts": dict(_facts(made, app))})
        else:
            _announce(made, app, url, seconds)

    async def live() -> None:
        if server.api_key_file or server.tls_cert:  # else it means that the terminal is gone
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, app.reload)
        await serving.serve(app, bound, serving.Shutdown().on_signals(), ready)

    try:
        asyncio.run(live())
    finally:
        if recording is not None:
            recording.close()
    counted = made.engine.snapshot()
    ended = {name: int(counted[name]) for name in ("requests", "output_tokens")}
    said = f"{ended['requests']} requests, {ended['output_tokens']} tokens written."
    _told(machine, "stopped", said, **ended)


class _Recording:
    """The file of --record, which is made only once the server serves. Whoever is served goes on
    where the disk is full: the recording ends, and the log says so."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.Lock()  # the engine's thread may write while it is begun
        self._file: IO[str] | None = io.StringIO()

    def write(self, line: str) -> None:
        with self._lock, self._as_far_as_it_goes():
            if self._file is not None:
                self._file.write(line)

    @contextlib.contextmanager
    def _as_far_as_it_goes(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            file, self._file = self._file, None
            logging.getLogger("octavo").error("%s ends here: %s", self._path, in_words(error))
            if file is not None:
                with contextlib.suppress(OSError):
                    file.close()

    def begin(self) -> None:
        """Write into the file, and first what there is already. Raises `OSError`, and
        `InvalidRequest` where another has written there since the command line was read."""
        with self._lock:
            if holds_something(self._path):
                raise InvalidRequest(f"--record {self._path}: another server has begun it")
            assert isinstance(self._file, io.StringIO), "begun once"
            said, self._file = self._file.getvalue(), open(self._path, "w")  # noqa: SIM115
            with self._as_far_as_it_goes():
                self._file.write(said)

    def close(self) -> None:
        with self._lock, self._as_far_as_it_goes():
            if self._file is not None:
                self._file.close()


def _told(machine: bool, event: str, said: str, **fields: int) -> None:
    """A word of the server about itself: a line of the log for machines, else a note."""
    if machine:
        from octavo.server import logs

        logs.say(event, said, fields)
    else:
        _note(f"Stopped. {said}" if event == "stopped" else said)


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _facts(made: Assembly, app: Any) -> list[tuple[str, str]]:
    """What is served and how it was sized."""
    server = app.config
    keys = "API keys needed" if app.keys else "no API keys"
    door = f"{server.max_queue} requests at once, {keys}, {server.drain:g} s to drain"
    return [*made.facts, ("door", door)]


def _announce(made: Assembly, app: Any, url: str, seconds: float) -> None:
    """Say what is served, how it was sized, where, and a line that works."""
    from octavo.server import page

    facts = _facts(made, app)
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        click.echo(f"  {click.style(name.ljust(width), dim=True)}  {value}", err=True)
    name = app.service.served.name
    key = ' -H "Authorization: Bearer $KEY"' if app.keys else ""
    if made.template is not None:
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "Name three fruits."}]}
        path = "/v1/chat/completions"
    else:
        body, path = {"prompt": "The sea is"}, "/v1/completions"
    # At OpenAI's default, temperature 1, a small model may go on to the end of the context.
    shown = json.dumps({"model": name} | body | {"temperature": 0.2, "max_tokens": 100})
    here = f"{click.style(f'{url}/', bold=True)}    a chat, and the engine as it runs"
    click.echo(f"\nServing {name} after {seconds:.1f} s")
    click.echo(f"  page  {here if page.built() else page.HOW}")
    click.echo(f"  API   {click.style(f'{url}/v1', bold=True)}  for example:\n")
    quoted = shlex.quote(shown)
    click.echo(f"  curl {url}{path} -H 'content-type: application/json'{key} -d {quoted}\n")
    click.echo("Ctrl-C drains and stops; twice stops at once.", err=True)
    sys.stdout.flush()


# ---- pull ----


@cli.command(
    epilog="""\b
Examples:
  octavo pull                      lists the named models
  octavo pull smollm2-135m
  octavo pull smollm2-135m --file ~/Downloads/wheels
"""
)
@click.argument("name", required=False)
@click.option("--file", help="Take the bytes from this file or folder, not from the network.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def pull(name: str | None, file: str | None, as_json: bool) -> None:
    """Fetch a model into the cache; without NAME, list the named models."""
    from octavo.llm import loading_bar
    from octavo.models import hub
    from octavo.models.registry import MODELS

    if name is None:
        refuse_given(("file",), "without a NAME the named models are listed")
        _list_models([(model, hub.cached(model)) for model in MODELS.values()], as_json)
        return
    with loading_bar() as told:
        path = hub.resolve(name, file=file, progress=lambda done, all: told("fetch", done, all))
    click.echo(json.dumps({"model": name, "path": str(path)}) if as_json else str(path))


def _list_models(models: list[tuple[NamedModel, Any]], as_json: bool) -> None:
    if as_json:
        listed = [
            {"name": m.name, "title": m.title, "bytes": m.size, "licence": m.licence,
             "path": None if path is None else str(path)}
            for m, path in models
        ]  # fmt: skip
        click.echo(json.dumps(listed))
        return
    rows = [
        [m.name, m.title, show_bytes(m.size), m.licence, "here" if path else ""]
        for m, path in models
    ]
    _table(["name", "model", "file", "licence", "cached"], rows)
    click.echo("\nAlso: a .gguf file, a Hugging Face directory, or org/name on the hub.")


# ---- bench and doctor ----

cli.add_command(bench)
cli.add_command(lab)


@cli.command(
    epilog="""\b
Examples:
  octavo doctor
  octavo doctor -m qwen2.5-coder-1.5b --json
"""
)
@click.option(
    "--model",
    "-m",
    default=EngineConfig().model,
    show_default=True,
    help="Model to look at; it is not fetched.",
)
@click.option("--seconds", default=2.0, help="Time to measure.", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(model: str, seconds: float, as_json: bool) -> None:
    """Examine this machine. Exit code 1 if something is wrong."""
    from octavo import doctor as examination

    report = examination.examine(model, seconds)
    if as_json:
        click.echo(json.dumps(report.as_dict()))
    else:
        for heading, rows in report.sections:
            click.secho(heading, bold=True)
            width = max(len(name) for name, _ in rows)
            for name, value in rows:
                beside(f"  {name.ljust(width)}", width + 2, value)
        for note in report.notes:
            click.secho(f"note: {note}", fg="yellow")
        for wrong in report.wrong:
            click.secho(f"wrong: {wrong}", fg="red")
        if not report.wrong:
            click.secho("All is well.", fg="green")
    sys.exit(1 if report.wrong else 0)


if __name__ == "__main__":
    main()
