"""Tool calls over HTTP: in OpenAI's shapes, streamed and whole alike, forced where that is asked.

The oracles: the `openai` client reads what we send; jsonschema judges arguments.
"""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from octavo.models.template import ChatTemplate
from octavo.models.tokenizer import load_tokenizer
from octavo.models.weights import open_checkpoint
from octavo.server import protocol
from octavo.server.dialect import Dialect
from octavo.server.tools import toolbox
from tests.server.fakes import FakeExecutor, FakeTokenizer
from tests.server.house import House, chat, events, inside

HERMES, LLAMA, MISTRAL = Dialect("hermes"), Dialect("llama"), Dialect("mistral")
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city"],
    "$defs": {"city": {"type": "string", "maxLength": 10}},
}


def tool(name: str, parameters: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    function = {"name": name, "description": f"does {name}", **more}
    return {
        "type": "function",
        "function": function | ({"parameters": parameters} if parameters else {}),
    }


TOOLS = [tool("weather", WEATHER), tool("now")]
ROME = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


def house(script: str = "", dialect: Dialect = HERMES, **fields: Any) -> House:
    built = House(FakeExecutor(), dialect=dialect, **fields)
    built.executor.script = script.encode()
    return built


def post(built: House, *bodies: dict[str, Any]) -> list[Any]:
    async def run() -> list[Any]:
        async with inside(built) as client:
            path = "/v1/chat/completions"
            return list(await asyncio.gather(*(client.post(path, json=body) for body in bodies)))

    answers = asyncio.run(run())
    assert built.idle()
    return answers


def asked(**fields: Any) -> dict[str, Any]:
    return chat(**{"tools": TOOLS, "max_tokens": 400} | fields)


def client_reads(built: House, body: dict[str, Any]) -> Any:
    """The whole choice, after checking that a stream of it says the same to OpenAI's client."""

    async def run() -> Any:
        built.app.start()
        transport = httpx.ASGITransport(built.app)
        http = httpx.AsyncClient(transport=transport)
        client = openai.AsyncOpenAI(api_key="x", base_url="http://octavo/v1", http_client=http)
        whole = await client.chat.completions.create(**body)
        texts: dict[int, str] = {}
        calls: dict[tuple[int, int], list[str]] = {}
        ends = {}
        async for chunk in await client.chat.completions.create(**body, stream=True):
            for choice in chunk.choices:
                texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
                for call in choice.delta.tool_calls or ():
                    assert call.function is not None
                    key = choice.index, call.index
                    if key not in calls:
                        assert call.id
                        assert (call.type, call.function.arguments) == ("function", "")
                        assert not call.index or (choice.index, call.index - 1) in calls
                        calls[key] = [call.function.name or "", ""]
                    else:
                        assert call.id is None
                        assert call.type is None
                        assert call.function.name is None
                        calls[key][1] += call.function.arguments or ""
                ends[choice.index] = choice.finish_reason or ends.get(choice.index)
        for choice in whole.choices:
            made = choice.message.tool_calls or []
            assert texts[choice.index] == (choice.message.content or "")
            assert ends[choice.index] == choice.finish_reason
            for index, call in enumerate(made):
                own = calls.pop((choice.index, index))
                assert own == [call.function.name, call.function.arguments]
            assert len({call.id for call in made}) == len(made)
        assert not calls
        await built.app.stop()
        return whole.choices[0]

    return asyncio.run(run())


def test_a_call_is_a_call_and_content_is_null() -> None:
    choice = client_reads(house(ROME), asked())
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls
    assert call.id.startswith("call_")
    assert (call.type, call.function.name) == ("function", "weather")
    assert json.loads(call.function.arguments) == {"city": "Rome"}


def test_text_and_two_calls_come_in_order() -> None:
    choice = client_reads(house(f"I look.\n{ROME}\n{NOW}"), asked())
    assert choice.message.content == "I look."
    assert [call.function.name for call in choice.message.tool_calls] == ["weather", "now"]


def test_llama_writes_bare_objects() -> None:
    script = (
        '{"name": "weather", "parameters": {"city": "Oslo"}}; {"name": "now", "parameters": {}}'
    )
    choice = client_reads(house(script, LLAMA), asked())
    assert [call.function.name for call in choice.message.tool_calls] == ["weather", "now"]
    assert choice.message.content is None


FENCED = '```json\n{\n  "name": "weather",\n  "arguments": {\n    "city": "Rome"\n  }\n}\n```'


def test_a_call_in_a_fence_or_without_tags_is_a_call_where_nothing_forbids_it() -> None:
    for script in (FENCED, '{"name": "weather", "arguments": {"city": "Rome"}}'):
        choice = client_reads(house(script), asked())
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        (call,) = choice.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == (
            "weather", {"city": "Rome"},
        )  # fmt: skip
        choice = client_reads(house(script), asked(max_tokens=len(script) - 4))
        assert (choice.finish_reason, choice.message.tool_calls) == ("length", None)
        assert choice.message.content == script[:-4]


def test_an_object_stays_text_where_text_was_asked_to_be_one_or_arguments_to_be_valid() -> None:
    script = '{"name": "weather", "arguments": {"town": "Rome"}}'
    strict = [tool("weather", WEATHER, strict=True)]
    for fields in ({"response_format": {"type": "json_object"}}, {"tools": strict}):
        choice = client_reads(house(script), asked(**fields))
        assert (choice.message.content, choice.message.tool_calls) == (script, None)


MISTRALS = (
    '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Oslo"}}, '
    '{"name": "now", "arguments": {}}]'
)


def test_mistral_writes_a_list_and_wants_short_ids() -> None:
    for script in (MISTRALS, MISTRALS.removeprefix("[TOOL_CALLS] ")):
        choice = client_reads(house(script, MISTRAL), asked())
        assert [call.function.name for call in choice.message.tool_calls] == ["weather", "now"]
        assert all(re.fullmatch("[a-zA-Z0-9]{9}", call.id) for call in choice.message.tool_calls)
        assert choice.message.content is None
    one = client_reads(house(MISTRALS.split(" ", 1)[1], MISTRAL), asked(parallel_tool_calls=False))
    assert [call.function.name for call in one.message.tool_calls] == ["weather"]


@pytest.mark.parametrize("script", ["no tools today", '<tool_call>{"name": "other"}', "<tool_call"])
def test_what_is_no_call_is_content(script: str) -> None:
    choice = client_reads(house(script), asked())
    assert choice.finish_reason == "stop"
    assert (choice.message.content, choice.message.tool_calls) == (script, None)


def test_a_call_that_is_cut_off_ends_by_length() -> None:
    choice = client_reads(house(ROME), asked(max_tokens=ROME.index("Rome")))
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls[0].function.arguments == '{"city": "'


@pytest.mark.parametrize("dialect", [HERMES, LLAMA, MISTRAL], ids=["hermes", "llama", "mistral"])
@pytest.mark.parametrize("seed", range(4))
def test_required_calls_some_tool_with_valid_arguments(dialect: Dialect, seed: int) -> None:
    body = asked(tool_choice="required", temperature=1, seed=seed, n=2, parallel_tool_calls=False)
    choice = client_reads(house(dialect=dialect), body)
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls
    arguments = json.loads(call.function.arguments)
    if call.function.name == "weather":
        jsonschema.validate(arguments, WEATHER | {"additionalProperties": False})
    else:
        assert (call.function.name, arguments) == ("now", {})


def test_a_named_tool_is_called_once_whatever_the_model_would_rather_say() -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    choice = client_reads(house(NOW), asked(tool_choice=named))
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert call.function.name == "weather"
    jsonschema.validate(json.loads(call.function.arguments), WEATHER)


def test_strict_arguments_are_valid_even_when_calling_is_free() -> None:
    strict = [tool("weather", WEATHER, strict=True)]
    wrong = 'Well.\n<tool_call>\n{"name": "weather", "arguments": {"town": "Rome"}}\n</tool_call>'
    free = client_reads(house(wrong), asked()).message
    assert json.loads(free.tool_calls[0].function.arguments) == {"town": "Rome"}
    held = client_reads(house(wrong), asked(tools=strict)).message
    assert held.content == "Well."
    jsonschema.validate(json.loads(held.tool_calls[0].function.arguments), WEATHER)
    assert client_reads(house("Hi."), asked(tools=strict)).message.content == "Hi."


def test_one_call_at_a_time() -> None:
    choice = client_reads(house(f"{NOW}\n{ROME}"), asked(parallel_tool_calls=False))
    assert [call.function.name for call in choice.message.tool_calls] == ["now"]


def test_a_schema_holds_for_answers_that_call_nothing() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for format in (form, {"type": "json_object"}):
        choice = client_reads(house('{"a": true}'), asked(response_format=format))
        assert (choice.message.content, choice.finish_reason) == ('{"a": true}', "stop")
        choice = client_reads(house(NOW), asked(response_format=format))
        assert choice.message.tool_calls[0].function.name == "now"


def test_none_calls_nothing_and_the_model_is_not_told() -> None:
    built = house(ROME)
    told, not_told, plain = post(built, asked(), asked(tool_choice="none"), chat(max_tokens=400))
    assert not_told.json()["choices"][0]["message"]["content"] == ROME
    assert not_told.json()["usage"]["prompt_tokens"] == plain.json()["usage"]["prompt_tokens"]
    assert told.json()["usage"]["prompt_tokens"] > plain.json()["usage"]["prompt_tokens"] + 100


def test_a_conversation_with_calls_goes_on() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    seen: list[Any] = []

    def template(messages: list[dict[str, Any]], **more: Any) -> list[int]:
        seen.append((messages, more))
        return [1, 2, 3]

    talk = [
        {"role": "user", "content": "when?"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "hm"},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "noon"}]},
    ]
    (answer,) = post(house("It is noon.", template=template), asked(messages=talk))
    assert answer.json()["choices"][0]["message"]["content"] == "It is noon."
    (messages, more) = seen[0]
    assert messages[1] == {
        "role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "hm",
    }  # fmt: skip
    assert messages[2] == {"role": "tool", "tool_call_id": "call_1", "content": "noon"}
    assert more == {"tools": TOOLS}


