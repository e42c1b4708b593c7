"""Who holds which KV block: the pool, the prefix index, and the claims on blocks being computed.

A block is `held` (in the block table of at least one sequence), `cached` (held by none, readable
through the index, evicted least recently used first) or `free`. Full blocks are indexed by a
256-bit hash chained over all tokens up to their end and seeded with the request's namespace, so
equal hashes mean equal KV; the hashes are the same in every process. A block enters the index
when it has been computed (`publish`, at commit), never before.

The invariant to keep is law 3 of the architecture; `check` states it.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from functools import lru_cache
from hashlib import blake2b
from itertools import islice

from octavo.core.history import Cold
from octavo.core.request import BlockHash, Sequence, State

NAMESPACES = 1024  # whose first parents are kept: every door asks for one
REMEMBERED = 8192  # evicted blocks whose hashes are kept, to say why a prompt was not cached


@lru_cache(NAMESPACES)
def root_hash(namespace: bytes) -> BlockHash:
    """The parent of every first block of a namespace."""
    return BlockHash(blake2b(namespace, digest_size=32, person=b"octavo kv root").digest())


def chain_hash(parent: BlockHash, tokens: array[int]) -> BlockHash:
    """The hash of a full block of tokens (32-bit, little-endian) that follows `parent`."""
    # Not by calling BlockHash: a NewType is a function, and this is called for every block.
    return blake2b(parent + tokens.tobytes(), digest_size=32).digest()  # type: ignore[return-value]


def block_hashes(namespace: bytes, tokens: array[int], block_size: int) -> list[BlockHash]:
    """The hashes of all full blocks of `tokens`; what routers and simulators compare."""
    hashes: list[BlockHash] = []
    parent = root_hash(namespace)
    for start in range(0, len(tokens) - block_size + 1, block_size):
        parent = chain_hash(parent, tokens[start : start + block_size])
        hashes.append(parent)
    return hashes


class BlockManager:
    """`num_blocks` blocks of `block_size` tokens; without prefix_caching nothing is ever shared."""

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.num_evictions = 0
        self._gone: OrderedDict[BlockHash, None] = OrderedDict()  # evicted of late, oldest first
        self._refs = [0] * num_blocks
        self._hash_of: list[BlockHash | None] = [None] * num_blocks
        self._parent_of: list[BlockHash | None] = [None] * num_blocks  # of indexed ones; for views
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._index: dict[BlockHash, int] = {}
        self._claims: dict[BlockHash, Sequence] = {}

    @property
    def num_available(self) -> int:
        """Blocks that a sequence could get now: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_available

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks cover so many tokens."""
        return -(-num_tokens // self.block_size)

    def num_idle(self, blocks: Seq[int]) -> int:
        """How many of these no sequence holds: they count as available until they are shared."""
        refs = self._refs
        return sum(1 for block in blocks if refs[block] == 0)

    def lookup(self, seq: Sequence, max_tokens: int | None = None) -> list[int]:
        """The longest cached prefix of at most max_tokens tokens, as blocks.

        It never covers the last token: that one must be computed for its logits.
        """
        if not self.prefix_caching:
            return []
        limit = self._shareable(seq, max_tokens)
        self._extend_hashes(seq, limit)
        found: list[int] = []
        for hash_ in islice(seq.hashes, limit):
            block = self._index.get(hash_)
            if block is None:
                break
            found.append(block)
        return found

    def num_cached_tokens(self, namespace: bytes, tokens: array[int]) -> int:
        """How much of a prompt the cache has now. Hashes as far as it hits and no further; only
        reads, so that a door in another thread may ask (the answer may be old by then)."""
        if not self.prefix_caching:
            return 0
        size, index, parent = self.block_size, self._index, root_hash(namespace)
        for start in range(0, len(tokens) - size, size):
            parent = chain_hash(parent, tokens[start : start + size])
            if parent not in index:
                return start
        return (len(tokens) - 1) // size * size

    def cold(self, seq: Sequence, num_cached: int, max_tokens: int | None) -> Cold:
        """Why no more than num_cached tokens of its prompt came from the cache."""
        if not self.prefix_caching:
            return Cold.OFF
        at = num_cached // self.block_size
        if at >= (seq.num_prompt - 1) // self.block_size:
            return Cold.ALL if at else Cold.SHORT
        if max_tokens is not None and num_cached + self.block_size > max_tokens:
            return Cold.SCORED
        return Cold.EVICTED if seq.hashes[at] in self._gone else Cold.NEW

    def awaited(
        self, seq: Sequence, num_shared: int, max_tokens: int | None = None
    ) -> BlockHash | None:
        """The last block of the run after the first num_shared ones that others are computing.

        None if the next block is claimed by nobody: then there is nothing to wait for.
        """
        last = None
        if self._claims:
            for hash_ in islice(seq.hashes, num_shared, self._shareable(seq, max_tokens)):
                if hash_ not in self._claims:
                    break
                last = hash_
        return last

    def claimant(self, hash_: BlockHash) -> Sequence | None:
        """Who is going to compute that block."""
        return self._claims.get(hash_)

    def claim(self, seq: Sequence) -> None:
        """Say that `seq` is going to compute its blocks beyond num_computed."""
        if not self.prefix_caching:
            return
        end = len(seq.tokens) // self.block_size
        self._extend_hashes(seq, end)
        for hash_ in islice(seq.hashes, seq.num_computed // self.block_size, end):
            if hash_ not in self._index:
                self._claims.setdefault(hash_, seq)

    def grow(self, seq: Sequence, num_tokens: int, shared: Seq[int] = ()) -> bool:
        """Make the block table cover num_tokens, beginning with `shared` blocks if any.

        All or nothing: False, and nothing changed, if there are too few blocks.
        """
        need = self.blocks_for(num_tokens) - len(seq.block_table) - len(shared)
        if need > self.num_available - self.num_idle(shared):
            return False
        refs, cached = self._refs, self._cached
        for block in shared:
            if refs[block] == 0:
                del cached[block]
            refs[block] += 1
        free = self._free
        if 0 <= need <= len(free):
            new = free[: -need - 1 : -1]
            del free[len(free) - need :]
        else:
            new = [free.pop() if free else self._evict() for _ in range(need)]
        for block in new:
            refs[block] = 1
        seq.block_table = seq.block_table + array("i", [*shared, *new])
        return True

    def add(self, seq: Sequence) -> bool:
        """Grow by one block; False, and nothing changed, if there is none."""
        if self._free:
            block = self._free.pop()
        elif self._cached:
            block = self._evict()
        else:
            return False
        self._refs[block] = 1
        seq.block_table = seq.block_table + array("i", (block,))
        return True

    def publish(self, seq: Sequence, old: int, new: int) -> None:
        """Index the blocks that filled when num_computed went from `old` to `new`."""
        first, end = old // self.block_size, new // self.block_size
        if first == end or not self.prefix_caching:
            return
        self._extend_hashes(seq, end)
        for i in range(first, end):
            hash_, block = seq.hashes[i], seq.block_table[i]
            self._claims.pop(hash_, None)
            # A twin may have computed it first: tables only grow, so ours stays private.
            if hash_ not in self._index:
                self._index[hash_] = block
                self._hash_of[block] = hash_
                self._parent_of[block] = seq.hashes[i - 1] if i else None

    def release(self, seq: Sequence) -> None:
        """Give back all blocks and claims; indexed blocks stay readable until evicted."""
        self._drop_claims(seq)
        refs, hash_of = self._refs, self._hash_of
        # Tails first: a shared prefix must outlive the suffixes that hang from it.
        for block in reversed(seq.block_table):
            refs[block] -= 1
            if refs[block] == 0:
                if hash_of[block] is None:
                    self._free.append(block)
                else:
                    self._cached[block] = None
        seq.block_table = array("i")

    def trim(self, seq: Sequence, num_tokens: int) -> None:
        """Give back the blocks beyond num_tokens, which hold only guesses that failed: nobody
        shares them, and they are in no index."""
        keep = self.blocks_for(num_tokens)
        if keep < len(seq.block_table):
            for block in reversed(seq.block_table[keep:]):
                self._refs[block] = 0
                self._free.append(block)
            seq.block_table = seq.block_table[:keep]

    def check(self, live: Iterable[Sequence]) -> None:
        """Law 3, for the sequences that hold blocks. Raises AssertionError naming what broke."""
        seqs = list(live)
        held = Counter(block for seq in seqs for block in seq.block_table)
        for block in range(self.num_blocks):
            assert self._refs[block] == held[block], f"block {block}: refs != tables that hold it"
        everything = sorted([*self._free, *self._cached, *held])
        assert everything == list(range(self.num_blocks)), "free + held + cached != all"
        for block in self._free:
            assert self._hash_of[block] is None, f"free block {block} has a hash"
        named = {h: b for b, h in enumerate(self._hash_of) if h is not None}
        assert named == self._index, "index and block hashes disagree"
        assert all(self._hash_of[block] is not None for block in self._cached), "cached, unreadable"
        for seq in seqs:
            self._check_sequence(seq)
        owners = {id(seq) for seq in seqs}
        assert all(id(seq) in owners for seq in self._claims.values()), "claim without an owner"

    def _check_sequence(self, seq: Sequence) -> None:
        size = self.block_size
        assert seq.num_computed <= seq.num_scheduled <= len(seq.tokens), "counters out of order"
        # One that failed while a step was being filled may have grown; it is in flight.
        spare = len(seq.block_table) - self.blocks_for(seq.num_scheduled + len(seq.draft))
        assert spare == 0 or (spare > 0 and seq.state is State.ENDED), "a block wasted or missing"
        truth = block_hashes(seq.request.namespace, seq.tokens, size)
        assert seq.hashes == truth[: len(seq.hashes)], "hashes are not those of the tokens"
        for i, block in enumerate(seq.block_table):
            hash_ = self._hash_of[block]
            if hash_ is not None:
                assert (i + 1) * size <= seq.num_computed, "readable before it is computed"
                assert hash_ == truth[i], "a shared block holds other tokens"

    def _shareable(self, seq: Sequence, max_tokens: int | None) -> int:
        most = len(seq.tokens) - 1
        if max_tokens is not None:
            most = min(most, max_tokens)
        return most // self.block_size

    def _extend_hashes(self, seq: Sequence, num_blocks: int) -> None:
        hashes, size = seq.hashes, self.block_size
        if len(hashes) >= num_blocks:
            return
        parent = hashes[-1] if hashes else root_hash(seq.request.namespace)
        for i in range(len(hashes), num_blocks):
            parent = chain_hash(parent, seq.tokens[i * size : (i + 1) * size])
            hashes.append(parent)

    def _drop_claims(self, seq: Sequence) -> None:
        for hash_ in seq.hashes if self._claims else ():
            if self._claims.get(hash_) is seq:
                del self._claims[hash_]

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        hash_ = self._hash_of[block]
        assert hash_ is not None
        del self._index[hash_]
        self._hash_of[block] = None
        self.num_evictions += 1
        self._gone[hash_] = None
        if len(self._gone) > REMEMBERED:
            self._gone.popitem(last=False)
        return block
