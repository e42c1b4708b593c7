"""Planted bugs: the property suite must kill each one. What it cannot see, it does not protect."""

# ruff: noqa: ARG001, ARG005

from __future__ import annotations

import inspect
import sys
import textwrap
from array import array
from collections.abc import Callable

import pytest

from octavo.core import blocks as blocks_module
from octavo.core import scheduler as scheduler_module
from octavo.core.blocks import BlockManager
from octavo.core.request import Sequence, State
from octavo.core.roster import Roster
from octavo.core.scheduler import Plan, Scheduler
from octavo.core.settle import Settler
from tests.core.workload import run

Patch = pytest.MonkeyPatch
SEEDS = 600


def wrap(patch: Patch, owner: type, name: str, after: Callable) -> None:
    """Call `after(result, self, *args)` behind a method; what it returns, if not None, counts."""
    original = getattr(owner, name)

    def wrapped(self: object, *args: object, **kwargs: object) -> object:
        result = original(self, *args, **kwargs)
        changed = after(result, self, *args, **kwargs)
        return result if changed is None else changed

    patch.setattr(owner, name, wrapped)


def edit(patch: Patch, where: object, name: str, old: str, new: str) -> None:
    """Change a line of a function of the scheduler's."""
    original = getattr(where, name)
    source = textwrap.dedent(inspect.getsource(original))
    assert source.count(old) == 1, f"{old!r} is not once in {name}"
    made: dict[str, object] = {}
    edited = "from __future__ import annotations\n" + source.replace(old, new)
    exec(edited, vars(sys.modules[original.__module__]), made)
    patch.setattr(where, name, made[name])


def publish_at_schedule(patch: Patch) -> None:
    def after(batch, scheduler, now):
        for row in batch.rows if batch else ():
            seq = scheduler._live[row.seq_id]
            scheduler.blocks.publish(seq, seq.num_computed, seq.num_scheduled)
            scheduler._roster.wake(seq.hashes)

    wrap(patch, Scheduler, "schedule", after)
    patch.setattr(BlockManager, "check", lambda self, live: None)


