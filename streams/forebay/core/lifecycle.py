"""The life of a request, from its submission to the time at which its id is forgotten.

Theory of operation. A request under way moves by the table below and by nothing else. What workers say
counts only for the attempt and the worker epoch that the request is on; everything else is outdated and
raises without effect. When a request ends only hashes of its id and content are kept, for as long as a
producer might send it again.

    submitted --routed--> prefill --first token--> decode --finished--> (ended)
    prefill, decode --worker lost--> waiting --routed--> prefill            any --failed, aborted--> (ended)
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from heapq import heapify, heappop, heappush
from typing import assert_never

from xxhash import xxh3_64_intdigest

from forebay.core.machine import IllegalTransition
from forebay.events.base import U64_MASK, pack_u64, unpack_u64
from forebay.events.progress import AnyProgressEvent, FirstTokenEmitted, RequestFailed, RequestFinished
from forebay.events.requests import RequestSubmitted
from forebay.events.snapshots import CHUNK_HASHES_MAX, Remembered, RequestState

UNDER_WAY_MAX = 100_000  # requests of one group at once: bounds memory, far above what its workers can run
REMEMBER_US = 120_000_000  # a Kafka producer gives up retrying after 120 s by default
REMEMBERED_CHUNK = CHUNK_HASHES_MAX // 3


class Phase(StrEnum):
    """Where a request under way is."""

    SUBMITTED = "submitted"
    PREFILL = "prefill"
    DECODE = "decode"
    WAITING = "waiting"


class Move(StrEnum):
    """What happens to a request under way."""

    ROUTED = "routed"
    FIRST_TOKEN = "first_token"  # noqa: S105 - a token of text
    WORKER_LOST = "worker_lost"
    ENDED = "ended"


TRANSITIONS: dict[Phase, dict[Move, Phase | None]] = {
    Phase.SUBMITTED: {Move.ROUTED: Phase.PREFILL, Move.ENDED: None},
    Phase.PREFILL: {Move.FIRST_TOKEN: Phase.DECODE, Move.WORKER_LOST: Phase.WAITING, Move.ENDED: None},
    Phase.DECODE: {Move.WORKER_LOST: Phase.WAITING, Move.ENDED: None},
    Phase.WAITING: {Move.ROUTED: Phase.PREFILL, Move.ENDED: None},
}


@dataclass(slots=True)
class Request:
    """A request under way.

    `offset` is that of its `RequestSubmitted`; `due_us` its deadline; `blocks_hash` is over its packed blocks.
    """

    request_id: str
    content: int
    offset: int
    due_us: int
    reply_slot: int
    prompt_tokens: int
    tie_seed: int
    pool: str
    blocks: list[int]
    blocks_hash: int
    phase: Phase = Phase.SUBMITTED
    attempt: int = 0
    worker_id: str = ""
    worker_epoch: int = 0
    rank: int = 0

    @property
    def on_worker(self) -> bool:
        """Whether a worker has it now."""
        return self.phase in (Phase.PREFILL, Phase.DECODE)


class Requests:
    """Requests under way by id, deadlines, and hashes of the ids that ended lately."""

    def __init__(self) -> None:
        self._under_way: dict[str, Request] = {}
        self._deadlines: list[tuple[int, str, int]] = []
        self._remembered: dict[int, int] = {}
        self._forget: deque[tuple[int, int]] = deque()
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
        return self._remembered.get(_id_hash(request_id))

    def add(self, request: Request) -> None:
        """A new request is under way; its id must be new."""
        assert self.content_known(request.request_id) is None
        self._under_way[request.request_id] = request
        heappush(self._deadlines, _deadline(request))
        self._sum += _term(request)

    def route(self, request: Request, worker_id: str, worker_epoch: int, rank: int) -> None:
        """Its next attempt is with this worker rank."""
        before = _term(request)
        self._move(request, Move.ROUTED)
        request.attempt += 1
        request.worker_id, request.worker_epoch, request.rank = worker_id, worker_epoch, rank
        self._sum += _term(request) - before

    def lose_worker(self, request: Request) -> None:
        """Its worker is gone: it waits for another."""
        before = _term(request)
        self._move(request, Move.WORKER_LOST)
        self._sum += _term(request) - before

    def end(self, request: Request, now_us: int) -> None:
        """Nothing more happens to it; its id is remembered for a while."""
        self._move(request, Move.ENDED)
        del self._under_way[request.request_id]
        self._sum -= _term(request)
        self._remember(_id_hash(request.request_id), request.content, now_us + REMEMBER_US)

    def progress(self, event: AnyProgressEvent, now_us: int) -> Request:
        """Fold what a worker says; the request that it is about.

        Raises:
            IllegalTransition: the request is not under way, is on another attempt or worker, or is past this.
        """
        request = self._under_way.get(event.request_id)
        if request is None:
            raise IllegalTransition(f"{event.request_id} is not under way")
        if (event.attempt, event.worker_id, event.worker_epoch) != (
            request.attempt,
            request.worker_id,
            request.worker_epoch,
        ):
            raise IllegalTransition(f"{event.request_id} is on attempt {request.attempt} with {request.worker_id}")
        match event:
            case FirstTokenEmitted():
                before = _term(request)
                self._move(request, Move.FIRST_TOKEN)
                self._sum += _term(request) - before
            case RequestFinished() | RequestFailed():
                self.end(request, now_us)
            case _:
                assert_never(event)
        return request

    def of_worker(self, worker_id: str, worker_epoch: int) -> list[Request]:
        """The requests that a worker has, in the order of their submission."""
        return self._in_order(
            request
            for request in self._under_way.values()
            if request.worker_id == worker_id and request.worker_epoch == worker_epoch and request.on_worker
        )

    def waiting(self) -> list[Request]:
        """The requests that lost their worker, in the order of their submission."""
        return self._in_order(request for request in self._under_way.values() if request.phase is Phase.WAITING)

    def under_way(self) -> list[Request]:
        """All requests under way, in the order of their submission."""
        return self._in_order(iter(self._under_way.values()))

    def next_due_us(self) -> int | None:
        """When something happens by time alone: a deadline, or an id to forget."""
        self._drop_ended_deadlines()
        times = [self._deadlines[0][0]] if self._deadlines else []
        if self._forget:
            times.append(self._forget[0][0])
        return min(times, default=None)

    def expired(self, now_us: int) -> list[Request]:
        """Forget ids whose time has come; the requests under way whose deadline has passed, to be ended."""
        while self._forget and self._forget[0][0] <= now_us:
            due_us, id_hash = self._forget.popleft()
            self._sum -= _remembered_term(id_hash, self._remembered.pop(id_hash), due_us)
        found = []
        self._drop_ended_deadlines()
        while self._deadlines and self._deadlines[0][0] <= now_us:
            found.append(self._under_way[heappop(self._deadlines)[1]])
            self._drop_ended_deadlines()
        return found

    def digest(self) -> int:
        """64 bits over the requests under way and the ids remembered."""
        return self._sum & U64_MASK

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
                sequence_hashes=pack_u64(request.blocks),
            )
        forget = list(self._forget)
        for start in range(0, len(forget), REMEMBERED_CHUNK):
            part = forget[start : start + REMEMBERED_CHUNK]
            yield Remembered(
                ids=pack_u64(id_hash for _, id_hash in part),
                contents=pack_u64(self._remembered[id_hash] for _, id_hash in part),
                due_us=pack_u64(due_us for due_us, _ in part),
            )

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
                        blocks=unpack_u64(chunk.sequence_hashes),
                        blocks_hash=xxh3_64_intdigest(chunk.sequence_hashes),
                        phase=Phase(chunk.phase),
                        attempt=chunk.attempt,
                        worker_id=chunk.worker_id,
                        worker_epoch=chunk.worker_epoch,
                        rank=chunk.rank,
                    )
                )
            case Remembered():
                packed = (unpack_u64(part) for part in (chunk.ids, chunk.contents, chunk.due_us))
                for id_hash, content, due_us in zip(*packed, strict=True):
                    self._remember(id_hash, content, due_us)
            case _:
                assert_never(chunk)

    def _remember(self, id_hash: int, content: int, due_us: int) -> None:
        self._remembered[id_hash] = content
        self._forget.append((due_us, id_hash))
        self._sum += _remembered_term(id_hash, content, due_us)

    def _move(self, request: Request, move: Move) -> None:
        table = TRANSITIONS[request.phase]
        if move not in table:
            raise IllegalTransition(f"{request.request_id} is in {request.phase}: {move} does not apply")
        request.phase = table[move] or request.phase

    def _drop_ended_deadlines(self) -> None:
        # An ended request leaves its deadline behind: taking it out of the middle of a heap costs a walk.
        deadlines = self._deadlines
        while deadlines and not self._is_under_way(*deadlines[0][1:]):
            heappop(deadlines)
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
        blocks=unpack_u64(event.sequence_hashes),
        blocks_hash=xxh3_64_intdigest(event.sequence_hashes),
    )


def content_hash(event: RequestSubmitted) -> int:
    """64 bits over what makes a request the same request: not its reply slot, timeout or times."""
    text = f"{event.model}\0{event.sampling!r}\0{event.nonce}".encode()
    return xxh3_64_intdigest(event.token_ids, xxh3_64_intdigest(text))


def _deadline(request: Request) -> tuple[int, str, int]:
    return request.due_us, request.request_id, request.offset


def _id_hash(request_id: str) -> int:
    return xxh3_64_intdigest(request_id.encode())


def _term(request: Request) -> int:
    text = (
        f"{request.request_id}\0{request.phase}\0{request.attempt}\0{request.worker_id}\0{request.worker_epoch}"
        f"\0{request.rank}\0{request.offset}\0{request.due_us}\0{request.pool}\0{request.reply_slot}"
        f"\0{request.prompt_tokens}\0{request.tie_seed}\0{request.blocks_hash}"
    )
    return xxh3_64_intdigest(text.encode(), request.content)


def _remembered_term(id_hash: int, content: int, due_us: int) -> int:
    return xxh3_64_intdigest(pack_u64((id_hash, content, due_us)))
