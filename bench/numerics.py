"""How far our numbers are from the model's: teacher-forced over real text, against transformers.

    python bench/numerics.py smollm2-135m                      the default model and activations
    python bench/numerics.py gemma-3-270m --act int8           another activation format
    python bench/numerics.py all --windows 2 --length 1025     every model of the project

The oracle is transformers in float32 with eager attention on the same GGUF file, read by its own
loader: it shares no line with us from file to logits. The text is prose of Python's own manual
(pydoc_data.topics), so nothing is fetched for it. For each model one line: mean KL divergence of
our next-token distribution from the oracle's (nats), how often both have the same most likely
token, and both perplexities; then a JSON line.
"""

from __future__ import annotations

import argparse
import json
import math
import pydoc_data.topics
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from octavo.models import hub

MODELS = ("smollm2-135m", "gemma-3-270m", "qwen2.5-coder-0.5b")

# The most mean KL (nats), the least share of equal first choices, the most relative difference of
# perplexity, by activation format.
LIMITS = {"bf16": (5e-4, 0.995, 1e-3), "fp32": (1e-6, 0.999, 1e-5)}
LIMIT = (2e-3, 0.985, 3e-3)  # of the others
BLOCK = 128

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
# Token ids of one window -> float32 logits of its positions, in order, a block at a time.
Model = Callable[[list[int]], Iterator[Floats]]


@dataclass
class Agreement:
    """Sums over positions; target is the token that really came next."""

    positions: int = 0
    kl_sum: float = 0.0
    kl_max: float = 0.0
    same: int = 0
    our_nll: float = 0.0
    their_nll: float = 0.0

    def add(self, ours: Floats, theirs: Floats, targets: list[int]) -> None:
        import torch

        q, p = (torch.from_numpy(x).double().log_softmax(-1) for x in (ours, theirs))
        kl = (p.exp() * (p - q)).sum(-1)
        rows = torch.arange(len(targets))
        self.positions += len(targets)
        self.kl_sum += float(kl.sum())
        self.kl_max = max(self.kl_max, float(kl.max()))
        self.same += int((p.argmax(-1) == q.argmax(-1)).sum())
        self.our_nll -= float(q[rows, targets].sum())
        self.their_nll -= float(p[rows, targets].sum())

    @property
    def kl(self) -> float:
        return self.kl_sum / self.positions

    @property
    def top1(self) -> float:
        return self.same / self.positions

    @property
    def perplexities(self) -> tuple[float, float]:
        """Ours, the oracle's."""
        return math.exp(self.our_nll / self.positions), math.exp(self.their_nll / self.positions)

    @property
    def ppl(self) -> float:
        """Relative difference of the perplexities."""
        ours, theirs = self.perplexities
        return abs(ours / theirs - 1.0)

    def within(self, act: str = "auto") -> bool:
        """Whether the project's limits for these activations are met."""
        kl, top1, ppl = LIMITS.get(act, LIMIT)
        return self.kl <= kl and self.top1 >= top1 and self.ppl <= ppl


def prose() -> str:
    """English with some code in it: the topics of Python's manual, in order of name."""
    topics = pydoc_data.topics.topics
    return "\n\n".join(topics[name] for name in sorted(topics) if len(topics[name]) > 2000)


def encoder(path: Path) -> Callable[[str], list[int]]:
    """The model's own tokenizer."""
    from octavo.models.tokenizer import load_tokenizer
    from octavo.models.weights import open_checkpoint

    return load_tokenizer(open_checkpoint(path)).encode


def windows_of(encode: Callable[[str], list[int]], count: int, length: int) -> list[list[int]]:
    """`count` windows of `length` tokens, spread over the text, each begun as the model would."""
    text = prose()
    step = len(text) // count
    cut = [encode(text[i * step : i * step + 8 * length])[:length] for i in range(count)]
    if any(len(window) < length for window in cut):
        raise SystemExit(f"the text is too short for windows of {length} tokens")
    return cut


