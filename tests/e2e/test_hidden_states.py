"""Embeddings: transformers' last hidden state on tiny models of every family, and law 1 bit for bit
on a small one of all formats."""

from __future__ import annotations

from array import array
from dataclasses import replace

import numpy as np
import pytest

from octavo.core.engine import Engine
from octavo.core.request import Request, SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.models.weights import open_checkpoint
from tests.models import tiny

torch = pytest.importorskip("torch")
small = pytest.importorskip("tests.runtime.small")

from octavo.runtime.cpu import CpuExecutor, CpuOptions  # noqa: E402

PARAMS = SamplingParams(max_tokens=1, temperature=0.0, embed=True)
LENGTHS = (1, 2, 33, 70, 5, 64, 65, 200)


def embed(
    executor: CpuExecutor, texts: list[list[int]], together: int, **capacity: int
) -> list[bytes]:
    """The vectors of texts, so many at once."""
    engine = Engine(executor, Scheduler(replace(executor.capacity, **capacity)))
    found: dict[str, bytes] = {}
    for first in range(0, len(texts), together):
        for i in range(first, min(first + together, len(texts))):
            engine.add(Request(f"r{i}", array("i", texts[i]), PARAMS, 0.0, seed=i))
        while engine.has_work:
            engine.pump(0.0)
            for event in engine.drain(0.0):
                assert event.error is None
                assert event.embedding is not None
                found[event.request_id] = event.embedding
    return [found[f"r{i}"] for i in range(len(texts))]


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_it_is_the_last_hidden_state_of_transformers(name, tmp_path):
    model = tiny.make(name, tmp_path)
    executor = CpuExecutor(
        open_checkpoint(tmp_path), CpuOptions(threads=1, kv_bytes=8 << 20, act="fp32")
    )
    rng = np.random.default_rng(3)
    texts = [rng.integers(0, tiny.VOCAB, n).tolist() for n in (1, 2, 33, 70, 5)]
    for text, got in zip(texts, embed(executor, texts, 5), strict=True):
        with torch.no_grad():
            states = model.model(input_ids=torch.tensor([text])).last_hidden_state
        want = states[0, -1].numpy()
        assert np.abs(np.frombuffer(got, np.float32) - want).max() < 1e-4 * np.abs(want).max()


@pytest.mark.parametrize("threads", [1, 2])
def test_it_is_the_same_alone_or_in_any_batch_whole_chunked_or_cached(threads):
    executor = small.executor(threads=threads)
    rng = np.random.default_rng(5)
    texts = [rng.integers(0, 330, n).tolist() for n in LENGTHS]
    texts += [[*text, 7] for text in texts] + texts  # prefixes of one another, and again
    alone = embed(small.executor(), texts, 1)
    assert len(set(alone)) == 2 * len(LENGTHS)
    assert embed(executor, texts, 24) == alone
    assert embed(executor, texts, 5, max_tokens=16) == alone
    assert embed(executor, texts, 24, max_tokens=64, num_blocks=12) == alone
