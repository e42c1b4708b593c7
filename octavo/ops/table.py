"""THE op table: every op of every backend, once.

For each op: its inputs, weights and attributes in order, the shape of its output, what it costs
(operations and bytes for a step of a given shape), which input its output may overwrite, and one
line of meaning. The definition in arithmetic is `octavo.ops.reference`. Model code speaks the
`Ops` protocol; the tracer, the verifier, the cost model and the generated docs/OPS.md read `TABLE`.

Ops are cut where a barrier must fall. The activation format between them is a backend's secret and
appears in no signature; weights and KV are opaque handles. No tensor library is imported here.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from octavo.errors import EngineError
from octavo.models.config import Rope

V = TypeVar("V")
W_co = TypeVar("W_co", covariant=True)
W_contra = TypeVar("W_contra", contravariant=True)

# (weights per block, bytes per block) of each stored type, as ggml's files have them.
WEIGHT_BLOCKS: Mapping[str, tuple[int, int]] = {
    "F32": (1, 4), "F16": (1, 2), "BF16": (1, 2),
    "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34),
    "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210),
}  # fmt: skip

ACTIVATION_BYTES = 4


@dataclass(frozen=True, slots=True)
class KvFormat:
    """How a cache keeps keys and values: bytes a number, and bytes of the scale that each head's
    key and each head's value have."""

    number: int = 2
    scale: int = 0


