"""Where in a journal a request is: looked for in the bytes of its records, backwards, with nothing derived.

Ids may be used again once they are forgotten. A use begins with the record that first decides on a submission; a
refused duplicate is no use of its own, but belongs to the one before it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from forebay.events.decisions import (
    JournalRecord,
    KvReleased,
    OwnerClaimed,
    RequestAborted,
    RequestHeld,
    RequestRejected,
    RequestRouted,
    RouteAnswered,
)
from forebay.events.requests import RequestSubmitted, RouteQueried
from forebay.events.topics import DECISIONS, REQUESTS
from forebay.transport.base import Log
from forebay.transport.history.reader import (
    PAGE_RECORDS,
    decode_journal,
    decode_or_none,
    journal_records,
    recorded_view,
)

NEAR_MAX = 5  # ids that begin like the one that is not there, shown to whoever mistyped it

OfRequest = RequestRouted | RequestHeld | RequestRejected | RequestAborted | KvReleased | RouteAnswered
OnProgress = Callable[[int, int], None]


class UnknownRequest(Exception):
    """No record is about the request; `near` are ids that begin like it, the newest first."""

    def __init__(self, request_id: str, near: tuple[str, ...]) -> None:
        hint = f"; there is {', '.join(near)}" if near else ""
        super().__init__(f"there is no request {request_id}{hint}")
        self.near = near


@dataclass(frozen=True, slots=True)
class Found:
    """The last use of a request id.

    Attributes:
        first: journal offset of a record of the use; nothing of it is before, but maybe that it was held.
        last: journal offset of the newest record about the id.
        earlier: how many uses are before this one; None when nobody looked.
    """

    first: int
    last: int
    earlier: int | None


@dataclass(slots=True)
class _Scan:
    """What a walk backwards has seen of one id, newest first."""

    request_id: str
    seen: list[tuple[int, OfRequest]] = field(default_factory=list)
    near: dict[str, None] = field(default_factory=dict)

    def take(self, offset: int, record: JournalRecord | None) -> None:
        if isinstance(record, OwnerClaimed):
            # What an earlier owner wrote after this claim is void.
            self.seen = [one for one in self.seen if one[1].owner_epoch >= offset]
        elif isinstance(record, OfRequest):
            if record.request_id == self.request_id:
                self.seen.append((offset, record))
            elif record.request_id.startswith(self.request_id) and len(self.near) < NEAR_MAX:
                self.near[record.request_id] = None


async def find(
    log: Log, partition: int, request_id: str, *, thorough: bool, progress: OnProgress | None = None
) -> Found:
    """The last use of an id in the journal.

    A thorough search goes on to the journal's beginning, for the uses before; `progress` is called with the records
    searched and their total. Raises UnknownRequest when no record of the journal is about the id, LogError.
    """
    begin = await log.begin(DECISIONS.name, partition)
    end = total = await log.end(DECISIONS.name, partition)
    scan = _Scan(request_id)
    wanted = (_in_json(request_id), b'"owner.claimed"')
    while end > begin:
        start = max(begin, end - PAGE_RECORDS)
        records = [record async for record in journal_records(log, partition, start, end)]
        for record in reversed(records):
            if any(needle in record.value for needle in wanted):
                scan.take(record.offset, decode_journal(record))
        end = start
        if progress is not None:
            progress(total - end, total - begin)
        if not thorough and any(_may_open(record) for _, record in scan.seen):
            break
    if not scan.seen:
        raise UnknownRequest(request_id, tuple(scan.near))
    return _last_use(scan.seen, thorough=thorough)


async def submitted_lately(
    log: Log, partition: int, request_id: str
) -> tuple[int, RequestSubmitted | RouteQueried] | None:
    """A submission of this id that no owner applied yet, as far as the journal says, with its offset."""
    position = (await recorded_view(log, partition)).get(REQUESTS.name, 0)
    end = await log.end(REQUESTS.name, partition)
    needle = request_id.encode()
    while position < end:
        records = await log.read(REQUESTS.name, partition, position, min(PAGE_RECORDS, end - position))
        if not records:
            break
        for record in records:
            if needle in record.value:
                event = decode_or_none(REQUESTS, record.value)
                if isinstance(event, RequestSubmitted | RouteQueried) and event.request_id == request_id:
                    return record.offset, event
        position = records[-1].offset + 1
    return None


def opens(record: OfRequest, *, held: bool) -> bool:
    """Whether a use of an id begins with this record; `held`: it waits in the router's queue."""
    match record:
        case RequestHeld() | RouteAnswered():
            return True
        case RequestRouted():
            return record.attempt == 1 and not record.earlier_attempts and not held
        case RequestRejected():
            return record.reason != "duplicate_id" and not held
        case RequestAborted() | KvReleased():
            return False


def _may_open(record: OfRequest) -> bool:
    return opens(record, held=False)


def _last_use(seen: list[tuple[int, OfRequest]], *, thorough: bool) -> Found:
    """`seen` is newest first."""
    first, uses, held = seen[-1][0], 0, False
    for offset, record in reversed(seen):
        if opens(record, held=held):
            first, uses = offset, uses + 1
        if not (isinstance(record, RequestRejected) and record.reason == "duplicate_id"):
            held = isinstance(record, RequestHeld)
    return Found(first, seen[0][0], max(0, uses - 1) if thorough else None)


def _in_json(request_id: str) -> bytes:
    """How an id that begins so stands in a journal record."""
    return b'"request_id":' + msgspec.json.encode(request_id)[:-1]
