"""`octavo lab flash`: why attention must not write its scores to memory.

Naive attention (scores to memory, softmax, product with the values: kernels/cpu/naive.inl) against
ours (kernels/cpu/attention.inl), one layer's causal self-attention over N tokens: time, peak
memory, bytes as the op table counts them, and last-level misses of a simulated small cache.
FlashAttention (Dao et al. 2022, arXiv:2205.14135) proves Theta(N^2 d^2 / M) memory accesses for a
cache of M elements, against Theta(N d + N^2) for the naive way.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from octavo import plots
from octavo.benchmark.roofline import SCORE_BYTES
from octavo.ceilings import measure_ceilings
from octavo.config import show_bytes
from octavo.errors import InvalidRequest
from octavo.lab import misses
from octavo.lab.finding import Finding, Sheet
from octavo.neighbours import Neighbours, busy_note
from octavo.ops.table import TABLE, Call, Heads, RowShape, Shape, StepShape, T

KINDS = ("naive", "flash")
LAYER = Heads(9, 3, 64)  # SmolLM2's
LINE = 64
SCALE = 0.25  # of the inputs: scores of an ordinary spread
Watch = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """Tokens to attend over, natively and in the simulated caches."""

    tokens: tuple[int, ...] = (256, 512, 1024, 2048, 4096, 8192, 16384)
    heads: Heads = LAYER
    threads: int | None = None
    isa: str = "auto"
    seconds: float = 0.5
    simulated: tuple[int, ...] = (128, 256, 512, 1024)
    caches: tuple[int, ...] = (65536, 131072, 262144, 524288, 1048576)
    cache: int = 262144

    def __post_init__(self) -> None:
        if any(n % 32 or n < 32 for n in self.tokens):
            raise InvalidRequest("--tokens must be multiples of 32")


def measure(plan: Plan, watch: Watch = lambda _: None) -> dict[str, Any]:
    """Everything measured, as plain values."""
    from octavo.kernels import _cpu, isas

    threads = plan.threads or _cpu.affinity_count()
    neighbours, native = Neighbours(), []
    for n in sorted(plan.tokens):
        watch(f"{n} tokens")
        native.append(_native(plan, n, threads))
    others = neighbours.share()  # before the simulated caches, which are processes of ours
    return {
        "heads": dataclasses.asdict(plan.heads),
        "threads": threads,
        "isa": isas()[0] if plan.isa == "auto" else plan.isa,
        "ceilings": measure_ceilings(threads, plan.isa).as_dict(),
        "native": native,
        "neighbours": others,
        "simulated": _simulated(plan, watch),
    }


def _native(plan: Plan, n: int, threads: int) -> dict[str, Any]:
    from octavo.kernels import _cpu

    draw = np.random.default_rng(n)
    q, k, v = (
        (draw.standard_normal((n, h, plan.heads.head_dim)) * SCALE).astype(np.float32)
        for h in (plan.heads.num_heads, plan.heads.num_kv_heads, plan.heads.num_kv_heads)
    )
    row: dict[str, Any] = {"tokens": n}
    outs = {}
    for kind in KINDS:
        naive = kind == "naive"
        with _Peak() as peak:
            outs[kind], _, scratch = _cpu.time_attention(q, k, v, naive, threads, 0.0, plan.isa)
        _, best, _ = _cpu.time_attention(q, k, v, naive, threads, plan.seconds, plan.isa)
        row[kind] = {"seconds": best, "scratch_bytes": scratch, "peak_bytes": peak.grown}
    row["difference"] = float(np.abs(outs["naive"] - outs["flash"]).max())
    flash = counted_bytes(plan.heads, n)
    row["flash"]["moved_bytes"] = flash
    row["naive"]["moved_bytes"] = flash + SCORE_BYTES * plan.heads.num_heads * n * (n + 1) // 2
    return row


def counted_bytes(heads: Heads, n: int) -> float:
    """What the op table says that attention over n tokens must move: each q, k, v and output once.
    The naive way adds every visible pair's score and weight, written and read."""
    call = Call("attend", (Shape("f32", T, heads.q_size),), (), {"window": None, "heads": heads})
    return TABLE["attend"].work(call, StepShape((RowShape(0, n),))).bytes


