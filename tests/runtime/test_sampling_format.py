"""The sampler's flat format: what is written is what was asked, and what comes back is unpacked."""

import struct
import timeit
from array import array

import pytest

from octavo.core.batch import Batch, Row, RowResult, SampleSpec, Want
from octavo.core.request import SamplingParams, TokenLogprob
from octavo.errors import InvalidRequest
from octavo.runtime import sampling
from octavo.runtime.sampling import OUT_BYTES, ROW_BYTES, decode, encode, validate

FIELDS = (
    "temperature top_p min_p typical_p repetition presence frequency top_k num_logprobs _ "
    "seed choice position target target_top history_at num_history num_prompt bias_at num_bias "
    "allowed_at num_allowed banned_at num_banned suppress_at num_suppress mask_at mask_bytes"
).split()


def batch(*wants: Want) -> Batch:
    rows = [Row(7 + i, 0, array("i", [1]), array("i"), (want,)) for i, want in enumerate(wants)]
    return Batch(0, tuple(rows))


def unpack(rows: bytes, index: int = 0) -> dict[str, float]:
    values = struct.unpack_from("<7f3iQ17i", rows, index * ROW_BYTES)
    return dict(zip(FIELDS, values, strict=True))


def test_a_plain_want_carries_its_parameters_and_key() -> None:
    params = SamplingParams(temperature=0.5, top_k=40, top_p=0.75, min_p=0.25, logprobs=3)
    rows, data = encode(batch(Want(1233, SampleSpec(params, 2**64 - 2, 5))))
    got = unpack(rows)
    assert len(rows) == ROW_BYTES
    assert data == b""
    assert (got["temperature"], got["top_k"], got["top_p"], got["min_p"]) == (0.5, 40, 0.75, 0.25)
    assert (got["typical_p"], got["repetition"], got["presence"], got["frequency"]) == (1, 1, 0, 0)
    assert (got["num_logprobs"], got["target"]) == (3, -1)
    assert (got["seed"], got["choice"], got["position"]) == (2**64 - 2, 5, 1234)


def test_a_negative_seed_is_taken_modulo_two_to_the_64() -> None:
    rows, _ = encode(batch(Want(0, SampleSpec(SamplingParams(), -1, 0))))
    assert unpack(rows)["seed"] == 2**64 - 1


def test_lists_lie_where_the_record_says() -> None:
    params = SamplingParams(
        logit_bias=((4, 0.5), (9, -2.0)), allowed_token_ids=(4, 9, 11), banned_token_ids=(11,)
    )
    history = array("i", [1, 2, 3, 2])
    spec = SampleSpec(params, 1, 0, history=history, num_prompt=3, suppress=(2, 9))
    first = Want(0, SampleSpec(params, 1, 0), mask=b"\x01\x02\x03\x04\x05")
    rows, data = encode(batch(first, Want(0, spec)))
    words = array("i")
    words.frombytes(data)
    got = unpack(rows, 1)

    def ids(name: str) -> list[int]:
        return words[got[f"{name}_at"] :][: got[f"num_{name}"]].tolist()

    assert ids("history") == [1, 2, 3, 2]
    assert got["num_prompt"] == 3
    assert ids("bias") == [4, 9]
    assert struct.unpack_from("<2f", data, 4 * (got["bias_at"] + 2)) == (0.5, -2.0)
    assert ids("allowed") == [4, 9, 11]
    assert ids("banned") == [11]
    assert ids("suppress") == [2, 9]
    assert got["mask_bytes"] == 0
    masked = unpack(rows, 0)
    assert masked["mask_bytes"] == 5
    assert data[4 * masked["mask_at"] :][:8] == b"\x01\x02\x03\x04\x05\0\0\0"


def test_an_empty_mask_is_not_an_absent_one() -> None:
    rows, _ = encode(batch(Want(0, SampleSpec(SamplingParams(), 1, 0), mask=b"")))
    assert unpack(rows)["mask_bytes"] == 1


def test_scoring_chooses_nothing() -> None:
    rows, _ = encode(batch(Want(0, target=17, top=4)))
    got = unpack(rows)
    assert got["temperature"] < 0
    assert (got["target"], got["target_top"], got["num_logprobs"]) == (17, 4, -1)


def out(error: int, detail: int, token: int, logprob: float, score: float, top: dict) -> bytes:
    ids = list(top) + [0] * (20 - len(top))
    values = list(top.values()) + [0.0] * (20 - len(top))
    head = (error, detail, token, logprob, score, len(top))
    record = struct.pack("<3i2fi20i20f", *head, *ids, *values)
    assert len(record) == OUT_BYTES
    return record


