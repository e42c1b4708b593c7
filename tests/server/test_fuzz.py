"""Whatever a body holds, the answer is never a 5xx and the server goes on."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.server.protocol import ChatBody, CompletionBody
from tests.server.house import House, chat, completion, inside

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
    | st.sampled_from([0, 1, -1, 5, 300, "auto", "user", "text"])
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text("abc01", max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)
fields = st.sampled_from(sorted({*ChatBody.__struct_fields__, *CompletionBody.__struct_fields__}))
bodies = st.dictionaries(fields, values, min_size=1, max_size=3)


@settings(
    derandomize=True,
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(st.lists(bodies, min_size=10, max_size=10))
def test_random_fields_are_honoured_or_refused(drawn: list[dict[str, Any]]) -> None:
    async def main() -> None:
        async with inside(House()) as client:
            jobs = []
            for body in drawn:
                for path, base in (("chat/completions", chat()), ("completions", completion())):
                    whole = base | {"max_tokens": 3} | body
                    data = json.dumps(whole).encode()
                    jobs.append(client.post(f"/v1/{path}", content=data))
            for answer in await asyncio.gather(*jobs):
                assert answer.status_code in (200, 400, 404), answer.text
                if answer.status_code == 400:
                    assert answer.json()["error"]["message"]
            assert (await client.post("/v1/completions", json=completion())).status_code == 200

    asyncio.run(main())
