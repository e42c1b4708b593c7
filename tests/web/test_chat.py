"""The chat in a real browser: it streams, stops, asks again, keeps, and no reply becomes markup."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.web.browser import Page
from tests.web.conftest import Visit

BUSY = "!!document.querySelector('[aria-busy=true]')"
IDLE = "!!document.querySelector('.answer') && !document.querySelector('[aria-busy=true]')"


def say(page: Page, text: str) -> None:
    page.click(".composer textarea")
    page.type(text)
    page.key("Enter")


def test_a_reply_streams_and_says_what_it_cost(visit: Visit) -> None:
    line = "Light is scattered by air, and blue light more than red."
    with visit(line, view="chat", seconds=0.02) as (house, page):
        say(page, "Why is the sky blue?")
        page.wait(BUSY)
        some = page.wait("document.querySelector('.words').innerText.match(/^.{5,}/)?.[0]")
        assert line.startswith(some.strip())
        assert len(some) < len(line)
        page.wait(IDLE)
        assert page.text(".words") == line
        assert f"{len(line) + 1} tokens" in page.text(".meta")
        assert page.text(".question p") == "Why is the sky blue?"
        assert house.idle()


def test_stop_keeps_what_there_is_and_frees_the_engine(visit: Visit) -> None:
    with visit("on and on " * 100, view="chat", seconds=0.02) as (house, page):
        say(page, "Go on.")
        page.wait("document.querySelector('.words')?.innerText.length > 10")
        page.key("Escape")
        page.wait(IDLE)
        assert "stopped" in page.text(".meta")
        assert page.text(".words").startswith("on and on")
        assert house.idle()
        say(page, "And then?")  # it can go on from there
        page.wait(BUSY)
        page.click("button[title='Stop (Esc)']")
        page.wait(IDLE)
        assert house.idle()


def test_another_answer_stands_beside_the_first(visit: Visit) -> None:
    with visit("First.", "Second.", view="chat") as (_, page):
        say(page, "Which?")
        page.wait(IDLE)
        page.click("button[title='Another answer (r)']")
        page.wait("document.querySelector('.words').innerText === 'Second.'")
        assert "2/2" in page.text(".meta")
        page.click("button[aria-label='The answer before']")
        page.wait("document.querySelector('.words').innerText === 'First.'")


HOSTILE = """Look:
<script>window.hacked = 1</script>
<img src="http://evil.example/a.png" onerror="window.hacked = 2">

