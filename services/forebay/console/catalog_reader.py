"""Read the catalog in the web process.

Queries run on another thread, one at a time, so that the event loop continues.
"""

import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import closing
from typing import TypeVar

import msgspec

from forebay import runtime
from forebay.console.settings import ConsoleSettings
from forebay.ingress.errors import ApiError
from forebay.replay.catalog.facts import CatalogState
from forebay.replay.catalog.live import read_live
from forebay.replay.catalog.store import CatalogError, Store

T = TypeVar("T")
NOTHING = CatalogState(
    begin_us=0, end_us=0, begin_offset=0, end_offset=0, log_end_offset=0, behind_s=0.0, is_complete=False
)


class CatalogReader:
    """Queries of the catalog. `failure` says why the indexer stopped; empty while it follows the log."""

    def __init__(self, settings: ConsoleSettings) -> None:
        self.failure = ""
        self._path = settings.catalog_path
        self._lock = asyncio.Lock()

    async def state(self) -> CatalogState:
        """Return how far the catalog has followed the log.

        A catalog that cannot be read is about to be built, unless the indexer has failed, which is part of the result.
        """
        try:
            live = await self.query(read_live)
        except ApiError:
            live = None
        state = NOTHING if live is None else live[0]
        return msgspec.structs.replace(state, error=self.failure) if self.failure else state

    async def live_status(self) -> bytes | None:
        """Return the newest `GroupStatus` as JSON; None if there is none yet. Raises ApiError."""
        live = await self.query(read_live)
        return None if live is None else live[1] or None

    async def query(self, query: Callable[[Store], T]) -> T:
        """Return the result of a query. Raises ApiError if the catalog cannot be read."""
        async with self._lock:
            try:
                return await runtime.offload(self._run, query)
            except (CatalogError, sqlite3.Error) as error:
                raise ApiError(503, "catalog_unavailable", self.failure or str(error)) from error

    def _run(self, query: Callable[[Store], T]) -> T:
        if not self._path.exists():
            raise CatalogError("the console has only begun to read the log; try again in a second")
        with closing(Store.read(self._path)) as store:  # opened anew, because the indexer may replace the file
            return query(store)