QWENISH = """{%- if tools %}<|im_start|>system
# Tools: {%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}<|im_end|>
{%- endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
{%- endfor %}{{ ' of ' + message.tool_call_id if message.tool_call_id }}<|im_end|>
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{%- endif %}"""


def test_a_template_sees_what_transformers_would_show_it(smollm2_path: Path) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    arguments = {"city": "Zürich <b>", "days": 2}
    called = {"id": "a", "type": "function", "function": {"name": "weather"}}
    shown = called | {"function": {"name": "weather", "arguments": arguments}}
    sent = called | {"function": {"name": "weather", "arguments": json.dumps(arguments)}}
    talk: list[dict[str, Any]] = [
        {"role": "user", "content": "When & where?"},
        {"role": "assistant", "content": None, "tool_calls": [shown]},
        {"role": "tool", "content": "12 °C", "tool_call_id": "a"},
    ]
    want, _ = render_jinja_template(
        [talk], tools=TOOLS, chat_template=QWENISH, add_generation_prompt=True
    )
    wire = [talk[0], talk[1] | {"tool_calls": [sent]}, talk[2]]
    body, _ = protocol.parse(protocol.ChatBody, json.dumps(asked(messages=wire)).encode())
    box = toolbox(body.tools, body.tool_choice, body.parallel_tool_calls)
    assert box is not None
    tokenizer = load_tokenizer(open_checkpoint(smollm2_path))
    tokenizer.chat_templates = {"default": QWENISH}
    template = ChatTemplate(tokenizer)
    assert template.text(protocol.chat_messages(body), tools=box.shown()) == want[0]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": "x"}, "tools"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [tool("a b")]}, "tools[0].function.name"),
    ({"tools": [tool("a"), tool("a")]}, "tools"),
    ({"tools": [tool(f"f{i}") for i in range(129)]}, "tools"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "always"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
    ({"tools": [tool("a", {"type": "odd"})], "tool_choice": "required"}, "tools"),
    ({"tools": [tool("a", {"properties": {"x": {"uniqueItems": True}}}, strict=True)]}, "tools"),
    ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "user", "content": "x", "tool_call_id": "y"}]},
     "messages[0].tool_call_id"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]},
     "messages[0].tool_calls[0].function"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), BAD, ids=lambda value: str(value)[:60])
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    (answer,) = post(house(), asked(**fields))
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"].split(" ")[0] == param


