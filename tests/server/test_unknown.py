"""What is not there is refused like everything else."""

from __future__ import annotations

import httpx
import pytest

from tests.server.house import House, outside


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("POST", "/v1/no/such/endpoint", 404, "not_found"),
        ("GET", "/nothing", 404, "not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
    ],
)
def test_a_path_or_method_that_is_not_there_has_an_envelope(
    method: str, path: str, status: int, code: str
) -> None:
    with outside(House(port=0)) as house:
        answer = httpx.request(method, house.url + path)
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == code
    assert path in answer.json()["error"]["message"]
