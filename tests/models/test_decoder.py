"""Every family's numbers against transformers, on tiny random checkpoints, for every backend.

The reference backend shares the decoder with the others, so it cannot catch a wrong rope; this can.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from octavo.models.config import Rope
from octavo.models.weights import open_checkpoint
from tests.models import tiny

torch = pytest.importorskip("torch")
backends = pytest.importorskip("tests.models.backends")

TOLERANCE = 1e-4
LENGTHS = (1, 2, 33, 70, 5)


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    """name -> (folder, sequences, transformers' float32 logits of each)."""
    made = {}

    def family(name: str) -> tuple[Path, list[list[int]], list[np.ndarray]]:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            model = tiny.make(name, folder)
            rng = np.random.default_rng(7)
            texts = [rng.integers(0, tiny.VOCAB, n).tolist() for n in LENGTHS]
            with torch.no_grad():
                oracle = [model(input_ids=torch.tensor([t])).logits[0].numpy() for t in texts]
            made[name] = folder, texts, oracle
        return made[name]

    return family


every_family = pytest.mark.parametrize("name", tiny.FAMILIES)
every_backend = pytest.mark.parametrize("backend", backends.BACKENDS)


def _agree(ours: list[np.ndarray], oracle: list[np.ndarray]) -> None:
    """Largest difference of a row, relative to the row's largest logit."""
    for got, want in zip(ours, oracle, strict=True):
        assert got.shape == want.shape
        error = np.abs(got - want).max(-1) / np.abs(want).max(-1)
        assert error.max() < TOLERANCE, f"{error.max():.1e} at position {error.argmax()}"


@every_family
def test_the_reader_understands_the_config(name, families):
    folder, _, _ = families(name)
    read, meant = open_checkpoint(folder).config, tiny.config_of(name)
    for cfg in (read, meant):
        assert len(cfg.rope_index) == len(cfg.windows) == cfg.num_layers
    assert [read.ropes[i] for i in read.rope_index] == [meant.ropes[i] for i in meant.rope_index]
    assert read.attn_scale == pytest.approx(meant.attn_scale, rel=1e-12)
    assert read.embed_scale == pytest.approx(meant.embed_scale, rel=1e-12)
    free = {"ropes": (), "rope_index": (), "attn_scale": 0.0, "embed_scale": 0.0}
    assert replace(read, **free) == replace(meant, **free)


@every_backend
@every_family
def test_a_ragged_batch_of_whole_sequences_has_transformers_logits(name, backend, families):
    folder, texts, oracle = families(name)
    run = backends.BACKENDS[backend](folder)
    _agree(run([[(i, 0, text) for i, text in enumerate(texts)]]), oracle)


@every_backend
@every_family
def test_chunks_mixed_with_others_have_transformers_logits(name, backend, families):
    folder, texts, oracle = families(name)
    run = backends.BACKENDS[backend](folder)
    rng = np.random.default_rng(11)
    chunks = []
    for i, text in enumerate(texts):
        cuts = sorted({0, len(text), *rng.integers(0, len(text) + 1, 4).tolist()})
        chunks.append([(i, a, text[a:b]) for a, b in itertools.pairwise(cuts)])
    steps = [[c for c in step if c] for step in itertools.zip_longest(*chunks)]
    _agree(run(steps), oracle)


@every_backend
def test_decoding_one_by_one_has_transformers_logits(backend, families):
    folder, texts, oracle = families("gemma3")
    run = backends.BACKENDS[backend](folder)
    steps = [[(3, 0, texts[3][:40])]] + [[(3, p, [texts[3][p]])] for p in range(40, 70)]
    _agree(run(steps), [oracle[3]])


@every_family
def test_what_a_family_has_matters(name, families):
    """Leaving out any one of its features must move the logits far beyond the tolerance."""
    folder, texts, oracle = families(name)
    cfg = tiny.config_of(name)
    plain = Rope(cfg.ropes[0].base)
    variants = {
        "rope": replace(cfg, ropes=(Rope(77.0),) * len(cfg.ropes)),
        "attn_scale": replace(cfg, attn_scale=1.0),
        "act": replace(cfg, act="silu" if cfg.act != "silu" else "gelu_tanh"),
        "eps": replace(cfg, norm_eps=0.1),
    }
    if cfg.ropes != (plain,):
        variants["scaling"] = replace(cfg, ropes=(plain,) * len(cfg.ropes))
    if len(cfg.ropes) > 1:
        variants["rope order"] = replace(cfg, ropes=cfg.ropes[::-1])
        variants["embed_scale"] = replace(cfg, embed_scale=1.0)
        variants["post_norms"] = replace(cfg, post_norms=False)
    if any(cfg.windows):
        larger = tuple(w and w + 1 for w in cfg.windows)
        variants["window"] = replace(cfg, windows=larger)
    if cfg.qk_norm:
        variants["qk_norm"] = replace(cfg, qk_norm=False)
    if cfg.qkv_bias:
        variants["qkv_bias"] = replace(cfg, qkv_bias=False)
    for feature, variant in variants.items():
        got = backends.reference(folder, variant)([[(0, 0, texts[3])]])
        error = np.abs(got[0] - oracle[3]).max() / np.abs(oracle[3]).max()
        assert error > 10 * TOLERANCE, f"{feature}: {error:.1e}"
