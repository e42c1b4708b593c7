"""`octavo roofline`, `simulate` and `plan`: the simulator at the command line.

A part of the entrance, like `octavo.cli`: nothing but that imports it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from octavo.errors import BadFile, InvalidRequest
from octavo.models.registry import MODELS
from octavo.tables import beside, paragraph, plain_table, show_table
from octavo.terminal import (
    Milliseconds,
    OurCommand,
    OutputFile,
    as_json,
    counted,
    echo_json,
    plot_option,
    progress,
    refuse_given,
)

if TYPE_CHECKING:
    from octavo.core.request import Slo
    from octavo.models.config import ModelConfig
    from octavo.sim.fleet import Router
    from octavo.sim.hardware import Device
    from octavo.sim.workload import Workload

SHAPES = Path(__file__).with_name("shapes.json")


COUNT = click.IntRange(min=1)


def _words(_: click.Context, __: click.Parameter, value: str) -> list[str]:
    words = [word.strip() for word in value.split(",") if word.strip()]
    if not words:
        raise click.BadParameter(f"give at least one name, not {value!r}")
    return words


def _floats(_: click.Context, __: click.Parameter, value: str | None) -> list[float]:
    try:
        return [] if value is None else [float(word) for word in value.split(",")]
    except ValueError:
        raise click.BadParameter(f"give numbers, such as 2,4,8, not {value!r}") from None


def _share(_: click.Context, __: click.Parameter, value: float) -> float:
    if not 0.0 <= value <= 1.0:  # a NaN is not
        what = f"give a share of the duration, such as 0.05, from 0 to 1, not {value:g}"
        raise click.BadParameter(what)
    return value


def _window(_: click.Context, __: click.Parameter, value: str | None) -> tuple[float, float] | None:
    if value is None:
        return None
    try:
        start, end = (float(word) for word in value.split(":"))
    except ValueError:
        what = f"give seconds as start:end, such as 0:600, not {value!r}"
        raise click.BadParameter(what) from None
    return start, end


# ---- where a model's shape comes from ----


def shapes() -> dict[str, Any]:
    """The well-known models whose configuration is in the package."""
    return dict(json.loads(SHAPES.read_text()))


def model_config(name: str) -> ModelConfig:
    """Of a well-known model, one that was pulled, a config.json or its directory, or a GGUF file;
    no weights are read.

    Raises InvalidRequest with the nearest names, BadFile, UnsupportedModel.
    """
    from octavo.models.config_hf import config_from_hf
    from octavo.models.hub import cached
    from octavo.models.safetensors import parse_json
    from octavo.models.weights import open_checkpoint

    known, path = shapes(), Path(name)
    key = name.lower().removesuffix("-instruct")
    if key in known:
        return config_from_hf(Path(key), known[key]["config"])
    if key in MODELS and (here := cached(MODELS[key])) is not None:
        return open_checkpoint(here).config
    if path.suffix == ".json" or (path / "config.json").is_file():
        path = path if path.suffix == ".json" else path / "config.json"
        try:
            return config_from_hf(path, parse_json(path, path.read_bytes()))
        except OSError as error:
            raise InvalidRequest(f"{path}: {error.strerror}", "model") from error
    if path.suffix == ".gguf" and path.is_file():
        return open_checkpoint(path).config
    raise InvalidRequest(_unknown(name, key, [*known, *MODELS]), "model")


def _unknown(name: str, key: str, known: list[str]) -> str:
    """What is said of a name that is no model's."""
    import difflib

    if key in MODELS:  # of those that are fetched
        return f"{name} is not here yet, and its shape is in its file: octavo pull {key}"
    near = difflib.get_close_matches(key, known, 3, 0.4)
    if near:
        hint = f"; did you mean {' or '.join(near)}? `octavo roofline` lists all"
    else:
        hint = f". Known: {', '.join(dict.fromkeys(known))}"
    return f"no model is called {name!r}{hint}; or give a config.json, its directory or a GGUF file"


