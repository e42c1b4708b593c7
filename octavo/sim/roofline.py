"""What a model can do on a machine at best: prefill and decode on the roofline, memory, batches.

Everything follows from the traced program, its op table and a `Device`; nothing is fitted. Times
are lower bounds with the stated efficiency, so they rank machines and show what binds; they promise
nothing. Source of the method: Williams, Waterman, Patterson, "Roofline", CACM 2009.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from octavo.core.executor import Capacity
from octavo.errors import InvalidRequest
from octavo.models.config import ModelConfig
from octavo.ops.cost import Hardware, cost
from octavo.ops.program import Program
from octavo.ops.table import WEIGHT_BLOCKS, KvFormat, RowShape, StepShape
from octavo.ops.trace import trace
from octavo.sim.executor import Roofline
from octavo.sim.hardware import Device, Efficiency

USABLE = 0.9  # share of the memory for weights and KV, as vLLM's default
FP8 = "fp8"
WEIGHT_KINDS = ("bf16", FP8, "q8_0", "q6_k", "q5_k", "q4_k", "q4_0")
ALL_REDUCE_SECONDS = 8e-6  # one small all-reduce: launch and latency
PREFILL = 2048  # tokens of a prompt, for the table
BLOCK = 32


def stored_as(program: Program, weights: str) -> Program:
    """The program with all matrices stored as `weights`; fp8 is a byte and a scale for 32."""
    kind = {"bf16": "BF16", FP8: "Q8_0"}.get(weights, weights.upper())
    if kind not in WEIGHT_BLOCKS:
        raise InvalidRequest(f"weights {weights!r}: known are {', '.join(WEIGHT_KINDS)}", "weights")
    types = {
        part: "F32" if spec.kind == "vector" else kind
        for spec in program.weights
        for part in spec.parts
    }
    return program.typed(types)


def shard(config: ModelConfig, tp: int) -> ModelConfig:
    """What one of `tp` devices computes under tensor parallelism (Megatron: heads, FFN and
    vocabulary split; KV heads replicated where there are fewer). Raises InvalidRequest."""
    if tp < 1:
        raise InvalidRequest(f"a model is split by at least 1 device, not {tp}", "tp")
    if tp == 1:
        return config
    for name in ("num_heads", "intermediate_size"):
        if getattr(config, name) % tp:
            raise InvalidRequest(f"{name} {getattr(config, name)} does not split by {tp}", "tp")
    heads, kv = config.num_heads // tp, max(1, config.num_kv_heads // tp)
    if heads % kv or (config.num_kv_heads % tp and tp % config.num_kv_heads):
        raise InvalidRequest(f"{config.num_kv_heads} KV heads do not split by {tp}", "tp")
    return dataclasses.replace(
        config,
        num_heads=heads,
        num_kv_heads=kv,
        intermediate_size=config.intermediate_size // tp,
        vocab_size=-(-config.vocab_size // tp),
    )


@dataclass(frozen=True, slots=True)
class Placement:
    """A model on `tp` devices of one kind. weights: one of WEIGHT_KINDS. kv_itemsize: bytes of a
    number in the cache. The program is that of one device."""

    config: ModelConfig
    device: Device
    tp: int
    program: Program
    hardware: Hardware
    weights: str
    kv_itemsize: int

    @property
    def weight_bytes(self) -> int:
        """On one device."""
        return sum(spec.nbytes for spec in self.program.weights)

    @property
    def kv_bytes_per_token(self) -> int:
        """On one device: K and V of every layer (blocks behind a sliding window are kept)."""
        kv = max(1, self.config.num_kv_heads // self.tp) * self.config.head_dim
        return 2 * kv * self.config.num_layers * self.kv_itemsize

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV fits beside the weights; 0 if the weights alone do not fit."""
        if self.device.memory is None:
            return 1 << 30
        left = self.device.memory.value * USABLE - self.weight_bytes
        return max(0, int(left // self.kv_bytes_per_token))

    @property
    def price(self) -> float | None:
        return None if self.device.price is None else self.device.price.value * self.tp

    @property
    def name(self) -> str:
        return self.device.name if self.tp == 1 else f"{self.device.name} x{self.tp}"

    def durations(self) -> Roofline:
        return Roofline(
            self.program, self.hardware, kv_itemsize=self.kv_itemsize, extra=self._exchange()
        )

    def _exchange(self) -> Any:
        """Two all-reduces a layer of T x hidden bf16 (a ring moves 2 (n-1)/n of them), or None."""
        if self.tp == 1:
            return None
        link, n = self.device.link, self.tp
        if link is None:
            raise InvalidRequest(f"{self.device.name} has no link that we know", "tp")
        layers = 2 * self.config.num_layers
        per_token = 2.0 * self.config.hidden_size * 2.0 * (n - 1) / n / link.value
        return lambda tokens, _: layers * (ALL_REDUCE_SECONDS + per_token * tokens)

    def capacity(
        self, *, max_rows: int = 256, max_tokens: int = 2048, kv_tokens: int | None = None
    ) -> Capacity:
        """A replica's limits. Raises InvalidRequest where the weights do not fit."""
        tokens = self.kv_tokens if kv_tokens is None else kv_tokens
        if tokens < BLOCK:
            raise InvalidRequest(
                f"{self.weight_bytes / 1e9:.1f} GB of weights leave no KV on {self.name}", "tp"
            )
        blocks = min(tokens, 1 << 26) // BLOCK
        context = min(self.config.max_context, blocks * BLOCK)
        return Capacity(blocks, BLOCK, max_tokens, max_rows, max(max_rows, max_tokens), context)


def place(
    config: ModelConfig,
    device: Device,
    *,
    tp: int = 1,
    weights: str = "bf16",
    kv_itemsize: int = 2,
    efficiency: Efficiency | None = None,
) -> Placement:
    """Put a model on devices. Raises InvalidRequest for a split or a format that is not there."""
    program = stored_as(trace(shard(config, tp)), weights)
    hardware = device.roofline(efficiency, fp8=weights == FP8 and device.fp8 is not None)
    return Placement(config, device, tp, program, hardware, weights, kv_itemsize)


@dataclass(frozen=True, slots=True)
class Decode:
    """One decode step of `batch` sequences of `context` tokens each."""

    batch: int
    context: int
    seconds: float
    intensity: float
    flops: float
    bound: str

    @property
    def tokens_per_s(self) -> float:
        return self.batch / self.seconds


@dataclass(frozen=True, slots=True)
class Analysis:
    """A placement in numbers.

    wall: sequences at which a decode's matrix products stop waiting for weights (None: not below
    the largest looked at). step_wall: the same of the whole step with attention over `context`.
    most: sequences of `context` tokens that fit. decodes: at powers of two up to there.
    """

    placement: Placement
    context: int
    prefill_seconds: float
    prefill_intensity: float
    prefill_flops: float
    prefill_bound: str
    wall: int | None
    step_wall: int | None
    most: int
    decodes: tuple[Decode, ...]

    @property
    def fits(self) -> bool:
        """Whether the weights and the prompt's KV have room: else nothing is computed at all."""
        return self.placement.kv_tokens >= min(PREFILL, self.placement.config.max_context)

    @property
    def best(self) -> Decode | None:
        """The largest batch that fits: the most tokens a second."""
        return self.decodes[-1] if self.decodes else None

    @property
    def dollars_per_million(self) -> float | None:
        """For written tokens at the largest batch, prefill left out."""
        price = self.placement.price
        if price is None or self.best is None:
            return None
        return price / 3600.0 / self.best.tokens_per_s * 1e6


LARGEST = 1024
OPEN_ENDED = 256  # where the memory is whatever was plugged in


def analyse(placement: Placement, context: int) -> Analysis:
    """Prefill of PREFILL tokens, decode at every power of two that fits, and the walls."""
    if context < 1:
        raise InvalidRequest(f"the context must be at least 1, got {context}", "context")
    durations = placement.durations()
    largest = LARGEST if placement.device.memory is not None else OPEN_ENDED
    most = min(largest, placement.kv_tokens // context)
    sizes = [1 << i for i in range(largest.bit_length()) if 1 << i <= most]
    if most and most not in sizes:
        sizes.append(most)
    decodes = tuple(_decode(placement, durations, n, context) for n in sizes)
    prompt = min(PREFILL, placement.config.max_context)
    whole = cost(placement.program, _shape(placement, ((0, prompt, 1),)), placement.hardware)
    return Analysis(
        placement,
        context,
        durations.seconds([(0, prompt, 1)]) / prompt * PREFILL,
        whole.flops / whole.bytes,
        whole.flops * placement.tp / whole.seconds,
        _bound(placement, ((0, prompt, 1),)),
        _wall(placement, 0, largest),
        _wall(placement, context, largest),
        most,
        decodes,
    )


def _shape(placement: Placement, rows: Sequence[tuple[int, int, int]]) -> StepShape:
    return StepShape(tuple(RowShape(*row) for row in rows), KvFormat(placement.kv_itemsize))


def _decode(placement: Placement, durations: Roofline, batch: int, context: int) -> Decode:
    rows = [(context - 1, 1, 1)] * batch
    work = cost(placement.program, _shape(placement, rows), placement.hardware)
    seconds = durations.seconds(rows)
    return Decode(
        batch,
        context,
        seconds,
        work.flops / work.bytes,
        work.flops * placement.tp / seconds,
        _bound(placement, rows),
    )


def _parts(placement: Placement, rows: Sequence[tuple[int, int, int]]) -> tuple[float, float]:
    """Seconds of memory and of arithmetic of a step; without attention where context is 0."""
    hardware, memory, compute = placement.hardware, 0.0, 0.0
    for part in cost(placement.program, _shape(placement, rows), hardware).ops:
        attends = part.op == "attend"
        if attends and rows[0][0] == 0 and len(rows) > 1:
            continue
        memory += part.work.bytes / hardware.bytes_per_s
        rate = hardware.attend_flops_per_s if attends else hardware.flops_per_s
        compute += part.work.flops / rate
    return memory, compute


def _bound(placement: Placement, rows: Sequence[tuple[int, int, int]]) -> str:
    memory, compute = _parts(placement, rows)
    return "memory" if memory >= compute else "compute"


def _wall(placement: Placement, context: int, largest: int) -> int | None:
    """The least batch whose arithmetic takes as long as its memory traffic, by bisection."""
    start = max(context - 1, 0)

    def over(batch: int) -> bool:
        memory, compute = _parts(placement, [(start, 1, 1)] * batch)
        return compute >= memory

    if not over(largest):
        return None
    low, high = 1, largest
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if over(middle) else (middle + 1, high)
    return low


# ---- showing ----


Table = tuple[list[str], list[list[str]]]


def machine_table(analyses: Sequence[Analysis]) -> Table:
    """(head, rows): rates as assumed, memory, prefill."""
    head = ["hardware", "GB/s", "TFLOP/s", "ridge", "weights GB", "KV KB/token", "KV tokens",
            "prefill tok/s", "bound"]  # fmt: skip
    rows = []
    for one in analyses:
        p, hw = one.placement, one.placement.hardware
        tokens = "any" if p.device.memory is None else f"{p.kv_tokens:,}"
        rows.append([
            p.name, f"{hw.bytes_per_s / 1e9:.0f}", f"{hw.flops_per_s / 1e12:.0f}",
            f"{hw.flops_per_s / hw.bytes_per_s:.0f}", f"{p.weight_bytes / 1e9:.2f}",
            f"{p.kv_bytes_per_token / 1e3:.1f}", tokens,
            f"{PREFILL / one.prefill_seconds:,.0f}" if one.fits else "-",
            one.prefill_bound if one.fits else "does not fit",
        ])  # fmt: skip
    return head, rows


def decode_table(analyses: Sequence[Analysis]) -> Table:
    """(head, rows): one sequence, the wall, and as many sequences as fit."""
    head = ["hardware", "alone ms", "tok/s", "wall", "most", "ms", "tok/s", "bound",
            "$/M tokens"]  # fmt: skip
    return head, [[one.placement.name, *_decode_cells(one)] for one in analyses]


def _decode_cells(one: Analysis) -> list[str]:
    wall = str(one.wall) if one.wall is not None else "never"
    if not one.decodes or one.best is None:
        return ["-", "-", wall, "0", "-", "-", "does not fit", "-"]
    first, last = one.decodes[0], one.best
    open_ended = one.placement.device.memory is None
    most = f"{one.most}+" if open_ended or one.most == LARGEST else str(one.most)
    dollars = one.dollars_per_million
    return [
        f"{first.seconds * 1e3:.2f}", f"{first.tokens_per_s:.0f}", wall, most,
        f"{last.seconds * 1e3:.1f}", f"{last.tokens_per_s:,.0f}", last.bound,
        "-" if dollars is None else f"{dollars:.3f}",
    ]  # fmt: skip


def as_dict(one: Analysis) -> dict[str, Any]:
    """For machines."""
    p = one.placement
    sources = {
        name: {"value": figure.value, "source": figure.source}
        for name in ("bf16", "fp8", "bandwidth", "memory", "link", "price")
        if (figure := getattr(p.device, name)) is not None
    }
    return {
        "hardware": p.name,
        "tp": p.tp,
        "figures": sources,
        "efficiency": p.device.efficiency._asdict(),
        "weights": p.weights,
        "weight_bytes": p.weight_bytes,
        "kv_bytes_per_token": p.kv_bytes_per_token,
        "kv_tokens": p.kv_tokens if p.device.memory is not None else None,
        "context": one.context,
        "prefill_tokens_per_s": PREFILL / one.prefill_seconds if one.fits else None,
        "prefill_bound": one.prefill_bound if one.fits else None,
        "products_wall": one.wall,
        "step_wall": one.step_wall,
        "most_sequences": one.most,
        "dollars_per_million": one.dollars_per_million,
        "decode": [{**dataclasses.asdict(d), "tokens_per_s": d.tokens_per_s} for d in one.decodes],
    }
