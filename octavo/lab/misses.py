"""Last-level cache misses of attention, counted by cachegrind: a simulated cache of a known size.

The driver (flash.cpp) is built with the system's compiler from the kernels' own sources, in their
portable form: cachegrind knows no AVX-512.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from octavo.errors import OctavoError

SOURCES = ("attention_lab.cpp", "attend_step.cpp", "pool.cpp", "memory.cpp")
ENOUGH = 100.0  # seconds of one run, beyond any


class Unavailable(OctavoError):
    """There is no valgrind, no compiler, or no sources: says which, and what to do."""


def compiler() -> str:
    """The system's C++ compiler."""
    for name in ("c++", "g++", "clang++"):
        if found := shutil.which(name):
            return found
    raise Unavailable("there is no C++ compiler to build the driver with (apt-get install g++)")


def require() -> None:
    """Raises `Unavailable` unless misses can be counted here."""
    if shutil.which("valgrind") is None:
        raise Unavailable("valgrind is not installed (apt-get install valgrind)")
    compiler()
    if not (kernels() / "naive.inl").is_file():
        raise Unavailable(f"the kernels' sources are not in {kernels()}")


def kernels() -> Path:
    """Where the kernels' sources are: in the repository, and in an installed package."""
    import octavo.kernels

    return Path(octavo.kernels.__file__ or "").parent / "cpu"


def build(folder: Path) -> Path:
    """The driver, built in `folder`. Raises `Unavailable` with the compiler's first complaint."""
    driver, here = folder / "flash", Path(__file__).parent
    command = [
        compiler(), "-std=c++20", "-O2", "-ffp-contract=off", "-pthread", f"-I{kernels()}",
        str(here / "flash.cpp"), *(str(kernels() / name) for name in SOURCES), "-o", str(driver),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line]
        raise Unavailable(f"the driver cannot be built: {(errors or ['no reason given'])[0]}")
    return driver


def count(driver: Path, kind: str, tokens: int, dim: int, cache: int) -> int:
    """Last-level misses for data of one attention: those of a run less those of an idle run."""
    run, idle = (_misses(driver, kind, what, tokens, dim, cache) for what in ("run", "idle"))
    return run - idle


def _misses(driver: Path, kind: str, what: str, tokens: int, dim: int, cache: int) -> int:
    out = driver.with_name(f"{kind}.{what}.out")
    command = [
        "valgrind", "--tool=cachegrind", "--cache-sim=yes", f"--LL={cache},8,64",
        "--D1=32768,8,64", f"--cachegrind-out-file={out}", str(driver), kind, what, str(tokens),
        str(dim),
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=ENOUGH)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"valgrind ran for more than {ENOUGH:.0f} s") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise Unavailable(f"valgrind failed: {last}")
    return parse(out.read_text().splitlines())


def parse(lines: Sequence[str]) -> int:
    """Last-level misses for data, read and written, in a file that cachegrind wrote."""
    fields = {name: rest.split() for name, _, rest in (line.partition(":") for line in lines)}
    counts = dict(zip(fields["events"], map(int, fields["summary"]), strict=True))
    return counts["DLmr"] + counts["DLmw"]
