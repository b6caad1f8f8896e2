"""One partition of the Kafka API: requests in, answers out, and how far it got.

Theory of operation. Answers come from one reply slot, read by `_follow` alone; requests are taken by `_serve`.
What is committed for the partition says all that another ingress needs to go on: the oldest unanswered request,
where in the slot its answer can begin, and a promise: nothing from the promised offset on was submitted yet.
So whoever takes over first opens every request up to there, reads the slot, gives again what stands on it, and
submits the rest; the owner knows a request that it has already by its id and nonce.
"""

import asyncio
import logging
import re
from collections import deque
from dataclasses import replace

from forebay.core.state.reply_slot import apply
from forebay.events.codec import DecodeError, decode, encode
from forebay.events.tokens import TokenEvent
from forebay.events.topics import REQUESTS, TOKENS
from forebay.ingress.errors import ApiError, internal_error, invalid, retry_headers
from forebay.ingress.ingress import GRACE_S, Ingress, PreparedRequest
from forebay.ingress.kafka_api.metrics import KafkaApiMetrics
from forebay.ingress.kafka_api.request import ReplyAddress, address, body_of, nonce_of, slot_of
from forebay.ingress.kafka_api.response import (
    EmbeddingBatch,
    PendingCompletion,
    PendingEmbedding,
    PendingResponse,
    RequestOrigin,
    ResponseRecord,
    WindowEntry,
)
from forebay.ingress.kafka_api.topics import ReplyTopics
from forebay.ingress.openai.embeddings import EmbeddingBody, part_id
from forebay.ingress.openai.render import ResponseFormatter
from forebay.ingress.openai.requests import ChatBody, TextBody
from forebay.ingress.streams import was_rejected
from forebay.transport.base import Draft, LogError, Record, Tail
from forebay.transport.kafka.group import Committed, KafkaGroup
from forebay.transport.kafka.log import KafkaLog
from forebay.transport.kafka.replies import KafkaReplies, Reply, TopicUnusable

logger = logging.getLogger(__name__)

IN_FLIGHT_MAX = 1_024  # of one ingress: enough to fill many engines, little enough to hold in memory
WINDOW_MAX = 8_192  # records from the oldest unanswered one on: what a take-over has to look at
PROMISE = 1_024  # records that may be submitted before the next commit
QUEUE_BYTES_MAX = 4 << 20  # fetched and not handled; beyond it the partition is paused
QUEUE_RECORDS_MAX = 1_000
PLACE_S = 0.1  # between two looks whether a router has placed the model's group and owns it
READ_MAX = 256  # records between two chances for others to run
NOTE = re.compile(r"(\d{1,9}):(\d{1,19}):(\d{1,19})")


class SharedState:
    """What the partitions of one ingress have in common."""

    def __init__(
        self,
        log: KafkaLog,
        ingress: Ingress,
        group: KafkaGroup,
        replies: KafkaReplies,
        metrics: KafkaApiMetrics,
        reply_slots: int,
    ) -> None:
        self.log = log
        self.ingress = ingress
        self.group = group
        self.replies = replies
        self.metrics = metrics
        self.reply_slots = reply_slots
        self.reply_topics = ReplyTopics(log.settings.namespace, ingress.settings.reply_topics)
        self.ids: set[str] = set()
        self.commit_soon = asyncio.Event()
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._in_flight = 0
        self._room = asyncio.Event()
        self._room.set()

    async def room(self) -> None:
        """Wait until another request may be submitted: there is room for it, and an owner that would decide it."""
        while self._in_flight >= IN_FLIGHT_MAX:
            await self._room.wait()
        while self.ingress.find_partition() is None or not self.ingress.has_owner():  # noqa: ASYNC110 - they set no event
            await asyncio.sleep(PLACE_S)

    def count(self, change: int) -> None:
        """So many requests more, or fewer, are in flight."""
        self._in_flight += change
        self.metrics.in_flight.set(self._in_flight)
        if self._in_flight < IN_FLIGHT_MAX:
            self._room.set()
        else:
            self._room.clear()

    def fail(self, error: LogError) -> None:
        """The broker does not take answers: the Kafka API ends."""
        if not self.failure.done():
            self.failure.set_exception(error)


