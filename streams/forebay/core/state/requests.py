"""The life of a request, from its submission to the time at which its id is forgotten.

Theory of operation. A request under way moves by the table of `forebay.core.phases` and by nothing else. What workers
say counts only for the attempt and the worker epoch that the request is on; everything else is outdated and raises
without effect. When a request ends only hashes of its id and content are kept, while it may be sent again.
"""

from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, assert_never

from msgspec.msgpack import encode
from xxhash import xxh3_64_intdigest

from forebay.core.phases import BEFORE_ANSWER, ON_WORKER, TRANSITIONS, Move, Phase
from forebay.core.state.deadlines import Deadline, Deadlines
from forebay.core.state.recent_ids import RememberedIds
from forebay.core.state.unfetched_kv import Unwanted
from forebay.core.state_machine import IllegalTransition
from forebay.events.base import U64_MASK, array_u64
from forebay.events.decisions import KvReleaseReason, Stage
from forebay.events.media import Encoded
from forebay.events.progress import (
    EncodeFailed,
    EncodeFinished,
    FirstTokenEmitted,
    OutputGrown,
    PrefillFailed,
    PrefillFinished,
    RequestFailed,
    RequestFinished,
    RequestProgress,
    TransferFailed,
)
from forebay.events.requests import NO_HINTS, RequestSubmitted, RouteQueried, RoutingHints, Task
from forebay.events.snapshots import Remembered, RequestState
from forebay.events.transfer import Prefilled

UNDER_WAY_MAX = 100_000  # requests of one group at once: bounds memory, far above what its workers can run
REMEMBER_US = 120_000_000  # a Kafka producer gives up retrying after 120 s by default
SENT_TO: dict[Stage, Move] = {
    "aggregated": Move.ROUTED,
    "encode": Move.TO_BE_ENCODED,
    "prefill": Move.TO_BE_PREFILLED,
    "decode": Move.TO_BE_DECODED,
}
TOLD_AS_IS = [name for name in RequestState.__struct_fields__ if name not in ("sequence_hashes", "routing")]
# A digest says nothing of these, as before there were media and prefill workers.
NOT_ENCODED: tuple[Stage, int, str] = ("aggregated", 0, "")
NOT_PREFILLED = (0, "", 0, False, "")


@dataclass(slots=True)
class Request:
    """A request under way.

    `offset` is that of its `RequestSubmitted`; `due_us` its deadline; `packed` are its blocks as they came, kept
    for snapshots; `asked` is a hash of what does not change, `term` what the request adds to the digest now.

    `media_tokens` are the placeholders of its images and videos. `encodings` is the last attempt to encode them, sent
    to `encoder_id`; they lie where `encoded` says. `stage` is that of its last routing. `prefills` is the last attempt
    to compute its prompt elsewhere, sent to `prefiller_id`; its KV lies where `prefilled` says, until
    `prefilled_due_us`; `decoder_id` was to fetch it last. `begun` is whether tokens of the answer were said, of a
    decode pool's requests. `ingress` is the incarnation of the ingress whose HTTP client waits; empty if none does.
    `queue_due_us` is until when it may wait in the queue, 0 for its deadline. `sent` has attempt, worker and epoch of
    each routing since the request was submitted or restored: no state, it only tells late progress from progress of a
    worker that never had the request.
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
    prefills: int = 0
    prefiller_id: str = ""
    prefilled: Prefilled | None = None
    prefilled_due_us: int = 0
    begun: bool = False
    decoder_id: str = ""
    ingress: str = ""
    queue_due_us: int = 0
    patient: bool = False  # no part of its state: it matters only when the request is submitted
    sent: list[tuple[int, str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        hints = b"" if self.hints == NO_HINTS else encode(self.hints)
        text = (
            f"{self.request_id}\0{self.offset}\0{self.due_us}\0{self.pool}\0{self.reply_slot}\0{self.prompt_tokens}"
            f"\0{self.tie_seed}\0{xxh3_64_intdigest(self.packed)}\0{self.lora_name}\0{self.task}\0"
        )
        # What has no media is told as it was before there were any.
        media = b"\0%d" % self.media_tokens if self.media_tokens else b""
        ingress = f"\0ingress\0{self.ingress}".encode() if self.ingress else b""
        self.asked = xxh3_64_intdigest(text.encode() + hints + media + ingress, self.content)

    @property
    def on_worker(self) -> bool:
        """Whether a worker has it now."""
        return self.phase in ON_WORKER

    @property
    def stage_attempt(self) -> int:
        """The last attempt at the stage that it is in, or was in last."""
        return self.attempts(self.stage)

    def attempts(self, stage: Stage) -> int:
        """How often it was sent to a worker for this stage; `aggregated` and `decode` are one, the answer."""
        if stage == "encode":
            return self.encodings
        return self.prefills if stage == "prefill" else self.attempt

    @property
    def next_encoding(self) -> int:
        """Which encoding the next is. No lower than what was answered: an encoder's refusal would be void there."""
        return max(self.encodings + 1, self.attempt)


