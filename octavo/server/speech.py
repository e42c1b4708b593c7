"""What an answer may hold besides text: the grammar it is held to, and what takes it apart."""

from __future__ import annotations

from dataclasses import dataclass, replace

from octavo.core.request import SamplingParams, StructuredOutputs
from octavo.server.dialect import Dialect, Thoughts, thoughts
from octavo.server.parsing import (
    END_THOUGHT,
    FORMS,
    OPEN_THOUGHT,
    Parser,
    Plain,
    Thinking,
    WholeCalls,
)
from octavo.server.service import Service
from octavo.server.tools import Toolbox


@dataclass(frozen=True, slots=True)
class Speech:
    """box: the tools that may be called, if any; thoughts: where they stand, if there are any;
    outputs: what the rest of the answer is held to, if to anything."""

    dialect: Dialect
    box: Toolbox | None
    thoughts: Thoughts | None
    outputs: StructuredOutputs | None = None

    @classmethod
    def of(
        cls, service: Service, prompt: list[int], box: Toolbox | None, params: SamplingParams
    ) -> Speech | None:
        """None: the answer is plain text."""
        dialect, tokenizer = service.served.dialect, service.served.tokenizer
        found = thoughts(dialect, tokenizer, prompt)
        if box is None and found is None:
            return None
        outputs = params.structured_outputs
        if box is not None and dialect.calls is not None:
            outputs = box.outputs(dialect.calls, outputs)
        return cls(dialect, box, found, outputs)

    @property
    def tagged(self) -> bool:
        """Whether calls begin with a control token, which text must show then."""
        return self.box is not None and self.dialect.calls == "mistral"

    def held(self, params: SamplingParams) -> SamplingParams:
        """The params with the grammar of the whole answer, where there is one."""
        outputs = self.outputs
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
            form = FORMS[self.dialect.calls]
            inner = form.parser(self.box.names)
            if self.outputs is None:  # else calls have their tags, and what has none is no call
                inner = WholeCalls(inner, self.box.names, form.bare, form.id)
        if self.thoughts is None:
            return inner
        return Thinking(inner, opened=self.thoughts.opened)
