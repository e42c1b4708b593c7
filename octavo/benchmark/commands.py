"""The commands of `octavo bench`."""

from __future__ import annotations

import dataclasses
from typing import Any

import click

from octavo.config import RANKING, SCHEDULING, EngineConfig, take
from octavo.errors import InvalidRequest
from octavo.neighbours import busy_note
from octavo.tables import beside, paragraph, show_table
from octavo.terminal import (
    Milliseconds,
    OurGroup,
    OutputFile,
    as_json,
    echo_json,
    loaded,
    note,
    numbers,
    options,
    plot_option,
    refuse_given,
)

SWEEPS = {
    "tokens": "1,2,3,4,5,6,8,12,16,17,24,32,33,48,64,65,96,128,129,192,256,384,512",
    "context": "128,256,512,1024,2048,4096,8191,16383,32767",
    "batch": "1,2,3,4,5,6,8,12,16,17,24,32,33,48,64",
}
# Of a drawn load that `bench serve` sends, what is not said.
USUAL = {"rate": 2.0, "seconds": 30.0, "prompt": 128.0, "output": 64.0, "spread": 0.8}
LOAD = "poisson:" + ",".join(f"{name}={value:g}" for name, value in USUAL.items())


@click.group(
    cls=OurGroup,
    epilog="""\b
Examples:
  octavo bench offline --concurrency 1,16
  octavo bench kernels --plot roofline.png
  octavo bench step -m qwen2.5-coder-0.5b --prompt 256 --output 64
  octavo bench scaling --plot scaling.png
  octavo bench serve http://127.0.0.1:8000 --slo-ttft 500 --plot run.png
""",
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
@options(
    EngineConfig, brief=True, skip=RANKING, speculation="off"
)  # a roof is of steps without guesses
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
    title = (
        f"{report['model']}, {report['threads']} threads, {report['isa']}; memory "
        f"{ceilings['dram'] / 1e9:.1f} GB/s, int8 {ceilings['int8'] / 1e9:.0f} Gop/s. "
        f"Medians of {repeat}"
    )
    guesses = report["speculation"] != "off"
    rows = [
        [
            str(cell["prompt"]), str(cell["output"]), str(cell["concurrency"]),
            f"{cell['prefill_tokens_per_s']:.0f}", f"{cell['prefill_share']:.0%}",
            f"{cell['decode_tokens_per_s']:.1f}", f"{cell['decode_share']:.0%}",
            *([f"{cell['guessed_share']:.0%}"] if guesses else []),
            f"{cell['ttft_s'] * 1e3:.0f}", f"{cell['tpot_s'] * 1e3:.1f}",
        ]
        for cell in report["cells"]
    ]  # fmt: skip
    head = ["prompt", "output", "at once", "prefill tok/s", "of roof", "decode tok/s", "of roof",
            *(["guessed"] if guesses else []), "TTFT ms", "TPOT ms"]  # fmt: skip
    show_table(title, head, rows)
    shares = [cell[f"{phase}_share"] for cell in report["cells"] for phase in ("prefill", "decode")]
    guessed = " guessed: output tokens that speculation saved a step each." if guesses else ""
    paragraph(
        "of roof: measured / the least time in which this machine can do the same operations "
        f"and read the same bytes, a step for every token.{guessed}"
        + _shares_note(report["isa"], llm.config.act, shares)
    )
    _neighbours(report)


def _neighbours(report: dict[str, Any]) -> None:
    """What others used of the machine, where that was much."""
    for text in busy_note(report):
        paragraph(text, fg="yellow")


OPS_HEAD = ["op", "ms", "share", "GB/s", "Gop/s", "op/byte", "roof", "of roof"]
OPS_NOTE = (
    "of roof: least time / time, where the least is the longer of bytes at the memory's speed and "
    "operations at the unit's peak (pairs of bytes count twice); roof: which of them is longer."
)


def _shares_note(isa: str, act: str, shares: list[float]) -> str:
    """Why shares of the roof are small, and why above one, where there are such."""
    from octavo.benchmark.roofline import ABOVE, NEAR, why_below

    notes = [f" {ABOVE}"] if max(shares, default=0.0) > 1.0 else []
    if min(shares, default=1.0) < NEAR:
        notes.append(f" Below half: {why_below(isa, 'f32' if act == 'fp32' else 'int8')}")
    return "".join(notes)


@bench.command(
    epilog="""\b
Examples:
  octavo bench kernels
  octavo bench kernels --batch 1,8,64 --context 512,4096 --tokens 16,512
  octavo bench kernels -m qwen2.5-coder-1.5b --plot roofline.png
  octavo bench kernels --json | jq '.cases[].ops[] | {op, fraction}'
"""
)
@options(EngineConfig, brief=True, skip=SCHEDULING)
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
    from octavo.benchmark import instrument, picture
    from octavo.benchmark import kernels as room

    if plot:
        plots.require()
    plan = room.Plan(batch, context, tokens, seconds)
    report = instrument.use(room.measure, plan, take(EngineConfig, flags), as_json)
    if plot:
        picture.roofline(report, plot)
    if as_json:
        return echo_json(report)
    _machine(report)
    for case in report["cases"]:
        _case(case)
    for left in report["left_out"]:
        note(f"left out: {left['case']}: {left['why']}")
    paragraph(OPS_NOTE + _of_ops(report))
    _neighbours(report)
    if plot:
        click.echo(f"drawn: {plot}")


def _machine(report: dict[str, Any]) -> None:
    rates, barrier = report["ceilings"]["all"], report["ceilings"]["barrier_s"]
    paragraph(
        f"{report['model']}, {report['act']} activations; {report['threads']} threads, "
        f"{report['isa']}. Measured in this run: memory {rates['dram'] / 1e9:.1f} GB/s, L3 "
        f"{rates['l3'] / 1e9:.0f}, int8 {rates['int8'] / 1e9:.0f} Gop/s, bf16 "
        f"{rates['bf16'] / 1e9:.0f}, f32 {rates['f32'] / 1e9:.0f}; "
        f"a barrier {barrier * 1e9:.0f} ns"
    )
    click.echo()


def _of_ops(report: dict[str, Any]) -> str:
    """About the shares of whole steps, and of ops: of small ones only what is above one."""
    shares = [case["fraction"] for case in report["cases"]]
    shares += [op["fraction"] for case in report["cases"] for op in case["ops"]
               if op["share"] >= 0.1 or op["fraction"] > 1.0]  # fmt: skip
    return _shares_note(report["isa"], report["act"], shares)


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
    show_table(title, OPS_HEAD, rows, foot=1)


@bench.command(
    epilog="""\b
Examples:
  octavo bench step
  octavo bench step -m qwen2.5-coder-0.5b --prompt 512 --output 128 --concurrency 1,8
  octavo bench step --json | jq '.cases[] | {phase, concurrency, python_share}'
"""
)
@options(
    EngineConfig, brief=True, skip=RANKING, speculation="off"
)  # a roof is of steps without guesses
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
    from octavo.benchmark import instrument, picture
    from octavo.benchmark import step as room

    if plot:
        plots.require()
    plan = room.Plan(prompt, output, concurrency)
    config = dataclasses.replace(take(EngineConfig, flags), prefix_caching=False)
    report = instrument.use(room.measure, plan, config, as_json)
    if plot:
        picture.roofline(report, plot)
    if as_json:
        return echo_json(report)
    _machine(report)
    for case in report["cases"]:
        _account(case)
    paragraph(
        "ms are of a step, on average; ops without their waiting. " + OPS_NOTE + _of_ops(report)
    )
    _neighbours(report)
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
    show_table(title, OPS_HEAD, rows, foot=1)


@bench.command(
    epilog="""\b
Examples:
  octavo bench scaling --plot scaling.png
  octavo bench scaling -m qwen2.5-coder-1.5b --batch 1,4,16,64 --context 512,4096,32767
  octavo bench scaling --json | jq .cliffs
"""
)
@options(EngineConfig, brief=True, skip=SCHEDULING)
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
    from octavo.benchmark import instrument
    from octavo.benchmark import scaling as room

    if plot:
        plots.require()
    plan = room.Plan(tokens, context, batch, seconds=seconds)
    report = instrument.use(room.measure, plan, take(EngineConfig, flags), as_json)
    if plot:
        room.draw(report, plot)
    if as_json:
        return echo_json(report)
    _machine(report)
    for name, points in report["sweeps"].items():
        _sweep(room.TITLES[name], points, report["cliffs"][name])
    shares = [p["fraction"] for points in report["sweeps"].values() for p in points]
    paragraph(
        "of model: the cost model's time at this machine's ceilings / time."
        + _shares_note(report["isa"], report["act"], shares)
    )
    for left in report["left_out"]:
        note(f"left out: {left['sweep']} {left['at']}: {left['why']}")
    _neighbours(report)
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
    show_table(title, ["at", "ms", "model ms", "of model", "tokens/s", "cliff"], rows)


@bench.command(
    epilog="""\b
Examples:
  octavo bench serve http://127.0.0.1:8000 --load poisson:rate=4,seconds=60,prompt=256,output=64
  octavo bench serve http://127.0.0.1:8000 --load azure.csv.gz --head 500 --lengths 0.1 \\
    --rate 3 --slo-ttft 500 --slo-tpot 50 --plot run.png --requests-out run.jsonl
  octavo bench serve https://api.example.com/v1 -m a-model --chat --no-ignore-eos \\
    --api-key-file key.txt --load gamma:rate=1,cv=3,seconds=60
  octavo bench serve http://127.0.0.1:8000 --concurrency 16 --load poisson:rate=10,seconds=10
"""
)
@click.argument("url")
@click.option("--load", default=LOAD, show_default=True,
              help="A trace (Azure CSV, Mooncake JSONL, a log of --requests-out; .gz too), or "
              "drawn: poisson:rate=,seconds=,prompt=,output=,spread= (what is left out is the "
              "default's) or gamma: with cv= (burstiness; 1), or "
              "servegen:FILE,start=0,seconds=600.")  # fmt: skip
@click.option("--rate", type=float, help="Requests a second; gaps are stretched, their shape kept.")
@click.option("--head", type=click.IntRange(min=1), help="Only so many requests.")
@click.option("--lengths", type=float, help="Factor on prompt and output lengths.")
@click.option("--concurrency", type=click.IntRange(min=1),
              help="Closed loop: so many clients, each waits for its answer before it sends again "
              "(arrival times count no more).")  # fmt: skip
@click.option("--model", "-m", default="", help="Name in the requests (default: the first served).")
@click.option("--chat", is_flag=True, help="/v1/chat/completions, not /v1/completions.")
@click.option("--words", is_flag=True,
              help="Prompts of common words, not of token ids; always with --chat.")  # fmt: skip
@click.option("--vocab", default=8192, show_default=True, type=click.IntRange(min=513),
              help="Token ids of prompts are below it.")  # fmt: skip
@click.option("--ignore-eos/--no-ignore-eos", default=True, show_default=True,
              help="Ask for all tokens of the workload; some servers refuse this.")  # fmt: skip
@click.option("--body", default="{}", metavar="JSON", help="Further fields of every request.")
@click.option("--api-key-file", type=click.Path(exists=True, dir_okay=False),
              help="File with the key, or with a line as `octavo serve` has.")  # fmt: skip
@click.option("--slo-ttft", type=Milliseconds(), help="Objective for the first token.")
@click.option("--slo-tpot", type=Milliseconds(), help="Objective for each further token.")
@click.option("--slo-e2e", type=Milliseconds(), help="Objective for the whole answer.")
@click.option("--slo-headers/--no-slo-headers", default=True, show_default=True,
              help="Tell the server too (x-slo-ttft-ms ...), or only judge here; one that takes no "
              "deadlines is not told.")  # fmt: skip
@click.option("--seed", default=0, show_default=True, help="Of what is drawn: arrivals, lengths.")
@click.option("--salt", default="", help="Of the prompts: the same gives the same ones (default: "
              "new ones each run, so that no prefix cache has them).")  # fmt: skip
@click.option("--warmup", default=1, show_default=True, type=click.IntRange(min=0),
              help="Requests before the first that counts.")  # fmt: skip
@click.option("--timeout", default=600.0, show_default=True, help="Seconds for a whole answer.")
@click.option("--requests-out", type=OutputFile(), metavar="FILE",
              help="Write a line of JSON for each request; it is a --load too.")  # fmt: skip
@plot_option
@as_json
def serve(url: str, plot: str | None, as_json: bool, **flags: Any) -> None:
    """Load on a running server (any that speaks OpenAI's API), as its callers see it.

    Open loop: requests go out when they are due, however slow the answers are. TTFT, TPOT, ITL and
    E2E, throughput, and where objectives are given goodput and attainment. Counted apart are what
    was refused (429, 503: later it might have been served), bad requests (400 and its like: never)
    and what failed. Exit code 1 where the client was the bottleneck: such a run says nothing.

    Prompts are drawn at random, and answers to such repeat themselves more than people's do: a
    server that guesses tokens looks better than it would. The report says how many of the tokens
    were guessed, where the server tells; --body '{"speculation": false}' asks Octavo for none.
    """
    from octavo import plots
    from octavo.benchmark import serve as room
    from octavo.terminal import progress

    if flags["concurrency"] is not None:
        refuse_given(("rate",), "with --concurrency a client sends when it has its answer")
    if plot:
        plots.require()
    plan = _serve_plan(flags)
    with progress("requests") as told:
        report, found = room.measure(url, plan, lambda what: note(what, as_json), told)
    slo = plan.ask.slo
    if flags["requests_out"]:
        room.write_rows(found, slo, flags["requests_out"])
    if plot:
        from octavo.benchmark import serve_picture

        serve_picture.draw(report, found, slo, plot)
    if as_json:
        echo_json(report)
    else:
        _served(report)
        if plot:
            click.echo(f"drawn: {plot}")
    if not report["valid"]:
        raise SystemExit(1)


def _serve_plan(flags: dict[str, Any]) -> Any:
    """What is to be sent, from the flags. Raises `InvalidRequest`."""
    from octavo.benchmark import serve as room
    from octavo.benchmark.load import Ask
    from octavo.conformance.wire import key_in
    from octavo.core.request import Slo
    from octavo.sim import workload as workloads

    load = workloads.named(flags["load"], seed=flags["seed"], usual=USUAL)
    if flags["head"] is not None:
        load = load.head(flags["head"])
    if flags["lengths"] is not None:
        load = load.lengths(flags["lengths"])
    if flags["rate"] is not None:
        load = load.at_rate(flags["rate"])
    ttft, tpot, e2e = (
        None if (ms := flags[f"slo_{name}"]) is None else ms / 1e3 for name in room.NAMES
    )
    slo = Slo(ttft, tpot, e2e)
    ask = Ask(
        model=flags["model"],
        chat=flags["chat"],
        words=flags["words"],
        vocab=flags["vocab"],
        ignore_eos=flags["ignore_eos"],
        slo=slo,
        slo_headers=flags["slo_headers"],
        api_key=key_in(flags["api_key_file"], "api_key_file"),
        salt=flags["salt"],
        more=_fields(flags["body"]),
    )
    return room.Plan(load, ask, flags["concurrency"], flags["warmup"], flags["timeout"])


def _fields(text: str) -> dict[str, Any]:
    import json

    try:
        found = json.loads(text)
    except ValueError as error:
        raise InvalidRequest(f"--body: not JSON: {error}", "body") from None
    if not isinstance(found, dict):
        raise InvalidRequest("--body must be a JSON object", "body")
    return found


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1e3:.1f}" if seconds < 0.1 else f"{seconds * 1e3:.0f}"


