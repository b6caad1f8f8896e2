"""Write, read and retry the records of the topic `dead-letters`: unusable records with the reason and their origin.

A dead letter never exceeds the maximum record size. Parts of a record that are too large are omitted.

A retry appends the original record at the end of its topic again, so it is safe only for records that may be late.
Events of workers and owners name epochs and sequence numbers, which are stale by then. They are refused with the
reason. A retry also appends a *retry mark* to the partition of the letter: a record without a value, which names the
offset of the letter and the place of its new record.
"""

from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec

from forebay.events.base import Event
from forebay.events.codec import DecodeError
from forebay.events.requests import RequestSubmitted
from forebay.events.topics import (
    CONTROL,
    DEAD_LETTERS,
    FLEET,
    KV_EVENTS,
    METRICS,
    PROGRESS,
    REQUESTS,
    topic_named,
    work_topic,
)
from forebay.transport.base import Draft, Log, LogError, Record, event_of, records_of

REASON_CHARS_MAX = 500  # a header stays short
# Topics accept records up to 16 MiB, and headers stored as JSON take up to six times their size.
CONTENT_BYTES_MAX = 8 << 20
HEADERS_BYTES_MAX = 1 << 20


def dead_letter(record: Record, partition: int, reason: str) -> Draft:
    """Return the dead letter for `record`, to be appended to `partition` of the topic `dead-letters`.

    Added headers: `reason`, `source-topic`, `source-partition`, `source-offset`, and `omitted` if parts were too large.
    """
    headers = dict(record.headers or {})
    size = sum(len(name.encode()) + len(value.encode()) for name, value in headers.items())
    value, key, omitted = record.value, record.key, []
    if size > HEADERS_BYTES_MAX:
        omitted.append(f"{size} bytes of headers")
        headers = {}
    if len(value) + len(key or b"") > CONTENT_BYTES_MAX:
        omitted.append(f"a value of {len(value)} bytes and a key of {len(key or b'')}")
        value, key = b"", None
    headers |= {
        "reason": reason[:REASON_CHARS_MAX],
        "source-topic": record.topic,
        "source-partition": str(record.partition),
        "source-offset": str(record.offset),
    }
    if omitted:
        headers["omitted"] = ", ".join(omitted)
    return Draft(DEAD_LETTERS.name, partition, value, key, headers)


PAGE_RECORDS = 256  # letters have up to 8 MiB, so the log returns fewer of them if they are large

ADDED_HEADERS = frozenset({"reason", "source-topic", "source-partition", "source-offset", "omitted"})
RETRIED_LETTER = "retried-letter"  # header of a retry mark: offset of the letter
RETRIED_AS = "retried-as"  # header of a retry mark: TOPIC/PARTITION/OFFSET of the new record
RETRY_OF = "retry-of"  # header of the new record: PARTITION/OFFSET of the letter


class Letter(msgspec.Struct, frozen=True, kw_only=True):
    """Dead letter without its value.

    `omitted` names the parts of the record that were too large. `retried_as` is the place of the record with which the
    letter was last retried, as TOPIC/PARTITION/OFFSET. Both are empty for none.
    """

    partition: int
    offset: int
    at_us: int
    topic: str
    source_partition: int
    source_offset: int
    reason: str
    omitted: str = ""
    value_bytes: int = 0
    retried_as: str = ""


class NoSuchLetter(LogError):
    """The topic `dead-letters` has no letter at this place."""


def letter_of(record: Record) -> Letter | None:
    """Return the letter in a record of `dead-letters`; None for a retry mark and for a record of another program."""
    headers = record.headers or {}
    try:
        return Letter(
            partition=record.partition,
            offset=record.offset,
            at_us=record.at_us,
            topic=headers["source-topic"],
            source_partition=int(headers["source-partition"]),
            source_offset=int(headers["source-offset"]),
            reason=headers.get("reason", ""),
            omitted=headers.get("omitted", ""),
            value_bytes=len(record.value),
        )
    except (KeyError, ValueError):
        return None


async def letters(log: Log, partition: int, keep: Callable[[Letter], bool]) -> AsyncIterator[Letter]:
    """Yield the letters of a partition for which `keep` returns true, newest first. Raises LogError.

    A mark follows its letter, so a reader that goes backwards knows whether a letter was retried. The values are
    dropped page by page.
    """
    begin, end = await log.begin(DEAD_LETTERS.name, partition), await log.end(DEAD_LETTERS.name, partition)
    marks: dict[int, str] = {}
    while end > begin:
        start = max(begin, end - PAGE_RECORDS)
        page: list[Letter] = []
        newer, marks = marks, {}
        async for record in records_of(log, DEAD_LETTERS, partition, start, end):
            headers = record.headers or {}
            if (offset := headers.get(RETRIED_LETTER, "")).isdecimal():
                marks[int(offset)] = headers.get(RETRIED_AS, "")
            elif (letter := letter_of(record)) is not None:
                page.append(letter)
        marks |= newer
        for letter in reversed(page):
            found = msgspec.structs.replace(letter, retried_as=marks.get(letter.offset, ""))
            if keep(found):
                yield found
        end = start


