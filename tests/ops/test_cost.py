"""Laws of the cost model, against counts made in other ways."""

import itertools

import pytest

from octavo.ops.cost import Hardware, cost
from octavo.ops.table import KV_DTYPES, RowShape, StepShape
from octavo.ops.trace import trace
from tests.models import tiny
from tests.ops.configs import GEMMA3, LLAMA, SMOLLM2

BOX = Hardware("box", 55e9, 700e9, 300e9, op_seconds=1e-6, step_seconds=1e-4)


def step(*rows: tuple[int, int, int], kv: str = "bf16") -> StepShape:
    return StepShape(tuple(RowShape(*row) for row in rows), KV_DTYPES[kv])


@pytest.mark.parametrize("window", [None, 1, 2, 5, 8, 100])
def test_visible_pairs_and_span_are_those_of_the_mask(window):
    for start, n in itertools.product(range(12), range(1, 12)):
        pairs = [
            (q, k)
            for q in range(start, start + n)
            for k in range(q + 1)
            if window is None or q - k < window
        ]
        row = RowShape(start, n)
        assert row.visible(window) == len(pairs)
        assert row.span(window) == len({k for _, k in pairs})


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_flops_are_what_torch_counts_on_transformers(name, tmp_path):
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode

    model = tiny.make(name, tmp_path)
    n = 16
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.ones(1, n, dtype=torch.long))
    cfg = tiny.config_of(name)
    ours = cost(trace(cfg), step((0, n, n)), BOX)
    # Eager attention multiplies the whole square; the mask wastes what lies outside it.
    square = 4 * cfg.q_size * n * n * cfg.num_layers
    rope = 2 * n * (cfg.head_dim // 2) * len(cfg.ropes)  # transformers' angles are a matmul
    masked = sum(part.work.flops for part in ours.ops if part.op == "attend")
    assert counter.get_total_flops() in (
        ours.flops - masked + square,
        ours.flops - masked + square + rope,
    )


def test_decode_reads_every_weight_once_and_the_context():
    program = trace(SMOLLM2)
    types = {part: "Q4_1" for spec in program.weights for part in spec.parts}
    types |= {n: "F32" for n in types if n.endswith("norm")} | {"embed": "Q8_0"}
    work = cost(program.typed(types), step((999, 1, 1)), BOX).work
    linears = 106_168_320 * 20 / 32  # 135M parameters less the embedding and the norms
    norms = 61 * 576 * 4
    embedding = 49152 * 576 * 34 / 32
    gathered = 576 * 34 / 32
    assert work.weight_bytes == pytest.approx(linears + norms + embedding + gathered)
    kv_token = 30 * 2 * 192 * 2
    assert work.kv_bytes == 1000 * kv_token + kv_token
    small = cost(program.typed(types), step((999, 1, 1), kv="int8"), BOX).work
    assert small.kv_bytes == 1001 * 30 * 2 * 3 * (64 + 2)
    assert small.weight_bytes == work.weight_bytes


def test_weights_are_read_once_however_many_rows_and_the_head_only_for_outputs():
    program = trace(LLAMA)
    one = cost(program, step((5, 1, 1)), BOX).work
    many = cost(program, step((5, 1, 1), (9, 30, 0), (0, 7, 7)), BOX).work
    embed_rows = 37 * 48 * 2
    assert many.weight_bytes == one.weight_bytes + embed_rows
    none = cost(program, step((0, 40, 0)), BOX)
    assert none.ops[-1].work.weight_bytes == none.ops[-1].work.flops == 0


def test_a_window_bounds_what_a_long_context_costs():
    near, far = (cost(trace(GEMMA3), step((n, 1, 1)), BOX) for n in (50, 400))
    for close, distant in zip(near.ops, far.ops, strict=True):
        grows = distant.work.kv_bytes > close.work.kv_bytes
        assert grows == (distant.op == "attend" and distant.layer == 5)


def test_chunks_add_up_to_the_whole_in_attention_and_products():
    program = trace(LLAMA)
    whole = cost(program, step((0, 60, 1)), BOX)
    parts = [cost(program, step(row), BOX) for row in ((0, 25, 0), (25, 35, 1))]
    assert whole.flops == sum(part.flops for part in parts)
    assert sum(part.work.kv_bytes for part in parts) > whole.work.kv_bytes


def test_seconds_are_the_roofline_plus_overheads():
    program = trace(SMOLLM2)
    decode, prefill = (cost(program, step(row), BOX) for row in ((100, 1, 1), (0, 512, 1)))
    assert decode.seconds == pytest.approx(decode.bytes / 55e9 + 154e-6 + 1e-4, rel=0.02)
    assert {p.bound for p in decode.ops} == {"memory"}
    linear = [p for p in prefill.ops if p.op in ("norm_qkv", "norm_gate_up_act")]
    assert {p.bound for p in linear[:-1]} == {"compute"}
    assert linear[-1].bound == "memory"  # of the last layer one row is wanted
    assert "norm_gate_up_act" in str(prefill)
    assert sum(p.seconds for p in prefill.ops) + 1e-4 == pytest.approx(prefill.seconds)
