"""Find a request, or its kept answer, by an id that a client has.

The public id of a response contains the location of its first request, so finding it takes one read. An id that a
client chose (`x-request-id`), or the id on the log without a location, is searched in the newest records.
"""

import asyncio
import contextlib
from collections import Counter
from typing import NamedTuple

from forebay.events.answers import AnswerContent, AnswerDeleted
from forebay.events.codec import DecodeError
from forebay.events.rendering import Rendering
from forebay.events.request_ids import (
    KAFKA_API,
    SEPARATOR,
    RequestLocation,
    aliases_of,
    parse_public_id,
    public_id,
    whole_id,
)
from forebay.events.requests import RequestSubmitted
from forebay.events.topics import REQUESTS
from forebay.ingress.errors import ApiError
from forebay.ingress.loaded_model import LoadedModel
from forebay.ingress.served_models import ServedModels
from forebay.transport.answers import AnswerForgotten
from forebay.transport.base import PAGE_RECORDS, Log, Record, RecordsRemoved, event_of, newest_first

SEARCHED_MAX = 100_000  # records per search, which takes seconds
OFFSETS_MAX = 1 << 62
SHARED_RECORDS = 64  # that one read returns to lookups at the same time
FOUND_MAX = 1_024  # records in memory during simultaneous lookups


class FoundRequest(NamedTuple):
    """A request of a client on the log.

    Attributes:
        request_id: id of the whole request.
        first: its first part, with the rendering.
        loaded: its model, with the card that the rendering names.
        content: the kept answer; None if it is not kept, or not finished.
    """

    request_id: str
    location: RequestLocation
    first: RequestSubmitted
    loaded: LoadedModel
    content: AnswerContent | None

    @property
    def rendering(self) -> Rendering:
        assert self.first.rendering is not None, "the first part of a response has its rendering"
        return self.first.rendering


class _Request(NamedTuple):
    id: str
    first: RequestSubmitted


class _Wanted(NamedTuple):
    """An id that a client of a tenant searches."""

    tenant: str
    id: str


class RequestFinder:
    """Finds requests of the models of an ingress."""

    def __init__(self, models: ServedModels) -> None:
        self._models = models
        self._log = models.front.log
        self._answers = models.front.answers
        self._reader = _RecordReader(models.front.log)
        self._searching = asyncio.Lock()
        self._wanted: Counter[_Wanted] = Counter()
        self._found: dict[_Wanted, tuple[str, RequestLocation] | None] = {}

    async def find(self, given: str, tenant: str) -> FoundRequest:
        """Return the request with a public id, an id on the log, or an id that its client chose (the newest one).

        `tenant` is that of the caller, empty for none.

        Raises ApiError: 404 for an unknown or deleted request or one of another tenant, 410 if retention or an operator
        removed what is needed.
        """
        request_id, location = parse_public_id(given)
        if location is None:
            request_id, location = await self._search(given, tenant)
        if _is_of_kafka_api(request_id):
            raise _unknown(given)
        return await self._read(request_id, location, given, tenant)

    async def at(self, location: RequestLocation, tenant: str) -> FoundRequest:
        """Return the request at a location that the owner of its group named. Raises ApiError as `find`."""
        found = _request_in(await self._record(location))
        if found is None:
            raise ApiError(410, "answer_expired", "the request with this idempotency key was removed by retention")
        return await self._read(found.id, location, public_id(found.id, location), tenant)

    async def _read(self, request_id: str, location: RequestLocation, given: str, tenant: str) -> FoundRequest:
        try:
            content = await self._answers.load(request_id, location)
        except AnswerForgotten as error:
            raise ApiError(410, "answer_expired", f"the request {given!r} is too old: {error}") from None
        if isinstance(content, AnswerDeleted):
            if tenant:  # whose answer it was is unknown
                raise _unknown(given)
            raise ApiError(404, "request_not_found", f"the request {given!r} was deleted")
        if content is not None:
            first = content.submission
        else:
            found = _request_in(await self._record(location))
            if found is None or found.id != request_id:
                raise _unknown(given)
            first = found.first
        if first.tenant != tenant:
            raise _unknown(given)
        assert first.rendering is not None, "the first part of a response has its rendering"
        loaded = await self._models.rendering_model(first.model, first.rendering.card)
        return FoundRequest(request_id, location, first, loaded, content)

    async def _record(self, location: RequestLocation) -> Record | None:
        """Return the record at a location, None if there is none. Raises ApiError (410) if retention removed it."""
        partition, offset = location
        if partition not in self._models.partitions() or offset >= OFFSETS_MAX:
            return None
        try:
            return await self._reader.at(partition, offset)
        except RecordsRemoved:
            text = "retention has removed the records of this time, and the answer was not kept or has expired"
            raise ApiError(410, "answer_expired", text) from None

    async def _search(self, given: str, tenant: str) -> tuple[str, RequestLocation]:
        """Return id and location of a tenant's newest request with an id that has no location. Raises ApiError (404).

        All ids that are wanted when a search begins share its pass over the log.
        """
        wanted = _Wanted(tenant, given)
        self._wanted[wanted] += 1
        try:
            async with self._searching:
                found = self._found
                if wanted not in found:
                    found = self._found = await self._newest(set(self._wanted))
                newest = found[wanted]
        finally:
            self._wanted[wanted] -= 1
            if not self._wanted[wanted]:
                del self._wanted[wanted]
                self._found.pop(wanted, None)
        if newest is None:
            raise _unknown(given)
        return newest

    async def _newest(self, wanted: set[_Wanted]) -> dict[_Wanted, tuple[str, RequestLocation] | None]:
        found: dict[_Wanted, tuple[str, RequestLocation] | None] = dict.fromkeys(wanted)
        ids = {one.id for one in wanted}
        searched = 0
        async for record in newest_first(self._log, REQUESTS, self._models.partitions()):
            name = (record.key or b"").decode(errors="replace")
            aliases = frozenset() if _is_of_kafka_api(name) else ids & aliases_of(name)
            if aliases and (request := _request_in(record)) is not None:
                newest = wanted & {_Wanted(request.first.tenant, alias) for alias in aliases}
                found |= dict.fromkeys(newest, (request.id, RequestLocation(record.partition, record.offset)))
                wanted -= newest
            searched += 1
            if not wanted or searched == SEARCHED_MAX:
                break
            if not searched % PAGE_RECORDS:
                await asyncio.sleep(0)  # the embedded log reads without waiting
        return found


