"""The commands of `octavo bench`."""

from __future__ import annotations

import dataclasses
from typing import Any

import click

from octavo.config import EngineConfig, options, take
from octavo.terminal import (
    as_json,
    echo_json,
    loaded,
    note,
    numbers,
    plain_table,
    plot_option,
    rich_table,
)

SWEEPS = {
    "tokens": "1,2,3,4,5,6,8,12,16,17,24,32,33,48,64,65,96,128,129,192,256,384,512",
    "context": "128,256,512,1024,2048,4096,8191,16383,32767",
    "batch": "1,2,3,4,5,6,8,12,16,17,24,32,33,48,64",
}


@click.group(
    epilog="""\b
Examples:
  octavo bench offline --concurrency 1,16
  octavo bench kernels --plot roofline.png
  octavo bench step -m qwen2.5-coder-0.5b --prompt 256 --output 64
  octavo bench scaling --plot scaling.png
"""
)
def bench() -> None:
    """Measure speed, always beside what this machine could do at most.

    Ceilings are measured in the same run: memory and cache bandwidth, int8 and bf16 peak.
    """


@bench.command(
    epilog="""\b
Examples:
  octavo bench offline
  octavo bench offline -m qwen2.5-coder-0.5b --prompt 512 --output 64 --concurrency 1,4,16,64
  octavo bench offline --json > today.json
"""
)
@options(EngineConfig)
@numbers("--prompt", "512", "Prompt tokens, one or more.")
@click.option("--output", default=64, help="Tokens to write for each prompt.", show_default=True)
@numbers("--concurrency", "1,16", "Requests at once, one or more.")
@click.option(
    "--repeat", default=3, help="Runs of each cell; the median is shown.", show_default=True
)
@as_json
def offline(
    prompt: tuple[int, ...], output: int, concurrency: tuple[int, ...], repeat: int, as_json: bool,
    **flags: Any,
) -> None:  # fmt: skip
    """Whole runs in this process: prefill and decode tokens a second."""
    from octavo.benchmark import offline as room

    llm = loaded(dataclasses.replace(take(EngineConfig, flags), prefix_caching=False), as_json)
    report = room.measure(llm, room.Plan(prompt, output, concurrency, repeat))
    if as_json:
        return echo_json(report)
    ceilings = report["ceilings"]["all"]
    click.echo(
        f"{report['model']}, {report['threads']} threads, {report['isa']}; memory "
        f"{ceilings['dram'] / 1e9:.1f} GB/s, int8 {ceilings['int8'] / 1e9:.0f} GOP/s. "
        f"Medians of {repeat}.\n"
    )
    rows = [
        [
            str(cell["prompt"]), str(cell["output"]), str(cell["concurrency"]),
            f"{cell['prefill_tokens_per_s']:.0f}", f"{cell['prefill_share']:.0%}",
            f"{cell['decode_tokens_per_s']:.1f}", f"{cell['decode_share']:.0%}",
            f"{cell['guessed_share']:.0%}",
            f"{cell['ttft_s'] * 1e3:.0f}", f"{cell['tpot_s'] * 1e3:.1f}",
        ]
        for cell in report["cells"]
    ]  # fmt: skip
    head = ["prompt", "output", "at once", "prefill tok/s", "of roof", "decode tok/s", "of roof",
            "guessed", "TTFT ms", "TPOT ms"]  # fmt: skip
    plain_table(head, rows, right=True)
    click.echo(
        "\nof roof: measured / the least time in which this machine can do the same operations "
        "and read the same bytes, a step for every token. guessed: output tokens that speculation "
        "saved a step each (--speculation off: none)."
    )


OPS_HEAD = ["op", "ms", "share", "GB/s", "Gop/s", "op/byte", "bound by", "of roof"]
OPS_NOTE = (
    "of roof: least time / time, where the least is the longer of bytes at the memory's speed and "
    "operations at\nthe unit's peak (pairs of bytes count twice). Above 100 %: part of the bytes "
    "came from a cache."
)


