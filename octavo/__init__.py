"""Octavo runs and serves language models.

    from octavo import LLM, SamplingParams

    llm = LLM("smollm2-135m")
    print(llm.chat([{"role": "user", "content": "Name three fruits."}]).text)

Importing this package costs nothing: each name is loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.core.request import Request, SamplingParams, StructuredOutputs
    from octavo.llm import LLM, Completion

__all__ = ["LLM", "Completion", "Request", "SamplingParams", "StructuredOutputs", "__version__"]

_HOMES = {
    "LLM": "octavo.llm",
    "Completion": "octavo.llm",
    "Request": "octavo.core.request",
    "SamplingParams": "octavo.core.request",
    "StructuredOutputs": "octavo.core.request",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("octavo")
        except PackageNotFoundError:  # run from a source tree
            return "0+unknown"
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'octavo' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