def test_a_template_without_tools_refuses_them() -> None:
    (answer,) = post(house(dialect=Dialect()), asked())
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tools"


def test_dialects_are_read_off_templates() -> None:
    tools = '{% if tools %}<tool_call>\\n{\\"name\\": {% endif %}'
    switch = "{%- if enable_thinking %}<think>"
    qwen = {"default": tools + switch}
    llama = {"default": '{{ tools }} {\\"name\\": , \\"parameters\\": }'}
    assert Dialect.of(qwen) == Dialect("hermes", True, "enable_thinking", False)
    assert Dialect.of(llama) == Dialect("llama")
    assert Dialect.of({"default": "{{ messages }}"}) == Dialect()
    coder = {"default": "{{ tools }}<tool_call>\\n<function=example>"}  # no JSON: not read here
    assert Dialect.of(coder) == Dialect()
    assert Dialect.of({"default": published("qwen3")}) == THINKS
    assert Dialect.of({"default": published("deepseek-r1-distill")}) == Dialect(thinks=True)
    assert Dialect.of({"default": published("mistral-nemo")}) == MISTRAL


# ---- reasoning -----------------------------------------------------------------------------------

THINKS = Dialect("hermes", thinks=True, switch="enable_thinking")


TEMPLATES = Path(__file__).parents[1] / "fixtures" / "templates"


