"""The commands of `octavo lab`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from octavo.config import SCHEDULING, EngineConfig, take
from octavo.terminal import (
    OurGroup,
    as_json,
    crowded,
    loaded,
    note,
    numbers,
    options,
    plot_option,
)

if TYPE_CHECKING:
    from octavo.assembly import Assembly
    from octavo.lab.finding import Finding
    from octavo.llm import LLM

Watch = Callable[[str], None]
Plan = TypeVar("Plan")
Report = TypeVar("Report")


def multiples(_: click.Context, __: click.Parameter, value: str) -> tuple[float, ...]:
    """An option's callback: numbers above 0, separated by commas, in rising order."""
    try:
        found = tuple(sorted(float(word) for word in value.split(",")))
    except ValueError:
        found = ()
    if not found or not 0 < found[0] <= found[-1] < 1e6:
        raise click.BadParameter(f"give numbers above 0, such as 0.5,1,2, not {value!r}")
    return found


def repeats(command: Any) -> Any:
    """The option --repeats."""
    return click.option(
        "--repeats", default=3, type=click.IntRange(min=1), show_default=True,
        help="Runs of each, in turn; medians and the spread are shown.",
    )(command)  # fmt: skip


def _on_engine(
    measure: Callable[[Assembly, Plan, Watch], Report],
    finding: Callable[[Report], Finding],
    plan: Plan,
) -> Callable[[LLM, Watch], Finding]:
    """An experiment that needs the assembled engine and its plan alone."""
    return lambda llm, watch: finding(measure(llm.assembly, plan, watch))


def _perform(
    experiment: Callable[[LLM, Watch], Finding],
    flags: dict[str, Any],
    plot: str | None,
    quiet: bool,
    **changes: Any,
) -> None:
    """Load the model of `flags` (with some changes that the experiment needs) and experiment."""
    from octavo.lab.finding import conduct

    config = dataclasses.replace(take(EngineConfig, flags), **changes)
    conduct(lambda: experiment(loaded(config, quiet), lambda what: note(what, quiet)), plot, quiet)


@click.group(
    cls=OurGroup,
    epilog="""\b
Examples:
  octavo lab flash --plot flash.png
  octavo lab phases -m qwen2.5-coder-0.5b
  octavo lab batching --plot batching.png
  octavo lab flash --json | jq '.native[] | {tokens, naive: .naive.seconds, ours: .flash.seconds}'
""",
)
def lab() -> None:
    """The field's claims as experiments on this machine, each in under two minutes.

    Each prints a table and says what it shows; --plot draws it, --json prints the values.
    """


@lab.command(
    epilog="""\b
Examples:
  octavo lab flash
  octavo lab flash --tokens 1024,4096 --threads 1
  octavo lab flash --plot flash.png
"""
)
@numbers("--tokens", "256,512,1024,2048,4096,8192,16384", "Tokens to attend over.")
@click.option("--threads", type=click.IntRange(1, 4096), help="Threads (default: one per core).")
@click.option("--isa", default="auto", show_default=True, help="amx, avx512, avx2, portable, auto.")
@plot_option
@as_json
def flash(
    tokens: tuple[int, ...], threads: int | None, isa: str, plot: str | None, as_json: bool
) -> None:
    """FlashAttention's claim: attention without writing its scores to memory.

    Naive attention against ours: time, peak memory, bytes moved, and the misses of a small
    simulated cache (with valgrind and a C++ compiler). 16384 tokens need 1.6 GB.
    """
    from octavo.lab import flash as room
    from octavo.lab.finding import conduct
    from octavo.runtime.cpu import usable_isa

    if warning := crowded(threads):
        click.secho(f"warning: {warning}", fg="yellow", err=True)
    plan = room.Plan(tokens=tokens, threads=threads, isa=usable_isa(isa))
    conduct(
        lambda: room.finding(room.measure(plan, lambda what: note(what, as_json))), plot, as_json
    )


