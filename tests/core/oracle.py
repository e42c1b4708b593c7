"""What each request must give: one request, one token at a time, no blocks, no batches."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.core.batch import SampleSpec
from octavo.core.request import FinishReason, Request, TokenLogprob
from tests.core.audit import choose, prefix_hash, score


@dataclass
class Outcome:
    """What one choice gave, in the end."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish: FinishReason | None = None


def expected(request: Request, choice: int, max_len: int, fault: int | None) -> Outcome:
    """The outcome of one choice; max_len tokens in all end it, a row past `fault` fails it."""
    params, out = request.params, Outcome()
    watcher = request.watcher() if request.watcher is not None else None
    tokens = list(request.prompt)
    penalised = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    while out.finish is None:
        suppress = tuple(request.stop_ids) if len(out.tokens) < params.min_tokens else ()
        history = request.prompt if penalised != (1.0, 0.0, 0.0) else None
        spec = SampleSpec(params, request.seed, choice, history, len(request.prompt), suppress)
        try:
            mask = watcher.mask(len(out.tokens)) if watcher else None
            if fault is not None and len(tokens) > fault:
                raise RuntimeError("planted")
            prefix = prefix_hash(request.namespace, tokens)
            token = choose(prefix, spec, len(tokens), mask)
            kept, finish = 1, None
            if token in request.stop_ids and not suppress:
                finish = FinishReason.STOP
            elif watcher:
                kept, finish = watcher.advance((token,))
        except RuntimeError:
            out.finish = FinishReason.ERROR
            break
        if params.prompt_logprobs is not None and choice == 0 and out.prompt_logprobs is None:
            out.prompt_logprobs = _prompt_scores(request, params.prompt_logprobs)
        if kept:
            tokens.append(token)
            out.tokens.append(token)
            if params.logprobs is not None:
                out.logprobs.append(score(prefix, token, params.logprobs))
            limit = max_len
            if params.max_tokens is not None:
                limit = min(limit, len(request.prompt) + params.max_tokens)
            if finish is None and len(tokens) >= limit:
                finish = FinishReason.LENGTH
        out.finish = finish
    return out


def _prompt_scores(request: Request, top: int) -> tuple[TokenLogprob | None, ...]:
    prompt = list(request.prompt)
    return (
        None,
        *(
            score(prefix_hash(request.namespace, prompt[:i]), prompt[i], top)
            for i in range(1, len(prompt))
        ),
    )