@bench.command(
    epilog="""\b
Examples:
  octavo bench kernels
  octavo bench kernels --batch 1,8,64 --context 512,4096 --tokens 16,512
  octavo bench kernels -m qwen2.5-coder-1.5b --plot roofline.png
  octavo bench kernels --json | jq '.cases[].ops[] | {op, fraction}'
"""
)
@options(EngineConfig)
@numbers("--batch", "1,4,16", "Sequences that decode at once, one or more.")
@numbers("--context", "512", "Tokens each of them has in the cache, one or more.")
@numbers("--tokens", "64,512", "Tokens of a prefill, one or more.")
@click.option("--seconds", default=1.0, show_default=True, help="Time for each shape.")
@plot_option
@as_json
def kernels(
    batch: tuple[int, ...], context: tuple[int, ...], tokens: tuple[int, ...], seconds: float,
    plot: str | None, as_json: bool, **flags: Any,
) -> None:  # fmt: skip
    """Every op of the program, at real shapes, beside its roof.

    Steps are made by hand and run alone, so each shape is exact: decode at every batch size and
    context, prefill of every number of tokens. An op's time includes its threads' waiting for each
    other; `octavo bench step` takes them apart.
    """
    from octavo import plots
    from octavo.benchmark import kernels as room
    from octavo.benchmark import picture
    from octavo.ceilings import measure_ceilings

    if plot:
        plots.require()
    llm = loaded(take(EngineConfig, flags), as_json)
    config = llm.config
    note("measuring the machine", as_json)
    ceilings = measure_ceilings(config.threads, config.isa)
    plan = room.Plan(batch, context, tokens, seconds)
    report = room.measure(llm.assembly, plan, ceilings, lambda what: note(what, as_json))
    if plot:
        picture.roofline(report, plot)
    if as_json:
        return echo_json(report)
    _machine(report)
    for case in report["cases"]:
        _case(case)
    for left in report["left_out"]:
        note(f"left out: {left['case']}: {left['why']}")
    click.echo(OPS_NOTE)
    if plot:
        click.echo(f"drawn: {plot}")


def _machine(report: dict[str, Any]) -> None:
    rates, barrier = report["ceilings"]["all"], report["ceilings"]["barrier_s"]
    click.echo(
        f"{report['model']}, {report['act']} activations; {report['threads']} threads, "
        f"{report['isa']}.\nMeasured in this run: memory {rates['dram'] / 1e9:.1f} GB/s, L3 "
        f"{rates['l3'] / 1e9:.0f}, int8 {rates['int8'] / 1e9:.0f} Gop/s, bf16 "
        f"{rates['bf16'] / 1e9:.0f}, f32 {rates['f32'] / 1e9:.0f}; "
        f"a barrier {barrier * 1e9:.0f} ns\n"
    )


def _op(op: dict[str, Any]) -> list[str]:
    return [
        op["op"], f"{op['seconds'] * 1e3:.3f}", f"{op['share']:.1%}",
        f"{op['bytes_per_s'] / 1e9:.1f}", f"{op['operations_per_s'] / 1e9:.0f}",
        f"{op['intensity']:.1f}", op["bound"], f"{op['fraction']:.0%}",
    ]  # fmt: skip


def _plain(name: str, seconds: float, whole: float) -> list[str]:
    share = f"{seconds / whole:.1%}" if whole else ""
    return [name, f"{seconds * 1e3:.3f}", share, "", "", "", "", ""]


def _case(case: dict[str, Any]) -> None:
    whole = case["seconds"]
    rows = [_op(op) for op in case["ops"]]
    rows += [_plain("sampling", case["sample_s"], whole), _plain("set up", case["begin_s"], whole)]
    rows.append([*_plain("step", whole, whole)[:7], f"{case['fraction']:.0%}"])
    waits = case["wait_s"] / whole
    title = f"{case['case']}: {whole * 1e3:.2f} ms ({case['steps']} steps, {waits:.1%} at barriers"
    title += f", memory {case['dram_bytes_per_s'] / 1e9:.1f} GB/s)"
    rich_table(title, OPS_HEAD, rows, foot=1)


@bench.command(
    epilog="""\b
Examples:
  octavo bench step
  octavo bench step -m qwen2.5-coder-0.5b --prompt 512 --output 128 --concurrency 1,8
  octavo bench step --json | jq '.cases[] | {phase, concurrency, python_share}'
"""
)
@options(EngineConfig)
@click.option("--prompt", default=512, show_default=True, help="Tokens of each prompt.")
@click.option("--output", default=64, show_default=True, help="Tokens to write for each.")
@numbers("--concurrency", "1,16", "Requests at once, one or more.")
@plot_option
@as_json
def step(
    prompt: int, output: int, concurrency: tuple[int, ...], plot: str | None, as_json: bool,
    **flags: Any,
) -> None:  # fmt: skip
    """Where the whole time of real steps goes: ops, barriers, imbalance, Python, idling.

    The parts add up to the wall time of the phase. "waiting for others": a thread has done its part
    and others have not; much of it means an uneven split, or a machine that is busy elsewhere.
    """
    from octavo import plots
    from octavo.benchmark import picture
    from octavo.benchmark import step as room
    from octavo.ceilings import measure_ceilings

    if plot:
        plots.require()
    plan = room.Plan(prompt, output, concurrency)
    llm = loaded(dataclasses.replace(take(EngineConfig, flags), prefix_caching=False), as_json)
    note("measuring the machine", as_json)
    ceilings = measure_ceilings(llm.config.threads, llm.config.isa)
    report = room.measure(llm.assembly, plan, ceilings, lambda what: note(what, as_json))
    if plot:
        picture.roofline(report, plot)
    if as_json:
        return echo_json(report)
    _machine(report)
    for case in report["cases"]:
        _account(case)
    click.echo("ms are of a step, on average; ops without their waiting.\n" + OPS_NOTE)
    if plot:
        click.echo(f"drawn: {plot}")