def published(name: str) -> str:
    """A model's own template, to the letter: Qwen/Qwen3-0.6B and mistralai/Mistral-Nemo-
    Instruct-2407 (Apache-2.0), deepseek-ai/DeepSeek-R1-Distill-Llama-8B (MIT)."""
    return (TEMPLATES / f"{name}.jinja").read_text()


def speaks(name: str, script: str, path: Path) -> House:
    """A house whose model has that template and answers by the script."""
    tokenizer = load_tokenizer(open_checkpoint(path))
    tokenizer.chat_templates = {"default": published(name)}
    real = ChatTemplate(tokenizer)
    fake = FakeTokenizer()

    def template(messages: list[dict[str, Any]], **more: Any) -> list[int]:
        return fake.encode(real.text(messages, **more))

    dialect = Dialect.of(tokenizer.chat_templates)
    return house(script, dialect, template=template)


def prompted(name: str, path: Path, messages: list[dict[str, Any]], **more: Any) -> str:
    """The prompt's text."""
    tokenizer = load_tokenizer(open_checkpoint(path))
    tokenizer.chat_templates = {"default": published(name)}
    return ChatTemplate(tokenizer).text(messages, **more)


def parted(answer: httpx.Response) -> tuple[str | None, str | None]:
    message = answer.json()["choices"][0]["message"]
    return message.get("reasoning_content"), message["content"]


THOUGHT = "<think>\nLet me see.\n</think>\n\nYes."


def test_qwen3_opens_its_thought_itself_and_is_kept_from_it_by_the_prompt(
    smollm2_path: Path,
) -> None:
    """`enable_thinking` false writes an empty thought into the prompt; `/no_think` in a message
    leaves that to the model, which writes one of its own."""
    on, no_think = chat(), chat("Really? /no_think")
    off = [chat(reasoning_effort="none"), chat(chat_template_kwargs={"enable_thinking": False})]
    talk = on["messages"]
    assert prompted("qwen3", smollm2_path, talk).endswith("<|im_start|>assistant\n")
    shut = prompted("qwen3", smollm2_path, talk, enable_thinking=False)
    assert shut.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    (answer,) = post(speaks("qwen3", THOUGHT, smollm2_path), on)
    assert parted(answer) == ("Let me see.", "Yes.")
    for answer in post(speaks("qwen3", "Yes.", smollm2_path), *off):
        assert parted(answer) == (None, "Yes.")
    (answer,) = post(speaks("qwen3", "<think>\n\n</think>\n\nYes.", smollm2_path), no_think)
    assert parted(answer) == (None, "Yes.")
    called = f"<think>\nThe tool.\n</think>\n\n{ROME}"
    (answer,) = post(speaks("qwen3", called, smollm2_path), asked())
    assert parted(answer) == ("The tool.", None)
    assert answer.json()["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "weather"


def test_deepseek_r1_opens_the_thought_in_the_prompt(smollm2_path: Path) -> None:
    """So an answer begins inside it; one that writes the tag again begins there too."""
    prompt = prompted("deepseek-r1-distill", smollm2_path, chat()["messages"])
    assert prompt.endswith("<｜Assistant｜><think>\n")
    for script in ("Let me see.\n</think>\n\nYes.", THOUGHT):
        (answer,) = post(speaks("deepseek-r1-distill", script, smollm2_path), chat())
        assert parted(answer) == ("Let me see.", "Yes.")
    (cut,) = post(speaks("deepseek-r1-distill", "Let me see", smollm2_path), chat(max_tokens=10))
    assert parted(cut) == ("Let me see", "")
    (refused,) = post(
        speaks("deepseek-r1-distill", "x", smollm2_path), chat(reasoning_effort="low")
    )
    assert refused.json()["error"]["param"] == "reasoning_effort"


def test_what_was_thought_in_earlier_turns_is_left_out_by_the_templates(smollm2_path: Path) -> None:
    talk: list[dict[str, Any]] = [
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "4.", "reasoning_content": "Two and two."},
        {"role": "user", "content": "Sure?"},
    ]
    for name in ("qwen3", "deepseek-r1-distill"):
        text = prompted(name, smollm2_path, talk)
        assert "4." in text
        assert "Two and two." not in text