KV_DTYPES: Mapping[str, KvFormat] = {
    "bf16": KvFormat(2), "fp32": KvFormat(4), "int8": KvFormat(1, 2),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Heads:
    """Head geometry of one attention layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def kv_bytes(self, kv: KvFormat) -> int:
        """What one token's keys and values take in one layer's cache."""
        return 2 * self.num_kv_heads * (self.head_dim * kv.number + kv.scale)


@dataclass(frozen=True, slots=True)
class Extent:
    """A number of rows, t*T + s*S + c: T counts the step's tokens, S its wanted outputs."""

    t: int = 0
    s: int = 0
    c: int = 0

    def at(self, num_tokens: int, num_outputs: int) -> int:
        return self.t * num_tokens + self.s * num_outputs + self.c

    def __add__(self, other: Extent) -> Extent:
        return Extent(self.t + other.t, self.s + other.s, self.c + other.c)

    def __mul__(self, factor: int) -> Extent:
        return Extent(self.t * factor, self.s * factor, self.c * factor)

    def __str__(self) -> str:
        named = ((self.t, "T"), (self.s, "S"), (self.c, ""))
        terms = [f"{n}{name}" if n != 1 or not name else name for n, name in named if n]
        return "+".join(terms) or "0"


T = Extent(t=1)
S = Extent(s=1)


@dataclass(frozen=True, slots=True)
class Shape:
    """Rows by columns; cols 0 is a vector of rows scalars (token ids, positions)."""

    dtype: str
    rows: Extent
    cols: int = 0

    def nbytes(self, num_tokens: int, num_outputs: int) -> int:
        return self.rows.at(num_tokens, num_outputs) * max(self.cols, 1) * ACTIVATION_BYTES

    def __str__(self) -> str:
        return f"{self.dtype}[{self.rows}{f', {self.cols}' if self.cols else ''}]"


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """One weight as the ops see it: logical tensors `parts` stacked along rows.

    kind: "linear" (out, in), "embedding" (vocab, hidden: gathered by row, and also multiplied where
    the head is tied to it) or "vector" (n,). rows: rows of each part. types: the stored type of
    each part, as in the file; empty until known (then BF16 matrices and F32 vectors are assumed).
    """

    name: str
    kind: str
    parts: tuple[str, ...]
    shape: tuple[int, ...]
    rows: tuple[int, ...]
    types: tuple[str, ...] = ()

    def typed(self, types: Mapping[str, str]) -> WeightSpec:
        """The same weight with the stored types of its parts, looked up by tensor name."""
        return replace(self, types=tuple(types[part] for part in self.parts))

    @property
    def row_bytes(self) -> tuple[float, ...]:
        """Bytes of one row of each part."""
        cols = math.prod(self.shape[1:])
        default = "F32" if self.kind == "vector" else "BF16"
        types = self.types or (default,) * len(self.parts)
        return tuple(cols * WEIGHT_BLOCKS[t][1] / WEIGHT_BLOCKS[t][0] for t in types)

    @property
    def nbytes(self) -> int:
        return round(sum(n * b for n, b in zip(self.rows, self.row_bytes, strict=True)))

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class Weights(Protocol[W_co]):
    """Weights by name (`WeightSpec.name`); the model passes them on and never looks inside."""

    def __getitem__(self, name: str, /) -> W_co: ...


class Ops(Protocol[V, W_contra]):
    """What a model may ask of a backend. V: values; W_contra: weights; both opaque.

    The ragged batch (which tokens belong together, their KV, the wanted positions) is the
    backend's state for the step, not an argument.
    """

    def embed(self, tokens: V, table: W_contra, *, scale: float) -> V: ...

    def norm_qkv(
        self, x: V, positions: V, norm: W_contra, qkv: W_contra, *,
        bias: W_contra | None, q_norm: W_contra | None, k_norm: W_contra | None,
        layer: int, rope: Rope, eps: float, heads: Heads,
    ) -> V: ...  # fmt: skip

    def select(self, x: V) -> V: ...

    def attend(self, q: V, *, layer: int, scale: float, window: int | None, heads: Heads) -> V: ...

    def out_residual(
        self, a: V, o: W_contra, x: V, *, post_norm: W_contra | None, eps: float
    ) -> V: ...

    def norm_gate_up_act(
        self, x: V, norm: W_contra, gate_up: W_contra, *, act: str, eps: float
    ) -> V: ...

    def down_residual(
        self, h: V, down: W_contra, x: V, *, post_norm: W_contra | None, eps: float
    ) -> V: ...

    def final_norm_head(self, x: V, norm: W_contra, head: W_contra, *, eps: float) -> V: ...


@dataclass(frozen=True, slots=True)
class RowShape:
    """One sequence's share of a step: `num_tokens` new tokens after `start` that have KV."""

    start: int
    num_tokens: int
    num_outputs: int = 1

    def wanted(self) -> RowShape:
        """Its wanted positions alone: the last ones, as all but scored prompts have them."""
        return RowShape(self.start + self.num_tokens - self.num_outputs, self.num_outputs)

    def visible(self, window: int | None) -> int:
        """Query-key pairs inside the causal (and sliding) mask."""
        first, last = self.start + 1, self.start + self.num_tokens
        if window is None or last <= window:
            return (first + last) * self.num_tokens // 2
        ramp = max(0, window - first + 1)
        return (2 * first + ramp - 1) * ramp // 2 + (self.num_tokens - ramp) * window

    def span(self, window: int | None) -> int:
        """Positions whose K and V must be read at least once."""
        end = self.start + self.num_tokens
        return end if window is None else min(end, self.num_tokens + window - 1)


@dataclass(frozen=True, slots=True)
class StepShape:
    """All that a step's cost depends on, besides the program. kv: how the cache keeps them."""

    rows: tuple[RowShape, ...]
    kv: KvFormat = KvFormat()

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)

    @property
    def num_outputs(self) -> int:
        return sum(row.num_outputs for row in self.rows)


@dataclass(frozen=True, slots=True)
class Work:
    """Operations (a multiply-add is two) and bytes that cannot be avoided.

    Only matrix products and attention count as operations; the rest is under one per cent.
    Activations count each value read and written once.
    """

    flops: float = 0.0
    weight_bytes: float = 0.0
    kv_bytes: float = 0.0
    activation_bytes: float = 0.0

    @property
    def bytes(self) -> float:
        return self.weight_bytes + self.kv_bytes + self.activation_bytes

    def __add__(self, other: Work) -> Work:
        return Work(
            self.flops + other.flops,
            self.weight_bytes + other.weight_bytes,
            self.kv_bytes + other.kv_bytes,
            self.activation_bytes + other.activation_bytes,
        )


