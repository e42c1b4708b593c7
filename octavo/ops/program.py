"""A model's forward as a flat list of op calls, in which only T and S vary.

A Program is data: run it (a backend replays it), verify it, cost it (`octavo.ops.cost`), draw it.
It holds no numbers and no memory. Invariant: `verify()` passes on every Program that
`octavo.ops.trace.trace` returns, so replaying code need not check again.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from octavo.errors import EngineError
from octavo.models.config import Rope
from octavo.ops.table import TABLE, Call, Extent, Heads, Shape, WeightSpec


@dataclass(frozen=True, slots=True)
class Instr:
    """One op call. inputs, output: value ids. weights: names in the table's order or None."""

    op: str
    inputs: tuple[int, ...]
    output: int
    weights: tuple[str | None, ...]
    attrs: tuple[tuple[str, object], ...]

    def attr(self, name: str) -> object:
        return dict(self.attrs)[name]

    def __str__(self) -> str:
        parts = [", ".join(f"%{i}" for i in self.inputs)]
        parts += [", ".join(w or "-" for w in self.weights)] if self.weights else []
        parts.append(", ".join(f"{name}={_text(value)}" for name, value in self.attrs))
        return f"%{self.output} = {self.op}({'; '.join(parts)})"


@dataclass(frozen=True, slots=True)
class Arena:
    """Where each computed value lies: byte offsets linear in T and S, so that values alive at the
    same time never overlap, whatever T and S; None for inputs, which are the caller's. A value
    takes over the memory of one that dies at its birth only where the table allows it.

    size: of the whole arena. unshared: what it would be with no memory used twice.
    """

    offsets: tuple[Extent | None, ...]
    size: Extent
    unshared: Extent

    def bytes_at(self, max_tokens: int, max_outputs: int) -> int:
        return self.size.at(max_tokens, max_outputs)