def _served(report: dict[str, Any]) -> None:
    """A load run for people."""
    offered = report["offered_per_s"]
    rate = f"{offered:.2f} req/s offered" if offered else report["arrivals"]
    load = ", ".join([report["load"], *report["changes"], rate])
    click.secho(f"{report['model']} at {report['url']}: {load}", bold=True)
    for name, value in _totals(report):
        beside(f"  {name:10}", 12, value)
    spreads = ("ttft", "tpot", "itl", "e2e")
    keys = ("mean", "p50", "p90", "p95", "p99", "most")
    rows = [[n.upper(), *(_ms(report[f"{n}_s"][key]) for key in keys)] for n in spreads]
    show_table("", ["ms", "mean", "P50", "P90", "P95", "P99", "max"], rows)
    for what, key in (("failed", "errors"), ("bad", "bad_request_errors")):
        for error, count in report[key].items():
            click.secho(f"{count} {what}: {error}", fg="red")
    if report["short"]:
        click.secho(f"{report['short']} answers have fewer tokens than were asked for", fg="yellow")
    if not report["valid"]:
        why = "; ".join(report["faults"])
        click.secho(
            f"INVALID: the client was not on time (a busy machine, or its own limit): {why}",
            fg="red",
            bold=True,
        )


def _refusals(report: dict[str, Any]) -> str:
    """How many were told to come later, and by which statuses."""
    each = ", ".join(f"{count} x {status}" for status, count in report["refusals"].items())
    return f"{report['refused']} refused" + (f" ({each})" if each else "")


