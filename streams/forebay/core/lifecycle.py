"""The life of a request, from its submission to the time at which its id is forgotten.

Theory of operation. A request under way moves by the table below and by nothing else. What workers say
counts only for the attempt and the worker epoch that the request is on; everything else is outdated and
raises without effect. When a request ends only hashes of its id and content are kept, while it may be sent again.

    submitted --routed--> prefill --first token--> decode --finished--> (ended); submitted --held--> queued --routed-->
    prefill, decode --worker lost, not transferred--> waiting --routed--> prefill   any --failed, aborted--> (ended)
    submitted, queued, waiting --images to be encoded--> encode --(not) encoded, worker lost--> waiting
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from heapq import heapify, heappop, heappush
from typing import assert_never

from msgspec.msgpack import encode
from xxhash import xxh3_64_intdigest

from forebay.core.machine import IllegalTransition
from forebay.core.remembered import RememberedIds
from forebay.events.base import U64_MASK, array_u64
from forebay.events.decisions import Stage
from forebay.events.media import Encoded
from forebay.events.progress import (
    EncodeFailed,
    EncodeFinished,
    FirstTokenEmitted,
    OutputGrown,
    RequestFailed,
    RequestFinished,
    RequestProgress,
    TransferFailed,
)
from forebay.events.requests import NO_HINTS, RequestSubmitted, RouteQueried, RoutingHints, Task
from forebay.events.snapshots import Remembered, RequestState

UNDER_WAY_MAX = 100_000  # requests of one group at once: bounds memory, far above what its workers can run
REMEMBER_US = 120_000_000  # a Kafka producer gives up retrying after 120 s by default
NOT_ENCODED: tuple[Stage, int, str] = ("aggregated", 0, "")  # a digest says nothing of it, as before there were media


class Phase(StrEnum):
    """Where a request under way is."""

    SUBMITTED = "submitted"
    QUEUED = "queued"
    ENCODE = "encode"
    PREFILL = "prefill"
    DECODE = "decode"
    WAITING = "waiting"


class Move(StrEnum):
    """What happens to a request under way."""

    HELD = "held"
    ROUTED = "routed"
    TO_BE_ENCODED = "to_be_encoded"
    ENCODED = "encoded"
    NOT_ENCODED = "not_encoded"
    NOT_TRANSFERRED = "not_transferred"
    FIRST_TOKEN = "first_token"  # noqa: S105 - a token of text
    WORKER_LOST = "worker_lost"
    ENDED = "ended"


TRANSITIONS: dict[Phase, dict[Move, Phase | None]] = {
    Phase.SUBMITTED: {
        Move.HELD: Phase.QUEUED,
        Move.ROUTED: Phase.PREFILL,
        Move.TO_BE_ENCODED: Phase.ENCODE,
        Move.ENDED: None,
    },
    Phase.QUEUED: {Move.ROUTED: Phase.PREFILL, Move.TO_BE_ENCODED: Phase.ENCODE, Move.ENDED: None},
    Phase.ENCODE: {
        Move.ENCODED: Phase.WAITING,
        Move.NOT_ENCODED: Phase.WAITING,
        Move.WORKER_LOST: Phase.WAITING,
        Move.ENDED: None,
    },
    Phase.PREFILL: {
        Move.FIRST_TOKEN: Phase.DECODE,
        Move.NOT_TRANSFERRED: Phase.WAITING,
        Move.WORKER_LOST: Phase.WAITING,
        Move.ENDED: None,
    },
    Phase.DECODE: {Move.WORKER_LOST: Phase.WAITING, Move.ENDED: None},
    Phase.WAITING: {Move.ROUTED: Phase.PREFILL, Move.TO_BE_ENCODED: Phase.ENCODE, Move.ENDED: None},
}


@dataclass(slots=True)
class Request:
    """A request under way.

    `offset` is that of its `RequestSubmitted`; `due_us` its deadline; `packed` are its blocks as they came, kept
    for snapshots; `asked` is a hash of what does not change, `term` what the request adds to the digest now.

    `media_tokens` are the placeholders of its images and videos. `encodings` is the last attempt to encode them, sent
    to `encoder_id`; they lie where `encoded` says. `stage` is that of its last routing.
    """

    request_id: str
    content: int
    offset: int
    due_us: int
    reply_slot: int
    prompt_tokens: int
    tie_seed: int
    pool: str
    blocks: "array[int]"
    packed: bytes
    hints: RoutingHints
    lora_name: str
    task: Task
    media_tokens: int = 0
    asked: int = 0
    term: int = 0
    phase: Phase = Phase.SUBMITTED
    attempt: int = 0
    worker_id: str = ""
    worker_epoch: int = 0
    rank: int = 0
    queue_class: str = ""
    uncached_tokens: int = 0
    queued_at_us: int = 0
    stage: Stage = "aggregated"
    encodings: int = 0
    encoder_id: str = ""
    encoded: Encoded | None = None

    def __post_init__(self) -> None:
        hints = b"" if self.hints == NO_HINTS else encode(self.hints)
        text = (
            f"{self.request_id}\0{self.offset}\0{self.due_us}\0{self.pool}\0{self.reply_slot}\0{self.prompt_tokens}"
            f"\0{self.tie_seed}\0{xxh3_64_intdigest(self.packed)}\0{self.lora_name}\0{self.task}\0"
        )
        # What has no media is told as it was before there were any.
        media = b"\0%d" % self.media_tokens if self.media_tokens else b""
        self.asked = xxh3_64_intdigest(text.encode() + hints + media, self.content)

    @property
    def on_worker(self) -> bool:
        """Whether a worker has it now."""
        return self.phase in (Phase.PREFILL, Phase.DECODE, Phase.ENCODE)

    @property
    def stage_attempt(self) -> int:
        """The last attempt at the stage that it is in, or was in last."""
        return self.encodings if self.stage == "encode" else self.attempt

    @property
    def next_encoding(self) -> int:
        """Which encoding the next is. No lower than what was answered: an encoder's refusal would be void there."""
        return max(self.encodings + 1, self.attempt)


