"""Bodies into jobs: parsed where that holds nobody up, and what must be compiled where that may
take its time.

A body is parsed with the grammars that are there. One that lacks a grammar waits for it, in its
tenant's turn, and is parsed again: whoever needs no compiler never waits for one, and of a tenant
only one grammar is compiled at a time, so that slow ones hold up its own requests first.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import TypeVar
from weakref import WeakValueDictionary

from octavo.grammar.compiled import Found, Grammars, Key, Missing

INLINE_BODY = 4 * 1024  # longer bodies are parsed and tokenised in a thread

Made = TypeVar("Made")


class Compiling:
    """Parses with the grammars of one model. grammars: None where there are none; parsers,
    compilers: the threads for each. Used in the event loop."""

    def __init__(self, grammars: Grammars | None, parsers: Executor, compilers: Executor) -> None:
        self._grammars = grammars
        self._parsers = parsers
        self._compilers = compilers
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def at_once(self, parse: Callable[[], Made], size: int) -> Made | None:
        """What `parse` makes of a body of `size` bytes; None if that has to wait."""
        if size > INLINE_BODY:
            return None
        try:
            return self._with({}, parse)
        except Missing:
            return None

    async def made(self, parse: Callable[[], Made], tenant: str) -> Made:
        """What `parse` makes, once its grammars are compiled. Raises what `parse` does."""
        found: dict[Key, Found] = {}
        loop = asyncio.get_running_loop()
        while True:
            try:
                return await loop.run_in_executor(self._parsers, self._with, found, parse)
            except Missing as missing:
                # Kept here too: nobody else's grammar can push it out before it is used.
                found[missing.key] = await self._compiled(missing.key, tenant)

    def _with(self, found: dict[Key, Found], parse: Callable[[], Made]) -> Made:
        if self._grammars is None:
            return parse()
        with self._grammars.compiling_none(found):
            return parse()

    async def _compiled(self, key: Key, tenant: str) -> Found:
        assert self._grammars is not None
        turn = self._turns.get(tenant)
        if turn is None:
            turn = self._turns[tenant] = asyncio.Lock()
        await turn.acquire()
        loop = asyncio.get_running_loop()
        try:
            work = self._compilers.submit(self._grammars.find, key)
        except BaseException:
            turn.release()
            raise

        # A client that leaves does not end what has begun: the turn is over when that is.
        def over(_: Future[Found]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(turn.release)

        work.add_done_callback(over)
        return await asyncio.wrap_future(work)
