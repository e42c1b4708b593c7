"""The C++ sampler against independent oracles: transformers' processors, torch and numpy."""

import math
from array import array

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as hf

from octavo.core.batch import Batch, Row, RowResult, SampleSpec, Want
from octavo.core.request import SamplingParams, TokenLogprob
from octavo.kernels import _cpu
from octavo.runtime.sampling import decode, encode

ISAS = _cpu.isas()
isas = pytest.mark.parametrize("isa", ISAS)


def run(logits: np.ndarray, wants: list[Want], isa: str = "auto") -> list[RowResult]:
    """Each want on its own row of logits [S, V], or all on one."""
    logits = np.ascontiguousarray(np.broadcast_to(logits, (len(wants), logits.shape[-1])))
    rows = [Row(i, 0, array("i", [0]), array("i"), (want,)) for i, want in enumerate(wants)]
    batch = Batch(0, tuple(rows))
    results = decode(batch, _cpu.sample(logits, *encode(batch), isa))
    return [results[i] for i in range(len(wants))]


def spec(params: SamplingParams, seed: int = 11, **kw: object) -> SampleSpec:
    return SampleSpec(params, seed, 0, **kw)  # type: ignore[arg-type]


def sample(
    logits: np.ndarray, params: SamplingParams, isa: str = "auto", **kw: object
) -> RowResult:
    return run(logits, [Want(2, spec(params, **kw))], isa)[0]


def distribution(logits: np.ndarray, want: Want, isa: str = "auto") -> np.ndarray:
    batch = Batch(0, (Row(0, 0, array("i", [0]), array("i"), (want,)),))
    row, data = encode(batch)
    return np.frombuffer(_cpu.sample_probabilities(logits[None], row, data, isa), np.float32)


def gaussian(vocab: int, seed: int, scale: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(vocab) * scale).astype(np.float32)


# --- Philox ---------------------------------------------------------------------------------------


@isas
def test_philox_gives_the_published_vectors(isa: str) -> None:
    """Random123's kat_vectors, philox4x32 with 10 rounds: counter, key, answer."""
    ones = 0xFFFFFFFF
    assert _cpu.philox((0, 0, 0, 0), (0, 0), isa) == [
        0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8,
    ]  # fmt: skip
    assert _cpu.philox((ones,) * 4, (ones,) * 2, isa) == [
        0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD,
    ]  # fmt: skip
    counter, key = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
    assert _cpu.philox(counter, key, isa) == [
        0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1,
    ]  # fmt: skip


# --- Transformations, against transformers' processors and plain numpy ----------------------------


class Oracle:
    """Float64 logits through the documented order of transformations."""

    def __init__(self, logits: np.ndarray) -> None:
        self.z = torch.tensor(logits, dtype=torch.float64)[None]
        self.raw = self.z.clone()

    def penalties(self, p: SamplingParams, history: list[int], num_prompt: int) -> None:
        if not history:
            return
        ids = torch.tensor([history])
        if p.repetition_penalty != 1:
            self.z = hf.RepetitionPenaltyLogitsProcessor(p.repetition_penalty)(ids, self.z)
        counts = torch.bincount(
            torch.tensor(history[num_prompt:], dtype=torch.int64), minlength=self.z.shape[1]
        )
        self.z = self.z - p.frequency_penalty * counts - p.presence_penalty * (counts > 0)

    def bias_and_masks(self, p: SamplingParams, suppress: tuple[int, ...], mask: bytes) -> None:
        for token, bias in p.logit_bias:
            self.z[0, token] += bias
        if p.allowed_token_ids is not None:
            off = torch.ones(self.z.shape[1], dtype=torch.bool)
            off[list(p.allowed_token_ids)] = False
            self.z[0, off] = -math.inf
        if mask:
            bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
            self.z[0, torch.tensor(bits[: self.z.shape[1]] == 0)] = -math.inf
        self.z[0, [*p.banned_token_ids, *suppress]] = -math.inf

    def truncate(self, p: SamplingParams) -> None:
        ids = torch.zeros((1, 0), dtype=torch.int64)
        warpers = [hf.TemperatureLogitsWarper(float(np.float32(p.temperature)))]
        if p.top_k:
            warpers.append(hf.TopKLogitsWarper(p.top_k))
        if p.typical_p < 1:
            warpers.append(hf.TypicalLogitsWarper(float(np.float32(p.typical_p))))
        if p.top_p < 1:
            warpers.append(hf.TopPLogitsWarper(float(np.float32(p.top_p))))
        if p.min_p > 0:
            warpers.append(hf.MinPLogitsWarper(float(np.float32(p.min_p))))
        for warper in warpers:
            self.z = warper(ids, self.z)

    def probabilities(self) -> np.ndarray:
        return torch.softmax(self.z[0], 0).numpy()


