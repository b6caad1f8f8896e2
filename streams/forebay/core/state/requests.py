"""Life cycle of a request, from its submission until its id is forgotten.

Active requests follow the table of `forebay.core.state.transitions`. A progress event is valid only if it is from the
current attempt and worker epoch of its request. Any other progress event is stale: `progress` raises and changes
nothing. When a request ends, only hashes of its id and content are kept, for as long as a producer may send it again.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Any, assert_never

from msgspec.structs import replace

from forebay.core.phases import BEFORE_RESPONSE, Phase
from forebay.core.state.active_request import ActiveRequest, request_term
from forebay.core.state.recent_ids import RecentIds
from forebay.core.state.submitted_request import SubmittedRequest, id_hash, in_pool
from forebay.core.state.transitions import DISPATCHED, REPORTED, TRANSITIONS, RequestTransition
from forebay.core.state_machine import IllegalTransition
from forebay.events.base import U64_MASK, array_u64
from forebay.events.decisions import KvReleaseReason, Stage
from forebay.events.progress import (
    AttemptRejected,
    EncodeFinished,
    FirstTokenEmitted,
    PrefillFinished,
    RequestFailed,
    RequestFinished,
    RequestProgress,
)
from forebay.events.snapshots import FinishedKeys, Remembered, RequestState

Deadline = tuple[int, str, int]  # time in microseconds, request id, offset of the submission
SPARE = 64  # stale entries that may remain, however few requests there are
ACTIVE_REQUESTS_MAX = 100_000  # active requests per group: bounds memory, far above what workers can run
REMEMBER_US = 120_000_000  # a Kafka producer stops retrying after 120 s by default
KEEP_KEY_US = 86_400_000_000  # a client may repeat a finished request for a day, as with other APIs
# 24 h at three keys per second. A snapshot copies all keys, 6 MB, at one moment; they take 35 MB of memory.
FINISHED_KEYS_MAX = 1 << 18
KEY_SEED = 1  # separates keys from ids in the digest
SUBMITTED_FIELDS = [name for name in RequestState.__struct_fields__ if name in SubmittedRequest.__struct_fields__]
STAGE_FIELDS = [name for name in RequestState.__struct_fields__ if name in ActiveRequest.__slots__]


class ActiveRequests:
    """Active requests by id, their deadlines, hashes of recently ended ids, and the idempotency keys of clients.

    Methods that change the phase of a request raise IllegalTransition if the transition table does not allow the
    change.

    Attributes:
        unfetched: KV that prefill workers must free because no worker will fetch it. Not part of the state: after a
            method has added to it, the caller must empty it before the next event.
    """

    def __init__(self) -> None:
        self.unfetched: list[UnfetchedKv] = []
        self._active: dict[str, ActiveRequest] = {}
        self._deadlines = Deadlines(self._is_active)
        self._queue_deadlines = Deadlines(self._is_queued)
        self._before_response: Counter[str] = Counter()
        self._remembered = RecentIds()
        self._active_keys: dict[int, int] = {}  # offsets of active requests, by idempotency key
        self._finished_keys = RecentIds(KEY_SEED)
        self._sum = 0

    def __len__(self) -> int:
        return len(self._active)

    def get(self, request_id: str) -> ActiveRequest | None:
        return self._active.get(request_id)

    def known_content(self, request_id: str) -> int | None:
        """Return the content hash of the active or recently ended request with this id, or None if the id is new."""
        request = self._active.get(request_id)
        if request is not None:
            return request.submitted.content
        return self._remembered.get(id_hash(request_id))

    def known_offset(self, idempotency_key: int) -> int | None:
        """Return the offset of the active or finished request with an idempotency key, or None if the key is new."""
        offset = self._active_keys.get(idempotency_key)
        return self._finished_keys.get(idempotency_key) if offset is None else offset

    def add(self, request: ActiveRequest) -> None:
        """Add a request. Its id and its key must not belong to an active or recently ended request."""
        assert self.known_content(request.submitted.request_id) is None
        if key := request.submitted.idempotency_key:
            assert self.known_offset(key) is None
            self._active_keys[key] = request.submitted.offset
        self._active[request.submitted.request_id] = request
        self._deadlines.add(
            (request.submitted.due_us, request.submitted.request_id, request.submitted.offset), len(self._active)
        )
        self._schedule_queue_timeout(request)
        self._before_response[request.submitted.pool] += request.phase in BEFORE_RESPONSE
        self._sum_up(request)

    def route(
        self,
        request: ActiveRequest,
        stage: Stage,
        worker_id: str,
        worker_epoch: int,
        rank: int,
        prefill_pool: str = "",
    ) -> None:
        """Start the next attempt at `stage` of a request, on this worker rank.

        `prefill_pool` is the pool that was chosen for a remote prefill; empty if there was no choice.
        """
        self._move(request, DISPATCHED[stage])
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
                request.prefill_pool = prefill_pool
            case _:
                assert_never(stage)
        request.stage = stage
        request.worker_id, request.worker_epoch, request.rank = worker_id, worker_epoch, rank
        request.sent.append((request.stage_attempt, worker_id, worker_epoch))
        self._sum_up(request)

    def enqueue(
        self, request: ActiveRequest, queue_class: str, uncached_tokens: int, now_us: int, timeout_us: int = 0
    ) -> None:
        """Move a request to the router's queue, where it times out after `timeout_us`; 0 for no timeout."""
        self._move(request, RequestTransition.HELD)
        request.queue_class, request.uncached_tokens, request.queued_at_us = queue_class, uncached_tokens, now_us
        request.queue_due_us = now_us + timeout_us if timeout_us else 0
        self._schedule_queue_timeout(request)
        self._sum_up(request)

    def move(self, request: ActiveRequest, pool: str) -> None:
        """Let another pool generate the response of an accepted request that has no worker."""
        assert not request.on_worker
        counts = request.phase in BEFORE_RESPONSE
        self._before_response[request.submitted.pool] -= counts
        self._before_response[pool] += counts
        request.submitted = in_pool(request.submitted, pool)
        request.identity_hash = request.submitted.identity_hash()
        self._sum_up(request)

    def resume(self, request: ActiveRequest, ingress: str) -> None:
        """Record that a client waits for a response at an incarnation of an ingress, too."""
        if ingress not in request.submitted.ingresses:
            self._wait_at(request, *request.submitted.ingresses, ingress)

    def abandon(self, request: ActiveRequest, ingress: str) -> bool:
        """Record that no client waits at an incarnation of an ingress, and return whether none waits anywhere else.

        The caller then ends the request.
        """
        others = [one for one in request.submitted.ingresses if one != ingress]
        if others:
            self._wait_at(request, *others)
        return not others

    def _wait_at(self, request: ActiveRequest, ingress: str, *further: str) -> None:
        request.submitted = replace(request.submitted, ingress=ingress, further_ingresses=further)
        request.identity_hash = request.submitted.identity_hash()
        self._sum_up(request)

    def count_before_response(self, pool: str) -> int:
        """Return how many requests of a pool are being encoded or prefilled, or wait for their next worker."""
        return self._before_response[pool]

    def pinned_to(self, worker_id: str) -> list[ActiveRequest]:
        """Return the requests whose routing hint allows only this worker, in order of submission."""
        return self._in_order(one for one in self._active.values() if one.submitted.hints.worker_id == worker_id)

    def waiting_with_kv_of(self, worker_id: str, worker_epoch: int) -> list[ActiveRequest]:
        """Return the requests that wait for a decode worker and whose KV this worker keeps, in order of submission."""
        holder = worker_id, worker_epoch
        return [
            request
            for request in self.waiting()
            if request.prefilled is not None and (request.prefilled.worker_id, request.prefilled.worker_epoch) == holder
        ]

    def lose_worker(self, request: ActiveRequest) -> None:
        """Move a request to the phase `waiting`, because its worker was lost."""
        self._move(request, RequestTransition.WORKER_LOST)
        if request.stage == "decode":
            request.prefiller_id = ""  # its prefill worker is not at fault and has the prompt cached
        self._sum_up(request)

    def forget_prefilled(self, request: ActiveRequest) -> None:
        """Record that no prefill worker keeps the KV of a request any more."""
        request.prefilled = None
        self._sum_up(request)

    def expire_prefilled(self, request: ActiveRequest) -> None:
        """Drop the KV of a request, because its lease expired before a worker was sent to fetch it."""
        self._move(request, RequestTransition.KV_EXPIRED)
        self._sum_up(request)

    def drop_unusable_prefilled(self, request: ActiveRequest) -> None:
        """Drop the KV of a request, because its descriptor is not usable.

        The KV is added to `unfetched`, because the worker that reported the descriptor still keeps it.
        """
        request.prefilled = None
        self._sum_up(request)
        reporter = request.worker_id, request.worker_epoch
        self.unfetched.append(
            UnfetchedKv(request.submitted.request_id, request.prefills, *reporter, "foreign_descriptor")
        )

    def begin(self, request: ActiveRequest) -> None:
        """Record that output tokens exist. The next worker then continues the response after these tokens."""
        request.begun = True
        self._sum_up(request)

    def end(self, request: ActiveRequest, now_us: int, *, is_complete: bool = False) -> None:
        """End a request, and remember its id for `REMEMBER_US` after `now_us`.

        Its idempotency key is remembered for `KEEP_KEY_US` if the response is complete, and may be used again if not.
        """
        self._move(request, RequestTransition.ENDED)
        self._remove(request, now_us, is_complete=is_complete)

    def _remove(self, request: ActiveRequest, now_us: int, *, is_complete: bool) -> None:
        del self._active[request.submitted.request_id]
        self._sum -= request.term
        if key := request.submitted.idempotency_key:
            del self._active_keys[key]
            if is_complete:
                if len(self._finished_keys) >= FINISHED_KEYS_MAX:
                    self._finished_keys.forget_oldest()
                self._finished_keys.add(key, request.submitted.offset, now_us + KEEP_KEY_US)
        self._remembered.add(id_hash(request.submitted.request_id), request.submitted.content, now_us + REMEMBER_US)

    def progress(self, event: RequestProgress, now_us: int) -> ActiveRequest:
        """Apply a worker's progress event to its request, and return the request.

        Raises IllegalTransition if the event is stale, or the phase of the request does not allow it.
        """
        request = self._active.get(event.request_id)
        if request is None:
            raise IllegalTransition(f"request {event.request_id} is not active")
        attempt = request.stage_attempt
        if (event.attempt, event.worker_id, event.worker_epoch) != (attempt, request.worker_id, request.worker_epoch):
            raise IllegalTransition(f"request {event.request_id} is on attempt {attempt} at {request.worker_id}")
        self._move(request, REPORTED[type(event)])
        match event:
            case RequestFinished() | RequestFailed():
                self._remove(request, now_us, is_complete=isinstance(event, RequestFinished))
                return request
            case FirstTokenEmitted():
                if event.unfetched:
                    self._drop_prefilled(request, "not_needed")
                request.prefilled = None  # the KV was fetched, so no worker keeps it any more
            case AttemptRejected():
                request.rejected_by = tuple(dict.fromkeys((*request.rejected_by, event.worker_id)))
            case EncodeFinished():
                request.encoded = event.encoded
            case PrefillFinished():
                request.prefilled = event.prefilled
                request.prefilled_due_us = now_us + event.prefilled.lease_us
            case _:
                pass  # the transition is all that changes
        self._sum_up(request)
        return request

    def of_ingress(self, incarnation: str) -> list[ActiveRequest]:
        """Return the requests whose clients wait at an incarnation of an ingress, in order of submission."""
        return self._in_order(one for one in self._active.values() if incarnation in one.submitted.ingresses)

    def of_worker(self, worker_id: str, worker_epoch: int) -> list[ActiveRequest]:
        """Return the requests that a worker has now, in order of submission."""
        return self._in_order(
            request
            for request in self._active.values()
            if request.worker_id == worker_id and request.worker_epoch == worker_epoch and request.on_worker
        )

    def queued(self) -> list[ActiveRequest]:
        return self._in_order(request for request in self._active.values() if request.phase is Phase.QUEUED)

    def waiting(self) -> list[ActiveRequest]:
        """Return the accepted requests that have no worker and wait for the next one, in order of submission."""
        return self._in_order(request for request in self._active.values() if request.phase is Phase.WAITING)

    def active(self) -> list[ActiveRequest]:
        return self._in_order(iter(self._active.values()))

    def next_due_us(self) -> int | None:
        """Return the next deadline, queue timeout or expiry of an id, in microseconds on the owner's clock, or None."""
        return self._queue_deadlines.earliest(self._deadlines.earliest(self._remembered.next_due_us()))

    def expired(self, now_us: int) -> list[ActiveRequest]:
        """Return the requests past their deadline; the caller must end them. Also forget the ids whose time is over."""
        self._remembered.forget(now_us)
        return [self._active[request_id] for request_id in self._deadlines.take(now_us)]

    def expire_keys(self, now_us: int) -> None:
        """Forget the idempotency keys whose time is over."""
        self._finished_keys.forget(now_us)

    def expired_in_queue(self, now_us: int) -> list[ActiveRequest]:
        """Return the requests whose queue timeout has passed; the caller must end them."""
        return [self._active[request_id] for request_id in self._queue_deadlines.take(now_us)]

    def digest(self) -> int:
        return (self._sum + self._remembered.digest() + self._finished_keys.digest()) & U64_MASK

    def snapshot(self) -> Iterator[RequestState | Remembered | FinishedKeys]:
        for request in self.active():
            submitted = request.submitted
            fields: dict[str, Any] = {name: getattr(submitted, name) for name in SUBMITTED_FIELDS}
            fields |= {name: getattr(request, name) for name in STAGE_FIELDS}
            yield RequestState(sequence_hashes=submitted.packed, routing=submitted.hints, **fields)
        yield from self._remembered.snapshot()
        for chunk in self._finished_keys.snapshot():
            yield FinishedKeys(keys=chunk.ids, offsets=chunk.contents, due_us=chunk.due_us)

    def restore(self, chunk: RequestState | Remembered | FinishedKeys) -> None:
        match chunk:
            case RequestState():
                fields: dict[str, Any] = {name: getattr(chunk, name) for name in SUBMITTED_FIELDS}
                packed = chunk.sequence_hashes
                request = SubmittedRequest(blocks=array_u64(packed), packed=packed, hints=chunk.routing, **fields)
                stages: dict[str, Any] = {name: getattr(chunk, name) for name in STAGE_FIELDS}
                self.add(ActiveRequest(request, **{**stages, "phase": Phase(chunk.phase)}))
            case Remembered():
                self._remembered.restore(chunk)
            case FinishedKeys():
                self._finished_keys.restore(Remembered(ids=chunk.keys, contents=chunk.offsets, due_us=chunk.due_us))
            case _:
                assert_never(chunk)

    def _move(self, request: ActiveRequest, transition: RequestTransition) -> None:
        rule = TRANSITIONS[transition]
        if request.phase not in rule.sources or (rule.guard is not None and not rule.guard(request)):
            raise IllegalTransition(
                f"request {request.submitted.request_id} is in {request.phase}: {transition} does not apply"
            )
        after = rule.target
        self._before_response[request.submitted.pool] += (after in BEFORE_RESPONSE) - (request.phase in BEFORE_RESPONSE)
        request.phase = after or request.phase
        if rule.drops_embeddings:
            request.encoded = None
        if rule.releases_kv is not None:
            self._drop_prefilled(request, rule.releases_kv)

    def _drop_prefilled(self, request: ActiveRequest, reason: KvReleaseReason) -> None:
        """Record that the KV of a request, if kept, will not be fetched."""
        kept, request.prefilled = request.prefilled, None
        if kept is not None:
            keeper = kept.worker_id, kept.worker_epoch
            self.unfetched.append(UnfetchedKv(request.submitted.request_id, request.prefills, *keeper, reason))

    def _sum_up(self, request: ActiveRequest) -> None:
        term = request_term(request)
        self._sum += term - request.term
        request.term = term

    def _schedule_queue_timeout(self, request: ActiveRequest) -> None:
        if request.queue_due_us and request.phase is Phase.QUEUED:
            self._queue_deadlines.add(
                (request.queue_due_us, request.submitted.request_id, request.submitted.offset), len(self._active)
            )

    def _is_active(self, deadline: Deadline) -> bool:
        # Compare offsets: an id may be reused after it was forgotten, while an old deadline is still in the heap.
        request = self._active.get(deadline[1])
        return request is not None and request.submitted.offset == deadline[2]

    def _is_queued(self, deadline: Deadline) -> bool:
        return self._is_active(deadline) and self._active[deadline[1]].phase is Phase.QUEUED

    @staticmethod
    def _in_order(requests: Iterator[ActiveRequest]) -> list[ActiveRequest]:
        return sorted(requests, key=lambda request: request.submitted.offset)