def devices(names: list[str], prices: tuple[str, ...] = ()) -> list[Device]:
    """By name, with the caller's prices; `here` is measured now (two seconds)."""
    from octavo.sim import hardware

    found = [_here() if name == "here" else hardware.device(name) for name in names]
    known = [device.name for device in found]
    for word in prices:
        name, _, dollars = word.partition("=")
        try:
            value = float(dollars)
        except ValueError:
            raise InvalidRequest(f"--price {word}: write it like h100=2.50", "price") from None
        if hardware.ALIASES.get(name, name) not in known:
            raise InvalidRequest(f"--price {word}: --hardware has only {', '.join(known)}", "price")
        found = [
            d.priced(value) if d.name in (name, hardware.ALIASES.get(name, name)) else d
            for d in found
        ]
    return found


def _here() -> Device:
    from octavo.ceilings import measure_ceilings
    from octavo.doctor import memory
    from octavo.sim.hardware import measured

    found = measure_ceilings(seconds=2.0)
    return measured(found.all.bf16, found.all.dram, memory()[0], found.barrier_s)


# ---- roofline ----


@click.command(
    cls=OurCommand,
    epilog="""\b
Examples:
  octavo roofline llama-3.1-8b --hardware h100,a100,l4,zen4
  octavo roofline llama-3.1-70b --hardware h100,h200,b200 --tp 4 --context 8192
  octavo roofline ./config.json --hardware here --weights q4_k --plot roof.png
  octavo roofline                      lists models and hardware
""",
)
@click.argument("model", required=False)
@click.option("--hardware", "-H", default="a100,h100,h200,b200,mi300x,l4,rtx-4090,zen4",
              callback=_words, show_default=True,
              help="Machines by name, or `here` to measure this one.")  # fmt: skip
@click.option(
    "--context", default=4096, type=COUNT, show_default=True, help="Tokens of each sequence."
)
@click.option(
    "--tp", default=1, type=COUNT, show_default=True, help="Devices that share the model."
)
@click.option("--weights", default="bf16", show_default=True,
              help="How matrices are stored: bf16, fp8, q8_0, q6_k, q5_k, q4_k, q4_0.")  # fmt: skip
@click.option("--kv-bytes", default=2, type=click.IntRange(1, 4), show_default=True,
              help="Bytes of a number in the cache: 2 for bf16, 1 for int8 or fp8.")  # fmt: skip
@click.option("--peak", is_flag=True, help="Assume that kernels reach the peaks.")
@click.option("--price", multiple=True, metavar="NAME=DOLLARS", help="Your price of an hour.")
@plot_option
@click.option("--sources", is_flag=True, help="Say where each figure comes from.")
@as_json
def roofline(model: str | None, **flags: Any) -> None:
    """What MODEL can do on a machine: prefill, decode, batches, and what binds.

    Bytes and operations are counted on the traced program; no weights are needed. `wall` is the
    batch at which a decode's matrix products leave the memory wall: below it, more sequences cost
    nothing but their own cache.
    """
    from octavo.sim import roofline as roof
    from octavo.sim.hardware import PEAK

    if model is None:
        refuse_given(flags.keys() - {"as_json"}, "without a MODEL everything known is listed")
        _catalogue(flags["as_json"])
        return
    config, found = model_config(model), devices(flags["hardware"], flags["price"])
    analyses = [
        roof.analyse(
            roof.place(
                config, device, tp=flags["tp"], weights=flags["weights"],
                kv_itemsize=flags["kv_bytes"], efficiency=PEAK if flags["peak"] else None,
            ),
            flags["context"],
        )
        for device in found
    ]  # fmt: skip
    name = Path(model).stem if Path(model).exists() else model
    if flags["plot"]:
        from octavo.sim.pictures import draw_roofs

        draw_roofs(analyses, name, flags["plot"])
    if flags["as_json"]:
        echo_json({"model": name, "analyses": [roof.as_dict(a) for a in analyses]})
        return
    _show_roofline(name, analyses, flags)