@lab.command(
    epilog="""\b
Examples:
  octavo lab phases
  octavo lab phases -m qwen2.5-coder-0.5b --plot phases.png
"""
)
@options(EngineConfig, brief=True, skip=SCHEDULING)
@numbers("--tokens", "4,16,64,256,512", "Tokens of a prefill.")
@numbers("--batch", "1,2,4,8,16,32,64", "Sequences that decode at once.")
@click.option("--context", default=512, show_default=True, help="Tokens each has in the cache.")
@plot_option
@as_json
def phases(
    tokens: tuple[int, ...], batch: tuple[int, ...], context: int, plot: str | None,
    as_json: bool, **flags: Any,
) -> None:  # fmt: skip
    """Does prefill wait for arithmetic, decode for memory, and does a batch move the line?

    Whole steps of a real model on this machine's roofline: intensity, which roof that is under, how
    near the step comes to it, and so what it waits for.
    """
    from octavo.benchmark import instrument
    from octavo.lab import phases as room
    from octavo.lab.finding import conduct

    config, plan = take(EngineConfig, flags), room.Plan(tokens, batch, context)
    conduct(
        lambda: room.finding(instrument.use(room.measure, plan, config, as_json)), plot, as_json
    )


@lab.command(
    epilog="""\b
Examples:
  octavo lab batching --plot batching.png
  octavo lab batching --rates 1,2,4,8 --requests 48 --rows 32
"""
)
@options(EngineConfig, brief=True, skip=SCHEDULING)
@click.option("--rates", default="0.7,1.5,3,6", show_default=True, callback=multiples,
              help="Arrivals, in multiples of what one after another can serve.")  # fmt: skip
@click.option("--requests", default=28, show_default=True, help="Requests of a run.")
@click.option("--rows", default=8, show_default=True, help="Requests in a batch at most.")
@repeats
@plot_option
@as_json
def batching(
    rates: tuple[float, ...], requests: int, rows: int, repeats: int, plot: str | None,
    as_json: bool, **flags: Any,
) -> None:  # fmt: skip
    """None, static and continuous batching: tokens a second and latency, over arrival rates."""
    from octavo.ceilings import measure_ceilings
    from octavo.lab import batching as room

    plan = room.Plan(rates, requests, rows, repeats)

    def experiment(llm: LLM, watch: Watch) -> Finding:
        ceilings = measure_ceilings(llm.config.threads, llm.config.isa)
        return room.finding(room.measure(llm.assembly, plan, ceilings, watch))

    _perform(experiment, flags, plot, as_json)


@lab.command(
    epilog="""\b
Examples:
  octavo lab paging --plot paging.png
  octavo lab paging --pool 8192 --context 4096
"""
)
@options(EngineConfig, brief=True, skip=SCHEDULING)
@click.option("--pool", default=4096, show_default=True, help="Tokens of KV memory.")
@click.option("--context", default=2048, show_default=True,
              help="Tokens that a contiguous cache reserves for each.")  # fmt: skip
@click.option("--requests", default=40, show_default=True, help="Requests of the burst.")
@repeats
@plot_option
@as_json
def paging(
    pool: int, context: int, requests: int, repeats: int, plot: str | None, as_json: bool,
    **flags: Any,
) -> None:  # fmt: skip
    """How many requests fit into the same KV memory: contiguous reservation against blocks."""
    from octavo.lab import paging as room

    plan = room.Plan(pool, context, requests, repeats)
    _perform(_on_engine(room.measure, room.finding, plan), flags, plot, as_json)


@lab.command(
    epilog="""\b
Examples:
  octavo lab prefix --plot prefix.png
  octavo lab prefix --system 2048 --requests 32
"""
)
@options(EngineConfig, brief=True, skip=SCHEDULING)
@click.option("--system", default=512, show_default=True, help="Tokens of the system prompt.")
@click.option("--own", default=32, show_default=True, help="Tokens of each request after it.")
@click.option("--requests", default=16, show_default=True, help="Requests of the burst.")
@repeats
@plot_option
@as_json
def prefix(
    system: int, own: int, requests: int, repeats: int, plot: str | None, as_json: bool,
    **flags: Any,
) -> None:  # fmt: skip
    """A shared system prompt, with the prefix cache and without; hit rate by policy and pool."""
    from octavo.lab import prefix as room

    plan = room.Plan(system=system, own=own, requests=requests, repeats=repeats)
    _perform(_on_engine(room.measure, room.finding, plan), flags, plot, as_json)


