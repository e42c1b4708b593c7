"""The CPU executor: packs a checkpoint's weights, holds the KV cache, runs steps in C++.

It holds no request state. `submit` turns a Batch into flat arrays; `collect` runs the traced
program over them in one call without the GIL, sampling included. Invariant: a row's result depends
on that row alone, bit for bit, whatever else is in the batch and however many threads run it.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from octavo.core.batch import Batch, RowResult, StepResult
from octavo.core.executor import Capacity
from octavo.errors import BadFile, EngineError, InvalidRequest
from octavo.kernels import _cpu
from octavo.models.config import ModelConfig, Rope
from octavo.models.weights import Checkpoint, dequantize
from octavo.ops.program import Instr, Program
from octavo.ops.table import KV_DTYPES, Heads, S, WeightSpec, inv_freq
from octavo.ops.trace import trace
from octavo.runtime import sampling
from octavo.runtime.kv import BLOCK_TOKENS, KvBudget, kv_budget

# ggml's numbers, as in kernels/cpu/contract.h.
WEIGHT_TYPES = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8,
    "Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "BF16": 30,
}  # fmt: skip

PRODUCTS = {  # of quantised weights
    "int8": _cpu.Products.INT8,
    "mixed": _cpu.Products.MIXED,
    "pairs": _cpu.Products.PAIRS,
    "bf16": _cpu.Products.BF16,
    "fp32": _cpu.Products.F32,
}

# Rounding averages out over the width of a model. On 2,048 tokens single bytes miss the project's
# limits (mean KL 2e-3, 98.5 % equal first choices) at hidden 576, 640 and 896 (SmolLM2: 3.0e-3,
# 97.0 %; Gemma 3 270m: 2.2e-3, 97.3 %; Qwen2.5-Coder-0.5B: 6.4e-4, but 98.3 %). Mixed ones meet
# them (3.4e-4, 98.7 %; 3.1e-4, 99.0 %; 2.8e-4, 99.4 %).
NARROW = 1024

HEAD = "final_norm_head"

# Of a row that must not reach the cache: the KV of such a token holds zeros in place of what it is.
BROKEN = "the model's keys or values hold NaN or infinity (token {0} of the sequence)"

ALIGN = 64

Progress = Callable[[int, int], None]
Act = Literal["auto", "mixed", "pairs", "int8", "bf16", "fp32"]
KvDtype = Literal["auto", "bf16", "int8", "fp32"]
Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Encoded = tuple["array[int]", "array[int]", "array[int]", "array[int]", bytes, bytes]


@dataclass(frozen=True, slots=True)
class CpuOptions:
    """threads: None takes every processor of the affinity mask. kv_bytes: None takes what max_rows
    sequences of max_context tokens need, at most half of the free memory. max_tokens, max_rows:
    per step. max_context: None takes the model's. isa: "auto" or one of octavo.kernels.isas().
    act: "mixed" (int8 in groups of 32, outliers in two bytes), "pairs" (two bytes throughout: the
    most exact, twice the products), "int8" (single bytes), "bf16", "fp32", or "auto" (mixed for
    models narrower than NARROW, else int8). kv_dtype: how the cache holds keys and values: "bf16",
    "int8" with a scale for each token and head, "fp32", or "auto" (fp32 with fp32 activations, else
    bf16). pin: bind threads to processors. eager: run the program op by op, for debugging."""

    threads: int | None = None
    kv_bytes: int | None = None
    max_tokens: int = 512
    max_rows: int = 64
    max_context: int | None = None
    isa: str = "auto"
    act: Act = "auto"
    kv_dtype: KvDtype = "auto"
    pin: bool = False
    eager: bool = False


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds of each thread in each instruction of the program, sampling and step set-up last:
    busy, wait [threads, instructions]; and barriers [instructions] that each thread passed.
    seconds: of all `steps` steps together, from call to return: what any thread's row adds up to.
    """

    instructions: tuple[str, ...]
    busy: Doubles
    wait: Doubles
    barriers: Doubles
    steps: int
    seconds: float


def no_progress(done: int, total: int) -> None:
    """Tells nobody."""


