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
from forebay.replay.catalog import markers, requests, series
from forebay.replay.catalog.facts import (
    CatalogState,
    Marker,
    MetricSeries,
    RequestPage,
    RequestRow,
    WorkerActivity,
)
from forebay.replay.catalog.live import read_live
from forebay.replay.catalog.requests import RequestFilter
from forebay.replay.catalog.store import CatalogError, Store

T = TypeVar("T")
NOTHING = CatalogState(
    begin_us=0, end_us=0, begin_offset=0, end_offset=0, log_end_offset=0, behind_s=0.0, is_complete=False
)


class CatalogReader:
    """Queries of the catalog.

    Args:
        settings: what the console shows.

    Attributes:
        failure: why no process follows the log now; empty while one does.
    """

    def __init__(self, settings: ConsoleSettings) -> None:
        self.failure = ""
        self._path = settings.catalog_path
        self._lock = asyncio.Lock()

    async def state(self) -> CatalogState:
        """Return how far the catalog has followed the log.

        A catalog that cannot be read is about to be built, unless the indexer has failed, which is part of the result.
        """
        try:
            live = await self._query(read_live)
        except ApiError:
            live = None
        state = NOTHING if live is None else live[0]
        return msgspec.structs.replace(state, error=self.failure) if self.failure else state

    async def live_status(self) -> bytes | None:
        """Return the newest `GroupStatus` as JSON; None if there is none yet. Raises ApiError."""
        live = await self._query(read_live)
        return None if live is None else live[1] or None

    async def requests(self, at_us: int | None, filters: RequestFilter, before: int | None, limit: int) -> RequestPage:
        """Return requests that match a filter, newest first. Raises ApiError."""
        return await self._query(lambda store: requests.requests(store.connection, at_us, filters, before, limit))

    async def request(self, number: int) -> RequestRow | None:
        """Return the request that was submitted at an offset; None if there is none. Raises ApiError."""
        return await self._query(lambda store: requests.request(store.connection, number))

    async def series(self, from_us: int, to_us: int, points: int) -> MetricSeries:
        """Return metrics over time. Raises ApiError."""
        return await self._query(lambda store: series.series(store.connection, from_us, to_us, points))

    async def markers(self, from_us: int, to_us: int, limit: int) -> list[Marker]:
        """Return events of interest in a span of time. Raises ApiError."""
        return await self._query(lambda store: markers.markers(store.connection, from_us, to_us, limit))

    async def worker_activity(self, at_us: int) -> list[WorkerActivity]:
        """Return the activity of each worker in the minute before a moment. Raises ApiError."""
        return await self._query(lambda store: series.worker_activity(store.connection, at_us))

    async def _query(self, query: Callable[[Store], T]) -> T:
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
