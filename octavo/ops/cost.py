"""What a step of a Program costs: operations, bytes, and the seconds a machine must spend on them.

A roofline: each op takes the longer of its bytes at the machine's bandwidth and its operations at
the machine's rate, plus a fixed overhead. It is a lower bound with a small tax, not a promise; the
rules themselves live in the op table, so no formula is written beside the model. Weight bytes are
those of the stored types if the program was `typed`, else BF16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from octavo.ops.program import Program
from octavo.ops.table import TABLE, KvFormat, RowShape, StepShape, Work


@dataclass(frozen=True, slots=True)
class Hardware:
    """A machine as the roofline sees it; every figure is measured or cited by whoever makes one.

    bytes_per_s: memory bandwidth. flops_per_s: matrix products (a multiply-add is two).
    attend_flops_per_s: attention. op_seconds: barrier or launch, each op. step_seconds: host work
    outside the program, each step. op_flops_per_s: rates of single ops by name, where they differ
    from the two.
    """

    name: str
    bytes_per_s: float
    flops_per_s: float
    attend_flops_per_s: float
    op_seconds: float = 0.0
    step_seconds: float = 0.0
    op_flops_per_s: Mapping[str, float] = field(default_factory=dict)

    def rate(self, op: str) -> float:
        """Operations a second in an op."""
        general = self.attend_flops_per_s if op == "attend" else self.flops_per_s
        return self.op_flops_per_s.get(op, general)


@dataclass(frozen=True, slots=True)
class OpCost:
    """One instruction's share. layer: None outside the layers. bound: what it waits for."""

    op: str
    layer: int | None
    work: Work
    seconds: float
    bound: str


@dataclass(frozen=True, slots=True)
class Cost:
    """A step's total, and its instructions in order. seconds include the step's host work."""

    work: Work
    seconds: float
    ops: tuple[OpCost, ...]

    @property
    def flops(self) -> float:
        return self.work.flops

    @property
    def bytes(self) -> float:
        return self.work.bytes

    def __str__(self) -> str:
        """A table with one line for each kind of op."""
        head = f"{'op':<18}{'GFLOP':>10}{'MB':>10}{'ms':>10}{'share':>8}  bound"
        lines = [head]
        for op in dict.fromkeys(part.op for part in self.ops):
            parts = [part for part in self.ops if part.op == op]
            seconds = sum(part.seconds for part in parts)
            bounds = "/".join(dict.fromkeys(part.bound for part in parts))
            lines.append(f"{_line(op, _total(p.work for p in parts), seconds, self)}  {bounds}")
        return "\n".join([*lines, _line("step", self.work, self.seconds, self)])


def cost(program: Program, shape: StepShape, hardware: Hardware) -> Cost:
    """The cost of one step of `program` on rows as in `shape`."""
    parts, layer = [], None
    for instr in program.instrs:
        work = TABLE[instr.op].work(program.call(instr), shape)
        memory = work.bytes / hardware.bytes_per_s
        compute = work.flops / hardware.rate(instr.op)
        seconds = max(memory, compute) + hardware.op_seconds
        layer = _layer(instr.attrs, layer, instr.op)
        parts.append(
            OpCost(instr.op, layer, work, seconds, "memory" if memory >= compute else "compute")
        )
    total = sum(part.seconds for part in parts) + hardware.step_seconds
    return Cost(_total(part.work for part in parts), total, tuple(parts))


def step_seconds(program: Program, hardware: Hardware) -> Callable[[StepShape], float]:
    """Predicted seconds of a step, as a function of its shape alone."""
    return lambda shape: cost(program, shape, hardware).seconds


def step_terms(program: Program, hardware: Hardware, kv: KvFormat = KvFormat()) -> dict[str, float]:
    """The cost of a step as a line in its shape: what `octavo.core.steptime.Coefficients` takes.

    Differences of `cost` between steps that differ in one thing. `knee`: the tokens at which a step
    stops waiting for weights and waits for arithmetic, where the slope grows by `bend`.
    """

    def at(*rows: tuple[int, int, int]) -> float:
        shape = StepShape(tuple(RowShape(*row) for row in rows), kv)
        return cost(program, shape, hardware).seconds

    one, few, some, many = (at((0, count, 0)) for count in (1, 5, 512, 1024))
    area = max(0.0, at((4096, 512, 0)) - some) / (512 * 4096)
    # Attention's own share grows with the square of the chunk: it is counted apart.
    steep = max(0.0, many - some - area * (1024**2 - 512**2) / 2) / 512
    slope = min(max(0.0, few - one) / 4, steep)
    level = some - area * 512**2 / 2
    bend = steep - slope
    # The two lines meet where one + slope (T - 1) = level + steep (T - 512).
    knee = (one - slope - level + steep * 512) / bend if bend > 0.0 else 0.0
    return {
        "fixed": max(one - slope, 1e-9),
        "token": max(slope, 1e-12),
        "context": max(0.0, at((2047, 1, 0)) - at((1023, 1, 0))) / 1024,
        "area": area,
        "decode": 0.0,
        "sample": max(0.0, at((0, 16, 16)) - at((0, 16, 0))) / 16,
        "bend": bend,
        "knee": min(max(knee, 0.0), 512.0),
    }


def _layer(attrs: tuple[tuple[str, object], ...], current: int | None, op: str) -> int | None:
    if op in ("embed", "final_norm_head"):
        return None
    layer = dict(attrs).get("layer", current)
    return layer if isinstance(layer, int) else None


def _total(works: Iterable[Work]) -> Work:
    return sum(works, start=Work())


def _line(name: str, work: Work, seconds: float, whole: Cost) -> str:
    share = seconds / whole.seconds if whole.seconds else 0.0
    gflop, mb = work.flops / 1e9, work.bytes / 1e6
    return f"{name:<18}{gflop:>10.3f}{mb:>10.2f}{seconds * 1e3:>10.3f}{share:>8.1%}"
