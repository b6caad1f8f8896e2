"""A console: the processes that read a log, and what its routes return.

Theory of operation. The web process derives nothing, so that pages stay responsive. The indexer process follows the
log and writes the catalog, from which the web process reads requests, markers, metrics and the newest status. The
reader process derives any other moment from a checkpoint of the catalog. Each what-if job has a process of its own.
None of them writes to the log.
"""

import asyncio
import logging
from importlib.metadata import version

import msgspec

from forebay.console.catalog_reader import CatalogReader
from forebay.console.feed import StateFeed
from forebay.console.jobs import WhatIfJobs
from forebay.console.messages import ReadStatus
from forebay.console.settings import ConsoleSettings, SourceKind
from forebay.core.routing.policies import BUILT_IN
from forebay.events.names import unknown_name
from forebay.ingress.child_process import ChildProcess, SharedChild
from forebay.ingress.errors import invalid
from forebay.replay.catalog import series
from forebay.replay.catalog.facts import CatalogState, WorkerActivity
from forebay.replay.status import GroupStatus

logger = logging.getLogger(__name__)

READER = "forebay.console.reader_process"
INDEXER = "forebay.console.indexer_process"
LIMIT_S = 60.0  # a comparison derives two moments; without a checkpoint nearby, each takes seconds
HINT = "the commands `forebay replay at`, `explain` and `diff` have no time limit"
INDEXER_AGAIN_S = 2.0  # pause before a new indexer, so that a permanent failure costs little


class ConsoleInfo(msgspec.Struct, frozen=True, kw_only=True):
    version: str
    source: str
    kind: SourceKind
    group: str
    is_live: bool
    can_act: bool
    policies: list[str]
    fields: tuple[str, ...]
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