@dataclass(frozen=True, slots=True)
class Program:
    """values[i] is the shape of value i; inputs come first; there is one output."""

    inputs: tuple[str, ...]
    values: tuple[Shape, ...]
    instrs: tuple[Instr, ...]
    output: int
    weights: tuple[WeightSpec, ...]
    _by_name: Mapping[str, WeightSpec] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_name", {spec.name: spec for spec in self.weights})

    def typed(self, types: Mapping[str, str]) -> Program:
        """The same program with the stored type of every tensor, by logical tensor name."""
        return replace(self, weights=tuple(spec.typed(types) for spec in self.weights))

    def call(self, instr: Instr) -> Call:
        """What the table's rules look at. Raises EngineError for an unknown weight."""
        for name in instr.weights:
            if name is not None and name not in self._by_name:
                raise EngineError(f"{instr.op}: no weight is called {name}")
        return Call(
            instr.op,
            tuple(self.values[i] for i in instr.inputs),
            tuple(None if name is None else self._by_name[name] for name in instr.weights),
            dict(instr.attrs),
        )

    def verify(self) -> None:
        """Raise EngineError unless every value is defined once and before use, every op is called
        as the table says, shapes agree, every weight is known and used, and all values serve."""
        defined, used = set(range(len(self.inputs))), {self.output}
        weights: set[str | None] = {None}
        for instr in self.instrs:
            _verify_form(instr)
            for i in instr.inputs:
                _require(i in defined, instr, f"%{i} is used before it is defined")
            _require(instr.output not in defined, instr, f"%{instr.output} is defined twice")
            _require(instr.output < len(self.values), instr, f"%{instr.output} has no shape")
            shape, stated = TABLE[instr.op].shape(self.call(instr)), self.values[instr.output]
            _require(shape == stated, instr, f"gives {shape}, stated as {stated}")
            defined.add(instr.output)
            used.update(instr.inputs)
            weights.update(instr.weights)
        if self.output not in defined:
            raise EngineError(f"the output %{self.output} is never defined")
        if idle := set(range(len(self.inputs), len(self.values))) - used:
            raise EngineError(f"values {sorted(idle)} serve nothing")
        if missing := self._by_name.keys() - weights:
            raise EngineError(f"weights {sorted(missing)} serve nothing")

    def last_uses(self) -> tuple[int, ...]:
        """For each value, the index of the last instruction that reads it; the output and what no
        instruction reads live to the end (index len(instrs))."""
        last = [len(self.instrs)] * len(self.values)
        for index, instr in enumerate(self.instrs):
            for i in instr.inputs:
                last[i] = index
        last[self.output] = len(self.instrs)
        return tuple(last)

    def arena(self, row_bytes: Callable[[Shape], int] | None = None, align: int = 64) -> Arena:
        """Plan one arena for all values; row_bytes says what a backend keeps of a row of a value.

        Of values with the same slot, one's size must bound the other's for all T and S <= T, so
        offsets stay linear and the plan holds at every size, not only at the largest.
        """
        size_of = row_bytes or (lambda shape: max(shape.cols, 1) * 4)
        sizes = [v.rows * (-(-size_of(v) // align) * align) for v in self.values]
        slots, slot_of = _assign(self, sizes)
        starts = [Extent()]
        for slot in slots:
            starts.append(starts[-1] + slot)
        unshared = sum(sizes[len(self.inputs) :], start=Extent())
        offsets = tuple(None if slot is None else starts[slot] for slot in slot_of)
        return Arena(offsets, starts[-1], unshared)

    def __str__(self) -> str:
        head = ", ".join(f"%{i} {n}: {self.values[i]}" for i, n in enumerate(self.inputs))
        lines = [f"program({head}) -> %{self.output}: {self.values[self.output]}"]
        lines += [f"  {instr} : {self.values[instr.output]}" for instr in self.instrs]
        return "\n".join(lines)

    def diff(self, other: Program) -> str:
        """A unified diff of the two programs' text, weights included; empty if they are equal."""
        mine, theirs = ([*str(p).splitlines(), *map(str, p.weights)] for p in (self, other))
        lines = difflib.unified_diff(mine, theirs, "this", "other", lineterm="", n=1)
        return "\n".join(lines)

    def draw(self) -> str:
        """A picture in text: what flows where, with runs of alike layers folded into one."""
        lines = ["  ".join(f"{n}: {self.values[i]}" for i, n in enumerate(self.inputs))]
        for count, group in _folded(self.instrs):
            if count > 1:
                lines.append(f"  ┌─ {count} times")
            lines += [_draw(self, instr, "  │ " if count > 1 else "    ") for instr in group]
            if count > 1:
                lines.append("  └─")
        return "\n".join([*lines, f"output: {self.values[self.output]}"])


def _text(value: object) -> str:
    if isinstance(value, Heads):
        return f"{value.num_heads}q/{value.num_kv_heads}kv x {value.head_dim}"
    if isinstance(value, Rope):
        scaled = "" if value.scaling == "none" else f" {value.scaling}"
        return f"{value.base:g}{scaled}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _require(condition: bool, instr: Instr, what: str) -> None:
    if not condition:
        raise EngineError(f"{instr}: {what}")


def _verify_form(instr: Instr) -> None:
    op = TABLE.get(instr.op)
    if op is None:
        raise EngineError(f"no op is called {instr.op}")
    _require(len(instr.inputs) == len(op.inputs), instr, f"inputs should be {op.inputs}")
    _require(len(instr.weights) == len(op.weights), instr, f"weights should be {op.weights}")
    _require(tuple(n for n, _ in instr.attrs) == op.attrs, instr, f"attrs should be {op.attrs}")
    for name, given in zip(op.weights, instr.weights, strict=True):
        _require(given is not None or name.endswith("?"), instr, f"{name} may not be absent")


def _assign(program: Program, sizes: list[Extent]) -> tuple[list[Extent], list[int | None]]:
    """Slots (their sizes) and each value's slot, in one pass over birth and death."""
    slots: list[Extent] = []
    slot_of: list[int | None] = [None] * len(program.values)
    free: set[int] = set()
    last = program.last_uses()

    def place(value: int, candidates: set[int]) -> int:
        fitting = [s for s in candidates if _bounds(slots[s], sizes[value])]
        growing = [s for s in candidates if _bounds(sizes[value], slots[s])]
        if fitting:
            slot = min(fitting, key=lambda s: (slots[s].t, slots[s].s, slots[s].c, s))
        elif growing:
            slot = max(growing, key=lambda s: (slots[s].t, slots[s].s, slots[s].c, -s))
            slots[slot] = sizes[value]
        else:
            slot = len(slots)
            slots.append(sizes[value])
        slot_of[value] = slot
        free.discard(slot)
        return slot

    for index, instr in enumerate(program.instrs):
        dying = {s for i in instr.inputs if last[i] == index and (s := slot_of[i]) is not None}
        heir = _heir(instr, index, sizes, last)
        own = None if heir is None else slot_of[heir]
        slot = place(instr.output, free if own is None else {own})
        free |= dying - {slot}
    return slots, slot_of


def _heir(instr: Instr, index: int, sizes: list[Extent], last: tuple[int, ...]) -> int | None:
    """The input whose memory the output takes over, if the table allows it and it dies here."""
    op = TABLE[instr.op]
    if op.reuses is None:
        return None
    source = instr.inputs[op.inputs.index(op.reuses)]
    dies = last[source] == index
    return source if dies and sizes[source] == sizes[instr.output] else None


def _bounds(big: Extent, small: Extent) -> bool:
    """Whether it holds for all 0 <= S <= T: linear in both, so at the corners."""
    both = big.t + big.s >= small.t + small.s
    return big.t >= small.t and both and big.c >= small.c


def _key(instr: Instr) -> tuple[object, ...]:
    """What makes two instructions alike in a picture: all but ids, layer and weights' numbers."""
    weights = tuple(w and re.sub(r"\d+", "*", w) for w in instr.weights)
    return instr.op, weights, tuple((n, v) for n, v in instr.attrs if n != "layer")


def _folded(instrs: tuple[Instr, ...]) -> Iterator[tuple[int, tuple[Instr, ...]]]:
    """(times, group) pairs that replay the list, repeats of up to 64 instructions folded."""
    keys = [_key(instr) for instr in instrs]
    at = 0
    while at < len(keys):
        best = (1, 1)
        for length in range(1, min(64, (len(keys) - at) // 2) + 1):
            times = 1
            while keys[at : at + length] == keys[at + times * length : at + (times + 1) * length]:
                times += 1
            if times > 1 and times * length > best[0] * best[1]:
                best = (times, length)
        times, length = best
        yield times, instrs[at : at + length]
        at += times * length


def _draw(program: Program, instr: Instr, margin: str) -> str:
    names = dict(zip(TABLE[instr.op].inputs, instr.inputs, strict=True))
    weights = [re.sub(r"^layers\.\d+\.", "", w) for w in instr.weights if w]
    shown = {n: v for n, v in instr.attrs if n in ("window", "act") and v is not None}
    notes = " ".join(f"{n}={v}" for n, v in shown.items())
    flow = ", ".join(f"{n} %{i}" for n, i in names.items())
    shape = str(program.values[instr.output])
    what = " · ".join(filter(None, [", ".join(weights), notes]))
    return f"{margin}{instr.op:<17}{flow:<22}-> %{instr.output:<4}{shape:<16} {what}".rstrip()