def test_mistral_goes_on_with_the_ids_that_we_made(smollm2_path: Path) -> None:
    made = client_reads(house(MISTRALS, MISTRAL), asked()).message.tool_calls
    calls = [{"id": c.id, "function": {"name": c.function.name, "arguments": {}}} for c in made]
    talk: list[dict[str, Any]] = [
        {"role": "user", "content": "when?"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        *({"role": "tool", "content": "noon", "tool_call_id": c.id} for c in made),
    ]
    text = prompted("mistral-nemo", smollm2_path, talk, tools=TOOLS)
    assert text.count('[TOOL_RESULTS]{"content": noon, "call_id": "') == 2


def test_thoughts_are_apart_from_content_and_counted() -> None:
    built = house("<think>\nLet me see.\n</think>\n\nYes.", THINKS)
    whole, stream = post(built, chat(), chat(stream=True, stream_options={"include_usage": True}))
    message = whole.json()["choices"][0]["message"]
    assert message["reasoning_content"] == message["reasoning"] == "Let me see."
    assert message["content"] == "Yes."
    chunks = events(stream.text)[:-1]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Let me see."
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "Let me see."
    assert "".join(delta.get("content") or "" for delta in deltas) == "Yes."
    details = whole.json()["usage"]["completion_tokens_details"]
    assert details["reasoning_tokens"] == len("<think>\nLet me see.\n</think>")
    assert chunks[-1]["usage"]["completion_tokens_details"] == details


def test_a_model_without_thoughts_has_none() -> None:
    (answer,) = post(house("<think>a</think>b", HERMES), chat())
    message = answer.json()["choices"][0]["message"]
    assert message["content"] == "<think>a</think>b"
    assert "reasoning_content" not in message
    assert answer.json()["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


def test_a_prompt_that_opens_the_thought_is_gone_on_with() -> None:
    built = house("so</think>yes", THINKS)
    body = chat(chat_template_kwargs={"enable_thinking": True})
    effort = chat(reasoning_effort="high")
    for answer in post(built, body, effort):
        message = answer.json()["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("so", "yes")


def test_a_schema_holds_after_the_thought_and_a_call_may_follow_it() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for script in ("<think>\nhm\n</think>", "never thinks"):
        (answer,) = post(house(script, THINKS), chat(response_format=form, max_tokens=600))
        choice = answer.json()["choices"][0]
        if choice["finish_reason"] == "stop":
            jsonschema.validate(json.loads(choice["message"]["content"]), schema)
            assert choice["message"]["reasoning_content"]
    (answer,) = post(house(f"<think>\nhm\n</think>\n\n{ROME}", THINKS), asked())
    message = answer.json()["choices"][0]["message"]
    assert message["reasoning_content"] == "hm"
    assert message["tool_calls"][0]["function"]["name"] == "weather"


def test_an_effort_needs_a_template_that_knows_it() -> None:
    none, low = post(house("x"), chat(reasoning_effort="none"), chat(reasoning_effort="low"))
    assert none.status_code == 200
    assert (low.status_code, low.json()["error"]["param"]) == (400, "reasoning_effort")


def test_no_depth_of_parameters_is_a_fault_of_ours() -> None:
    """What can just be read may be too deep to write, for a template or a grammar."""
    text = json.dumps(asked(tools=[tool("f", {"deep": 0})], max_tokens=1))
    bodies = [text.replace("0}", '{"a":' * n + "{}" + "}" * n + "}", 1) for n in range(960, 1000)]
    built = house()

    async def run() -> list[int]:
        async with inside(built) as client:
            path = "/v1/chat/completions"
            return [(await client.post(path, content=body)).status_code for body in bodies]

    assert set(asyncio.run(run())) == {400}  # too long for the context, or too deep
