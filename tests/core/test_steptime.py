"""Laws of the step-time model, on machines whose truth is known."""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Iterator
from dataclasses import asdict, replace
from math import inf, nan

import pytest

from octavo.core.batch import Batch, Row, StepResult, Want
from octavo.core.executor import Capacity
from octavo.core.probe import learn_machine, probes
from octavo.core.steptime import UNKNOWN, Coefficients, StepFeatures, StepModel

# A GPU of the middle class with an 8B model.
TRUE = Coefficients(7.5e-3, 52e-6, 0.095e-6, 0.8e-9, 8e-6, 30e-6, bend=20e-6, knee=64)
NAMES = ("fixed", "token", "context", "area", "decode", "sample", "bend")


def shapes(count: int, seed: int = 0) -> list[StepFeatures]:
    rng, made = random.Random(seed), []
    for _ in range(count):
        step, decodes = StepFeatures(), rng.randrange(0, 64)
        for _ in range(decodes):
            step = step.plus(rng.randrange(50, 3000), 1, 1)
        if rng.random() < 0.5 or not decodes:
            for _ in range(rng.randrange(1, 3)):
                step = step.plus(rng.randrange(2000), rng.randrange(2, 512), rng.randrange(2))
        made.append(step)
    return made


def prior(scale: float, seed: int = 0) -> Coefficients:
    """The truth, each figure off by up to a factor of two, and all of them by `scale`."""
    rng = random.Random(seed)
    return replace(TRUE, **{n: getattr(TRUE, n) * scale * rng.uniform(0.5, 2) for n in NAMES})


def mape(model: StepModel, scale: float = 1.0) -> float:
    held_out = shapes(300, seed=99)
    errors = [model.predict(f) / (scale * TRUE.seconds(f)) - 1 for f in held_out]
    return sum(map(abs, errors)) / len(errors)


def test_features_are_those_of_the_rows() -> None:
    want = (Want(0),)
    rows = (
        Row(0, 99, array("i", [1]), array("i"), want),
        Row(1, 9, array("i", [1]), array("i"), want),
        Row(2, 100, array("i", [1] * 30), array("i")),
        Row(3, 0, array("i", [1] * 8), array("i"), (Want(7),)),
    )
    found = StepFeatures.of(Batch(1, rows))
    assert found == (40, 110, 30 * 115 + 8 * 4, 2, 3)
    built = StepFeatures()
    for row in rows:
        built = built.plus(row.start, len(row.tokens), len(row.outputs))
    assert built == found


@pytest.mark.parametrize("scale", [0.4, 1.0, 3.0])
def test_a_machine_is_learned_within_500_noisy_steps(scale: float) -> None:
    rng, model = random.Random(1), StepModel(prior(scale))
    for i, step in enumerate(shapes(500)):
        model.observe(step, TRUE.seconds(step) * rng.gauss(1, 0.02))
        if i == 99:
            assert mape(model) < 0.05
    assert mape(model) < 0.025  # of it a hundredth is the noise of three steps, in the pace
    assert not model.drifting
    assert 1.03 <= model.gamma < 1.06


def test_no_coefficient_is_ever_negative() -> None:
    rng, model = random.Random(2), StepModel(prior(1.0))
    for step in shapes(400):
        model.observe(step, rng.uniform(0.2, 5.0) * TRUE.seconds(step))
        for regime in model.describe().values():
            assert min(regime.values()) >= 0.0


def test_a_step_in_fifty_that_takes_ten_times_as_long_hardly_counts() -> None:
    rng, model = random.Random(3), StepModel(prior(1.0))
    for i, step in enumerate(shapes(1000)):
        slow = 10.0 if i % 50 == 49 else 1.0
        model.observe(step, TRUE.seconds(step) * rng.gauss(1, 0.01) * slow)
    assert mape(model) < 0.02


def test_a_machine_that_slows_down_is_noticed_and_followed() -> None:
    model, steps = StepModel(prior(1.0)), shapes(1200)
    for step in steps[:600]:
        model.observe(step, TRUE.seconds(step))
    assert not model.drifting
    for step in steps[600:608]:
        model.observe(step, 1.5 * TRUE.seconds(step))
    assert mape(model, 1.5) < 0.02  # by the paces, once each kind was seen a few times
    for step in steps[608:650]:
        model.observe(step, 1.5 * TRUE.seconds(step))
    assert model.drifting
    assert model.gamma == 1.25
    for step in steps[650:]:
        model.observe(step, 1.5 * TRUE.seconds(step))
    assert not model.drifting
    assert model.pace == pytest.approx(1.0, abs=0.08)  # the long run is the slow one now
    assert mape(model, 1.5) < 0.04


