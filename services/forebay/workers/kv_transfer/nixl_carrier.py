"""Blocks by NIXL, seen from the event loop: what the thread is asked, and what becomes of slots that were given up."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from forebay.workers.engine import EngineError
from forebay.workers.kv_transfer.api import GivenBack, Stats
from forebay.workers.kv_transfer.descriptor import Place
from forebay.workers.kv_transfer.memory import Arena
from forebay.workers.kv_transfer.nixl_agent import TransferError, load_nixl
from forebay.workers.kv_transfer.nixl_reads import DROPPED, FETCHED, Read
from forebay.workers.kv_transfer.nixl_thread import NixlThread

if TYPE_CHECKING:
    from forebay.workers.kv_transfer.api import Numbers
    from forebay.workers.kv_transfer.descriptor import Slots

_WHYS: dict[str, GivenBack] = {FETCHED.decode(): "fetched", DROPPED.decode(): "released"}
_NOTE_CHARS_MAX = 20  # a letter and 63 bits


class _Reading:
    """A read that an event loop waits for, until it is over or given up; its slots are `kept` then."""

    def __init__(self, read: Read) -> None:
        self.read = read
        self.over = asyncio.get_running_loop().create_future()
        self.ended = False
        self.kept: Slots | None = None


class NixlCarrier:
    """See `Carrier`."""

    route = b""

    def __init__(
        self, name: str, arena: Arena, stats: Stats, end: Callable[[int, GivenBack], bool], interface: str = ""
    ) -> None:
        self._arena = arena
        self._stats = stats
        self._end = end
        self._loop = asyncio.get_running_loop()
        self._thread = NixlThread(name, arena, self._note, interface)

    async def start(self) -> None:
        """Have an agent, its memory registered."""
        load_nixl("KV blocks travel")
        try:
            await asyncio.to_thread(self._thread.start)
        except Exception as error:  # the bindings' own classes
            raise EngineError(f"NIXL does not start: {error}") from error
        self.route = self._thread.metadata

    async def read(self, place: Place, theirs: "Slots", into: "Numbers", *, tell: bool) -> None:
        """One READ of a list of blocks, and one of the generation word."""
        self._arena.promise(len(into))
        reading = _Reading(Read(place, theirs, self._arena.slots_of(into), tell=tell))
        try:
            self._thread.read(reading.read, lambda error: self._call(lambda: self._over(reading, error)))
            await reading.over
        except asyncio.CancelledError:
            if not reading.ended:
                reading.read.abandoned = True
                reading.kept = self._arena.set_apart(into)
                self._stats.quarantined_blocks += len(into)
            raise
        finally:
            self._arena.unpromise(len(into))

    def tell(self, place: Place, *, fetched: bool) -> None:
        """By a notification."""
        self._thread.tell(place, FETCHED if fetched else DROPPED)

    def unanswered(self, place: Place) -> None:
        """It is asked no more as long as it owes anything."""
        self._thread.silence(place.agent)

    def holding(self, offers: int) -> None:
        """The thread polls as long as any wait."""
        if self._thread.holding != bool(offers):
            self._thread.holding = bool(offers)
            self._thread.wake()

    async def close(self) -> None:
        """End the thread. What others may still write to is kept for the life of the process."""
        await asyncio.to_thread(self._thread.stop)

    def _over(self, reading: _Reading, error: TransferError | None) -> None:
        reading.ended = True
        if reading.kept is not None:
            self._arena.give_back(reading.kept)
            self._stats.quarantined_blocks -= len(reading.kept)
        elif not reading.over.done():
            if error is None:
                reading.over.set_result(None)
            else:
                reading.over.set_exception(error)

    def _note(self, text: str) -> None:
        why, number = _WHYS.get(text[:1]), text[1:_NOTE_CHARS_MAX]
        if why is not None and number.isascii() and number.isdigit():
            self._call(lambda: self._end(int(number), why))

    def _call(self, act: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed: there is nobody to tell
            self._loop.call_soon_threadsafe(act)
