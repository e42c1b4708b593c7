"""What a client sees on the wire: framing, usage, stops, choices, logprobs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from octavo.core.request import SamplingParams
from tests.server.fakes import (
    BOOM,
    BOS,
    END,
    ROLE,
    FakeExecutor,
    FakeTokenizer,
    expected,
    expected_text,
    fake_template,
    shown_text,
)
from tests.server.house import House, chat, completion, events, inside

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def ask(path: str, body: dict[str, Any], house: House | None = None) -> httpx.Response:
    async def main() -> httpx.Response:
        async with inside(house or House()) as client:
            return await client.post(path, json=body)

    return asyncio.run(main())


def oracle(text: str, *, stops: tuple[str, ...] = (), **params: Any) -> tuple[str, str, int]:
    prompt = fake_template([{"role": "user", "content": text}])
    params = {"temperature": 0, "max_tokens": 40} | params
    return expected_text(expected(prompt, SamplingParams(**params)), stops)


def content(chunks: list[Any], index: int = 0) -> str:
    return "".join(
        choice["delta"].get("content", "")
        for chunk in chunks
        if chunk != "[DONE]"
        for choice in chunk["choices"]
        if choice["index"] == index
    )


def test_chunks_share_id_and_created_and_end_with_done() -> None:
    chunks = events(ask(CHAT, chat(stream=True)).text)
    assert chunks[-1] == "[DONE]"
    assert chunks.count("[DONE]") == 1
    body = chunks[:-1]
    assert len({(c["id"], c["created"], c["object"]) for c in body}) == 1
    assert body[0]["object"] == "chat.completion.chunk"
    assert body[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert not any("role" in c["choices"][0]["delta"] for c in body[1:])
    reasons = [c["choices"][0]["finish_reason"] for c in body]
    assert reasons[:-1] == [None] * (len(body) - 1)
    assert reasons[-1] in ("stop", "length")
    assert not any("usage" in c for c in body)


def test_no_chunk_is_empty_but_the_first_and_the_last() -> None:
    for stop in (None, ["zzzzzzzz"]):
        body = events(ask(CHAT, chat(stream=True, stop=stop)).text)[:-1]
        assert all(c["choices"][0]["delta"]["content"] for c in body[1:-1])


def test_include_usage_gives_one_more_chunk() -> None:
    whole = ask(CHAT, chat()).json()
    chunks = events(ask(CHAT, chat(stream=True, stream_options={"include_usage": True})).text)
    *body, last, done = chunks
    assert done == "[DONE]"
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert all(c["usage"] is None for c in body)


@pytest.mark.parametrize("text", ["hello", "a", "b", "c", "zebra", "é", "long " * 100])
def test_text_is_what_the_model_wrote(text: str) -> None:
    want, finish, used = oracle(text)
    whole = ask(CHAT, chat(text)).json()
    assert whole["choices"][0]["message"]["content"] == want
    assert whole["choices"][0]["finish_reason"] == finish
    assert whole["usage"]["completion_tokens"] == used
    streamed = events(ask(CHAT, chat(text, stream=True)).text)
    assert content(streamed) == want
    pieces = [c["choices"][0]["delta"].get("content", "") for c in streamed[:-1]]
    assert not any("�" in piece for piece in pieces[:-2])


@pytest.mark.parametrize("text", [f"prompt {i}" for i in range(12)])
@pytest.mark.parametrize("stops", [("t",), ("STOP",), ("the cat", "sa"), ("é", "🙂x", "ing")])
def test_stop_strings_end_the_text_and_never_show(text: str, stops: tuple[str, ...]) -> None:
    house = House()
    want, finish, used = oracle(text, stops=stops)

    async def main() -> None:
        async with inside(house) as client:
            body = chat(text, stop=list(stops))
            whole = (await client.post(CHAT, json=body)).json()
            assert whole["choices"][0]["message"]["content"] == want
            assert whole["choices"][0]["finish_reason"] == finish
            assert whole["usage"]["completion_tokens"] == used
            streamed = await client.post(CHAT, json=body | {"stream": True})
            assert content(events(streamed.text)) == want

    asyncio.run(main())
    assert house.idle()


def test_stop_as_one_string_and_the_engine_stops_too() -> None:
    house = House()
    want, _, used = oracle("hello", stops=("t",), max_tokens=400, ignore_eos=True)
    got = ask(CHAT, chat(stop="t", max_tokens=400, ignore_eos=True), house).json()
    assert got["choices"][0]["message"]["content"] == want
    assert house.executor.steps <= used + 2


def test_a_stop_token_of_the_caller_is_not_shown() -> None:
    prompt = fake_template([{"role": "user", "content": "hello"}])
    tokens = expected(prompt, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    token = next(t for t in tokens if t < 128 and tokens.index(t) > 3)
    got = ask(CHAT, chat(stop_token_ids=[token], ignore_eos=True)).json()["choices"][0]
    assert got["finish_reason"] == "stop"
    assert got["message"]["content"] == shown_text(tokens[: tokens.index(token)])


def test_min_tokens_puts_off_every_stop() -> None:
    for field in ({"stop": ["e"]}, {}):
        got = ask(CHAT, chat(min_tokens=30, **field)).json()
        assert got["usage"]["completion_tokens"] >= 30


def test_n_choices_have_their_own_text_and_sum_their_tokens() -> None:
    prompt = fake_template([{"role": "user", "content": "hello"}])
    params = SamplingParams(max_tokens=20, temperature=1.0)
    texts = [expected_text(expected(prompt, params, seed=5, choice=i)) for i in range(3)]
    body = chat(n=3, seed=5, temperature=1, max_tokens=20)
    whole = ask(CHAT, body).json()
    assert [c["index"] for c in whole["choices"]] == [0, 1, 2]
    assert [c["message"]["content"] for c in whole["choices"]] == [t[0] for t in texts]
    assert [c["finish_reason"] for c in whole["choices"]] == [t[1] for t in texts]
    assert whole["usage"]["completion_tokens"] == sum(t[2] for t in texts)
    chunks = events(ask(CHAT, body | {"stream": True}).text)
    assert [content(chunks, i) for i in range(3)] == [t[0] for t in texts]
    for index in range(3):
        own = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == index]
        assert own[0]["delta"].get("role") == "assistant"
        assert [c["finish_reason"] for c in own[:-1]] == [None] * (len(own) - 1)
        assert own[-1]["finish_reason"] == texts[index][1]


def test_a_seed_repeats_and_no_seed_does_not() -> None:
    texts = [
        ask(CHAT, chat(temperature=1, seed=seed)).json()["choices"][0]["message"]["content"]
        for seed in (7, 7, None, None)
    ]
    assert texts[0] == texts[1]
    assert len(set(texts)) == 3


def test_chat_logprobs_lie_beside_their_tokens() -> None:
    body = chat(logprobs=True, top_logprobs=3)
    whole = ask(CHAT, body).json()
    choice = whole["choices"][0]
    items = choice["logprobs"]["content"]
    assert choice["logprobs"]["refusal"] is None
    assert len(items) == whole["usage"]["completion_tokens"]
    joined = b"".join(bytes(item["bytes"]) for item in items)
    text = shown_text([*joined.removesuffix(b"</s>")])
    assert text == choice["message"]["content"]
    assert all(len(item["top_logprobs"]) == 3 for item in items)
    chunks = events(ask(CHAT, body | {"stream": True}).text)[:-1]
    logged = [c["choices"][0]["logprobs"] for c in chunks]
    assert [item for part in logged if part for item in part["content"]] == items


def test_logprobs_without_alternatives() -> None:
    items = ask(CHAT, chat(logprobs=True)).json()["choices"][0]["logprobs"]["content"]
    assert all(item["top_logprobs"] == [] for item in items)
    assert ask(CHAT, chat()).json()["choices"][0]["logprobs"] is None


def test_completions_default_to_sixteen_tokens_and_take_four_kinds_of_prompt() -> None:
    ids = FakeTokenizer().encode("hello")
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    want = expected_text(expected(ids, params))[0]
    for prompt, count in (("hello", 1), (ids, 1), (["hello", "hello"], 2), ([ids] * 3, 3)):
        body = completion(prompt, ignore_eos=True)
        del body["max_tokens"]
        got = ask(COMPLETIONS, body).json()
        assert got["object"] == "text_completion"
        assert [c["text"] for c in got["choices"]] == [want] * count
        assert [c["index"] for c in got["choices"]] == list(range(count))
        assert got["usage"]["completion_tokens"] == 16 * count
        assert got["usage"]["prompt_tokens"] == len(ids) * count


def test_completions_stream_joins_to_the_plain_answer() -> None:
    body = completion(["one", "two"], n=2, temperature=1, seed=3)
    whole = ask(COMPLETIONS, body).json()
    chunks = events(ask(COMPLETIONS, body | {"stream": True}).text)
    texts = ["", "", "", ""]
    for chunk in chunks[:-1]:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [c["text"] for c in whole["choices"]]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs_scores_the_prompt(stream: bool) -> None:
    body = completion("hello", echo=True, logprobs=2, max_tokens=5, ignore_eos=True)
    answer = ask(COMPLETIONS, body | {"stream": stream})
    if stream:
        parts = [c["choices"][0] for c in events(answer.text)[:-1]]
        text = "".join(part["text"] for part in parts)
        fields = [part["logprobs"] for part in parts if part["logprobs"]]
        logprobs = {key: [x for f in fields for x in f[key]] for key in fields[0]}
    else:
        choice = answer.json()["choices"][0]
        text, logprobs = choice["text"], choice["logprobs"]
    ids = [BOS, *b"hello"]
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    tokens = expected(ids, params)
    assert text == "hello" + shown_text(tokens)
    assert len(logprobs["tokens"]) == len(ids) + 5
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert all(isinstance(x, float) for x in logprobs["token_logprobs"][1:])
    assert logprobs["text_offset"][:7] == [0, 0, 1, 2, 3, 4, 5]


def test_echo_of_token_ids() -> None:
    got = ask(COMPLETIONS, completion([BOS, *b"hi"], echo=True, max_tokens=1)).json()
    assert got["choices"][0]["text"].startswith("<s>hi")


def test_special_tokens_show_only_when_asked() -> None:
    body = completion("x", logit_bias={"258": 100}, max_tokens=2)
    assert ask(COMPLETIONS, body).json()["choices"][0]["text"] == ""
    shown = ask(COMPLETIONS, body | {"skip_special_tokens": False})
    assert shown.json()["choices"][0]["text"] == "<|<|"


def test_cached_tokens_are_reported_alike_streaming_or_not() -> None:
    house = House()

    async def main() -> list[Any]:
        async with inside(house) as client:
            seen = []
            for stream in (False, False, True):
                extra = (
                    {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
                )
                answer = await client.post(CHAT, json=chat("x" * 100) | extra)
                got = events(answer.text)[-2] if stream else answer.json()
                seen.append(got["usage"]["prompt_tokens_details"]["cached_tokens"])
            return seen

    first, second, third = asyncio.run(main())
    assert first == 0
    assert second == third > 0


def test_max_tokens_left_out_means_until_the_model_stops() -> None:
    body = chat()
    del body["max_tokens"]
    want, finish, used = oracle("hello", max_tokens=None)
    got = ask(CHAT, body).json()
    assert (got["choices"][0]["finish_reason"], got["usage"]["completion_tokens"]) == (finish, used)
    assert got["choices"][0]["message"]["content"] == want
    tight = House(FakeExecutor(context=48))
    got = ask(CHAT, body | {"ignore_eos": True}, tight).json()
    assert got["choices"][0]["finish_reason"] == "length"
    assert got["usage"]["total_tokens"] == 48


def test_max_completion_tokens_is_the_new_name() -> None:
    body = chat(max_completion_tokens=3, ignore_eos=True)
    del body["max_tokens"]
    got = ask(CHAT, body).json()
    assert got["usage"]["completion_tokens"] == 3
    assert got["choices"][0]["finish_reason"] == "length"


def test_many_at_once_get_what_they_would_alone() -> None:
    texts = [f"request {i} " + "x" * (i * 7 % 90) for i in range(40)]

    async def main() -> list[str]:
        async with inside(House(FakeExecutor(blocks=60))) as client:
            answers = await asyncio.gather(
                *(client.post(CHAT, json=chat(t, stream=i % 2 == 0)) for i, t in enumerate(texts))
            )
        return [
            content(events(a.text)) if i % 2 == 0 else a.json()["choices"][0]["message"]["content"]
            for i, a in enumerate(answers)
        ]

    assert asyncio.run(main()) == [oracle(t)[0] for t in texts]


ENDPOINTS: list[tuple[str, dict[str, Any], str]] = [
    (
        CHAT,
        {
            "messages": [{"role": "user", "content": "x"}],
        },
        "max_tokens",
    ),
    (COMPLETIONS, {"prompt": "x"}, "max_tokens"),
    ("/v1/responses", {"input": "x"}, "max_output_tokens"),
    ("/v1/messages", {"messages": [{"role": "user", "content": "x"}]}, "max_tokens"),
]


@pytest.mark.parametrize(("path", "fields", "most"), ENDPOINTS)
@pytest.mark.parametrize("count", [3, 4, 5])
def test_an_answer_that_is_cut_inside_a_character_ends_before_it(
    path: str, fields: dict[str, Any], most: str, count: int
) -> None:
    """Whole and streamed alike, at every endpoint."""
    said = "hi🙂"
    for stream in (False, True):
        executor = FakeExecutor()
        executor.script = said.encode()
        body = {"model": "fake", "stream": stream} | fields | {most: count}
        answer = ask(path, body, House(executor))
        assert answer.status_code == 200
        assert '"hi"' in answer.text or '"h"' in answer.text
        assert "\ufffd" not in answer.text
        assert "\\ufffd" not in answer.text
    executor = FakeExecutor()
    executor.script = said.encode()
    assert said in ask(path, {"model": "fake"} | fields | {most: 7}, House(executor)).text


class Infilling(FakeTokenizer):
    """ROLE prefix END suffix ROLE; BOOM ends a middle."""

    infill_ends = (BOOM,)

    def infill(self, prefix: str | Sequence[int], suffix: str) -> list[int]:
        own = prefix.encode() if isinstance(prefix, str) else prefix
        return [ROLE, *own, END, *suffix.encode(), ROLE]


@pytest.mark.parametrize("prompt", ["ab", [*b"ab"]])
def test_a_suffix_is_what_the_middle_is_written_before(prompt: Any) -> None:
    house = House(tokenizer=Infilling())
    fields = {"prompt": prompt, "suffix": "yz", "max_tokens": 8, "temperature": 0}
    answer = ask(COMPLETIONS, {"model": "fake"} | fields, house).json()
    ids = [ROLE, *b"ab", END, *b"yz", ROLE]
    params = SamplingParams(temperature=0, max_tokens=8)
    want, finish, used = expected_text(expected(ids, params))
    assert answer["choices"][0]["text"] == want
    assert answer["choices"][0]["finish_reason"] == finish
    assert answer["usage"]["prompt_tokens"] == len(ids)
    assert answer["usage"]["completion_tokens"] == used


def test_what_would_begin_another_file_ends_a_middle() -> None:
    executor = FakeExecutor()
    executor.script = [*b"mid", BOOM, *b"more"]  # type: ignore[assignment]
    house = House(executor, tokenizer=Infilling())
    fields = {"prompt": "ab", "suffix": "yz", "max_tokens": 20}
    choice = ask(COMPLETIONS, {"model": "fake"} | fields, house).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("mid", "stop")


def test_a_suffix_is_refused_beside_echo_and_by_chat() -> None:
    house = House(tokenizer=Infilling())
    both = ask(COMPLETIONS, completion(suffix="x", echo=True), house)
    assert both.status_code == 400
    assert both.json()["error"]["param"] == "suffix"
    assert ask(CHAT, chat(suffix="x")).json()["error"]["param"] == "suffix"
    assert ask(COMPLETIONS, completion(suffix=""), House()).status_code == 200
