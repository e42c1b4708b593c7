"""Law 1 on a real model: a request's tokens and logprobs are the same, bit for bit, alone or in any
batch, chunked or whole, after a cache hit or a miss, after preemption, with one thread or two.

64 mixed requests on the best instruction set; four of them on the others.
"""

from __future__ import annotations

import random
from array import array
from dataclasses import replace

import pytest

from octavo.core.engine import Engine
from octavo.core.request import Event, FinishReason, Request, SamplingParams, StructuredOutputs
from octavo.core.scheduler import Scheduler
from octavo.grammar.compiled import Grammars, GrammarWatcher
from octavo.kernels import isas
from octavo.models.tokenizer import load_tokenizer
from octavo.models.weights import open_checkpoint
from octavo.runtime.cpu import CpuExecutor, CpuOptions

TEXT = """
The lighthouse keeper counted the ships every evening and wrote their names into a ledger that
nobody had asked for. On the ninth of March, 1911, she saw one that carried no light. It came in
against the wind, slowly, as if it were being towed by something under the water; she lit the second
lamp, rang the bell twice, and went down to the quay with a rope and a loaf of bread. What she told
the harbour master the next day filled four pages: 17 barrels of salt, one cello without strings,
a crew of three who spoke no language that she knew, and a dog. def main(args): return sum(args) / 3
""".replace("\n", " ")

NUMBERS = StructuredOutputs(json={"type": "array", "items": {"type": "number"}, "minItems": 9})
SHARED = 96  # tokens that half of the prompts begin with: three whole blocks

Answer = dict[tuple[str, int], tuple[object, ...]]


def _params(i: int, rng: random.Random) -> SamplingParams:
    """Every kind of request in turn."""
    kinds: list[dict[str, object]] = [
        {"temperature": 0, "logprobs": 2},
        {"temperature": 0},
        {"temperature": 0.8, "top_p": 0.9, "logprobs": 0},
        {"temperature": 1.3, "top_k": 40, "min_p": 0.02, "logprobs": 5},
        {"temperature": 1.0, "n": 2, "logprobs": 1},
        {"temperature": 0.7, "repetition_penalty": 1.2, "frequency_penalty": 0.5, "logprobs": 1},
        {"temperature": 0, "prompt_logprobs": 1, "logprobs": 0},
        {"temperature": 1.0, "logit_bias": ((100, 5.0), (200, -5.0)), "presence_penalty": 0.3},
        {"temperature": 0.9, "structured_outputs": NUMBERS, "logprobs": 1},
    ]
    fields = {"max_tokens": rng.randint(3, 7), "ignore_eos": True} | kinds[i % len(kinds)]
    return SamplingParams(**fields)


def _requests(ids: list[int], count: int, grammars: Grammars) -> list[Request]:
    matcher = grammars.compile(NUMBERS)
    rng = random.Random(7)
    found = []
    for i in range(count):
        length = 330 if i % 21 == 20 else rng.randint(1, 60)
        at = rng.randrange(len(ids) - 60)
        own = (ids[at:] + ids * 2)[:length]
        prompt = ids[:SHARED] + own if i % 4 == 0 else own
        params = _params(i, rng)
        watcher = (lambda: GrammarWatcher(matcher())) if params.structured_outputs else None
        given, seed = array("i", prompt), rng.getrandbits(64)
        found.append(Request(f"r{i}", given, params, 0.0, seed, watcher=watcher))
    return found


class Run:
    """An engine turned until all is done. `together`: how many requests are added at once."""

    def __init__(self, executor: CpuExecutor, *, caching: bool = True, **capacity: int) -> None:
        self.scheduler = Scheduler(replace(executor.capacity, **capacity), prefix_caching=caching)
        self.engine = Engine(executor, self.scheduler)

    def answers(self, requests: list[Request], together: int) -> Answer:
        events: list[Event] = []
        for first in range(0, len(requests), together):
            for request in requests[first : first + together]:
                self.engine.add(request)
            while self.engine.has_work:
                self.engine.pump(0.0)
                events += self.engine.drain(0.0)
        return _gather(events)


def _gather(events: list[Event]) -> Answer:
    found: dict[tuple[str, int], list[object]] = {}
    for event in events:
        assert event.error is None
        assert event.finish in (None, FinishReason.LENGTH)
        answer = found.setdefault((event.request_id, event.choice), [(), (), ()])
        answer[0] += event.tokens
        answer[1] += event.logprobs or ()
        answer[2] += event.prompt_logprobs or ()
    return {key: tuple(answer) for key, answer in found.items()}


