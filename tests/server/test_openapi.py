"""The document at /openapi.json is true: of routes, bodies, answers and refusals."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any
from urllib.parse import quote

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.routing import Route

from octavo.server import answers
from octavo.server.openapi import OPERATIONS, document, page
from tests.server.fakes import FakeExecutor
from tests.server.house import House, chat, completion, outside
from tests.server.test_messages import body as message
from tests.server.test_responses import body as response

SMALL = settings(
    derandomize=True,
    max_examples=25,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
BODIES = [o for o in OPERATIONS if o.body is not None and o.media.endswith("json")]


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    with outside(House(FakeExecutor(context=256), port=0)) as served:
        yield served


@pytest.fixture(scope="module")
def client(house: House) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=house.url) as made:
        yield made


def refs(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for item in value.values():
            yield from refs(item)
    elif isinstance(value, list):
        for item in value:
            yield from refs(item)


def test_every_endpoint_is_in_the_document_and_nothing_else_is(house: House) -> None:
    routed = {
        (method.lower(), route.path_format)
        for route in house.app.router.routes
        if isinstance(route, Route)
        for method in route.methods or ()
        if method != "HEAD" and not route.path.startswith("/assets/")
        if route.path not in ("/", "/favicon.ico")
    }
    said = {(o.method, o.path) for o in OPERATIONS}
    assert routed == said, "OPERATIONS in octavo/server/openapi.py says what there is"


def test_the_document_is_whole(client: httpx.Client) -> None:
    paper = client.get("/openapi.json").json()
    assert paper["openapi"] == "3.1.0"
    asked = paper["components"]["schemas"]["ChatBody"]["properties"]["model"]
    assert asked == {"type": "string", "enum": ["fake"]}
    names = {ref.removeprefix("#/components/schemas/") for ref in refs(paper)}
    assert names <= set(paper["components"]["schemas"])
    ids = [o["operationId"] for methods in paper["paths"].values() for o in methods.values()]
    assert len(ids) == len(set(ids))
    for path, methods in paper["paths"].items():
        for operation in methods.values():
            named = re.findall(r"{(\w+)}", path)
            assert [p["name"] for p in operation.get("parameters", [])] == named
            assert operation["responses"]["200"]["content"]


def test_what_is_only_there_to_be_refused_is_not_promised() -> None:
    schemas = document("0")["components"]["schemas"]
    assert "temperature" in schemas["ChatBody"]["properties"]
    assert "web_search_options" not in schemas["ChatBody"]["properties"]
    assert "image_url" not in schemas["Part"]["properties"]
    assert "additionalProperties" not in schemas["ChatBody"]
    assert document("0", True)["components"]["schemas"]["ChatBody"]["additionalProperties"] is False


def test_a_range_is_said_where_a_field_has_one() -> None:
    schemas = document("0")["components"]["schemas"]
    for name, most in (("ChatBody", 2), ("ResponsesBody", 2), ("MessagesBody", 1)):
        kinds = schemas[name]["properties"]["temperature"]["anyOf"]
        assert {"type": "number", "minimum": 0, "maximum": most} in kinds
    assert "number, 0 to 2" in page(document("0"))


ASKED: list[tuple[str, str, Any, type]] = [
    ("POST", "/v1/chat/completions", chat(logprobs=True), answers.ChatCompletion),
    ("POST", "/v1/completions", completion(logprobs=1), answers.Completion),
    ("POST", "/v1/responses", response(), answers.ResponseObject),
    ("POST", "/v1/embeddings", {"model": "fake", "input": "x"}, answers.Embeddings),
    ("POST", "/v1/messages", message(), answers.AnthropicMessage),
    ("POST", "/v1/messages/count_tokens", message(), answers.TokenCount),
    ("POST", "/tokenize", {"prompt": "hé"}, answers.Tokens),
    ("POST", "/detokenize", {"tokens": [104, 105]}, answers.Text),
    ("GET", "/v1/models", None, answers.ModelList),
    ("GET", "/v1/models/fake", None, answers.Model),
    ("GET", "/health", None, answers.Status),
    ("GET", "/ready", None, answers.Status),
    ("GET", "/load", None, answers.Load),
    ("GET", "/version", None, answers.Version),
    ("POST", "/v1/chat/completions", {"model": "fake"}, answers.Error),
    ("POST", "/v1/messages", {"model": "fake"}, answers.MessagesError),
    ("GET", "/v1/models/other", None, answers.Error),
    ("GET", "/v1/responses/other", None, answers.Error),
]


@pytest.mark.parametrize(("method", "path", "asked", "kind"), ASKED)
def test_answers_are_what_the_document_says(
    client: httpx.Client, method: str, path: str, asked: Any, kind: type
) -> None:
    answer = client.request(method, path, json=asked)
    assert (answer.status_code == 200) is ("Error" not in kind.__name__), answer.text
    msgspec.json.decode(answer.content, type=kind)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
SCALARS: dict[str, st.SearchStrategy[Any]] = {
    "null": st.none(),
    "boolean": st.booleans(),
    "integer": st.integers(-3, 300) | st.integers(),
    "number": st.floats(-3, 3) | st.floats(allow_nan=False, allow_infinity=False),
    "string": st.text(max_size=12),
}


def values(schema: dict[str, Any], schemas: dict[str, Any], depth: int = 0) -> Any:
    """Values of a schema, as far as msgspec writes schemas; deep ones are short of what is optional
    and all are mostly well-formed."""
    if "$ref" in schema:
        return values(schemas[schema["$ref"].rsplit("/", 1)[-1]], schemas, depth + 1)
    if "anyOf" in schema:
        kinds = [kind for kind in schema["anyOf"] if depth < 6 or "$ref" not in str(kind)]
        return st.one_of([values(kind, schemas, depth) for kind in kinds])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    kind = schema.get("type")
    if kind == "array":
        return st.lists(values(schema.get("items", {}), schemas, depth + 1), max_size=3)
    if kind == "object" and "properties" in schema:
        needed = schema.get("required", [])
        made = {
            name: values(inner, schemas, depth + 1)
            for name, inner in schema["properties"].items()
            if name in needed or depth < 6
        }
        rest = {name: inner for name, inner in made.items() if name not in needed}
        return st.fixed_dictionaries({n: made[n] for n in needed}, optional=rest)
    if kind == "object":
        return st.dictionaries(st.text(max_size=5), ANYTHING, max_size=3)
    return SCALARS.get(str(kind), ANYTHING)


def bodies(kind: type) -> st.SearchStrategy[Any]:
    """Bodies by the schema, with some of what is optional, and at times with a field that is
    anything."""
    schemas = document("0")["components"]["schemas"]
    schema = schemas[kind.__name__]
    needed = {n: values(schema["properties"][n], schemas) for n in schema["required"]}
    other = [name for name in schema["properties"] if name not in needed]

    @st.composite
    def body(draw: st.DrawFn) -> dict[str, Any]:
        made = {name: draw(strategy) for name, strategy in needed.items()}
        for name in draw(st.lists(st.sampled_from(other), max_size=5, unique=True)):
            made[name] = draw(values(schema["properties"][name], schemas))
        if draw(st.integers(0, 3)) == 0:
            made[draw(st.sampled_from([*other, *needed, "unheard_of"]))] = draw(ANYTHING)
        return made | {"model": "fake"}

    return body()


@pytest.mark.parametrize("operation", BODIES, ids=lambda o: o.path)
def test_no_body_by_the_schema_or_near_it_is_answered_with_500(
    client: httpx.Client, operation: Any
) -> None:
    allowed = {200, *operation.errors} - {500}
    error = answers.MessagesError if operation.tag == "Anthropic" else answers.Error

    @SMALL
    @given(bodies(operation.body))
    def law(asked: Any) -> None:
        answer = client.post(operation.path, content=json.dumps(asked).encode())
        assert answer.status_code in allowed, (asked, answer.text)
        if answer.status_code != 200:
            msgspec.json.decode(answer.content, type=error)

    law()
    assert client.get("/health").status_code == 200


def test_no_id_is_answered_with_500(client: httpx.Client) -> None:
    @SMALL
    @given(st.text(max_size=30))
    def law(name: str) -> None:
        quoted = quote(name.encode("utf-8", "replace"), safe="")
        for path in ("/v1/responses/", "/v1/models/"):
            assert client.get(path + quoted).status_code < 500
        assert client.get(f"/v1/requests/{quoted}/trace").status_code < 500

    law()


def test_the_page_asks_for_nothing_and_runs_nothing(client: httpx.Client) -> None:
    answer = client.get("/docs")
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")

    class Links(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            assert tag not in ("script", "img", "link", "iframe")
            for name, value in attrs:
                assert not name.startswith("on")
                if name in ("href", "src"):
                    assert value is not None
                    assert value.startswith(("#", "/openapi.json"))

    Links().feed(answer.text)
    for operation in OPERATIONS:
        assert operation.path in answer.text
