"""Prompt lookup finds what it should, spends no more than it may, and changes no token."""

from __future__ import annotations

import random
from array import array

import pytest

from octavo.core import ngrams
from octavo.core.batch import Batch, RowResult, StepResult
from octavo.core.drafter import CAP, REST, SHARE, START, Odds, PromptLookup, StepTimes
from octavo.core.executor import Capacity
from octavo.core.ngrams import LONGEST, Trail
from octavo.core.offline import behind
from octavo.core.policy import fcfs
from octavo.core.request import Event, FinishReason, Request, SamplingParams, Sequence, Tier
from octavo.core.scheduler import Scheduler
from tests.core.machine import Machine, ask
from tests.core.workload import PlantedDrafter, PlantedWatcher


def slow_search(tokens: list[int], lead: int = 0) -> tuple[int, int]:
    """By trying every place: the longest agreement, the latest of equals."""
    best = (0, 0)
    for at in range(lead + 1, len(tokens)):
        n = 0
        while n < min(LONGEST, at) and tokens[at - 1 - n] == tokens[len(tokens) - 1 - n]:
            n += 1
        if n >= max(2, best[0]):
            best = n, at
    return best


@pytest.mark.parametrize("seed", range(20))
def test_the_trail_finds_what_the_slow_search_finds_however_the_tokens_come(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ngrams, "TRIES", 10**6)
    rng = random.Random(seed)
    some = rng.choice((2, 4, 40))
    trail = Trail()
    tokens = array("i", (rng.randrange(some) for _ in range(rng.choice((1, 2, 50, 400)))))
    for _ in range(120):
        trail.extend(tokens)
        assert trail.search() == slow_search(list(tokens))
        if rng.random() < 0.3 and len(tokens) > 40:
            at = rng.randrange(len(tokens) - 30)
            tokens.extend(tokens[at : at + rng.randrange(30)])
        tokens.extend(rng.randrange(some) for _ in range(rng.choice((1, 1, 1, 4))))


def test_what_follows_goes_round_at_the_end() -> None:
    trail = Trail()
    trail.extend(array("i", [1, 2, 3, 1, 2]))
    n, place = trail.search()
    assert (n, place) == (2, 2)
    assert list(trail.following(place, 7)) == [3, 1, 2, 3, 1, 2, 3]


def test_a_lead_is_continued_to_its_end_and_no_further() -> None:
    trail = Trail([7, 8, 20, 21, 22])
    trail.extend(array("i", [7, 8, 20]))
    n, place = trail.search()
    assert (n, list(trail.following(place, 9))) == (3, [21, 22])
    trail.extend(array("i", [7, 8, 20, 21, 22]))
    n, place = trail.search()
    assert (n, list(trail.following(place, 9))) == (5, [])