class _RecordReader:
    """Reads single records of `requests`. Lookups at the same time share what they read.

    The clients of a lost ingress reconnect together, and their requests are close to each other. A read at a random
    offset of Kafka takes several milliseconds.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self._reading = asyncio.Lock()
        self._lookups = 0
        self._found: dict[tuple[int, int], Record] = {}

    async def at(self, partition: int, offset: int) -> Record | None:
        """Return the record at an offset, None if there is none. Raises LogError, also if retention removed it."""
        self._lookups += 1
        try:
            async with self._reading:
                if (partition, offset) not in self._found and self._lookups > 1:
                    with contextlib.suppress(RecordsRemoved):  # perhaps only the begin of the page
                        await self._read(partition, offset - offset % SHARED_RECORDS, SHARED_RECORDS)
                if (partition, offset) not in self._found:
                    await self._read(partition, offset, 1)
                return self._found.get((partition, offset))
        finally:
            self._lookups -= 1
            if not self._lookups:
                self._found = {}  # prompts are large

    async def _read(self, partition: int, offset: int, count: int) -> None:
        if len(self._found) >= FOUND_MAX:
            self._found = {}
        for record in await self._log.read(REQUESTS.name, partition, offset, count):
            self._found[partition, record.offset] = record


def _request_in(record: Record | None) -> _Request | None:
    """Return the request whose first part is in a record; None if the record is missing or another one."""
    try:
        event = None if record is None else event_of(REQUESTS, record)
    except DecodeError:
        return None
    if not isinstance(event, RequestSubmitted) or event.rendering is None:
        return None
    return _Request(whole_id(event.request_id, event.rendering.parts), event)


def _is_of_kafka_api(request_id: str) -> bool:
    """Return whether a request came from the Kafka API. Its ids can be guessed, so HTTP does not find them."""
    return request_id.partition(SEPARATOR)[2].partition("-")[0] == KAFKA_API


def _unknown(given: str) -> ApiError:
    text = (
        f"unknown request {given!r}; use the id in a response, or the x-request-id of a request"
        f" among the newest {SEARCHED_MAX:,} records"
    )
    return ApiError(404, "request_not_found", text)
