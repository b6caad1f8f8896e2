"""Carrier that uses NIXL: passes reads to the NIXL thread, and quarantines the slots of abandoned reads."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from forebay.workers.engine import EngineError
from forebay.workers.kv_transfer.api import FreeReason, Stats
from forebay.workers.kv_transfer.descriptor import BlockLocation
from forebay.workers.kv_transfer.memory import Arena
from forebay.workers.kv_transfer.nixl_agent import TransferError, load_nixl
from forebay.workers.kv_transfer.nixl_reads import DROPPED, FETCHED, Read
from forebay.workers.kv_transfer.nixl_thread import NixlThread

if TYPE_CHECKING:
    from forebay.workers.kv_transfer.api import Numbers
    from forebay.workers.kv_transfer.descriptor import Slots

_WHYS: dict[str, FreeReason] = {FETCHED.decode(): "fetched", DROPPED.decode(): "released"}
_NOTE_CHARS_MAX = 20  # length of a notification: a letter, and a 63-bit number in decimal


class _Reading:
    """A read in progress.

    Attributes:
        over: future that completes when the read has ended.
        kept: quarantined slots of an abandoned read; None if it was not abandoned.
    """

    def __init__(self, read: Read) -> None:
        self.read = read
        self.over = asyncio.get_running_loop().create_future()
        self.ended = False
        self.kept: Slots | None = None


class NixlCarrier:
    """Implementation of `Carrier` with NIXL."""

    route = b""

    def __init__(
        self, name: str, arena: Arena, stats: Stats, end: Callable[[int, FreeReason], bool], interface: str = ""
    ) -> None:
        self._arena = arena
        self._stats = stats
        self._end = end
        self._loop = asyncio.get_running_loop()
        self._thread = NixlThread(name, arena, self._note, interface)

    async def start(self) -> None:
        """Start the NIXL thread, which creates the agent and registers the memory. Raises EngineError if NIXL fails."""
        load_nixl("KV transfers")
        try:
            await asyncio.to_thread(self._thread.start)
        except Exception as error:  # NIXL raises its own classes
            raise EngineError(f"cannot start NIXL: {error}") from error
        self.route = self._thread.metadata

    async def read(self, place: BlockLocation, theirs: "Slots", into: "Numbers", *, notify: bool) -> None:
        """Read the blocks with NIXL, then the generation word, which shows whether the holder kept the blocks.

        If the caller cancels this coroutine during the read, the slots of the blocks are quarantined.
        """
        self._arena.reserve(len(into))
        reading = _Reading(Read(place, theirs, self._arena.slots_of(into), notify=notify))
        try:
            self._thread.read(reading.read, lambda error: self._call(lambda: self._over(reading, error)))
            await reading.over
        except asyncio.CancelledError:
            if not reading.ended:
                reading.read.abandoned = True
                reading.kept = self._arena.quarantine(into)
                self._stats.quarantined_blocks += len(into)
            raise
        finally:
            self._arena.unreserve(len(into))

    def notify(self, place: BlockLocation, *, fetched: bool) -> None:
        """Send the holder a NIXL notification that it can free its blocks."""
        self._thread.notify(place, FETCHED if fetched else DROPPED)

    def unanswered(self, place: BlockLocation) -> None:
        """Begin no reads from this holder until all its reads in progress have ended."""
        self._thread.silence(place.agent)

    def holding(self, offers: int) -> None:
        """Make the NIXL thread poll more often while this worker has offers, because readers depend on it."""
        if self._thread.holding != bool(offers):
            self._thread.holding = bool(offers)
            self._thread.wake()

    async def close(self) -> None:
        """End the NIXL thread. Memory to which transfers may still write is kept until the process ends."""
        await asyncio.to_thread(self._thread.stop)

    def _over(self, reading: _Reading, error: TransferError | None) -> None:
        reading.ended = True
        if reading.kept is not None:
            self._arena.restore_spares(reading.kept)
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
        with contextlib.suppress(RuntimeError):  # the loop was closed: nothing awaits the result
            self._loop.call_soon_threadsafe(act)