class CpuExecutor:
    """Runs batches of one checkpoint. Implements `octavo.core.executor.Executor`."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        options: CpuOptions = CpuOptions(),
        *,
        progress: Progress = no_progress,
    ) -> None:
        if options.act not in get_args(Act):
            raise EngineError(f"act must be one of {get_args(Act)}, got {options.act!r}")
        config = checkpoint.config
        if options.act == "auto":
            options = replace(options, act="mixed" if config.hidden_size < NARROW else "int8")
        if options.kv_dtype == "auto":
            options = replace(options, kv_dtype="fp32" if options.act == "fp32" else "bf16")
        if options.kv_dtype not in KV_DTYPES:
            raise EngineError(
                f"kv_dtype must be auto, {', '.join(KV_DTYPES)}, got {options.kv_dtype!r}"
            )
        context = min(options.max_context or config.max_context, config.max_context)
        tokens = options.max_rows * context
        self.budget = kv_budget(config, options.kv_dtype, options.kv_bytes, tokens)
        self.config = config
        self.options = options
        self.program = trace(config)
        self.capacity = _capacity(self.budget, options, context)
        self._executor = _new_executor(config, options, self.capacity)
        self._weight_bytes = _load(self._executor, checkpoint, self.program, options, progress)
        self._pending: tuple[Batch, Encoded] | None = None

    @property
    def isa(self) -> str:
        """The instruction set in use."""
        return str(self._executor.isa)

    @property
    def threads(self) -> int:
        return int(self._executor.threads)

    def submit(self, batch: Batch) -> None:
        """Hand over a batch; one may be outstanding."""
        if self._pending is not None:
            raise EngineError("a batch is already outstanding")
        self._pending = batch, encode(batch)

    def collect(self) -> StepResult:
        """Run the outstanding batch. Raises EngineError if it is malformed: nothing was run."""
        if self._pending is None:
            raise EngineError("no batch is outstanding")
        batch, arrays = self._pending
        self._pending = None
        embedded = sampling.embedded(batch)
        normed = np.empty((len(arrays[3]) if embedded else 0, self.config.hidden_size), np.float32)
        started = time.monotonic()
        try:
            if embedded:
                out, broken = self._executor.run(*arrays, None, self.options.eager, normed)
            else:
                out, broken = self._executor.run(*arrays, None, self.options.eager)
        except ValueError as error:
            raise EngineError(f"step {batch.step}: {error}") from error
        rows = sampling.decode(batch, out)
        for seq_id, at in embedded:
            rows[seq_id] = rows[seq_id]._replace(embedding=normed[at].tobytes())
        for row, position in broken:
            rows[batch.rows[row].seq_id] = RowResult(error=BROKEN.format(position))
        return StepResult(batch.step, rows, started, time.monotonic())

    def ready_at(self) -> float | None:
        return None

    def logits(self, batch: Batch) -> Floats:
        """Run a batch and return the logits of its wants, [S, vocab], in order. Raises EngineError
        where the model's keys or values are not finite."""
        arrays = encode(batch)
        out = np.empty((len(arrays[3]), self.config.vocab_size), np.float32)
        _, broken = self._executor.run(*arrays, out, self.options.eager)
        if broken:
            raise EngineError(BROKEN.format(broken[0][1]))
        return out

    def memory(self) -> dict[str, int]:
        """Bytes by name: weights, kv (mapped; resident once written), arena, scratch, vectors."""
        return {"weights": self._weight_bytes} | {
            k: int(v) for k, v in self._executor.memory().items()
        }

    def spent(self) -> Spent:
        """Where the time of all steps since the last reset went."""
        names = (*(instr.op for instr in self.program.instrs), "sample", "begin")
        total = self._executor.timing()
        busy, wait, barriers = self._executor.spent()
        return Spent(names, busy, wait, barriers[0], int(total["steps"]), total["total"])

    def fill_kv(self, blocks: int) -> None:
        """For benches: finite values in the first `blocks` blocks of the cache, without a prefill.
        Whatever was there is lost."""
        self._executor.fill_kv(blocks)

    def timing(self) -> dict[str, float]:
        """Seconds since the last reset: total, by op, `sample` (part of the head) and `wait` (at
        barriers, part of all ops); and the number of `steps`."""
        return self._executor.timing()

    def reset_timing(self) -> None:
        self._executor.reset_timing()


