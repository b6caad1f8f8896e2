"""Reader of a recording or a log file as a workload: its requests at the times at which the owner applied them.

The recording is read twice, because the length of a response is recorded after its request. No decision is derived
again, so recordings of other core versions can be played, too.
"""

import statistics
from array import array
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec
from xxhash import xxh3_64_intdigest

from forebay.events.base import unpack_u64
from forebay.events.decisions import JournalRecord, OwnerClaimed, RequestHeld, RequestRejected, RequestRouted
from forebay.events.progress import RequestFinished
from forebay.events.requests import NO_HINTS, RequestSubmitted
from forebay.events.topics import DECISIONS, PROGRESS, REQUESTS
from forebay.journal.groups import groups_of, pools_of
from forebay.journal.records import RecordedOrder
from forebay.journal.start import oldest_state, recorded_views
from forebay.runtime.errors import ConfigError
from forebay.simulate.workload import Turn
from forebay.simulate.workloads.source import RowErrors
from forebay.transport.base import Log, LogError
from forebay.transport.sqlite.log import SqliteLog

READ = (REQUESTS.name, PROGRESS.name)
UNFINISHED = -1  # length of a response that the recording does not contain

T = TypeVar("T")


class RecordingFile:
    """Workload source with the prompts, response lengths and sessions of one recorded group. Ignores routing hints."""

    def __init__(self, path: Path) -> None:
        """Open the file and find the group in it."""
        self.name = path.name
        self.notes: list[str] = []
        self._path = path
        with self._opened() as log:
            self._partition, self.block_tokens = _at_once(self._group(log))

    def turns(self, errors: RowErrors) -> Iterator[Turn]:
        """Yield the requests in the order in which the owner applied them. The first request arrives at time 0."""
        errors.file, errors.unit = str(self._path), "request"
        with self._opened() as log:
            lengths = self._lengths(log)
            finished = [length for length in lengths if length != UNFINISHED]
            if lengths and not finished:
                raise ConfigError(f"{self._path}: no request finished, so no response length is known")
            median = max(1, round(statistics.median(finished))) if finished else 1
            hints = number = begin_us = 0
            for now_us, event in _story(log, self._partition):
                if not isinstance(event, RequestSubmitted):
                    continue
                begin_us = begin_us or now_us
                errors.row = event.request_id
                hints += msgspec.structs.replace(event.routing, session_id="") != NO_HINTS or bool(event.lora_name)
                length = median if lengths[number] == UNFINISHED else max(1, lengths[number])
                yield _turn(number, now_us - begin_us, event, length, self.block_tokens)
                number += 1
        self.notes = []
        if len(finished) < number:
            text = f"{number - len(finished)} of {number} requests were unfinished when the recording ended"
            self.notes.append(f"{text}; their responses get the median length of the others, {median} tokens")
        if hints:
            self.notes.append(f"{hints} of {number} requests have worker, adapter or priority hints, which are ignored")

    def _lengths(self, log: SqliteLog) -> "array[int]":
        """Return the length of each response in tokens, in the order of the requests."""
        lengths = array("q")
        open_: dict[str, int] = {}
        for _, event in _story(log, self._partition):
            if isinstance(event, RequestSubmitted):
                open_[event.request_id] = len(lengths)
                lengths.append(UNFINISHED)
            elif event.request_id in open_:
                lengths[open_.pop(event.request_id)] = event.output_tokens
        return lengths

    async def _group(self, log: SqliteLog) -> tuple[int, int]:
        """Return the control partition and the block size of the only group."""
        groups = await groups_of(log)
        if len(groups) != 1:
            names = ", ".join(sorted(groups)) or "none"
            reason = f"contains the groups {names}; expected one: record a single group with `--group`"
            raise ConfigError(f"{self._path}: {reason}")
        (partition,) = groups.values()
        sizes = sorted({pool.block_size for pool in await pools_of(log, partition)})
        if len(sizes) != 1:
            found = " and ".join(map(str, sizes)) or "no"
            raise ConfigError(f"{self._path}: got {found} tokens per block in its pools; expected one size")
        return partition, sizes[0]

    @contextmanager
    def _opened(self) -> Iterator[SqliteLog]:
        try:
            log = SqliteLog.open(self._path, readonly=True)
            try:
                yield log
            finally:
                log.close()
        except LogError as error:
            raise ConfigError(str(error)) from error


def _turn(number: int, at_us: int, event: RequestSubmitted, output_tokens: int, block_tokens: int) -> Turn:
    ids = unpack_u64(event.sequence_hashes)
    if len(ids) * block_tokens < event.prompt_tokens:
        # The partial last block has no hash, so it gets a unique id.
        ids.append(xxh3_64_intdigest(b"tail %d" % number))
    return Turn(
        number=number,
        prompt_tokens=event.prompt_tokens,
        output_tokens=output_tokens,
        block_ids=tuple(ids),
        at_us=at_us,
        session_id=event.routing.session_id,
    )


def _story(log: SqliteLog, partition: int) -> Iterator[tuple[int, RequestSubmitted | RequestFinished]]:
    """Yield submitted and finished requests in the order in which the owner applied them, with the owner's clock."""
    story = _applied(log, partition)
    while True:
        try:
            found = _at_once(anext(story))
        except StopAsyncIteration:
            return
        yield found


async def _applied(log: Log, partition: int) -> AsyncIterator[tuple[int, RequestSubmitted | RequestFinished]]:
    start, end = await oldest_state(log, partition), await log.end(DECISIONS.name, partition)
    order = RecordedOrder(log, partition, start.view)
    async for _, record, view in recorded_views(log, partition, start, end):
        if isinstance(record, OwnerClaimed):  # may continue from a snapshot, so that its events are read again
            order = RecordedOrder(log, partition, view)
        runs = [run for run in record.consumed if run.topic in READ]
        events = {topic: iter(found) for topic, found in (await order.events_of(tuple(runs))).items()}
        event = None
        for run in runs:
            for _ in range(run.count):
                event = next(events[run.topic])
                if isinstance(event, RequestFinished):
                    yield run.now_us, event
        # The owner decides a submitted request at once, so the request is the last event that its journal record
        # consumed.
        # A call of an endpoint runs no model.
        if isinstance(event, RequestSubmitted) and event.task != "call" and _takes(record, event.request_id):
            yield runs[-1].now_us, event


def _takes(record: JournalRecord, request_id: str) -> bool:
    """Return whether this journal record is the decision about a request that was just submitted."""
    if not isinstance(record, RequestRouted | RequestHeld | RequestRejected) or record.request_id != request_id:
        return False
    rejected = isinstance(record, RequestRejected) and record.reason == "duplicate_id"
    return record.consumed[-1].topic == REQUESTS.name and not rejected


def _at_once(step: Awaitable[T]) -> T:
    """Run a coroutine that reads a file, and never waits, to its end. Works inside and outside of an event loop."""
    try:
        next(iter(step.__await__()))
    except StopIteration as done:
        result: T = done.value
        return result
    raise AssertionError("reading a file does not suspend")
