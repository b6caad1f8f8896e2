"""A console: the processes that read a log, and what its routes return.

Theory of operation. The web process derives nothing, so that pages stay responsive. The indexer process follows the
log and writes the catalog, from which the web process reads requests, markers, metrics and the newest status. The
reader process derives any other moment from a checkpoint of the catalog. Each what-if job has a process of its own.
None of them writes to the log.
"""

import asyncio
import logging
import sqlite3
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import closing
from importlib.metadata import version
from typing import TypeVar

import msgspec

from forebay import runtime
from forebay.console.jobs import WhatIfJobs
from forebay.console.messages import ReadStatus
from forebay.console.settings import ConsoleSettings, SourceKind
from forebay.core.routing.policies import BUILT_IN
from forebay.events.names import unknown_name
from forebay.ingress.child_process import ChildProcess, SharedChild
from forebay.ingress.errors import ApiError, invalid
from forebay.replay.catalog import series
from forebay.replay.catalog.facts import CatalogState, WorkerActivity
from forebay.replay.catalog.live import read_live
from forebay.replay.catalog.store import CatalogError, Store
from forebay.replay.status import GroupStatus

logger = logging.getLogger(__name__)
T = TypeVar("T")

READ_EVERY_S = 0.25  # at most four updates per second, which people can still follow
REPEAT_AFTER_S = 5.0  # so that a client notices a lost connection
CLIENTS_MAX = 64
READER = "forebay.console.reader_process"
INDEXER = "forebay.console.indexer_process"
LIMIT_S = 60.0  # a comparison derives two moments; without a checkpoint nearby, each takes seconds
HINT = "the commands `forebay replay at`, `explain` and `diff` have no time limit"
INDEXER_AGAIN_S = 2.0  # pause before a new indexer, so that a permanent failure costs little
NOTHING = CatalogState(
    begin_us=0, end_us=0, begin_offset=0, end_offset=0, log_end_offset=0, behind_s=0.0, is_complete=False
)


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


class ConsoleInfo(msgspec.Struct, frozen=True, kw_only=True):
    version: str
    source: str
    kind: SourceKind
    group: str
    is_live: bool
    can_act: bool
    policies: list[str]
    fields: tuple[str, ...]
    trace_url: str
    state: CatalogState


class FleetView(msgspec.Struct, frozen=True, kw_only=True):
    at_us: int
    status: GroupStatus
    workers: list[WorkerActivity]
    problems: list[str]


class Console:
    """Reads one group of a log for the HTTP routes.

    `what_if` is the module of the process that compares configurations. `reader` is the process that derives moments.
    """

    def __init__(self, settings: ConsoleSettings, what_if: str) -> None:
        setup = msgspec.json.encode(settings)
        self.settings = settings
        self.catalog = CatalogReader(settings)
        reader = ChildProcess(READER, setup)
        self.reader = SharedChild(reader, limit_s=LIMIT_S, work="moments are being derived", code="derive", hint=HINT)
        self.jobs = WhatIfJobs(what_if, setup)
        self.feed = StateFeed(self.catalog.state)
        self._indexer = ChildProcess(INDEXER, setup)

    async def run(self) -> None:
        """Follow the log until cancelled. A new process continues from the catalog if the indexer ends."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.feed.run())
            tasks.create_task(self._index())

    async def close(self) -> None:
        await self.jobs.close()
        await self.reader.close()
        await self._indexer.kill()

    async def info(self) -> ConsoleInfo:
        settings = self.settings
        return ConsoleInfo(
            version=version("forebay"),
            source=settings.name,
            kind=settings.kind,
            group=settings.group,
            is_live=settings.is_live,
            can_act=settings.can_act,
            policies=[*BUILT_IN, *settings.source.policies],
            fields=settings.fields,
            trace_url=settings.trace_url,
            state=await self.catalog.state(),
        )

    def require_policy(self, policy: str, sets: tuple[str, ...]) -> None:
        """Raise ApiError (400) if a comparison would import code that the console's options do not allow."""
        known = (*BUILT_IN, *self.settings.source.policies)
        modes = [text.partition("=")[2] for text in sets if text.partition("=")[0].rpartition(":")[2].strip() == "mode"]
        for mode in (policy, *modes):
            if mode.strip('" ') not in ("", *known):
                text = f"{unknown_name('policy', mode, known)}; pass --allow-policy {mode} to `forebay console`"
                raise invalid(text, "policy", "policy_not_allowed")

    async def status(self, at_us: int | None) -> bytes:
        """Return the `GroupStatus` at a moment as JSON; the newest one if `at_us` is None. Raises ApiError."""
        if at_us is None:
            live = await self.catalog.live_status()
            if live is not None:
                return live
        return await self.reader.request(ReadStatus(at_us))

    async def fleet(self, at_us: int | None) -> bytes:
        status = msgspec.json.decode(await self.status(at_us), type=GroupStatus)
        shown_us = status.at_us if at_us is None else at_us
        activity = await self.catalog.query(lambda store: series.worker_activity(store.connection, shown_us))
        problems = [*status.problems]
        if status.owner.standbys == [] and self.settings.kind == "kafka":
            text = f"no standby for group {status.group}: if its router fails, requests wait until one is started"
            problems.append(text)
        return msgspec.json.encode(FleetView(at_us=shown_us, status=status, workers=activity, problems=problems))

    async def _index(self) -> None:
        """Run the indexer. It sends an empty frame when it begins to follow, and a sentence if it fails."""
        while True:
            try:
                await self._indexer.send(b"{}")
                while not (failure := (await self._indexer.receive()).decode()):
                    self.catalog.failure = ""
            except (OSError, EOFError):
                failure = "the process that follows the log ended; it is started again"
            self.catalog.failure = failure
            logger.error("%s", failure)
            await self._indexer.kill()
            await asyncio.sleep(INDEXER_AGAIN_S)