class PartitionServer:
    """Serves one partition until cancelled.

    Attributes:
        started: whether it knows how far the partition got, so that there is something to commit.
        committed: what was committed last.
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
        self._reached = 0
        self._pushed = asyncio.Event()
        self._noted = asyncio.Event()
        self._wake = asyncio.Event()
        self._tail: Tail | None = None
        self._position = 0  # in the slot: what was dispatched
        self._next_offset = 0  # in the partition: what was taken in
        self._promised = 0
        self._window_end = 0
        self._window: deque[WindowEntry] = deque()
        self._answers: dict[str, PendingResponse] = {}
        self._deadlines: deque[tuple[float, str, WindowEntry]] = (
            deque()
        )  # all wait equally long: the oldest is due first
        self._strays: deque[tuple[WindowEntry, ReplyAddress, TopicUnusable]] = deque()

    async def run(self) -> None:
        """Take over, then serve. Raises LogError."""
        try:
            recover_to, slot_to = await self._begin()
            await self._recover(recover_to, slot_to)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._serve())
                group.create_task(self._follow())
        finally:
            if self._tail is not None:
                self._tail.close()
            self._shared.ids.difference_update(self._answers)
            self._shared.count(-sum(waiting.submission is None for waiting in self._answers.values()))
            self._answers.clear()

    def push(self, records: list[Record]) -> None:
        """Records of the partition that came."""
        self._queue += records
        self._queued_bytes += sum(len(record.value) for record in records)
        if self._queued_bytes >= QUEUE_BYTES_MAX or len(self._queue) >= QUEUE_RECORDS_MAX:
            self._paused = True
            self._shared.group.pause(self.partition)
        self._pushed.set()

    def reached(self, position: int) -> None:
        """All records before `position` were pushed."""
        if position > self._reached:
            self._reached = position
            self._pushed.set()

    def progress(self) -> Committed:
        """What to commit now."""
        window = self._window
        while window and window[0].answered:
            window.popleft()
        offset, slot_from = self._next_offset, self._position
        if window:
            offset, slot_from = window[0].offset, window[0].slot_from
        # A promise is never taken back: an earlier one may have been used.
        promised = max(self._promised, self._next_offset + PROMISE)
        return Committed(offset, f"{self._slot}:{slot_from}:{promised}")

    def noted(self, committed: Committed) -> None:
        """This was committed."""
        self.committed = committed
        note = _note(committed.metadata)
        assert note is not None
        self._promised = note[2]
        self._window_end = committed.offset + WINDOW_MAX
        self._noted.set()

    def tick(self) -> None:
        """Time has passed: look for what is due."""
        self._wake.set()

    async def _begin(self) -> tuple[int, int]:
        """Find out how far the partition got: how far requests, and how far the slot, are to be gone through again."""
        shared, group = self._shared, self._shared.group
        committed = await group.committed(self.partition)
        begin, end = await group.bounds(self.partition)
        note = None if committed is None else _note(committed.metadata)
        if note is not None and note[0] < shared.reply_slots:
            self._slot = note[0]
        offset = begin if committed is None else committed.offset
        if not begin <= offset <= end:
            logger.warning("partition %d of openai-requests no longer holds offset %d", self.partition, offset)
            offset = begin
        slot_end = await shared.log.end(TOKENS.name, self._slot)
        slot_begin = await shared.log.begin(TOKENS.name, self._slot)
        slot_from = slot_end if note is None else min(note[1], slot_end)
        self._promised = offset if note is None else note[2]
        recover_to = min(self._promised, end)
        self._position = max(slot_begin, slot_from)
        self._next_offset = self._reached = offset
        first = self.progress()
        if await group.commit({self.partition: first}):
            self.noted(first)
        self.started = True
        group.seek(self.partition, offset)
        group.resume(self.partition)
        return recover_to, slot_end

    async def _recover(self, recover_to: int, slot_to: int) -> None:
        """Open what another ingress may have submitted, and give again the answers that stand on the slot."""
        while self._next_offset < recover_to:
            record = await self._next_record()
            if record is not None:
                await self._take(record)
                await asyncio.sleep(0)  # a long window must not hold up the group's heartbeat
        self._tail = self._shared.log.tail(TOKENS.name, self._slot, self._position, self._wake)
        while self._position < slot_to:
            await self._read_slot()

    async def _serve(self) -> None:
        """Submit what was taken over and has no answer, then what comes."""
        for waiting in list(self._answers.values()):
            await self._shared.room()
            await self._submit(waiting)
        while True:
            record = await self._next_record()
            if record is None:
                continue
            self._next_offset = record.offset  # what lies between was no record
            while record.offset >= min(self._promised, self._window_end):
                if record.offset >= self._promised:
                    self._shared.commit_soon.set()
                self._noted.clear()
                await self._noted.wait()
            await self._shared.room()
            for opened in await self._take(record):
                await self._shared.room()
                await self._submit(opened)

    async def _follow(self) -> None:
        """Turn the slot into answers."""
        while True:
            await self._read_slot()
            await self._tidy()

    async def _next_record(self) -> Record | None:
        """The next record of the partition; None when what stood there was no record, as of a transaction."""
        while not self._queue:
            if self._paused:
                self._paused = False
                self._shared.group.resume(self.partition)
            if self._reached > self._next_offset:
                self._next_offset = self._reached
                return None
            self._pushed.clear()
            await self._pushed.wait()
        record = self._queue.popleft()
        self._queued_bytes -= len(record.value)
        return record if record.offset >= self._next_offset else None

    async def _take(self, record: Record) -> list[PendingResponse]:
        """Open what a record asks for, or refuse it. It stands in the window from here on."""
        entry = WindowEntry(record.offset, self._position)
        self._window.append(entry)
        self._next_offset = record.offset + 1
        where = address(record, self._shared.reply_topics)
        try:
            if where.problem is not None:
                raise where.problem
            if where.reply_topic and not await self._shared.replies.exists(where.reply_topic):
                text = f"there is no topic {where.reply_topic}"
                where = ReplyAddress(where.request_id, "")
                raise invalid(text, "reply-topic", "unknown_reply_topic")
            return await self._open(record, RequestOrigin(entry, where, ""))
        except ApiError as error:
            await self._refuse(entry, where, error)
        except LogError:
            raise
        except Exception:  # whoever took the partition over would break at the same record
            logger.exception("record %d of partition %d of openai-requests", record.offset, self.partition)
            await self._refuse(entry, where, internal_error())
        return []

    async def _refuse(self, entry: WindowEntry, where: ReplyAddress, error: ApiError) -> None:
        if malformed := error.status < 500:  # else it is no fault of the record: no pool serves the model yet
            self._shared.metrics.malformed.labels(error.code).inc()
        self._shared.metrics.requests.labels("malformed" if malformed else "error").inc()
        await self._send(entry, where, ResponseRecord(0, error.status, True, error.encoded()))

    async def _open(self, record: Record, place: RequestOrigin) -> list[PendingResponse]:
        ingress = self._shared.ingress
        body = body_of(record, ingress.bodies.limits)
        headers = (record.headers or {}).items()
        request_id = place.where.request_id
        opened: list[tuple[PendingResponse, PreparedRequest]] = []
        if isinstance(body, EmbeddingBody):
            shared = EmbeddingBatch(body)
            place = replace(place, endpoint="embeddings")
            for index, part in enumerate(await ingress.prepare_embedding(body, headers, is_patient=True)):
                reply = PendingEmbedding(part_id(request_id, index), place, part.prompt.tokens, shared)
                opened.append((reply, part))
        else:
            prepared = await ingress.prepare(body, headers, is_patient=True)
            opened.append((self._answer(body, prepared, place, record.at_us // 1_000_000), prepared))
        for waiting, _ in opened:
            if waiting.request_id in self._shared.ids:
                raise ApiError(409, "duplicate_request_id", f"the request id {waiting.request_id} is under way")
        for waiting, prepared in opened:
            waiting.submission = ingress.submission(
                waiting.request_id,
                prepared,
                reply_slot=self._slot,
                reply_from=place.entry.slot_from,
                nonce=nonce_of(record),
                patient=True,  # refused, its client would write it again, and the topic holds it anyway
            )
            self._answers[waiting.request_id] = waiting
            self._shared.ids.add(waiting.request_id)
        return [waiting for waiting, _ in opened]

    def _answer(
        self, body: ChatBody | TextBody, prepared: PreparedRequest, place: RequestOrigin, created: int
    ) -> PendingCompletion:
        ingress, request_id = self._shared.ingress, place.where.request_id
        chat = isinstance(body, ChatBody)
        shape = ResponseFormatter(
            chat=chat, response_id=request_id, model=body.model, created=created, names_worker=body.names_worker
        )
        return PendingCompletion(
            request_id,
            replace(place, endpoint="chat_completions" if chat else "completions"),
            prepared.prompt.tokens,
            shape,
            prepared.output.composer(ingress.model, ingress.parsers, request_id),
            stream=bool(body.stream),
            usage_chunk=body.includes_usage,
        )

    async def _submit(self, waiting: PendingResponse) -> None:
        """Put a request on the log, unless it is over already."""
        if waiting.over or waiting.submission is None:
            return
        ingress = self._shared.ingress
        value = encode(REQUESTS, waiting.submission)
        try:
            partition = ingress.require_partition()
            self._shared.log.append_soon([Draft(REQUESTS.name, partition, value, waiting.request_id.encode())])
        except ValueError as error:
            await self._deliver(waiting, [waiting.fail(ApiError(413, "request_too_large", str(error)))])
            return
        except ApiError as error:
            await self._deliver(waiting, [waiting.fail(error)])
            return
        waiting.submission = None
        due_s = asyncio.get_running_loop().time() + ingress.settings.timeout_s + GRACE_S
        self._deadlines.append((due_s, waiting.request_id, waiting.place.entry))
        self._shared.count(1)

    async def _read_slot(self) -> None:
        """Dispatch what stands ready on the slot; wait when nothing does."""
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
        try:
            event: TokenEvent = decode(TOKENS, record.value)
        except DecodeError as error:
            self._shared.ingress.metrics.undecodable.inc()
            logger.warning("a record of the reply slot does not decode: %s", error)
            return
        for waiting in apply(self._answers, event, self._shared.ingress.settings.model_name):
            pieces = waiting.pieces()
            if waiting.over and waiting.submission is not None:
                self._shared.metrics.repeated.inc()
            await self._deliver(waiting, pieces)
            if waiting.ended is not None and not waiting.over:
                self._drop(waiting)  # others of its record are awaited, and may need its room

    async def _tidy(self) -> None:
        """End what is due, and answer to forebay's own topic what others do not take."""
        now_s = asyncio.get_running_loop().time()
        while self._deadlines and (self._deadlines[0][0] <= now_s or self._deadlines[0][2].answered):
            _, request_id, entry = self._deadlines.popleft()
            waiting = self._awaited(request_id, entry)
            if waiting is not None:
                text = f"no answer within {self._shared.ingress.settings.timeout_s:g} s"
                await self._deliver(waiting, [waiting.fail(ApiError(504, "deadline_exceeded", text))])
        while self._strays:
            entry, where, trouble = self._strays.popleft()
            diverted = self._awaited(where.request_id, entry)
            error = invalid(str(trouble), "reply-topic", "reply_topic_unusable")
            if diverted is not None:
                diverted.fail(error)
                self._close(diverted)
            await self._send(
                entry, ReplyAddress(where.request_id, ""), ResponseRecord(0, error.status, True, error.encoded())
            )

    def _awaited(self, request_id: str, entry: WindowEntry) -> PendingResponse | None:
        """The request of this record, while it is not over."""
        waiting = self._answers.get(request_id)
        return waiting if waiting is not None and waiting.place.entry is entry else None

    async def _deliver(self, waiting: PendingResponse, pieces: list[ResponseRecord]) -> None:
        if waiting.over:
            self._close(waiting)
        for piece in pieces:
            await self._send(waiting.place.entry, waiting.place.where, piece)

    def _close(self, waiting: PendingResponse) -> None:
        """Its answer is complete: nothing of it is awaited any more."""
        shared, error = self._shared, waiting.error
        dropped = [self._drop(part) for part in waiting.parts]
        if not any(dropped):
            return
        shared.metrics.requests.labels("answered" if error is None else "error").inc()
        status = "success" if error is None else "error"
        if was_rejected(waiting):
            shared.ingress.metrics.rejected(waiting.place.endpoint)
        shared.ingress.metrics.ended(waiting.place.endpoint, stream=waiting.stream, status=status)

    def _drop(self, waiting: PendingResponse) -> bool:
        """It is not listened for any more; whether it was."""
        shared, error = self._shared, waiting.error
        if self._answers.pop(waiting.request_id, None) is None:
            return False
        shared.ids.discard(waiting.request_id)
        if waiting.submission is None:
            shared.count(-1)
            if waiting.ended is None:
                shared.ingress.cancel(waiting.request_id, "stop" if error is None else error.code)
        return True

    async def _send(self, entry: WindowEntry, where: ReplyAddress, piece: ResponseRecord) -> None:
        """Send a record of an answer; the last one answers its request once the broker has it."""

        def on_done(trouble: LogError | TopicUnusable | None) -> None:
            if trouble is None:
                entry.answered = entry.answered or piece.last
            elif isinstance(trouble, LogError):
                self._shared.fail(trouble)
            elif not entry.diverted:
                entry.diverted = True
                self._shared.metrics.undeliverable.inc()
                self._strays.append((entry, where, trouble))
                self._wake.set()

        headers = {
            "request-id": where.request_id,
            "status": str(piece.status),
            "last": "1" if piece.last else "0",
            "index": str(piece.index),
            **retry_headers(piece.status),
        }
        reply = Reply(where.reply_topic, where.request_id.encode(), headers, piece.value)
        await self._shared.replies.send(reply, on_done)


def _note(metadata: str) -> tuple[int, int, int] | None:
    """What was committed with an offset: slot, offset in the slot, promise."""
    found = NOTE.fullmatch(metadata)
    if found is None:
        return None
    slot, slot_from, promised = found.groups()
    return int(slot), int(slot_from), int(promised)