def _show_roofline(name: str, analyses: list[Any], flags: dict[str, Any]) -> None:
    from octavo.sim import roofline as roof

    split = f", {flags['tp']} devices" if flags["tp"] > 1 else ""
    kind = f"{name}, {flags['weights']} weights, {8 * flags['kv_bytes']}-bit KV{split}"
    show_table(f"{kind}; prefill of {roof.PREFILL} tokens", *roof.machine_table(analyses))
    show_table(f"Decode at {flags['context']} tokens of context", *roof.decode_table(analyses))
    paragraph(
        "ridge: operations a byte at which arithmetic binds. wall: sequences at which a decode's "
        "products do; fewer cost as much. most: sequences that fit in "
        f"{roof.USABLE:.0%} of the memory, and their step."
    )
    if not flags["peak"]:
        _show_shares([one.placement.device for one in analyses])
    if flags["sources"]:
        click.echo()
        for one in analyses:
            device = one.placement.device
            click.secho(f"{device.title}", bold=True)
            for label in ("bf16", "fp8", "bandwidth", "memory", "link", "price"):
                figure = getattr(device, label)
                if figure is not None:
                    shown = f"{figure.value:.2f}" if label == "price" else f"{figure.value:.5g}"
                    click.echo(f"  {label:10}{shown:>12}  {figure.source}")
            if device.on_chip:
                click.echo(f"  {'on chip':10}{device.on_chip}")


def _show_shares(devices: list[Device]) -> None:
    """What of their peaks machines are taken to reach, those alike in one line."""
    alike: dict[Any, list[str]] = {}
    for device in devices:
        alike.setdefault(device.efficiency, []).append(device.name)
    for shares, names in alike.items():
        paragraph(
            f"{', '.join(names)}: taken at {shares.memory:.0%} of bandwidth and "
            f"{shares.compute:.0%} of the matrix peak, {shares.op_seconds * 1e6:g} us an op, "
            f"{shares.step_seconds * 1e3:g} ms a step (--peak: all of it)."
        )


def _catalogue(machine: bool) -> None:
    from octavo.sim.hardware import DEVICES

    known = shapes()
    if machine:
        echo_json({"models": known, "hardware": list(DEVICES)})
        return
    plain_table(
        ["model", "parameters", "source"],
        [[n, f"{e['parameters'] / 1e9:.2f} G", e["source"]] for n, e in known.items()],
    )
    click.echo()
    plain_table(
        ["hardware", "what", "bf16 TFLOP/s", "GB/s", "GB", "$/h"],
        [
            [d.name, d.title, f"{d.bf16.value / 1e12:g}", f"{d.bandwidth.value / 1e9:g}",
             "-" if d.memory is None else f"{d.memory.value / 1e9:g}",
             "-" if d.price is None else f"{d.price.value:.2f}"]
            for d in DEVICES.values()
        ],
    )  # fmt: skip


# ---- simulate ----

COMPARED = (
    "goodput: requests a second within all objectives, over the whole run. attained: their share "
    "of those sent, of let in: of those not refused. TTFT and TPOT in ms."
)
# What a recorded server decides by itself.
OF_HARDWARE = (
    "model", "hardware", "tp", "weights", "max_rows", "max_batch_tokens", "kv_tokens", "operators",
)  # fmt: skip
UNJUDGED = (
    "Without objectives nothing is attained: --slo-ttft MS, --slo-tpot MS. TTFT and TPOT in ms."
)


@click.command(
    cls=OurCommand,
    epilog="""\b
Examples:
  octavo simulate azure.csv -m llama-3.1-8b -H h100 --slo-ttft 2000 --slo-tpot 50
  octavo simulate mooncake.jsonl -H l40s --replicas 4 --router predicted
  octavo simulate gamma:rate=6,cv=3,seconds=600 -m qwen3-8b -H a100
  octavo simulate azure.csv --rate 4,8,16 --max-batch-tokens 512,2048 --plot knee.png
""",
)
@click.argument("trace")
@click.option("--model", "-m", default="llama-3.1-8b", show_default=True,
              help="A well-known model, a config.json or a GGUF file.")  # fmt: skip
