"""Laws of the reference ops: packs are exact, prompts can be shared, everything differentiates.

That the numbers are right is shown against transformers, in tests/models/test_decoder.py.
"""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from octavo.errors import EngineError  # noqa: E402
from octavo.models.decoder import weight_specs  # noqa: E402
from octavo.ops.reference import (  # noqa: E402
    ContiguousPast,
    Pack,
    PagedPast,
    ReferenceOps,
    logits,
    visible,
)
from octavo.ops.table import TABLE, Heads  # noqa: E402
from octavo.ops.trace import trace  # noqa: E402
from tests.ops.configs import FAMILIES, GEMMA3, LLAMA  # noqa: E402

families = pytest.mark.parametrize("cfg", FAMILIES.values(), ids=FAMILIES.keys())


def _weights(cfg, dtype=torch.float32):
    rng = torch.Generator().manual_seed(3)
    made = {}
    for spec in weight_specs(cfg):
        scale = 1.2 * spec.shape[1] ** -0.5 if len(spec.shape) == 2 else 0.2
        noise = torch.randn(spec.shape, generator=rng, dtype=dtype) * scale
        made[spec.name] = noise + 1.0 if spec.name.endswith("norm") else noise
    return made


def _run(cfg, weights, texts, *, parents=None, starts=None, wanted=None):
    tokens = torch.tensor([t for text in texts for t in text])
    starts = starts or [0] * len(texts)
    spans = zip(texts, starts, strict=True)
    positions = torch.tensor([start + i for text, start in spans for i in range(len(text))])
    cu = [0]
    for text in texts:
        cu.append(cu[-1] + len(text))
    ops = ReferenceOps(Pack(tuple(cu), wanted=wanted, parents=parents))
    return logits(weights, cfg, ops, tokens, positions)


A, B, C = [5, 9, 23, 7, 88, 2, 41, 17, 3], [64], [99, 12, 130, 45, 6, 77, 0, 31]


@families
def test_a_pack_is_its_sequences_one_by_one(cfg):
    weights = _weights(cfg)
    packed = _run(cfg, weights, [A, B, C])
    alone = torch.cat([_run(cfg, weights, [text]) for text in (A, B, C)])
    assert torch.allclose(packed, alone, atol=1e-5)


@families
def test_no_sequence_sees_another(cfg):
    weights = _weights(cfg)
    noise = [t ^ 1 for t in A]
    one, two = _run(cfg, weights, [A, B, C]), _run(cfg, weights, [noise, B, C])
    assert torch.equal(one[len(A) :], two[len(A) :])
    assert not torch.allclose(one[: len(A)], two[: len(A)])


def test_no_gradient_crosses_to_another_sequence():
    weights = {name: w.double() for name, w in _weights(LLAMA).items()}
    table = weights["embed"].requires_grad_()
    out = _run(LLAMA, weights, [A, C])
    out[len(A) :].square().sum().backward()
    assert (table.grad[A] == 0).all()
    assert (table.grad[C] != 0).any(-1).all()


@families
def test_completions_may_share_one_prompt(cfg):
    weights = _weights(cfg)
    shared = _run(cfg, weights, [A, B, C, A], parents=(-1, 0, 0, -1), starts=[0, 9, 9, 0])
    for text, rows in ((A + B, slice(9, 10)), (A + C, slice(10, 18))):
        assert torch.allclose(shared[rows], _run(cfg, weights, [text])[9:], atol=1e-5)
    assert torch.allclose(shared[18:], shared[:9], atol=1e-6)


def test_a_family_tree_has_grandchildren():
    weights = _weights(LLAMA)
    tree = _run(LLAMA, weights, [A, C, B], parents=(-1, 0, 1), starts=[0, 9, 17])
    assert torch.allclose(tree[17:], _run(LLAMA, weights, [A + C + B])[17:], atol=1e-5)


