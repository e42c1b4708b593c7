"""Right numbers on real models: teacher-forced over real text, against transformers.

Both sides read the same GGUF file, each with its own reader, and transformers computes in float32
with its own model code: nothing between file and logits is shared. Limits as in bench/numerics.py.
"""

from __future__ import annotations

import pytest

from octavo.models import hub

pytest.importorskip("transformers")
pytest.importorskip("octavo.kernels._cpu")

from bench import numerics

TOKENS = 2048


def _check(name: str, windows: int) -> None:
    path = hub.resolve(name)
    texts = numerics.windows_of(numerics.encoder(path), windows, TOKENS // windows + 1)
    print(numerics.HEADER)
    found = numerics.measure(name, numerics.cpu(path), numerics.oracle(path), texts)
    assert found.positions >= 2000
    assert found.kl <= numerics.MAX_KL
    assert found.top1 >= numerics.MIN_TOP1
    assert found.ppl <= numerics.MAX_PPL


@pytest.mark.slow
def test_smollm2_predicts_as_transformers_does():
    _check("smollm2-135m", 4)


@pytest.mark.models
@pytest.mark.parametrize("name", ["gemma-3-270m", "qwen2.5-coder-0.5b"])
def test_larger_models_predict_as_transformers_does(name):
    # Two windows of 1,025 tokens: twice the sliding window of Gemma.
    _check(name, 2)
