"""The OpenAPI 3.1 document of this server at /openapi.json, and the same to read at /docs.

Bodies come from the very structs that decode them, without the fields that are only there to be
refused; `OPERATIONS` says the rest. An endpoint that is not in it fails a test.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from octavo.server import answers
from octavo.server.batches import BatchBody
from octavo.server.decoding import IGNORED_HEADER, refused_fields
from octavo.server.embeddings import EmbeddingsBody
from octavo.server.files import FileForm
from octavo.server.messages import CountBody, MessagesBody
from octavo.server.protocol import ChatBody, CompletionBody
from octavo.server.responses import ResponsesBody
from octavo.server.service import Service
from octavo.server.tokens import DetokenizeBody, TokenizeBody

EVENTS = "text/event-stream"  # OpenAPI 3.1 has no way to say what one event is
OPENAI, ANTHROPIC, TEXT, LOOK, SELF = "OpenAI", "Anthropic", "Text", "Operation", "Documents"
WORK = (400, 401, 403, 404, 408, 413, 415, 429, 500, 503)
KEPT = (401, 403, 404, 501)
MESSAGES = (400, 401, 403, 404, 408, 413, 415, 429, 500, 529)
WORDS = {
    400: "The request cannot be served as asked; `param` names the field.",
    401: "A key is needed and none fits.",
    403: "Pages of other sites may not use this server.",
    404: "Not here.",
    408: "The body took too long.",
    413: "The body is too large.",
    415: "The body has a content-encoding; send it as it is.",
    429: "This key has its share already; `retry-after` says when to come back.",
    500: "This request failed inside the server.",
    501: "This server keeps no files: it was started without `--batch-dir`.",
    503: "Full, not ready, or the deadlines cannot be met; `retry-after` says when to come back.",
    529: "Full; `retry-after` says when to come back.",
}


@dataclass(frozen=True, slots=True)
class Operation:
    """One endpoint and method. answer: its JSON, or the media type of what is none. media: the
    body's type."""

    method: str
    path: str
    tag: str
    summary: str
    answer: type | str
    body: type[msgspec.Struct] | None = None
    streams: bool = False
    errors: tuple[int, ...] = (401, 403)
    media: str = "application/json"


OPERATIONS: tuple[Operation, ...] = (
    Operation("post", "/v1/chat/completions", OPENAI, "Answer a conversation.",
              answers.ChatCompletion, ChatBody, True, WORK),
    Operation("post", "/v1/completions", OPENAI, "Continue texts.",
              answers.Completion, CompletionBody, True, WORK),
    Operation("post", "/v1/responses", OPENAI, "Answer, and keep the answer to be continued.",
              answers.ResponseObject, ResponsesBody, True, WORK),
    Operation("get", "/v1/responses/{id}", OPENAI, "A response that is kept.",
              answers.ResponseObject, errors=(400, 401, 403, 404)),
    Operation("delete", "/v1/responses/{id}", OPENAI, "Forget a response.",
              answers.ResponseDeleted, errors=(401, 403, 404)),
    Operation("post", "/v1/embeddings", OPENAI, "What the model makes of texts, as vectors.",
              answers.Embeddings, EmbeddingsBody, errors=WORK),
    Operation("post", "/v1/files", OPENAI, "Keep a file of requests.",
              answers.FileObject, FileForm, errors=(*WORK, 501), media="multipart/form-data"),
    Operation("get", "/v1/files", OPENAI, "The files of this key.", answers.FileList,
              errors=(400, 401, 403, 501)),
    Operation("get", "/v1/files/{id}", OPENAI, "A file.", answers.FileObject, errors=KEPT),
    Operation("delete", "/v1/files/{id}", OPENAI, "Delete a file.", answers.FileDeleted,
              errors=KEPT),
    Operation("get", "/v1/files/{id}/content", OPENAI, "What is in a file.",
              "application/octet-stream", errors=KEPT),
    Operation("post", "/v1/batches", OPENAI, "Answer a file of requests when there is time.",
              answers.BatchObject, BatchBody, errors=(*WORK, 501)),
    Operation("get", "/v1/batches", OPENAI, "The batches of this key.", answers.BatchList,
              errors=(400, 401, 403, 501)),
    Operation("get", "/v1/batches/{id}", OPENAI, "A batch.", answers.BatchObject, errors=KEPT),
    Operation("post", "/v1/batches/{id}/cancel", OPENAI, "Stop a batch.", answers.BatchObject,
              errors=KEPT),
    Operation("get", "/v1/models", OPENAI, "The model that is served.", answers.ModelList),
    Operation("get", "/v1/models/{id}", OPENAI, "The model of that name.", answers.Model,
              errors=(401, 403, 404)),
    Operation("post", "/v1/messages", ANTHROPIC, "Answer a conversation.",
              answers.AnthropicMessage, MessagesBody, True, MESSAGES),
    Operation("post", "/v1/messages/count_tokens", ANTHROPIC, "How long a prompt is.",
              answers.TokenCount, CountBody, errors=MESSAGES),
    Operation("post", "/tokenize", TEXT, "Token ids of a prompt or of messages.",
              answers.Tokens, TokenizeBody, errors=WORK),
    Operation("post", "/detokenize", TEXT, "The text of token ids.",
              answers.Text, DetokenizeBody, errors=WORK),
    Operation("get", "/health", LOOK, "Whether the engine lives.", answers.Status, errors=(503,)),
    Operation("get", "/ready", LOOK, "Whether requests may be sent here.", answers.Status,
              errors=(503,)),
    Operation("get", "/load", LOOK, "How busy the server is.", answers.Load),
    Operation("get", "/version", LOOK, "The version of this server.", answers.Version),
    Operation("get", "/metrics", LOOK, "Metrics, as Prometheus reads them.", "text/plain"),
    Operation("get", "/v1/requests/{id}/trace", LOOK, "Why a request took as long as it did.",
              dict, errors=(401, 403, 404)),
    Operation("get", "/v1/engine/live", LOOK, "The engine as it works, as events.",
              EVENTS, errors=(401, 403, 503)),
    Operation("get", "/openapi.json", SELF, "This document.", dict),
    Operation("get", "/docs", SELF, "This document, to read.", "text/html"),
)  # fmt: skip