@click.option("--hardware", "-H", default="h100", show_default=True,
              help="The replicas' machine.")  # fmt: skip
@click.option("--tp", default=1, type=COUNT, show_default=True, help="Devices of each replica.")
@click.option("--weights", default="bf16", show_default=True,
              help="How matrices are stored, as for `octavo roofline`.")  # fmt: skip
@click.option("--replicas", default=1, type=COUNT, show_default=True, help="How many of them.")
@click.option("--router", default="least-tokens", show_default=True,
              type=click.Choice(["round-robin", "least-tokens", "predicted"]),
              help="Which replica gets a request: the next in turn; the one with the fewest prompt "
              "tokens waiting; the one whose first token is predicted soonest.")  # fmt: skip
@click.option("--policy", default="fcfs", show_default=True, callback=_words,
              help="fcfs, priority, sjf, fair, slo, fair-slo or static, as for `octavo serve`, and "
              "+admission to refuse what would be late; one or more.")  # fmt: skip
@click.option("--rate", callback=_floats,
              help="Requests a second, one or several; gaps are stretched.")  # fmt: skip
@click.option("--window", callback=_window, metavar="START:END", help="Only these seconds.")
@click.option("--head", type=COUNT, help="Only the first so many requests.")
@click.option("--lengths", type=float, help="Factor on prompt and output lengths.")
@click.option(
    "--max-rows", default=256, type=COUNT, show_default=True, help="Most sequences in a step."
)
@click.option("--max-batch-tokens", default="2048", callback=counted, show_default=True,
              help="Most tokens in a step, one or several.")  # fmt: skip
@click.option("--kv-tokens", type=COUNT, help="Tokens of KV (default: what fits).")
@click.option("--slo-ttft", type=Milliseconds(), help="Objective for the first token.")
@click.option("--slo-tpot", type=Milliseconds(), help="Objective for each further token.")
@click.option("--steps", type=click.Path(exists=True, dir_okay=False), metavar="RECORDING",
              help="Take capacity and durations from a recorded server; it is said how well its "
              "steps are foretold, and warned where others disturbed them.")  # fmt: skip
@click.option("--operators", metavar="PREFIX",
              help="Durations of measured operators, from PREFIX.dense.csv, "
              "PREFIX.per_sequence.csv, PREFIX.attention.csv and, if it is there, "
              "PREFIX.skew_fit.csv.")  # fmt: skip
@click.option("--check", is_flag=True,
              help="TRACE is a recording: does the scheduler decide the same again?")  # fmt: skip
@click.option("--noise", default=0.0, callback=_share, show_default=True,
              help="Relative noise on durations, such as 0.05.")  # fmt: skip
@click.option(
    "--seed", default=0, show_default=True, help="Of what is drawn: trace, noise, samples."
)
@click.option("--requests-out", type=OutputFile(), metavar="FILE",
              help="Write a line of JSON for each request of each run.")  # fmt: skip
