"""Laws of the op table: nobody's signature, document or import drifts from it."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.models.config import Rope
from octavo.ops import table
from octavo.ops.table import TABLE, Ops, WeightSpec, inv_freq
from octavo.ops.trace import Tracer

DOCUMENT = Path(__file__).parents[2] / "docs" / "OPS.md"


def _implementations():
    yield Ops
    yield Tracer
    yield pytest.importorskip("octavo.ops.reference").ReferenceOps


@pytest.mark.parametrize("index", [0, 1, 2], ids=["protocol", "tracer", "reference"])
def test_every_op_is_spelt_as_in_the_table(index):
    ops = list(_implementations())[index]
    for op in TABLE.values():
        given = inspect.signature(getattr(ops, op.name)).parameters
        weights = [name.rstrip("?") for name in op.weights]
        assert set(given) == {"self", *op.inputs, *weights, *op.attrs}, op.name
        keyword = {n for n, p in given.items() if p.kind is p.KEYWORD_ONLY}
        optional = {name.rstrip("?") for name in op.weights if name.endswith("?")}
        assert keyword == set(op.attrs) | optional, op.name


def test_the_document_is_generated_from_the_table_as_it_stands():
    assert DOCUMENT.read_text(encoding="utf-8") == table.document()


def test_importing_ops_does_not_import_torch():
    names = "table", "trace", "program", "cost"
    code = (
        f"import sys, {', '.join(f'octavo.ops.{n}' for n in names)}; print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "False"


def test_weight_bytes_follow_the_stored_types_of_the_parts():
    spec = WeightSpec("qkv", "linear", ("q", "k", "v"), (640, 512), (512, 64, 64))
    assert spec.nbytes == 640 * 512 * 2
    mixed = spec.typed({"q": "Q4_K", "k": "Q4_K", "v": "Q6_K"})
    assert mixed.nbytes == 576 * 2 * 144 + 64 * 2 * 210


@pytest.mark.parametrize(
    ("rope", "hf"),
    [
        (Rope(10000.0), {"rope_type": "default"}),
        (Rope(1e6, "linear", 8.0), {"rope_type": "linear", "factor": 8.0}),
        (
            Rope(500000.0, "llama3", 32.0, 1.0, 4.0, 8192),
            {
                "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
            },
        ),
    ],
    ids=["none", "linear", "llama3"],
)  # fmt: skip
def test_rope_frequencies_are_those_of_transformers(rope, hf):
    transformers = pytest.importorskip("transformers")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = transformers.LlamaConfig(
        hidden_size=512, num_attention_heads=4, head_dim=128, max_position_embeddings=131072,
        rope_parameters={"rope_theta": rope.base, **hf},
    )  # fmt: skip
    theirs = llama.LlamaRotaryEmbedding(config).inv_freq.tolist()
    assert inv_freq(rope, 128) == pytest.approx(theirs, rel=1e-5)


def test_explicit_rope_factors_divide_each_pair():
    rope = Rope(10000.0, "explicit", factors=(1.0, 2.0, 4.0, 8.0))
    assert inv_freq(rope, 8) == pytest.approx((1.0, 0.05, 0.0025, 0.000125))