def routes(service: Service) -> list[Route]:
    paper = Paper(service.served.version, service.limits.strict, service.served.name)
    return [
        Route("/openapi.json", paper.json, methods=["GET"]),
        Route("/docs", paper.html, methods=["GET"]),
    ]


class Paper:
    """The document, made when it is first asked for."""

    def __init__(self, version: str, strict: bool, model: str) -> None:
        self._version = version
        self._strict = strict
        self._model = model

    async def json(self, request: Request) -> Response:
        return Response(self._json, media_type="application/json")

    async def html(self, request: Request) -> Response:
        digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
        policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'"
        headers = {"content-security-policy": policy, "x-content-type-options": "nosniff"}
        return Response(self._html, headers=headers, media_type="text/html; charset=utf-8")

    @cached_property
    def _json(self) -> bytes:
        return msgspec.json.encode(document(self._version, self._strict, self._model))

    @cached_property
    def _html(self) -> bytes:
        return page(document(self._version, self._strict, self._model)).encode()


def document(version: str, strict: bool = False, model: str = "") -> dict[str, Any]:
    """The OpenAPI 3.1 document. strict: unknown fields are refused; model: that is served."""
    paths: dict[str, Any] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation)
    bearer = {"type": "http", "scheme": "bearer"}
    anthropic = {"type": "apiKey", "in": "header", "name": "x-api-key"}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Octavo",
            "version": version,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            "description": "Fields that nobody here knows, and what is asked for beside the "
            "answer, are " + ("refused." if strict else f"named in `{IGNORED_HEADER.decode()}`."),
        },
        "paths": paths,
        "components": {
            "schemas": _schemas(strict, model),
            "securitySchemes": {"bearer": bearer, "anthropic": anthropic},
        },
        "security": [{"bearer": []}, {"anthropic": []}, {}],
    }


def _operation(operation: Operation) -> dict[str, Any]:
    made: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": operation.method + operation.path.translate(_PLAIN),
        "tags": [operation.tag],
        "responses": _responses(operation),
    }
    if "{id}" in operation.path:
        text = {"type": "string", "minLength": 1}
        made["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": text}]
    if operation.body is not None:
        content = {operation.media: {"schema": _ref(operation.body)}}
        made["requestBody"] = {"required": True, "content": content}
    return made


_PLAIN = str.maketrans({"/": "_", "{": "", "}": "", ".": "_"})


def _responses(operation: Operation) -> dict[str, Any]:
    if isinstance(operation.answer, str):
        text = {"schema": {"type": "string"}}
        content: dict[str, Any] = {operation.answer: {} if operation.answer == EVENTS else text}
    elif operation.answer is dict:
        content = {"application/json": {"schema": {"type": "object"}}}
    else:
        content = {"application/json": {"schema": _ref(operation.answer)}}
    if operation.streams:
        content[EVENTS] = {}
    ours = operation.tag == ANTHROPIC
    error = {"application/json": {"schema": _ref(answers.MessagesError if ours else answers.Error)}}
    if operation.path in ("/health", "/ready"):
        error = content
    found: dict[str, Any] = {"200": {"description": "The answer.", "content": content}}
    for status in operation.errors:
        found[str(status)] = {"description": WORDS[status], "content": error}
    return found


def _ref(cls: type) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{cls.__name__}"}


def _structs() -> list[type]:
    answered = [o.answer for o in OPERATIONS if isinstance(o.answer, type) and o.answer is not dict]
    bodies = [o.body for o in OPERATIONS if o.body is not None]
    return [answers.Error, answers.MessagesError, *answered, *bodies]


