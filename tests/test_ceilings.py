"""The machine's ceilings: every figure is there, and each op stands under the right one."""

from __future__ import annotations

import json

import pytest

from octavo.ceilings import (
    Ceilings,
    Rates,
    cache_bytes,
    hardware,
    measure_ceilings,
    unit_of,
    units,
)
from octavo.kernels import isas
from octavo.ops.trace import trace
from tests.ops.configs import SMOLLM2

ONE = Rates(dram=30e9, l3=80e9, l2=90e9, int8=400e9, bf16=200e9, f32=100e9)
ALL = Rates(dram=60e9, l3=160e9, l2=180e9, int8=800e9, bf16=400e9, f32=200e9)
BOX = Ceilings("avx512", 2, ONE, ALL, 60e-9)


def program(matrices: str):
    traced = trace(SMOLLM2)
    types = {part: matrices for spec in traced.weights for part in spec.parts}
    return traced.typed(types | {name: "F32" for name in types if name.endswith("norm")})


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("threads", [1, 2])
def test_every_instruction_set_and_number_of_threads_is_measured(isa, threads):
    found = measure_ceilings(threads, isa, seconds=0.02)
    assert (found.isa, found.threads) == (isa, threads)
    for rates in (found.one, found.all):
        assert min(rates.dram, rates.int8, rates.bf16, rates.f32) > 0
        assert (rates.l2 > 0) == (cache_bytes(2) > 0)
    assert (found.barrier_s > 0) == (threads > 1)
    assert json.loads(json.dumps(found.as_dict()))["all"]["int8"] == found.all.int8


@pytest.mark.parametrize(
    ("types", "act", "op", "unit"),
    [
        ("Q4_1", "pairs", "norm_qkv", ("int8", 2)),
        ("Q4_1", "pairs", "out_residual", ("int8", 2)),
        ("Q4_1", "mixed", "norm_qkv", ("int8", 1)),
        ("Q4_1", "mixed", "final_norm_head", ("int8", 2)),
        ("Q4_1", "int8", "norm_qkv", ("int8", 1)),
        ("Q4_1", "bf16", "norm_qkv", ("bf16", 1)),
        ("Q4_1", "fp32", "norm_qkv", ("f32", 1)),
        ("BF16", "int8", "down_residual", ("bf16", 1)),
        ("F16", "int8", "down_residual", ("f32", 1)),
        ("Q4_1", "pairs", "attend", ("bf16", 1)),
        ("Q4_1", "fp32", "attend", ("f32", 1)),
    ],
)
def test_an_op_stands_under_the_unit_that_multiplies_for_it(types, act, op, unit):
    traced = program(types)
    assert units(traced, act)[op] == unit
    where = [i for i, instr in enumerate(traced.instrs) if instr.op == op]
    assert {unit_of(traced, i, act) for i in where} == {unit}


def test_the_roofline_s_machine_halves_the_rate_of_pairs():
    machine = hardware(BOX, program("Q4_1"), "pairs")
    assert machine.bytes_per_s == 60e9
    assert machine.rate("norm_qkv") == 400e9
    assert machine.rate("out_residual") == 400e9
    assert machine.rate("attend") == 400e9