@pytest.fixture(scope="module")
def checkpoint(smollm2_path):
    return open_checkpoint(smollm2_path)


@pytest.fixture(scope="module")
def requests(checkpoint):
    tokenizer = load_tokenizer(checkpoint)
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    return _requests(tokenizer.encode(TEXT), 64, grammars)


def _executor(checkpoint, threads, **more):
    options = CpuOptions(threads=threads, kv_bytes=512 << 20, max_tokens=512, max_rows=64)
    return CpuExecutor(checkpoint, replace(options, **more))


@pytest.fixture(scope="module")
def two_threads(checkpoint):
    return _executor(checkpoint, 2)


@pytest.fixture(scope="module")
def alone(two_threads, requests):
    """Each request by itself, whole, with nothing cached."""
    return Run(two_threads, caching=False).answers(requests, 1)


def test_the_answers_are_worth_comparing(alone, requests):
    assert len(alone) == sum(r.params.n for r in requests) == 71
    texts = {answer[0] for answer in alone.values()}
    assert len(texts) > 60
    assert any(answer[2] for answer in alone.values())


@pytest.mark.parametrize(("together", "chunk"), [(2, 512), (7, 64), (64, 16), (64, 64), (64, 512)])
def test_any_batch_and_any_chunk(together, chunk, alone, two_threads, requests):
    run = Run(two_threads, caching=False, max_tokens=chunk)
    assert run.answers(requests, together) == alone


def test_cache_hits(alone, two_threads, requests):
    run = Run(two_threads)
    assert run.answers(requests, 64) == alone
    before = run.scheduler.stats.counters.cached_tokens
    again = [replace(r, id=f"again {r.id}") for r in requests]
    answers = run.answers(again, 7)
    assert {(name.removeprefix("again "), i): a for (name, i), a in answers.items()} == alone
    assert run.scheduler.stats.counters.cached_tokens > before + SHARED


@pytest.mark.parametrize("kv_dtype", ["bf16", "int8"])
def test_preemption(kv_dtype, checkpoint, two_threads, requests):
    """Longer outputs, so that the sequences outgrow a small pool."""
    if kv_dtype == "int8":
        two_threads = _executor(checkpoint, 2, kv_dtype=kv_dtype)
    some = [
        replace(r, params=replace(r.params, max_tokens=40))
        for r in requests
        if len(r.prompt) < 60 and r.params.n == 1
    ][:12]
    alone = Run(two_threads, caching=False).answers(some, 1)
    run = Run(two_threads, num_blocks=8, max_tokens=64)
    assert run.answers(some, 12) == alone
    assert run.scheduler.stats.counters.preemptions >= 3


def test_one_thread(alone, checkpoint, requests):
    executor = _executor(checkpoint, 1)
    assert executor.threads == 1
    assert Run(executor).answers(requests, 64) == alone


@pytest.mark.parametrize("isa", [isa for isa in isas() if isa != isas()[0]])
def test_other_instruction_sets(isa, checkpoint, requests):
    some = [requests[i] for i in (0, 3, 5, 6)]
    executor = _executor(checkpoint, 2, isa=isa)
    alone = Run(executor, caching=False).answers(some, 1)
    run = Run(executor, max_tokens=16)
    assert run.answers(some, 4) == alone
    again = [replace(r, id=f"again {r.id}") for r in some]
    assert list(run.answers(again, 2).values()) == list(alone.values())
    assert Run(_executor(checkpoint, 1, isa=isa)).answers(some, 4) == alone


def test_int8_cache(checkpoint, requests, alone):
    """Chunks, neighbours, hits and threads under --kv-dtype int8."""
    some = [requests[i] for i in (0, 2, 3, 4, 5, 6, 8, 20)]
    executor = _executor(checkpoint, 2, kv_dtype="int8")
    expected = Run(executor, caching=False).answers(some, 1)
    assert any(expected[key] != alone[key] for key in expected)
    run = Run(executor, max_tokens=16)
    assert run.answers(some, 8) == expected
    again = [replace(r, id=f"again {r.id}") for r in some]
    assert list(run.answers(again, 8).values()) == list(expected.values())
    assert run.scheduler.stats.counters.cached_tokens > SHARED
    assert Run(_executor(checkpoint, 1, kv_dtype="int8")).answers(some, 8) == expected