class Requests:
    """Requests under way by id, deadlines, and hashes of the ids that ended lately."""

    def __init__(self) -> None:
        self._under_way: dict[str, Request] = {}
        self._deadlines: list[tuple[int, str, int]] = []
        self._remembered = RememberedIds()
        self._sum = 0

    def __len__(self) -> int:
        """Requests under way."""
        return len(self._under_way)

    def get(self, request_id: str) -> Request | None:
        """The request of this id, if it is under way."""
        return self._under_way.get(request_id)

    def content_known(self, request_id: str) -> int | None:
        """The content hash under which this id was seen before, None for a new id."""
        request = self._under_way.get(request_id)
        if request is not None:
            return request.content
        return self._remembered.get(id_hash(request_id))

    def add(self, request: Request) -> None:
        """A new request is under way; its id must be new."""
        assert self.content_known(request.request_id) is None
        self._under_way[request.request_id] = request
        heappush(self._deadlines, _deadline(request))
        self._tidy_deadlines()
        self._sum_up(request)

    def route(self, request: Request, worker_id: str, worker_epoch: int, rank: int) -> None:
        """Its next attempt is with this worker rank."""
        self._move(request, Move.ROUTED)
        request.attempt += 1
        request.stage = "aggregated"
        request.worker_id, request.worker_epoch, request.rank = worker_id, worker_epoch, rank
        self._sum_up(request)

    def encode(self, request: Request, worker_id: str, worker_epoch: int, rank: int) -> None:
        """Its media are with this rank of an encode worker."""
        self._move(request, Move.TO_BE_ENCODED)
        request.encodings = request.next_encoding
        request.stage = "encode"
        request.encoder_id = worker_id
        request.worker_id, request.worker_epoch, request.rank = worker_id, worker_epoch, rank
        self._sum_up(request)

    def hold(self, request: Request, queue_class: str, uncached_tokens: int, now_us: int) -> None:
        """It waits in the router's queue from now on."""
        self._move(request, Move.HELD)
        request.queue_class, request.uncached_tokens, request.queued_at_us = queue_class, uncached_tokens, now_us
        self._sum_up(request)

    def lose_worker(self, request: Request) -> None:
        """Its worker is gone: it waits for another. Embeddings are given out once, so they are gone with it."""
        self._move(request, Move.WORKER_LOST)
        request.encoded = None
        self._sum_up(request)

    def end(self, request: Request, now_us: int) -> None:
        """Nothing more happens to it; its id is remembered for a while."""
        self._move(request, Move.ENDED)
        del self._under_way[request.request_id]
        self._sum -= request.term
        self._remembered.add(id_hash(request.request_id), request.content, now_us + REMEMBER_US)

    def progress(self, event: RequestProgress, now_us: int) -> Request:
        """Fold what a worker says; the request that it is about.

        Raises:
            IllegalTransition: the request is not under way, is on another attempt or worker, or is past this.
        """
        request = self._under_way.get(event.request_id)
        if request is None:
            raise IllegalTransition(f"{event.request_id} is not under way")
        attempt = request.stage_attempt
        if (event.attempt, event.worker_id, event.worker_epoch) != (attempt, request.worker_id, request.worker_epoch):
            raise IllegalTransition(f"{event.request_id} is on attempt {attempt} with {request.worker_id}")
        match event:
            case OutputGrown():
                if request.phase is not Phase.DECODE:
                    raise IllegalTransition(f"{event.request_id} has no first token yet")
            case FirstTokenEmitted():
                self._move(request, Move.FIRST_TOKEN)
                self._sum_up(request)
            case RequestFinished() if request.stage == "encode":
                raise IllegalTransition(f"{event.request_id} is encoded, not answered, by {event.worker_id}")
            case RequestFinished() | RequestFailed():
                self.end(request, now_us)
            case EncodeFinished() | EncodeFailed() | TransferFailed():
                self._encode_progress(event, request)
            case _:
                assert_never(event)
        return request

    def _encode_progress(self, event: EncodeFinished | EncodeFailed | TransferFailed, request: Request) -> None:
        match event:
            case EncodeFinished():
                self._move(request, Move.ENCODED)
                request.encoded = event.encoded
            case EncodeFailed():
                self._move(request, Move.NOT_ENCODED)
            case TransferFailed() if request.encoded is None:
                raise IllegalTransition(f"{event.request_id} has nothing to be transferred")
            case TransferFailed():
                self._move(request, Move.NOT_TRANSFERRED)
                request.encoded = None
            case _:
                assert_never(event)
        self._sum_up(request)

    def of_worker(self, worker_id: str, worker_epoch: int) -> list[Request]:
        """The requests that a worker has, in the order of their submission."""
        return self._in_order(
            request
            for request in self._under_way.values()
            if request.worker_id == worker_id and request.worker_epoch == worker_epoch and request.on_worker
        )

    def queued(self) -> list[Request]:
        """The requests that wait in the router's queue, in the order of their submission."""
        return self._in_order(request for request in self._under_way.values() if request.phase is Phase.QUEUED)

    def waiting(self) -> list[Request]:
        """The requests that lost their worker, in the order of their submission."""
        return self._in_order(request for request in self._under_way.values() if request.phase is Phase.WAITING)

    def under_way(self) -> list[Request]:
        """All requests under way, in the order of their submission."""
        return self._in_order(iter(self._under_way.values()))

    def next_due_us(self) -> int | None:
        """When something happens by time alone: a deadline, or an id to forget."""
        forgotten_us = self._remembered.next_due_us()
        deadlines = self._deadlines
        # Asked with every event: whose the first deadline is only matters if it comes first.
        if forgotten_us is not None and (not deadlines or forgotten_us <= deadlines[0][0]):
            return forgotten_us
        self._drop_ended_deadlines()
        if not deadlines:
            return forgotten_us
        due_us = deadlines[0][0]
        return due_us if forgotten_us is None or due_us < forgotten_us else forgotten_us

    def expired(self, now_us: int) -> list[Request]:
        """Forget ids whose time has come; the requests under way whose deadline has passed, to be ended."""
        self._remembered.forget(now_us)
        found = []
        self._drop_ended_deadlines()
        while self._deadlines and self._deadlines[0][0] <= now_us:
            found.append(self._under_way[heappop(self._deadlines)[1]])
            self._drop_ended_deadlines()
        return found

    def digest(self) -> int:
        """64 bits over the requests under way and the ids remembered."""
        return (self._sum + self._remembered.digest()) & U64_MASK

    def snapshot(self) -> Iterator[RequestState | Remembered]:
        """One fact for each request under way, then what is remembered, oldest first."""
        for request in self.under_way():
            yield RequestState(
                request_id=request.request_id,
                phase=request.phase,
                content=request.content,
                due_us=request.due_us,
                offset=request.offset,
                reply_slot=request.reply_slot,
                prompt_tokens=request.prompt_tokens,
                tie_seed=request.tie_seed,
                pool=request.pool,
                attempt=request.attempt,
                worker_id=request.worker_id,
                worker_epoch=request.worker_epoch,
                rank=request.rank,
                sequence_hashes=request.packed,
                lora_name=request.lora_name,
                task=request.task,
                media_tokens=request.media_tokens,
                stage=request.stage,
                encodings=request.encodings,
                encoder_id=request.encoder_id,
                encoded=request.encoded,
                routing=request.hints,
                queue_class=request.queue_class,
                uncached_tokens=request.uncached_tokens,
                queued_at_us=request.queued_at_us,
            )
        yield from self._remembered.snapshot()

    def restore(self, chunk: RequestState | Remembered) -> None:
        """Take in one chunk of a snapshot, in the order of `snapshot`."""
        match chunk:
            case RequestState():
                self.add(
                    Request(
                        request_id=chunk.request_id,
                        content=chunk.content,
                        offset=chunk.offset,
                        due_us=chunk.due_us,
                        reply_slot=chunk.reply_slot,
                        prompt_tokens=chunk.prompt_tokens,
                        tie_seed=chunk.tie_seed,
                        pool=chunk.pool,
                        blocks=array_u64(chunk.sequence_hashes),
                        packed=chunk.sequence_hashes,
                        hints=chunk.routing,
                        lora_name=chunk.lora_name,
                        task=chunk.task,
                        media_tokens=chunk.media_tokens,
                        stage=chunk.stage,
                        encodings=chunk.encodings,
                        encoder_id=chunk.encoder_id,
                        encoded=chunk.encoded,
                        phase=Phase(chunk.phase),
                        attempt=chunk.attempt,
                        worker_id=chunk.worker_id,
                        worker_epoch=chunk.worker_epoch,
                        rank=chunk.rank,
                        queue_class=chunk.queue_class,
                        uncached_tokens=chunk.uncached_tokens,
                        queued_at_us=chunk.queued_at_us,
                    )
                )
            case Remembered():
                self._remembered.restore(chunk)
            case _:
                assert_never(chunk)

    def _move(self, request: Request, move: Move) -> None:
        table = TRANSITIONS[request.phase]
        if move not in table:
            raise IllegalTransition(f"{request.request_id} is in {request.phase}: {move} does not apply")
        request.phase = table[move] or request.phase

    def _sum_up(self, request: Request) -> None:
        """The request is another than before."""
        term = _term(request)
        self._sum += term - request.term
        request.term = term

    def _drop_ended_deadlines(self) -> None:
        deadlines = self._deadlines
        while deadlines and not self._is_under_way(*deadlines[0][1:]):
            heappop(deadlines)

    def _tidy_deadlines(self) -> None:
        # An ended request leaves its deadline behind: taking it out of the middle of a heap costs a walk.
        deadlines = self._deadlines
        if len(deadlines) > 2 * len(self._under_way) + 64:
            deadlines[:] = map(_deadline, self._under_way.values())
            heapify(deadlines)

    def _is_under_way(self, request_id: str, offset: int) -> bool:
        # By offset: a forgotten id may be used again while the deadline of its first use still lies here.
        request = self._under_way.get(request_id)
        return request is not None and request.offset == offset

    @staticmethod
    def _in_order(requests: Iterator[Request]) -> list[Request]:
        return sorted(requests, key=lambda request: request.offset)


