"""Serve one partition of `openai-requests`: read requests, send responses, and commit progress.

Theory of operation. `_serve` reads requests from the partition. `_follow` reads responses from one reply slot. The
committed offset and its metadata contain everything that another ingress needs to continue:

- the offset of the oldest request without a complete response,
- the offset in the reply slot at which that response can begin,
- a submission bound: no request at or after this offset of the partition has been submitted.

If Kafka assigns the partition to another ingress, this ingress opens every request between the committed offset and the
bound. It reads their responses from the reply slot and sends them again, and submits the requests without a response.
The owner recognises a duplicate submission by its id and nonce.
"""

import asyncio
import logging
import re
from collections import deque
from functools import partial

from forebay import runtime
from forebay.core.state.reply_slot import apply
from forebay.events.codec import encode
from forebay.events.request_ids import kafka_api_request_id
from forebay.events.topics import REQUESTS, TOKENS
from forebay.events.trace_ids import trace_id_of
from forebay.ingress.access_log import fields_of, write_record
from forebay.ingress.commands import GRACE_S
from forebay.ingress.errors import ApiError, deadline_exceeded, internal_error, invalid, retry_headers
from forebay.ingress.kafka_api.request import ReplyAddress, address, body_of, nonce_of, signer, slot_of
from forebay.ingress.kafka_api.response import PendingRequest, RecordResponse, ResponseRecord, WindowEntry
from forebay.ingress.kafka_api.shared import SharedState
from forebay.ingress.prepare import reserved_tokens, submissions
from forebay.ingress.response_fold import was_rejected
from forebay.ingress.streams import count_foreign, decode_output
from forebay.transport.base import Draft, LogError, Record, Tail
from forebay.transport.kafka.group import Committed
from forebay.transport.kafka.replies import Reply, TopicUnusable
from forebay.transport.patience import until_available

logger = logging.getLogger(__name__)

WINDOW_MAX = 8_192  # records from the oldest incomplete request on; the next ingress must read them again
SUBMIT_AHEAD = 1_024  # records that may be submitted before the next commit
QUEUE_BYTES_MAX = 4 << 20  # fetched but not processed; above this size the partition is paused
QUEUE_RECORDS_MAX = 1_000
READ_MAX = 256  # records per iteration of the event loop
METADATA = re.compile(r"(\d{1,9}):(\d{1,19}):(\d{1,19})")