def oracle(path: Path) -> Model:
    """transformers on the GGUF file, in float32."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()

    def run(tokens: list[int]) -> Iterator[Floats]:
        with torch.no_grad():
            hidden = model.model(input_ids=torch.tensor([tokens]), use_cache=False)[0][0]
            for at in range(0, len(tokens), BLOCK):
                yield model.lm_head(hidden[at : at + BLOCK]).float().numpy()

    return run


def reference(path: Path) -> Model:
    """Our own definition of the ops, in float32: what is left is the reader and the decoder."""
    import torch

    from octavo.models.weights import open_checkpoint
    from octavo.ops import reference as ref

    checkpoint = open_checkpoint(path)
    weights, cfg = ref.load(checkpoint), checkpoint.config

    def run(tokens: list[int]) -> Iterator[Floats]:
        past = ref.ContiguousPast(ref.Heads(cfg.num_heads, cfg.num_kv_heads, cfg.head_dim))
        for at in range(0, len(tokens), BLOCK):
            block = torch.tensor(tokens[at : at + BLOCK])
            ops = ref.ReferenceOps(ref.Pack((0, len(block)), sequences=(0,)), past)
            positions = torch.arange(at, at + len(block))
            with torch.no_grad():
                yield ref.logits(weights, cfg, ops, block, positions).numpy()

    return run


def cpu(
    path: Path,
    *,
    act: str = "auto",
    kv_dtype: str = "auto",
    isa: str = "auto",
    threads: int | None = None,
) -> Model:
    """The CPU backend, in chunks of BLOCK tokens."""
    from octavo.core.batch import Batch, Row, Want
    from octavo.models.weights import open_checkpoint
    from octavo.runtime.cpu import CpuExecutor, CpuOptions

    options = CpuOptions(threads=threads, act=act, kv_dtype=kv_dtype, isa=isa)
    options = replace(options, max_tokens=BLOCK, max_rows=1, max_context=8192)
    executor = CpuExecutor(open_checkpoint(path), options)

    def run(tokens: list[int]) -> Iterator[Floats]:
        table = array("i", range(-(-len(tokens) // executor.capacity.block_size)))
        for at in range(0, len(tokens), BLOCK):
            block = array("i", tokens[at : at + BLOCK])
            wants = tuple(Want(i, target=0) for i in range(len(block)))
            yield executor.logits(Batch(at, (Row(0, at, block, table, wants),)))

    return run


def compare(ours: Model, theirs: Model, windows: list[list[int]]) -> Agreement:
    """Both models over the same windows, each window from its start."""
    agreement = Agreement()
    for window in windows:
        at, asked = 1, window[:-1]
        for mine, other in zip(ours(asked), theirs(asked), strict=True):
            agreement.add(mine, other, window[at : at + len(mine)])
            at += len(mine)
    return agreement


def measure(name: str, ours: Model, theirs: Model, windows: list[list[int]]) -> Agreement:
    """Compare, and print the line."""
    began = time.perf_counter()
    found = compare(ours, theirs, windows)
    mine, other = found.perplexities
    print(
        f"{name:<22}{found.positions:>7}{found.kl:>11.2e}{found.kl_max:>11.2e}"
        f"{found.top1:>9.2%}{mine:>10.4f}{other:>10.4f}{found.ppl:>9.3%}"
        f"{time.perf_counter() - began:>8.1f}",
        flush=True,
    )
    return found


HEADER = (
    f"{'model':<22}{'tokens':>7}{'mean KL':>11}{'max KL':>11}{'top-1':>9}"
    f"{'ppl':>10}{'oracle':>10}{'differ':>9}{'s':>8}"
)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help=f"a name, a .gguf file, or all: {', '.join(MODELS)}")
    parser.add_argument("--backend", choices=("cpu", "reference"), default="cpu")
    parser.add_argument("--act", default="auto", help="the CPU backend's activation format")
    parser.add_argument(
        "--kv-dtype", default="auto", help="how the CPU backend's cache holds K and V"
    )
    parser.add_argument("--isa", default="auto")
    parser.add_argument(
        "--oracle",
        choices=("transformers", "fp32"),
        default="transformers",
        help="fp32: our own fp32 mode, cache included; quick, for one format against another",
    )
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--length", type=int, default=1025, help="tokens of a window")
    options = parser.parse_args(arguments)
    names = MODELS if options.model == "all" else (options.model,)
    print(HEADER)
    records, good = {}, True
    for name in names:
        path = hub.resolve(name)
        if options.backend == "cpu":
            ours = cpu(path, act=options.act, kv_dtype=options.kv_dtype, isa=options.isa)
        else:
            ours = reference(path)
        windows = windows_of(encoder(path), options.windows, options.length)
        truth = oracle(path) if options.oracle == "transformers" else cpu(path, act="fp32")
        found = measure(name, ours, truth, windows)
        records[name] = asdict(found) | {"kl": found.kl, "top1": found.top1, "ppl": found.ppl}
        good = good and found.within(options.act)
    kl, top1, ppl = LIMITS.get(options.act, LIMIT)
    limits = f"KL <= {kl:g}, top-1 >= {top1:.1%}, perplexity within {ppl:.2%}"
    print(f"limits: {limits}: {'met' if good else 'MISSED'}")
    print(json.dumps({"bench": "numerics", **vars(options), "results": records, "met": good}))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
