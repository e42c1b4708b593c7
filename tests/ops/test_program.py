"""Laws of the traced Program: it is the model, it is sound, and its memory plan holds."""

import random
from dataclasses import replace

import numpy as np
import pytest

from octavo.errors import EngineError
from octavo.models import decoder
from octavo.ops.program import Instr, Program
from octavo.ops.table import Extent, Shape, T
from octavo.ops.trace import Sym, trace
from tests.ops.configs import FAMILIES, GEMMA3, LLAMA, SMOLLM2

families = pytest.mark.parametrize("cfg", FAMILIES.values(), ids=FAMILIES.keys())


@families
def test_a_layer_is_five_instructions(cfg):
    program = trace(cfg)
    assert len(program.instrs) == 5 * cfg.num_layers + 4
    assert [i.op for i in program.instrs[1:6]] == [
        "norm_qkv", "attend", "out_residual", "norm_gate_up_act", "down_residual",
    ]  # fmt: skip
    assert str(program.values[program.output]) == f"f32[S, {cfg.vocab_size}]"


@families
def test_the_last_layer_goes_on_with_the_wanted_rows_alone(cfg):
    program = trace(cfg)
    rows = [(i.op, str(program.values[i.output].rows)) for i in program.instrs]
    assert rows[-8:] == [
        ("norm_qkv", "T"), ("select", "S"), ("select", "S"), ("attend", "S"),
        ("out_residual", "S"), ("norm_gate_up_act", "S"), ("down_residual", "S"),
        ("final_norm_head", "S"),
    ]  # fmt: skip
    assert {row for _, row in rows[:-8]} == {"T"}


def test_smollm2_has_the_published_number_of_parameters():
    assert sum(spec.size for spec in trace(SMOLLM2).weights) == 134_515_008


def test_gemma_layers_differ_in_window_and_rope_only_where_the_config_says():
    program = trace(GEMMA3)
    attends = [i for i in program.instrs if i.op == "attend"]
    ropes = [i.attr("rope") for i in program.instrs if i.op == "norm_qkv"]
    assert [i.attr("window") for i in attends] == [7, 7, 7, 7, 7, None, 7]
    assert [rope.base for rope in ropes] == [1e4, 1e4, 1e4, 1e4, 1e4, 1e6, 1e4]
    assert program.instrs[0].attr("scale") == 48**0.5


@families
def test_stages_are_the_whole_cut_in_pieces(cfg):
    whole = trace(cfg)
    cuts = [range(1), range(1, 2), range(2, cfg.num_layers)]
    stages = [trace(cfg, cut) for cut in cuts]
    pieces = [(i.op, i.weights, i.attrs) for stage in stages for i in stage.instrs]
    assert pieces == [(i.op, i.weights, i.attrs) for i in whole.instrs]
    assert stages[1].inputs[0] == "x"
    assert stages[1].values[0] == stages[0].values[stages[0].output] == Shape("f32", T, 48)


@families
def test_weights_of_stages_cover_the_model_and_nothing_else(cfg):
    stages = [decoder.weight_specs(cfg, r) for r in (range(2), range(2, cfg.num_layers))]
    union = {spec for specs in stages for spec in specs}
    assert union == set(decoder.weight_specs(cfg))


def test_a_branch_on_the_number_of_tokens_is_caught(monkeypatch):
    honest = decoder.layer

    def branching(ops, w, cfg, i, x, positions):
        if i == 1 and x.shape[0] == 3:
            return x
        return honest(ops, w, cfg, i, x, positions)

    monkeypatch.setattr(decoder, "layer", branching)
    with pytest.raises(EngineError, match="depends on its sizes"):
        trace(LLAMA)


@pytest.mark.parametrize(
    "look",
    [bool, len, iter, int, float, lambda x: x.item(), lambda x: x[0], lambda x: x == 1,
     lambda x: x + 1, lambda x: 1 + x, lambda x: x > 0, lambda x: {x: 1}],
)  # fmt: skip
def test_a_symbol_shows_nothing_of_its_value(look):
    with pytest.raises((EngineError, TypeError)):
        look(Sym(0, (3, 48)))


def _edit(program: Program, index: int, **changes: object) -> Program:
    instrs = list(program.instrs)
    instrs[index] = replace(instrs[index], **changes)
    return replace(program, instrs=tuple(instrs))