def operations(heads: Heads, n: int) -> float:
    """Of both ways: two products for each visible pair of each head."""
    return 4.0 * heads.q_size * (n * (n + 1) // 2)


class _Peak:
    """By how much this process's resident memory grows at most inside; None if the system will
    not say (the kernel's high-water mark is reset by writing 5 to clear_refs)."""

    grown: int | None = None

    def __enter__(self) -> _Peak:
        with contextlib.suppress(OSError, AttributeError):  # glibc alone has it
            # What was freed and kept would be used again unseen.
            ctypes.CDLL(None).malloc_trim(0)
        try:
            Path("/proc/self/clear_refs").write_text("5")
            self._before: int | None = self._status("VmRSS")
        except OSError:
            self._before = None
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            self.grown = self._status("VmHWM") - self._before

    @staticmethod
    def _status(field: str) -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
        return 0


def _simulated(plan: Plan, watch: Watch) -> dict[str, Any]:
    """Misses over N with one cache, and over caches with the largest N; or why there are none."""
    dim = plan.heads.head_dim
    try:
        misses.require()
        with tempfile.TemporaryDirectory() as folder:
            watch("building the driver for cachegrind")
            driver = misses.build(Path(folder))

            def both(n: int, cache: int) -> dict[str, Any]:
                watch(f"cachegrind: {n} tokens, a cache of {_size(cache)}")
                found = {kind: misses.count(driver, kind, n, dim, cache) for kind in KINDS}
                return {"tokens": n, "cache": cache, **found}

            over_tokens = [both(n, plan.cache) for n in plan.simulated]
            over_caches = [
                over_tokens[-1] if cache == plan.cache else both(plan.simulated[-1], cache)
                for cache in plan.caches
            ]
    except misses.Unavailable as reason:
        return {"unavailable": str(reason)}
    return {"head_dim": dim, "cache": plan.cache, "tokens": over_tokens, "caches": over_caches}


# ---- what it shows ----


def finding(values: dict[str, Any]) -> Finding:
    heads = Heads(**values["heads"])
    about = (
        f"One layer's causal attention, {heads.num_heads} query heads on {heads.num_kv_heads} KV "
        f"heads of {heads.head_dim}, {values['threads']} threads, {values['isa']}"
    )
    sheets = [Sheet(about, HEAD, tuple(_row(row, heads) for row in values["native"]))]
    simulated = values["simulated"]
    if "unavailable" not in simulated:
        sheets += _simulated_sheets(simulated)
    says = (
        *(_says_native(values), _says_time(values), _says_simulated(simulated)),
        *busy_note(values),
    )
    return Finding(values, tuple(sheets), says, lambda path: draw(values, path))


HEAD = ("tokens", "naive ms", "ours ms", "ours Gop/s", "faster", "naive peak", "ours peak",
        "naive moves", "ours moves")  # fmt: skip


def _size(count: float) -> str:
    return show_bytes(count).replace(".00", "")


def memory(part: dict[str, Any]) -> int:
    """Peak growth as the kernel saw it, else the scratch that was asked for."""
    return int(part["scratch_bytes"] if part["peak_bytes"] is None else part["peak_bytes"])


def _row(row: dict[str, Any], heads: Heads) -> tuple[str, ...]:
    naive, flash = row["naive"], row["flash"]
    return (
        str(row["tokens"]),
        f"{naive['seconds'] * 1e3:.2f}",
        f"{flash['seconds'] * 1e3:.2f}",
        f"{operations(heads, row['tokens']) / flash['seconds'] / 1e9:.0f}",
        f"{naive['seconds'] / flash['seconds']:.2f}x",
        _size(memory(naive)),
        _size(memory(flash)),
        _size(naive["moved_bytes"]),
        _size(flash["moved_bytes"]),
    )


def _simulated_sheets(simulated: dict[str, Any]) -> list[Sheet]:
    def rows(cells: Sequence[dict[str, Any]], key: str) -> tuple[tuple[str, ...], ...]:
        return tuple(
            (
                _size(c[key]) if key == "cache" else str(c[key]),
                f"{c['naive']:,}",
                f"{c['flash']:,}",
                f"{c['naive'] / max(c['flash'], 1):.1f}x",
            )
            for c in cells
        )

    head = ("naive misses", "ours", "fewer")
    largest = simulated["tokens"][-1]["tokens"]
    return [
        Sheet(f"Last-level misses, one head, a cache of {_size(simulated['cache'])} "
              "(cachegrind)", ("tokens", *head), rows(simulated["tokens"], "tokens")),
        Sheet(f"The same at {largest} tokens, over the size of the cache", ("cache", *head),
              rows(simulated["caches"], "cache")),
    ]  # fmt: skip


def _says_native(values: dict[str, Any]) -> str:
    native = values["native"]
    first, last = native[0], native[-1]
    naive, flash = last["naive"], last["flash"]
    text = (
        f"Memory: at {last['tokens']} tokens the naive way takes {_size(memory(naive))} beyond its "
        f"inputs, ours {_size(memory(flash))}. Both do the same products in bf16 and agree to "
        f"{max(r['difference'] for r in native):.0e}."
    )
    if len(native) > 1:
        times = last["tokens"] / first["tokens"]
        text += (
            f" From {first['tokens']} tokens on ({times:.0f} times as many) the naive way's "
            f"scores grew {naive['scratch_bytes'] / first['naive']['scratch_bytes']:.0f} times, "
            "quadratically, and that with one head at a time: a framework holds all heads' at once."
        )
    return text


# Dense bf16 and memory of an H100 SXM: NVIDIA's data sheet, 989.4 TFLOP/s and 3.35 TB/s.
H100_RIDGE = 989.4 / 3.35


def _says_time(values: dict[str, Any]) -> str:
    """Why time is won here, or is not: the naive way's intensity against the ridge."""
    last, heads = values["native"][-1], Heads(**values["heads"])
    naive, flash = last["naive"]["seconds"], last["flash"]["seconds"]
    done = operations(heads, last["tokens"])
    intensity = done / last["naive"]["moved_bytes"]
    rates = values["ceilings"]["all"]
    ridge = rates["bf16"] / rates["dram"]
    here = (
        f"above it: the arithmetic of {values['threads']} threads takes longer than even this "
        "traffic, and little is won but the time of the passes in between"
        if intensity > ridge
        else f"below it: it cannot pass {intensity / ridge:.0%} of the peak"
    )
    ahead = [r["tokens"] for r in values["native"] if r["naive"]["seconds"] < r["flash"]["seconds"]]
    listed = ", ".join(map(str, ahead))
    but = f" At {listed} tokens the naive way was faster." if ahead else ""
    return (
        f"Time: {naive * 1e3:.0f} ms the naive way, {flash * 1e3:.0f} ms ours "
        f"({done / flash / 1e9:.0f} Gop/s, {done / flash / rates['bf16']:.0%} of the bf16 peak)."
        f"{but} The naive way does {intensity:.0f} operations for each byte it moves, however "
        f"long the context; this machine's ridge (bf16 peak over memory bandwidth) is at "
        f"{ridge:.0f}, so it is {here}. On an H100 the ridge is at {H100_RIDGE:.0f}: there the "
        f"naive way is held to {intensity / H100_RIDGE:.0%} of the peak, and keeping the scores "
        "in the chip is the "
        "whole speed."
    )


def _says_simulated(simulated: dict[str, Any]) -> str:
    if "unavailable" in simulated:
        return f"Misses were not counted: {simulated['unavailable']}."
    last, dim = simulated["tokens"][-1], simulated["head_dim"]
    big = simulated["caches"][-1]
    n = last["tokens"]
    return (
        f"In a cache of {_size(simulated['cache'])}, {n} tokens cost the naive way "
        f"{last['naive']:,} misses and ours {last['flash']:,}. Theory: the scores alone are "
        f"{score_lines(n):,} lines written or read; ours needs the inputs and outputs once, "
        f"{compulsory_lines(n, dim):,} lines, as long as K and V stay in the cache "
        f"({_size(4 * dim * n)} here), and reads them again for each tile of rows when they "
        f"do not: Theta(N^2 d^2 / M) falls as the cache grows ({big['flash']:,} in "
        f"{_size(big['cache'])}), Theta(N d + N^2) stays until all scores fit."
    )


def score_lines(n: int) -> int:
    """Cache lines of the scores and weights of one head that are written and read."""
    return SCORE_BYTES * n * (n + 1) // 2 // LINE


def compulsory_lines(n: int, dim: int) -> int:
    """Cache lines of one head's q and output in f32 and K and V in bf16."""
    return n * dim * (4 + 4 + 2 + 2) // LINE


# ---- the picture ----


def draw(values: dict[str, Any], path: str) -> None:
    simulated = values["simulated"]
    count = 2 if "unavailable" in simulated else 4
    drawing, axes = plots.figure(count // 2, 2, width=11, height=4.4 * (count // 2) + 0.5)
    panels = axes.flatten()
    native = values["native"]
    tokens = [row["tokens"] for row in native]
    _draw_speed(panels[0], values)
    _lines(panels[1], tokens, {k: [memory(r[k]) / 2**20 for r in native] for k in KINDS})
    panels[1].set(title="Peak memory beyond the inputs", ylabel="MiB", xlabel="tokens")
    if count == 4:
        _draw_misses(panels[2], panels[3], simulated)
    handles, labels = panels[0].get_legend_handles_labels()
    drawing.legend(handles, labels, loc="outside lower center", ncols=2)
    last = native[-1]
    less = memory(last["naive"]) / memory(last["flash"])
    plots.headline(
        drawing,
        f"Scores that stay in a tile: {less:.0f} times less memory at {last['tokens']:,} tokens",
        f"one layer's causal attention, {values['threads']} threads, {values['isa']}",
    )
    plots.save(drawing, path)


def _draw_speed(axes: Any, values: dict[str, Any]) -> None:
    """Time, as operations a second: under the peak it can be read at every length."""
    native, heads = values["native"], Heads(**values["heads"])
    tokens = [row["tokens"] for row in native]
    speeds = {
        k: [operations(heads, r["tokens"]) / r[k]["seconds"] / 1e9 for r in native] for k in KINDS
    }
    _lines(axes, tokens, speeds)
    peak = values["ceilings"]["all"]["bf16"] / 1e9
    axes.set_yscale("linear")
    axes.set_ylim(0, peak * 1.25)
    axes.axhline(peak, color=plots.INK, lw=1.3)
    axes.text(tokens[0], peak * 1.03, f"bf16 peak, {peak:.0f} Gop/s", fontsize=9)
    axes.set(title="Speed", ylabel="Gop/s", xlabel="tokens")


NAMES = {"naive": "naive: scores in memory", "flash": "ours: scores in a tile"}
COLOURS = {"naive": plots.COLOURS[1], "flash": plots.COLOURS[0]}


def _lines(axes: Any, x: Sequence[float], series: dict[str, list[float]]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for kind, y in series.items():
        axes.plot(x, y, "o-", color=COLOURS[kind], label=NAMES[kind], lw=1.8, ms=5)
    axes.set_xticks(x, [_count(n) for n in x])
    axes.minorticks_off()
    plots.round_ticks(axes.yaxis)


def _count(n: float) -> str:
    return f"{n / 1024:.0f}k" if n >= 1024 and n % 1024 == 0 else f"{n:.0f}"


def _draw_misses(over_n: Any, over_m: Any, simulated: dict[str, Any]) -> None:
    cells, dim = simulated["tokens"], simulated["head_dim"]
    tokens = [c["tokens"] for c in cells]
    _lines(over_n, tokens, {k: [c[k] for c in cells] for k in KINDS})
    theory = {"style": ":", "color": plots.FAINT}
    over_n.plot(tokens, [score_lines(n) for n in tokens], theory["style"], color=theory["color"],
                label="the scores' lines, ~ N²")  # fmt: skip
    over_n.plot(tokens, [compulsory_lines(n, dim) for n in tokens], "--", color=theory["color"],
                label="inputs and outputs once, ~ N d")  # fmt: skip
    cache = _size(simulated["cache"])
    over_n.set(title=f"Misses in a cache of {cache}", ylabel="lines", xlabel="tokens")
    theory_lines = over_n.get_lines()[len(KINDS) :]
    over_n.legend(handles=theory_lines, loc="upper left", fontsize=9)
    cells = simulated["caches"]
    _lines(over_m, [c["cache"] for c in cells], {k: [c[k] for c in cells] for k in KINDS})
    over_m.set_xticks([c["cache"] for c in cells], [_size(c["cache"]) for c in cells])
    fits = 4 * dim * tokens[-1]
    over_m.axvline(fits, color=plots.FAINT, ls=":", lw=1.2)
    over_m.text(fits * 1.05, over_m.get_ylim()[0] * 1.15, "K and V fit", color=plots.FAINT,
                fontsize=9)  # fmt: skip
    over_m.set(title=f"Misses at {tokens[-1]} tokens", ylabel="lines", xlabel="last-level cache")
