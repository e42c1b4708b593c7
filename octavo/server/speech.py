"""What an answer may hold besides text: the grammar it is held to, and what takes it apart."""

from __future__ import annotations

from dataclasses import dataclass, replace

from octavo.core.request import SamplingParams
from octavo.server.dialect import Dialect, Thoughts, thoughts
from octavo.server.parsing import (
    END_THOUGHT,
    OPEN_THOUGHT,
    PARSERS,
    Parser,
    Plain,
    Thinking,
)
from octavo.server.service import Service
from octavo.server.tools import Toolbox


@dataclass(frozen=True, slots=True)
class Speech:
    """box: the tools that may be called, if any; thoughts: where they stand, if there are any."""

    dialect: Dialect
    box: Toolbox | None
    thoughts: Thoughts | None

    @classmethod
    def of(cls, service: Service, prompt: list[int], box: Toolbox | None) -> Speech | None:
        """None: the answer is plain text."""
        served = service.served
        found = thoughts(served.dialect, served.tokenizer, prompt)
        return None if box is None and found is None else cls(served.dialect, box, found)

    def held(self, params: SamplingParams) -> SamplingParams:
        """The params with the grammar of the whole answer, where there is one."""
        outputs = params.structured_outputs
        if self.box is not None and self.dialect.calls is not None:
            outputs = self.box.outputs(self.dialect.calls, outputs)
        if outputs is not None and self.thoughts is not None:
            if self.thoughts.opened:
                outputs = replace(outputs, after=END_THOUGHT)
            elif self.thoughts.first:
                outputs = replace(outputs, after=END_THOUGHT, first=OPEN_THOUGHT)
        return replace(params, structured_outputs=outputs)

    def parser(self) -> Parser:
        """Takes one choice apart."""
        inner: Parser = Plain()
        if self.box is not None and self.dialect.calls is not None:
            inner = PARSERS[self.dialect.calls](self.box.names)
        if self.thoughts is None:
            return inner
        return Thinking(inner, opened=self.thoughts.opened)