async def read_letter(log: Log, partition: int, offset: int) -> tuple[Letter, Record]:
    """Return the letter at an offset, and its record with the value. Raises NoSuchLetter or LogError."""
    begin, end = await log.begin(DEAD_LETTERS.name, partition), await log.end(DEAD_LETTERS.name, partition)
    if not begin <= offset < end:
        span = f"letters are at offsets {begin} to {end - 1}" if begin < end else "the partition has no letters"
        raise NoSuchLetter(f"{DEAD_LETTERS.name}/{partition} has no offset {offset}; {span}")
    (record,) = await log.read(DEAD_LETTERS.name, partition, offset, 1)
    letter = letter_of(record)
    if letter is None:
        raise NoSuchLetter(
            f"the record at offset {offset} of {DEAD_LETTERS.name}/{partition} is no letter; `forebay dead-letters"
            " list` shows the letters"
        )
    retried_as = ""
    async for later in records_of(log, DEAD_LETTERS, partition, offset + 1, end):
        headers = later.headers or {}
        if headers.get(RETRIED_LETTER) == str(offset):
            retried_as = headers.get(RETRIED_AS, "")
    return msgspec.structs.replace(letter, retried_as=retried_as), record


# Topics whose records may be appended again, and what that means.
NOTES = {
    REQUESTS.name: "a new submission: its timeout begins again",
    CONTROL.name: "applies now, and so overrides newer changes of the same setting",
    PROGRESS.name: "without effect unless its request or command is still in flight",
}
STALE = {
    FLEET.name: "the owner has judged the leases of workers and ingresses again since then",
    METRICS.name: "a newer load report of the worker has replaced it",
    KV_EVENTS.name: "the owner noticed the gap, and the worker has re-announced its cache since then",
}
STALE_WORK = "it names an epoch of a worker, and the owner sends the work of requests in flight again by itself"


class NotRetriable(LogError):
    """A letter cannot be retried. The message gives the reason."""


class LetterRetry(msgspec.Struct, frozen=True):
    draft: Draft
    event: Event
    note: str


def decoded(letter: Letter, record: Record) -> Any:
    """Return the event of the original record. Raises NotRetriable if it does not decode in this version."""
    if letter.omitted:
        raise NotRetriable(f"the letter does not contain the whole record: {letter.omitted} omitted")
    try:
        topic = topic_named(letter.topic)
    except KeyError:
        raise NotRetriable(f"this version has no topic {letter.topic}") from None
    try:
        return event_of(topic, original(letter, record))
    except DecodeError as error:
        raise NotRetriable(f"the record does not decode in this version either: {error}") from error


def original(letter: Letter, record: Record) -> Record:
    headers = {name: value for name, value in (record.headers or {}).items() if name not in ADDED_HEADERS}
    return Record(
        letter.topic, letter.source_partition, letter.source_offset, record.at_us, record.value, record.key, headers
    )


def retry_of(letter: Letter, record: Record, group: str | None, now_us: int) -> LetterRetry:
    """Return the record that retries a letter. `group` owns the control partition of the original record.

    Raises NotRetriable if the letter was retried before, its record does not decode, or a retry would have no use.
    """
    if letter.retried_as:
        raise NotRetriable(f"it was retried before, as {letter.retried_as}")
    stale = STALE_WORK if letter.topic.startswith(work_topic("").name) else STALE.get(letter.topic)
    if stale is not None:
        raise NotRetriable(f"a record of {letter.topic} is stale: {stale}")
    event = decoded(letter, record)
    note = NOTES.get(letter.topic)
    if note is None:
        raise NotRetriable(f"no owner reads the topic {letter.topic}")
    if isinstance(event, RequestSubmitted):
        _require_waiting(letter, event, group, now_us)
    source = original(letter, record)
    headers = {**(source.headers or {}), RETRY_OF: f"{letter.partition}/{letter.offset}"}
    return LetterRetry(Draft(letter.topic, letter.source_partition, source.value, source.key, headers), event, note)


def _require_waiting(letter: Letter, event: RequestSubmitted, group: str | None, now_us: int) -> None:
    """Check that a client may still wait for the response, and that the group serves the model."""
    if event.model != group:
        raise NotRetriable(
            f"the request names the model {event.model}, but partition {letter.source_partition} belongs to"
            f" {group or 'no group'}: send it to an ingress of {event.model}"
        )
    late_s = (now_us - letter.at_us - event.timeout_us) / 1e6
    if late_s > 0:
        raise NotRetriable(
            f"the timeout of the request, {event.timeout_us / 1e6:g} s, passed {late_s:.0f} s ago: nobody waits for the"
            " response; the client can send the request again"
        )


async def append_retry(log: Log, letter: Letter, retry: LetterRetry) -> str:
    """Append the record of a retry, then mark the letter. Return the place of the record as TOPIC/PARTITION/OFFSET.

    If the process dies in between, the letter is not marked, and another retry appends the record once more. That is
    harmless: a request with the same id is answered once, and a setting has the same value twice. Raises LogError.
    """
    (offset,) = await log.append([retry.draft])
    place = f"{retry.draft.topic}/{retry.draft.partition}/{offset}"
    mark = {RETRIED_LETTER: str(letter.offset), RETRIED_AS: place}
    await log.append([Draft(DEAD_LETTERS.name, letter.partition, b"", None, mark)])
    return place