def expected(
    logits: np.ndarray,
    params: SamplingParams,
    history: list[int] | None = None,
    num_prompt: int = 0,
    suppress: tuple[int, ...] = (),
    mask: bytes = b"",
) -> np.ndarray:
    oracle = Oracle(logits)
    oracle.penalties(params, history or [], num_prompt)
    oracle.bias_and_masks(params, suppress, mask)
    oracle.truncate(params)
    return oracle.probabilities()


def agree(got: np.ndarray, want: np.ndarray) -> None:
    """Same kept set, same probabilities. Where a threshold falls within rounding of a token, that
    one token may go either way. Below 1e-30 float32 runs out of exponents, not we of tokens."""
    got, want = (np.where(p < 1e-30, 0, p) for p in (got, want))
    differ = np.flatnonzero((got > 0) != (want > 0))
    assert len(differ) <= 1, (len(differ), (got > 0).sum(), (want > 0).sum())
    assert len(differ) == 0 or max(got[differ[0]], want[differ[0]]) < 1e-3
    slack = 1e-6 if len(differ) == 0 else 2e-3
    np.testing.assert_allclose(got, want, rtol=2e-5 + slack, atol=1e-9 + slack * len(differ))


TRUNCATIONS = [
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 50},
    {"top_k": 700},
    {"top_k": 2999},
    {"top_k": 100_000},
    {"top_p": 0.9},
    {"top_p": 0.01},
    {"top_p": 0.999},
    {"top_p": 0.5, "temperature": 3.0},
    {"top_p": 0.95, "min_p": 0.02},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"typical_p": 0.9},
    {"typical_p": 0.2},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.1, "temperature": 0.7},
    {"typical_p": 0.5, "top_p": 0.7, "min_p": 0.2},
    {"top_k": 100, "typical_p": 0.6},
]


@isas
@pytest.mark.parametrize("vocab", [1, 17, 300, 3000, 50257])
def test_each_truncation_keeps_what_transformers_keeps(vocab: int, isa: str) -> None:
    for i, fields in enumerate(TRUNCATIONS):
        if vocab == 50257 and isa != ISAS[0] and i % 3:
            continue
        for scale in (1.0, 4.0):
            logits = gaussian(vocab, i, scale)
            params = SamplingParams(**fields)
            if 0 < params.top_k >= vocab:
                params = SamplingParams(**{**fields, "top_k": 0})
            got = distribution(logits, Want(2, spec(SamplingParams(**fields))), isa)
            agree(got, expected(logits, params))