@plot_option
@as_json
def simulate(trace: str, **flags: Any) -> None:
    """Replay TRACE in virtual time over the engine's own scheduler.

    TRACE is a file (Azure CSV, Mooncake JSONL, a log of requests, what `octavo serve --record`
    wrote, `.gz` too), or drawn: poisson:rate=1,seconds=600,prompt=1024,output=128,spread=0.8 (the
    values of what is left out), or gamma: with cv= (1), or servegen:FILE,start=0,seconds=600. A
    sample of Azure's conversations is in the repository: bench/data/azure_conv_sample.csv.gz.
    """
    from octavo.sim import report as reports

    if flags["check"]:
        refuse_given(flags.keys() - {"check", "as_json"}, "--check replays the recording as it was")
        _check(trace, flags["as_json"])
        return
    if flags["steps"]:
        refuse_given(OF_HARDWARE, "--steps takes capacity and durations from the recording")
    about = _about(trace, flags)
    made = list(_simulations(trace, flags))
    if flags["requests_out"]:
        _write_rows(made, flags["requests_out"])
    if flags["plot"]:
        from octavo.sim.pictures import draw_runs

        draw_runs(made, flags["plot"])
    if flags["as_json"]:
        echo_json([one.as_dict() | {"simulated": about} for _, one in made])
        return
    _show_about(about)
    title = _title([run.workload for run, _ in made])
    if len(made) > 1:
        show_table(title, *reports.compare_table([one for _, one in made]))
        paragraph(COMPARED if _slo(flags) else UNJUDGED)
        return
    click.secho(title, bold=True)
    one = made[0][1]
    for name, value in reports.facts(one):
        beside(f"  {click.style(name.ljust(12), dim=True)}", 14, value)
    show_table("", *reports.times_table(one))


def _title(loads: list[Workload]) -> str:
    """Whose requests, how many, and what was changed in all runs; what differs says each row."""
    first = loads[0]
    alike = [word for word in first.changes if all(word in load.changes for load in loads)]
    changed = f" ({'; '.join(alike)})" if alike else ""
    counts = sorted({len(load) for load in loads})
    number = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"{first.name}: {number} requests{changed}"


def _about(trace: str, flags: dict[str, Any]) -> dict[str, Any]:
    """What is simulated, for machines: whose trace, on which replicas."""
    from octavo.sim.recording import explained, is_recording, open_recording

    def recorded(path: str | None) -> str | None:
        return open_recording(path).model_name if path and is_recording(path) else None

    about = {"trace": trace, "recorded_model": recorded(trace), "replicas": flags["replicas"]}
    if flags["steps"]:
        found = explained(open_recording(flags["steps"]))
        if doubts := found.doubts():
            paragraph(f"warning: {doubts}", fg="yellow", err=True)
        about |= {"steps": flags["steps"], "model": recorded(flags["steps"]) or None}
        return about | {"step_model": dataclasses.asdict(found) | {"said": found.words()}}
    own = ("model", "hardware", "tp", "weights", "operators")
    return about | {"steps": None, **{name: flags[name] for name in own}}


def _show_about(about: dict[str, Any]) -> None:
    """The same in a line or two: numbers without their machine say nothing."""
    copies = f"{about['replicas']} x " if about["replicas"] > 1 or not about["steps"] else ""
    if about["steps"]:
        whose = f"the server of {about['steps']}"
        named = f" ({about['model']})" if about["model"] else ""
        click.secho(f"{copies}{whose}{named}: its capacity, its step times", bold=True)
        paragraph(about["step_model"]["said"])
        return
    device = about["hardware"] if about["tp"] == 1 else f"({about['tp']} x {about['hardware']})"
    how = f", operators of {about['operators']}" if about["operators"] else ""
    given = click.get_current_context().get_parameter_source
    source = click.core.ParameterSource.DEFAULT
    chosen = (
        "" if {given("model"), given("hardware")} != {source} else "  (-m and -H choose others)"
    )
    click.secho(f"{about['model']} on {copies}{device}, {about['weights']} weights{how}", bold=True,
                nl=False)  # fmt: skip
    click.echo(chosen)
    if about["recorded_model"] is not None:
        whose = about["recorded_model"] or "a server of its own"
        click.secho(
            f"{about['trace']} was recorded on {whose}: only its requests are used here. For that "
            f"server's own capacity and step times: --steps {about['trace']}",
            fg="yellow",
        )