def encode(batch: Batch) -> Encoded:
    """rows (start, tokens, where the table begins, its length), tokens, tables, wanted tokens,
    and the sampler's rows and data."""
    rows, tokens, tables, wanted = array("i"), array("i"), array("i"), array("i")
    for row in batch.rows:
        first = len(tokens)
        rows.extend((row.start, len(row.tokens), len(tables), len(row.block_table)))
        for want in row.outputs:
            wanted.append(first + want.position)
        tokens.extend(row.tokens)
        tables.extend(row.block_table)
    samples, data = sampling.encode(batch)
    return rows, tokens, tables, wanted, samples, data


def _capacity(budget: KvBudget, options: CpuOptions, context: int) -> Capacity:
    return Capacity(
        num_blocks=budget.num_blocks,
        block_size=BLOCK_TOKENS,
        max_tokens=options.max_tokens,
        max_rows=options.max_rows,
        max_outputs=max(options.max_tokens, options.max_rows),
        max_context=min(context, budget.num_blocks * BLOCK_TOKENS),
        depth=1,
    )


def usable_isa(name: str) -> str:
    """The name, if it is "auto" or an instruction set of this machine. Raises InvalidRequest."""
    known = ("auto", *_cpu.isas())
    if name not in known:
        text = f"--isa {name} cannot be used here; this machine has {', '.join(known)}"
        raise InvalidRequest(text, "isa")
    return name


def _new_executor(config: ModelConfig, options: CpuOptions, capacity: Capacity) -> _cpu.Executor:
    native = _cpu.ExecutorConfig()
    native.isa = usable_isa(options.isa)
    native.threads = options.threads or _cpu.affinity_count()
    native.pin = options.pin
    native.products = PRODUCTS[options.act]
    native.kv_type = options.kv_dtype
    native.max_tokens = capacity.max_tokens
    native.max_outputs = capacity.max_outputs
    native.max_context = capacity.max_context
    native.num_layers = config.num_layers
    native.num_blocks = capacity.num_blocks
    native.hidden = config.hidden_size
    native.vocab = config.vocab_size
    native.heads = _cpu.HeadShape(config.num_heads, config.num_kv_heads, config.head_dim)
    try:
        return _cpu.Executor(native)
    except (ValueError, MemoryError) as error:
        raise EngineError(str(error) or "not enough memory for the KV cache") from error


# --- Weights and program ---


class _Packer:
    """Packs each matrix once, releasing the file's pages behind itself."""

    def __init__(self, checkpoint: Checkpoint, threads: int, progress: Progress) -> None:
        self.checkpoint = checkpoint
        self.threads = threads
        self.progress = progress
        self.total = sum(checkpoint.tensor(name).data.nbytes for name in checkpoint.names())
        self.done = 0
        self.packed: dict[str, list[_cpu.PackedWeight]] = {}

    def matrix(self, spec: WeightSpec) -> list[_cpu.PackedWeight]:
        if spec.name not in self.packed:
            self.packed[spec.name] = [self._pack(part) for part in spec.parts]
        return self.packed[spec.name]

    def vector(self, spec: WeightSpec) -> Floats:
        return np.concatenate([self._dequantize(part) for part in spec.parts])

    def _pack(self, name: str) -> _cpu.PackedWeight:
        tensor = self.checkpoint.tensor(name)
        rows, cols = tensor.shape
        kind = WEIGHT_TYPES[tensor.type]
        try:
            packed = _cpu.pack(kind, tensor.data, rows, cols, tensor.permute_heads, self.threads)
        except ValueError as error:
            raise BadFile(f"tensor {name}: {error}") from None
        self._passed(name, tensor.data.nbytes)
        return packed

    def _dequantize(self, name: str) -> Floats:
        tensor = self.checkpoint.tensor(name)
        values = np.ascontiguousarray(dequantize(tensor), np.float32)
        self._passed(name, tensor.data.nbytes)
        return values

    def _passed(self, name: str, nbytes: int) -> None:
        self.checkpoint.release(name)
        self.done += nbytes
        self.progress(self.done, self.total)