def test_a_long_text_is_filed_over_several_calls() -> None:
    trail = Trail()
    tokens = array("i", range(5000))
    tokens.extend(range(4990, 4995))
    trail.extend(tokens)
    assert trail.search() == (0, 0)
    for _ in range(5000 // ngrams.AT_ONCE):
        trail.extend(tokens)
    assert trail.search() == (5, 4995)


def test_the_price_is_believed_first_and_then_what_steps_took() -> None:
    times = StepTimes()
    assert not times.stands(2)
    for _ in range(5):
        times.add(2, 0, 0.010)
    assert times.stands(2)
    assert times.plain == 0.010
    assert not times.stands(3)
    assert times.price(2, 1) == pytest.approx(1 / (2 + StepTimes.FIXED))
    for _ in range(60):
        assert times.add(2, 1, 0.0101) == pytest.approx(0.0001)
        times.add(2, 0, 0.010)
        assert times.add(2, 4, 0.020) == pytest.approx(0.010)
        times.add(2, 0, 0.010)
    assert times.price(2, 1) == pytest.approx(0.01, rel=0.1)
    assert times.price(2, 4) == pytest.approx(1.0, rel=0.1)
    assert times.price(2, 8) > 1.5, "the nearest size that was seen"
    assert times.price(40, 1) == pytest.approx(1 / (40 + StepTimes.FIXED))
    times.add(2, 1, 100.0)
    assert times.price(2, 1) < 1.0, "one step that was held up"
    for _ in range(StepTimes.STALE):
        times.add(2, 1, 0.0101)
    assert not times.stands(2), "a plain step is due"


def test_odds_follow_what_happened_and_hope_again() -> None:
    base = Odds()
    odds = Odds(base)
    assert odds.chance(2) < odds.chance(4) < odds.chance(9) < odds.chance(99) < 1
    for _ in range(20):
        odds.tried(5, False)
    assert odds.chance(4) == odds.chance(7) < 0.1
    assert Odds(base).chance(5) < Odds().chance(5) / 3, "others begin from there"
    for _ in range(200):
        odds.passed(5)
    assert odds.chance(5) == pytest.approx(Odds(base).chance(5), rel=0.1)
    for _ in range(50):
        odds.tried(5, True)
    assert odds.chance(5) > 0.9


def undrafted(events: list[Event]) -> list[Event]:
    """Without the counts of guesses, which are no part of what must be equal."""
    return [event._replace(num_drafted=0, num_accepted=0) for event in events]


class Stream:
    """Sequences decoded by an executor that says what it is told to and takes fixed + tokens time.

    next_token(seq_id, tokens) -> the choice after `tokens`.
    """

    def __init__(self, prompts: list[list[int]], next_token, *, drafter, fixed: float = 8.0):
        self.scheduler = Scheduler(Capacity(4096, 32, 512, 64, 512, 10**5), drafter=drafter)
        self.next_token, self.fixed, self.seconds = next_token, fixed, 0.0
        for i, prompt in enumerate(prompts):
            params = SamplingParams(max_tokens=2000)
            self.scheduler.add(Request(f"r{i}", array("i", prompt), params, 0.0, 0))

    def step(self) -> Batch:
        batch = self.scheduler.schedule(0.0)
        assert batch is not None
        rows = {}
        for row in batch.rows:
            tokens = self.scheduler._live[row.seq_id].tokens[: row.start]
            tokens.extend(row.tokens)
            ends = [row.start + want.position + 1 for want in row.outputs]
            chosen = (self.next_token(row.seq_id, tokens[:end]) for end in ends)
            rows[row.seq_id] = RowResult(tuple(chosen))
        seconds = self.fixed + batch.num_tokens
        self.seconds += seconds
        self.scheduler.commit(batch, StepResult(batch.step, rows, 0.0, seconds), 0.0)
        return batch

    def until(self, count: int) -> float:
        """Seconds until each sequence has so many tokens of output, from the first on."""
        self.step()
        started = self.seconds
        while any(s.num_output < count for s in self.scheduler.running):
            self.step()
        return self.seconds - started


def never_right(seq_id: int, tokens: array[int]) -> int:
    """Two tokens in turn, so that there is always a place to look up, and then a surprise."""
    rng = random.Random(f"{seq_id} {len(tokens) // 3}")
    return rng.randrange(3, 50_000) if len(tokens) % 3 == 0 else len(tokens) % 3


def circle(_: int, tokens: array[int]) -> int:
    return 100 + len(tokens) % 90


@pytest.mark.parametrize("fixed", [2.0, 8.0, 60.0])
@pytest.mark.parametrize("rows", [1, 3, 16])
def test_guesses_that_never_hold_cost_less_than_three_percent(rows: int, fixed: float) -> None:
    def surprise(seq_id: int, tokens: array[int]) -> int:
        """Whatever was guessed, something else: what was offered is what followed before."""
        return random.Random(f"{seq_id} {len(tokens)}").randrange(3, 9) + 7 * (len(tokens) % 2)

    for tokens in (never_right, surprise):
        prompts = [[1, 2, 3 + i] for i in range(rows)]
        plain = Stream(prompts, tokens, drafter=None, fixed=fixed).until(600)
        guessed = Stream(prompts, tokens, drafter=PromptLookup(), fixed=fixed)
        assert guessed.until(600) < 1.03 * plain


def test_a_stream_is_not_slowed_by_what_its_neighbours_draft() -> None:
    def mixed(seq_id: int, tokens: array[int]) -> int:
        return circle(seq_id, tokens) if seq_id else never_right(seq_id, tokens)

    prompts = [[1, 2, 3], list(range(100, 190))]
    guessed = Stream(prompts, mixed, drafter=PromptLookup())
    guessed.step()
    steps, started = 0, guessed.seconds
    while guessed.scheduler._live[0].num_output < 400:
        guessed.step()
        steps += 1
    assert guessed.seconds - started < 1.03 * steps * (8.0 + 2)
    assert guessed.scheduler._live[1].num_output > 400


@pytest.mark.parametrize(("rows", "gain"), [(1, 4.0), (4, 2.0), (8, 1.3)])
def test_guesses_that_hold_pay(rows: int, gain: float) -> None:
    prompts = [list(range(100, 190)) for _ in range(rows)]
    plain = Stream(prompts, circle, drafter=None).until(600)
    assert Stream(prompts, circle, drafter=PromptLookup()).until(600) < plain / gain


def test_a_stream_without_repeats_is_searched_less_often_and_found_again() -> None:
    class Counting(PromptLookup):
        searched = 0

        def lookup(self, seq: Sequence, most: int) -> tuple[int, array[int]]:
            self.searched += 1
            return super().lookup(seq, most)

    def late(seq_id: int, tokens: array[int]) -> int:
        fresh = len(tokens) < 400
        return 1000 + len(tokens) if fresh else circle(seq_id, tokens)

    drafter = Counting()
    stream = Stream([[1, 2, 3]], late, drafter=drafter)
    for _ in range(300):
        stream.step()
    assert 300 / (REST + 1) - 1 < drafter.searched < 300 / (REST + 1) + 20
    stream.until(800)
    assert stream.scheduler.stats.counters.accepted_tokens > 200


def test_accounts_stay_within_their_bounds() -> None:
    drafter = PromptLookup()
    stream = Stream([list(range(100, 190)), [1, 2, 3]], circle, drafter=drafter)
    stream.step()
    for _ in range(200):
        stream.step()
        plain, common = drafter.times.plain, drafter._common
        for seq in stream.scheduler.running:
            account = (seq.notes.saved + common) / plain
            assert -START - 1e-9 <= account <= CAP + 16
    assert 0 < SHARE < 0.03
    assert 0 < START < 1


class Free(StepTimes):
    """Drafts cost nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = 1.0

    def renew(self) -> None: ...

    def price(self, rows: int, drafted: int) -> float:
        return 1e-6

    def stands(self, rows: int) -> bool:
        return True


@pytest.mark.parametrize(
    ("fields", "draft"),
    [
        ({}, [8, 9, 5, 6, 7]),
        ({"stop_ids": frozenset((5,))}, [8, 9]),
        ({"stop_ids": frozenset((8,))}, []),
        ({"speculation": False}, []),
        ({"max_tokens": 4}, [8, 9]),
    ],
)
def test_no_guess_goes_where_it_cannot_be_used(fields: dict, draft: list[int]) -> None:
    drafter = PromptLookup(5)
    drafter.times = Free()
    machine = Machine(drafter=drafter)
    machine.add(ask("r", [5, 6, 7, 8, 9, 5, 6], **{"max_tokens": 30, **fields}))
    for step, token in ((1, 7), (2, 8)):
        batch = machine.scheduler.schedule(0.0)
        (row,) = batch.rows
        tokens = (token,) + (0,) * (len(row.outputs) - 1)
        if step == 1:
            assert len(row.outputs) == 1, "a prompt is read in this step"
            machine.scheduler.commit(batch, StepResult(1, {0: RowResult(tokens)}, 0, 1), 0.0)
    assert list(row.tokens) == [7, *draft]


def test_a_drafted_row_asks_for_each_place_what_a_step_of_its_own_would() -> None:
    machine = Machine(drafter=PlantedDrafter(random.Random(0), eager=1.0, wrong=0.0))
    stops = frozenset((3, 4))
    machine.add(ask("r", 9, 20, min_tokens=6, stop_ids=stops, frequency_penalty=0.5, logprobs=1))
    machine.turn()
    row = machine.scheduler.schedule(0.0).rows[0]
    assert len(row.tokens) > 2
    seq = machine.scheduler._live[0]
    for i, want in enumerate(row.outputs):
        spec = want.sample
        assert want.position == len(row.tokens) - len(row.outputs) + i
        position = row.start + want.position + 1
        assert list(spec.history) == [*seq.tokens[: row.start], *row.tokens][:position]
        assert spec.suppress == ((3, 4) if position < 9 + 6 else ())


def test_a_row_that_ends_within_a_prompt_is_not_drafted() -> None:
    """A prompt that nobody waits for is read in sips, with room for guesses left in the step."""
    machine = Machine(behind(fcfs()), drafter=PlantedDrafter(random.Random(0), 1.0, 0.0))
    machine.add(ask("online", 4, 60), ask("offline", 100, 4, tier=Tier.BATCH))
    tokens = machine.run()
    rows = [row for batch in machine.batches for row in batch.rows]
    assert [len(row.tokens) for row in rows if row.seq_id == 1 and not row.outputs] == [32] * 3
    assert any(len(row.outputs) > 1 for row in rows)
    assert [len(tokens[name, 0]) for name in ("online", "offline")] == [60, 4]


def test_a_failed_row_is_computed_again_without_its_draft() -> None:
    plain = Machine()
    plain.faults["r"] = 30
    plain.add(ask("r", 9, 40))
    tokens = plain.run()
    machine = Machine(drafter=PlantedDrafter(random.Random(0), eager=1.0, wrong=0.0))
    machine.faults["r"] = 30
    machine.add(ask("r", 9, 40))
    assert machine.run() == tokens
    assert machine.ends()["r", 0].finish is FinishReason.ERROR
    assert len(machine.batches) < len(plain.batches)


def test_each_token_is_an_event_of_its_own_and_blocks_are_cached_as_without() -> None:
    def run(drafter: PlantedDrafter | None) -> Machine:
        machine = Machine(drafter=drafter)
        machine.add(ask("first", 9, 40, logprobs=2))
        machine.run()
        return machine

    plain, guessed = run(None), run(PlantedDrafter(random.Random(3), 1.0, 0.1))
    assert undrafted(guessed.events) == plain.events
    assert guessed.scheduler.blocks._index.keys() == plain.scheduler.blocks._index.keys()
    assert len(guessed.batches) < len(plain.batches) / 2


def test_guesses_are_masked_as_their_places_are_and_cut_where_they_are_forbidden() -> None:
    def run(drafter: PlantedDrafter | None) -> Machine:
        machine = Machine(drafter=drafter)
        machine.add(ask("r", 9, 30, watcher=lambda: PlantedWatcher("mask", 0)))
        machine.run()
        return machine

    plain, guessed = run(None), run(PlantedDrafter(random.Random(1), 1.0, 0.0))
    assert undrafted(guessed.events) == plain.events
    watcher, masked = PlantedWatcher("mask", 0), 0
    for batch in guessed.batches:
        for row in batch.rows:
            for want in row.outputs:
                place = row.start + want.position + 1 - 9
                assert want.mask == watcher.mask(place)
                following = row.tokens[want.position + 1 :][:1]
                if want.mask is not None and following:
                    masked += 1
                    assert want.mask[following[0] // 8] >> (following[0] % 8) & 1
    assert masked > 3
    assert len(guessed.batches) < len(plain.batches) / 2


def test_drafts_are_counted() -> None:
    machine = Machine(drafter=PlantedDrafter(random.Random(1), 1.0, 0.3))
    machine.add(*(ask(f"r{i}", 9, 30) for i in range(4)))
    machine.run()
    counters = machine.scheduler.stats.counters
    wants = sum(len(row.outputs) for batch in machine.batches for row in batch.rows)
    rows = sum(len(batch.rows) for batch in machine.batches)
    assert counters.drafted_tokens == wants - rows > 0
    assert counters.accepted_tokens == counters.output_tokens - rows > 0
    assert counters.outputs == wants
    places = machine.scheduler.stats.accepted_at
    assert sum(places) == counters.accepted_tokens
    assert places == sorted(places, reverse=True)
    assert counters.drafts == sum(len(r.outputs) > 1 for b in machine.batches for r in b.rows)
    ends = machine.ends().values()
    assert sum(end.num_drafted for end in ends) == counters.drafted_tokens
    assert sum(end.num_accepted for end in ends) == counters.accepted_tokens
    snapshot = machine.scheduler.snapshot()
    assert [snapshot[f"accepted_at_{i + 1}"] for i in range(len(places))] == places
