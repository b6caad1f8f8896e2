"""Find a request in a journal by searching the bytes of its records backwards, without deriving anything.

Another request may use the same ID once the owner has forgotten the first request. Each use of an ID begins with the
first decision about a submission. A rejected duplicate is not a use of its own; it belongs to the previous use.
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

NEAR_MAX = 5  # IDs with the same prefix to suggest, in case of a typo

RequestRecord = RequestRouted | RequestHeld | RequestRejected | RequestAborted | KvReleased | RouteAnswered
OnProgress = Callable[[int, int], None]


class UnknownRequest(Exception):
    """Raised if no record is about the request.

    Attributes:
        near: existing IDs with the same prefix, newest first.
    """

    def __init__(self, request_id: str, near: tuple[str, ...]) -> None:
        hint = f"; similar IDs: {', '.join(near)}" if near else ""
        super().__init__(f"no request {request_id} in this log{hint}")
        self.near = near


@dataclass(frozen=True, slots=True)
class RequestLocation:
    """Where the journal has records about the last request with an ID.

    Attributes:
        first: journal offset of the first record about the request. Only a `RequestHeld` about it may come earlier.
        last: journal offset of the newest record about the ID.
        earlier: number of earlier requests with the same ID; None if they were not searched for.
    """

    first: int
    last: int
    earlier: int | None


@dataclass(slots=True)
class _Scan:
    """State of a backward search for one ID. `seen` is newest first."""

    request_id: str
    seen: list[tuple[int, RequestRecord]] = field(default_factory=list)
    near: dict[str, None] = field(default_factory=dict)

    def add(self, offset: int, record: JournalRecord | None) -> None:
        if isinstance(record, OwnerClaimed):
            # Records that an earlier owner wrote after this claim are stale.
            self.seen = [one for one in self.seen if one[1].owner_epoch >= offset]
        elif isinstance(record, RequestRecord):
            if record.request_id == self.request_id:
                self.seen.append((offset, record))
            elif record.request_id.startswith(self.request_id) and len(self.near) < NEAR_MAX:
                self.near[record.request_id] = None


async def find(
    log: Log, partition: int, request_id: str, *, thorough: bool, progress: OnProgress | None = None
) -> RequestLocation:
    """Find the records about the last request with an ID in the journal.

    Args:
        log: the log to read.
        partition: control partition of the group.
        request_id: ID to look for.
        thorough: whether to search back to the journal's beginning and count earlier uses.
        progress: called with the number of records searched and their total.

    Raises:
        UnknownRequest: no record of the journal is about the ID.
        LogError: the log is damaged.
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
                scan.add(record.offset, decode_journal(record))
        end = start
        if progress is not None:
            progress(total - end, total - begin)
        if not thorough and any(_may_start_use(record) for _, record in scan.seen):
            break
    if not scan.seen:
        raise UnknownRequest(request_id, tuple(scan.near))
    return _last_use(scan.seen, thorough=thorough)


async def find_unapplied_submission(
    log: Log, partition: int, request_id: str
) -> tuple[int, RequestSubmitted | RouteQueried] | None:
    """Return a submission with this ID that the owner has not applied yet, with its offset, or None."""
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


def starts_use(record: RequestRecord, *, held: bool) -> bool:
    """Return whether `record` is the first decision about a submission, with which a new use of its ID begins.

    Args:
        record: a decision about a request with this ID.
        held: whether a request with this ID waits in the router's queue before this decision.
    """
    match record:
        case RequestHeld() | RouteAnswered():
            return True
        case RequestRouted():
            return record.attempt == 1 and not record.earlier_attempts and not held
        case RequestRejected():
            return record.reason != "duplicate_id" and not held
        case RequestAborted() | KvReleased():
            return False


def _may_start_use(record: RequestRecord) -> bool:
    return starts_use(record, held=False)


def _last_use(seen: list[tuple[int, RequestRecord]], *, thorough: bool) -> RequestLocation:
    """Return the last use among `seen`, which is newest first."""
    first, uses, held = seen[-1][0], 0, False
    for offset, record in reversed(seen):
        if starts_use(record, held=held):
            first, uses = offset, uses + 1
        if not (isinstance(record, RequestRejected) and record.reason == "duplicate_id"):
            held = isinstance(record, RequestHeld)
    return RequestLocation(first, seen[0][0], max(0, uses - 1) if thorough else None)


def _in_json(request_id: str) -> bytes:
    """Return the bytes with which a journal record contains an ID with this prefix."""
    return b'"request_id":' + msgspec.json.encode(request_id)[:-1]
