"""`octavo lab kv`: one request's cache, step by step: populated, grown, read, found again.

A prompt is computed in chunks, which fill blocks; each decode writes one token more and reads all
before it; a second turn finds the blocks of the first. What a step writes and reads is counted by
the rules of the op table for exactly the rows that the scheduler made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from octavo import plots
from octavo.assembly import Assembly
from octavo.config import show_bytes
from octavo.core.batch import Batch, Row, StepResult
from octavo.core.engine import Engine
from octavo.core.executor import Executor
from octavo.errors import InvalidRequest
from octavo.lab import stage
from octavo.lab.finding import Finding, Sheet
from octavo.lab.stage import Clock, Setting, Visit, Watch
from octavo.neighbours import Neighbours, busy_note
from octavo.ops.cost import Hardware, cost
from octavo.ops.table import KV_DTYPES, Heads, RowShape, StepShape


@dataclass(frozen=True, slots=True)
class Plan:
    """prompt, output: tokens of the first turn; chunk: tokens of a step at most. more: tokens that
    the second turn adds to the first's prompt and output."""

    prompt: int = 120
    output: int = 60
    chunk: int = 64
    more: int = 40
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.prompt, self.output, self.chunk, self.more) < 2:
            raise InvalidRequest("every length of this experiment must be at least 2")


class Recorder:
    """An executor around the real one that keeps the row of each step and how long it took."""

    def __init__(self, inner: Executor) -> None:
        self.inner = inner
        self.capacity = inner.capacity
        self.rows: list[Row] = []
        self.seconds: list[float] = []

    def submit(self, batch: Batch) -> None:
        (row,) = batch.rows
        self.rows.append(row)
        self.inner.submit(batch)

    def collect(self) -> StepResult:
        result = self.inner.collect()
        self.seconds.append(result.finished - result.started)
        return result

    def ready_at(self) -> float | None:
        return self.inner.ready_at()


