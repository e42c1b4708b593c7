"""Perplexity of the same file on the same text, here in every activation format and in llama.cpp.

    python bench/perplexity.py smollm2-135m                          the file as it is
    python bench/perplexity.py smollm2-135m --types Q4_0,Q5_K,BF16   requantised by llama-quantize
    python bench/perplexity.py qwen2.5-coder-1.5b --acts int8,bf16 --chunks 4

The text is cut as llama-perplexity cuts it: chunks of 512 tokens, each begun with BOS where the
model wants one, the second half of each scored. It is prose of Python's manual, as in
bench/numerics.py. What differs between columns of a row is the rounding of activations, of K and V,
and the order of sums: fp32 rounds nothing, so the distance from it is what a format costs. A
requantised file is worse than the original; all columns read the same one.

llama.cpp is built under --home at first use, as by bench/compare.py.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import tempfile
import time
from array import array
from pathlib import Path

import numerics
import numpy as np
from installs import llama_bin, requantised

from octavo.core.batch import Batch, Row, Want
from octavo.models import hub
from octavo.models.tokenizer import load_tokenizer
from octavo.models.weights import open_checkpoint
from octavo.runtime.cpu import CpuExecutor, CpuOptions

CONTEXT, FIRST = 512, 256  # tokens of a chunk; the first whose successor is scored
ACTS = ("int8", "mixed", "pairs", "bf16", "fp32")


def text_of(path: Path, chunks: int) -> tuple[str, list[list[int]]]:
    """The beginning of the text, and its chunks of tokens."""
    tokenizer = load_tokenizer(open_checkpoint(path))
    text = numerics.prose()[: CONTEXT * (chunks + 1) * 8]
    ids = tokenizer.encode(text)
    if len(ids) < CONTEXT * chunks:
        raise SystemExit(f"the text has {len(ids)} tokens, too few for {chunks} chunks")
    cut = [ids[i * CONTEXT : (i + 1) * CONTEXT] for i in range(chunks)]
    if tokenizer.add_bos and tokenizer.bos_id is not None:
        for chunk in cut:
            chunk[0] = tokenizer.bos_id
    return text, cut


def ours(path: Path, act: str, chunks: list[list[int]]) -> float:
    """exp of the mean negative log-likelihood of the scored tokens."""
    options = CpuOptions(act=act, max_tokens=FIRST, max_rows=1, max_context=CONTEXT)
    executor = CpuExecutor(open_checkpoint(path), options)
    table = array("i", range(CONTEXT // executor.capacity.block_size))
    total = 0.0
    for chunk in chunks:
        for at in (0, FIRST):
            block = array("i", chunk[at : at + FIRST])
            wants = tuple(Want(i, target=0) for i in range(FIRST - 1)) if at else ()
            batch = Batch(0, (Row(0, at, block, table, wants),))
            logits = executor.logits(batch)
        x = logits.astype(np.float64)
        top = x.max(axis=1)
        log_sum = top + np.log(np.exp(x - top[:, None]).sum(axis=1))
        total += float((log_sum - x[np.arange(len(x)), chunk[FIRST + 1 :]]).sum())
    return math.exp(total / (len(chunks) * (FIRST - 1)))


def theirs(tools: Path, path: Path, text: str, chunks: int, threads: int) -> tuple[float, float]:
    """llama-perplexity's estimate and its own uncertainty."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(text)
        file.flush()
        command = [str(tools / "llama-perplexity"), "-m", str(path), "-f", file.name]
        command += ["-c", str(CONTEXT), "--chunks", str(chunks), "-t", str(threads)]
        out = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r"Final estimate: PPL = ([\d.]+) \+/- ([\d.]+)", out.stdout + out.stderr)
    if found is None:
        raise SystemExit(f"llama-perplexity said nothing that we know:\n{out.stdout[-500:]}")
    return float(found[1]), float(found[2])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    parser.add_argument("model", help="a name or a .gguf file")
    parser.add_argument("--types", default="", help="requantised to these, by llama.cpp's names")
    parser.add_argument("--acts", default=",".join(ACTS))
    parser.add_argument("--chunks", type=int, default=16)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--home", type=Path, default=cache / "octavo-bench")
    args = parser.parse_args()
    model = hub.resolve(args.model)
    acts = args.acts.split(",")
    tools = llama_bin(args.home)
    print(
        f"{'file':12}" + "".join(f"{a:>10}" for a in acts) + f"{'llama.cpp':>11}{'+/-':>8}{'s':>6}"
    )
    rows = []
    for kind in args.types.split(",") if args.types else ("as filed",):
        began = time.perf_counter()
        path = requantised(args.home, model, kind) if args.types else model
        text, chunks = text_of(path, args.chunks)
        found = {act: ours(path, act, chunks) for act in acts}
        llama, spread = theirs(tools, path, text, args.chunks, args.threads)
        rows.append({"file": kind, **found, "llama.cpp": llama, "uncertainty": spread})
        line = "".join(f"{found[act]:10.4f}" for act in acts)
        took = time.perf_counter() - began
        print(f"{kind:12}{line}{llama:11.4f}{spread:8.3f}{took:6.0f}", flush=True)
    print(
        json.dumps(
            {"bench": "perplexity", "model": args.model, "chunks": args.chunks, "rows": rows}
        )
    )


if __name__ == "__main__":
    main()