![a picture](http://evil.example/b.png) and [a link](javascript:window.hacked=3)
and [data](data:text/html,<script>alert(1)</script>) and [a good one](https://good.example/x)

<iframe src="http://evil.example/"></iframe> <svg onload="window.hacked = 4"></svg>
| a | <b>b</b> |
|---|---|
| `<i>` | **bold** |

```html
<script>window.hacked = 5</script>
```
"""


def test_nothing_that_a_model_writes_becomes_markup_or_a_request(visit: Visit) -> None:
    with visit(HOSTILE, view="chat", seconds=0.0005) as (_, page):
        say(page, "Show me.")
        page.wait(IDLE)
        inside = ".answer script, .answer img, .answer iframe, .answer svg, .answer b, .answer i"
        assert page.run(f"document.querySelectorAll('{inside}').length") == 0
        assert page.run("window.hacked === undefined")
        links = page.run(
            "[...document.querySelectorAll('.answer a')].map(a => [a.protocol, a.rel])"
        )
        assert {protocol for protocol, _ in links} == {"http:", "https:"}
        assert all("noopener" in rel and "noreferrer" in rel for _, rel in links)
        text = page.text(".words")
        assert "<script>window.hacked = 1</script>" in text
        assert "<script>window.hacked = 5</script>" in page.text(".words pre")
        assert page.text(".words td strong") == "bold"
        assert not any("evil" in url for url in page.requested)


def test_markdown_is_what_it_means(visit: Visit) -> None:
    source = (
        "# Title\n\nSome *soft* and **loud** `code` and ~~gone~~, a_b_c, 2 * 3 * 4.\n\n"
        "- one\n- two\n  - inner\n\n1. first\n2. second\n\n> said\n\n"
        "```python\nprint('hi')\n```\n\n---\nline one\nline two\n"
    )
    with visit(source, view="chat", seconds=0.0005) as (_, page):
        say(page, "Mark it down.")
        page.wait(IDLE)
        for selector, text in {
            ".words h3": "Title",
            ".words em": "soft",
            ".words strong": "loud",
            ".words p code": "code",
            ".words del": "gone",
            ".words ul ul li": "inner",
            ".words ol li": "first\nsecond",
            ".words blockquote": "said",
            ".words pre": "print('hi')",
            ".code figcaption span": "python",
        }.items():
            assert page.text(selector).strip() == text
        assert "a_b_c, 2 * 3 * 4." in page.text(".words p")
        assert page.run("document.querySelectorAll('.words hr').length") == 1


def test_tokens_say_how_likely_they_were(visit: Visit) -> None:
    with visit("A **sure** thing", view="chat") as (_, page):
        say(page, "?")
        page.wait(IDLE)
        assert page.run(
            "[...document.querySelectorAll('.t')].map(t => t.textContent).join('')"
        ) == ("A sure thing")
        box = page.run("document.querySelectorAll('.t')[3].getBoundingClientRect().toJSON()")
        page.mouse(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        page.wait("!document.querySelector('.tip').hidden")
        assert page.text(".alternatives code").split("\n") == ["u", "z"]
        assert page.text(".alternatives span").split("\n") == ["90 %", "5.0 %"]
        # The same by the keyboard.
        page.mouse(1, 1)
        page.run("document.querySelector('.words').focus()")
        page.key("ArrowRight")
        page.key("ArrowRight")
        page.wait("document.querySelector('.alternatives .chosen code')?.innerText === '␣'")


def test_conversations_and_settings_stay_in_the_browser(visit: Visit) -> None:
    with visit("Noted.", view="chat") as (house, page):
        page.click("button[title='Settings (s)']")
        page.run("document.querySelector('textarea[name=system]').focus()")
        page.type("Be terse.")
        page.key("Escape")
        say(page, "Remember **this**")
        page.wait(IDLE)
        page.wait("(localStorage['octavo.conversations'] || '').includes('Noted.')")
        page.open(f"{house.url}/?again#chat")
        page.wait("document.querySelector('.words')?.innerText === 'Noted.'")
        assert page.text(".question p") == "Remember **this**"
        page.click("button[title='Settings (s)']")
        page.wait("document.querySelector('textarea[name=system]').value === 'Be terse.'")
        page.key("Escape")
        page.click("button[title='New conversation (n)']")
        page.wait("!!document.querySelector('.welcome')")
        page.click("button[aria-expanded]")
        page.click(".list .one button")
        page.wait("document.querySelector('.words')?.innerText === 'Noted.'")


CALLS: list[dict[str, Any]] = [
    {"role": "assistant", "content": None},
    {
        "tool_calls": [
            {"index": 0, "id": "call_1", "type": "function",
             "function": {"name": "weather", "arguments": ""}}
        ]
    },
    {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": "Bru'}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": 'ges"}'}}]},
]  # fmt: skip


def test_tool_calls_are_shown_and_their_results_go_back(visit: Visit) -> None:
    frames = [
        {"id": "chatcmpl-x", "choices": [{"index": 0, "delta": d, "finish_reason": None}]}
        for d in CALLS
    ]
    frames.append(
        {"id": "chatcmpl-x", "choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]}
    )
    body = "".join(f"data: {json.dumps(frame)}\n\n" for frame in frames) + "data: [DONE]\n\n"
    with visit("It rains.", view="chat") as (_, page):
        page.run(
            "window.sent = []; window.real = fetch; window.fetch = (url, init) => {"
            " if (!String(url).includes('chat/completions')) return real(url, init);"
            " sent.push(JSON.parse(init.body));"
            f" return sent.length > 1 ? Promise.reject(new TypeError('no more')) : "
            f"Promise.resolve(new Response({json.dumps(body)})) }}; 0"
        )
        say(page, "Weather in Bruges?")
        page.wait("document.querySelector('.call pre')?.innerText.includes('\"Bruges\"')")
        assert page.text(".call figcaption") == "calls weather"
        page.click(".call input")
        page.type("rain, 9 degrees")
        page.key("Enter")
        page.wait("sent.length === 2")
        assert page.run("sent[1].messages.slice(-2)") == [
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "call_1", "type": "function",
                     "function": {"name": "weather", "arguments": '{"city": "Bruges"}'}}
                ],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": "rain, 9 degrees"},
        ]  # fmt: skip


def test_a_key_is_asked_for_where_one_is_needed(visit: Visit, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("a-key-of-sixteen-characters\n")
    with visit("Come in.", api_key_file=str(keys)) as (_, page):
        page.wait("!!document.querySelector('dialog input[name=key]')")
        page.type("the-wrong-key-altogether")
        page.key("Enter")
        page.wait("document.querySelector('dialog .trouble')?.innerText.includes('not valid')")
        page.run("document.querySelector('input[name=key]').value = ''; 0")
        page.click("input[name=key]")
        page.type("a-key-of-sixteen-characters")
        page.key("Enter")
        page.wait("!document.querySelector('dialog') && !!document.querySelector('.state.live')")
        say(page, "May I?")
        page.wait(IDLE)
        assert page.text(".words") == "Come in."
        assert page.run("Object.keys(localStorage).includes('octavo.key')") is False


def test_a_refusal_is_said_in_the_servers_words(visit: Visit) -> None:
    with visit("x", view="chat") as (_, page):
        say(page, "y" * 4000)  # more than the context holds
        page.wait("!!document.querySelector('.answer .trouble')")
        assert "do not fit the context of 2048" in page.text(".answer .trouble")
        page.wait(
            "(({bottom, top}) => top > 0 && bottom <= document.querySelector('.composer')"
            ".getBoundingClientRect().top)(document.querySelector('.trouble')"
            ".getBoundingClientRect())"
        )
        # The same again would be refused again.
        assert "regenerate" not in page.text(".answer .meta")
        page.click(".answer .meta button")
        page.wait("document.querySelector('.composer textarea').value.startsWith('yyy')")
        page.errors.clear()  # the network's own line about the 400
