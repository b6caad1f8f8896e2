"""Invariants of the owner's effects: each follows from a valid decision, is sent once, and is not lost.

An effect is a record that a router writes for workers or clients because of a decision. Some that
are sent again (`SENT_AGAIN`) carry the epoch of the sending owner. All others carry the epoch of the
owner that decided.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from forebay.core.adapter_placement import UNLOAD
from forebay.events.base import Event
from forebay.events.decisions import (
    AdapterPlaced,
    CacheResyncRequested,
    CommandEnded,
    CommandSent,
    CommandTarget,
    JournalRecord,
    KvReleased,
    RequestAborted,
    RequestRejected,
    RequestRepeated,
    RequestRouted,
    RouteAnswered,
)
from forebay.events.tokens import CommandResponse, DestinationSelected, RequestLocated, ResponseEnded, RouteResponse
from forebay.events.topics import work_topic
from forebay.events.work import ReannounceCache, ReleaseKv, WorkCancelled, WorkerCommand, WorkItem
from forebay.transport.base import Record

Effect = tuple[object, ...]
SENT_AGAIN = WorkItem | DestinationSelected | WorkerCommand | ReannounceCache  # with the epoch of the sending owner
TURN_US = 2_000  # the records of one append have times that differ by less; simulated Kafka rounds to milliseconds


class Violation(Exception):
    """An invariant does not hold. The text names the invariant and the request or process."""


def effects_of(decided: JournalRecord, external: Mapping[str, int]) -> Iterator[Effect]:
    """Yield all effects of a decision, in the form of `effect_in`.

    Args:
        external: reply slots of the external requests.
    """
    match decided:
        case RequestRouted(request_id=name) if name in external:
            to = decided.worker_id, decided.worker_epoch, decided.rank
            yield DestinationSelected, external[name], name, decided.attempt, *to
        case RequestRouted():
            key = decided.request_id, decided.stage, decided.attempt, decided.rank
            yield _order(WorkItem, decided, *key)
        case RequestRejected():
            yield ResponseEnded, decided.reply_slot, decided.request_id, 0, decided.message
        case RequestRepeated():
            yield RequestLocated, decided.reply_slot, decided.request_id, decided.offset
        case RequestAborted():
            if decided.worker_id:
                yield _order(WorkCancelled, decided, decided.request_id, decided.attempt)
            if decided.holder is not None:
                yield _order(WorkCancelled, decided.holder, decided.request_id, decided.attempt)
            yield ResponseEnded, decided.reply_slot, decided.request_id, decided.attempt, decided.message
        case KvReleased():
            yield _order(ReleaseKv, decided.holder, decided.request_id, decided.attempt)
        case RouteAnswered():
            answer = decided.choice, decided.candidates, decided.would_wait, decided.message
            yield RouteResponse, decided.reply_slot, decided.request_id, *answer
        case CommandSent():
            for target in decided.targets:
                yield _order(WorkerCommand, target, decided.command_id, decided.action)
            if decided.reason is not None:
                yield CommandResponse, decided.reply_slot, decided.command_id, (), decided.message
        case AdapterPlaced():
            if decided.unloaded:
                yield _order(WorkerCommand, decided.target, f"{decided.command_id}{UNLOAD}", "unload_lora")
            yield _order(WorkerCommand, decided.target, decided.command_id, "load_lora")
        case CommandEnded():
            yield CommandResponse, decided.reply_slot, decided.command_id, decided.outcomes, ""
        case CacheResyncRequested():
            yield _order(ReannounceCache, decided, decided.rank)
        case _:
            return


def _order(
    kind: type[Event], to: CommandTarget | RequestRouted | RequestAborted | CacheResyncRequested, *key: object
) -> Effect:
    return kind, work_topic(to.pool).name, to.slot, to.worker_id, to.worker_epoch, *key


def effect_in(record: Record, event: Event) -> Effect | None:
    """Return what identifies the effect in a record that a router wrote; None if no decision has such an effect."""
    match event:
        case WorkItem():
            key: Effect = event.request_id, event.stage, event.attempt, event.rank
        case WorkCancelled() | ReleaseKv():
            key = event.request_id, event.attempt
        case WorkerCommand():
            key = event.command_id, event.command.action
        case ReannounceCache():
            key = (event.rank,)
        case ResponseEnded(error=error) if error is not None:
            return ResponseEnded, record.partition, event.request_id, event.attempt, error.message
        case RequestLocated():
            return RequestLocated, record.partition, event.request_id, event.offset
        case DestinationSelected():
            key = event.attempt, event.worker_id, event.worker_epoch, event.rank
            return DestinationSelected, record.partition, event.request_id, *key
        case RouteResponse(error=error):
            answer = event.choice, event.candidates, event.would_wait, "" if error is None else error.message
            return RouteResponse, record.partition, event.request_id, *answer
        case CommandResponse(error=error):
            message = "" if error is None else error.message
            return CommandResponse, record.partition, event.command_id, event.outcomes, message
        case _:
            return None
    return type(event), record.topic, record.partition, event.worker_id, event.worker_epoch, *key


@dataclass(frozen=True, slots=True)
class _Decided:
    decided: JournalRecord
    subject: str
    at_us: int


class Effects:
    """Effects of one group, checked against the valid records of its journal.

    Attributes:
        external: reply slots of the external requests, by id.
    """

    def __init__(self) -> None:
        self.external: dict[str, int] = {}
        self._valid: list[_Decided] = []
        self._epochs: dict[Effect, list[int]] = {}  # owners that decided each effect
        self._sent: Counter[tuple[Effect, str]] = Counter()  # by writer
        self._written: set[Effect] = set()

    def on_decision(self, decided: JournalRecord, at_us: int) -> None:
        """Note a valid record of the journal."""
        subject = getattr(decided, "request_id", "") or getattr(decided, "command_id", "")
        self._valid.append(_Decided(decided, subject, at_us))
        for effect in effects_of(decided, self.external):
            self._epochs.setdefault(effect, []).append(decided.owner_epoch)

    def on_sent(self, record: Record, event: Event, writer: str, claims: list[int]) -> None:
        """Check a record of a router on `tokens` or on a work topic.

        Args:
            writer: incarnation of the router that wrote it.
        """
        effect = effect_in(record, event)
        epochs = [] if effect is None else self._epochs.get(effect, [])
        if effect is None or not epochs:
            raise Violation(f"effect before journal: {writer} wrote {event} without a valid decision in the journal")
        epoch = getattr(event, "owner_epoch", -1)
        is_again = isinstance(event, SENT_AGAIN) and epoch in claims
        if not (epoch in epochs or (is_again and epoch > min(epochs))):
            raise Violation(f"{writer} wrote {event} with a wrong epoch: {epochs} decided, and {claims} are its own")
        self._written.add(effect)
        self._sent[effect, writer] += 1
        if not isinstance(event, ReannounceCache) and self._sent[effect, writer] > len(epochs) * len(claims):
            raise Violation(
                f"{writer} wrote {event} {self._sent[effect, writer]} times for {len(epochs)} decisions in"
                f" {len(claims)} ownerships"
            )

    def check_durable(self, reused: Counter[str]) -> None:
        """Check that no effect of the valid decisions is missing. Raises Violation.

        Args:
            reused: number of requests by id. If an id was used again, a later owner does not send effects for it.
        """
        later: dict[str, _Decided] = {}  # next decision about the same request or command
        newest = self._valid[-1].decided.owner_epoch if self._valid else -1
        for one in reversed(self._valid):
            following = later.get(one.subject)
            if one.subject:
                later[one.subject] = one
            decided, is_replaced = one.decided, newest > one.decided.owner_epoch
            for effect in effects_of(decided, self.external):
                if effect in self._written:
                    continue
                # A turn sends no work that a later decision of the turn made void, and a new owner none that any did.
                was_void = following is not None and (is_replaced or following.at_us - one.at_us < TURN_US)
                match decided:
                    case RequestRouted() | CommandSent() if was_void:
                        continue
                    case CacheResyncRequested() if is_replaced:
                        continue  # a new owner only orders it for workers that are still there
                if not (is_replaced and reused[one.subject] > 1):
                    raise Violation(f"lost effect: {effect} of the valid decision {decided} was never sent")
