"""The same build on processors that lack instructions: emulated ones, so that an instruction which
leaks into a path that must not have it ends the process, as it would for a user."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
QEMU = shutil.which("qemu-x86_64")

STEP = """
import json
from octavo.kernels import isas
from tests.runtime import small

def run(isa):
    engine = small.executor(small.config(num_layers=2), kv_bytes=4 << 20, max_tokens=64, isa=isa)
    ids = small.tokens(1, 40)
    rows = [small.row(0, 0, ids, [38, 39], small.table(0, 2)),
            small.row(1, 0, ids[:7], [6], small.table(1, 2))]
    engine.submit(small.batch(*rows))
    result = engine.collect()
    made = [result.rows[i] for i in (0, 1)]
    return [[list(r.tokens), [x.logprob for x in r.logprobs]] for r in made]

print(json.dumps([list(isas()), {isa: run(isa) for isa in isas()}]))
"""


def step(*emulator: str) -> tuple[list[str], dict[str, list[list[list[float]]]]]:
    """Instruction sets found, and what each makes of one step of a small model of every type."""
    command = [*emulator, sys.executable, "-c", STEP]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    found, made = json.loads(done.stdout.splitlines()[-1])
    return found, made


@pytest.mark.skipif(QEMU is None, reason="qemu-x86_64 is not installed")
@pytest.mark.parametrize(
    ("processor", "expected"),
    [("Haswell", ["avx2", "portable"]), ("Nehalem", ["portable"])],
)
def test_a_processor_without_an_instruction_set_runs_what_it_has(processor, expected) -> None:
    assert QEMU is not None
    found, made = step(QEMU, "-cpu", processor)
    assert found == expected
    _, native = step()
    for isa in expected:
        for (tokens, logprobs), (want_tokens, want_logprobs) in zip(
            made[isa], native["portable"], strict=True
        ):
            assert tokens == want_tokens
            assert logprobs == pytest.approx(want_logprobs, abs=2e-2)
