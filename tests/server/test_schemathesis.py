"""Schemathesis reads /openapi.json and asks what it will: no 500, and no answer that the document
does not promise. The endpoints that generate are among them, with few tokens to write."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from octavo.server.openapi import EVENTS, OPERATIONS, Operation, document
from tests.server.fakes import FakeExecutor
from tests.server.house import PATIENCE, House, chat, completion, outside
from tests.server.test_messages import body as message
from tests.server.test_responses import body as response

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
FEW = 4  # tokens to write
ENDLESS = [o for o in OPERATIONS if o.answer == EVENTS]  # a stream that ends when its reader goes
ASKED = [o for o in OPERATIONS if o not in ENDLESS]
ANSWERED = {
    "/v1/chat/completions": chat(max_tokens=FEW),
    "/v1/completions": completion(max_tokens=FEW),
    "/v1/responses": response(max_output_tokens=FEW),
    "/v1/messages": message(max_tokens=FEW),
}


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    kept = str(tmp_path_factory.mktemp("batches"))
    executor = FakeExecutor(context=512)
    with outside(House(executor, port=0, batch_dir=kept, max_n=2, max_prompts=4)) as served:
        yield served


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    with requests.Session() as made:
        yield made


def short(case: Case) -> Case:
    """With few tokens to write, where the body would take a number of them."""
    if isinstance(case.body, dict):
        for name in LIMITS:
            if isinstance(case.body.get(name), int | float):
                case.body[name] = min(case.body[name], FEW)
    return case


@st.composite
def served(draw: st.DrawFn, cases: st.SearchStrategy[Case], base: dict[str, Any]) -> Case:
    """A body that is answered, with a few of the fields of one that Schemathesis made: what a
    schema allows is mostly refused, for reasons that no schema tells."""
    case = draw(cases)
    if isinstance(case.body, dict) and case.body:
        names = draw(st.lists(st.sampled_from(sorted(case.body)), max_size=3, unique=True))
        case.body = base | {name: case.body[name] for name in names}
    return case


def cases(operation: Operation) -> st.SearchStrategy[Case]:
    """Requests by the document, beside it, and near what is answered."""
    schema = schemathesis.openapi.from_dict(document("0", model="fake"))
    found: Any = schema[operation.path][operation.method.upper()]
    good = found.as_strategy(generation_mode=GenerationMode.POSITIVE)
    if operation.body is None and "{" not in operation.path:
        return good
    kinds = [good, found.as_strategy(generation_mode=GenerationMode.NEGATIVE)]
    if operation.path in ANSWERED:
        kinds += [served(good, ANSWERED[operation.path])] * 2
    return st.one_of(kinds).map(short)


@pytest.mark.parametrize("operation", ASKED, ids=lambda o: f"{o.method} {o.path}")
def test_whatever_schemathesis_asks_is_answered_as_the_document_says(
    house: House, session: requests.Session, operation: Operation
) -> None:
    law = settings(
        derandomize=True,
        max_examples=30 if operation.body is not None else 5,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )

    @law
    @given(cases(operation))
    def asked(case: Case) -> None:
        answer = case.call(base_url=house.url, session=session, timeout=PATIENCE)
        case.validate_response(answer, checks=CHECKS)

    asked()
    assert house.idle()
