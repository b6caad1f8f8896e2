"""Append the original record of a dead letter to its topic again.

A retry is a new record at the end of the topic, so it is safe only for records that may be late. Events of workers and
owners name epochs and sequence numbers, which are stale by then. They are refused with the reason.
"""

from typing import Any

import msgspec

from forebay.events.base import Event
from forebay.events.codec import DecodeError
from forebay.events.requests import RequestSubmitted
from forebay.events.topics import CONTROL, FLEET, KV_EVENTS, METRICS, PROGRESS, REQUESTS, topic_named, work_topic
from forebay.transport.base import Draft, Log, LogError, Record
from forebay.transport.dead_letter_reader import ADDED_HEADERS, RETRY_OF, Letter, retry_mark
from forebay.transport.decoding import event_of

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
    await log.append([retry_mark(letter, place)])
    return place
