"""How much memory the KV cache gets. The cache itself lives in the executor's C++.

A block holds 32 tokens of every layer; the pool is one mapping, whose pages count once written.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from octavo.errors import EngineError
from octavo.models.config import ModelConfig
from octavo.ops.table import KV_DTYPES, Heads

BLOCK_TOKENS = 32
FREE_SHARE = 0.5
GIB = 2**30


def token_bytes(config: ModelConfig, dtype: str) -> int:
    """Bytes of one token's K and V in every layer, kept as `dtype` (one of KV_DTYPES)."""
    heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim)
    return heads.kv_bytes(KV_DTYPES[dtype]) * config.num_layers


@dataclass(frozen=True, slots=True)
class KvBudget:
    """num_blocks blocks of block_bytes; `reason` says in words where the number comes from."""

    num_blocks: int
    block_bytes: int
    reason: str

    @property
    def nbytes(self) -> int:
        return self.num_blocks * self.block_bytes


def kv_budget(config: ModelConfig, dtype: str, kv_bytes: int | None, most_tokens: int) -> KvBudget:
    """A pool of kv_bytes; by default what `most_tokens` tokens need, but at most half of what is
    free. Raises EngineError where not even one block fits, or the machine has less memory."""
    size = token_bytes(config, dtype) * BLOCK_TOKENS
    if kv_bytes is not None:
        if kv_bytes > (most := _meminfo("MemTotal")):
            have = f"{most / GIB:.2f} GiB of memory"
            raise EngineError(
                f"a KV pool of {kv_bytes / GIB:.2f} GiB is beyond this machine's {have}"
            )
        count, reason = kv_bytes // size, "as asked"
    else:
        free, needed = int(free_bytes() * FREE_SHARE), -(-most_tokens // BLOCK_TOKENS) * size
        count = min(free, needed) // size
        reason = "all that the requests can use" if needed <= free else "half of the free memory"
    if count < 1:
        raise EngineError(
            f"the KV cache needs at least {size / 2**20:.2f} MiB, for one block of {BLOCK_TOKENS} "
            "tokens; give more --kv-memory"
        )
    return KvBudget(count, size, reason)


def free_bytes() -> int:
    """Memory this process may still take: the kernel's estimate, or the control group's rest."""
    available = _meminfo("MemAvailable")
    limit, used = _number("/sys/fs/cgroup/memory.max"), _number("/sys/fs/cgroup/memory.current")
    if limit is not None and used is not None:
        available = min(available, max(0, limit - used))
    return available


def _meminfo(field: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise EngineError(f"/proc/meminfo does not say {field}")


def _number(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return None
