"""Run the model's forward once on symbols and keep the calls: a Program.

The traced function must not depend on a number it cannot see. A symbol therefore has no truth, no
length, no items; its `shape` shows sample sizes, and `trace` proves that they do not matter by
tracing at two of them and comparing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

from octavo.errors import EngineError
from octavo.models import decoder
from octavo.models.config import ModelConfig, Rope
from octavo.ops.program import Instr, Program
from octavo.ops.table import TABLE, Call, Heads, Shape, T, WeightSpec

# (T, S) at which every model is traced: unequal, neither 0 nor 1.
SAMPLE_SIZES = ((3, 2), (7, 5))


class Sym:
    """A value of the traced function: a name for what will be computed."""

    __slots__ = ("id", "shape")

    def __init__(self, value: int, shape: tuple[int, ...]) -> None:
        self.id = value
        self.shape = shape

    def _refuse(self, *_: object) -> NoReturn:
        raise EngineError("a traced function may not look inside a value")

    __bool__ = __len__ = __iter__ = __getitem__ = __int__ = __float__ = __index__ = _refuse
    __eq__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse  # type: ignore[assignment]
    __add__ = __radd__ = __mul__ = __rmul__ = __sub__ = __matmul__ = _refuse
    __hash__ = None  # type: ignore[assignment]
    item = tolist = _refuse


class _Names:
    """Weights whose handles are their own names, for those that exist."""

    def __init__(self, specs: Mapping[str, WeightSpec]) -> None:
        self._specs = specs

    def __getitem__(self, name: str, /) -> str:
        if name not in self._specs:
            raise EngineError(f"no weight is called {name}")
        return name


class Tracer:
    """`Ops` that record. sizes: the sample (T, S) that symbols show."""

    def __init__(self, specs: tuple[WeightSpec, ...], sizes: tuple[int, int]) -> None:
        self.values: list[Shape] = []
        self.instrs: list[Instr] = []
        self._specs = {spec.name: spec for spec in specs}
        self._sizes = sizes

    def symbol(self, shape: Shape) -> Sym:
        """A new value, not computed by any op."""
        self.values.append(shape)
        rows = shape.rows.at(*self._sizes)
        return Sym(len(self.values) - 1, (rows, shape.cols) if shape.cols else (rows,))

    def _record(
        self, op: str, inputs: tuple[Sym, ...], weights: tuple[str | None, ...],
        attrs: Mapping[str, object],
    ) -> Sym:  # fmt: skip
        ids = tuple(value.id for value in inputs)
        specs = tuple(None if name is None else self._specs[name] for name in weights)
        call = Call(op, tuple(self.values[i] for i in ids), specs, attrs)
        out = self.symbol(TABLE[op].shape(call))
        ordered = tuple((name, attrs[name]) for name in TABLE[op].attrs)
        self.instrs.append(Instr(op, ids, out.id, weights, ordered))
        return out

    def embed(self, tokens: Sym, table: str, *, scale: float) -> Sym:
        return self._record("embed", (tokens,), (table,), {"scale": scale})

    def norm_qkv(
        self, x: Sym, positions: Sym, norm: str, qkv: str, *,
        bias: str | None, q_norm: str | None, k_norm: str | None,
        layer: int, rope: Rope, eps: float, heads: Heads,
    ) -> Sym:  # fmt: skip
        attrs = {"layer": layer, "rope": rope, "eps": eps, "heads": heads}
        weights = (norm, qkv, bias, q_norm, k_norm)
        return self._record("norm_qkv", (x, positions), weights, attrs)

    def select(self, x: Sym) -> Sym:
        return self._record("select", (x,), (), {})

    def attend(self, q: Sym, *, layer: int, scale: float, window: int | None, heads: Heads) -> Sym:
        attrs = {"layer": layer, "scale": scale, "window": window, "heads": heads}
        return self._record("attend", (q,), (), attrs)

    def out_residual(self, a: Sym, o: str, x: Sym, *, post_norm: str | None, eps: float) -> Sym:
        return self._record("out_residual", (a, x), (o, post_norm), {"eps": eps})

    def norm_gate_up_act(self, x: Sym, norm: str, gate_up: str, *, act: str, eps: float) -> Sym:
        return self._record("norm_gate_up_act", (x,), (norm, gate_up), {"act": act, "eps": eps})

    def down_residual(self, h: Sym, down: str, x: Sym, *, post_norm: str | None, eps: float) -> Sym:
        return self._record("down_residual", (h, x), (down, post_norm), {"eps": eps})

    def final_norm_head(self, x: Sym, norm: str, head: str, *, eps: float) -> Sym:
        return self._record("final_norm_head", (x,), (norm, head), {"eps": eps})


def trace(cfg: ModelConfig, stage: range | None = None) -> Program:
    """The Program of `decoder.forward` over layers `stage` (None: the whole model), verified.

    Inputs: value 0 is the tokens (or, past the first stage, the hidden state), value 1 the
    positions. Raises EngineError if the forward depends on the sizes.
    """
    layers = range(cfg.num_layers) if stage is None else stage
    first, second = (_trace_at(cfg, layers, sizes) for sizes in SAMPLE_SIZES)
    if first != second:
        raise EngineError(f"the traced function depends on its sizes:\n{first.diff(second)}")
    first.verify()
    return first


def _trace_at(cfg: ModelConfig, stage: range, sizes: tuple[int, int]) -> Program:
    specs = decoder.weight_specs(cfg, stage)
    tracer = Tracer(specs, sizes)
    opening = stage.start == 0
    x = tracer.symbol(Shape("i32", T) if opening else Shape("f32", T, cfg.hidden_size))
    positions = tracer.symbol(Shape("i32", T))
    names = _Names({spec.name: spec for spec in specs})
    out = decoder.forward(tracer, names, cfg, x, positions, stage)
    inputs = ("tokens" if opening else "x", "positions")
    return Program(inputs, tuple(tracer.values), tuple(tracer.instrs), out.id, specs)