def measure(
    assembly: Assembly, plan: Plan, watch: Watch = lambda _: None, clock: Clock = Clock()
) -> dict[str, Any]:
    """Run both turns; plain values."""
    vocab = assembly.door.vocab_size
    neighbours = Neighbours()
    stage.warm(assembly)
    recorder = Recorder(assembly.executor)
    chunk = min(plan.chunk, recorder.capacity.max_tokens)
    engine = Setting("kv", rows=1, tokens=chunk, prefix_caching=True).engine(recorder)
    written: list[int] = []
    first = stage.requests([Visit(0.0, plan.prompt, plan.output)], vocab, f"kv {plan.seed}")
    watch("the first turn")
    stage.play(engine, first, clock, lambda _, news, __: written.extend(
        token for event in news for token in event.tokens))  # fmt: skip
    turn = len(recorder.rows)
    again = (*first[0].prompt, *written)
    visit = Visit(0.0, len(again) + plan.more, plan.output // 4 + 2, shared=again)
    watch("the second turn")
    trial = stage.play(engine, _renamed(stage.requests([visit], vocab, "more")), clock)
    steps = [
        _step(assembly, row, seconds, 1 if index < turn else 2)
        for index, (row, seconds) in enumerate(zip(recorder.rows, recorder.seconds, strict=True))
    ]
    return _about(assembly, engine) | {
        "prompt": plan.prompt,
        "output": plan.output,
        "second_prompt": visit.prompt,
        "second_cached": trial.timings[0].num_cached,
        "steps": steps,
        "neighbours": neighbours.share(),
    }


def _renamed(wanted: list[Any]) -> list[Any]:
    return [dataclasses.replace(one, id=f"second {one.id}") for one in wanted]


def _about(assembly: Assembly, engine: Engine) -> dict[str, Any]:
    """The shape of the cache, and where attention's reading weighs as much as the weights."""
    program, dtype = assembly.program, assembly.config.kv_dtype
    layers = [i for i in program.instrs if i.op == "attend"]
    heads = dict(layers[0].attrs)["heads"]
    assert isinstance(heads, Heads)
    token = heads.kv_bytes(KV_DTYPES[dtype]) * len(layers)
    weights = _work(assembly, RowShape(0, 1, 1)).weight_bytes
    return {
        "model": assembly.name,
        "kv_dtype": dtype,
        "layers": len(layers),
        "kv_heads": heads.num_kv_heads,
        "head_dim": heads.head_dim,
        "token_bytes": token,
        "block_size": engine.scheduler.capacity.block_size,
        "weight_bytes": weights,
        "even_context": weights / token,
    }


def _work(assembly: Assembly, row: RowShape) -> Any:
    """What a step of this one row must move, by the op table."""
    shape = StepShape((row,), KV_DTYPES[assembly.config.kv_dtype])
    return cost(assembly.program, shape, Hardware("", 1.0, 1.0, 1.0)).work


def _step(assembly: Assembly, row: Row, seconds: float, turn: int) -> dict[str, Any]:
    """One step. from, to: the tokens that it writes are [from, to); attention reads all before."""
    count = len(row.tokens)
    shape = RowShape(row.start, count, len(row.outputs))
    work = _work(assembly, shape)
    heads_bytes = _written(assembly, count)
    return {
        "turn": turn,
        "from": row.start,
        "to": row.start + count,
        "blocks": len(row.block_table),
        "table": list(row.block_table),
        "written_bytes": heads_bytes,
        "read_bytes": work.kv_bytes - heads_bytes,
        "weight_bytes": work.weight_bytes,
        "seconds": seconds,
    }


def _written(assembly: Assembly, count: int) -> float:
    """Bytes of K and V that so many new tokens write, in all layers."""
    found = 0.0
    for instr in assembly.program.instrs:
        heads = dict(instr.attrs).get("heads")
        if instr.op == "norm_qkv" and isinstance(heads, Heads):
            found += heads.kv_bytes(KV_DTYPES[assembly.config.kv_dtype]) * count
    return found


# ---- what it shows ----

HEAD = ("step", "writes tokens", "blocks", "cache holds", "empty", "writes", "reads", "weights",
        "ms")  # fmt: skip


def finding(values: dict[str, Any]) -> Finding:
    steps = values["steps"]
    rows = tuple(_row(i, steps, values) for i in chosen(steps))
    title = (
        f"{values['model']}: {values['layers']} layers x {values['kv_heads']} KV heads x "
        f"{values['head_dim']} x (K, V) in {values['kv_dtype']} = "
        f"{values['token_bytes']:,} bytes a token, {values['block_size']} tokens a block"
    )
    says = (_says(values), *busy_note(values))
    return Finding(values, (Sheet(title, HEAD, rows),), says, lambda path: draw(values, path))


def chosen(steps: Sequence[dict[str, Any]]) -> list[int]:
    """Steps worth a line: prefills, the first decode after them, those that open a block, the last
    of each turn."""
    found = []
    for i, step in enumerate(steps):
        before = steps[i - 1] if i else None
        after = steps[i + 1] if i + 1 < len(steps) else None
        prefill = step["to"] - step["from"] > 1
        new = before is None or before["turn"] != step["turn"]
        opens = before is not None and not new and step["blocks"] > before["blocks"]
        first = before is not None and before["to"] - before["from"] > 1
        last = after is None or after["turn"] != step["turn"]
        if prefill or new or opens or first or last:
            found.append(i)
    return found


def _row(index: int, steps: Sequence[dict[str, Any]], values: dict[str, Any]) -> tuple[str, ...]:
    step, size = steps[index], values["block_size"]
    kind = "prefill" if step["to"] - step["from"] > 1 else "decode"
    held = step["blocks"] * size * values["token_bytes"]
    empty = step["blocks"] * size - step["to"]
    return (
        f"{index + 1}: turn {step['turn']}, {kind}",
        f"{step['from']}–{step['to'] - 1}" if kind == "prefill" else str(step["from"]),
        str(step["blocks"]), show_bytes(held), f"{empty} slots", show_bytes(step["written_bytes"]),
        show_bytes(step["read_bytes"]), show_bytes(step["weight_bytes"]),
        f"{step['seconds'] * 1e3:.2f}",
    )  # fmt: skip


def _says(values: dict[str, Any]) -> str:
    steps = values["steps"]
    decodes = [s for s in steps if s["turn"] == 1 and s["to"] - s["from"] == 1]
    last, usual = decodes[-1], median(s["seconds"] for s in decodes)
    return (
        f"A token of context costs {show_bytes(values['token_bytes'])} for as long as its request "
        f"lives. Every decode writes that once and reads all of the context: "
        f"{show_bytes(last['read_bytes'])} at {last['to']} tokens, beside "
        f"{show_bytes(last['weight_bytes'])} of weights ({usual * 1e3:.1f} ms a step). "
        f"The two weigh the same at a context of {values['even_context']:,.0f} tokens: below it a "
        "batch is nearly free, for weights are read once for all; above it every sequence pays "
        "for its own. The second turn found "
        f"{values['second_cached']} of its {values['second_prompt']} tokens in the cache: whole "
        "blocks only, which is the ceiling. Empty are never more than "
        f"{values['block_size'] - 1} slots, the rest of the last block."
    )


# ---- the picture ----


def draw(values: dict[str, Any], path: str) -> None:
    """Left: every step over the slots of the cache. Right: bytes that a step reads."""
    steps, size = values["steps"], values["block_size"]
    drawing, (left, right) = plots.figure(1, 2, width=13, height=6.4)
    reads, writes, empty = "#a9cbe3", plots.COLOURS[0], "#eeeeee"
    for y, step in enumerate(steps, 1):
        left.barh(y, step["blocks"] * size, height=1.0, color=empty, lw=0)
        left.barh(y, step["from"], height=1.0, color=reads, lw=0)
        left.barh(y, step["to"] - step["from"], left=step["from"], height=1.0, color=writes, lw=0)
    most = max(step["blocks"] for step in steps)
    for block in range(most + 1):
        left.axvline(block * size, color="white", lw=1.0)
    turn = next((i for i, s in enumerate(steps) if s["turn"] == 2), None)
    if turn is not None:
        left.axhline(turn + 0.5, color=plots.INK, lw=1.2)
        left.annotate(
            f"second turn:\n{values['second_cached']} tokens are\nin the cache already",
            (most * size, turn + 0.5), xytext=(-6, 5), textcoords="offset points", ha="right",
            va="bottom", fontsize=9.5,
        )  # fmt: skip
    left.set_ylim(len(steps) + 0.5, 0.5)
    left.set_xlim(0, most * size)
    left.set_xticks([block * size for block in range(most + 1)])
    left.grid(visible=False)
    left.set(title="The cache, step by step", ylabel="step",
             xlabel=f"token of the sequence; lines are blocks of {size}")  # fmt: skip
    for colour, label in ((writes, "written"), (reads, "read by attention"), (empty, "empty")):
        left.barh([0], [0], color=colour, label=label)
    left.legend(loc="upper right", fontsize=9)
    _draw_bytes(right, values)
    plots.headline(
        drawing,
        f"Each token of context costs {values['token_bytes'] / 1024:.1f} KiB, and each decode "
        "reads all of them",
        f"{values['model']}, {values['kv_dtype']}; bytes by the op table",
    )
    plots.save(drawing, path)


def _draw_bytes(axes: Any, values: dict[str, Any]) -> None:
    """What a decode reads, on to where the cache weighs as much as the weights."""
    even = values["even_context"]
    x = [2.0**k for k in range(5, 18) if 2.0**k <= 4 * even] or [32.0, 64.0]
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.plot(x, [n * values["token_bytes"] / 2**20 for n in x], color=plots.COLOURS[0], lw=1.8,
              label="the cache of one request")  # fmt: skip
    axes.axhline(values["weight_bytes"] / 2**20, color=plots.COLOURS[1], lw=1.8,
                 label="the weights, once for a whole batch")  # fmt: skip
    seen = [s for s in values["steps"] if s["to"] - s["from"] == 1]
    axes.plot([s["to"] for s in seen], [s["read_bytes"] / 2**20 for s in seen], "o", ms=4,
              color=plots.COLOURS[0], label="the steps of this run")  # fmt: skip
    axes.axvline(even, color=plots.FAINT, ls=":", lw=1.2)
    axes.annotate(f"{even:,.0f} tokens", (even, 0.03), xytext=(5, 0), fontsize=9,
                  xycoords=("data", "axes fraction"), textcoords="offset points")  # fmt: skip
    plots.round_ticks(axes.yaxis)
    axes.set_xticks(x, [f"{n / 1024:.0f}k" if n >= 1024 else f"{n:.0f}" for n in x])
    axes.minorticks_off()
    axes.set(title="What one decode reads", xlabel="tokens of context", ylabel="MiB")
    axes.legend(loc="upper left", fontsize=9)
