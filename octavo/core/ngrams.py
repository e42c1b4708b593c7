"""Where a text has been in the same place before: hash chains, as in deflate (RFC 1951, section 4).

Every pair of neighbouring tokens is filed under a hash, each place pointing to the one before it
with the same hash. A search walks that chain from the latest place backwards, a bounded number of
steps, and takes the place that most tokens before it agree with. Filing costs about 0.2 us a token
and 12 bytes, a search a few us, both independent of how long the text is.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq

LONGEST = 16  # tokens beyond which agreement says no more
SHORTEST = 2
TRIES = 12  # places looked at in one search
AT_ONCE = 1024  # tokens filed by one call

# Multiplicative hashing (Knuth): large odd factors, and the middle bits of the sum.
_FIRST, _SECOND, _SHIFT = 668_265_263, 374_761_393, 13


class Trail:
    """A growing text and its index. `lead`: tokens that stand before it and may be continued; what
    follows them is another text, so that nothing runs on from one into the other."""

    __slots__ = ("_filed", "_head", "_lead", "_prev", "text")

    END = -1  # no token; stands between the lead and the text

    def __init__(self, lead: Seq[int] = ()) -> None:
        self.text = array("i", lead)
        if lead:
            self.text.append(self.END)
        self._lead = len(self.text)
        self._clear(256)

    def _clear(self, size: int) -> None:
        self._head = array("i", bytes(4 * size))  # by hash: the latest place, 0 for none
        self._prev = array("i", (0,))  # by place: the one before it with the same hash
        self._filed = 1

    def extend(self, tokens: array[int]) -> None:
        """Take what `tokens`, the whole text without the lead, has beyond what is known."""
        self.text.extend(tokens[len(self.text) - self._lead :])
        size = len(self._head)
        if len(self.text) > size:
            while size < 2 * len(self.text):
                size *= 2
            self._clear(size)
        self._file()

    def _file(self) -> None:
        """File pairs that have a next token, at most AT_ONCE of them."""
        text, head, prev = self.text, self._head, self._prev
        mask, first = len(head) - 1, self._filed
        end = min(len(text) - 1, first + AT_ONCE)
        if first >= end:
            return
        before = text[first - 1]
        for at in range(first, end):
            token = text[at]
            slot = (before * _FIRST + token * _SECOND >> _SHIFT) & mask
            prev.append(head[slot])
            head[slot] = at
            before = token
        self._filed = end

    def search(self) -> tuple[int, int]:
        """(n, place): the longest run of n tokens, at most LONGEST, that ends the text and has
        stood before, up to just before `place`; the latest of equals. (0, 0) if n is too small."""
        text = self.text
        last = len(text) - 1
        if last < SHORTEST:
            return 0, 0
        key = text[last - 1] * _FIRST + text[last] * _SECOND >> _SHIFT
        at = self._head[key & (len(self._head) - 1)]
        best, place = SHORTEST - 1, 0
        for _ in range(TRIES):
            if not at:
                break
            n, most = 0, min(LONGEST, at + 1)
            while n < most and text[at - n] == text[last - n]:
                n += 1
            if n > best:
                best, place = n, at + 1
                if n == LONGEST:
                    break
            at = self._prev[at]
        return (best, place) if place else (0, 0)

    def following(self, place: int, most: int) -> array[int]:
        """At most `most` tokens from `place` on: to the end of the lead, or round in a circle."""
        if place < self._lead:
            return self.text[place : min(place + most, self._lead - 1)]
        draft = self.text[place : place + most]
        while len(draft) < most:
            draft.extend(draft[: most - len(draft)])
        return draft