@dataclass(frozen=True, slots=True)
class Call:
    """One use of an op, with all that its rules may look at."""

    op: str
    inputs: tuple[Shape, ...]
    weights: tuple[WeightSpec | None, ...]
    attrs: Mapping[str, object]

    def require(self, condition: bool, what: str) -> None:
        if not condition:
            raise EngineError(f"{self.op}: {what}")

    def weight(self, index: int) -> WeightSpec:
        spec = self.weights[index]
        if spec is None:
            raise EngineError(f"{self.op}: weight {index} may not be absent")
        return spec

    @property
    def heads(self) -> Heads:
        heads = self.attrs["heads"]
        if not isinstance(heads, Heads):
            raise EngineError(f"{self.op}: heads must be a Heads, got {heads!r}")
        return heads


@dataclass(frozen=True, slots=True)
class Op:
    """One row of the table. A weight name ending in "?" may be absent.

    shape: checks a call and gives its output's shape. work: its cost for a step. reuses: the input
    whose memory the output may take, row by row. cost: the rule in words, for the docs.
    """

    name: str
    inputs: tuple[str, ...]
    weights: tuple[str, ...]
    attrs: tuple[str, ...]
    shape: Callable[[Call], Shape]
    work: Callable[[Call, StepShape], Work]
    reuses: str | None
    doc: str
    cost: str


def _linear(call: Call, index: int, cols: int) -> WeightSpec:
    spec = call.weight(index)
    call.require(len(spec.shape) == 2, f"{spec.name} is not a matrix")
    call.require(spec.shape[1] == cols, f"{spec.name} {spec.shape} does not take {cols} columns")
    return spec


def _vector(call: Call, index: int, size: int) -> None:
    spec = call.weights[index]
    if spec is not None:
        call.require(spec.shape == (size,), f"{spec.name} {spec.shape} is not ({size},)")


def _matrix(call: Call, index: int) -> Shape:
    x = call.inputs[index]
    call.require(x.cols > 0 and x.dtype == "f32", f"input {index} is {x}, not a matrix")
    return x


def _ids(call: Call, index: int, rows: Extent) -> None:
    x = call.inputs[index]
    call.require(x == Shape("i32", rows), f"input {index} is {x}, not i32[{rows}]")


def _embed_shape(call: Call) -> Shape:
    _ids(call, 0, T)
    table = call.weight(0)
    call.require(table.kind == "embedding", f"{table.name} is not an embedding")
    return Shape("f32", call.inputs[0].rows, table.shape[1])


def _norm_qkv_shape(call: Call) -> Shape:
    x, heads = _matrix(call, 0), call.heads
    _ids(call, 1, x.rows)
    qkv = _linear(call, 1, x.cols)
    rows = heads.q_size + 2 * heads.kv_size
    call.require(qkv.shape[0] == rows, f"{qkv.name} has {qkv.shape[0]} rows, heads need {rows}")
    call.require(heads.num_heads % heads.num_kv_heads == 0, "kv heads do not divide heads")
    _vector(call, 0, x.cols)
    _vector(call, 2, rows)
    _vector(call, 3, heads.head_dim)
    _vector(call, 4, heads.head_dim)
    return Shape("f32", x.rows, heads.q_size)


def _select_shape(call: Call) -> Shape:
    x = _matrix(call, 0)
    call.require(x.rows == T, f"x is {x}, not a row for each token")
    return Shape("f32", S, x.cols)


def _attend_shape(call: Call) -> Shape:
    q = _matrix(call, 0)
    call.require(q.cols == call.heads.q_size, f"q is {q}, heads need {call.heads.q_size} columns")
    return q


def _residual_shape(call: Call) -> Shape:
    y, x = _matrix(call, 0), _matrix(call, 1)
    weight = _linear(call, 0, y.cols)
    call.require(weight.shape[0] == x.cols and y.rows == x.rows, f"{weight.name} does not give {x}")
    _vector(call, 1, x.cols)
    return x