def test_results_go_to_their_rows() -> None:
    spec = SampleSpec(SamplingParams(), 1, 0)
    told = SampleSpec(SamplingParams(logprobs=1), 1, 0)
    rows = (
        Row(1, 0, array("i", [1]), array("i"), (Want(0, spec), Want(1, spec))),
        Row(2, 0, array("i", [1]), array("i"), ()),
        Row(3, 0, array("i", [1]), array("i"), (Want(0, told), Want(1, told, target=6, top=2))),
        Row(4, 0, array("i", [1]), array("i"), (Want(0, spec),)),
    )
    top = {5: -0.5, 6: -1.5}
    records = [
        out(0, 0, 10, 0, 0, {}),
        out(0, 0, 11, 0, 0, {}),
        out(0, 0, 12, -2.0, 0, {5: -0.5}),
        out(0, 0, 13, -3.0, -1.5, top),
        out(1, 99, 0, 0, 0, {}),
    ]
    got = decode(Batch(0, rows), b"".join(records))
    assert got[1] == RowResult((10, 11))
    assert got[2] == RowResult()
    assert got[3].tokens == (12, 13)
    assert got[3].logprobs[0] == TokenLogprob(12, -2.0, ((5, -0.5),))
    assert got[3].logprobs[1] == TokenLogprob(13, -3.0, ((5, -0.5),))
    assert got[3].scores == (TokenLogprob(6, -1.5, tuple(top.items())),)
    assert got[4].error is not None
    assert "99" in got[4].error


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (SamplingParams(logit_bias=((1, 0.0), (50, 1.0))), "logit_bias"),
        (SamplingParams(banned_token_ids=(50,)), "banned_token_ids"),
        (SamplingParams(allowed_token_ids=(3, 2**31 - 1)), "allowed_token_ids"),
        (SamplingParams(stop_token_ids=(51,)), "stop_token_ids"),
        (SamplingParams(banned_token_ids=tuple(range(50))), "banned_token_ids"),
        (SamplingParams(allowed_token_ids=(3,), banned_token_ids=(3, 4)), "banned_token_ids"),
        (SamplingParams(allowed_token_ids=(3,) * 51), "allowed_token_ids"),
        (SamplingParams(banned_token_ids=(3,) * 51), "banned_token_ids"),
        (SamplingParams(stop_token_ids=(3,) * 51), "stop_token_ids"),
        (SamplingParams(logit_bias=((3, 1.0),) * 51), "logit_bias"),
        (SamplingParams(allowed_token_ids=(3,), stop_token_ids=(3,), min_tokens=1), "min_tokens"),
        (SamplingParams(stop_token_ids=tuple(range(50)), min_tokens=1), "min_tokens"),
        (
            SamplingParams(
                banned_token_ids=tuple(range(25)),
                stop_token_ids=tuple(range(25, 50)),
                min_tokens=1,
            ),
            "min_tokens",
        ),
    ],
)
def test_ids_beyond_the_vocabulary_are_refused_by_name(params: SamplingParams, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        validate(params, 50)
    assert caught.value.param == field


def test_ids_of_the_vocabulary_pass() -> None:
    validate(SamplingParams(logit_bias=((49, 1.0),), banned_token_ids=(0,)), 50)
    validate(SamplingParams(allowed_token_ids=(3, 4), banned_token_ids=(3,)), 50)


def test_the_models_own_end_counts_where_it_is_forbidden() -> None:
    params = SamplingParams(allowed_token_ids=(3, 4), stop_token_ids=(4,), min_tokens=1)
    validate(params, 50)
    with pytest.raises(InvalidRequest):
        validate(params, 50, frozenset((3,)))
    validate(SamplingParams(allowed_token_ids=(3, 4), stop_token_ids=(4, 3)), 50, frozenset((3,)))


def test_what_is_kept_of_params_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long lists of ids of requests that ended must not fill the memory."""
    monkeypatch.setattr(sampling, "_CACHE_WORDS", 1000)
    monkeypatch.setattr(sampling, "_CACHE_LIMIT", 50)
    cache = sampling._Cache()
    monkeypatch.setattr(sampling, "_prepared", cache)
    for length in (0, 400, 0, 999, 5000, 0, *range(100)):
        params = SamplingParams(allowed_token_ids=tuple(range(length)) or None)
        want = Want(0, SampleSpec(params, 1, 0))
        assert encode(batch(want)) == encode(batch(want))
        assert len(cache) <= 50
        assert sum(len(kept.allowed) for kept in cache.values()) <= 4 * max(1000, length)


def test_a_plain_want_is_encoded_in_little_time() -> None:
    params = SamplingParams(temperature=0.7, top_p=0.9)
    many = batch(*[Want(i, SampleSpec(params, 1, 0)) for i in range(64)])
    seconds = min(timeit.repeat(lambda: encode(many), number=20, repeat=5)) / 20 / 64
    assert seconds < 10e-6  # 0.3 us measured; the bound is loose because tests share the machine
