"""Every exception that Octavo raises on purpose, as one tree.

OctavoError
├── InvalidRequest        a request that cannot be served as asked: names the parameter
│   ├── ContextOverflow   prompt + max_tokens exceed what the model or the KV pool can ever hold
│   ├── UnknownModel      a model name that is not served here
│   ├── NotFound          a stored thing that is not here
│   ├── TooTight          deadlines that this machine could not meet if it were idle
│   └── Unsupported       a field or value that is known and refused
├── Overloaded            the door is closed for now: carries seconds to wait
│   ├── TenantLimit       closed to this tenant: it has its share
│   └── Unattainable      the deadlines asked for cannot be met: carries the prediction
├── ModelError            weights, config, tokenizer or template cannot be used
│   ├── BadFile           a file is malformed or hostile: names the file and the place
│   ├── UnsupportedModel  architecture or tensor type that we do not run: names it
│   └── FetchError        a model could not be fetched: says what to do by hand
├── TimedOut              a request took longer than it may
└── EngineError           the executor failed; the engine cannot go on
"""

from __future__ import annotations

import re

# The packages of our optional parts, as pyproject.toml has them: by name they can be installed
# however Octavo was.
EXTRAS = {
    "plot": ("matplotlib",),
    "otel": ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"),
    "torch": ("torch",),
}


def install(extra: str) -> str:
    """A command that fetches what an optional part needs."""
    return f"pip install {' '.join(EXTRAS[extra])}"


class OctavoError(Exception):
    """Root of the tree."""


def in_words(error: Exception) -> str:
    """What was wrong with a file, for a message that names it already: of what the system said no
    number and no path."""
    said = error.strerror if isinstance(error, OSError) else None
    return said or str(error)


class InvalidRequest(OctavoError, ValueError):
    """A request that cannot be served as asked. `param` names the field, `code` is for machines."""

    code = "invalid_value"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param

    def rename(self, param: str | None) -> None:
        """Speak of the field by the name under which the caller knows it."""
        was, said = self.param, str(self)
        if was and param and re.match(re.escape(was) + r"\b", said):
            self.args = (param + said[len(was) :],)
        self.param = param


class ContextOverflow(InvalidRequest):
    """More tokens than the model's context or the KV pool can ever hold."""

    code = "context_length_exceeded"


class Unsupported(InvalidRequest):
    """A field or value that is known, and refused rather than ignored."""

    code = "unsupported_parameter"


class UnknownModel(InvalidRequest):
    """A model name that is not served here."""

    code = "model_not_found"


class NotFound(InvalidRequest):
    """A stored response, file or the like that is not here, or not the caller's."""

    code = "not_found"


class TooTight(InvalidRequest):
    """Deadlines that could not be met even by an idle server: coming back later does not help.
    Predictions are in seconds, for this request alone."""

    code = "slo_unattainable"

    def __init__(
        self, message: str, *, ttft: float | None = None, tpot: float | None = None
    ) -> None:
        super().__init__(message, "slo")
        self.ttft = ttft
        self.tpot = tpot


class Overloaded(OctavoError):
    """The queue is full; try again in `retry_after` seconds."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class TenantLimit(Overloaded):
    """This tenant has as much as it may; others are still let in. kind: requests or tokens."""

    def __init__(self, message: str, retry_after: float, kind: str = "tokens") -> None:
        super().__init__(message, retry_after)
        self.kind = kind


class TimedOut(OctavoError):
    """A request took longer than it may; what it has written until then was sent if it streams."""

    code = "request_timeout"


class Unattainable(Overloaded):
    """The deadlines asked for cannot be met now. Predictions are in seconds, None where none was
    made; queue_seconds: prefill that is before it, None where nobody looked. own: whether the
    tenant's own share is why. kept: whether a place is kept for it when it comes back as told."""

    code = "slo_unattainable"

    def __init__(
        self,
        message: str,
        retry_after: float,
        *,
        ttft: float | None = None,
        tpot: float | None = None,
        queue_seconds: float | None = None,
        own: bool = False,
    ) -> None:
        super().__init__(message, retry_after)
        self.ttft = ttft
        self.tpot = tpot
        self.queue_seconds = queue_seconds
        self.own = own
        self.kept = False


class ModelError(OctavoError):
    """Weights, configuration, tokenizer or template cannot be used."""


class BadFile(ModelError):
    """A file is malformed, truncated or hostile."""


class UnsupportedModel(ModelError):
    """An architecture, tensor type or tokenizer that this version does not run."""


class FetchError(ModelError):
    """A model could not be fetched; the message says what to do by hand."""


class EngineError(OctavoError):
    """The executor failed outside any one request; the engine cannot go on."""
