"""Life cycle of a request, from its submission until its id is forgotten.

Active requests follow the transition table of `forebay.core.phases`. A worker's progress event counts only for the
attempt and the worker epoch that the request is on. Any other progress event is stale: it raises and has no effect.
When a request ends, only hashes of its id and content are kept, for as long as a producer may resend it.
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

UNDER_WAY_MAX = 100_000  # active requests per group: bounds memory, far above what workers can run
REMEMBER_US = 120_000_000  # a Kafka producer stops retrying after 120 s by default
SENT_TO: dict[Stage, Move] = {
    "aggregated": Move.ROUTED,
    "encode": Move.TO_BE_ENCODED,
    "prefill": Move.TO_BE_PREFILLED,
    "decode": Move.TO_BE_DECODED,
}
TOLD_AS_IS = [name for name in RequestState.__struct_fields__ if name not in ("sequence_hashes", "routing")]
# A digest omits these fields at their defaults, so logs from before media and prefill workers keep their digests.
NOT_ENCODED: tuple[Stage, int, str] = ("aggregated", 0, "")
NOT_PREFILLED = (0, "", 0, False, "")


@dataclass(slots=True)
class Request:
    """Active request.

    Attributes:
        request_id: id of the request.
        content: hash of the content, see `content_hash`.
        offset: offset of its `RequestSubmitted`.
        due_us: deadline on the owner's clock, in microseconds.
        reply_slot: partition of the topic `tokens` that gets the response.
        prompt_tokens: length of the prompt.
        tie_seed: seed for tie-breaking and sampling.
        pool: pool that generates the response.
        blocks: sequence hashes of the full prompt blocks.
        packed: `blocks` as packed u64, kept for snapshots.
        hints: routing hints of the client.
        lora_name: adapter; empty for none.
        task: what is generated: text or an embedding.
        media_tokens: placeholder tokens of its images and videos.
        asked: hash of the fields that never change.
        term: current contribution to the digest.
        phase: phase in the transition table.
        attempt: last attempt at the response, counted from 1; 0 before the first.
        worker_id: worker of the last routing.
        worker_epoch: epoch of that worker.
        rank: rank of that worker.
        queue_class: class in which it is or was queued; empty if it never was.
        uncached_tokens: prompt tokens that the best rank did not have cached when it was queued.
        queued_at_us: when it was queued.
        stage: stage of the last routing.
        encodings: last attempt to encode its media.
        encoder_id: worker of that attempt.
        encoded: location of the embeddings, if they are available.
        prefills: last attempt to compute its prompt in a prefill pool.
        prefiller_id: worker of that attempt.
        prefilled: location of the KV, if a prefill worker keeps it.
        prefilled_due_us: when that KV's lease expires.
        begun: whether output tokens exist; tracked for decode pools only.
        decoder_id: worker that was last sent to fetch the KV.
        ingress: incarnation of the ingress whose HTTP client waits; empty if there is none.
        queue_due_us: when it times out in the queue; 0 if only its deadline applies.
        patient: whether the queue's bounds do not apply; used on submission only and not part of the state.
        sent: attempt, worker and epoch of each routing since submission or restore. Not part of the state: it only
            separates late progress from progress of a worker that never had the request.
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
    patient: bool = False
    sent: list[tuple[int, str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        hints = b"" if self.hints == NO_HINTS else encode(self.hints)
        text = (
            f"{self.request_id}\0{self.offset}\0{self.due_us}\0{self.pool}\0{self.reply_slot}\0{self.prompt_tokens}"
            f"\0{self.tie_seed}\0{xxh3_64_intdigest(self.packed)}\0{self.lora_name}\0{self.task}\0"
        )
        # Requests without media keep the digest that they had before media existed.
        media = b"\0%d" % self.media_tokens if self.media_tokens else b""
        ingress = f"\0ingress\0{self.ingress}".encode() if self.ingress else b""
        self.asked = xxh3_64_intdigest(text.encode() + hints + media + ingress, self.content)

    @property
    def on_worker(self) -> bool:
        """Whether a worker has the request now."""
        return self.phase in ON_WORKER

    @property
    def stage_attempt(self) -> int:
        """Last attempt at the current or most recent stage."""
        return self.attempts(self.stage)

    def attempts(self, stage: Stage) -> int:
        """Return how often it was sent to a worker for this stage; `aggregated` and `decode` share one count."""
        if stage == "encode":
            return self.encodings
        return self.prefills if stage == "prefill" else self.attempt

    @property
    def next_encoding(self) -> int:
        """Number of the next encoding.

        At least the last attempt at a response, or the encoder's error would be stale.
        """
        return max(self.encodings + 1, self.attempt)


class Requests:
    """Active requests by id, their deadlines, and hashes of recently ended ids.

    Attributes:
        unwanted: KV that requests left unfetched at prefill workers. Not part of the state: the caller of a method that
            adds to it drains it before the next event.
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
        """Return the number of active requests."""
        return len(self._under_way)

    def get(self, request_id: str) -> Request | None:
        """Return the request with this id if it is active."""
        return self._under_way.get(request_id)

    def content_known(self, request_id: str) -> int | None:
        """Return the content hash this id was used with before, or None for a new id."""
        request = self._under_way.get(request_id)
        if request is not None:
            return request.content
        return self._remembered.get(id_hash(request_id))

    def add(self, request: Request) -> None:
        """Add a new request; its id must be new."""
        assert self.content_known(request.request_id) is None
        self._under_way[request.request_id] = request
        self._deadlines.add((request.due_us, request.request_id, request.offset), len(self._under_way))
        self._await_turn(request)
        self._promised[request.pool] += request.phase in BEFORE_ANSWER
        self._sum_up(request)

    def route(self, request: Request, stage: Stage, worker_id: str, worker_epoch: int, rank: int) -> None:
        """Start the next attempt at a stage, on this worker rank."""
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
        """Move a request to the router's queue, for at most `timeout_us` if that is not 0."""
        self._move(request, Move.HELD)
        request.queue_class, request.uncached_tokens, request.queued_at_us = queue_class, uncached_tokens, now_us
        request.queue_due_us = now_us + timeout_us if timeout_us else 0
        self._await_turn(request)
        self._sum_up(request)

    def promised(self, pool: str) -> int:
        """Return how many accepted requests of a pool are not yet at the worker that generates their response."""
        return self._promised[pool]

    def pinned_to(self, worker_id: str) -> list[Request]:
        """Return the requests that only this worker may take, in order of submission."""
        return self._in_order(one for one in self._under_way.values() if one.hints.worker_id == worker_id)

    def kept_by(self, worker_id: str, worker_epoch: int) -> list[Request]:
        """Return the requests without a worker whose KV this worker keeps, in order of submission."""
        holder = worker_id, worker_epoch
        return [
            request
            for request in self.waiting()
            if request.prefilled is not None and (request.prefilled.worker_id, request.prefilled.worker_epoch) == holder
        ]

    def lose_worker(self, request: Request) -> None:
        """Move a request of a lost worker to `waiting`.

        Embeddings and KV can be fetched only once, so they are lost, too.
        """
        self._move(request, Move.WORKER_LOST)
        request.encoded = None
        self._leave_prefilled(request, "worker_lost")
        if request.stage == "decode":
            request.prefiller_id = ""  # its prefill worker is not at fault and has the prompt cached
        self._sum_up(request)

    def forget_prefilled(self, request: Request) -> None:
        """Record that no worker keeps the KV of a request any more."""
        request.prefilled = None
        self._sum_up(request)

    def expire_prefilled(self, request: Request) -> None:
        """Drop the KV of a request whose lease expired before a worker was sent to fetch it."""
        self._leave_prefilled(request, "lease_over")
        self._sum_up(request)

    def refuse_prefilled(self, request: Request) -> None:
        """Drop the KV of a request because its descriptor is not usable.

        The worker that reported it still keeps the KV.
        """
        request.prefilled = None
        self._sum_up(request)
        teller = request.worker_id, request.worker_epoch
        self.unwanted.append(Unwanted(request.request_id, request.prefills, *teller, "foreign_descriptor"))

    def begin(self, request: Request) -> None:
        """Record that output tokens exist, so the next worker only continues the response."""
        request.begun = True
        self._sum_up(request)

    def end(self, request: Request, now_us: int) -> None:
        """End a request; its id is remembered for a while."""
        self._move(request, Move.ENDED)
        self._leave_prefilled(request, "request_ended")
        del self._under_way[request.request_id]
        self._sum -= request.term
        self._remembered.add(id_hash(request.request_id), request.content, now_us + REMEMBER_US)

    def progress(self, event: RequestProgress, now_us: int) -> Request:
        """Apply a worker's progress event, and return the request.

        Raises:
            IllegalTransition: the request is not active, is on another attempt or worker, or is past this event.
        """
        request = self._under_way.get(event.request_id)
        if request is None:
            raise IllegalTransition(f"request {event.request_id} is not active")
        attempt = request.stage_attempt
        if (event.attempt, event.worker_id, event.worker_epoch) != (attempt, request.worker_id, request.worker_epoch):
            raise IllegalTransition(f"request {event.request_id} is on attempt {attempt} at {request.worker_id}")
        match event:
            case OutputGrown():
                if request.phase is not Phase.DECODE:
                    raise IllegalTransition(f"request {event.request_id} has no first token yet")
            case FirstTokenEmitted():
                self._move(request, Move.FIRST_TOKEN)
                if event.unfetched:
                    self._leave_prefilled(request, "not_needed")
                request.prefilled = None  # the KV was fetched, so no worker keeps it any more
                self._sum_up(request)
            case RequestFinished() if request.stage in ("encode", "prefill"):
                raise IllegalTransition(f"{event.worker_id} does not generate the response to {event.request_id}")
            case RequestFailed() if request.stage == "prefill":
                raise IllegalTransition(f"{event.worker_id} does not generate the response to {event.request_id}")
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
                # The embeddings were consumed by this prefill.
                request.encoded, request.prefilled = None, event.prefilled
                request.prefilled_due_us = now_us + event.prefilled.lease_us
            case PrefillFailed():
                self._move(request, Move.NOT_PREFILLED)
                request.encoded = None
            case TransferFailed() if request.encoded is None and request.prefilled is None:
                raise IllegalTransition(f"request {event.request_id} has no embeddings and no KV to fetch")
            case TransferFailed():
                self._move(request, Move.NOT_TRANSFERRED)
                request.encoded = None
                self._leave_prefilled(request, "not_fetched")
            case _:
                assert_never(event)
        self._sum_up(request)

    def of_worker(self, worker_id: str, worker_epoch: int) -> list[Request]:
        """Return the requests that a worker has, in order of submission."""
        return self._in_order(
            request
            for request in self._under_way.values()
            if request.worker_id == worker_id and request.worker_epoch == worker_epoch and request.on_worker
        )

    def queued(self) -> list[Request]:
        """Return the requests in the router's queue, in order of submission."""
        return self._in_order(request for request in self._under_way.values() if request.phase is Phase.QUEUED)

    def waiting(self) -> list[Request]:
        """Return the requests that lost their worker, in order of submission."""
        return self._in_order(request for request in self._under_way.values() if request.phase is Phase.WAITING)

    def under_way(self) -> list[Request]:
        """Return all active requests, in order of submission."""
        return self._in_order(iter(self._under_way.values()))

    def next_due_us(self) -> int | None:
        """Return when the state next changes by time alone: a deadline, a queue timeout, or the expiry of an id."""
        return self._queue_deadlines.sooner(self._deadlines.sooner(self._remembered.next_due_us()))

    def expired(self, now_us: int) -> list[Request]:
        """Forget expired ids; return the active requests whose deadline has passed, for the caller to end."""
        self._remembered.forget(now_us)
        return [self._under_way[request_id] for request_id in self._deadlines.take(now_us)]

    def expired_in_queue(self, now_us: int) -> list[Request]:
        """Return the requests whose queue timeout has passed, for the caller to end."""
        return [self._under_way[request_id] for request_id in self._queue_deadlines.take(now_us)]

    def digest(self) -> int:
        """Return a 64-bit digest over active requests and remembered ids."""
        return (self._sum + self._remembered.digest()) & U64_MASK

    def snapshot(self) -> Iterator[RequestState | Remembered]:
        """Yield one fact per active request, then the remembered ids, oldest first."""
        for request in self.under_way():
            told: dict[str, Any] = {name: getattr(request, name) for name in TOLD_AS_IS}
            yield RequestState(sequence_hashes=request.packed, routing=request.hints, **told)
        yield from self._remembered.snapshot()

    def restore(self, chunk: RequestState | Remembered) -> None:
        """Apply one chunk of a snapshot, in the order of `snapshot`."""
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
            raise IllegalTransition(f"request {request.request_id} is in {request.phase}: {move} does not apply")
        after = table[move]
        self._promised[request.pool] += (after in BEFORE_ANSWER) - (request.phase in BEFORE_ANSWER)
        request.phase = after or request.phase

    def _leave_prefilled(self, request: Request, reason: KvReleaseReason) -> None:
        """Record that the KV of a request, if kept, will not be fetched."""
        kept, request.prefilled = request.prefilled, None
        if kept is not None:
            keeper = kept.worker_id, kept.worker_epoch
            self.unwanted.append(Unwanted(request.request_id, request.prefills, *keeper, reason))

    def _sum_up(self, request: Request) -> None:
        """Update the digest for a request that changed."""
        term = _term(request)
        self._sum += term - request.term
        request.term = term

    def _await_turn(self, request: Request) -> None:
        if request.queue_due_us and request.phase is Phase.QUEUED:
            self._queue_deadlines.add((request.queue_due_us, request.request_id, request.offset), len(self._under_way))

    def _is_under_way(self, deadline: Deadline) -> bool:
        # Compare offsets: an id may be reused after it was forgotten, while an old deadline is still in the heap.
        request = self._under_way.get(deadline[1])
        return request is not None and request.offset == deadline[2]

    def _is_queued(self, deadline: Deadline) -> bool:
        return self._is_under_way(deadline) and self._under_way[deadline[1]].phase is Phase.QUEUED

    @staticmethod
    def _in_order(requests: Iterator[Request]) -> list[Request]:
        return sorted(requests, key=lambda request: request.offset)


def submitted(event: RequestSubmitted, pool: str, offset: int, now_us: int) -> Request:
    """Return the new request of an event at `offset`; its deadline counts from `now_us`."""
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
    """Return a request for a route query; it is never added to the active requests."""
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
    """Return a 64-bit hash of what identifies the content: not the reply slot, timeout, times or routing hints."""
    text = f"{event.model}\0{event.lora_name}\0{event.cache_namespace}\0{event.task}\0{event.nonce}\0".encode()
    # As on the wire, defaults are left out, so fields that are added later do not change the hash.
    media = "".join([f"\0{one.kind}\0{one.digest}\0{one.first_token}\0{one.tokens}" for one in event.media]).encode()
    return xxh3_64_intdigest(event.token_ids, xxh3_64_intdigest(text + encode(event.sampling) + media))


def id_hash(request_id: str) -> int:
    """Return the hash under which an ended request's id is remembered."""
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
