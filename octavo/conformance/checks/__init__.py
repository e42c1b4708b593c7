"""The behaviours, a module to a subject; importing this package fills the book."""

from octavo.conformance.checks import (
    answers,
    framing,
    lengths,
    lifecycle,
    logprobs,
    refusals,
    rooms,
    sampling,
    structured,
    text,
    tools,
    usage,
)

__all__ = [
    "answers",
    "framing",
    "lengths",
    "lifecycle",
    "logprobs",
    "refusals",
    "rooms",
    "sampling",
    "structured",
    "text",
    "tools",
    "usage",
]