@dataclass(frozen=True, slots=True)
class UnfetchedKv:
    """KV that a prefill worker computed in `attempt` and must free, because no worker will fetch it."""

    request_id: str
    attempt: int
    worker_id: str
    worker_epoch: int
    reason: KvReleaseReason


class Deadlines:
    """Heap of request deadlines.

    Removing an entry from the middle of a heap takes linear time. So a request that ends leaves its entry behind, and
    the caller's function `holds` returns whether an entry is still valid.
    """

    def __init__(self, holds: Callable[[Deadline], bool]) -> None:
        self._holds = holds
        self._heap: list[Deadline] = []

    def add(self, deadline: Deadline, active_requests: int) -> None:
        """Add a deadline. The heap never has more than twice `active_requests` entries plus `SPARE`."""
        heap = self._heap
        heappush(heap, deadline)
        if len(heap) > 2 * active_requests + SPARE:
            heap[:] = filter(self._holds, heap)
            heapify(heap)

    def earliest(self, due_us: int | None) -> int | None:
        """Return the earliest valid deadline or `due_us`, whichever is earlier. None means no deadline."""
        heap = self._heap
        # Called for every event. Check for stale entries only if the first entry would change the result.
        if not heap or (due_us is not None and due_us <= heap[0][0]):
            return due_us
        self._drop()
        if heap and (due_us is None or heap[0][0] < due_us):
            return heap[0][0]
        return due_us

    def take(self, now_us: int) -> list[str]:
        """Remove the deadlines at or before `now_us`. Return the ids of their requests, earliest deadline first."""
        found = []
        self._drop()
        while self._heap and self._heap[0][0] <= now_us:
            found.append(heappop(self._heap)[1])
            self._drop()
        return found

    def _drop(self) -> None:
        heap = self._heap
        while heap and not self._holds(heap[0]):
            heappop(heap)
