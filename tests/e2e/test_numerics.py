"""Right numbers on real models: teacher-forced over real text, against transformers.

Both sides read the same GGUF file, each with its own reader, and transformers computes in float32
with its own model code: nothing between file and logits is shared. Limits as in bench/numerics.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.models import hub

pytest.importorskip("transformers")
pytest.importorskip("octavo.kernels._cpu")

from bench import numerics

TOKENS = 2048


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path):
    """Its file, and transformers' model of it."""
    return smollm2_path, numerics.oracle(smollm2_path)


def _compare(path: Path, ours: numerics.Model, theirs: numerics.Model, windows: int, each: int):
    texts = numerics.windows_of(numerics.encoder(path), windows, each + 1)
    print(numerics.HEADER)
    found = numerics.measure(path.stem[:20], ours, theirs, texts)
    assert found.positions == windows * each
    return found


@pytest.mark.slow
def test_smollm2_in_float32_is_transformers_smollm2(smollm2):
    path, oracle = smollm2
    found = _compare(path, numerics.cpu(path, act="fp32"), oracle, 1, 256)
    assert found.kl < 1e-8
    assert found.top1 == 1.0
    assert found.ppl < 1e-5


@pytest.mark.slow
def test_smollm2_predicts_as_transformers_does(smollm2):
    path, oracle = smollm2
    assert _compare(path, numerics.cpu(path), oracle, 4, TOKENS // 4).within()


@pytest.mark.models
@pytest.mark.parametrize("name", ["gemma-3-270m", "qwen2.5-coder-0.5b"])
def test_larger_models_predict_as_transformers_does(name):
    # Windows of 1,024 tokens: twice the sliding window of Gemma.
    path = hub.resolve(name)
    found = _compare(path, numerics.cpu(path), numerics.oracle(path), 2, TOKENS // 2)
    assert found.within()
