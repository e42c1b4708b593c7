"""What attention reaches alone, beside what this machine can reach.

    python bench/attention.py [--shape 9,3,64] [--kv bf16,int8] [--isa avx512] [--window 0]

Prefill: the last 512 tokens of one sequence attend (all of it, where it is shorter), as a chunk of
the engine does. Decode: the last token of each of 1 or 8 sequences attends. All cores; one call is
one layer, its barrier included, and the next call takes the next layer of a cache that is larger
than the machine's own caches, so that keys and values come from memory. The shape is heads, KV
heads and head dim: SmolLM2's by default, whose KV of 30 layers and 32,768 tokens is what a long
context asks for.

Per cell the median of many calls: microseconds, operations a second (4 a pair of query and key and
dim), bytes of keys and values a second, and the fraction of the roof: the time to read those bytes
once or to multiply at the bf16 peak, whichever is longer, over the time taken. (An int8 cache
multiplies pairs of bytes: two int8 products for one in bf16, at about twice the rate.) The peak is
measured in this run, the memory again before and after each cell.
"""

from __future__ import annotations

import argparse
import json
import statistics

from octavo.ceilings import DRAM_BYTES, measure_ceilings, reread
from octavo.kernels import _cpu
from octavo.ops.table import KV_DTYPES, Heads, RowShape

CHUNK = 512
PREFILL = (512, 2048, 4096, 16384)
DECODE = ((512, 1), (4096, 1), (32768, 1), (512, 8), (4096, 8), (32768, 8))
CASES = tuple(("prefill", n, 1) for n in PREFILL) + tuple(("decode", *c) for c in DECODE)
Cell = dict[str, object]


class Bench:
    """Roofs and cells of one instruction set and one shape of heads."""

    def __init__(self, heads: Heads, isa: str, window: int, seconds: float) -> None:
        self.heads, self.isa, self.window, self.seconds = heads, isa, window, seconds
        self.ceilings = measure_ceilings(isa=isa)
        self.threads = self.ceilings.threads

    def cell(self, kv: str, case: tuple[str, int, int]) -> Cell:
        phase, context, batch = case
        heads, n = self.heads, min(context, CHUNK) if phase == "prefill" else 1
        row = RowShape(context - n, n)
        window = self.window or None
        ops = 4 * heads.q_size * row.visible(window) * batch
        nbytes = heads.kv_bytes(KV_DTYPES[kv]) * row.span(window) * batch
        layers = max(1, DRAM_BYTES // (heads.kv_bytes(KV_DTYPES[kv]) * context * batch))
        before = reread(self.ceilings)
        times = _cpu.time_attend(
            (heads.num_heads, heads.num_kv_heads, heads.head_dim), context, n, batch, layers,
            self.window, self.threads, kv, self.isa, self.seconds,
        )  # fmt: skip
        seconds = statistics.median(times)
        read = max(before.all.dram, reread(self.ceilings).all.dram)
        peak = self.ceilings.all.bf16
        memory, compute = nbytes / read, ops / peak
        return {
            "kv": kv, "phase": phase, "context": context, "batch": batch, "seconds": seconds,
            "ops_per_s": ops / seconds, "bytes_per_s": nbytes / seconds, "calls": len(times),
            "roof_ops_per_s": peak, "roof_bytes_per_s": read,
            "bound": "memory" if memory > compute else "compute",
            "fraction": max(memory, compute) / seconds,
        }  # fmt: skip


def line(cell: Cell) -> str:
    numbers = {key: value for key, value in cell.items() if isinstance(value, int | float)}
    rates = [numbers[key] / 1e9 for key in ("ops_per_s", "roof_ops_per_s")]
    rates += [numbers[key] / 1e9 for key in ("bytes_per_s", "roof_bytes_per_s")]
    gflops, peak, gbytes, read = rates
    return (
        f"{cell['kv']:5} {cell['phase']:8}{cell['context']:>7}{cell['batch']:>4}"
        f"{numbers['seconds'] * 1e6:>11.1f}{gflops:>9.1f}{peak:>9.1f}{gbytes:>8.1f}{read:>8.1f}"
        f"{numbers['fraction']:>7.0%} of {cell['bound']}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="9,3,64", help="heads, KV heads, head dim")
    parser.add_argument("--kv", default="bf16,int8", help="of bf16, int8 and fp32")
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--window", type=int, default=0, help="of a sliding layer; 0: all")
    parser.add_argument("--phase", choices=("prefill", "decode"))
    parser.add_argument("--seconds", type=float, default=0.15, help="of each cell")
    args = parser.parse_args()
    bench = Bench(Heads(*map(int, args.shape.split(","))), args.isa, args.window, args.seconds)
    print(f"{bench.threads} threads, {args.isa}, heads {args.shape}, window {args.window}")
    print(
        "kv    phase   context   B    µs/call   GFLOP/s     peak    GB/s    read  fraction of roof"
    )
    cells = []
    for kv in args.kv.split(","):
        for case in CASES:
            if args.phase in (None, case[0]):
                cells.append(bench.cell(kv, case))
                print(line(cells[-1]), flush=True)
    print(json.dumps({"bench": "attention", **vars(args), "cells": cells}))


if __name__ == "__main__":
    main()