NAMES = {"sample": "sampling", "set up": "set up", "barriers": "barriers",
         "imbalance": "waiting for others", "python": "Python", "idle": "idle"}  # fmt: skip


def _account(case: dict[str, Any]) -> None:
    """One phase: a step on average, to the last part."""
    steps, wall = max(case["steps"], 1), case["wall_s"]
    per_step = [op | {"seconds": op["seconds"] / steps} for op in case["ops"]]
    rows = [_op(op) for op in per_step]
    rows += [
        _plain(NAMES[name], seconds / steps, wall / steps)
        for name, seconds in case["parts"].items()
        if name in NAMES
    ]
    rows.append([*_plain("wall", wall / steps, wall / steps)[:7], f"{case['fraction']:.0%}"])
    title = (
        f"{case['phase']}, {case['concurrency']} at once: {steps} steps of "
        f"{wall / steps * 1e3:.2f} ms, {case['tokens'] / wall:.0f} tokens/s, "
        f"{case['barriers']:.0f} barriers a step, memory "
        f"{case['dram_bytes_per_s'] / 1e9:.1f} GB/s"
    )
    rich_table(title, OPS_HEAD, rows, foot=1)


@bench.command(
    epilog="""\b
Examples:
  octavo bench scaling --plot scaling.png
  octavo bench scaling -m qwen2.5-coder-1.5b --batch 1,4,16,64 --context 512,4096,32767
  octavo bench scaling --json | jq .cliffs
"""
)
@options(EngineConfig)
@numbers("--tokens", SWEEPS["tokens"], "Tokens of a prefill.")
@numbers("--context", SWEEPS["context"], "Tokens in the cache of one stream that decodes.")
@numbers("--batch", SWEEPS["batch"], "Sequences that decode at once, 512 tokens in the cache each.")
@click.option("--seconds", default=0.3, show_default=True, help="Time for each point.")
@plot_option
@as_json
def scaling(
    tokens: tuple[int, ...], context: tuple[int, ...], batch: tuple[int, ...], seconds: float,
    plot: str | None, as_json: bool, **flags: Any,
) -> None:  # fmt: skip
    """The time of a step against tokens, context and batch, beside the cost model's.

    Says where there are cliffs: where the time grows a third faster than the model's.
    """
    from octavo import plots
    from octavo.benchmark import scaling as room
    from octavo.ceilings import measure_ceilings

    if plot:
        plots.require()
    llm = loaded(take(EngineConfig, flags), as_json)
    note("measuring the machine", as_json)
    ceilings = measure_ceilings(llm.config.threads, llm.config.isa)
    plan = room.Plan(tokens, context, batch, seconds=seconds)
    report = room.measure(llm.assembly, plan, ceilings, lambda what: note(what, as_json))
    if plot:
        room.draw(report, plot)
    if as_json:
        return echo_json(report)
    _machine(report)
    for name, points in report["sweeps"].items():
        _sweep(room.TITLES[name], points, report["cliffs"][name])
    for left in report["left_out"]:
        note(f"left out: {left['sweep']} {left['at']}: {left['why']}")
    if plot:
        click.echo(f"drawn: {plot}")


def _sweep(title: str, points: list[dict[str, Any]], cliffs: list[dict[str, Any]]) -> None:
    steep = {cliff["to"]: f"x{cliff['grew']:.2f}, not x{cliff['should']:.2f}" for cliff in cliffs}
    rows = [
        [
            str(p["at"]), f"{p['seconds'] * 1e3:.2f}", f"{p['predicted_s'] * 1e3:.2f}",
            f"{p['fraction']:.0%}", f"{p['tokens_per_s']:.0f}", steep.get(p["at"], ""),
        ]
        for p in points
    ]  # fmt: skip
    rich_table(title, ["at", "ms", "model ms", "of model", "tokens/s", "cliff"], rows)