class Requests:
    """Requests under way by id, deadlines, and hashes of the ids that ended lately.

    `unwanted` is KV that a request left behind without its being fetched. It is no state: whoever moves a request
    takes it out before the next event.
    """

    def __init__(self) -> None:
        self.unwanted: list[Unwanted] = []
        self._under_way: dict[str, Request] = {}
        self._deadlines = Deadlines(self._is_under_way)
        self._queue_deadlines = Deadlines(self._is_queued)
        self._promised: Counter[str] = Counter()
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
        self._deadlines.add((request.due_us, request.request_id, request.offset), len(self._under_way))
        self._await_turn(request)
        self._promised[request.pool] += request.phase in BEFORE_ANSWER
        self._sum_up(request)

    def route(self, request: Request, stage: Stage, worker_id: str, worker_epoch: int, rank: int) -> None:
        """Its next attempt at a stage is with this worker rank."""
        self._move(request, SENT_TO[stage])
        match stage:
            case "aggregated":
                request.attempt += 1
            case "decode":
                request.attempt += 1
                request.decoder_id = worker_id
            case "encode":
                request.encodings = request.next_encoding
                request.encoder_id = worker_id
            case "prefill":
                request.prefills += 1
                request.prefiller_id = worker_id
            case _:
                assert_never(stage)
        request.stage = stage
        request.worker_id, request.worker_epoch, request.rank = worker_id, worker_epoch, rank
        request.sent.append((request.stage_attempt, worker_id, worker_epoch))
        self._sum_up(request)

    def hold(self, request: Request, queue_class: str, uncached_tokens: int, now_us: int, timeout_us: int = 0) -> None:
        """It waits in the router's queue from now on, for at most `timeout_us` if that is not 0."""
        self._move(request, Move.HELD)
        request.queue_class, request.uncached_tokens, request.queued_at_us = queue_class, uncached_tokens, now_us
        request.queue_due_us = now_us + timeout_us if timeout_us else 0
        self._await_turn(request)
        self._sum_up(request)

    def promised(self, pool: str) -> int:
        """How many requests of a pool were accepted, and are not yet with the worker that is to answer them."""
        return self._promised[pool]

    def pinned_to(self, worker_id: str) -> list[Request]:
        """The requests that nobody but this worker may answer, in the order of their submission."""
        return self._in_order(one for one in self._under_way.values() if one.hints.worker_id == worker_id)

    def kept_by(self, worker_id: str, worker_epoch: int) -> list[Request]:
        """The requests that wait while a worker keeps their KV, in the order of their submission."""
        holder = worker_id, worker_epoch
        return [
            request
            for request in self.waiting()
            if request.prefilled is not None and (request.prefilled.worker_id, request.prefilled.worker_epoch) == holder
        ]

    def lose_worker(self, request: Request) -> None:
        """Its worker is gone: it waits for another. Embeddings and KV are given out once, so they are gone with it."""
        self._move(request, Move.WORKER_LOST)
        request.encoded = None
        self._leave_prefilled(request, "worker_lost")
        if request.stage == "decode":
            request.prefiller_id = ""  # who computed its prompt did nothing wrong, and has it in its cache
        self._sum_up(request)

    def forget_prefilled(self, request: Request) -> None:
        """Nobody keeps its KV any more."""
        request.prefilled = None
        self._sum_up(request)

    def expire_prefilled(self, request: Request) -> None:
        """The lease of its KV is over, and nobody was sent to fetch it."""
        self._leave_prefilled(request, "lease_over")
        self._sum_up(request)

    def refuse_prefilled(self, request: Request) -> None:
        """What was just told of its KV names no place where it could be fetched; who told it keeps it."""
        request.prefilled = None
        self._sum_up(request)
        teller = request.worker_id, request.worker_epoch
        self.unwanted.append(Unwanted(request.request_id, request.prefills, *teller, "foreign_descriptor"))

    def begin(self, request: Request) -> None:
        """Tokens of its answer are out, so whoever has it next only goes on."""
        request.begun = True
        self._sum_up(request)

    def end(self, request: Request, now_us: int) -> None:
        """Nothing more happens to it; its id is remembered for a while."""
        self._move(request, Move.ENDED)
        self._leave_prefilled(request, "request_ended")
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
                if event.unfetched:
                    self._leave_prefilled(request, "not_needed")
                request.prefilled = None  # it was fetched, and is kept by nobody any more
                self._sum_up(request)
            case RequestFinished() if request.stage in ("encode", "prefill"):
                raise IllegalTransition(f"{event.request_id} is not answered by {event.worker_id}")
            case RequestFailed() if request.stage == "prefill":
                raise IllegalTransition(f"{event.request_id} is not answered by {event.worker_id}")
            case RequestFinished() | RequestFailed():
                self.end(request, now_us)
            case EncodeFinished() | EncodeFailed() | PrefillFinished() | PrefillFailed() | TransferFailed():
                self._part_progress(event, request, now_us)
            case _:
                assert_never(event)
        return request

    def _part_progress(
        self,
        event: EncodeFinished | EncodeFailed | PrefillFinished | PrefillFailed | TransferFailed,
        request: Request,
        now_us: int,
    ) -> None:
        match event:
            case EncodeFinished():
                self._move(request, Move.ENCODED)
                request.encoded = event.encoded
            case EncodeFailed():
                self._move(request, Move.NOT_ENCODED)
            case PrefillFinished():
                self._move(request, Move.PREFILLED)
                # What was encoded for the prompt is used up.
                request.encoded, request.prefilled = None, event.prefilled
                request.prefilled_due_us = now_us + event.prefilled.lease_us
            case PrefillFailed():
                self._move(request, Move.NOT_PREFILLED)
                request.encoded = None
            case TransferFailed() if request.encoded is None and request.prefilled is None:
                raise IllegalTransition(f"{event.request_id} has nothing to be transferred")
            case TransferFailed():
                self._move(request, Move.NOT_TRANSFERRED)
                request.encoded = None
                self._leave_prefilled(request, "not_fetched")
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
        """When something happens by time alone: a deadline, the end of a wait, or an id to forget."""
        return self._queue_deadlines.sooner(self._deadlines.sooner(self._remembered.next_due_us()))

    def expired(self, now_us: int) -> list[Request]:
        """Forget ids whose time has come; the requests under way whose deadline has passed, to be ended."""
        self._remembered.forget(now_us)
        return [self._under_way[request_id] for request_id in self._deadlines.take(now_us)]

    def expired_in_queue(self, now_us: int) -> list[Request]:
        """The requests that have waited in the queue as long as they may, to be ended."""
        return [self._under_way[request_id] for request_id in self._queue_deadlines.take(now_us)]

    def digest(self) -> int:
        """64 bits over the requests under way and the ids remembered."""
        return (self._sum + self._remembered.digest()) & U64_MASK

    def snapshot(self) -> Iterator[RequestState | Remembered]:
        """One fact for each request under way, then what is remembered, oldest first."""
        for request in self.under_way():
            told: dict[str, Any] = {name: getattr(request, name) for name in TOLD_AS_IS}
            yield RequestState(sequence_hashes=request.packed, routing=request.hints, **told)
        yield from self._remembered.snapshot()

    def restore(self, chunk: RequestState | Remembered) -> None:
        """Take in one chunk of a snapshot, in the order of `snapshot`."""
        match chunk:
            case RequestState():
                told: dict[str, Any] = {name: getattr(chunk, name) for name in TOLD_AS_IS}
                told["phase"] = Phase(chunk.phase)
                packed = chunk.sequence_hashes
                self.add(Request(blocks=array_u64(packed), packed=packed, hints=chunk.routing, **told))
            case Remembered():
                self._remembered.restore(chunk)
            case _:
                assert_never(chunk)

    def _move(self, request: Request, move: Move) -> None:
        table = TRANSITIONS[request.phase]
        if move not in table:
            raise IllegalTransition(f"{request.request_id} is in {request.phase}: {move} does not apply")
        after = table[move]
        self._promised[request.pool] += (after in BEFORE_ANSWER) - (request.phase in BEFORE_ANSWER)
        request.phase = after or request.phase

    def _leave_prefilled(self, request: Request, reason: KvReleaseReason) -> None:
        """Nobody will fetch its KV, if any is kept."""
        kept, request.prefilled = request.prefilled, None
        if kept is not None:
            keeper = kept.worker_id, kept.worker_epoch
            self.unwanted.append(Unwanted(request.request_id, request.prefills, *keeper, reason))

    def _sum_up(self, request: Request) -> None:
        """The request is another than before."""
        term = _term(request)
        self._sum += term - request.term
        request.term = term

    def _await_turn(self, request: Request) -> None:
        if request.queue_due_us and request.phase is Phase.QUEUED:
            self._queue_deadlines.add((request.queue_due_us, request.request_id, request.offset), len(self._under_way))

    def _is_under_way(self, deadline: Deadline) -> bool:
        # By offset: a forgotten id may be used again while the deadline of its first use still lies here.
        request = self._under_way.get(deadline[1])
        return request is not None and request.offset == deadline[2]

    def _is_queued(self, deadline: Deadline) -> bool:
        return self._is_under_way(deadline) and self._under_way[deadline[1]].phase is Phase.QUEUED

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
        ingress=event.ingress_incarnation,
        patient=event.patient,
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
    prefill = request.prefills, request.prefiller_id, request.prefilled_due_us, request.begun, request.decoder_id
    if prefill != NOT_PREFILLED:
        text += f"\0{prefill}"
    if request.queue_due_us:
        text += f"\0until {request.queue_due_us}"
    lies = b"" if request.encoded is None else encode(request.encoded)
    if request.prefilled is not None:
        lies += encode(request.prefilled)
    return xxh3_64_intdigest(text.encode() + lies, request.asked)
