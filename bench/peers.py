"""The engines a user would pick instead, with the settings under which each is at its best here.

Nothing is tuned against a peer: where it has several ways, it is given the fastest. TABLE says what
each runs with; `python bench/compare.py peers` prints it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from engines import Engine, LlamaBatched, LlamaBench, Server, Worker
from installs import (
    OPENVINO,
    VLLM,
    dequantised,
    exported,
    llama_bin,
    preloads,
    requantised,
    say,
    venv,
)

HERE = Path(__file__).resolve().parent
CELLS = ("single", "batch8", "prefill", "chat", "shared_prefix")
CONTEXT = 34816  # tokens of all 16 slots of llama-server: 2176 each


@dataclass(frozen=True)
class Peer:
    """What is said of an engine: version, weights, settings, how each cell reaches it."""

    name: str
    version: str
    weights: str
    settings: str
    how: str


TABLE = (
    Peer(
        "llama.cpp", "0c1e57098 (llama-cpp-python 0.3.36)", "the file as it is, and as Q4_0",
        "-t THREADS; repacking on and off; llama-server -np 16 -c 34816 --cont-batching",
        "single, prefill: llama-bench; batch8: llama-batched-bench; both for both files, repacking "
        "on and off. chat, shared_prefix: llama-server over HTTP with the one of these four that "
        "llama-batched-bench found fastest at 16 sequences on this machine (kept in --home)",
    ),
    Peer(
        "OpenVINO GenAI", OPENVINO, "int8, exported by optimum-intel from the dequantised file",
        "continuous batching, 16 sequences, prefix caching, dynamic split-fuse, cache 2 GB, "
        "256 tokens a step (512 and 2048, and reading the GGUF itself, were tried on SmolLM2: no "
        "difference beyond the machine's noise)",
        "all cells in its own process, driven in place: the package has no server, so it pays for "
        "no HTTP",
    ),
    Peer(
        "vLLM", VLLM, "bf16, dequantised by transformers",
        "LD_PRELOAD of tcmalloc and its OpenMP, THREADS bound, KV cache 2 GiB, 16 sequences, "
        "torch.compile and prefix caching as by default",
        "all cells through its own server over HTTP; single and batch8 count the time after the "
        "first tokens, prefill the time until it",
    ),
    Peer(
        "Octavo", "this tree", "the file as it is", "--threads THREADS --speculation off",
        "single, batch8, prefill: its library; chat, shared_prefix: `octavo serve` over HTTP",
    ),
)  # fmt: skip

# (part of a peer's name, model): why it is not run there.
CANNOT: dict[tuple[str, str], str] = {}


def octavo(model: Path, threads: int) -> list[Engine]:
    pair = ["--threads", str(threads)]
    # No peer is asked to guess tokens, so none are guessed here.
    pair += ["--speculation", "off"]
    program = str(Path(sys.executable).parent / "octavo")
    serve = [program, "serve", "--model", str(model), "--served-model-name", "default"]
    worker = [sys.executable, str(HERE / "workers" / "octavo_worker.py"), str(model), str(threads)]
    return [
        Server("octavo", [*serve, "--port", "{port}", *pair]),
        Worker("octavo", worker, ("single", "batch8", "prefill")),
    ]


def variants(home: Path, model: Path) -> list[tuple[str, Path, bool]]:
    """llama.cpp's four ways with a model: (name, file, repacking)."""
    files = (("filed", model), ("Q4_0", requantised(home, model, "Q4_0")))
    return [
        (f"llama.cpp {label}{'' if repack else ' repack 0'}", file, repack)
        for label, file in files
        for repack in (True, False)
    ]


def serving_choice(home: Path, model: Path, threads: int) -> str:
    """The variant that llama-server should run: least time for chat's mix, 16 at once.

    Found once by llama-batched-bench, 128 tokens in and 48 out (weighed as chat has them, 3 to 2).
    """
    kept = home / "models" / f"{model.stem}.llama-choice.json"
    times: dict[str, float] = json.loads(kept.read_text()) if kept.exists() else {}
    for name, file, repack in variants(home, model):
        if name not in times:
            say(f"  trying {name} at 16 sequences")
            bench = LlamaBatched(name, llama_bin(home), file, threads, repack)
            line = bench.batched(128, 48, 16)
            times[name] = 3 / line["speed_pp"] + 2 / line["speed_tg"]
            kept.write_text(json.dumps(times))
    return min(times, key=lambda name: times[name])


def llama(home: Path, model: Path, threads: int, cells: set[str]) -> list[Engine]:
    tools, found = llama_bin(home), list[Engine]()
    served = {"chat", "shared_prefix"} & cells
    choice = serving_choice(home, model, threads) if served else ""
    for name, file, repack in variants(home, model):
        found.append(LlamaBench(name, tools, file, threads, repack, ("single", "prefill")))
        found.append(LlamaBatched(name, tools, file, threads, repack, ("batch8",)))
        if name == choice:
            command = [str(tools / "llama-server"), "-m", str(file), "--host", "127.0.0.1"]
            command += ["--port", "{port}", "-t", str(threads), "-np", "16", "-c", str(CONTEXT)]
            command += ["--cont-batching", "--cache-ram", "0", "--no-webui"]
            command += [] if repack else ["--no-repack"]
            found.append(Server(name, command, ready_path="/health"))
    return found


def openvino(home: Path, model: Path, threads: int, _: set[str]) -> list[Engine]:
    python = str(venv(home, "ov", OPENVINO))
    worker = [python, str(HERE / "workers" / "openvino_worker.py")]
    worker += [str(exported(home, model)), str(threads)]
    return [Worker("OpenVINO int8", worker, CELLS)]


def vllm(home: Path, model: Path, threads: int, _: set[str]) -> list[Engine]:
    python = venv(home, "vllm", VLLM)
    folder = dequantised(home, model)
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--served-model-name", "default", "--dtype", "bfloat16"]
    command += ["--max-model-len", "2048", "--max-num-seqs", "16"]
    command += ["--host", "127.0.0.1", "--port", "{port}"]
    env = {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "HF_HUB_OFFLINE": "1",
        **preloads(python),
    }
    return [Server("vLLM bf16", command, env=env, ready_path="/health", serves=CELLS)]


MAKERS = {"llama": llama, "openvino": openvino, "vllm": vllm}


def engines(
    home: Path, model: Path, threads: int, wanted: list[str], cells: set[str]
) -> list[Engine]:
    """Octavo and the peers named in `wanted`, those that serve any of `cells`, not yet started."""
    found = octavo(model, threads)
    for peer in wanted:
        try:
            found += MAKERS[peer](home, model, threads, cells)
        except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
            say(f"{peer} left out: {error}")
    return [engine for engine in found if set(engine.serves) & cells]
