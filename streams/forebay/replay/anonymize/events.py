"""Anonymise events. Lengths, times, structure and the names of the system's own components stay the same.

Theory of operation. An event class declares for each field how the field is anonymised (`forebay.events.privacy`), or
this module handles the class explicitly. Either way a new type or field cannot be forgotten. Client data is removed:
prompts, texts and sampling seeds are dropped. Request IDs, sessions, adapters, cache namespaces and sequence hashes are
masked (`forebay.replay.anonymize.masks`). The name of a worker, taint, model or queue class that a client uses stays if
the system has a component of that name. Otherwise the name is masked.

Snapshots identify requests and sessions by hashes. The replacements of these hashes are computed, or looked up in
tables built from the recording itself, so a snapshot and the events after it still refer to the same requests.
"""

from dataclasses import dataclass, field
from typing import Any, TypeVar, assert_never

import msgspec

from forebay.core.state.commands import RESPONSE_OMITTED, TIMED_OUT, WORKER_LOST
from forebay.core.state.submitted_request import content_hash, id_hash
from forebay.core.step import InputEvent
from forebay.events.base import hex_digest, pack_u64, unpack_u64
from forebay.events.control import BusyThresholdsSet, Command, DisaggregationSet, PoolConfigured, WorkerCommanded
from forebay.events.decisions import (
    Advanced,
    CacheResyncRequested,
    CommandEnded,
    CommandOutcome,
    CommandSent,
    JournalRecord,
    KvReleased,
    OwnerClaimed,
    RequestAborted,
    RequestHeld,
    RequestRejected,
    RequestRouted,
    RouteAnswered,
    SnapshotTaken,
)
from forebay.events.fleet import IngressFact, OwnershipAnnounced, WorkerFact, WorkerJoined, WorkerSpec
from forebay.events.kv import AnyKvEvent, BlocksRemoved, BlocksStored, CacheCleared
from forebay.events.media import Media
from forebay.events.metrics import LoadReported
from forebay.events.privacy import Rule, privacy_rules
from forebay.events.progress import CommandReport, EngineFailed, ProgressEvent
from forebay.events.requests import (
    NO_HINTS,
    RequestCancelled,
    RequestSubmitted,
    RouteQueried,
    RoutingHints,
    Sampling,
)
from forebay.events.snapshots import (
    Booking,
    Chunk,
    CommandState,
    ComputedTokens,
    IndexBlocks,
    IndexChanges,
    IndexCursor,
    IngressState,
    QueueTurns,
    Remembered,
    Reported,
    RequestState,
    RoutedBlocks,
    Sessions,
    SnapshotChunk,
    WorkerState,
    WorldState,
)
from forebay.replay.anonymize.masks import HashPairs, Masks
from forebay.transport.base import Record

replace = msgspec.structs.replace
T = TypeVar("T", bound=msgspec.Struct)


@dataclass(slots=True)
class Names:
    """Names of the system's own components, which stay in an anonymised recording."""

    workers: set[str] = field(default_factory=set)
    taints: set[str] = field(default_factory=set)
    models: set[str] = field(default_factory=set)
    pools: set[str] = field(default_factory=set)
    classes: set[str] = field(default_factory=set)

    def learn_worker(self, spec: WorkerSpec) -> None:
        """Add the names of a worker and its taints."""
        self.workers.add(spec.worker_id)
        self.taints.update(spec.taints)

    def learn_pool(self, pool: PoolConfigured) -> None:
        """Add the names of a pool, its model and its queue classes."""
        self.models.add(pool.model)
        self.pools.add(pool.pool)
        self.classes.update(one.name for one in pool.router.queue.classes)


