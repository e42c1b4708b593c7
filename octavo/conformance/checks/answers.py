"""The shapes of whole answers, and what a request may look like."""

from __future__ import annotations

from octavo.conformance.book import check
from octavo.conformance.checks.tools import WEATHER
from octavo.conformance.probe import (
    CHAT,
    COMPLETIONS,
    Probe,
    Unclear,
    error_of,
    first,
    need,
    optional,
    short,
    text_of,
    usage_of,
)


@check(
    "models-list",
    'GET /v1/models: {"object": "list", "data": [...]}, each with id, object "model", created and '
    "owned_by.",
    "OpenAI spec, ListModelsResponse, Model",
)
def models_list(probe: Probe) -> str:
    answer = probe.wire.ask("GET", "/v1/models")
    need(answer.status == 200, f"/v1/models answered {answer.status}: {short(answer.body)}")
    found = answer.json
    need(found["object"] == "list" and found["data"], f"got {short(found)}")
    for model in found["data"]:
        shaped = (
            isinstance(model.get("id"), str)
            and model.get("object") == "model"
            and type(model.get("created")) is int
            and isinstance(model.get("owned_by"), str)
        )
        need(shaped, f"not a Model: {short(model)}")
    return f"{len(found['data'])} models"


@check(
    "chat-shape",
    'A chat answer has id, object "chat.completion", created, model, choices with index, message '
    "(role, content) and finish_reason, and usage.",
    "OpenAI spec, CreateChatCompletionResponse",
)
def chat_shape(probe: Probe) -> str:
    answer = probe.chat()
    need(isinstance(answer["id"], str) and answer["id"], "no id")
    need(answer["object"] == "chat.completion", f"object is {answer['object']!r}")
    need(type(answer["created"]) is int, f"created is {answer['created']!r}, no integer")
    need(isinstance(answer["model"], str), "no model")
    choice = first(answer)
    need(choice["index"] == 0, f"index is {choice['index']!r}")
    need(choice["message"]["role"] == "assistant", f"role is {choice['message']['role']!r}")
    need(isinstance(choice["message"]["content"], str), "content is no text")
    need(choice["finish_reason"] in ("stop", "length"), f"finish {choice['finish_reason']!r}")
    return f"{answer['id']}: {short(text_of(answer), 60)}"


@check(
    "completion-shape",
    'A completion has object "text_completion" and choices with text, index, logprobs and '
    "finish_reason.",
    "OpenAI spec, CreateCompletionResponse",
)
def completion_shape(probe: Probe) -> str:
    answer = probe.completion()
    need(answer["object"] == "text_completion", f"object is {answer['object']!r}")
    choice = first(answer)
    missing = {"text", "index", "logprobs", "finish_reason"} - set(choice)
    need(not missing, f"the choice lacks {', '.join(sorted(missing))}")
    usage_of(answer)
    return short(choice["text"], 60)


@check(
    "completion-prompts",
    "A list of prompts gets an answer for each, in order of index; ids are taken too.",
    "OpenAI spec, CreateCompletionRequest.prompt",
)
def completion_prompts(probe: Probe) -> str:
    prompts = ["One, two, three,", "The capital of France is"]
    alone = [text_of(probe.completion(prompt, max_tokens=8)) for prompt in prompts]
    answer = probe.completion(prompts, max_tokens=8)
    found = {choice["index"]: choice["text"] for choice in answer["choices"]}
    need(sorted(found) == [0, 1], f"indexes {sorted(found)}")
    need(
        found[0] == alone[0] or found[0] != alone[1],
        f"answers are swapped: {short(found)}, alone {short(alone)}",
    )
    probe.completion([1, 2, 3], max_tokens=1)
    return short(found)


@check(
    "content-parts",
    "The content of a message may be an array of parts: it means what their text means.",
    "OpenAI spec, ChatCompletionRequestUserMessage.content",
)
def content_parts(probe: Probe) -> str:
    plain = probe.chat("Say hello to Anna.")
    parts = [{"type": "text", "text": "Say hello to Anna."}]
    split = probe.chat(messages=[{"role": "user", "content": parts}])
    tokens = [usage_of(answer)["prompt_tokens"] for answer in (plain, split)]
    need(tokens[0] == tokens[1], f"{tokens[0]} prompt tokens as a text, {tokens[1]} as parts")
    return f"{tokens[0]} prompt tokens both ways"


@check(
    "developer-role",
    'Messages of role "developer" are taken ("replace the previous system messages").',
    "OpenAI spec, ChatCompletionRequestDeveloperMessage",
)
def developer_role(probe: Probe) -> str:
    user = {"role": "user", "content": "Who are you?"}
    terse = {"role": "developer", "content": "You are terse. " * 8}
    plain = usage_of(probe.chat(messages=[user], max_tokens=4))["prompt_tokens"]
    told = usage_of(probe.chat(messages=[terse, user], max_tokens=4))["prompt_tokens"]
    need(told > plain + 16, f"the message was dropped: {told} prompt tokens, {plain} without it")
    return f"{told} prompt tokens, {plain} without it"


@check(
    "null-content-history",
    "An assistant message of the history may have content null when it has tool_calls.",
    "OpenAI spec, ChatCompletionRequestAssistantMessage.content",
)
def null_content_history(probe: Probe) -> str:
    optional("tools", probe.post(CHAT, probe.chat_body(tools=[WEATHER], max_tokens=4)))
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city":"Paris"}'},
    }
    messages = [
        {"role": "user", "content": "How is the weather in Paris?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny, 20 degrees"},
    ]
    answer = probe.chat(messages=messages, tools=[WEATHER], max_tokens=16)
    return f"answered: {short(text_of(answer), 60)}"


@check(
    "echo",
    "echo: echo back the prompt in addition to the completion.",
    "OpenAI spec, CreateCompletionRequest.echo",
)
def echo(probe: Probe) -> str:
    prompt = "The sea is"
    answer = probe.post(COMPLETIONS, probe.completion_body(prompt, echo=True, max_tokens=4))
    if answer.status == 400:
        error_of(answer.json, answer.body)
        raise Unclear(f"refused by name: {short(answer.body)}")
    need(answer.status == 200, f"{answer.status}: {short(answer.body)}")
    text = text_of(answer.json)
    need(text.startswith(prompt), f"the text does not begin with the prompt: {text!r}")
    return repr(short(text, 60))


@check(
    "logit-bias",
    'Bias "values like -100 or 100 should result in a ban or exclusive selection of the token".',
    "OpenAI spec, CreateChatCompletionRequest.logit_bias",
)
def logit_bias(probe: Probe) -> str:
    body = probe.chat_body(logit_bias={"300": 100}, max_tokens=6, logprobs=True)
    answer = probe.post(CHAT, body)
    need(answer.status == 200, f"{answer.status}: {short(answer.body)}")
    logged = (first(answer.json).get("logprobs") or {}).get("content")
    if not logged:
        raise Unclear("no logprobs to see the tokens by")
    tokens = {(item["token"], tuple(item.get("bytes") or ())) for item in logged}
    need(len(logged) == 6, f"{len(logged)} tokens, 6 wanted: {short(logged)}")
    need(len(tokens) == 1, f"a bias of 100 chose several tokens: {short(tokens)}")
    return f"6 times {logged[0]['token']!r}"
