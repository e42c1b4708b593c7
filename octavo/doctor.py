"""`octavo doctor`: what this machine is, what it can do, what the model needs, what is wrong.

It changes nothing, fetches nothing, and takes about as long as it is told to measure.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.ceilings import Ceilings, measure_ceilings
from octavo.config import show_bytes
from octavo.errors import InvalidRequest, OctavoError

Rows = list[tuple[str, str]]

NEEDED = ("click", "httptools", "jinja2", "msgspec", "numpy", "prometheus-client", "rich",
          "starlette", "tokenizers", "uvicorn")  # fmt: skip
CONTEXT = 2048  # tokens of one conversation, for the estimate of what fits


@dataclass(slots=True)
class Report:
    """sections: headings with (name, value) lines. wrong: must be cured. notes: could be better.

    values: the same as numbers, for --json.
    """

    sections: list[tuple[str, Rows]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return {**self.values, "wrong": self.wrong, "notes": self.notes, "ok": not self.wrong}


def examine(model: str, seconds: float = 2.0) -> Report:
    """Look at the machine, measure it for about `seconds`, and look at a model without fetching."""
    if not 0 < seconds <= 3600:
        raise InvalidRequest(
            f"--seconds must be above 0 and at most 3600, got {seconds}", "seconds"
        )
    report = Report()
    try:
        find(model)
    except OctavoError as error:  # before the machine is measured for a slip of the hand
        report.wrong.append(str(error))
        return report
    _software(report)
    _machine(report)
    _model(report, model, _ceilings(report, seconds))
    return report


def _software(report: Report) -> None:
    rows = [("python", platform.python_version())]
    for name in ("octavo", *NEEDED):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            report.wrong.append(f"the package {name} is missing: pip install {name}")
            continue
        if name == "octavo":
            rows.insert(0, ("octavo", version))
            report.values["version"] = version
    report.sections.append(("Software", rows))


def _machine(report: Report) -> None:
    cores = len(os.sched_getaffinity(0))
    quota, load = cpu_quota(), os.getloadavg()[0]
    total, free = memory()
    rows = [
        ("processor", _processor()),
        ("cores", f"{cores} usable of {os.cpu_count()}"),
        ("caches", ", ".join(caches()) or "unknown"),
        ("memory", f"{show_bytes(free)} free of {show_bytes(total)}"),
        ("huge pages", huge_pages()),
        ("load", f"{load:.1f}"),
    ]
    if quota is not None:
        rows.insert(2, ("CPU quota", f"{quota:.1f} cores"))
        if quota < cores:
            report.wrong.append(
                f"a control group allows {quota:.1f} cores but {cores} are visible: threads will "
                f"be stopped in mid-step; use --threads {max(1, int(quota))}"
            )
    if load > cores:
        report.notes.append(f"the machine is busy (load {load:.1f}): figures will be low")
    if huge_pages() == "never":
        report.notes.append(
            "transparent huge pages are off: echo madvise | sudo tee "
            "/sys/kernel/mm/transparent_hugepage/enabled"
        )
    report.values |= {"cores": cores, "memory_bytes": total, "free_bytes": free, "load": load}
    report.sections.append(("Machine", rows))


def _ceilings(report: Report, seconds: float) -> Ceilings | None:
    """What the machine reaches, or nothing if the kernels cannot be loaded."""
    try:
        from octavo.kernels import isas

        names = isas()
    except ImportError as error:
        report.wrong.append(f"the kernels cannot be loaded ({error}): install octavo again")
        return None
    found = measure_ceilings(seconds=seconds)
    one, every, threads = found.one, found.all, found.threads

    def line(name: str, unit: str) -> tuple[str, str]:
        together, alone = (getattr(rates, name) / 1e9 for rates in (every, one))
        beside = f" with {threads} threads, {alone:.1f} with one" if threads > 1 else ""
        return ({"dram": "memory", "l3": "L3 cache", "l2": "L2 cache", "f32": "fp32"}.get(
            name, name), f"{together:.1f} {unit}{beside}")  # fmt: skip

    rows = [("instruction sets", ", ".join(names))]
    rows += [line(name, "GB/s") for name in ("dram", "l3", "l2") if getattr(every, name)]
    rows += [line("int8", "Gop/s"), line("bf16", "GFLOP/s"), line("f32", "GFLOP/s")]
    if threads > 1:
        rows.append(("barrier", f"{found.barrier_s * 1e9:.0f} ns"))
    if list(names) == ["portable"]:
        report.notes.append("neither AVX-512 nor AVX2 here: the portable kernels are slow")
    report.values |= {"isas": list(names), "threads": threads, "ceilings": found.as_dict()}
    report.sections.append(("Measured, at best", rows))
    return found


def _model(report: Report, name: str, ceilings: Ceilings | None) -> None:
    try:
        path = find(name)
        if path is None:
            report.sections.append(("Model", [(name, f"not here yet: octavo pull {name}")]))
            return
        rows, needed = _needs(path, ceilings, report)
    except OctavoError as error:
        report.wrong.append(str(error))
        return
    _, free = memory()
    if needed > free:
        report.wrong.append(
            f"{name} needs {show_bytes(needed)} and {show_bytes(free)} are free: "
            "take a smaller model"
        )
    report.sections.append((f"Model {name}", rows))


def find(name: str) -> Path | None:
    """The model's file or directory if it is on this machine. Raises `OctavoError` for no model."""
    from octavo.models import hub
    from octavo.models.registry import MODELS

    if name in MODELS:
        return hub.cached(MODELS[name])
    path = Path(name).expanduser()
    if path.exists():
        return path
    if hub.REPO_NAME.fullmatch(name) and not name.startswith((".", "/", "~")):
        return None
    return hub.resolve(name)  # says what is wrong with the name