def random_case(rng: np.random.Generator, vocab: int) -> tuple[SamplingParams, dict, bytes]:
    def maybe(value: object, off: object) -> object:
        return value if rng.random() < 0.4 else off

    def some(count: int) -> tuple[int, ...]:
        return tuple(rng.choice(vocab, count, replace=False).tolist())

    params = SamplingParams(
        temperature=float(rng.uniform(0.2, 2)),
        top_k=maybe(int(rng.integers(1, vocab)), 0),
        top_p=maybe(float(rng.uniform(0.05, 0.99)), 1.0),
        min_p=maybe(float(rng.uniform(0.001, 0.5)), 0.0),
        typical_p=maybe(float(rng.uniform(0.1, 0.99)), 1.0),
        repetition_penalty=maybe(float(rng.uniform(0.8, 1.8)), 1.0),
        presence_penalty=maybe(float(rng.uniform(-2, 2)), 0.0),
        frequency_penalty=maybe(float(rng.uniform(-2, 2)), 0.0),
        logit_bias=maybe(tuple(zip(some(5), rng.uniform(-9, 9, 5).tolist(), strict=True)), ()),
        allowed_token_ids=maybe(some(vocab // 2), None),
        banned_token_ids=maybe(some(9), ()),
    )
    num_prompt = int(rng.integers(0, 20))
    history = array("i", rng.integers(0, vocab, 40).tolist())
    rest = {"history": history, "num_prompt": num_prompt, "suppress": maybe(some(2), ())}
    mask = rng.integers(0, 256, (vocab + 7) // 8, dtype=np.uint8).tobytes()
    return params, rest, maybe(mask, b"")


@isas
def test_random_combinations_agree_with_transformers(isa: str) -> None:
    rng = np.random.default_rng(2026)
    for i in range(150):
        vocab = int(rng.integers(50, 2000))
        params, rest, mask = random_case(rng, vocab)
        logits = gaussian(vocab, i, float(rng.uniform(0.5, 5)))
        want = expected(
            logits, params, rest["history"].tolist(), rest["num_prompt"], rest["suppress"], mask
        )
        if np.isnan(want).any():
            continue
        agree(distribution(logits, Want(2, spec(params, **rest), mask=mask or None), isa), want)


@isas
@pytest.mark.parametrize(
    ("fields", "history"),
    [
        ({"repetition_penalty": 1.3}, True),
        ({"presence_penalty": 0.7}, True),
        ({"frequency_penalty": -0.4}, True),
        ({"logit_bias": ((3, 5.0), (7, -100.0))}, False),
        ({"allowed_token_ids": (2, 3, 299)}, False),
        ({"banned_token_ids": (0, 1)}, False),
    ],
)
def test_each_adjustment_alone(isa: str, fields: dict, history: bool) -> None:
    logits = gaussian(300, 1)
    past = [5, 9, 5, 17, 299, 9, 9, 0]
    params = SamplingParams(**fields)
    rest = {"history": array("i", past), "num_prompt": 3} if history else {}
    want = expected(logits, params, past if history else None, 3)
    agree(distribution(logits, Want(2, spec(params, **rest)), isa), want)
    greedy = sample(logits[None], SamplingParams(temperature=0, **fields), isa, **rest)
    assert greedy.tokens[0] == int(
        np.argmax(expected(logits, params, past if history else None, 3))
    )


@isas
@pytest.mark.parametrize(
    "fields",
    [{}, {"top_k": 700}, {"top_p": 0.9}, {"min_p": 0.02}, {"top_p": 0.95, "min_p": 0.005}],
)
def test_a_token_is_the_inverse_cdf_at_the_keyed_uniform(fields: dict, isa: str) -> None:
    """The documented rule, in numpy: u from (seed, choice, position), ids in rising order."""
    logits, params = gaussian(5000, 5, 1.0), SamplingParams(**fields)
    cdf = np.cumsum(expected(logits, params))
    for i in range(100):
        seed, choice, position = 0x123456789ABCDEF0 + i, i % 7, 1000 + i
        words = _cpu.philox((position, choice, 0, 0), (seed & 0xFFFFFFFF, seed >> 32))
        u = ((words[1] << 32 | words[0]) >> 11) * 2.0**-53
        want = Want(position - 1, SampleSpec(params, seed, choice))
        token = run(logits[None], [want], isa)[0].tokens[0]
        assert cdf[token] > u - 1e-6
        assert token == 0 or cdf[token - 1] <= u + 1e-6


# --- Frequencies ----------------------------------------------------------------------------------


@isas
@pytest.mark.parametrize(
    "fields", [{}, {"temperature": 0.6}, {"top_k": 12}, {"top_p": 0.8}, {"min_p": 0.1}]
)
def test_frequencies_pass_chi_square(fields: dict, isa: str) -> None:
    logits, draws = gaussian(40, 8, 1.2), 6000
    params = SamplingParams(**fields)
    p = expected(logits, params)
    wants = [Want(i, spec(params, seed=99)) for i in range(draws)]
    tokens = [r.tokens[0] for r in run(logits[None], wants, isa)]
    seen = np.bincount(tokens, minlength=40)
    assert seen[p == 0].sum() == 0
    kept = p * draws >= 5
    rare = ~kept & (p > 0)
    observed = np.append(seen[kept], seen[rare].sum())
    mean = np.append(p[kept], p[rare].sum()) * draws
    observed, mean = observed[mean > 0], mean[mean > 0]
    chi2, free = (((observed - mean) ** 2) / mean).sum(), len(mean) - 1
    # Wilson and Hilferty: the cube root of chi2 / free is nearly normal.
    score = ((chi2 / free) ** (1 / 3) - (1 - 2 / (9 * free))) / math.sqrt(2 / (9 * free))
    assert abs(score) < 4, (chi2, free)


def test_choices_and_seeds_and_positions_draw_apart() -> None:
    logits = np.zeros((1, 4096), np.float32)
    keys = [(s, c, p) for s in range(4) for c in range(4) for p in range(4)]
    wants = [Want(p, SampleSpec(SamplingParams(), s, c)) for s, c, p in keys]
    assert len({r.tokens for r in run(logits, wants)}) > 60


# --- Greedy, ties, extremes -----------------------------------------------------------------------


@isas
@pytest.mark.parametrize("vocab", [1, 2, 15, 16, 17, 255, 256, 257, 1000, 49152])
def test_greedy_is_the_lowest_of_the_highest(vocab: int, isa: str) -> None:
    rng = np.random.default_rng(vocab)
    logits = rng.integers(-3, 4, (8, vocab)).astype(np.float32)
    logits[0] = 0
    logits[1] = -5
    logits[1, -1] = -4
    wants = [Want(2, spec(SamplingParams(temperature=0)))] * 8
    tokens = [r.tokens[0] for r in run(logits, wants, isa)]
    assert tokens == np.argmax(logits, axis=1).tolist()


@isas
def test_among_equals_the_lowest_ids_are_kept(isa: str) -> None:
    logits = np.zeros(1000, np.float32)
    logits[::2] = -0.0
    for vocab_part, fields in [(7, {"top_k": 7}), (10, {"top_p": 0.01}), (700, {"top_k": 700})]:
        got = distribution(logits, Want(2, spec(SamplingParams(**fields))), isa)
        assert np.flatnonzero(got).tolist() == list(range(vocab_part))
    for fields in ({"typical_p": 0.3}, {"min_p": 0.5}):
        assert (distribution(logits, Want(2, spec(SamplingParams(**fields))), isa) > 0).all()


@isas
@pytest.mark.parametrize("vocab", [900, 20_000])
@pytest.mark.parametrize("fields", [{"top_p": 0.9}, {"top_p": 0.6, "top_k": 800}])
def test_a_nucleus_cuts_through_equals_by_id(vocab: int, fields: dict, isa: str) -> None:
    logits = np.round(gaussian(vocab, 1, 1.0))
    got = distribution(logits, Want(2, spec(SamplingParams(**fields))), isa)
    order = np.lexsort((np.arange(vocab), -logits))[: fields.get("top_k", vocab)]
    mass = np.cumsum(np.exp(logits[order].astype(np.float64)))
    count = int(np.searchsorted(mass, fields["top_p"] * mass[-1])) + 1
    kept = int((got > 0).sum())
    assert abs(kept - count) <= 1  # a token's mass is near the rounding of the whole
    assert (got[order[:kept]] > 0).all()


@isas
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("value", "words"), [(math.nan, "NaN"), (-math.nan, "NaN"), (math.inf, "infinite")]
)
def test_broken_logits_fail_their_row_alone(
    value: float, words: str, temperature: float, isa: str
) -> None:
    logits = np.stack([gaussian(777, i) for i in range(3)])
    params = SamplingParams(temperature=temperature, top_p=0.9, logprobs=2)
    wants = [Want(i, spec(params)) for i in range(3)]
    sound = run(logits, wants, isa)
    for at in (0, 300, 776):
        broken = logits.copy()
        broken[1, at] = value
        got = run(broken, wants, isa)
        assert (got[0], got[2]) == (sound[0], sound[2])
        assert got[1].error is not None
        assert words in got[1].error
        assert str(at) in got[1].error


@isas
def test_minus_infinity_is_only_impossible(isa: str) -> None:
    logits = np.full(600, -np.inf, np.float32)
    logits[[5, 599]] = (1.0, 2.0)
    for fields in ({}, {"top_k": 9}, {"top_p": 0.999}, {"typical_p": 0.99}, {"min_p": 0.01}):
        got = distribution(logits, Want(2, spec(SamplingParams(**fields))), isa)
        np.testing.assert_allclose(got[[5, 599]], [1 / (1 + math.e), math.e / (1 + math.e)], 1e-6)
    result = sample(logits[None], SamplingParams(temperature=0, logprobs=20), isa)
    assert result.tokens == (599,)
    assert [token for token, _ in result.logprobs[0].top] == [599, 5]


@isas
def test_extreme_magnitudes_and_temperatures(isa: str) -> None:
    logits = np.array([3e38, -3e38, 2.9e38, 0, -1e30], np.float32)
    for t in (1e-45, 1e-30, 0.01, 1.0, 100.0):
        for fields in ({}, {"top_k": 2}, {"top_p": 0.5}, {"typical_p": 0.5}, {"min_p": 0.5}):
            got = distribution(logits, Want(2, spec(SamplingParams(temperature=t, **fields))), isa)
            assert got.tolist() == [1, 0, 0, 0, 0]
    tiny = np.array([0, 1e-40, 2e-40], np.float32)
    got = distribution(tiny, Want(2, spec(SamplingParams())), isa)
    np.testing.assert_allclose(got, [1 / 3] * 3, rtol=1e-6)


@isas
def test_nothing_left_to_choose_is_an_error(isa: str) -> None:
    logits = gaussian(100, 3)[None]
    everything = SamplingParams(allowed_token_ids=(4,))
    for want in (
        Want(2, spec(everything, suppress=(4,))),
        Want(2, spec(SamplingParams()), mask=bytes(13)),
        Want(2, spec(SamplingParams(temperature=0)), mask=bytes(13)),
    ):
        (result,) = run(logits, [want], isa)
        assert result.error is not None
        assert "no token" in result.error


@isas
def test_ids_beyond_the_vocabulary_fail_their_row(isa: str) -> None:
    logits = gaussian(100, 3)[None]
    wants = [
        Want(2, spec(SamplingParams(logit_bias=((100, 1.0),)))),
        Want(2, spec(SamplingParams(allowed_token_ids=(2**31 - 1,)))),
        Want(2, spec(SamplingParams(banned_token_ids=(5, 100)))),
        Want(2, spec(SamplingParams(repetition_penalty=1.1), history=array("i", [3, -1]))),
        Want(0, target=100),
    ]
    for want, result in zip(wants, run(logits, wants, isa), strict=True):
        assert result.error is not None, want
        assert "vocabulary" in result.error
    (short,) = run(logits, [Want(2, spec(SamplingParams()), mask=b"\xff" * 12)], isa)
    assert short.error is not None
    assert "12 bytes" in short.error
    (beyond,) = run(logits, [Want(2, spec(SamplingParams(), suppress=(2**30,)))], isa)
    assert beyond.error is None


@isas
def test_penalties_that_overflow_fail_their_row(isa: str) -> None:
    params = SamplingParams(repetition_penalty=0.01)  # the lowest; the logits are near the limit
    (result,) = run(
        gaussian(100, 3, 2e37)[None], [Want(2, spec(params, history=array("i", range(99))))], isa
    )
    assert result.error is not None
    assert "infinite" in result.error


# --- Log-probabilities ----------------------------------------------------------------------------


@isas
@pytest.mark.parametrize("vocab", [3, 100, 4097, 49152])
@pytest.mark.parametrize("scale", [0.01, 3.0, 30.0])
def test_logprobs_are_log_softmax_of_the_untouched_logits(
    vocab: int, scale: float, isa: str
) -> None:
    logits = gaussian(vocab, vocab, scale)
    exact = torch.log_softmax(torch.tensor(logits, dtype=torch.float64), 0)
    fields = {"temperature": 0.7, "top_k": 40, "logit_bias": ((1, 4.0),), "logprobs": 20}
    result = sample(logits[None], SamplingParams(**fields), isa)
    (told,) = result.logprobs
    assert told.token == result.tokens[0]
    assert told.logprob == pytest.approx(exact[told.token].item(), abs=1e-5)
    values, ids = torch.topk(exact, min(20, vocab))
    assert [token for token, _ in told.top] == ids.tolist()
    np.testing.assert_allclose([lp for _, lp in told.top], values.numpy(), atol=1e-5)


@isas
def test_scores_are_those_of_the_target(isa: str) -> None:
    logits = np.stack([gaussian(5000, i) for i in range(4)])
    exact = torch.log_softmax(torch.tensor(logits, dtype=torch.float64), 1)
    wants = [Want(0, target=1000 * i, top=i) for i in range(4)]
    for i, result in enumerate(run(logits, wants, isa)):
        assert result.tokens == ()
        (score,) = result.scores
        assert score.token == 1000 * i
        assert score.logprob == pytest.approx(exact[i, 1000 * i].item(), abs=1e-5)
        assert [token for token, _ in score.top] == torch.topk(exact[i], i).indices.tolist()


@isas
def test_choosing_and_scoring_one_position_together(isa: str) -> None:
    logits = gaussian(5000, 4)[None]
    params = SamplingParams(logprobs=2)
    (both,) = run(logits, [Want(2, spec(params), target=7, top=5)], isa)
    (chosen,) = run(logits, [Want(2, spec(params))], isa)
    (scored,) = run(logits, [Want(0, target=7, top=5)], isa)
    assert both == RowResult(chosen.tokens, chosen.logprobs, scored.scores)


@isas
def test_impossible_target_scores_minus_infinity(isa: str) -> None:
    logits = np.array([[0.0, -np.inf, 0.0]], np.float32)
    (result,) = run(logits, [Want(0, target=1)], isa)
    assert result.scores == (TokenLogprob(1, -math.inf),)


# --- A function of its own arguments --------------------------------------------------------------


@isas
def test_a_row_is_the_same_alone_and_in_any_company(isa: str) -> None:
    rng = np.random.default_rng(7)
    vocab = 1500
    wants, logits = [], []
    for i in range(40):
        params, rest, mask = random_case(rng, vocab)
        fields = {name: getattr(params, name) for name in params.__dataclass_fields__}
        params = SamplingParams(**{**fields, "logprobs": i % 4})
        want = Want(i, spec(params, **rest), mask=mask or None)
        wants.append(want if i % 5 else Want(0, target=i, top=3))
        logits.append(gaussian(vocab, i, 0.1 if i % 3 else 4.0))
    logits[3][5] = math.nan
    together = run(np.stack(logits), wants, isa)
    order = rng.permutation(40)
    shuffled = run(np.stack(logits)[order], [wants[i] for i in order], isa)
    for place, i in enumerate(order):
        alone = run(logits[i][None], [wants[i]], isa)[0]
        assert together[i] == shuffled[place] == alone


def test_records_that_do_not_fit_are_refused() -> None:
    logits = gaussian(100, 3)[None]
    batch = Batch(0, (Row(0, 0, array("i", [0]), array("i"), (Want(2, spec(SamplingParams())),)),))
    rows, data = encode(batch)
    with pytest.raises(ValueError, match="one record"):
        _cpu.sample(logits, rows[:-1], data)
    with pytest.raises(ValueError, match="outside"):
        _cpu.sample(logits, rows[:64] + (99).to_bytes(4, "little") * 2 + rows[72:], data)
    with pytest.raises(ValueError, match="instruction set"):
        _cpu.sample(logits, rows, data, "itanium")