def _load(
    executor: _cpu.Executor,
    checkpoint: Checkpoint,
    program: Program,
    options: CpuOptions,
    progress: Progress,
) -> int:
    """Give the executor its values, ropes, ops and weights; returns the packed bytes."""
    logits = program.values[program.output]  # not kept: they are sampled block by block
    arena = program.arena(lambda shape: 0 if shape == logits else shape.cols * 4, ALIGN)
    for shape, offset in zip(program.values, arena.offsets, strict=True):
        place = (0, 0, 0) if offset is None else (offset.t, offset.s, offset.c)
        executor.add_value(*place, -(-shape.cols * 4 // ALIGN) * ALIGN // 4)
    packer = _Packer(checkpoint, executor.threads, progress)
    specs = {spec.name: spec for spec in program.weights}
    ropes: dict[Rope, int] = {}
    wide = wide_ops(program)
    for instr in program.instrs:
        attrs = dict(instr.attrs)
        rope, heads = attrs.get("rope"), attrs.get("heads")
        if isinstance(rope, Rope) and isinstance(heads, Heads) and rope not in ropes:
            ropes[rope] = executor.add_rope(list(inv_freq(rope, heads.head_dim)))
        executor.add_op(
            instr.op,
            list(_value_inputs(instr)),
            instr.output,
            [p for spec in _matrices(instr, specs) for p in packer.matrix(spec)],
            {key: packer.vector(specs[name]) for key, name in _vectors(instr, specs)},
            _numbers(attrs, ropes)
            | {
                "wide": float(instr.op in wide),
                "wanted": float(program.values[instr.output].rows == S),
            },
        )
    executor.finish(arena.bytes_at(options.max_tokens, options.max_tokens))
    return sum(int(p.nbytes) for parts in packer.packed.values() for p in parts)


def wide_ops(program: Program) -> frozenset[str]:
    """Of mixed activations, the ops that have two bytes throughout: the head, for what rounds
    before the logits moves first choices most (SmolLM2, 1,024 tokens: 99.2 % equal where the head
    is mixed, 99.5 % so). Not where it has most of the products, which would be doubled (Gemma 3
    270m, 2,046 tokens: mean KL from fp32 4.4e-4 where it is mixed, 98.9 % equal; 3.3e-4 and 98.7 %
    so)."""
    specs = {spec.name: spec for spec in program.weights}

    def products(ops: Callable[[str], bool]) -> int:
        matrices = [spec for i in program.instrs if ops(i.op) for spec in _matrices(i, specs)]
        return sum(math.prod(spec.shape) for spec in matrices)

    rest = products(lambda op: op not in (HEAD, "embed"))  # embeddings are gathered
    return frozenset() if products(lambda op: op == HEAD) > rest else frozenset({HEAD})


def _value_inputs(instr: Instr) -> tuple[int, ...]:
    """The values an op reads. Positions and tokens come with the step."""
    return instr.inputs[:1] if instr.op == "norm_qkv" else instr.inputs


def _matrices(instr: Instr, specs: dict[str, WeightSpec]) -> Iterator[WeightSpec]:
    return (specs[w] for w in instr.weights if w is not None and specs[w].kind != "vector")


def _vectors(instr: Instr, specs: dict[str, WeightSpec]) -> Iterator[tuple[str, str]]:
    """(the role a vector plays in its op, its name)."""
    for name in instr.weights:
        if name is None or specs[name].kind != "vector":
            continue
        last = name.rsplit(".", 1)[-1]
        if last in ("q_norm", "k_norm"):
            yield last, name
        elif last.endswith("bias"):
            yield "bias", name
        else:
            yield "post_norm" if last.endswith("post_norm") else "norm", name


def _numbers(attrs: dict[str, Any], ropes: dict[Rope, int]) -> dict[str, float]:
    numbers = {
        key: float(value)
        for key, value in attrs.items()
        if isinstance(value, int | float) and key in ("layer", "eps", "scale", "window")
    }
    if "rope" in attrs:
        numbers["rope"] = ropes[attrs["rope"]]
    if attrs.get("act") == "gelu_tanh":
        numbers["gelu_tanh"] = 1
    return numbers
