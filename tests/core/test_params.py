"""`SamplingParams` takes what it means and refuses everything else by name, whatever its type."""

from __future__ import annotations

import dataclasses
from array import array
from typing import Any

import pytest

from octavo.core.request import Forecast, Request, SamplingParams, Slo, Tier, shown
from octavo.errors import InvalidRequest


class Hostile:
    """A value that cannot even be shown."""

    def __repr__(self) -> str:
        raise RuntimeError("no")


STRANGE: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 0.5, 1.5, 10**400, -(10**400), 10**5000, 1e308, 5e-324,
    float("nan"), float("inf"), float("-inf"), 1j, "", "a", "1", b"a", [], {}, (), set(),
    [1], ["a"], {1: 5.0}, {"1": 5.0}, (1,), (-1,), (2**31,), (1.0,), (True,), ("a",), ("",),
    (None,), ((1, 2.0),), ((1, 2),),
    [(1, 2.0)], ([1, 2.0],), ((1,),), ((1, "x"),), ((1, None),),
    ((1, float("nan")),), ((1, 101.0),), ((1, 10**400),), ((1.0, 1.0),), ((True, 1.0),),
    ((1, 1.0, 1.0),), (range(3),), range(3), object(), Hostile(),
)  # fmt: skip


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(SamplingParams)])
def test_any_value_of_any_field_is_taken_or_refused_by_name(name: str) -> None:
    for value in STRANGE:
        refused: InvalidRequest | None = None
        try:
            params = SamplingParams(**{name: value})
        except InvalidRequest as error:
            refused = error
        if refused is not None:
            assert refused.param == name
            assert len(str(refused)) < 300
        else:
            assert getattr(params, name) is value
            hash(params)  # frozen all the way down


def test_text_is_not_taken_for_a_tuple_of_stop_strings() -> None:
    with pytest.raises(InvalidRequest, match="stop must be a tuple"):
        SamplingParams(stop="abc")  # type: ignore[arg-type]


@pytest.mark.parametrize("penalty", [1e-2, 1.0, 100.0])
def test_a_repetition_penalty_cannot_make_a_logit_infinite(penalty: float) -> None:
    assert SamplingParams(repetition_penalty=penalty).repetition_penalty == penalty
    for small in (0.0, 5e-324, 1e-46, 1e-38, 9e-3):
        with pytest.raises(InvalidRequest):
            SamplingParams(repetition_penalty=small)


def test_what_is_shown_is_short() -> None:
    assert shown("x" * 10**6) != "x" * 10**6
    assert all(len(shown(value)) < 200 for value in (*STRANGE, (0,) * 10**6, "x" * 10**6))


def test_a_forecast_changes_nothing_else_of_a_request() -> None:
    """Whatever fields there are: each has a value of its own here, and another default."""
    fields = dataclasses.fields(Request)
    values: dict[str, Any] = {field.name: object() for field in fields}
    values |= {"prompt": array("i", [1]), "slo": Slo(ttft=1.0), "tier": Tier.FLEX}
    asked = Request(**values)
    told = asked.forecast(Forecast(1.0, 0.1))
    for field in fields:
        if field.name != "predicted":
            assert getattr(told, field.name) is values[field.name], field.name
    assert told.predicted == Forecast(1.0, 0.1)
    assert fields[-1].name == "predicted"