def _needs(path: Path, ceilings: Ceilings | None, report: Report) -> tuple[Rows, int]:
    """What the model takes, and how fast it could at most write; bytes for one conversation."""
    from octavo.models.weights import open_checkpoint
    from octavo.runtime.kv import token_bytes

    checkpoint = open_checkpoint(path)
    config = checkpoint.config
    weights = sum(checkpoint.tensor(name).data.nbytes for name in checkpoint.names())
    read = weights - (0 if config.tied_head else checkpoint.tensor("embed").data.nbytes)
    kv = token_bytes(config, "bf16")
    small = token_bytes(config, "int8")
    needed = weights + kv * min(CONTEXT, config.max_context)
    rows = [
        ("file", f"{path}  ({show_bytes(path.stat().st_size)})" if path.is_file() else str(path)),
        ("architecture", f"{config.architecture}, {config.num_layers} layers"),
        ("weights", f"{show_bytes(weights)} of it" if path.is_file() else show_bytes(weights)),
        ("KV cache", f"{show_bytes(kv)} a token, {show_bytes(small)} with --kv-dtype int8"),
        ("context", f"{config.max_context} tokens"),
        ("needs", f"{show_bytes(needed)} for one conversation of {CONTEXT} tokens"),
    ]
    report.values["model"] = {
        "path": str(path), "weight_bytes": weights, "kv_bytes_per_token": kv,
        "needed_bytes": needed,
    }  # fmt: skip
    if ceilings is not None:
        best = ceilings.all.dram / read
        rows.append(("at most", f"{best:.0f} tok/s for one stream, by memory bandwidth"))
        report.values["model"]["max_tokens_per_s"] = best
    return rows, needed


# ---- what the system says ----


def _processor() -> str:
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def caches() -> list[str]:
    """The first core's caches, such as "L2 1024K"."""
    found = []
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        kind = _read(folder / "type").strip()
        if kind != "Instruction":
            level, size = _read(folder / "level").strip(), _read(folder / "size").strip()
            found.append(f"L{level}{'d' if kind == 'Data' else ''} {size}")
    return found


def memory() -> tuple[int, int]:
    """(total, free) bytes for this process: the machine's, or its control group's."""
    fields = {}
    for line in _read("/proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        fields[name] = int(rest.split()[0]) * 1024
    total, free = fields.get("MemTotal", 0), fields.get("MemAvailable", 0)
    limit, used = _read("/sys/fs/cgroup/memory.max"), _read("/sys/fs/cgroup/memory.current")
    if limit.strip().isdecimal() and used.strip().isdecimal():
        total, free = min(total, int(limit)), min(free, max(0, int(limit) - int(used)))
    return total, free


def cpu_quota() -> float | None:
    """Cores that the control group allows, or None."""
    words = _read("/sys/fs/cgroup/cpu.max").split()
    if len(words) == 2 and words[0].isdecimal() and words[1].isdecimal():
        return int(words[0]) / int(words[1])
    return None


def huge_pages() -> str:
    """The kernel's setting for transparent huge pages."""
    text = _read("/sys/kernel/mm/transparent_hugepage/enabled")
    return text.partition("[")[2].partition("]")[0] or "unknown"


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
