"""An instruction set's unit exports its tables and nothing else: no code that others could run."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# The table of amx is put together by avx512's unit, whose other functions it has.
EXPORTS = {
    "portable": {"KERNELS_PORTABLE"},
    "avx2": {"KERNELS_AVX2"},
    "avx512": {"KERNELS_AVX512", "KERNELS_AMX"},
    "amx": {"LINEAR_AMX", "ATTENTION_AMX", "peak_amx(int, long, float*)"},
}


def objects(isa: str) -> list[Path]:
    found = sorted((ROOT / "build").glob(f"**/isa_{isa}.cpp.o"), key=lambda p: p.stat().st_mtime)
    return found[-1:]


@pytest.mark.parametrize("isa", EXPORTS)
def test_a_unit_exports_its_tables_alone(isa: str) -> None:
    if shutil.which("nm") is None or not objects(isa):
        pytest.skip("no nm, or no object files: not an editable build")
    lines = subprocess.run(
        ["nm", "--demangle", str(objects(isa)[0])], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    exported = [line for line in lines if line[17:18] in set("TDBRVWuSG") | {"w", "v"}]
    names = {line[19:] for line in exported}
    assert names == {f"octavo::{name}" for name in EXPORTS[isa]}
