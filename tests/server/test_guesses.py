"""Speculation as a client sees it: asked for, refused, counted; never another answer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from octavo.core.batch import Row
from octavo.core.drafter import Offer, PromptLookup
from octavo.core.request import Sequence
from tests.server.house import House, chat, completion, events, inside

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SAME = {"logit_bias": {"97": 100}}  # the fake model then writes "aaaa..."


class Bold(PromptLookup):
    """Offers all that it finds, whatever it costs: the fake model takes no time."""

    def drafts(self, rows: list[Row], live: Mapping[int, Sequence], room: int) -> list[Offer]:
        return [(i, self.lookup(live[row.seq_id], 7)[1]) for i, row in enumerate(rows)]


def ask(house: House, path: str, *bodies: dict[str, Any]) -> list[Any]:
    async def run() -> list[Any]:
        async with inside(house) as client:
            answers = [await client.post(path, json=body) for body in bodies]
            return [*answers, await client.get("/metrics")]

    return asyncio.run(run())


def details(answer: Any) -> tuple[int, int]:
    found = answer.json()["usage"]["completion_tokens_details"]
    return found["accepted_prediction_tokens"], found["rejected_prediction_tokens"]


def test_guesses_are_counted_per_request_and_in_metrics_and_change_no_answer() -> None:
    body = chat(max_tokens=40, **SAME)
    plain, _ = ask(House(), CHAT, body)
    guessed, unguessed, page = ask(
        House(drafter=Bold()), CHAT, body, chat(max_tokens=40, speculation=False, **SAME)
    )
    assert guessed.json()["choices"] == unguessed.json()["choices"] == plain.json()["choices"]
    assert guessed.json()["usage"]["completion_tokens"] == 40
    assert details(plain) == details(unguessed) == (0, 0)
    accepted, rejected = details(guessed)
    assert accepted > 25
    values = dict(
        line.rsplit(" ", 1) for line in page.text.splitlines() if line.startswith("octavo_spec")
    )
    prefix = "octavo_spec_decode_"
    assert float(values[f"{prefix}accepted_tokens_total"]) == accepted
    assert float(values[f"{prefix}draft_tokens_total"]) == accepted + rejected
    assert 3 < float(values[f"{prefix}drafts_total"]) < 20
    places = [
        float(values[f'{prefix}accepted_tokens_per_pos_total{{position="{i}"}}']) for i in range(7)
    ]
    assert sum(places) == accepted


def test_a_stream_counts_the_same_and_so_do_completions() -> None:
    house = House(drafter=Bold())
    whole, stream, _ = ask(
        house,
        CHAT,
        chat(**SAME),
        chat(stream=True, stream_options={"include_usage": True}, **SAME),
    )
    usage = events(stream.text)[-2]["usage"]
    assert usage["completion_tokens_details"] == whole.json()["usage"]["completion_tokens_details"]
    (done, _) = ask(House(drafter=Bold()), COMPLETIONS, completion(["one", "two"], n=2, **SAME))
    assert details(done)[0] > 100


def test_a_prediction_is_guessed_from() -> None:
    wrote, _ = ask(House(), CHAT, chat("write", temperature=0.9, seed=5, max_tokens=60))
    text = wrote.json()["choices"][0]["message"]["content"]
    plain = chat("write", temperature=0.9, seed=5, max_tokens=60)
    parts = [{"type": "text", "text": text[:9]}, {"type": "text", "text": text[9:]}]
    for content in (text, parts):
        body = plain | {"prediction": {"type": "content", "content": content}}
        guessed, _ = ask(House(drafter=Bold()), CHAT, body)
        assert guessed.json()["choices"] == wrote.json()["choices"]
        assert details(guessed)[0] > 5
    unguessed, _ = ask(House(drafter=Bold()), CHAT, plain)
    assert details(unguessed)[0] < 5


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prediction": "text"}, "prediction"),
        ({"prediction": {"type": "other", "content": "x"}}, "prediction.type"),
        ({"prediction": {"type": "content"}}, "prediction.content"),
        ({"prediction": {"type": "content", "content": [{"type": "image"}]}}, "prediction.content"),
        ({"prediction": {"type": "content", "content": "x"}, "speculation": False}, "prediction"),
        ({"prediction": {"type": "content", "content": "x" * 3000}}, "prediction"),
        ({"speculation": "yes"}, "speculation"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    answer, _ = ask(House(drafter=Bold()), CHAT, chat(**fields))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(param)


def test_a_server_that_does_not_guess_says_so() -> None:
    predicted = {"prediction": {"type": "content", "content": "x"}}
    for fields in (predicted, {"speculation": True}):
        answer, _ = ask(House(), CHAT, chat(**fields))
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] in fields
        assert "--speculation auto" in answer.json()["error"]["message"]
    allowed, _ = ask(House(), COMPLETIONS, completion(speculation=False))
    assert allowed.status_code == 200
    refused, _ = ask(House(drafter=Bold()), COMPLETIONS, completion(**predicted))
    assert refused.json()["error"]["param"] == "prediction"
