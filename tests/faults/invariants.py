"""Invariants of the whole control plane: checked at each appended record, and when the system is quiet.

The checks read the log with code of their own where they can, so that a bug in a reader of the services does not hide
itself. The expected tokens come from the mock engine's rule for one undisturbed attempt.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from xxhash import xxh3_64_intdigest

from forebay.core.step import AnyDecision
from forebay.core.world import World
from forebay.engine_model.sequence import generate_tokens
from forebay.events.base import U64_MASK, Event, pack_u32, unpack_u32, unpack_u64
from forebay.events.codec import DecodeError, decode
from forebay.events.decisions import (
    Advanced,
    JournalRecord,
    OwnerClaimed,
    RequestAborted,
    RequestRejected,
    RequestRepeated,
    RequestRouted,
    Sealed,
    SnapshotRecord,
)
from forebay.events.fleet import FleetEvent, IngressJoined, IngressLost, OwnershipAnnounced, WorkerJoined, WorkerLost
from forebay.events.progress import AttemptRejected, RequestFailed, RequestFinished
from forebay.events.requests import RequestCancelled, RequestResumed, RequestSubmitted, Sampling
from forebay.events.snapshots import IndexBlocks
from forebay.events.tokens import AttemptStarted, ResponseEnded, TokenChunk, TokensEmitted
from forebay.events.topics import DECISIONS, FLEET, INPUTS, PROGRESS, REQUESTS, SNAPSHOTS, TOKENS, Topic, work_topic
from forebay.events.work import WorkItem
from forebay.transport.base import Record
from forebay.workers.engines.mock.outputs import sampler_seed
from tests.faults.effects import Effects, Violation
from tests.faults.plan import PlannedRequest
from tests.faults.services import PARTITION, VOCABULARY, WorkerService


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


class LogChecks:
    """Checks each record when it is appended, before any process reads it.

    Attributes:
        accepted: submissions in the order of their offsets.
        claims: offsets of the owners' valid claims. A router may continue only with the rules of the owner before it,
            or right after the seal of this owner.
        rules: version of the decision rules of the newest owner.
        versions: all versions of the decision rules that owned the group.
        decided: offsets of the claims whose owners have written decisions, seals or snapshots.
        cancelled: ids of the requests that a `RequestCancelled` names.
        aborted: reason of each request that an owner aborted.
        retained: oldest offsets that a reader needs who begins at the newest snapshot.
    """

    def __init__(self) -> None:
        self.accepted: list[_Accepted] = []
        self.claims: list[int] = []
        self.decided: set[int] = set()
        self.rules = 0
        self.versions: set[int] = set()
        self.decisions = 0
        self.retained: dict[tuple[str, int], int] = {}
        self._sealed: dict[int, Counter[str]] = {}  # consumed events, by the journal offset after each digest
        self._seal = -1  # offset of the last valid record, if it is a seal
        self._nonce = ""  # of the newest valid claim
        self._seen: set[tuple[str, int]] = set()
        self._expected: dict[tuple[str, int], list[list[int]]] = {}
        self.effects = Effects()
        self.cancelled: set[str] = set()
        self._reported: dict[str, tuple[int, int]] = {}  # offset and attempt of each external request's reported end
        self._ended: set[str] = set()  # external requests that a decision ended
        self._readers: dict[str, set[str]] = {}  # incarnations of the ingresses whose clients wait, by request
        self._others: dict[int, set[str]] = {}  # those that remain, by the offset of a cancellation
        self._lost: set[str] = set()  # incarnations of lost ingresses
        self.aborted: dict[str, str] = {}
        self._claims_of: dict[str, list[int]] = {}  # by incarnation of the router
        self._submitted: Counter[str] = Counter()
        self._ends_of: Counter[str] = Counter()  # number of records by topic, in the partition of the group
        self._consumed: Counter[str] = Counter()
        self._now_us = 0
        self._attempts: dict[str, int] = {}
        self._items: dict[tuple[str, str, int], set[int]] = {}  # epochs of the items for each attempt on a worker
        self._epochs: dict[tuple[str, str, int, int], int] = {}  # newest epoch in a reply slot of each of them
        self._announced = -1
        self._tokens_of: dict[str, str] = {}  # lease tokens of the workers and ingresses in the fleet
        self._emitted: dict[tuple[str, int, int, str, int], int] = {}
        self._ends: dict[tuple[str, int, int, int], int] = {}

    def on_append(self, record: Record, writer: str) -> None:
        """Check a new record of a process; `writer` is empty for records of other producers. Raises Violation."""
        topic = record.topic
        self._ends_of[topic] += record.partition == PARTITION
        if topic == DECISIONS.name:
            self._on_decision(record, writer)
        elif topic == TOKENS.name:
            self._on_tokens(record, writer)
        elif topic == REQUESTS.name:
            self._on_request(record)
        elif topic == PROGRESS.name:
            self._on_progress(record)
        elif topic == FLEET.name:
            self._on_fleet(record, writer)
        elif topic.startswith(work_topic("").name):
            self._on_work(record, writer)

    def on_forget(self, name: str, token: str, writer: str, has_expired: bool) -> None:
        """Check that a router deletes only leases of workers and ingresses that are lost. Raises Violation.

        A replaced owner may delete an expired lease of which it does not know that the holder has joined meanwhile.
        """
        is_owner = self._announced in self._claims_of.get(writer, ())
        if self._tokens_of.get(name) == token and (is_owner or not has_expired):
            raise Violation(f"{writer} deleted the lease of {name}, which has not left the fleet")

    def check_fleet(self, world: World) -> None:
        """Check that an owner that has read the whole fleet has the members of the valid records. Raises Violation."""
        fleet = world.fleet
        if world.view.get(FLEET.name, 0) < self._ends_of[FLEET.name]:
            return
        found = {worker.spec.worker_id: worker.lease for worker in fleet.workers()}
        found |= {one.ingress_id: one.incarnation for one in fleet.ingresses()}
        if (found, fleet.owner_epoch) != (self._tokens_of, self._announced):
            raise Violation(
                f"the owner has the members {found} since the epoch {fleet.owner_epoch}, expected {self._tokens_of}"
                f" since {self._announced}: facts of a replaced owner count"
            )

    def check_effects(self) -> None:
        """Check that no effect of a decision is missing. Raises Violation."""
        self.effects.check_durable(self._submitted)

    def check_ends(self) -> None:
        """Check that the books of each external request ended for a reason on the log. Raises Violation."""
        for name in self.effects.external.keys() - self._ended:
            if self._reported.get(name, (0, -1))[1] != self._attempts[name]:
                raise Violation(f"{name}: nothing on the log ended its books")

    def _on_request(self, record: Record) -> None:
        event = _decoded(REQUESTS, record)
        if isinstance(event, RequestCancelled):
            self.cancelled.add(event.request_id)
            readers = self._readers.get(event.request_id, set())
            readers.discard(event.ingress_incarnation)
            self._others[record.offset] = readers.copy() if event.ingress_incarnation else set()
        if isinstance(event, RequestResumed) and event.request_id in self._readers:
            self._readers[event.request_id].add(event.ingress_incarnation)
        if isinstance(event, RequestSubmitted):
            self._readers.setdefault(event.request_id, {event.ingress_incarnation} - {""})
            self._submitted[event.request_id] += 1
            if event.delivery == "external":
                self.effects.external[event.request_id] = event.reply_slot
            expected = expected_tokens(event.request_id, event.token_ids, event.sampling)
            self._expected.setdefault((event.request_id, event.reply_slot), []).append(expected)
            self.accepted.append(_Accepted(event, record.offset, expected))

    def _on_decision(self, record: Record, writer: str) -> None:
        event = _decoded(DECISIONS, record)
        if isinstance(event, OwnerClaimed):
            if writer:
                self._claims_of.setdefault(writer, []).append(record.offset)
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
            self._on_valid(event)
            if isinstance(event, Advanced):
                self._sealed[record.offset + 1] = self._consumed.copy()
            elif isinstance(event, SnapshotRecord):
                view = self._sealed[event.journal_offset]
                self.retained = {(topic.name, PARTITION): view[topic.name] for topic in INPUTS}
                self.retained[DECISIONS.name, PARTITION] = event.journal_offset
                self.retained[SNAPSHOTS.name, PARTITION] = event.first_offset
            self.effects.on_decision(event, record.at_us)
            if isinstance(event, Sealed):  # the next owner continues from the seal, and sends nothing again
                self.check_effects()

    def _on_valid(self, event: JournalRecord) -> None:
        """Check the history of a valid record: the events that it consumed, their times, and the attempt."""
        for run in event.consumed:
            self._consumed[run.topic] += run.count
            if run.now_us < self._now_us:
                raise Violation(f"time goes back from {self._now_us} to {run.now_us} in {event}")
            self._now_us = run.now_us
            if self._consumed[run.topic] > self._ends_of[run.topic]:
                raise Violation(f"{event} consumed {self._consumed[run.topic]} records of {run.topic}, which has fewer")
        if getattr(event, "request_id", "") in self.effects.external:
            self._on_external(event)
        if isinstance(event, RequestAborted):
            self.aborted[event.request_id] = event.reason
            others = self._others.get(self._consumed[REQUESTS.name] - 1, set()) - self._lost
            if event.reason == "cancelled" and others:
                raise Violation(f"{event.request_id} was cancelled, although clients read it at {others}")
        if isinstance(event, RequestRouted):
            before = self._attempts.get(event.request_id, 0)
            if event.attempt not in (1, before + 1):
                raise Violation(f"{event.request_id}: attempt {event.attempt} was routed after attempt {before}")
            self._attempts[event.request_id] = event.attempt

    def _on_progress(self, record: Record) -> None:
        event = _decoded(PROGRESS, record)
        if isinstance(event, RequestFinished | RequestFailed | AttemptRejected) and (
            event.request_id in self.effects.external
        ):
            if event.request_id in self._reported:
                raise Violation(f"{event.request_id}: its picker reported {event} after another end")
            self._reported[event.request_id] = record.offset, event.attempt

    def _on_external(self, event: Any) -> None:
        """Check that a decision about an external request comes before the end of its books."""
        name = event.request_id
        offset, attempt = self._reported.get(name, (-1, 0))
        has_finished = -1 < offset < self._consumed[PROGRESS.name] and attempt == self._attempts.get(name)
        is_rejection = isinstance(event, RequestAborted) and event.reason == "worker_refused"
        if name in self._ended or (has_finished and not is_rejection):
            raise Violation(f"the books of {name} ended before {event}")
        if isinstance(event, RequestAborted | RequestRejected | RequestRepeated):
            self._ended.add(name)

    def _on_work(self, record: Record, writer: str) -> None:
        event = _decoded(work_topic("default"), record)
        if isinstance(event, WorkItem) and event.request_id in self.effects.external:
            raise Violation(f"{writer} sent a work item for the external request {event.request_id}")
        if isinstance(event, Event):
            self.effects.on_sent(record, event, writer, self._claims_of.get(writer, []))
        if isinstance(event, WorkItem):
            key = event.worker_id, event.request_id, event.attempt
            self._items.setdefault(key, set()).add(event.owner_epoch)

    def _on_fleet(self, record: Record, writer: str) -> None:
        """Fold the fleet: facts of an owner count only until a later owner has announced itself."""
        event = _decoded(FLEET, record)
        if not isinstance(event, FleetEvent):
            return
        if event.owner_epoch not in self._claims_of.get(writer, ()):
            raise Violation(f"{writer} wrote {event}, but did not claim this epoch")
        if event.owner_epoch < self._announced:
            return
        match event:
            case OwnershipAnnounced():
                self._announced = event.owner_epoch
            case WorkerJoined():
                self._join(event.spec.worker_id, event.lease)
            case IngressJoined():
                self._join(event.ingress_id, event.incarnation)
            case WorkerLost():
                self._lose(event.worker_id)
            case IngressLost():
                self._lost.add(event.incarnation)
                self._lose(event.ingress_id)

    def _join(self, name: str, token: str) -> None:
        if name in self._tokens_of:
            raise Violation(f"{name} joined again, although no valid record removed it from the fleet")
        self._tokens_of[name] = token

    def _lose(self, name: str) -> None:
        if self._tokens_of.pop(name, None) is None:
            raise Violation(f"{name} was lost, although it was not in the fleet")

    def _check_epoch(self, writer: str, request_id: str, slot: int, attempt: int, epoch: int) -> None:
        """Check that output has the epoch of an owner that sent the attempt to the worker, and never an earlier one."""
        key = writer, request_id, slot, attempt
        sent = self._items.get((writer.split("#", maxsplit=1)[0], request_id, attempt), set())
        if epoch not in sent or epoch < self._epochs.get(key, -1):
            raise Violation(
                f"{request_id}: {writer} wrote output of attempt {attempt} with the epoch {epoch} after"
                f" {self._epochs.get(key)}; owners sent it with {sorted(sent)}"
            )
        self._epochs[key] = epoch

    def _on_tokens(self, record: Record, writer: str) -> None:
        event = _decoded(TOKENS, record)
        if writer.startswith("r") and isinstance(event, Event):
            self.effects.on_sent(record, event, writer, self._claims_of.get(writer, []))
        elif isinstance(event, TokensEmitted):
            for chunk in event.chunks:
                self._check_epoch(writer, chunk.request_id, record.partition, chunk.attempt, event.owner_epoch)
        elif isinstance(event, AttemptStarted | ResponseEnded):
            self._check_epoch(writer, event.request_id, record.partition, event.attempt, event.owner_epoch)
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
        request_id: id of the request; unlike the name it may be used twice.
        state: `waiting` before it is submitted, then `pending`, then the outcome.
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
    if len(world.commands):
        raise Violation(f"the owner still waits for {len(world.commands)} commands")
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


def planned_outcome(planned: PlannedRequest, request_id: str) -> Outcome:
    prompt = prompt_tokens(planned.family, planned.shared_tokens, planned.name, planned.own_tokens)
    temperature = 0.0 if planned.seed is None else 1.0
    sampling = Sampling(max_tokens=planned.max_tokens, temperature=temperature, seed=planned.seed)
    return Outcome(planned.name, request_id, prompt, sampling)