@lab.command(
    epilog="""\b
Examples:
  octavo lab chunked --plot chunked.png
  octavo lab chunked --streams 8 --chunks 32,128,2048
"""
)
@options(EngineConfig, brief=True, skip=(*SCHEDULING, "max_batch_tokens"))
@numbers("--chunks", "64,128,256,512,2048", "Tokens of a step; the largest holds a whole prompt.")
@click.option("--streams", default=4, show_default=True, help="Streams that write meanwhile.")
@click.option("--prompt", default=1536, show_default=True, help="Tokens of each long prompt.")
@repeats
@plot_option
@as_json
def chunked(
    chunks: tuple[int, ...], streams: int, prompt: int, repeats: int, plot: str | None,
    as_json: bool, **flags: Any,
) -> None:  # fmt: skip
    """Pauses between tokens (ITL) beside long prompts that go in whole, or in chunks."""
    from octavo.lab import chunked as room

    plan = room.Plan(tuple(sorted(set(chunks))), streams, prompt=prompt, repeats=repeats)
    _perform(
        _on_engine(room.measure, room.finding, plan),
        flags,
        plot,
        as_json,
        max_batch_tokens=max(chunks),
    )


@lab.command(
    epilog="""\b
Examples:
  octavo lab scheduling --plot scheduling.png
  octavo lab scheduling --load 2 --requests 100
"""
)
@options(EngineConfig, brief=True, skip=SCHEDULING)
@click.option("--load", default=1.3, show_default=True, type=click.FloatRange(0.0, min_open=True),
              help="Arrivals, in multiples of what the engine can serve.")  # fmt: skip
@click.option("--requests", default=50, show_default=True, help="Requests of a run, at most.")
@click.option("--chunk", default=64, show_default=True,
              help="Tokens of a step at most, where a policy looks at no deadlines.")  # fmt: skip
@repeats
@plot_option
@as_json
def scheduling(
    load: float, requests: int, chunk: int, repeats: int, plot: str | None, as_json: bool,
    **flags: Any,
) -> None:  # fmt: skip
    """Fcfs, priority, sjf, fair, slo: deadlines met and fairness, on the same requests.

    What the engine can serve is measured before every round of them, and whether the load was more
    than that is checked after it: a round that was no overload does not count. Two minutes at most;
    on a slow machine there are fewer requests.
    """
    from octavo.lab import scheduling as room

    plan = room.Plan(load=load, requests=requests, chunk=chunk, repeats=repeats)
    _perform(_on_engine(room.measure, room.finding, plan), flags, plot, as_json)


@lab.command(
    epilog="""\b
Examples:
  octavo lab kv --plot kv.png
  octavo lab kv -m qwen2.5-coder-0.5b --prompt 500 --kv-dtype int8
"""
)
@options(EngineConfig, brief=True, skip=(*SCHEDULING, "max_rows", "max_batch_tokens"))
@click.option("--prompt", default=120, show_default=True, help="Tokens of the prompt.")
@click.option("--output", default=60, show_default=True, help="Tokens to write.")
@click.option("--chunk", default=64, show_default=True, type=click.IntRange(1, 2**20),
              help="Tokens of a step at most.")  # fmt: skip
@plot_option
@as_json
def kv(prompt: int, output: int, chunk: int, plot: str | None, as_json: bool, **flags: Any) -> None:
    """One request's cache, step by step: populated, grown, read, and found again."""
    from octavo.lab import kv as room

    plan = room.Plan(prompt, output, chunk)
    _perform(
        _on_engine(room.measure, room.finding, plan),
        flags,
        plot,
        as_json,
        max_batch_tokens=max(chunk, EngineConfig().max_batch_tokens),
    )