def submitted(event: RequestSubmitted, pool: str, offset: int, now_us: int) -> Request:
    """A request as it begins; `offset` is that of the event, its deadline counts from `now_us`."""
    return Request(
        request_id=event.request_id,
        content=content_hash(event),
        offset=offset,
        due_us=now_us + event.timeout_us,
        reply_slot=event.reply_slot,
        prompt_tokens=event.prompt_tokens,
        tie_seed=event.tie_seed,
        pool=pool,
        blocks=array_u64(event.sequence_hashes),
        packed=event.sequence_hashes,
        hints=event.routing,
        lora_name=event.lora_name,
        task=event.task,
        media_tokens=sum(one.tokens for one in event.media),
    )


def queried(event: RouteQueried, pool: str) -> Request:
    """A request that is only asked about."""
    return Request(
        request_id=event.request_id,
        content=0,
        offset=0,
        due_us=0,
        reply_slot=event.reply_slot,
        prompt_tokens=event.prompt_tokens,
        tie_seed=event.tie_seed,
        pool=pool,
        blocks=array_u64(event.sequence_hashes),
        packed=event.sequence_hashes,
        hints=event.routing,
        lora_name=event.lora_name,
        task="generate",
    )


def content_hash(event: RequestSubmitted) -> int:
    """64 bits over what makes a request the same request: not its reply slot, timeout, times or routing hints."""
    text = f"{event.model}\0{event.lora_name}\0{event.cache_namespace}\0{event.task}\0{event.nonce}\0".encode()
    # As on the wire, where what stands at its default is left out: fields that come later change nothing.
    media = "".join([f"\0{one.kind}\0{one.digest}\0{one.first_token}\0{one.tokens}" for one in event.media]).encode()
    return xxh3_64_intdigest(event.token_ids, xxh3_64_intdigest(text + encode(event.sampling) + media))


def _deadline(request: Request) -> tuple[int, str, int]:
    return request.due_us, request.request_id, request.offset


def id_hash(request_id: str) -> int:
    """What an id is remembered by after its request ended."""
    return xxh3_64_intdigest(request_id.encode())


def _term(request: Request) -> int:
    text = (
        f"{request.phase}\0{request.attempt}\0{request.worker_id}\0{request.worker_epoch}\0{request.rank}"
        f"\0{request.queue_class}\0{request.uncached_tokens}\0{request.queued_at_us}"
    )
    encoding = request.stage, request.encodings, request.encoder_id
    if encoding != NOT_ENCODED:
        text += f"\0{encoding}"
    lies = b"" if request.encoded is None else encode(request.encoded)
    return xxh3_64_intdigest(text.encode() + lies, request.asked)