def _simulations(trace: str, flags: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """(run, report) for each rate, policy and step budget asked for."""
    from octavo.sim import workload as workloads
    from octavo.sim.fleet import Fleet, wanting
    from octavo.sim.report import report

    base = _trimmed(workloads.named(trace, seed=flags["seed"]), flags)
    slo = _slo(flags)
    rates: list[float | None] = [*flags["rate"]] or [None]
    budgets = flags["max_batch_tokens"]
    for rate in rates:
        load = base if rate is None else base.at_rate(rate)
        for policy in flags["policy"]:
            for budget in budgets:
                spec = _spec(flags, policy, budget)
                load = load.fitting(spec.capacity.max_context)
                fleet = Fleet(
                    [spec] * flags["replicas"], _router(flags["router"]),
                    seed=flags["seed"], prefix_caching=load.shares_prefixes,
                )  # fmt: skip
                with progress(f"{policy} at {load.rate:.2f} req/s") as told:
                    run = fleet.run(load, wanting(slo), progress=told)
                name = policy if len(budgets) == 1 else f"{policy} {budget}"
                name = name if len(rates) == 1 else f"{name} at {rate:g}/s"
                yield run, report(run, slo, name)


def _write_rows(made: list[tuple[Any, Any]], path: str) -> None:
    """Every request of every run. Raises `InvalidRequest` where the file cannot be written."""
    from octavo.sim.report import row

    try:
        with Path(path).open("w") as file:
            for run, one in made:
                for outcome in run.outcomes:
                    file.write(json.dumps(row(outcome, one.slo, one.name)) + "\n")
    except OSError as error:
        raise InvalidRequest(f"{path}: {error.strerror}", "requests_out") from error


def _trimmed(load: Workload, flags: dict[str, Any]) -> Workload:
    if flags["window"] is not None:
        load = load.window(*flags["window"])
    if flags["head"] is not None:
        load = load.head(flags["head"])
    if flags["lengths"] is not None:
        load = load.lengths(flags["lengths"])
    return load


def _slo(flags: dict[str, Any]) -> Slo:
    from octavo.core.request import Slo

    ttft, tpot = flags["slo_ttft"], flags["slo_tpot"]
    return Slo(
        None if ttft is None else ttft / 1e3,
        None if tpot is None else tpot / 1e3,
    )


def _check(trace: str, machine: bool) -> None:
    """Replay a recording's calls; exit code 1 at the first step that is planned otherwise."""
    from octavo.sim.recording import open_recording, replay

    recording = open_recording(trace)
    if not any(recording.of("add")):
        raise BadFile(f"{recording.path}: no request in it")
    found = replay(recording, chosen(recording.head["policy"])[0])
    if machine:
        echo_json({**dataclasses.asdict(found), "identical": found.identical})
    else:
        click.echo(f"{found.same} of {found.steps} steps identical, {found.rows} rows compared")
        if found.differs:
            click.secho(found.differs, fg="red")
    if not found.identical:
        raise SystemExit(1)


def _spec(flags: dict[str, Any], policy: str, budget: int) -> Any:
    from octavo.sim.fleet import Spec
    from octavo.sim.roofline import place

    made, admits = chosen(policy)
    if flags["steps"]:
        from octavo.sim.executor import Learned
        from octavo.sim.recording import model_of, open_recording

        recording = open_recording(flags["steps"])
        learned = Learned(model_of(recording))
        return Spec(
            "recorded", recording.capacity, learned, made, noise=flags["noise"], admits=admits
        )
    (device,) = devices([flags["hardware"]])
    placed = place(model_config(flags["model"]), device, tp=flags["tp"], weights=flags["weights"])
    capacity = placed.capacity(
        max_rows=flags["max_rows"], max_tokens=budget, kv_tokens=flags["kv_tokens"]
    )
    seconds: Any = placed.durations()
    if flags["operators"] is not None:
        from octavo.sim.operators import read_operators

        seconds = read_operators(flags["operators"], placed.config.num_layers)
    return Spec(
        placed.name, capacity, seconds, made, noise=flags["noise"], price=placed.price,
        admits=admits,
    )  # fmt: skip


def policies() -> dict[str, Callable[[], Any]]:
    """What may stand behind --policy."""
    from octavo.core.policies import POLICIES

    return POLICIES


def chosen(words: str) -> tuple[Callable[[], Any], bool]:
    """(a policy's factory, whether admission stands before it) of "slo" or "slo+admission"."""
    name, plus, gate = words.partition("+")
    known = policies()
    if name not in known:
        raise InvalidRequest(
            f"no policy is called {name!r}: there are {', '.join(known)}, each with +admission or "
            "without",
            "policy",
        )
    if plus and gate != "admission":
        raise InvalidRequest(f"after + may stand admission, not {gate!r}", "policy")
    return known[name], bool(plus)


def _router(name: str) -> Router:
    from octavo.sim import fleet

    if name == "round-robin":
        return fleet.RoundRobin()
    if name == "least-tokens":
        return fleet.LeastTokens()
    return fleet.PredictedCost(fleet.prefill_rate)


# ---- plan ----


@click.command(
    cls=OurCommand,
    epilog="""\b
Examples:
  octavo plan azure.csv -m llama-3.1-8b -H l4,l40s,h100 --slo-ttft 2000 --slo-tpot 50
  octavo plan azure.csv -m ./config.json -H rtx-4090,h100 --rate 40 --target 0.99 --price h100=2.20
  octavo plan azure.csv -m llama-3.1-70b -H h100,h200,b200 --tp 2,4 --slo-ttft 3000
""",
)
@click.argument("trace")
@click.option("--model", "-m", required=True,
              help="A well-known model, a config.json or a GGUF file.")  # fmt: skip
@click.option("--hardware", "-H", default="l4,l40s,a100,h100", show_default=True, callback=_words,
              help="Kinds of machines that may be bought.")  # fmt: skip
@click.option("--tp", default="1", show_default=True, callback=counted,
              help="Devices of a replica, one or several to try.")  # fmt: skip
@click.option("--weights", default="bf16", show_default=True,
              help="How matrices are stored, as for `octavo roofline`.")  # fmt: skip
@click.option("--slo-ttft", type=Milliseconds(), help="Objective for the first token.")
@click.option("--slo-tpot", type=Milliseconds(), help="Objective for each further token.")
@click.option("--target", default=0.9, show_default=True,
              help="Share of requests that must meet all objectives.")  # fmt: skip
@click.option("--policy", default="fcfs", show_default=True, callback=_words,
              help="Policies to try, as for `octavo simulate`.")  # fmt: skip
@click.option("--max-batch-tokens", default="512,2048", callback=counted, show_default=True,
              help="Step budgets to try.")  # fmt: skip
@click.option(
    "--max-rows", default=256, type=COUNT, show_default=True, help="Most sequences in a step."
)
@click.option("--rate", type=float, help="Requests a second; gaps are stretched.")
@click.option("--window", callback=_window, metavar="START:END", help="Only these seconds.")
@click.option("--head", type=COUNT, default=1500, show_default=True,
              help="Only so many requests.")  # fmt: skip
@click.option("--lengths", type=float, help="Factor on prompt and output lengths.")
@click.option("--price", multiple=True, metavar="NAME=DOLLARS", help="Your price of an hour.")
@click.option("--mixed/--no-mixed", default=True, help="Try two kinds together.")
@click.option(
    "--seeds", default=8, type=COUNT, show_default=True, help="Samples of the trace to be sure on."
)
@click.option(
    "--seed", default=0, show_default=True, help="Of what is drawn: trace, noise, samples."
)
@as_json
def plan(trace: str, **flags: Any) -> None:
    """The cheapest fleet that serves TRACE within the objectives.

    Every kind alone by bisection, then pairs of kinds. A fleet counts if it reaches the target on
    the trace, and with 95 % confidence on bootstrap samples of it with 5 % noise on every step.
    Durations are the hardware's roofline at the stated efficiency: check the winner on a machine.
    """
    from octavo.sim import plan as planning
    from octavo.sim import workload as workloads
    from octavo.sim.report import words

    load = _trimmed(workloads.named(trace, seed=flags["seed"]), flags)
    if flags["rate"] is not None:
        load = load.at_rate(flags["rate"])
    specs, refused = _kinds(flags)
    with _saying() as told:
        planner = planning.Planner(
            load, _slo(flags), target=flags["target"], seeds=flags["seeds"], told=told
        )
        found = planner.plan(specs, mixed=flags["mixed"])
    found.impossible[:0] = refused
    if flags["as_json"]:
        echo_json({"model": flags["model"]} | _plan_dict(found))
        return
    title = (
        f"{load.name}: {len(load)} requests at {load.rate:.2f}/s, {flags['model']}, "
        f"{words(found.slo)}, {found.target:.0%} of them"
    )
    if found.best is None:
        click.secho(f"{title}: nothing of this is enough", fg="red")
    else:
        show_table(title, *planning.table(found))
        paragraph(_advice(found, flags["seeds"]))
    for name, why in found.impossible:
        click.echo(f"{name}: {why}")


def _advice(found: Any, seeds: int) -> str:
    """Which row to take, and what the columns mean."""
    from octavo.sim.plan import NOISE

    return (
        f"Take the first row, {found.best.name}: the cheapest with which {found.target:.0%} in "
        "time is sure. attained: share in time on the trace itself; sure of: its lower 95 % "
        f"bound over {seeds} bootstrap samples of the trace, with {NOISE:.0%} noise on every "
        "step. busy: share of the time in which its replicas compute, which they do whenever "
        "anybody is there: how near the edge a fleet is say its P99s beside the objectives. "
        f"{found.simulations} simulations."
    )


def _kinds(flags: dict[str, Any]) -> tuple[list[Any], list[tuple[str, str]]]:
    """(specs to try, (name, why not) of those that cannot be)."""
    specs, refused = [], []
    config = model_config(flags["model"])  # one that is none is no machine's fault
    for device in devices(flags["hardware"], flags["price"]):
        for tp in flags["tp"]:
            for policy in flags["policy"]:
                for budget in flags["max_batch_tokens"]:
                    try:
                        spec = _kind(config, device, tp, (policy, budget), flags)
                    except InvalidRequest as error:
                        if (device.name, str(error)) not in refused:
                            refused.append((device.name, str(error)))
                        continue
                    specs.append(spec)
    return specs, refused


def _kind(
    config: ModelConfig, device: Device, tp: int, how: tuple[str, int], flags: dict[str, Any]
) -> Any:
    from octavo.sim.fleet import Spec
    from octavo.sim.roofline import place

    policy, budget = how
    made, admits = chosen(policy)
    placed = place(config, device, tp=tp, weights=flags["weights"])
    if placed.price is None:
        raise InvalidRequest(f"no price is known: give --price {device.name}=...", "price")
    several = len(flags["policy"]) > 1
    name = f"{placed.name} ({policy} {budget})" if several else f"{placed.name} ({budget})"
    if len(flags["max_batch_tokens"]) == 1 and not several:
        name = placed.name
    capacity = placed.capacity(max_rows=flags["max_rows"], max_tokens=budget)
    return Spec(
        name, capacity, placed.durations(), made,
        price=placed.price, kind=placed.name, admits=admits,
    )  # fmt: skip


def _plan_dict(found: Any) -> dict[str, Any]:
    return {
        "trace": found.load.name,
        "rate": found.load.rate,
        "target": found.target,
        "simulations": found.simulations,
        "impossible": found.impossible,
        "fleets": [
            {
                "fleet": [{"kind": g.spec.name, "count": g.number} for g in c.groups],
                "dollars_per_hour": c.price,
                "attainment": c.shares,
                "sure": c.sure,
                "report": c.report.as_dict(),
            }
            for c in found.candidates
        ],
    }


@contextlib.contextmanager
def _saying() -> Iterator[Callable[[str], None]]:
    """A line on stderr that says what is being tried, on a terminal."""
    import sys

    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console

    with Console(stderr=True).status("planning") as status:
        yield lambda name: status.update(f"simulating {name}")
