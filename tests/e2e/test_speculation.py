"""Law 1 for speculation, on a real model: with guesses and without, the same tokens, logprobs and
ends, bit for bit; greedy and sampled, with penalties, stop strings, stop ids and forbidden ones."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping
from dataclasses import replace

import jsonschema
import pytest

from octavo.core.batch import Row
from octavo.core.drafter import Drafter, Offer, PromptLookup
from octavo.core.engine import Engine
from octavo.core.executor import Capacity
from octavo.core.request import (
    Event,
    FinishReason,
    Request,
    SamplingParams,
    Sequence,
    StructuredOutputs,
)
from octavo.core.scheduler import Scheduler
from octavo.door import Door
from octavo.grammar.compiled import Grammars
from octavo.models.tokenizer import load_tokenizer
from octavo.models.weights import open_checkpoint
from octavo.runtime.cpu import CpuExecutor, CpuOptions

TEXT = """The lighthouse keeper counted the ships every evening and wrote their names into a ledger.
"""
CODE = """def area(width, height):
    return width * height

def volume(width, height, depth):
    return width * height * depth
"""
SCHEMA = {
    "type": "array",
    "minItems": 3,
    "maxItems": 3,
    "items": {
        "type": "object",
        "properties": {"ship": {"type": "string", "maxLength": 12}, "masts": {"enum": [1, 2, 3]}},
        "required": ["ship", "masts"],
        "additionalProperties": False,
    },
}
SHIPS = StructuredOutputs(json=SCHEMA)
FACTS = (
    'Ships as JSON: [{"ship": "Mary", "masts": 2}, {"ship": "Anne", "masts": 3}]\nThe same again: '
)
KINDS: list[tuple[str, dict[str, object]]] = [
    (TEXT * 3, {"temperature": 0, "logprobs": 2}),
    (CODE * 2, {"temperature": 0, "logprobs": 0}),
    (CODE * 2, {"temperature": 0.7, "top_p": 0.9, "logprobs": 5}),
    (TEXT * 3, {"temperature": 1.0, "n": 2, "logprobs": 1}),
    (TEXT * 3, {"temperature": 0.6, "top_k": 40, "min_p": 0.02, "typical_p": 0.95}),
    (CODE * 2, {"temperature": 0, "repetition_penalty": 1.02, "logprobs": 1}),
    (CODE * 2, {"temperature": 0.5, "frequency_penalty": 0.1, "presence_penalty": 0.2}),
    (CODE * 2, {"temperature": 0, "stop": ("height * depth",), "logprobs": 0}),
    (CODE * 2, {"temperature": 0, "stop": ("* depth\n",), "min_tokens": 20}),
    (TEXT * 3, {"temperature": 0, "prompt_logprobs": 1, "logit_bias": ((30, 1.0),)}),
    (TEXT * 3, {"temperature": 0, "banned_token_ids": (28, 30), "logprobs": 1}),
    (FACTS, {"temperature": 0, "logprobs": 1, "structured_outputs": SHIPS, "max_tokens": 120}),
    (FACTS, {"temperature": 1.0, "n": 2, "structured_outputs": SHIPS, "max_tokens": 120}),
    (FACTS, {"structured_outputs": StructuredOutputs(json_object=True), "stop": ("}",)}),
    (CODE * 2, {"structured_outputs": StructuredOutputs(regex=r"(def \w+\(\w+\)\n)+"), "top_k": 9}),
]

Answer = dict[tuple[str, int], tuple[object, ...]]


class Bold(PromptLookup):
    """Offers all that it finds, whatever it costs: what is tested must not depend on the clock."""

    def drafts(self, rows: list[Row], live: Mapping[int, Sequence], room: int) -> list[Offer]:
        return [(i, self.lookup(live[row.seq_id], 7)[1]) for i, row in enumerate(rows)]


@pytest.fixture(scope="module")
def executor(smollm2_path):
    return CpuExecutor(open_checkpoint(smollm2_path), CpuOptions(kv_bytes=256 << 20, max_rows=16))


@pytest.fixture(scope="module")
def requests(smollm2_path, executor) -> list[Request]:
    tokenizer = load_tokenizer(open_checkpoint(smollm2_path))
    size = tokenizer.vocab_size
    door = Door(tokenizer, executor.capacity, size, "", grammars=Grammars(tokenizer, size))
    found = []
    for i, (text, fields) in enumerate(KINDS):
        params = SamplingParams(**{"max_tokens": 36, "seed": 50 + i} | fields)
        found.append(door.request(f"r{i}", tokenizer.encode(text), params, arrival=0.0))
    # A stop that comes for sure, whatever the last bits of the model's arithmetic make it write.
    written = Run(executor, None).answers(found[:1], 1)["r0", 0][0]
    found.append(replace(found[0], id="stop id", stop_ids=frozenset(written[12:13])))
    found.append(replace(found[2], id="hot", params=replace(found[2].params, temperature=3.0)))
    return found


class Run:
    """An engine turned until all is done, `together` requests at once."""

    def __init__(self, executor: CpuExecutor, drafter: Drafter | None, **capacity: int) -> None:
        limits: Capacity = replace(executor.capacity, **capacity)
        self.scheduler = Scheduler(limits, drafter=drafter)
        self.engine = Engine(executor, self.scheduler)

    def answers(self, requests: list[Request], together: int) -> Answer:
        events: list[Event] = []
        for first in range(0, len(requests), together):
            for request in requests[first : first + together]:
                self.engine.add(request)
            while self.engine.has_work:
                self.engine.pump(0.0)
                events += self.engine.drain(0.0)
                self.scheduler.check()
        return gather(events)


def gather(events: list[Event]) -> Answer:
    found: dict[tuple[str, int], list[object]] = {}
    for event in events:
        assert event.error is None
        answer = found.setdefault((event.request_id, event.choice), [(), (), (), None])
        answer[0] += event.tokens
        answer[1] += event.logprobs or ()
        answer[2] += event.prompt_logprobs or ()
        answer[3] = event.finish
    return {key: tuple(answer) for key, answer in found.items()}


@pytest.fixture(scope="module")
def plain(executor, requests) -> Answer:
    answers = Run(executor, None).answers(requests, 16)
    assert {answer[3] for answer in answers.values()} == {FinishReason.STOP, FinishReason.LENGTH}
    return answers


def test_what_a_schema_asks_for_is_written_and_guessed_too(
    executor, requests, plain, smollm2_path
) -> None:
    tokenizer = load_tokenizer(open_checkpoint(smollm2_path))
    asked = [r for r in requests if r.params.structured_outputs is SHIPS]
    keys = [(r.id, choice) for r in asked for choice in range(r.params.n)]
    for key in keys:
        jsonschema.validate(json.loads(tokenizer.decode(plain[key][0])), SCHEMA)
        assert plain[key][3] is FinishReason.STOP
    run = Run(executor, Bold())
    answers = run.answers(asked, 1)
    assert answers == {key: plain[key] for key in keys}
    counters = run.scheduler.stats.counters
    assert counters.accepted_tokens > 0.3 * counters.output_tokens


def test_what_a_grammar_forces_is_guessed(executor, requests, plain) -> None:
    class Forced(Bold):
        def drafts(self, rows: list[Row], live: Mapping[int, Sequence], room: int) -> list[Offer]:
            watchers = [live[row.seq_id].watcher for row in rows]
            return [(i, array("i", w.forced())) for i, w in enumerate(watchers) if w is not None]

    asked = [r for r in requests if r.params.structured_outputs is SHIPS]
    run = Run(executor, Forced())
    answers = run.answers(asked, 2)
    assert answers == {key: plain[key] for key in answers}
    counters = run.scheduler.stats.counters
    assert counters.accepted_tokens > 0.3 * counters.output_tokens
    assert counters.accepted_tokens > 0.8 * counters.drafted_tokens


@pytest.mark.parametrize("together", [1, 16])
def test_guesses_change_nothing(together, executor, requests, plain) -> None:
    run = Run(executor, Bold())
    assert run.answers(requests, together) == plain
    counters = run.scheduler.stats.counters
    assert counters.accepted_tokens > 0.3 * counters.output_tokens
    assert counters.drafted_tokens > counters.accepted_tokens + 100


def test_nor_do_they_when_blocks_are_few_and_sequences_give_way(executor, requests, plain) -> None:
    run = Run(executor, Bold(), num_blocks=14, max_tokens=40)
    some = [request for request in requests if request.params.n == 1]
    ids = {request.id for request in some}
    assert run.answers(some, 16) == {key: plain[key] for key in plain if key[0] in ids}
    assert run.scheduler.stats.counters.preemptions > 0
    assert run.scheduler.stats.counters.accepted_tokens > 30


def test_nor_when_prompts_come_from_the_prefix_cache(executor, requests, plain) -> None:
    run = Run(executor, Bold())
    assert run.answers(requests, 16) == plain
    assert run.answers([replace(r, arrival=1.0) for r in requests], 5) == plain
    assert run.scheduler.stats.counters.cached_tokens > 500


def test_nor_when_prompts_are_read_in_small_chunks(executor, requests, plain) -> None:
    run = Run(executor, Bold(), max_tokens=23, max_rows=5)
    assert run.answers(requests, 16) == plain
    assert run.scheduler.stats.counters.accepted_tokens > 100


@pytest.mark.parametrize("most", [1, 2, 3, 4, 5, 7])
def test_a_limit_inside_a_draft_cuts_where_it_would_have(most, executor, requests, plain) -> None:
    some = [
        replace(r, params=replace(r.params, max_tokens=most, min_tokens=0))
        for r in requests
        if not r.params.min_tokens
    ]
    run = Run(executor, Bold())
    for key, answer in run.answers(some, 16).items():
        assert answer[0] == plain[key][0][:most]
        assert answer[1] == plain[key][1][:most]
    assert run.scheduler.stats.counters.output_tokens == sum(
        min(most, len(plain[key][0])) for key in plain if key[0] in {r.id for r in some}
    )


def test_a_prediction_saves_steps_right_or_wrong_it_changes_nothing(
    executor, requests, plain
) -> None:
    right = [replace(r, prediction=array("i", plain[r.id, 0][0])) for r in requests]
    wrong = [replace(r, prediction=array("i", plain["r0", 0][0])) for r in requests]
    run = Run(executor, Bold())
    assert run.answers(right, 1) == plain
    counters = run.scheduler.stats.counters
    assert counters.accepted_tokens > 0.6 * counters.output_tokens
    assert Run(executor, Bold()).answers(wrong, 16) == plain


def test_nor_does_the_drafter_that_minds_the_cost(executor, requests, plain) -> None:
    run = Run(executor, PromptLookup())
    assert run.answers(requests, 2) == plain


def test_a_guess_that_the_model_cannot_follow_harms_nothing(executor, requests, plain) -> None:
    """Ids beyond the vocabulary would fail the step; any id of it may be offered."""

    class Blind(Bold):
        def drafts(self, rows: list[Row], live: Mapping[int, Sequence], room: int) -> list[Offer]:
            return [(i, array("i", [0, 49151, 17])) for i in range(len(rows))]

    some = requests[:3]
    answers = Run(executor, Blind()).answers(some, 3)
    assert answers == {key: plain[key] for key in answers}