def _schemas(strict: bool, model: str) -> dict[str, Any]:
    """All structs by name; without the fields that are only there to be refused."""
    _, found = msgspec.json.schema_components(
        _structs(), ref_template="#/components/schemas/{name}"
    )
    schemas: dict[str, Any] = found
    for name, refused in refused_fields().items():
        for field in refused:
            schemas.get(name, {}).get("properties", {}).pop(field, None)
    for schema in schemas.values():
        if not strict:
            schema.pop("additionalProperties", None)
    for operation in OPERATIONS:
        fields = schemas[operation.body.__name__]["properties"] if operation.body else {}
        if model and fields.get("model") == {"type": "string"}:
            fields["model"] = {"type": "string", "enum": [model]}
    return schemas


STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;
color:#1d2128;background:#fdfdfc}h2{margin:2rem 0 .5rem;font-size:1.1rem}
code,td:first-child{font-family:ui-monospace,monospace;font-size:.9em}
details{border:1px solid #d5d8dc;border-radius:6px;margin:.4rem 0;padding:.5rem .8rem}
summary{cursor:pointer}b{display:inline-block;min-width:4.2em;font-size:.8em}
table{border-collapse:collapse;width:100%;margin:.5rem 0}td:first-child{width:16rem}
td{border-top:1px solid #e4e6e9;padding:.25rem .5rem;vertical-align:top}
@media(prefers-color-scheme:dark){body{color:#dfe3e8;background:#15181c}a{color:#8ab4f8}
details,td{border-color:#363c44}}
"""


def page(document: dict[str, Any]) -> str:
    """The document as one page without scripts or requests."""
    schemas = document["components"]["schemas"]
    sections: dict[str, list[str]] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            sections.setdefault(operation["tags"][0], []).append(
                _entry(f"<b>{method.upper()}</b> <code>{escape(path)}</code>", operation, schemas)
            )
    named = [_table(name, schema) for name, schema in sorted(schemas.items())]
    body = "".join(f"<h2>{escape(tag)}</h2>{''.join(all)}" for tag, all in sections.items())
    info = document["info"]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>Octavo: API</title><style>{STYLE}</style></head><body>"
        f"<h1>Octavo {escape(info['version'])}</h1><p>{_prose(info['description'])} "
        "Starred fields are needed; any other may be left out or null. "
        'For machines: <a href="/openapi.json">/openapi.json</a>.</p>'
        f"{body}<h2>Objects</h2>{''.join(named)}</body></html>"
    )


def _entry(head: str, operation: dict[str, Any], schemas: dict[str, Any]) -> str:
    body = operation.get("requestBody", {}).get("content", {}).get("application/json")
    rows = _rows(schemas[_name(body["schema"])]) if body else ""
    said_of = "<tr><td>{}</td><td>{} {}</td></tr>".format
    answers = [
        said_of(status, _prose(said["description"]), _links(said["content"]))
        for status, said in operation["responses"].items()
    ]
    return (
        f"<details><summary>{head} {_prose(operation['summary'])}</summary>"
        f"<table>{rows}</table><table>{''.join(answers)}</table></details>"
    )


def _table(name: str, schema: dict[str, Any]) -> str:
    return (
        f'<details id="{escape(name)}"><summary><code>{escape(name)}</code> '
        f"{_prose(schema.get('description', ''))}</summary><table>{_rows(schema)}</table></details>"
    )


def _rows(schema: dict[str, Any]) -> str:
    fields, needed = schema.get("properties", {}), schema.get("required", ())
    names = [*needed, *(name for name in fields if name not in needed)]
    return "".join(
        f"<tr><td>{escape(name)}{' *' if name in needed else ''}</td>"
        f"<td>{_type(fields[name])}</td></tr>"
        for name in names
    )


def _type(schema: dict[str, Any]) -> str:
    """A schema in a few words."""
    if "$ref" in schema:
        name = escape(_name(schema))
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        kinds = [kind for kind in schema["anyOf"] if kind != {"type": "null"}]
        return " or ".join(map(_type, kinds))
    if "enum" in schema:
        return " or ".join(f"<code>{escape(repr(value))}</code>" for value in schema["enum"])
    kind = escape(str(schema.get("type", "any")))
    if kind == "array":
        return f"list of {_type(schema.get('items', {}))}"
    if "maximum" in schema:
        return f"{kind}, {schema.get('minimum', 0):g} to {schema['maximum']:g}"
    return kind


def _links(content: dict[str, Any]) -> str:
    found = [_type(item["schema"]) for kind, item in content.items() if kind.endswith("json")]
    return ", ".join(found)


def _name(schema: dict[str, Any]) -> str:
    return str(schema["$ref"]).rsplit("/", 1)[-1]


def _prose(text: str) -> str:
    """Escaped, with `words` as code."""
    parts = escape(text).split("`")
    return "".join(f"<code>{p}</code>" if i % 2 else p for i, p in enumerate(parts))
