"""The C++ extension, as type checkers see it. Shapes and meanings: the sources' bind_*.cpp."""

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

def isas() -> list[str]: ...
def affinity_count() -> int: ...

class PackedWeight:
    @property
    def type(self) -> int: ...
    @property
    def n(self) -> int: ...
    @property
    def k(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

def pack(
    type: int, data: Any, rows: int, cols: int, permute_heads: int = 0, threads: int = 1
) -> PackedWeight: ...
def unpack(weight: PackedWeight) -> bytes: ...

class Products(Enum):
    INT8 = 0
    MIXED = 1
    PAIRS = 2
    BF16 = 3
    F32 = 4

def linear(
    weight: PackedWeight, x: Floats, isa: str = "auto", act: str = "int8", **options: Any
) -> Floats: ...
def quantise(x: Floats, isa: str = "auto", act: str = "int8") -> Any: ...
def embed_row(weight: PackedWeight, id: int, scale: float = 1.0, isa: str = "auto") -> Floats: ...
def sample(logits: Floats, rows: bytes, data: bytes, isa: str = "auto") -> bytes: ...
def sample_probabilities(logits: Floats, row: bytes, data: bytes, isa: str = "auto") -> bytes: ...
def philox(counter: Sequence[int], key: Sequence[int], isa: str = "auto") -> list[int]: ...

class HeadShape:
    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int) -> None: ...

class ExecutorConfig:
    isa: str
    threads: int
    pin: bool
    products: Products
    kv_type: str
    max_tokens: int
    max_outputs: int
    max_context: int
    num_layers: int
    num_blocks: int
    hidden: int
    vocab: int
    heads: HeadShape

class Executor:
    def __init__(self, config: ExecutorConfig) -> None: ...
    def add_rope(self, inv_freq: list[float]) -> int: ...
    def add_value(self, t: int, s: int, c: int, ld: int) -> None: ...
    def add_op(
        self,
        name: str,
        inputs: list[int],
        output: int,
        weights: list[PackedWeight],
        vectors: Mapping[str, Floats],
        numbers: Mapping[str, float],
        /,
    ) -> None: ...
    def finish(self, arena_bytes: int) -> None: ...
    def run(
        self,
        rows: Any,
        tokens: Any,
        tables: Any,
        wanted: Any,
        samples: bytes,
        data: bytes,
        logits: Floats | None = None,
        eager: bool = False,
        normed: Floats | None = None,
    ) -> tuple[bytes, list[tuple[int, int]]]: ...
    def timing(self) -> dict[str, float]: ...
    def spent(self) -> tuple[Doubles, Doubles, Doubles]: ...
    def reset_timing(self) -> None: ...
    def fill_kv(self, blocks: int) -> None: ...
    def memory(self) -> dict[str, int]: ...
    @property
    def isa(self) -> str: ...
    @property
    def threads(self) -> int: ...

def attend(
    q: Floats, k: Floats, v: Floats, scale: float, window: int = 0, threads: int = 1,
    kv: str = "bf16", isa: str = "auto",
) -> Floats: ...  # fmt: skip
def time_attend(
    shape: Sequence[int], context: int, n: int = 1, batch: int = 1, layers: int = 1,
    window: int = 0, threads: int = 1, kv: str = "bf16", isa: str = "auto", seconds: float = 0.1,
) -> list[float]: ...  # fmt: skip
def rms_norm(x: Floats, w: Floats, eps: float, isa: str = "auto") -> Floats: ...
def act_mul(act: str, gate: Floats, up: Floats, isa: str = "auto") -> Floats: ...
def rope(x: Floats, cos: Floats, sin: Floats, isa: str = "auto") -> Floats: ...
def exercise_pool(threads: int, pin: bool, jobs: int, phases: int) -> tuple[int, float]: ...
def probe_read(
    threads: int, share: int, round: int, ahead: int, seconds: float, isa: str = "auto"
) -> float: ...
def probe_ops(threads: int, kind: int, seconds: float, isa: str = "auto") -> float: ...
def probe_barrier(threads: int, seconds: float) -> float: ...
def time_attention(
    q: Floats, k: Floats, v: Floats, naive: bool, threads: int = 1, seconds: float = 0.0,
    isa: str = "auto",
) -> tuple[Floats, float, int]: ...  # fmt: skip
