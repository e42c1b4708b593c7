"""The commands of `octavo lab`."""

from __future__ import annotations

from typing import Any

import click

from octavo.config import EngineConfig, options, take
from octavo.terminal import as_json, loaded, note, numbers, plot_option


@click.group(
    epilog="""\b
Examples:
  octavo lab flash --plot flash.png
  octavo lab phases -m qwen2.5-coder-0.5b
  octavo lab flash --json | jq '.native[] | {tokens, naive: .naive.seconds, ours: .flash.seconds}'
"""
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
@click.option("--isa", default="auto", show_default=True, help="avx512, avx2, portable or auto.")
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

    plan = room.Plan(tokens=tokens, threads=threads, isa=isa)
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
@options(EngineConfig)
@numbers("--tokens", "4,16,64,256,512", "Tokens of a prefill.")
@numbers("--batch", "1,2,4,8,16,32,64", "Sequences that decode at once.")
@click.option("--context", default=512, show_default=True, help="Tokens each has in the cache.")
@plot_option
@as_json
def phases(
    tokens: tuple[int, ...], batch: tuple[int, ...], context: int, plot: str | None,
    as_json: bool, **flags: Any,
) -> None:  # fmt: skip
    """Prefill waits for arithmetic, decode for memory; a batch moves the line.

    Whole steps of a real model on this machine's roofline: intensity, bound, time.
    """
    from octavo.ceilings import measure_ceilings
    from octavo.lab import phases as room
    from octavo.lab.finding import Finding, conduct

    config = take(EngineConfig, flags)

    def experiment() -> Finding:
        llm = loaded(config, as_json)
        ceilings = measure_ceilings(llm.config.threads, llm.config.isa)
        plan = room.Plan(tokens, batch, context)
        values = room.measure(llm.assembly, plan, ceilings, lambda what: note(what, as_json))
        return room.finding(values)

    conduct(experiment, plot, as_json)