def _mutants() -> dict[str, tuple[Program, str]]:
    p = trace(LLAMA)
    attend = p.instrs[2]
    swapped = list(p.instrs)
    swapped[1], swapped[2] = swapped[2], swapped[1]
    values = list(p.values)
    values[4] = Shape("f32", T, 47)
    dead = replace(
        p,
        values=(*p.values, Shape("f32", T, 48)),
        instrs=(*p.instrs, Instr("embed", (0,), len(p.values), ("embed",), (("scale", 1.0),))),
    )
    gate_up = p.instrs[4]
    return {
        "use before definition": (replace(p, instrs=tuple(swapped)), "before it is defined"),
        "second definition": (_edit(p, 3, output=attend.output), "defined twice"),
        "wrong shape": (replace(p, values=tuple(values)), "stated as"),
        "unknown op": (_edit(p, 2, op="attention"), "no op is called"),
        "unknown weight": (_edit(p, 3, weights=("layers.0.wo", None)), "no weight is called"),
        "matrix that does not fit": (_edit(p, 3, weights=("layers.0.down", None)), "columns"),
        "norm for a matrix": (_edit(p, 3, weights=("layers.0.attn_norm", None)), "not a matrix"),
        "required weight absent": (_edit(p, 4, weights=(None, gate_up.weights[1])), "be absent"),
        "missing attribute": (_edit(p, 2, attrs=attend.attrs[1:]), "attrs should be"),
        "positions for x": (_edit(p, 2, inputs=(1,)), "not a matrix"),
        "x for positions": (_edit(p, 1, inputs=(2, 2)), "not i32"),
        "dead value": (dead, "serve nothing"),
        "no output": (replace(p, output=len(p.values)), "never defined"),
        "idle weight": (_edit(p, 6, weights=p.instrs[1].weights), "serve nothing"),
    }


@pytest.mark.parametrize("name", _mutants())
def test_verify_refuses(name):
    program, reason = _mutants()[name]
    with pytest.raises(EngineError, match=reason):
        program.verify()


def _replay_in(memory: np.ndarray, program: Program, sizes: tuple[int, int]) -> None:
    """Run the program on stamps in one arena; every read must find what was written last.

    The stamp of a value fills its whole buffer; a reading op checks all of it.
    """
    arena = program.arena()
    at = [None if o is None else o.at(*sizes) for o in arena.offsets]

    def span(i: int) -> np.ndarray:
        shape = program.values[i]
        return memory[at[i] // 4 :][: shape.rows.at(*sizes) * shape.cols]

    for instr in program.instrs:
        for i in instr.inputs:
            if at[i] is not None:
                assert (span(i) == i).all(), f"{instr} finds %{i} overwritten"
        span(instr.output)[:] = instr.output
    assert (span(program.output) == program.output).all()


@families
@pytest.mark.parametrize("layers", [slice(0, None), slice(1, None), slice(0, 2)], ids=str)
def test_no_live_value_is_ever_overwritten_in_the_arena(cfg, layers):
    program = trace(cfg, range(cfg.num_layers)[layers])
    rng = random.Random(5)
    sizes = [(1, 0), (1, 1), (64, 64), (7, 0)] + [
        (n := rng.randint(1, 90), rng.randint(0, n)) for _ in range(12)
    ]
    for size in sizes:
        arena = np.full(program.arena().bytes_at(*size) // 4, -1, np.int32)
        _replay_in(arena, program, size)


def test_the_arena_is_as_small_as_a_layer():
    arena = trace(SMOLLM2).arena()
    # x, q and h at once is the least that a layer needs; logits come after all of them.
    assert arena.size == Extent(t=(576 + 1536) * 4, s=49152 * 4)
    assert arena.unshared.at(512, 0) / arena.bytes_at(512, 0) > 50


def test_the_diff_names_what_changed():
    program = trace(LLAMA)
    assert program.diff(program) == ""
    text = program.diff(trace(replace(LLAMA, windows=(None, 7, None))))
    changed = [line for line in text.splitlines()[2:] if line[0] in "+-"]
    assert len(changed) == 2
    assert "layer=1" in changed[1]
    assert "window=7" in changed[1]


def test_the_picture_folds_alike_layers_and_shows_unlike_ones():
    text = trace(SMOLLM2).draw()
    assert "29 times" in text
    assert len(text.splitlines()) == 19
    assert trace(GEMMA3).draw().count("window=7") == 2
