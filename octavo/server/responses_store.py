"""Finished responses, in memory, for each API key its own: the latest, up to a count and a size."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from threading import Lock
from typing import Any

MOST_BYTES = 32 * 2**20  # of one key's responses with the conversations before them


@dataclass(frozen=True, slots=True)
class Kept:
    """response: its JSON. items: the whole conversation up to its end, as input items."""

    response: bytes
    items: tuple[Any, ...]
    size: int


class Shelf:
    """What may be continued. Read by parser threads, written in the event loop."""

    def __init__(self, most: int, most_bytes: int = MOST_BYTES) -> None:
        self.most = most
        self.most_bytes = most_bytes
        self._lock = Lock()
        self._kept: dict[str, OrderedDict[str, Kept]] = {}
        self._sizes: dict[str, int] = {}

    def put(self, owner: str, id: str, kept: Kept) -> None:
        """Keep a response; the owner's oldest go where there is no room."""
        with self._lock:
            mine = self._kept.setdefault(owner, OrderedDict())
            mine[id] = kept
            self._sizes[owner] = self._sizes.get(owner, 0) + kept.size
            while len(mine) > self.most or self._sizes[owner] > self.most_bytes:
                _, oldest = mine.popitem(last=False)
                self._sizes[owner] -= oldest.size

    def find(self, owner: str, id: str) -> Kept | None:
        """A response of the owner's; being asked for keeps it longer."""
        with self._lock:
            mine = self._kept.get(owner)
            if mine is None or id not in mine:
                return None
            mine.move_to_end(id)
            return mine[id]

    def drop(self, owner: str, id: str) -> bool:
        """Forget one; whether it was there."""
        with self._lock:
            kept = self._kept.get(owner, OrderedDict()).pop(id, None)
            if kept is not None:
                self._sizes[owner] -= kept.size
            return kept is not None