def _totals(report: dict[str, Any]) -> list[tuple[str, str]]:
    client, attained = report["client"], report["attainment"]
    lines = [
        ("requests", f"{report['sent']} sent, {report['served']} served, {_refusals(report)}, "
         f"{report['bad_requests']} bad requests, {report['failed']} failed; at most "
         f"{report['most_at_once']} at once"),
        ("throughput", f"{report['requests_per_s']:.2f} req/s, "
         f"{report['output_tokens_per_s']:.1f} tok/s written, "
         f"{report['total_tokens_per_s']:.1f} with prompts, in {report['seconds']:.1f} s"),
    ]  # fmt: skip
    if report["prompt_tokens"]:
        share = report["cached_tokens"] / report["prompt_tokens"]
        lines.append(("prompts", f"{report['prompt_tokens']} tokens, {share:.1%} from a cache"))
    if (guessed := report["guessed_tokens"]) is not None and report["output_tokens"]:
        share = guessed / report["output_tokens"]
        lines.append(("guesses", f"{share:.1%} of the tokens written were guessed and held"))
    limits = {n: s for n in ("ttft", "tpot", "e2e") if (s := report["slo"][f"{n}_s"])}
    if limits:
        each = ", ".join(f"{n.upper()} {_ms(s)} ms {attained[n]:.1%}" for n, s in limits.items())
        lines += [
            ("attained", f"{attained['all']:.1%} of all sent ({each}), "
             f"{report['kept']:.1%} of those let in"
             + ("" if report["slo_told"] else "; the server was not told")),
            ("goodput", f"{report['goodput_per_s']:.2f} req/s"),
        ]  # fmt: skip
    lag = client["send_lag_s"]
    lines.append(
        ("client", f"{client['cpu_share']:.1%} of a core; sent late by {_ms(lag['p99'])} ms (P99), "
         f"its loop by {_ms(client['loop_lag_s']['p99'])} ms; connecting "
         f"{_ms(client['connect_s']['p50'])} ms (P50, part of TTFT)")
    )  # fmt: skip
    return lines
