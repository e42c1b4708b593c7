"""The import arrows of the architecture, and the words and habits that are refused."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent / "octavo"

# What each room may import of ours, beside itself and octavo.errors. Longer names win: a module
# named here has its own rule. "octavo" alone is the package's public names.
ARROWS: dict[str, tuple[str, ...]] = {
    "octavo.errors": (),
    "octavo.conformance": (),
    "octavo.conformance.commands": ("octavo.terminal",),  # its words at the terminal
    "octavo.conformance.report": ("octavo.tables",),
    "octavo.core": (),
    "octavo.models": ("octavo.ops",),
    "octavo.models.hub": ("octavo.config",),
    "octavo.ops": ("octavo.models.config", "octavo.models.decoder"),
    "octavo.ops.reference": ("octavo.models.weights",),
    "octavo.kernels": (),
    "octavo.runtime": (
        "octavo.core.batch",
        "octavo.core.executor",
        "octavo.core.request",
        "octavo.ops",
        "octavo.models",
        "octavo.kernels",
        "octavo.config",
    ),
    "octavo.sim": ("octavo.core", "octavo.ops", "octavo.models.config", "octavo.models.decoder"),
    "octavo.sim.pictures": ("octavo.plots",),
    "octavo.config": (),
    "octavo.door": (
        "octavo.core",
        "octavo.text",
        "octavo.models",
        "octavo.config",
        "octavo.grammar",
        "octavo.runtime.sampling",  # the one validator; it needs no kernels
    ),
    "octavo.grammar": ("octavo.core.request", "octavo.text"),
    "octavo.grammar.worker": (),  # it is run as a script, in a process of its own
    "octavo.text": ("octavo.core.request", "octavo.models"),
}
# On top: they may import anything but the command line.
TOP = (
    "octavo",
    "octavo.assembly",
    "octavo.benchmark",
    "octavo.ceilings",
    "octavo.cluster",
    "octavo.doctor",
    "octavo.lab",
    "octavo.llm",
    "octavo.neighbours",
    "octavo.plots",
    "octavo.rl",
    "octavo.server",
    "octavo.tables",
    "octavo.terminal",
)
ENTRANCE = ("octavo.cli", "octavo.__main__", "octavo.sim.cli")
NO_PYTHON = ("web",)

REFUSED_MODULES = {"utils", "util", "helpers", "helper", "misc", "base", "common"}
REFUSED_VERBS = ("get_", "do_", "handle_", "process_", "manage_")
REFUSED_WORDS = {"max_new_tokens", "output_len", "n_predict"}
ALLOWED_MANAGERS = {"BlockManager"}
READS_ENVIRONMENT = {
    "octavo/cli.py",  # NO_COLOR
    "octavo/models/hub.py",  # XDG_CACHE_HOME, and what pip and the hub's client need
}

MODULES = sorted(p for p in ROOT.rglob("*.py") if "node_modules" not in p.parts)


def name_of(path: Path) -> str:
    parts = list(path.relative_to(ROOT.parent).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def within(module: str, room: str) -> bool:
    return module == room or module.startswith(room + ".")


def imports(path: Path) -> set[str]:
    """Modules of ours that a file imports, at any depth of its code."""
    found: set[str] = set()
    package = name_of(path) if path.name == "__init__.py" else name_of(path).rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                source = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                full = f"{source}.{alias.name}"
                found.add(full if module_exists(full) else source)
    return {name for name in found if within(name, "octavo")}


def module_exists(name: str) -> bool:
    path = ROOT.parent.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def violation(module: str, imported: str) -> bool:
    if any(within(imported, door) for door in ENTRANCE):
        return not any(within(module, door) for door in ENTRANCE)
    if any(within(module, door) for door in ENTRANCE):
        return False
    room = max((r for r in ARROWS if within(module, r)), key=len, default=None)
    if room is None:
        return False
    house = ".".join(module.split(".")[:2])
    allowed = (*ARROWS[room], *ARROWS.get(house, ()), house, "octavo.errors")
    return not any(within(imported, other) for other in allowed)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_follow_the_arrows(path: Path) -> None:
    module = name_of(path)
    wrong = sorted(name for name in imports(path) if violation(module, name))
    assert not wrong, f"{module} must not import {', '.join(wrong)}"


@pytest.mark.parametrize(
    ("module", "imported"),
    [
        ("octavo.core.scheduler", "octavo.ops.table"),
        ("octavo.core.scheduler", "octavo.models.config"),
        ("octavo.models.decoder", "octavo.core.batch"),
        ("octavo.models.decoder", "octavo.runtime.cpu"),
        ("octavo.runtime.cpu", "octavo.core.scheduler"),
        ("octavo.ops.cost", "octavo.runtime.cpu"),
        ("octavo.sim.executor", "octavo.runtime.cpu"),
        ("octavo.server.app", "octavo.cli"),
        ("octavo", "octavo.cli"),
        ("octavo.errors", "octavo.core"),
    ],
)
def test_a_wrong_arrow_would_be_seen(module: str, imported: str) -> None:
    assert violation(module, imported)


def test_every_room_has_its_arrows() -> None:
    known = set(ARROWS) | set(TOP) | set(ENTRANCE)
    rooms = {f"octavo.{p.name}" for p in ROOT.iterdir() if p.is_dir() and any(p.rglob("*.py"))}
    files = {name_of(p) for p in ROOT.glob("*.py")}
    unknown = {room for room in rooms | files if room not in known}
    assert not unknown - {f"octavo.{name}" for name in NO_PYTHON}, "say what they may import"


def test_the_core_imports_nothing_but_pure_standard_modules() -> None:
    """No tensors, no I/O, no clock, no threads, no logging in the core."""
    pure = {
        "__future__", "abc", "array", "bisect", "collections", "dataclasses", "enum", "functools",
        "hashlib", "heapq", "itertools", "math", "octavo", "operator", "reprlib", "typing",
    }  # fmt: skip
    for path in sorted((ROOT / "core").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            for name in names:
                assert name.split(".")[0] in pure, f"{name_of(path)} imports {name}"


@pytest.mark.parametrize("module", ["octavo", "octavo.core.engine", "octavo.sim", "octavo.server"])
def test_importing_needs_no_torch(module: str) -> None:
    if not module_exists(module):
        pytest.skip(f"{module} is not built yet")
    code = (
        f"import sys, {module}; heavy = {{'torch', 'transformers'}} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT.parent)


def test_every_module_of_the_core_imports_without_numpy() -> None:
    names = sorted(name_of(p) for p in (ROOT / "core").glob("*.py"))
    heavy = {"numpy", "torch", "asyncio", "logging", "socket", "subprocess"}
    code = (
        f"import sys, {', '.join(names)}; heavy = {heavy!r} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-S", "-c", code], check=True, cwd=ROOT.parent)


def test_nothing_reads_the_environment_but_where_it_is_said() -> None:
    for path in MODULES:
        if path.relative_to(ROOT.parent).as_posix() in READS_ENVIRONMENT:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv"):
                raise AssertionError(f"{name_of(path)}:{node.lineno} reads the environment")
            if isinstance(node, ast.ImportFrom) and node.module == "os":
                names = {alias.name for alias in node.names}
                assert not names & {"environ", "getenv"}, name_of(path)


def test_names_are_the_houses() -> None:
    for path in MODULES:
        assert not REFUSED_MODULES & set(name_of(path).split(".")), f"{path.name}: no such room"
        for node in ast.walk(ast.parse(path.read_text())):
            where = f"{name_of(path)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert not node.name.lstrip("_").startswith(REFUSED_VERBS), f"{where} {node.name}"
            elif isinstance(node, ast.ClassDef):
                assert not node.name.lstrip("_").startswith("Base"), f"{where} {node.name}"
                ends = node.name.endswith("Manager") and node.name not in ALLOWED_MANAGERS
                assert not ends, f"{where} {node.name}"
            elif isinstance(node, ast.arg):
                assert node.arg not in REFUSED_WORDS, f"{where} {node.arg}"


def test_functions_of_the_core_are_short_and_take_at_most_six_parameters() -> None:
    for path in sorted((ROOT / "core").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                count = len(node.args.args) + len(node.args.kwonlyargs)
                count -= any(a.arg == "self" for a in node.args.args)
                lines = (node.end_lineno or 0) - node.lineno + 1
                assert count <= 6, f"{name_of(path)}.{node.name} takes {count}"
                assert lines <= 50, f"{name_of(path)}.{node.name} has {lines} lines"