class PartitionServer:
    """Serves one partition of `openai-requests` until cancelled.

    Attributes:
        started: whether the server has read the committed progress. It must not commit before.
        committed: offset and metadata of the most recent commit; None before the first.
    """

    def __init__(self, shared: SharedState, partition: int) -> None:
        self.partition = partition
        self.started = False
        self.committed: Committed | None = None
        self._shared = shared
        self._slot = slot_of(partition, shared.reply_slots)
        self._queue: deque[Record] = deque()
        self._queued_bytes = 0
        self._paused = False
        self._pushed_to = 0
        self._pushed = asyncio.Event()
        self._committed_event = asyncio.Event()
        self._wake = asyncio.Event()
        self._tail: Tail | None = None
        self._position = 0  # next offset in the reply slot
        self._next_offset = 0  # next offset in the partition
        self._submit_before = 0
        self._window_end = 0
        self._window: deque[WindowEntry] = deque()
        self._pending: dict[str, PendingRequest] = {}
        self._pending_of: dict[str, dict[str, PendingRequest]] = {}  # the same by group
        self._deadlines: deque[tuple[float, str, WindowEntry]] = deque()  # ordered, as all have the same timeout
        self._undeliverable: deque[tuple[WindowEntry, ReplyAddress, TopicUnusable]] = deque()

    async def run(self) -> None:
        """Take the partition over, then serve it until cancelled. Raises LogError if the log fails."""
        try:
            recover_to, slot_to = await self._take_over()
            await self._recover(recover_to, slot_to)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._serve())
                group.create_task(self._follow())
        finally:
            if self._tail is not None:
                self._tail.close()
            self._shared.ids.difference_update(one.response.where.request_id for one in self._pending.values())
            self._shared.count(-sum(request.submission is None for request in self._pending.values()))
            for request in self._pending.values():
                request.response.settle()
            self._pending.clear()

    def push(self, records: list[Record]) -> None:
        """Queue records that were fetched from the partition. Pause fetching if the queue is full."""
        self._queue += records
        self._queued_bytes += sum(len(record.value) for record in records)
        if self._queued_bytes >= QUEUE_BYTES_MAX or len(self._queue) >= QUEUE_RECORDS_MAX:
            self._paused = True
            self._shared.group.pause(self.partition)
        self._pushed.set()

    def advance(self, position: int) -> None:
        """Record that all records before the offset `position` were passed to `push`, even if offsets were skipped."""
        if position > self._pushed_to:
            self._pushed_to = position
            self._pushed.set()

    def progress(self) -> Committed:
        window = self._window
        while window and window[0].is_complete:
            window.popleft()
        offset, slot_from = self._next_offset, self._position
        if window:
            offset, slot_from = window[0].offset, window[0].slot_from
        # The bound never decreases, because requests up to the earlier bound may have been submitted.
        submit_before = max(self._submit_before, self._next_offset + SUBMIT_AHEAD)
        return Committed(offset, f"{self._slot}:{slot_from}:{submit_before}")

    def on_committed(self, committed: Committed) -> None:
        self.committed = committed
        metadata = _parse_metadata(committed.metadata)
        assert metadata is not None
        self._submit_before = metadata[2]
        self._window_end = committed.offset + WINDOW_MAX
        self._committed_event.set()

    def wake(self) -> None:
        """Wake the task that checks the deadlines of requests, and sends responses that were not deliverable."""
        self._wake.set()

    async def _take_over(self) -> tuple[int, int]:
        """Read the committed progress. Return the offsets up to which partition and reply slot must be read again."""
        shared, group = self._shared, self._shared.group
        committed = await group.committed(self.partition)
        begin, end = await group.bounds(self.partition)
        note = None if committed is None else _parse_metadata(committed.metadata)
        if note is not None and note[0] < shared.reply_slots:
            self._slot = note[0]
        offset = begin if committed is None else committed.offset
        if not begin <= offset <= end:
            logger.warning(
                "partition %d of openai-requests no longer holds the committed offset %d; continuing at offset %d",
                self.partition,
                offset,
                begin,
            )
            offset = begin
        slot_end = await until_available(lambda: shared.log.end(TOKENS.name, self._slot))
        slot_begin = await until_available(lambda: shared.log.begin(TOKENS.name, self._slot))
        slot_from = slot_end if note is None else min(note[1], slot_end)
        self._submit_before = offset if note is None else note[2]
        recover_to = min(self._submit_before, end)
        self._position = max(slot_begin, slot_from)
        self._next_offset = self._pushed_to = offset
        first = self.progress()
        if await group.commit({self.partition: first}):
            self.on_committed(first)
        self.started = True
        group.seek(self.partition, offset)
        group.resume(self.partition)
        return recover_to, slot_end

    async def _recover(self, recover_to: int, slot_to: int) -> None:
        """Open requests that another ingress may have submitted, and send their responses from the reply slot again."""
        while self._next_offset < recover_to:
            record = await self._next_record()
            if record is not None:
                await self._accept(record)
                await asyncio.sleep(0)  # a long window must not block the heartbeat of the group
        self._tail = self._shared.log.tail(TOKENS.name, self._slot, self._position, self._wake)
        while self._position < slot_to:
            await self._read_slot()

    async def _serve(self) -> None:
        for request in list(self._pending.values()):
            await self._shared.wait_for_capacity()
            await self._submit(request)
        while True:
            record = await self._next_record()
            if record is None:
                continue
            self._next_offset = record.offset  # the skipped offsets are not records
            while record.offset >= min(self._submit_before, self._window_end):
                if record.offset >= self._submit_before:
                    self._shared.commit_soon.set()
                self._committed_event.clear()
                await self._committed_event.wait()
            await self._shared.wait_for_capacity()
            for request in await self._accept(record):
                await self._shared.wait_for_capacity()
                await self._submit(request)

    async def _follow(self) -> None:
        while True:
            await self._read_slot()
            await self._expire()

    async def _next_record(self) -> Record | None:
        """Return the next record, None if an offset was skipped, such as the marker of a transaction."""
        while not self._queue:
            if self._paused:
                self._paused = False
                self._shared.group.resume(self.partition)
            if self._pushed_to > self._next_offset:
                self._next_offset = self._pushed_to
                return None
            self._pushed.clear()
            await self._pushed.wait()
        record = self._queue.popleft()
        self._queued_bytes -= len(record.value)
        return record if record.offset >= self._next_offset else None

    async def _accept(self, record: Record) -> list[PendingRequest]:
        entry = WindowEntry(record.offset, self._position)
        self._window.append(entry)
        self._next_offset = record.offset + 1
        where = address(record, self._shared.reply_topics)
        try:
            if where.problem is not None:
                raise where.problem
            if where.reply_topic and not await self._shared.replies.exists(where.reply_topic):
                text = f"unknown reply-topic {where.reply_topic!r}; create the topic first"
                where = ReplyAddress(where.request_id, "")
                raise invalid(text, "reply-topic", "unknown_reply_topic")
            return await self._open(record, entry, where)
        except ApiError as error:
            await self._reject(record, entry, where, error)
        except LogError:
            raise
        except Exception:  # another ingress would fail at the same record
            logger.exception(
                "failed to process record %d of partition %d of openai-requests", record.offset, self.partition
            )
            await self._reject(record, entry, where, internal_error())
        return []

    async def _reject(self, record: Record, entry: WindowEntry, where: ReplyAddress, error: ApiError) -> None:
        if malformed := error.status < 500:  # otherwise it is valid, for example if no pool serves the model yet
            self._shared.metrics.malformed.labels(error.code).inc()
        self._shared.metrics.requests.labels("malformed" if malformed else "error").inc()
        write_record(self.partition, entry.offset, error.status, error=error.code, request_id=where.request_id)
        body = error.encoded((record.headers or {}).get("path", ""))
        await self._send(entry, where, ResponseRecord(0, error.status, True, body, error.retry_after_s))

    async def _open(self, record: Record, entry: WindowEntry, where: ReplyAddress) -> list[PendingRequest]:
        """Open the requests of a record, one per choice or input. Raises ApiError if one is invalid."""
        front, request_id = self._shared.front, kafka_api_request_id(where.request_id)
        await asyncio.sleep(0)  # to check a signature takes 0.2 ms
        caller = signer(record, self._shared.topic, front.keys, is_required=front.settings.require_key)
        body = body_of(record, front.bodies.limits, ignores_unknown=front.settings.ignore_unknown_fields)
        caller.require_model(body.model)
        model, named = await self._shared.find(body.model, request_id)
        settings, headers = model.group.settings, (record.headers or {}).items()
        inputs = await model.prepare(body, headers, named, caller, is_patient=True)
        events = submissions(
            request_id,
            inputs,
            nonce=nonce_of(record),
            reply_slot=self._slot,
            reply_from=entry.slot_from,
            at_us=runtime.wall_us(),
            created_s=record.at_us // 1_000_000,
            ingress_id=settings.ingress_id,
            patient=True,  # a client would only send it again, and the topic keeps it anyway
        )
        fold = model.fold(events[0])
        if where.request_id in self._shared.ids:
            text = f"the request id {where.request_id} is already in flight; use another id"
            raise ApiError(409, "duplicate_request_id", text)
        response = RecordResponse(entry, where, fold, model.group)
        response.admission = partial(front.limits.admit, caller.key, *reserved_tokens(inputs))
        first = events[0]
        response.caller = fields_of(first.tenant, first.key_id)
        response.caller["trace_id"] = trace_id_of(first.request_id, first.reply_key, first.traceparent)
        for index, (name, submission) in enumerate(zip(fold.ids, events, strict=True)):
            request = self._pending[name] = PendingRequest(name, response, index, submission)
            self._pending_of.setdefault(settings.model_name, {})[name] = request
        self._shared.ids.add(where.request_id)
        return response.requests

    async def _submit(self, request: PendingRequest) -> None:
        group = request.response.group
        try:
            await request.response.admit()
            if request.response.fold.is_over or request.submission is None:
                return
            value = encode(REQUESTS, request.submission)
            partition = group.require_partition()
            self._shared.log.append_soon([Draft(REQUESTS.name, partition, value, request.request_id.encode())])
        except ValueError as error:
            await self._fail(request, ApiError(413, "request_too_large", str(error)))
            return
        except ApiError as error:
            await self._fail(request, error)
            return
        request.submission = None
        due_s = asyncio.get_running_loop().time() + group.settings.timeout_s + GRACE_S
        self._deadlines.append((due_s, request.request_id, request.response.entry))
        self._shared.count(1)

    async def _read_slot(self) -> None:
        assert self._tail is not None
        self._wake.clear()
        records = self._tail.take(READ_MAX)
        for record in records:
            await self._dispatch(record)
        if records:
            await asyncio.sleep(0)
        else:
            await self._wake.wait()

    async def _dispatch(self, record: Record) -> None:
        self._position = record.offset + 1
        event = decode_output(record, self._shared.front.metrics.undecodable.inc)
        for request in () if event is None else apply(self._pending_of.get(event.group, {}), event, event.group):
            records = request.response.step(request)
            is_over = request.response.fold.is_over
            if is_over and request.submission is not None:
                self._shared.metrics.repeated.inc()
            await self._deliver(request, records)
            is_part_over = request.ended is not None or request.response.fold.is_part_over(request.index)
            if is_part_over and not is_over:
                self._drop(request)  # other parts of the record may need the capacity

    async def _expire(self) -> None:
        """Fail requests past their deadline, and send undeliverable responses to the default topic."""
        now_s = asyncio.get_running_loop().time()
        while self._deadlines and (self._deadlines[0][0] <= now_s or self._deadlines[0][2].is_complete):
            _, request_id, entry = self._deadlines.popleft()
            request = self._incomplete(request_id, entry)
            if request is not None:
                await self._fail(request, deadline_exceeded(self._shared.front.settings.timeout_s))
        while self._undeliverable:
            entry, where, failure = self._undeliverable.popleft()
            diverted = next((one for one in self._pending.values() if one.response.entry is entry), None)
            error = invalid(str(failure), "reply-topic", "reply_topic_unusable")
            if diverted is not None:
                diverted.response.fail(error)
                self._close(diverted)
            await self._send(
                entry, ReplyAddress(where.request_id, ""), ResponseRecord(0, error.status, True, error.encoded())
            )

    def _incomplete(self, request_id: str, entry: WindowEntry) -> PendingRequest | None:
        request = self._pending.get(request_id)
        return request if request is not None and request.response.entry is entry else None

    async def _fail(self, request: PendingRequest, error: ApiError) -> None:
        if request.response.fold.is_over:  # while its limits were checked
            return
        await self._deliver(request, [request.response.fail(error)])

    async def _deliver(self, request: PendingRequest, records: list[ResponseRecord]) -> None:
        response = request.response
        if response.fold.is_over:
            self._close(request)
        for record in records:
            await self._send(response.entry, response.where, record)

    def _close(self, request: PendingRequest) -> None:
        shared, fold = self._shared, request.response.fold
        dropped = [self._drop(one) for one in request.response.requests]
        if not any(dropped):
            return
        request.response.settle()
        shared.ids.discard(request.response.where.request_id)
        shared.metrics.requests.labels("answered" if fold.error is None else "error").inc()
        status = "success" if fold.error is None else "error"
        if was_rejected(request):
            request.response.group.metrics.rejected(fold.endpoint)
        request.response.group.metrics.ended(fold.endpoint, stream=fold.stream, status=status)
        request.response.write_access(self.partition)

    def _drop(self, request: PendingRequest) -> bool:
        """Remove a request, cancel it if it has not ended, and return whether it was registered."""
        shared = self._shared
        if self._pending.pop(request.request_id, None) is None:
            return False
        group = request.response.group
        count_foreign(request.request_id, request, shared.front.metrics.foreign.inc)
        del self._pending_of[group.settings.model_name][request.request_id]
        if request.submission is None:
            shared.count(-1)
            if request.ended is None:
                fold = request.response.fold
                tokens = fold.passed_tokens(request.index)
                group.cancel(request.request_id, fold.cancel_reason or "stop", output_tokens=tokens)
        return True

    async def _send(self, entry: WindowEntry, where: ReplyAddress, record: ResponseRecord) -> None:
        """Send a record of a response. The last record completes the request once the broker acknowledges it.

        After a failure nothing is sent, because the response would have a gap. The next membership, or another ingress,
        sends the response again.
        """
        if self._shared.failure.done():
            return

        def on_done(failure: LogError | TopicUnusable | None) -> None:
            if failure is None:
                entry.is_complete = entry.is_complete or record.last
            elif isinstance(failure, LogError):
                self._shared.fail(failure)
            elif not entry.diverted:
                entry.diverted = True
                self._shared.metrics.undeliverable.inc()
                self._undeliverable.append((entry, where, failure))
                self._wake.set()

        headers = {
            "request-id": where.request_id,
            "status": str(record.status),
            "last": "1" if record.last else "0",
            "index": str(record.index),
            **retry_headers(record.status, record.retry_after_s),
        }
        reply = Reply(where.reply_topic, where.request_id.encode(), headers, record.value)
        await self._shared.replies.send(reply, on_done)


def _parse_metadata(metadata: str) -> tuple[int, int, int] | None:
    """Return reply slot, offset in the slot and submission bound from the metadata of a commit."""
    found = METADATA.fullmatch(metadata)
    if found is None:
        return None
    slot, slot_from, submit_before = found.groups()
    return int(slot), int(slot_from), int(submit_before)