def lookup_covers_the_last_token(patch: Patch) -> None:
    patch.setattr(BlockManager, "_shareable", lambda self, s, m: len(s.tokens) // self.block_size)


def lookup_ignores_its_bound(patch: Patch) -> None:
    original = BlockManager.lookup
    patch.setattr(BlockManager, "lookup", lambda self, seq, most=None: original(self, seq))


def shared_blocks_are_not_counted(patch: Patch) -> None:
    def after(grown, manager, seq, num_tokens, shared=()):
        for block in shared if grown else ():
            manager._refs[block] -= 1

    wrap(patch, BlockManager, "grow", after)


def idle_shared_blocks_count_as_available(patch: Patch) -> None:
    patch.setattr(BlockManager, "num_idle", lambda self, blocks: 0)


def evicted_block_stays_in_the_index(patch: Patch) -> None:
    def evict(self):
        block, _ = self._cached.popitem(last=False)
        self._hash_of[block] = None
        return block

    patch.setattr(BlockManager, "_evict", evict)
    patch.setattr(BlockManager, "check", lambda self, live: None)


def evicted_block_keeps_its_hash(patch: Patch) -> None:
    def evict(self):
        block, _ = self._cached.popitem(last=False)
        del self._index[self._hash_of[block]]
        return block

    patch.setattr(BlockManager, "_evict", evict)


def hash_without_parent(patch: Patch) -> None:
    original = blocks_module.chain_hash
    patch.setattr(blocks_module, "chain_hash", lambda parent, tokens: original(b"", tokens))


def hash_without_namespace(patch: Patch) -> None:
    original = blocks_module.root_hash
    patch.setattr(blocks_module, "root_hash", lambda namespace: original(b""))


def block_published_twice(patch: Patch) -> None:
    def publish(self, seq, old, new):
        end = new // self.block_size
        self._extend_hashes(seq, end)
        for i in range(old // self.block_size, end):
            self._claims.pop(seq.hashes[i], None)
            self._index[seq.hashes[i]] = seq.block_table[i]
            self._hash_of[seq.block_table[i]] = seq.hashes[i]

    patch.setattr(BlockManager, "publish", publish)


def publish_rounds_up(patch: Patch) -> None:
    original = BlockManager.publish

    def publish(self, seq, old, new):
        up = min(-(-new // self.block_size) * self.block_size, len(seq.tokens))
        original(self, seq, old, up)

    patch.setattr(BlockManager, "publish", publish)


def failed_rows_are_published(patch: Patch) -> None:
    original = Roster.fail

    def fail(self, seq, error, now):
        self.blocks.publish(seq, 0, seq.num_computed)
        return original(self, seq, error, now)

    patch.setattr(Roster, "fail", fail)


def grow_one_token_short(patch: Patch) -> None:
    patch.setattr(BlockManager, "blocks_for", lambda self, n: (n - 1) // self.block_size)


def grow_one_token_long(patch: Patch) -> None:
    patch.setattr(BlockManager, "blocks_for", lambda self, n: n // self.block_size + 1)


def a_block_is_lost_at_release(patch: Patch) -> None:
    def after(_, manager, seq):
        if len(manager._free) > 1:
            manager._free.pop()

    wrap(patch, BlockManager, "release", after)


def preempted_in_flight(patch: Patch) -> None:
    def victim(self, seq, now):
        last = self._running[-1]
        return None if last is seq else last

    patch.setattr(Scheduler, "_victim", victim)


def freed_in_flight(patch: Patch) -> None:
    def after(_, roster, seq, reason, now):
        roster.blocks.release(seq)

    wrap(patch, Roster, "end", after)


def freed_in_flight_unseen_by_check(patch: Patch) -> None:
    freed_in_flight(patch)
    patch.setattr(BlockManager, "check", lambda self, live: None)


def never_retired(patch: Patch) -> None:
    original = Roster.retire

    def retire(self, seq):
        if not seq.num_preemptions:
            original(self, seq)

    patch.setattr(Roster, "retire", retire)


def preempted_row_stays_in_the_plan(patch: Patch) -> None:
    patch.setattr(Plan, "drop", lambda self, seq: None)


def held_and_never_woken(patch: Patch) -> None:
    patch.setattr(Roster, "wake", lambda self, hashes: None)


def claims_outlive_their_owner(patch: Patch) -> None:
    patch.setattr(BlockManager, "_drop_claims", lambda self, seq: None)


def stop_ids_not_suppressed(patch: Patch) -> None:
    def after(_, seq, *args, **kwargs):
        seq.stop_from = 0

    wrap(patch, Sequence, "__init__", after)


def prompt_scored_twice_after_preemption(patch: Patch) -> None:
    def after(_, scheduler, seq, plan):
        seq.scores = [*seq.scores, *seq.scores[-1:]]

    wrap(patch, Scheduler, "_preempt", after)


def length_without_a_bound(patch: Patch) -> None:
    wrap(patch, Scheduler, "_fit", lambda length, scheduler, request: length + 1)


def tokens_of_the_row_one_off(patch: Patch) -> None:
    def after(batch, scheduler, plan):
        if batch is None:
            return None
        rows = [r._replace(tokens=r.tokens + array("i", [0])) for r in batch.rows]
        return type(batch)(batch.step, tuple(rows))

    wrap(patch, Scheduler, "_batch", after)


def first_in_order_gives_way(patch: Patch) -> None:
    def victim(self, seq, now):
        idle = [s for s in self._running if s is not seq and not s.in_flight]
        return idle[0] if idle else None

    patch.setattr(Scheduler, "_victim", victim)


def abort_forgets_the_held(patch: Patch) -> None:
    def after(_, roster, seq, num_shared, most):
        if seq.state is State.HELD and seq.request.id.endswith("1"):
            seq.state = State.WAITING

    wrap(patch, Roster, "hold", after)


MUTANTS = [
    publish_at_schedule,
    lookup_covers_the_last_token,
    lookup_ignores_its_bound,
    shared_blocks_are_not_counted,
    idle_shared_blocks_count_as_available,
    evicted_block_stays_in_the_index,
    evicted_block_keeps_its_hash,
    hash_without_parent,
    hash_without_namespace,
    block_published_twice,
    publish_rounds_up,
    failed_rows_are_published,
    grow_one_token_short,
    grow_one_token_long,
    a_block_is_lost_at_release,
    preempted_in_flight,
    freed_in_flight,
    freed_in_flight_unseen_by_check,
    never_retired,
    preempted_row_stays_in_the_plan,
    held_and_never_woken,
    claims_outlive_their_owner,
    stop_ids_not_suppressed,
    prompt_scored_twice_after_preemption,
    length_without_a_bound,
    tokens_of_the_row_one_off,
    first_in_order_gives_way,
    abort_forgets_the_held,
]


# Of speculation: what is changed where.
VERIFY, SETTLE, FORGO = ((Settler, name) for name in ("_verify", "_settle", "_forgo"))
LENGTHEN, BATCH, ROWS, WANTS = (
    (Scheduler, name) for name in ("_lengthen", "_batch", "_rows", "_wants")
)
AFTER, END = (scheduler_module, "_after"), (Roster, "end")
TRIM = "self.blocks.trim(seq, seq.num_scheduled)"
EDITS = {
    "guesses taken unchecked": (VERIFY, " or token != draft[i]", ""),
    "guesses are not masked": (LENGTHEN, ", mask=mask", ""),
    "the mask is one place late": (
        LENGTHEN,
        "enumerate(masks, 1)",
        "enumerate([None, *masks[:-1]], 1)",
    ),
    "forbidden guesses are kept": (
        LENGTHEN,
        "draft = draft[: len(masks)]",
        "masks += [None] * (len(draft) - len(masks))",
    ),
    "tokens behind a stop id": (VERIFY, " or seq.state is State.ENDED", ""),
    "first logprob for all": (VERIFY, "res.logprobs[i : i + 1]", "res.logprobs[:1]"),
    "failed guesses count as computed": (VERIFY, "= old + 1", "= old + len(draft)"),
    "the failed guess counts as computed": (
        VERIFY,
        TRIM,
        f"{TRIM}; seq.num_computed = seq.num_scheduled = len(seq.tokens)",
    ),
    "a right guess is not counted as handed out": (VERIFY, "seq.num_scheduled = old", "old"),
    "publish a failed guess": (
        VERIFY,
        TRIM,
        f"{TRIM}; self.blocks.publish(seq, seq.num_computed, len(seq.tokens))",
    ),
    "publish before the guess is checked": (
        VERIFY,
        "    for i, token in",
        "    self.blocks.publish(seq, seq.num_computed, seq.num_computed + len(draft))\n"
        "    for i, token in",
    ),
    "blocks of failed guesses kept": (VERIFY, TRIM, "pass"),
    "a block too many given back": (
        VERIFY,
        "(seq, seq.num_scheduled)",
        "(seq, seq.num_scheduled - 1)",
    ),
    "the draft outlives its row": (
        VERIFY,
        "draft, seq.draft = seq.draft, NO_DRAFT",
        "draft = seq.draft",
    ),
    "a draft behind a row in flight": (LENGTHEN, "row.start != seq.num_computed or ", ""),
    "a draft beyond the last token": (LENGTHEN, "min(seq.max_len - end - 1, slots)", "slots"),
    "a draft without blocks": (LENGTHEN, "self._grow(seq, end + len(draft))", "pass"),
    "a choice one place off": (LENGTHEN, "Want(at + i", "Want(at - 1 + i"),
    "room not counted": (BATCH, "room -= ", "_ = "),
    "history without the guesses": (AFTER, "spec.history + guesses", "spec.history"),
    "stop ids suppressed too long": (AFTER, "() if may_stop else ", ""),
    "stop ids suppressed at the first place only": (AFTER, "else spec.suppress", "else ()"),
    "a fault behind a guess fails the sequence": (
        SETTLE,
        "self._forgo(seq, old)",
        "events.append(self._roster.fail(seq, fault, now))",
    ),
    "a failed row counts as computed": (FORGO, "= computed", "= seq.num_computed"),
    "draft counted as the sequence's": (
        SETTLE,
        "row.start + len(row.tokens) - drafted",
        "row.start + len(row.tokens)",
    ),
    "a standing want outlives its sequence": (END, "seq.standing = None", "pass"),
    "a want that changes is kept": (WANTS, "not seq.penalised and ", ""),
    "a want that forbids stopping is kept": (WANTS, " and end >= seq.stop_from", ""),
    "a want that a watcher may mask is kept": (WANTS, "seq.watcher is None and ", ""),
    "the want of another place is kept": (WANTS, "free and end - start == 1", "free"),
    "a chunk of one token counts as the last": (ROWS, " or chunk is not ONE", ""),
}


def edited(name: str) -> Callable[[Patch], None]:
    (where, function), old, new = EDITS[name]

    def mutant(patch: Patch) -> None:
        edit(patch, where, function, old, new)

    mutant.__name__ = name
    return mutant


MUTANTS += [edited(name) for name in EDITS]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_planted_bug_is_killed(mutant: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    for seed in range(SEEDS):
        try:
            run(seed)
        except Exception:
            return
    pytest.fail(f"{mutant.__name__} survived {SEEDS} workloads")
