"""Child process that derives moments, explanations and comparisons for a console.

Every derivation begins at the nearest checkpoint of the catalog. `forebay.ingress.child_process` describes the
messages; the first message has the settings of the console.
"""

import asyncio
from contextlib import AsyncExitStack, closing
from typing import Any, Self

import msgspec

from forebay import runtime
from forebay.console.log_file import LogFile
from forebay.console.messages import (
    AnyReading,
    ReadComparison,
    ReadExplanation,
    ReadMoment,
    ReadRecord,
    ReadScaling,
    ReadStatus,
)
from forebay.console.settings import ConsoleSettings
from forebay.core.routing.policies import CustomPolicies
from forebay.events.names import unknown_name
from forebay.events.request_ids import aliases_of, log_id_of
from forebay.events.topics import DECISIONS, INPUTS
from forebay.ingress.child_process import ChildConnection, ChildResponse
from forebay.ingress.explain_worker import LogSource, opened_log
from forebay.journal.groups import partitions_of
from forebay.replay.at import NoSuchRecord, Position, last_time, seek_record, seek_time
from forebay.replay.catalog import request_queries
from forebay.replay.catalog.mentions import find_mentions
from forebay.replay.catalog.seek import CatalogStates
from forebay.replay.catalog.store import CatalogError, Store
from forebay.replay.compare import compare_moments
from forebay.replay.explain.explain import explain, explain_among
from forebay.replay.explain.explanation import Explanation
from forebay.replay.explain.find import UnknownRequest
from forebay.replay.policies import load_policies
from forebay.replay.scaling.status import read_scaling
from forebay.replay.status import GroupStatus, build_status
from forebay.transport.base import Log, LogError, NotDerivable
from forebay.transport.readable import readable

TOPICS = {topic.name for topic in (*INPUTS, DECISIONS)}


class Reader:
    def __init__(self, settings: ConsoleSettings, log: Log, store: Store, custom: CustomPolicies) -> None:
        self._settings = settings
        self._log = log
        self._store = store
        self._custom = custom
        self._states = CatalogStates(store, log, settings.partition, custom)

    async def answer(self, message: AnyReading) -> Any:
        match message:
            case ReadStatus():
                return await self._status(message)
            case ReadMoment():
                return await (await self._position(message.at_us, message.offset)).moment()
            case ReadComparison():
                a = await (await self._position(message.a_us)).moment()
                b = await (await self._position(message.b_us)).moment()
                return compare_moments(a, b)
            case ReadExplanation():
                return await self._explain(message)
            case ReadScaling():
                now_us = runtime.wall_us() if message.at_us is None and self._settings.is_live else None
                return await read_scaling(self._log, message.at_us, now_us)
            case ReadRecord():
                return await self._record(message)

    async def _position(self, at_us: int | None, offset: int | None = None) -> Position:
        if at_us is None and offset is None:
            at_us = await last_time(self._log, self._settings.partition)
        return await (seek_record(self._states, offset) if at_us is None else seek_time(self._states, at_us))

    async def _status(self, message: ReadStatus) -> GroupStatus:
        world = (await self._position(message.at_us)).world
        status = await build_status(self._log, self._settings.partition, self._settings.group, world, "log")
        # The ends of the topics are those of now, so a past moment has no lag that could be shown.
        return status if message.at_us is None else msgspec.structs.replace(status, topics=[])

    async def _explain(self, message: ReadExplanation) -> Explanation:
        row = None if message.number is None else request_queries.request(self._store.connection, message.number)
        if message.number is not None and (
            row is None or log_id_of(message.request_id) not in aliases_of(row.request_id)
        ):
            raise NoSuchRecord(f"the request {message.request_id!r} was not submitted at offset {message.number}")
        try:
            known = find_mentions(self._store, message.request_id, None if row is None else row.journal_offset)
            return await explain(self._states, message.request_id, with_changes=message.with_changes, mentions=known)
        except UnknownRequest:
            others = await partitions_of(self._log) - {self._settings.partition}
            if not others:
                raise
            changes, custom = message.with_changes, self._custom
            return await explain_among(self._log, others, message.request_id, with_changes=changes, custom=custom)

    async def _record(self, message: ReadRecord) -> dict[str, Any]:
        if message.topic not in TOPICS:
            raise NoSuchRecord(unknown_name("topic", message.topic, sorted(TOPICS)))
        partition = self._settings.partition
        begin, end = await self._log.begin(message.topic, partition), await self._log.end(message.topic, partition)
        if not begin <= message.offset < end:
            raise NoSuchRecord(
                f"{message.topic}/{partition} has no record {message.offset}; it has {begin} to {end - 1}"
            )
        records = await self._log.read(message.topic, partition, message.offset, 1)
        if not records or records[0].offset != message.offset:
            raise NoSuchRecord(f"{message.topic}/{partition}: record {message.offset} was removed")
        return {"topic": message.topic, "partition": partition, **readable(records[0])}


def main() -> None:
    asyncio.run(_serve(ChildConnection()))


async def _serve(connection: ChildConnection) -> None:
    settings = msgspec.json.decode(connection.setup, type=ConsoleSettings)
    custom = load_policies(settings.source.policies)
    async with CurrentLog(settings.source) as current:
        async for message in connection.messages():
            reading = msgspec.json.decode(message, type=AnyReading)
            connection.send(msgspec.json.encode(await _respond(settings, current, custom, reading)))


class CurrentLog:
    """The log at its location, which is opened again if another file has replaced it."""

    def __init__(self, source: LogSource) -> None:
        self._source = source
        self._file = LogFile(source)
        self._log: Log | None = None
        self._opened = AsyncExitStack()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._opened.aclose()

    async def get(self) -> Log:
        """Return the log. Raises LogError if it cannot be read."""
        if self._log is None or self._file.is_replaced:
            await self._opened.aclose()
            self._log, self._file = None, LogFile(self._source)
            self._log = await self._opened.enter_async_context(opened_log(self._source))
        return self._log


async def _respond(
    settings: ConsoleSettings, current: CurrentLog, custom: CustomPolicies, reading: AnyReading
) -> ChildResponse:
    try:
        log = await current.get()
        # The catalog is opened for each message, because the indexer may rebuild it.
        with closing(Store.read(settings.catalog_path)) as store:
            if settings.source.path is not None:
                await store.require_log(log, settings.partition)
            found = await Reader(settings, log, store, custom).answer(reading)
    except (NoSuchRecord, UnknownRequest) as missing:
        return ChildResponse(status=404, code="not_found", message=str(missing))
    except NotDerivable as error:
        return ChildResponse(status=409, code="other_rules", message=str(error))
    except CatalogError as error:
        return ChildResponse(status=503, code="catalog_unavailable", message=str(error))
    except LogError as error:
        return ChildResponse(status=503, code="log_unavailable", message=str(error))
    return ChildResponse(content=msgspec.Raw(msgspec.json.encode(found)))


if __name__ == "__main__":
    main()