class EventAnonymizer:
    """Anonymises the events of one group.

    Attributes:
        masks: masks with the key of the recording.
        partition: control partition of the group.
        names: names of the system, which are not masked.
        contents: replacement of each hash of a request's content in the recording.
        sessions: replacement of each session key in the recording.
        ordered_ids: masks of the request IDs passed to `keep_order`, by ID.
    """

    def __init__(self, masks: Masks, partition: int) -> None:
        self.masks = masks
        self.partition = partition
        self.names = Names()
        self.contents = HashPairs()
        self.sessions = HashPairs()
        self.ordered_ids: dict[str, str] = {}
        self._ordered_hashes: dict[int, str] = {}

    def keep_order(self, request_ids: set[str]) -> None:
        """Choose the masks of these IDs so that the masks sort like the IDs.

        This keeps the order of decisions, because the owner aborts requests with equal deadlines in the order of IDs.
        """
        masked = sorted(map(self.masks.request_id, request_ids))
        self.ordered_ids = dict(zip(sorted(request_ids), masked, strict=True))
        self._ordered_hashes = {id_hash(name): stand_in for name, stand_in in self.ordered_ids.items()}

    def request_id(self, request_id: str) -> str:
        """Return the masked ID of a request."""
        return self.ordered_ids.get(request_id) or self.masks.request_id(request_id)

    def event(self, event: InputEvent) -> InputEvent:
        """Return an anonymised input event."""
        match event:
            case RequestSubmitted():
                return self.submitted(event)
            case RouteQueried():
                return self._queried(event)
            case RequestCancelled():
                return replace(event, request_id=self.request_id(event.request_id), reason="")
            case BlocksStored() | BlocksRemoved() | CacheCleared():
                return self._cache(event)
            case ProgressEvent() | CommandReport() | EngineFailed() | WorkerFact() | IngressFact():
                return self.by_rules(event)
            case WorkerCommanded():
                return self._commanded(event)
            case WorkerJoined():
                return replace(event, spec=self._spec(event.spec), lease=self.masks.name("lease", event.lease))
            case BusyThresholdsSet() | DisaggregationSet():
                return replace(event, model=self._model(event.model))
            case LoadReported() | OwnershipAnnounced() | PoolConfigured():
                return event
            case _:
                assert_never(event)

    def by_rules(self, value: T) -> T:
        """Return an event or a part whose fields were anonymised by the rules that its class declares."""
        rules = privacy_rules(type(value))
        return replace(value, **{name: self._field(rule, getattr(value, name)) for name, rule in rules.items()})

    def _field(self, rule: Rule, value: Any) -> Any:
        if value is None:
            return None
        if isinstance(value, tuple):
            return tuple(self._field(rule, one) for one in value)
        match rule:
            case "keep":
                return value
            case "drop":
                return type(value)()
            case "request_id":
                return self.request_id(value)
            case "lora" | "ingress":
                return self.masks.name(rule, value)
            case "checksum":
                return hex_digest(0)
            case "nested":
                return self.by_rules(value)
            case _:
                assert_never(rule)

    def submitted(self, event: RequestSubmitted) -> RequestSubmitted:
        """Return an anonymised submission.

        The nonce replaces the request's content, so repeated submissions of the same content stay equal.
        """
        return RequestSubmitted(
            request_id=self.request_id(event.request_id),
            model=self._model(event.model),
            token_ids=b"",
            sequence_hashes=self.masks.blocks.packed(event.sequence_hashes),
            reply_slot=event.reply_slot,
            timeout_us=event.timeout_us,
            tie_seed=event.tie_seed,
            sampling=_sampling(event.sampling),
            nonce=self.masks.contents.of(content_hash(event)),
            reply_from=event.reply_from,
            at_us=event.at_us,
            lora_name=self.masks.name("lora", event.lora_name),
            cache_namespace=self.masks.name("namespace", event.cache_namespace),
            routing=self.hints(event.routing),
            task=event.task,
            withheld_tokens=event.prompt_tokens,
            media=tuple(map(self._media, event.media)),
            ingress_incarnation=self.masks.name("ingress", event.ingress_incarnation),
            patient=event.patient,
        )

    def hints(self, hints: RoutingHints) -> RoutingHints:
        """Return anonymised routing hints."""
        if hints == NO_HINTS:
            return hints
        return replace(
            hints,
            worker_id=self._worker(hints.worker_id),
            allowed_workers=tuple(map(self._worker, hints.allowed_workers)),
            required_taints=tuple(map(self._taint, hints.required_taints)),
            preferred_taints=tuple(replace(wish, taint=self._taint(wish.taint)) for wish in hints.preferred_taints),
            session_id=self.masks.name("session", hints.session_id),
            policy_class=self._named("class", hints.policy_class, self.names.classes),
        )

    def record(self, record: JournalRecord) -> JournalRecord:
        """Return a journal record without its message and with a masked digest, without deriving it again."""
        match record:
            case OwnerClaimed():
                return replace(record, owner_id=self.masks.name("owner", record.owner_id))
            case RequestRouted() | RequestHeld() | KvReleased():
                return replace(record, request_id=self.request_id(record.request_id))
            case RequestAborted():
                return replace(record, request_id=self.request_id(record.request_id), message="", code="")
            case RequestRejected() | RouteAnswered():
                return replace(record, request_id=self.request_id(record.request_id), message="")
            case CommandSent():
                return replace(record, command_id=self.request_id(record.command_id), message="")
            case CommandEnded():
                outcomes = tuple(map(self._outcome, record.outcomes))
                return replace(record, command_id=self.request_id(record.command_id), outcomes=outcomes)
            case CacheResyncRequested():
                return record
            case SnapshotTaken() | Advanced():
                return replace(record, digest=hex_digest(self.masks.digests.of(int(record.digest, 16))))
            case _:
                assert_never(record)

    def chunk(self, chunk: SnapshotChunk) -> SnapshotChunk:
        """Return an anonymised snapshot chunk."""
        return replace(chunk, parts=tuple(map(self.part, chunk.parts)))

    def part(self, part: Chunk) -> Chunk:
        """Return an anonymised part of a snapshot chunk."""
        match part:
            case IndexBlocks() | RoutedBlocks():
                return replace(part, sequence_hashes=self.masks.blocks.packed(part.sequence_hashes))
            case IndexChanges():
                return replace(part, events=tuple(map(self._cache, part.events)))
            case WorkerState():
                return replace(part, spec=self._spec(part.spec), lease=self.masks.name("lease", part.lease))
            case IngressState():
                return replace(
                    part,
                    ingress_id=self.masks.name("ingress", part.ingress_id),
                    incarnation=self.masks.name("ingress", part.incarnation),
                )
            case RequestState():
                return self._state(part)
            case CommandState():
                outcomes = tuple(map(self._outcome, part.outcomes))
                return replace(
                    part,
                    command_id=self.request_id(part.command_id),
                    nonce=self._nonce(part.nonce),
                    command=self._command(part.command),
                    outcomes=outcomes,
                )
            case Remembered():
                ids = pack_u64(map(self._id_hash, unpack_u64(part.ids)))
                content = self._nonce if part.commands else self._content
                return replace(part, ids=ids, contents=pack_u64(map(content, unpack_u64(part.contents))))
            case Booking():
                blocks = self.masks.blocks.packed(part.sequence_hashes)
                return replace(part, request_id=self.request_id(part.request_id), sequence_hashes=blocks)
            case Sessions():
                return replace(part, keys=pack_u64(map(self._session, unpack_u64(part.keys))))
            case IndexCursor() | Reported() | ComputedTokens() | QueueTurns() | WorldState():
                return part
            case _:
                assert_never(part)

    def _queried(self, event: RouteQueried) -> RouteQueried:
        return replace(
            event,
            request_id=self.request_id(event.request_id),
            model=self._model(event.model),
            sequence_hashes=self.masks.blocks.packed(event.sequence_hashes),
            lora_name=self.masks.name("lora", event.lora_name),
            routing=self.hints(event.routing),
        )

    def _commanded(self, event: WorkerCommanded) -> WorkerCommanded:
        return replace(
            event,
            command_id=self.request_id(event.command_id),
            model=self._model(event.model),
            command=self._command(event.command),
            pool=self._named("pool", event.pool, self.names.pools),
            worker_ids=tuple(map(self._worker, event.worker_ids)),
            nonce=self._nonce(event.nonce),
        )

    def _nonce(self, nonce: int) -> int:
        """Return the masked nonce of a command, which has 63 bits."""
        return self.masks.contents.of(nonce) >> 1

    def _command(self, command: Command) -> Command:
        name, path = self.masks.name("lora", command.lora_name), self.masks.name("path", command.lora_path)
        return replace(command, lora_name=name, lora_path=path)

    def _outcome(self, outcome: CommandOutcome) -> CommandOutcome:
        """Drop messages from engines and keep the owner's own."""
        message = outcome.message if outcome.message in (WORKER_LOST, TIMED_OUT, RESPONSE_OMITTED) else ""
        return replace(outcome, loras=self._loras(outcome.loras), message=message)

    def _loras(self, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(self.masks.name("lora", name) for name in names)

    def _media(self, media: Media) -> Media:
        """Keep the position of a media item; drop its bytes and its digest, which identifies the content."""
        return replace(media, digest=self.masks.sha256(media.digest), mime=f"{media.kind}/*", content=b"")

    def _state(self, state: RequestState) -> RequestState:
        return replace(
            state,
            request_id=self.request_id(state.request_id),
            content=self._content(state.content),
            sequence_hashes=self.masks.blocks.packed(state.sequence_hashes),
            lora_name=self.masks.name("lora", state.lora_name),
            routing=self.hints(state.routing),
            encoded=None if state.encoded is None else self.by_rules(state.encoded),
            prefilled=None if state.prefilled is None else self.by_rules(state.prefilled),
            ingress=self.masks.name("ingress", state.ingress),
        )

    def _cache(self, event: AnyKvEvent) -> AnyKvEvent:
        if isinstance(event, CacheCleared):
            return event
        packed = self.masks.blocks.packed
        masked = replace(
            event, sequence_hashes=packed(event.sequence_hashes), engine_hashes=packed(event.engine_hashes)
        )
        if isinstance(masked, BlocksStored) and masked.parent_hash is not None:
            # A value outside u64 does not identify a block, and must not do so afterwards.
            is_hash = 0 <= masked.parent_hash < 1 << 64
            return replace(masked, parent_hash=self.masks.blocks.of(masked.parent_hash) if is_hash else -1)
        return masked

    def _spec(self, spec: WorkerSpec) -> WorkerSpec:
        return replace(spec, loras=self._loras(spec.loras))

    def _worker(self, name: str) -> str:
        return self._named("worker", name, self.names.workers)

    def _taint(self, name: str) -> str:
        return self._named("taint", name, self.names.taints)

    def _model(self, name: str) -> str:
        return self._named("model", name, self.names.models)

    def _named(self, kind: str, name: str, known: set[str]) -> str:
        return name if name in known else self.masks.name(kind, name)

    def _id_hash(self, hashed: int) -> int:
        return id_hash(self._ordered_hashes.get(hashed) or self.masks.request_id_of(hashed))

    def _content(self, content: int) -> int:
        known = self.contents.get(content)
        return self.masks.contents.of(content) if known is None else known

    def _session(self, key: int) -> int:
        known = self.sessions.get(key)
        return self.masks.sessions.of(key) if known is None else known


def _sampling(sampling: Sampling) -> Sampling:
    """Drop the sampling seed, the required structure and all token IDs."""
    structured = None if sampling.structured is None else replace(sampling.structured, text="")
    return replace(
        sampling,
        seed=None,
        structured=structured,
        logit_bias=tuple(replace(one, token_id=0) for one in sampling.logit_bias),
        stop_token_ids=(0,) * len(sampling.stop_token_ids),
    )


def with_value(record: Record, value: bytes) -> Record:
    """Return a record with another value, without key and headers."""
    return Record(record.topic, record.partition, record.offset, record.at_us, value)
