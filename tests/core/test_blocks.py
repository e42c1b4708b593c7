"""Laws of the block manager, one at a time."""

from __future__ import annotations

import subprocess
import sys
from array import array

import pytest

from octavo.core.blocks import BlockManager, block_hashes, chain_hash, root_hash
from octavo.core.request import Sequence
from tests.core.machine import ask


def computed(manager: BlockManager, tokens: list[int], namespace: bytes = b"") -> Sequence:
    """A sequence whose tokens are all computed and published."""
    seq = Sequence(0, ask("r", tokens, namespace=namespace), 0, 0)
    shared = manager.lookup(seq)
    assert manager.grow(seq, len(tokens), shared)
    seq.num_computed = seq.num_scheduled = len(tokens)
    manager.publish(seq, len(shared) * manager.block_size, len(tokens))
    return seq


def fresh(tokens: list[int], namespace: bytes = b"") -> Sequence:
    return Sequence(1, ask("s", tokens, namespace=namespace), 0, 1)


def test_hashes_are_256_bit_chained_and_named_by_the_whole_prefix() -> None:
    tokens = array("i", range(8))
    first, second = block_hashes(b"model", tokens, 4)
    assert len(first) == len(second) == 32
    assert first == chain_hash(root_hash(b"model"), tokens[:4])
    assert second == chain_hash(first, tokens[4:])
    assert second != chain_hash(root_hash(b"model"), tokens[4:])
    assert block_hashes(b"other", tokens, 4)[0] != first
    assert block_hashes(b"model", tokens[:7], 4) == [first]


def test_hashes_are_equal_in_every_process() -> None:
    code = (
        "from array import array; from octavo.core.blocks import block_hashes;"
        "print(block_hashes(b'm', array('i', range(64)), 32)[1].hex())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == block_hashes(b"m", array("i", range(64)), 32)[1].hex()


@pytest.mark.parametrize("size", [1, 2, 4, 7])
def test_lookup_finds_full_blocks_and_never_the_last_token(size: int) -> None:
    manager = BlockManager(64, size)
    tokens = [i % 5 for i in range(20)]
    held = computed(manager, tokens)
    for length in range(1, 21):
        found = manager.lookup(fresh(tokens[:length]))
        assert found == list(held.block_table)[: (length - 1) // size]
    assert manager.lookup(fresh([9, *tokens])) == []
    assert manager.lookup(fresh(tokens), 2 * size) == list(held.block_table)[:2]


def test_namespaces_never_share() -> None:
    manager = BlockManager(16, 4)
    computed(manager, list(range(8)), b"one")
    assert len(manager.lookup(fresh(list(range(9)), b"one"))) == 2
    assert manager.lookup(fresh(list(range(9)), b"two")) == []


def test_grow_is_all_or_nothing_and_counts_idle_shared_blocks_once() -> None:
    manager = BlockManager(4, 4)
    manager.release(computed(manager, list(range(8))))
    seq = fresh([*range(8), *range(20, 29)])  # 17 tokens, five blocks
    shared = manager.lookup(seq)
    assert len(shared) == 2
    assert manager.num_idle(shared) == 2
    assert not manager.grow(seq, 17, shared)
    assert not seq.block_table
    assert manager.num_available == 4
    assert manager.grow(seq, 16, shared)
    assert manager.num_available == 0
    assert manager.num_held == 4


def test_what_a_table_covers_already_takes_no_block() -> None:
    manager = BlockManager(8, 4)
    seq = fresh(list(range(12)))
    assert manager.grow(seq, 12)
    table = seq.block_table
    for count in (12, 9, 4, 0):
        assert manager.grow(seq, count)
        assert seq.block_table == table
        assert manager.num_available == 5


def test_eviction_takes_the_least_recently_released_and_tails_before_heads() -> None:
    manager = BlockManager(6, 2)
    old, new = computed(manager, [1, 2, 3, 4, 5, 6]), computed(manager, [7, 8, 9, 10, 11, 12])
    manager.release(old)
    manager.release(new)
    assert manager.num_cached == 6
    taker = fresh([20] * 8)
    assert manager.grow(taker, 4)  # two blocks: the tail of the older goes first
    assert len(manager.lookup(fresh([1, 2, 3, 4, 5, 6, 0]))) == 1
    assert len(manager.lookup(fresh([7, 8, 9, 10, 11, 12, 0]))) == 3
    assert manager.grow(taker, 8)
    assert len(manager.lookup(fresh([1, 2, 3, 4, 5, 6, 0]))) == 0
    assert len(manager.lookup(fresh([7, 8, 9, 10, 11, 12, 0]))) == 2
    assert manager.num_evictions == 4


def test_a_hit_makes_a_block_young_again() -> None:
    manager = BlockManager(4, 2)
    first, second = computed(manager, [1, 2]), computed(manager, [3, 4])
    manager.release(first)
    manager.release(second)
    again = fresh([1, 2, 0])
    assert manager.grow(again, 2, manager.lookup(again))
    manager.release(again)
    assert manager.grow(fresh([9] * 6), 6)  # two free ones and the older cached one
    assert len(manager.lookup(fresh([1, 2, 0]))) == 1
    assert manager.lookup(fresh([3, 4, 0])) == []


def test_a_block_computed_twice_is_indexed_once_and_both_come_back() -> None:
    manager = BlockManager(4, 4)
    one, two = fresh(list(range(4))), fresh(list(range(4)))
    for seq in (one, two):
        assert manager.grow(seq, 4)
        seq.num_computed = seq.num_scheduled = 4
    manager.publish(one, 0, 4)
    manager.publish(two, 0, 4)
    manager.check([one, two])
    manager.release(two)
    assert (manager.num_cached, manager.num_available) == (0, 3)
    manager.release(one)
    assert (manager.num_cached, manager.num_available) == (1, 4)


def test_a_partial_block_is_never_readable() -> None:
    manager = BlockManager(8, 4)
    seq = fresh(list(range(12)))
    assert manager.grow(seq, 12)
    manager.publish(seq, 0, 7)
    assert len(manager.lookup(fresh(list(range(12))))) == 1
    manager.publish(seq, 7, 8)
    assert len(manager.lookup(fresh(list(range(12))))) == 2


def test_a_claim_is_awaited_by_others_up_to_the_last_block_in_common() -> None:
    manager = BlockManager(16, 4)
    leader, twin = fresh(list(range(14))), fresh([*range(8), *range(50, 58)])
    assert manager.grow(leader, 14)
    manager.claim(leader)
    assert manager.lookup(twin) == []
    assert manager.awaited(twin, 0) == twin.hashes[1]
    manager.publish(leader, 0, 8)
    assert manager.awaited(twin, len(manager.lookup(twin))) is None
    leader.num_computed = 8
    manager.release(leader)
    assert manager.awaited(fresh(list(range(14))), 2) is None


def test_without_prefix_caching_nothing_is_found_or_claimed() -> None:
    manager = BlockManager(16, 4, prefix_caching=False)
    seq = computed(manager, list(range(12)))
    manager.claim(seq)
    assert manager.lookup(fresh(list(range(12)))) == []
    assert manager.awaited(fresh(list(range(12))), 0) is None
    manager.release(seq)
    assert manager.num_cached == 0


def test_check_names_what_broke() -> None:
    manager = BlockManager(4, 4)
    seq = computed(manager, list(range(4)))
    manager.check([seq])
    with pytest.raises(AssertionError, match="refs"):
        manager.check([])
    seq.num_computed = 3
    with pytest.raises(AssertionError, match="readable before"):
        manager.check([seq])