def _gate_up_shape(call: Call) -> Shape:
    x = _matrix(call, 0)
    gate_up = _linear(call, 1, x.cols)
    call.require(gate_up.shape[0] % 2 == 0, f"{gate_up.name} has an odd number of rows")
    _vector(call, 0, x.cols)
    return Shape("f32", x.rows, gate_up.shape[0] // 2)


def _head_shape(call: Call) -> Shape:
    x = _matrix(call, 0)
    call.require(x.rows == S, f"x is {x}, not a row for each wanted position")
    _vector(call, 0, x.cols)
    return Shape("f32", S, _linear(call, 1, x.cols).shape[0])


def _traffic(call: Call, step: StepShape, output: Shape) -> float:
    shapes = (*call.inputs, output)
    return float(sum(shape.nbytes(step.num_tokens, step.num_outputs) for shape in shapes))


def _weight_bytes(call: Call, rows: int) -> float:
    return float(sum(w.nbytes for w in call.weights if w is not None)) if rows else 0.0


def _row_work(call: Call, step: StepShape, output: Shape, matrix: int) -> Work:
    """A linear over the step's rows of the output, weights read once, however many rows."""
    rows = output.rows.at(step.num_tokens, step.num_outputs)
    return Work(
        flops=2.0 * rows * call.weight(matrix).size,
        weight_bytes=_weight_bytes(call, rows),
        activation_bytes=_traffic(call, step, output),
    )


def _embed_work(call: Call, step: StepShape) -> Work:
    row_bytes = call.weight(0).row_bytes[0]
    return Work(
        weight_bytes=step.num_tokens * row_bytes,
        activation_bytes=_traffic(call, step, _embed_shape(call)),
    )


def _norm_qkv_work(call: Call, step: StepShape) -> Work:
    written = call.heads.kv_bytes(step.kv) * step.num_tokens
    return _row_work(call, step, _norm_qkv_shape(call), 1) + Work(kv_bytes=float(written))


def _attend_work(call: Call, step: StepShape) -> Work:
    window = call.attrs["window"]
    if not (window is None or isinstance(window, int)):
        raise EngineError(f"attend: window must be None or tokens, got {window!r}")
    rows = step.rows
    if call.inputs[0].rows == S:
        rows = tuple(row.wanted() for row in rows if row.num_outputs)
    pairs = sum(row.visible(window) for row in rows)
    read = sum(row.span(window) for row in rows)
    return Work(
        flops=4.0 * call.heads.q_size * pairs,
        kv_bytes=float(call.heads.kv_bytes(step.kv) * read),
        activation_bytes=_traffic(call, step, _attend_shape(call)),
    )


def _select_work(call: Call, step: StepShape) -> Work:
    # Only the S wanted rows of x are read.
    return Work(activation_bytes=2.0 * _select_shape(call).nbytes(0, step.num_outputs))


_LINEAR_COST = "2·T·rows·cols; the weights once"

TABLE: Mapping[str, Op] = {
    op.name: op
    for op in (
        Op(
            "embed", ("tokens",), ("table",), ("scale",), _embed_shape, _embed_work, None,
            "Rows of the embedding table, times scale.", "no products; T rows of the table",
        ),
        Op(
            "norm_qkv", ("x", "positions"), ("norm", "qkv", "bias?", "q_norm?", "k_norm?"),
            ("layer", "rope", "eps", "heads"), _norm_qkv_shape, _norm_qkv_work, None,
            "RMS norm, fused q|k|v projection plus bias, RMS norm of each q and k head, NeoX rope; "
            "writes these tokens' K and V into the layer's cache and returns q.",
            _LINEAR_COST + "; K and V of T tokens written",
        ),
        Op(
            "select", ("x",), (), (), _select_shape, _select_work, None,
            "The rows of the step's S wanted positions, in order. Ops on them cost by S, not T.",
            "no products",
        ),
        Op(
            "attend", ("q",), (), ("layer", "scale", "window", "heads"), _attend_shape,
            _attend_work, "q",
            "Causal softmax(scale · q·k) v over each token's own sequence in the layer's cache, at "
            "most the last `window` positions, its own included.",
            "4·heads·head_dim per visible pair; K and V of each sequence's span once",
        ),
        Op(
            "out_residual", ("a", "x"), ("o", "post_norm?"), ("eps",), _residual_shape,
            lambda call, step: _row_work(call, step, _residual_shape(call), 0), "x",
            "x + o·a, the product RMS-normed first if there is a post_norm.", _LINEAR_COST,
        ),
        Op(
            "norm_gate_up_act", ("x",), ("norm", "gate_up"), ("act", "eps"), _gate_up_shape,
            lambda call, step: _row_work(call, step, _gate_up_shape(call), 1), None,
            "RMS norm, fused gate|up projection, act(gate) · up.", _LINEAR_COST,
        ),
        Op(
            "down_residual", ("h", "x"), ("down", "post_norm?"), ("eps",), _residual_shape,
            lambda call, step: _row_work(call, step, _residual_shape(call), 0), "x",
            "x + down·h, the product RMS-normed first if there is a post_norm.", _LINEAR_COST,
        ),
        Op(
            "final_norm_head", ("x",), ("norm", "head"), ("eps",), _head_shape,
            lambda call, step: _row_work(call, step, _head_shape(call), 1), None,
            "RMS norm and the head's logits, of the S wanted positions.",
            "2·S·vocab·hidden; the weights once if S > 0",
        ),
    )
}  # fmt: skip


def inv_freq(rope: Rope, head_dim: int) -> tuple[float, ...]:
    """Radians per position of each pair (i, i + head_dim/2), scaling included: head_dim/2 floats.

    "llama3" is the banded rule published with Llama 3.1: wavelengths beyond
    original_context/low_freq_factor are divided by factor, those under
    original_context/high_freq_factor kept, and those between blended.
    """
    plain = [rope.base ** (-2.0 * i / head_dim) for i in range(head_dim // 2)]
    if rope.scaling == "none":
        return tuple(plain)
    if rope.scaling == "linear":
        return tuple(f / rope.factor for f in plain)
    if rope.scaling == "explicit":
        return tuple(f / d for f, d in zip(plain, rope.factors, strict=True))
    if rope.scaling == "llama3":
        return tuple(_llama3(f, rope) for f in plain)
    raise EngineError(f"rope scaling {rope.scaling!r} is not known")


def _llama3(freq: float, rope: Rope) -> float:
    turns = rope.original_context * freq / (2.0 * math.pi)
    band = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = min(1.0, max(0.0, band))
    return keep * freq + (1.0 - keep) * freq / rope.factor


def document() -> str:
    """The table as Markdown: the text of docs/OPS.md."""
    lines = [
        "# Ops",
        "",
        "Generated from `octavo/ops/table.py` by `python -m octavo.ops.table`.",
        "",
    ]
    lines += [*inspect.cleandoc(__doc__ or "").splitlines()[2:], ""]
    for op in TABLE.values():
        absent = [name.rstrip("?") for name in op.weights if name.endswith("?")]
        lines += [f"## {op.name}", "", f"`{_signature(op.name)}`", "", op.doc, ""]
        lines += [f"- inputs: {', '.join(op.inputs)}"]
        lines += [f"- weights: {', '.join(name.rstrip('?') for name in op.weights) or 'none'}"]
        lines += [f"- may be absent: {', '.join(absent)}"] if absent else []
        lines += [f"- attributes: {', '.join(op.attrs)}"]
        lines += [f"- output: may take the memory of {op.reuses}"] if op.reuses else []
        lines += [f"- cost: {op.cost}", ""]
    return "\n".join(lines)


def _signature(name: str) -> str:
    parameters = list(inspect.signature(getattr(Ops, name)).parameters.values())
    kinds = [p.kind is p.KEYWORD_ONLY for p in parameters]
    names = [p.name for p in parameters]
    if True in kinds:
        names.insert(kinds.index(True), "*")
    return f"{name}({', '.join(names[1:])})"


if __name__ == "__main__":
    print(document(), end="")
