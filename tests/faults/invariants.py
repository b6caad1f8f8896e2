"""Invariants of the whole control plane: checked at each appended record, and when the system is quiet.

The checks read the log with code of their own where they can, so that a bug in a reader of the services does not hide
itself. The expected tokens come from the mock engine's rule for one undisturbed attempt.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from xxhash import xxh3_64_intdigest

from forebay.core.step import AnyDecision
from forebay.core.world import World
from forebay.engine_model.sequence import generate_tokens
from forebay.events.base import U64_MASK, pack_u32, unpack_u32, unpack_u64
from forebay.events.codec import DecodeError, decode
from forebay.events.decisions import JournalRecord, OwnerClaimed, RequestRouted, Sealed
from forebay.events.requests import RequestSubmitted, Sampling
from forebay.events.snapshots import IndexBlocks
from forebay.events.tokens import ResponseEnded, TokenChunk, TokensEmitted
from forebay.events.topics import DECISIONS, REQUESTS, TOKENS, Topic, work_topic
from forebay.events.work import WorkItem
from forebay.transport.base import Record
from forebay.workers.engines.mock.outputs import sampler_seed
from tests.faults.services import VOCABULARY, WorkerService


class Violation(Exception):
    """An invariant does not hold. The text names the invariant and the request or process."""


def expected_tokens(request_id: str, prompt: bytes, sampling: Sampling) -> list[int]:
    """Return the output of a mock engine for a request that nothing disturbs."""
    seed = xxh3_64_intdigest(prompt, sampler_seed(request_id, sampling) & U64_MASK)
    return generate_tokens(seed, 0, sampling.max_tokens, VOCABULARY)


@dataclass(slots=True)
class _Accepted:
    """A submission on the log, with the tokens of its undisturbed response."""

    submitted: RequestSubmitted
    offset: int
    expected: list[int]


@dataclass(slots=True)
class _Routing:
    worker_id: str
    owner_epoch: int
    offset: int


class LogChecks:
    """Checks each record when it is appended, before any process reads it.

    Attributes:
        accepted: submissions in the order of their offsets.
        claims: offsets of the owners' valid claims. A router may continue only with the rules of the owner before it,
            or right after the seal of this owner.
        rules: version of the decision rules of the newest owner.
        versions: all versions of the decision rules that owned the group.
        decisions: number of valid decisions.
        decided: offsets of the claims whose owners have written decisions, seals or snapshots.
    """

    def __init__(self) -> None:
        self.accepted: list[_Accepted] = []
        self.claims: list[int] = []
        self.decided: set[int] = set()
        self.rules = 0
        self.versions: set[int] = set()
        self.decisions = 0
        self._seal = -1  # offset of the last valid record, if it is a seal
        self._nonce = ""  # of the newest valid claim
        self._seen: set[tuple[str, int]] = set()
        self._expected: dict[tuple[str, int], list[list[int]]] = {}
        self._routings: dict[tuple[str, str, int], list[_Routing]] = {}
        self._emitted: dict[tuple[str, int, int, str, int], int] = {}
        self._ends: dict[tuple[str, int, int, int], int] = {}

    def on_append(self, record: Record) -> None:
        """Check a new record. Raises Violation."""
        topic = record.topic
        if topic == DECISIONS.name:
            self._on_decision(record)
        elif topic == TOKENS.name:
            self._on_tokens(record)
        elif topic == REQUESTS.name:
            self._on_request(record)
        elif topic.startswith(work_topic("").name):
            self._on_work(record)

    def _on_request(self, record: Record) -> None:
        event = _decoded(REQUESTS, record)
        if isinstance(event, RequestSubmitted):
            expected = expected_tokens(event.request_id, event.token_ids, event.sampling)
            self._expected.setdefault((event.request_id, event.reply_slot), []).append(expected)
            self.accepted.append(_Accepted(event, record.offset, expected))

    def _on_decision(self, record: Record) -> None:
        event = _decoded(DECISIONS, record)
        if isinstance(event, OwnerClaimed):
            can_continue = not self.claims or event.core_version == self.rules or -1 < event.seal == self._seal
            if event.previous_nonce == self._nonce and can_continue:
                self.claims.append(record.offset)
                self.rules, self._seal, self._nonce = event.core_version, -1, event.owner_nonce
                self.versions.add(event.core_version)
            return
        if not isinstance(event, JournalRecord) or (event.owner_nonce, event.seq) in self._seen:
            return  # a foreign or repeated record
        self._seen.add((event.owner_nonce, event.seq))
        self.decided.add(event.owner_epoch)
        if event.owner_nonce == self._nonce:
            self._seal = record.offset if isinstance(event, Sealed) else -1
            self.decisions += isinstance(event, AnyDecision)
        if isinstance(event, RequestRouted):
            key = event.request_id, event.stage, event.attempt
            routing = _Routing(event.worker_id, event.owner_epoch, record.offset)
            self._routings.setdefault(key, []).append(routing)

    def _is_valid(self, routing: _Routing) -> bool:
        """Return whether no later owner had claimed the group before the record of a routing."""
        return not any(routing.owner_epoch < claim < routing.offset for claim in self.claims)

    def _on_work(self, record: Record) -> None:
        event = _decoded(work_topic("default"), record)
        if not isinstance(event, WorkItem):
            return
        routings = self._routings.get((event.request_id, event.stage, event.attempt), [])
        if not any(one.worker_id == event.worker_id and self._is_valid(one) for one in routings):
            raise Violation(
                f"effect before journal: work for {event.request_id}, attempt {event.attempt}, was sent to"
                f" {event.worker_id} without a valid decision in the journal"
            )

    def _on_tokens(self, record: Record) -> None:
        event = _decoded(TOKENS, record)
        if isinstance(event, TokensEmitted):
            for chunk in event.chunks:
                self._on_chunk(record.partition, event, chunk)
        elif isinstance(event, ResponseEnded) and event.usage is not None:
            key = event.request_id, record.partition, event.attempt, event.owner_epoch
            self._ends[key] = self._ends.get(key, 0) + 1
            if self._ends[key] > 1:
                raise Violation(f"{event.request_id}: attempt {event.attempt} ended {self._ends[key]} times")

    def _on_chunk(self, slot: int, event: TokensEmitted, chunk: TokenChunk) -> None:
        name, token_ids = chunk.request_id, unpack_u32(chunk.token_ids)
        key = name, slot, chunk.attempt, event.worker_id, event.worker_epoch
        end = self._emitted.get(key)
        if end is not None and chunk.first_index != end:
            raise Violation(
                f"{name}: {event.worker_id} emitted tokens from {chunk.first_index} of attempt {chunk.attempt},"
                f" after tokens up to {end}: it runs the attempt twice, or lost tokens"
            )
        self._emitted[key] = chunk.first_index + len(token_ids)
        candidates = self._expected.get((name, slot), ())
        end = chunk.first_index + len(token_ids)
        if not any(expected[chunk.first_index : end] == token_ids for expected in candidates):
            raise Violation(
                f"{name}: {event.worker_id} emitted wrong tokens from {chunk.first_index} of attempt {chunk.attempt}"
            )


def _decoded(topic: Topic, record: Record) -> object:
    try:
        return decode(topic, record.value)
    except DecodeError:
        return None  # a foreign record


@dataclass
class Outcome:
    """What the client of one request received.

    Attributes:
        name: name of the request in the plan.
        request_id: id of the request; unlike the name it may be used twice.
        prompt: tokens of the prompt, packed.
        sampling: sampling parameters.
        state: `waiting` before it is submitted, then `pending`, then the outcome.
        tokens: tokens received.
        detail: finish reason or error code.
        deadline_s: virtual time at which the request must have ended.
    """

    name: str
    request_id: str
    prompt: bytes
    sampling: Sampling
    state: str = "waiting"  # or rejected, pending, finished, failed, disconnected, broken
    tokens: list[int] = field(default_factory=list)
    detail: str = ""
    deadline_s: float = 0.0

    @cached_property
    def _expected(self) -> list[int]:
        return expected_tokens(self.request_id, self.prompt, self.sampling)

    def check(self) -> None:
        """Check the tokens that the client has received so far. Raises Violation."""
        expected = self._expected
        if self.tokens != expected[: len(self.tokens)]:
            raise Violation(f"{self.name}: the client received {self.tokens}, expected {expected}")
        if self.state == "finished" and len(self.tokens) != len(expected):
            raise Violation(f"{self.name}: the response finished with {len(self.tokens)} of {len(expected)} tokens")


def check_world(world: World) -> None:
    """Check that the state of an owner has no request and no booking left. Raises Violation."""
    active = [request.submitted.request_id for request in world.requests.active()]
    if active:
        raise Violation(f"the owner still has requests in flight: {active}")
    if len(world.queues):
        raise Violation(f"the owner still has {len(world.queues)} queued requests")
    if nodes := world.load.count_nodes():
        raise Violation(f"the owner still has bookings: {nodes} nodes of active prompts")
    for rank in world.load.ranks():
        if rank.active_requests or rank.prefill_tokens or rank.units:
            raise Violation(
                f"the owner still has bookings on {rank.worker_id}: {rank.active_requests} requests,"
                f" {rank.prefill_tokens} prefill tokens, {rank.decode_blocks} blocks"
            )


def check_worker(name: str, service: WorkerService, world: World) -> None:
    """Check that a worker is idle and that the index has exactly its cached blocks. Raises Violation."""
    worker = service.worker
    if worker is None:
        raise Violation(f"{name} has not started")
    if worker.active_requests:
        raise Violation(f"{name} still has requests in flight: {sorted(worker.active_requests)}")
    member = world.fleet.get(name)
    if member is None or member.worker_epoch != worker.worker_epoch:
        found = None if member is None else member.worker_epoch
        raise Violation(f"the owner has epoch {found} of {name}, the worker has {worker.worker_epoch}")
    for number, rank in service.engine.ranks.items():
        if rank.model.pool.used:
            raise Violation(f"rank {number} of {name} still uses {rank.model.pool.used} KV blocks")
        if states := rank.requests():
            raise Violation(f"rank {number} of {name} still has {states}")
        held, indexed = set(service.engine.held(number)), set(_indexed(world, name, number))
        if held != indexed:
            raise Violation(
                f"the index has {len(indexed)} blocks of {name}, the engine {len(held)};"
                f" {len(held - indexed)} are missing and {len(indexed - held)} are gone"
            )


def _indexed(world: World, name: str, rank: int) -> Iterator[int]:
    for chunk in world.index.snapshot():
        if isinstance(chunk, IndexBlocks) and (chunk.worker_id, chunk.rank, chunk.tier) == (name, rank, "device"):
            yield from unpack_u64(chunk.sequence_hashes)


def prompt_tokens(family: int, shared: int, name: str, own: int) -> bytes:
    """Return the prompt of a planned request: a prefix that its family shares, then tokens of its own."""
    prefix = [100 + (family * 31 + position * 7) % 500 for position in range(shared)]
    tail = [100 + (sum(name.encode()) * 13 + position * 11) % 500 for position in range(own)]
    return pack_u32([*prefix, *tail])