def test_decodes_that_slow_down_among_many_mixed_steps_are_noticed() -> None:
    """One step in twelve decodes, so hardly any of the latest errors are of decodes."""
    model = StepModel(TRUE)
    mixed = [step for step in shapes(8000) if step.prefill_area]
    decodes = [step for step in shapes(8000, seed=3) if not step.prefill_area]
    noticed = [0, 0]
    for i in range(3600):
        step = decodes[i // 12] if not i % 12 else mixed[i]
        slow = 1.6 if i >= 2400 and not step.prefill_area else 1.0
        model.observe(step, slow * TRUE.seconds(step))
        noticed[i >= 2400] += model.drifting
    assert not noticed[0]
    assert noticed[1]
    assert model.predict(decodes[-1]) == pytest.approx(1.6 * TRUE.seconds(decodes[-1]), rel=0.1)
    assert model.predict(mixed[-1]) == pytest.approx(TRUE.seconds(mixed[-1]), rel=0.1)


def test_a_clock_that_rises_and_falls_is_followed_by_the_pace() -> None:
    rng, model = random.Random(4), StepModel(prior(1.0))
    errors = []
    for i, step in enumerate(shapes(1200)):
        seconds = TRUE.seconds(step) * rng.gauss(1, 0.01) * (0.8 if i // 40 % 2 else 1.0)
        if i >= 400:
            errors.append(abs(model.predict(step) / seconds - 1))
        model.observe(step, seconds)
    assert sorted(errors)[len(errors) // 2] < 0.015
    assert not model.drifting
    assert model.gamma < 1.1


def test_the_long_run_does_not_follow_the_pace() -> None:
    model, step = StepModel(TRUE), StepFeatures().plus(900, 1, 1)
    for _ in range(200):
        model.observe(step, TRUE.seconds(step))
    for _ in range(5):
        model.observe(step, 0.8 * TRUE.seconds(step))
    assert model.predict(step) == pytest.approx(0.8 * TRUE.seconds(step), rel=0.02)
    assert model.usual(step) == pytest.approx(TRUE.seconds(step), rel=0.05)
    assert model.coefficients.fixed == pytest.approx(model.pace * TRUE.fixed, rel=0.05)


def test_what_only_decodes_has_a_pace_of_its_own() -> None:
    """Memory that is slower for a while slows decodes, and hardly what waits for arithmetic."""
    model, errors = StepModel(TRUE), []
    for i, step in enumerate(shapes(1200)):
        slow = 1.3 if i // 60 % 2 and not step.prefill_area else 1.0
        if i >= 400:
            errors.append(abs(model.predict(step) / (slow * TRUE.seconds(step)) - 1))
        model.observe(step, slow * TRUE.seconds(step))
    assert sorted(errors)[len(errors) // 2] < 0.01


def test_a_kind_that_is_not_seen_for_long_follows_the_other_one_a_little() -> None:
    model = StepModel(TRUE)
    for step in shapes(600):
        model.observe(step, TRUE.seconds(step))
    before, decode = model.pace, StepFeatures().plus(900, 1, 1)
    for _ in range(20):
        model.observe(decode, 1.2 * TRUE.seconds(decode))
    assert model.pace / before == pytest.approx(1.2**0.3, rel=0.02)


def test_steps_whose_tiles_are_not_full_have_their_edges() -> None:
    """Rows go by tiles of 16: a step takes what its last tile takes when it is full."""
    rng, model, errors = random.Random(6), StepModel(TRUE), []

    def truth(step: StepFeatures) -> float:
        full = -(-step.tokens // 16) * 16
        return TRUE.seconds(step) + 2 * TRUE.token * (full - step.tokens)

    for i in range(3000):
        step = StepFeatures().plus(0, rng.randrange(16, 64), 1).plus(200, 1, 1)
        if i >= 2000:
            errors.append(abs(model.predict(step) / truth(step) - 1))
        model.observe(step, truth(step))
    assert sorted(errors)[len(errors) // 2] < 0.015


def test_probes_say_where_the_line_bends() -> None:
    truth = replace(TRUE, knee=16.0, bend=20 * TRUE.token)
    model = StepModel(replace(truth, knee=200.0))
    model.calibrate([(f, truth.seconds(f)) for f in map(StepFeatures.of, _probed())])
    assert model.prior.knee == 16.0


def _probed() -> Iterator[Batch]:
    """Start-up's probes."""
    return probes(Capacity(4096, 16, 512, 64, 512, 4096))


@pytest.mark.parametrize("knee", [0.0, 64.0, 300.0])
@pytest.mark.parametrize("start", [0, 5000])
def test_most_tokens_is_the_inverse_of_predict(knee: float, start: int) -> None:
    model = StepModel(replace(TRUE, knee=knee))
    step = StepFeatures().plus(700, 1, 1).plus(90, 1, 1)
    for count in (2, 10, 63, 100, 299, 512, 4000):
        seconds = model.predict(step.plus(start, count, 1))
        assert model.most_tokens(step, start, seconds) == pytest.approx(count)
    assert model.most_tokens(step, start, 0.9 * model.predict(step)) == 0.0


def test_steps_that_take_the_same_whatever_is_in_them_have_room_for_all() -> None:
    model, draw = StepModel(TRUE), random.Random(3)
    for _ in range(600):
        model.observe(StepFeatures().plus(0, draw.randrange(2, 500), 1), 0.02)
    assert model.most_tokens(StepFeatures(), 0, 0.1) > 10_000


def test_the_error_is_that_of_predictions_made_beforehand() -> None:
    model, step = StepModel(TRUE), StepFeatures().plus(100, 1, 1)
    model.observe(step, 2 * TRUE.seconds(step))
    assert model.error() == pytest.approx((0.5, -0.5), rel=1e-3)
    assert StepModel(TRUE).error() == (0.0, 0.0)


def test_the_best_of_a_step_is_at_its_own_kind_s_pace_or_as_it_was_thought() -> None:
    model = StepModel(TRUE)
    decode, mixed = StepFeatures().plus(900, 1, 1), StepFeatures().plus(0, 90, 1)
    for fit, step in ((model._decode, decode), (model._mixed, mixed)):
        for pace in (0.8, 1.3):
            fit.pace = pace
            assert model.best(step) == min(model.predict(step), model.usual(step))


def test_one_lucky_step_is_not_the_best() -> None:
    model, step = StepModel(TRUE.times(2.0)), StepFeatures().plus(0, 90, 1)
    for i in range(600):
        model.observe(step, 0.3 * TRUE.seconds(step) if i == 300 else TRUE.seconds(step))
    assert model.best(step) == pytest.approx(TRUE.seconds(step), rel=0.01)


def test_a_step_is_what_its_prompts_add_and_what_there_is_beside_them() -> None:
    model = StepModel(TRUE)
    for f in shapes(200):
        model.observe(f, 1.2 * TRUE.seconds(f))
    for rows in (0, 3, 70):
        step = StepFeatures(rows, 500.0 * rows, 0.0, rows, rows).plus(100, 300, 1)
        beside = model.decoding(rows, 500.0 * rows, prompts=True)
        # `prefilling` takes all of its tokens for ones beyond the bend.
        within = model.coefficients.bend * max(0, 64 - rows)
        assert beside + model.prefilling(100, 300) - within == pytest.approx(model.predict(step))


def test_a_pace_passes() -> None:
    """What one was seen to be holds for the next step; of a long time it says little."""
    model = StepModel(TRUE)
    assert model.lasting(0.0) == model.lasting(9.0) == 1.0
    for f in shapes(300):
        model.observe(f, TRUE.seconds(f))
    mixed = [f for f in shapes(50, seed=1) if f.prefill_area][:4]
    for f in mixed:
        model.observe(f, 1.4 * TRUE.seconds(f))
    paces = [model.pace * model.lasting(seconds) for seconds in (0.0, 0.1, 0.4, 1.6, 100.0)]
    assert paces[0] == model.pace > 1.3
    assert paces == sorted(paces, reverse=True)
    assert paces[-1] == pytest.approx(1.0, abs=0.01)


def test_the_best_of_prompts_is_that_of_their_steps() -> None:
    for knee in (0.0, 12.0):
        model = StepModel(replace(TRUE, knee=knee, bend=1e-4))
        one = StepFeatures().plus(0, 300, 1)
        assert model.best_prefill([(300, 0)], 512) == pytest.approx(model.best(one))
        two = model.best(StepFeatures().plus(0, 512, 0)) + model.best(
            StepFeatures().plus(512, 388, 1)
        )
        assert model.best_prefill([(900, 0)], 512) == pytest.approx(two)
        assert model.best_prefill([(8, 0)], 512) == pytest.approx(
            model.best(StepFeatures().plus(0, 8, 1))
        )


@pytest.mark.parametrize("seconds", [1e-9, 1e-4, 1.0, 1e4])
@pytest.mark.parametrize("mixed", [False, True])
def test_one_step_out_of_nowhere_moves_nothing(seconds: float, mixed: bool) -> None:
    model, steps = StepModel(TRUE), shapes(300)
    for step in steps:
        model.observe(step, TRUE.seconds(step))
    slip = next(step for step in steps if (step.prefill_area > 0.0) == mixed)
    assert not 0.1 < seconds / TRUE.seconds(slip) < 10.0
    model.observe(slip, seconds)
    for step in steps[:32]:
        model.observe(step, TRUE.seconds(step))
    for step in steps:
        assert model.predict(step) == pytest.approx(TRUE.seconds(step), rel=0.15)
        assert model.best(step) == pytest.approx(TRUE.seconds(step), rel=0.15)
    assert not model.drifting


def test_evidence_is_the_same_whether_steps_are_taken_one_by_one_or_together() -> None:
    at_once, singly = StepModel(TRUE)._mixed, StepModel(TRUE)._mixed
    mixed = [step for step in shapes(40) if step.prefill_area][:16]
    for i, step in enumerate(mixed):
        for fit in (at_once, singly):
            fit.add(step, 1.1 * TRUE.seconds(step), 1.0 / (1 + i % 3), 0.95 if i % 2 else 0.999)
        singly._fold()
    at_once._fold()
    assert at_once._right == pytest.approx(singly._right)
    for row, other in zip(at_once._gram, singly._gram, strict=True):
        assert row == pytest.approx(other)


def test_without_evidence_the_prior_predicts() -> None:
    for step in shapes(20):
        assert StepModel(TRUE).predict(step) == pytest.approx(TRUE.seconds(step), rel=1e-6)
    with pytest.raises(ValueError, match="prior"):
        StepModel(Coefficients(0.0, 1.0))


def test_the_log_is_one_json_object_a_step() -> None:
    model, steps = StepModel(TRUE), shapes(5)
    for step in steps:
        model.observe(step, TRUE.seconds(step))
    lines = [json.loads(line) for line in model.log()]
    assert [line["seconds"] for line in lines] == [TRUE.seconds(s) for s in steps]
    assert [StepFeatures(*(line[f] for f in StepFeatures._fields)) for line in lines] == steps
    assert set(model.describe()["mixed"]) == set(asdict(TRUE))


class Stopwatch:
    """An executor whose steps take what the truth says, on its own clock."""

    def __init__(self, capacity: Capacity) -> None:
        self.capacity, self.now, self.batch = capacity, 0.0, Batch(0, ())

    def submit(self, batch: Batch) -> None:
        size = self.capacity.block_size
        for row in batch.rows:
            assert len(row.block_table) * size >= row.start + len(row.tokens)
        blocks = [block for row in batch.rows for block in row.block_table]
        assert len(blocks) == len(set(blocks)) <= self.capacity.num_blocks
        assert batch.num_tokens <= self.capacity.max_tokens
        self.batch = batch

    def collect(self) -> StepResult:
        started = self.now
        self.now += TRUE.seconds(StepFeatures.of(self.batch))
        return StepResult(self.batch.step, {}, started, self.now)


def test_probes_find_out_how_fast_a_machine_is_before_the_first_request() -> None:
    executor = Stopwatch(Capacity(512, 32, 512, 64, 512, 4096))
    model = StepModel(prior(4.0))
    before = mape(model)
    assert learn_machine(executor, model, lambda: executor.now) > 30
    assert executor.now < 0.9
    assert mape(model) < 0.35 < 5.0 < before
    tiny = Stopwatch(Capacity(4, 32, 16, 2, 2, 64))
    assert learn_machine(tiny, StepModel(TRUE), lambda: tiny.now) > 0


@pytest.mark.parametrize("slip", [0.0, -1.0, nan, inf, -inf, 5e-324, 1e-11, 1e-9, 1e30, 1e200])
def test_what_no_step_takes_is_not_learned_from(slip: float) -> None:
    plain, slipped = StepModel(UNKNOWN), StepModel(UNKNOWN)
    for i in range(200):
        rows = 1 + i % 7
        read = 50.0 * (i % 3)
        shape = StepFeatures(rows + read, 40.0 * rows, read * read, rows, rows)
        if i % 3:
            slipped.observe(shape, slip)
        for model in (plain, slipped):
            model.observe(shape, UNKNOWN.seconds(shape))
    assert slipped.snapshot() == plain.snapshot()
    assert slipped.describe() == plain.describe()