def test_rope_is_relative():
    weights = _weights(LLAMA)
    near, far = (_run(LLAMA, weights, [A], starts=[s]) for s in (0, 1000))
    assert torch.allclose(near, far, atol=1e-4)


def test_only_wanted_rows_reach_the_head():
    weights = _weights(LLAMA)
    everything = _run(LLAMA, weights, [A, C])
    assert torch.allclose(
        _run(LLAMA, weights, [A, C], wanted=(16, 8, 8)), everything[[16, 8, 8]], atol=1e-6
    )
    assert _run(LLAMA, weights, [A, C], wanted=()).shape == (0, LLAMA.vocab_size)


@families
def test_gradients_are_those_of_finite_differences(cfg):
    small = replace(
        cfg, num_layers=1, windows=cfg.windows[:1], rope_index=cfg.rope_index[:1], vocab_size=20
    )
    weights = {n: w.double().requires_grad_() for n, w in _weights(small).items()}
    texts = [[1, 5, 3, 2, 9, 4, 8, 7, 11], [6, 19]]

    def loss():
        return _run(small, weights, texts).log_softmax(-1)[:, 3].sum()

    loss().backward()
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, w in weights.items():
            way = torch.randn(w.shape, generator=rng, dtype=w.dtype)
            slope = (w.grad * way).sum().item()
            w += 1e-6 * way
            above = loss().item()
            w -= 2e-6 * way
            below = loss().item()
            w += 1e-6 * way
            assert slope == pytest.approx((above - below) / 2e-6, rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("paged", [False, True])
def test_a_past_gives_the_same_as_the_whole(paged):
    weights, cfg = _weights(GEMMA3), GEMMA3
    heads = Heads(cfg.num_heads, cfg.num_kv_heads, cfg.head_dim)
    past = PagedPast(cfg, 12, block_size=4) if paged else ContiguousPast(heads)
    if paged:
        past.tables = {7: (11, 2, 5, 0, 8)}
    text, pieces = A + C, []
    for start, end in ((0, 3), (3, 4), (4, 13), (13, 17)):
        ops = ReferenceOps(Pack((0, end - start), sequences=(7,)), past)
        tokens, positions = torch.tensor(text[start:end]), torch.arange(start, end)
        pieces.append(logits(weights, cfg, ops, tokens, positions))
    assert torch.allclose(torch.cat(pieces), _run(cfg, weights, [text]), atol=1e-5)


def test_naming_a_sequence_without_a_past_is_an_error():
    ops = ReferenceOps(Pack((0, 1), sequences=(7,)))
    with pytest.raises(EngineError, match="no past"):
        logits(_weights(LLAMA), LLAMA, ops, torch.tensor([1]), torch.tensor([0]))


def test_the_mask_is_causal_and_as_wide_as_the_window():
    at = torch.arange(5)
    rows = ["".join("x" if seen else "." for seen in row) for row in visible(at, at, 3)]
    assert rows == ["x....", "xx...", "xxx..", ".xxx.", "..xxx"]


@families
def test_replaying_the_program_is_running_the_model(cfg):
    weights, program = _weights(cfg), trace(cfg)
    tokens = torch.tensor(A + C)
    positions = torch.tensor([*range(len(A)), *range(len(C))])
    pack = Pack((0, len(A), len(A + C)), wanted=(3, 8, 16))
    ops, values = ReferenceOps(pack), {0: tokens, 1: positions}
    for instr in program.instrs:
        op = TABLE[instr.op]
        given = dict(zip(op.inputs, (values[i] for i in instr.inputs), strict=True))
        names = [name.rstrip("?") for name in op.weights]
        held = [None if w is None else weights[w] for w in instr.weights]
        given |= dict(zip(names, held, strict=True)) | dict(instr.attrs)
        values[instr.output] = getattr(ops, instr.op)(**given)
    expected = logits(weights, cfg, ReferenceOps(pack), tokens, positions)
    assert torch.equal(values[program.output], expected)
