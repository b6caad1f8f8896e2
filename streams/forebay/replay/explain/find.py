"""Find a request in a journal by searching the bytes of its records backwards, without deriving anything.

Another request may use the same ID once the owner has forgotten the first request. Each use of an ID begins with the
first decision about a submission. A rejected duplicate is not a use of its own; it belongs to the previous use.

The ID that a client chose (`x-request-id`, or `request-id` of the Kafka API) finds all requests for which a client
chose it. On the log each of them has a unique ID, of which the client's ID is the first part. No client can choose an
ID on the log, so an ID on the log never finds another client's request.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from forebay.events.decisions import (
    JournalRecord,
    KvReleased,
    RequestAborted,
    RequestHeld,
    RequestRejected,
    RequestRepeated,
    RequestRouted,
    RouteAnswered,
)
from forebay.events.names import NEAR_MAX, unknown_name
from forebay.events.request_ids import aliases_of
from forebay.events.requests import RequestSubmitted, RouteQueried
from forebay.events.topics import DECISIONS, REQUESTS
from forebay.journal.records import decode_journal, decode_or_none, journal_records
from forebay.journal.spans import valid_offsets
from forebay.journal.start import recorded_view
from forebay.transport.base import PAGE_RECORDS, Log, records_of

OTHERS_MAX = 100  # IDs listed of other requests with the same client ID

RequestRecord = (
    RequestRouted | RequestHeld | RequestRejected | RequestRepeated | RequestAborted | KvReleased | RouteAnswered
)
OnProgress = Callable[[int, int], None]


class UnknownRequest(Exception):
    """Raised if no record is about the request. `near` are existing IDs with the same prefix, newest first."""

    def __init__(self, request_id: str, near: tuple[str, ...]) -> None:
        self.near = near
        super().__init__(
            unknown_name("request", request_id, near) if near else f"unknown request {request_id!r}; check the ID"
        )


@dataclass(frozen=True, slots=True)
class RequestUse:
    """Where the journal has records about the last request with an ID.

    Attributes:
        first: journal offset of the first record about the request. Only a `RequestHeld` about it may come earlier.
        earlier: number of earlier requests with the same ID on the log; None if they were not searched for.
        others: IDs on the log of other requests with the same client ID, newest first, at most `OTHERS_MAX`; None if
            they were not searched for.
    """

    request_id: str
    first: int
    last: int
    earlier: int | None
    others: tuple[str, ...] | None


class Mentions(NamedTuple):
    """Known journal records about one ID, which need not be searched for. The lists are complete up to offset `end`."""

    end: int
    decisions: Sequence[int]
    submissions: Sequence[int]


@dataclass(slots=True)
class _Scan:
    """State of a backward search for one ID. `seen` is newest first, and may have invalid records until `drop_invalid`.

    Records from offset `checked` on are valid.
    """

    request_id: str
    checked: int
    seen: list[tuple[int, RequestRecord]] = field(default_factory=list)
    near: dict[str, None] = field(default_factory=dict)

    async def drop_invalid(self, log: Log, partition: int) -> None:
        """Drop stale, repeated and foreign records. Which these are depends on the records since a snapshot."""
        unchecked = [offset for offset, _ in self.seen if offset < self.checked]
        if not unchecked:
            return
        valid = await valid_offsets(log, partition, min(unchecked), max(unchecked) + 1)
        self.seen = [one for one in self.seen if one[0] >= self.checked or one[0] in valid]
        self.checked = min(unchecked)

    def add(self, offset: int, record: JournalRecord | None) -> None:
        if isinstance(record, RequestRecord):
            if self.request_id in aliases_of(record.request_id):
                self.seen.append((offset, record))
            elif record.request_id.startswith(self.request_id) and len(self.near) < NEAR_MAX:
                self.near[record.request_id] = None


async def find(
    log: Log,
    partition: int,
    request_id: str,
    *,
    thorough: bool,
    progress: OnProgress | None = None,
    mentions: Mentions | None = None,
) -> RequestUse:
    """Find the records about the last request with an ID, on the log or as the client chose it. Raises UnknownRequest.

    If the client chose the ID for several requests, the last routed one is found. If there are `mentions`, only later
    records are searched.
    """
    begin = await log.begin(DECISIONS.name, partition)
    end = total = await log.end(DECISIONS.name, partition)
    scan = _Scan(request_id, end)
    needle = _in_json(request_id)
    if mentions is not None and mentions.decisions:
        begin = max(begin, min(mentions.end, end))
    while end > begin:
        start = max(begin, end - PAGE_RECORDS)
        records = [record async for record in journal_records(log, partition, start, end)]
        for record in reversed(records):
            if needle in record.value:
                scan.add(record.offset, decode_journal(record))
        end = start
        if progress is not None:
            progress(total - end, total - begin)
        if any(starts_use(record, held=False) for _, record in scan.seen):
            await scan.drop_invalid(log, partition)
        if not thorough and any(starts_use(record, held=False) for _, record in scan.seen):
            break
    else:
        for offset in () if mentions is None else mentions.decisions:
            for record in await log.read(DECISIONS.name, partition, offset, 1):
                scan.add(record.offset, decode_journal(record))
    await scan.drop_invalid(log, partition)
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
    async for record in records_of(log, REQUESTS, partition, position, end):
        if needle in record.value:
            event = decode_or_none(REQUESTS, record.value)
            if not isinstance(event, RequestSubmitted | RouteQueried):
                continue
            if request_id in aliases_of(event.request_id):
                return record.offset, event
    return None


def starts_use(record: RequestRecord, *, held: bool) -> bool:
    """Return whether `record` is the first decision about a submission, with which a new use of its ID begins.

    `held` means that a request with this ID waits in the router's queue before this decision.
    """
    match record:
        case RequestHeld() | RequestRepeated() | RouteAnswered():
            return True
        case RequestRouted():
            return record.attempt == 1 and not record.earlier_attempts and not held
        case RequestRejected():
            return record.reason != "duplicate_id" and not held
        case RequestAborted() | KvReleased():
            return False


def _last_use(seen: list[tuple[int, RequestRecord]], *, thorough: bool) -> RequestUse:
    """Return the last use of the last routed request among `seen`, which is newest first."""
    request_id = next((one.request_id for _, one in seen if starts_use(one, held=False)), seen[0][1].request_id)
    others = tuple(dict.fromkeys(one.request_id for _, one in seen if one.request_id != request_id))
    seen = [(offset, one) for offset, one in seen if one.request_id == request_id]
    first, uses, held = seen[-1][0], 0, False
    for offset, record in reversed(seen):
        if starts_use(record, held=held):
            first, uses = offset, uses + 1
        if not (isinstance(record, RequestRejected) and record.reason == "duplicate_id"):
            held = isinstance(record, RequestHeld)
    return RequestUse(
        request_id=request_id,
        first=first,
        last=seen[0][0],
        earlier=max(0, uses - 1) if thorough else None,
        others=others[:OTHERS_MAX] if thorough else None,
    )


def _in_json(request_id: str) -> bytes:
    """Return the bytes with which a journal record contains an ID with this prefix."""
    return b'"request_id":' + msgspec.json.encode(request_id)[:-1]
