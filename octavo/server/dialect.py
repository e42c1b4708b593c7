"""How a model writes calls and thoughts: read off its chat template, which shows it the form."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.errors import Unsupported
from octavo.server.parsing import CALL_LIST, END_THOUGHT, OPEN_CALL, OPEN_THOUGHT
from octavo.text import Tokenizer

SWITCHES = ("enable_thinking", "thinking")
TAIL = 16  # tokens of a prompt's end in which a tag is sought


@dataclass(frozen=True, slots=True)
class Dialect:
    """calls: "hermes", "llama", "mistral", or None where the template has no tools, or a form that
    is not read here. thinks: whether there are thoughts at all. switch: the template's variable
    that turns them on and off, if it has one. efforts: whether it reads `reasoning_effort`."""

    calls: str | None = None
    thinks: bool = False
    switch: str | None = None
    efforts: bool = False

    @classmethod
    def of(cls, templates: Mapping[str, str]) -> Dialect:
        source = "\n".join(templates.values())
        return cls(
            _calls(source) if "tools" in source else None,
            OPEN_THOUGHT in source or END_THOUGHT in source,
            next((name for name in SWITCHES if re.search(rf"{{%[^%]*\b{name}\b", source)), None),
            "reasoning_effort" in source,
        )

    def settings(self, effort: str | None) -> dict[str, Any]:
        """What a template is told of `reasoning_effort`. Raises `Unsupported`."""
        if effort is None or (effort == "none" and not self.thinks):
            return {}
        if self.efforts:
            return {"reasoning_effort": effort}
        if self.switch is None:
            what = f"reasoning_effort {effort!r}: this model's chat template has no such setting"
            raise Unsupported(what, "reasoning_effort")
        return {self.switch: effort != "none"}


PLAIN = Dialect()


def _calls(source: str) -> str | None:
    """The form of calls that a template shows or writes."""
    plain = source.replace("\\n", "\n").replace("\\", "")
    if OPEN_CALL in plain:  # others write no JSON between the tags
        return "hermes" if re.search(r'\{"name":', plain) else None
    if CALL_LIST in plain:
        return "mistral" if re.search(re.escape(CALL_LIST) + r"\s*\[", plain) else None
    return "llama" if '"parameters"' in plain else None


@dataclass(frozen=True, slots=True)
class Thoughts:
    """Where thoughts stand in one answer. opened: the prompt ends inside one; first: one is to be
    written before anything else."""

    opened: bool = False
    first: bool = False


def thoughts(dialect: Dialect, tokenizer: Tokenizer, prompt: Sequence[int]) -> Thoughts | None:
    """None: there are none."""
    if not dialect.thinks:
        return None
    end = tokenizer.decode(prompt[-TAIL:], False).rstrip()
    if end.endswith(OPEN_THOUGHT):
        return Thoughts(opened=True)
    # A template that can turn them off writes an empty one into the prompt then.
    return Thoughts(first=dialect.switch == SWITCHES[0] and not end.endswith(END_THOUGHT))
