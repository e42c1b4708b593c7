"""Frames say what has changed, and nothing else: put together they are the tree as it is."""

from __future__ import annotations

import json
import random
from typing import Any

from octavo.core.blocks import BlockManager, chain_hash
from octavo.core.request import BlockHash
from octavo.core.stats import Counters
from octavo.core.view import View
from octavo.server.frames import PIECE, ROOT, UNREADABLE, Frames
from tests.core.machine import ask
from tests.core.test_blocks import computed


def view(hash_of: list[BlockHash | None], parent_of: list[BlockHash | None]) -> View:
    return View(1.0, (), (), 0, hash_of, parent_of)


def parents_of(frame: bytes) -> list[list[int]]:
    found: dict[str, Any] = json.loads(frame.removeprefix(b"data: "))
    return found["parents"]


def plain(seen: View) -> list[int]:
    """Each block's predecessor, the slow way."""
    block_of = {name: block for block, name in enumerate(seen.hash_of) if name is not None}
    return [
        UNREADABLE if name is None else ROOT if parent is None else block_of.get(parent, ROOT)
        for name, parent in zip(seen.hash_of, seen.parent_of, strict=True)
    ]


def test_changes_of_the_prefix_tree_add_up_through_growth_and_eviction() -> None:
    draw = random.Random(5)
    blocks = BlockManager(2 * PIECE + 40, 4)
    frames, known = Frames({}, blocks.num_blocks), [UNREADABLE] * blocks.num_blocks
    for number in range(400):
        stem = [draw.randrange(3)] * 4 * draw.randrange(1, 6)
        seq = computed(blocks, [*stem, *(draw.randrange(50) for _ in range(9))])
        blocks.release(seq)
        if number % 3:
            continue  # some changes come together
        seen = view(blocks._hash_of[:], blocks._parent_of[:])
        for block, parent in parents_of(frames.frame(seen, (), Counters())):
            assert known[block] != parent
            known[block] = parent
        assert known == plain(seen)
    assert blocks.num_evictions > 100
    whole = dict(parents_of(frames.hello()))
    assert [whole.get(block, UNREADABLE) for block in range(blocks.num_blocks)] == known


def test_a_block_knows_what_stands_before_it() -> None:
    blocks = BlockManager(8, 4)
    seq = computed(blocks, [*range(12)])
    first, second, third = (blocks._hash_of[block] for block in seq.block_table)
    assert [blocks._parent_of[block] for block in seq.block_table] == [None, first, second]
    assert third == chain_hash(second or b"", ask("r", range(12)).prompt[8:])  # type: ignore[arg-type]
