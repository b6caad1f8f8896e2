"""Server-sent events with the state of the catalog, so that a page knows when to read again.

One task reads the state for all clients. An event carries the newest state only, so a slow client skips states and
nothing accumulates for it.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable

import msgspec

from forebay import runtime
from forebay.ingress.errors import ApiError
from forebay.replay.catalog.facts import CatalogState

READ_EVERY_S = 0.25  # at most four updates per second, which people can still follow
REPEAT_AFTER_S = 5.0  # so that a client notices a lost connection
CLIENTS_MAX = 64


class StateFeed:
    """Reads the state of a catalog regularly, and streams it to clients."""

    def __init__(self, read: Callable[[], Awaitable[CatalogState]]) -> None:
        self._read = read
        self._state: CatalogState | None = None
        self._changed = asyncio.Event()
        self._clients = 0

    async def run(self) -> None:
        while True:
            if self._clients:
                state = await self._read()
                if state != self._state:
                    self._state = state
                    self._changed.set()
                    self._changed = asyncio.Event()
            await asyncio.sleep(READ_EVERY_S)

    def stream(self) -> AsyncGenerator[bytes]:
        """Return the events of `text/event-stream`, until the client disconnects. Raises ApiError (503)."""
        # Not in the generator, which runs only after the status of the response was sent.
        if self._clients >= CLIENTS_MAX:
            raise ApiError(503, "too_many_clients", f"{CLIENTS_MAX} pages are already open; close one of them")
        return self._events()

    async def _events(self) -> AsyncGenerator[bytes]:
        self._clients += 1
        try:
            self._state = await self._read()
            shown: CatalogState | None = None
            due_s = 0.0
            while True:
                if self._state != shown or runtime.monotonic_s() >= due_s:
                    shown = self._state
                    due_s = runtime.monotonic_s() + REPEAT_AFTER_S
                    yield b"event: state\ndata: " + msgspec.json.encode(shown) + b"\n\n"
                changed = self._changed
                try:
                    async with asyncio.timeout(REPEAT_AFTER_S):
                        await changed.wait()
                except TimeoutError:
                    continue
        finally:
            self._clients -= 1
