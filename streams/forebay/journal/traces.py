"""Fold a journal into the spans of requests: one trace per request, with the times of the log.

Theory of operation. The fold gets each journal record after the events that the owner applied before it, so it has the
same order whatever program reads the log, and its spans depend on nothing but the log. Their ids are hashes. Times are
readings of the owner's clock, except for the beginning of a request, which is the time at which its ingress wrote it.
A trace is complete when the owner has read the end of its request. `docs/spans.md` describes the spans.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import msgspec

from forebay.core.phases import ON_WORKER, Phase
from forebay.core.state.requests import ACTIVE_REQUESTS_MAX
from forebay.core.state.transitions import DISPATCHED, REPORTED, TRANSITIONS
from forebay.events.decisions import (
    JournalRecord,
    OwnerClaimed,
    RequestAborted,
    RequestHeld,
    RequestRejected,
    RequestRepeated,
    RequestRouted,
)
from forebay.events.fleet import WorkerLost
from forebay.events.positions import JournalPosition
from forebay.events.progress import (
    EncodeFinished,
    FirstTokenEmitted,
    OutputGrown,
    PrefillFinished,
    RequestFailed,
    RequestFinished,
    RequestProgress,
    TransferFailed,
)
from forebay.events.requests import RequestCancelled, RequestSubmitted
from forebay.events.trace_ids import TraceIds
from forebay.journal.folds import FoldReader
from forebay.journal.snapshots import claim_at
from forebay.transport.base import Log

Attributes = dict[str, str | bool | int | float | list[str]]

TRACES_MAX = 256  # complete traces that wait for `take`
EVENTS_MAX = 128  # takeovers of one request that its span shows; the default limit of OpenTelemetry
OPERATIONS = {"completions": "text_completion", "embeddings": "embeddings"}  # names of GenAI; other APIs are chats


class SpanEvent(msgspec.Struct, frozen=True):
    name: str
    at_us: int
    attributes: Attributes = {}


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """One span.

    Attributes:
        parent_id: empty for the span of a request whose client sent no trace context.
        linked_id: span of the previous attempt; empty for none.
        error: reason of a failure, as one word; empty without a failure.
    """

    name: str
    span_id: str
    parent_id: str
    begin_us: int
    end_us: int
    attributes: Attributes = {}
    events: tuple[SpanEvent, ...] = ()
    linked_id: str = ""
    error: str = ""


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """All spans of a request that has ended, that of the whole request first."""

    trace_id: str
    request_id: str
    tenant: str
    spans: tuple[Span, ...]


@dataclass(slots=True)
class _OpenRequest:
    """Request in flight.

    Attributes:
        begin: position before the journal record that counts the submission.
        spans: children that have ended.
        since_us: beginning of the phase.
        details: attributes of the span of the queue, or of the newest attempt.
        place: number of this attempt, its worker and the worker's epoch.
        first_us: time of the first token of this attempt, 0 before it.
        fetchable: whether embeddings or KV wait to be fetched by the next attempt.
        is_complete: whether the client ended the response because it had all of it.
    """

    begin: JournalPosition
    tenant: str
    ids: TraceIds
    begin_us: int
    attributes: Attributes
    spans: list[Span] = field(default_factory=list)
    events: list[SpanEvent] = field(default_factory=list)
    phase: Phase = Phase.SUBMITTED
    since_us: int = 0
    details: Attributes = field(default_factory=dict)
    stage: str = ""
    place: tuple[int, str, int] = (0, "", -1)
    linked_id: str = ""
    first_us: int = 0
    transfer_us: int = 0
    fetchable: bool = False
    is_complete: bool = False

    def add(self, name: str, begin_us: int, end_us: int, key: str = "", attempt: int = 0, **others: Any) -> None:
        """Add a span, by default as a child of the request's span. `key` and `attempt` distinguish it from others."""
        fields = {"span_id": self.ids.span(key or name, attempt), "parent_id": self.ids.span(), **others}
        self.spans.append(Span(name=name, begin_us=begin_us, end_us=end_us, **fields))

    def enter(self, phase: Phase, now_us: int, error: str = "") -> None:
        """Enter the next phase, and add the spans of the phase that ends. `error` is why an attempt failed."""
        if self.phase is Phase.QUEUED:
            self.add("queue", self.since_us, now_us, attributes=self.details)
        elif self.phase in ON_WORKER:
            first = (SpanEvent("first_token", self.first_us),) if self.first_us else ()
            span_id, begin_us, number = self.ids.span(self.stage, self.place[0]), self.since_us, self.place[0]
            fields: dict[str, Any] = {"attributes": self.details, "events": first, "error": error}
            self.add("attempt", begin_us, now_us, self.stage, number, linked_id=self.linked_id, **fields)
            decode_us = self.first_us or now_us
            if self.stage == "decode" and self.first_us:
                decode_us = min(begin_us + self.transfer_us, self.first_us)
            work = {"aggregated": "prefill", "decode": "kv_transfer"}.get(self.stage, self.stage)
            if decode_us > begin_us or not self.first_us:
                self.add(work, begin_us, decode_us, f"{self.stage}/{work}", number, parent_id=span_id)
            if self.first_us:
                self.add("decode", decode_us, now_us, f"{self.stage}/decode", number, parent_id=span_id)
            self.linked_id, self.first_us = span_id, 0
        self.phase, self.since_us = phase, now_us


class TraceReader(FoldReader):
    """Reads a journal, and keeps the traces of the requests that ended, and the requests in flight.

    Attributes:
        traces: complete traces since the last `take`, of requests that ended at journal offset `exports_from` or later.
        unknown: number of routings of requests that get no trace, because the log does not have their beginning.
        overflowed: number of requests that get no trace, because `ACTIVE_REQUESTS_MAX` others were in flight.
    """

    def __init__(self, log: Log, partition: int, begin: JournalPosition, exports_from: int) -> None:
        """Begin at a position at which no request was in flight that ends at journal offset `exports_from` or later."""
        super().__init__(log, partition, begin)
        self.traces: list[Trace] = []
        self.unknown = 0
        self.overflowed = 0
        self._exports_from = exports_from
        self._offset = begin.journal_offset
        self._open: dict[str, _OpenRequest] = {}
        self._undecided: dict[str, _OpenRequest] = {}
        self._claim: SpanEvent | None = None

    async def read(self, end: int, is_full: Callable[[], bool] | None = None) -> None:
        """Read the journal up to offset `end`, or until traces should be taken. Raises LogError."""
        if self._validity is None and (claim := await claim_at(self._log, self._partition, self._begin.owner_epoch)):
            self.claimed(claim, self._begin.owner_epoch)
        await super().read(end, is_full or self.is_full)

    def take(self) -> list[Trace]:
        """Return the traces since the last call."""
        taken, self.traces = self.traces, []
        return taken

    def is_full(self) -> bool:
        """Return whether traces should be taken before the fold continues."""
        return len(self.traces) >= TRACES_MAX

    def oldest(self) -> JournalPosition | None:
        oldest = next(chain(self._open.values(), self._undecided.values()), None)
        return None if oldest is None else oldest.begin

    def claimed(self, claim: OwnerClaimed, offset: int) -> None:
        attributes: Attributes = {"forebay.owner.id": claim.owner_id, "forebay.owner.epoch": offset}
        if claim.previous_seen_us:
            attributes["forebay.owner.previous_seen_us"] = claim.previous_seen_us
        self._claim = SpanEvent("owner_claimed", claim.at_us, attributes)

    def begin_record(self, offset: int, *, has_events: bool) -> None:
        self._offset = offset
        if has_events:
            self._undecided.clear()  # the owner knew the ids, or the submissions had no effect

    def apply_event(self, event: object, offset: int, begin: JournalPosition) -> None:
        match event:
            case RequestSubmitted():
                self._submit(event, offset, begin)
            case RequestCancelled() if (request := self._open.get(event.request_id)) is not None:
                request.is_complete = request.is_complete or event.is_complete
            case WorkerLost() if event.owner_epoch >= self.fleet_epoch:
                for request in self._open.values():
                    if request.phase in ON_WORKER and request.place[1:] == (event.worker_id, event.worker_epoch):
                        request.enter(Phase.WAITING, self.now_us, "worker_lost")
                        request.fetchable = False
            case _ if isinstance(event, RequestProgress) and (request := self._open.get(event.request_id)) is not None:
                if _follows(request, event):
                    self._progress(request, event)
            case _:
                pass

    def _submit(self, event: RequestSubmitted, offset: int, begin: JournalPosition) -> None:
        if len(self._open) >= ACTIVE_REQUESTS_MAX:
            self.overflowed += 1
            return
        now_us, ids = self.now_us, TraceIds.of(event, offset)
        begin_us = min(event.at_us or now_us, now_us)
        request = _OpenRequest(begin, event.tenant, ids, begin_us, _attributes_of(event))
        request.add("ingress", begin_us, now_us, attributes={"forebay.ingress.id": event.ingress_id})
        if self._claim is not None and 0 < event.at_us < self._claim.at_us:
            request.events.append(self._claim)  # the request waited for this owner
        self._undecided[event.request_id] = request

    def _progress(self, request: _OpenRequest, event: RequestProgress) -> None:
        usage, details, now_us = request.attributes, request.details, self.now_us
        match event:
            case FirstTokenEmitted():
                request.phase, request.first_us, request.transfer_us = Phase.DECODE, now_us, event.transfer_us
                details["forebay.cached_tokens"] = event.cached_tokens
                if event.transferred_bytes:
                    details["forebay.transferred_bytes"] = event.transferred_bytes
                usage.setdefault("gen_ai.usage.cache_read.input_tokens", event.cached_tokens)
                usage.setdefault("gen_ai.response.time_to_first_chunk", (now_us - request.begin_us) / 1e6)
            case OutputGrown():
                usage["gen_ai.usage.output_tokens"] = event.output_tokens
            case RequestFinished():
                usage["gen_ai.usage.output_tokens"] = event.output_tokens
                usage["gen_ai.usage.cache_read.input_tokens"] = event.cached_tokens
                usage["gen_ai.response.finish_reasons"] = [event.finish_reason]
                self._end(event.request_id, request, "finished")
            case RequestFailed():
                self._end(event.request_id, request, "failed", "engine_error")
            case _:  # the end of a stage
                if isinstance(event, PrefillFinished):
                    details["forebay.cached_tokens"] = event.prefilled.cached_tokens
                request.fetchable = isinstance(event, EncodeFinished | PrefillFinished)
                error = "" if request.fetchable else str(type(event).__struct_config__.tag).removeprefix("progress.")
                request.enter(Phase.WAITING, now_us, error)

    def apply_record(self, record: JournalRecord) -> None:
        match record:
            case RequestHeld() if (request := self._accept(record.request_id)) is not None:
                request.enter(Phase.QUEUED, self.now_us)
                request.details = {"forebay.queue.class": record.queue_class, "forebay.queue.ahead": record.ahead}
            case RequestRouted():
                is_first = record.attempt + record.earlier_attempts == 1
                request = self._accept(record.request_id) if is_first else self._open.get(record.request_id)
                if request is None:
                    self.unknown += self._offset >= self._exports_from
                else:
                    self._route(request, record)
            case RequestRejected():
                is_new = record.reason == "duplicate_id"
                if (request := self._accept(record.request_id, is_new=is_new)) is not None:
                    self._end(record.request_id, request, "rejected", record.reason)
            case RequestRepeated() if (request := self._accept(record.request_id, is_new=True)) is not None:
                self._end(record.request_id, request, "repeated")
            case RequestAborted() if (request := self._accept(record.request_id)) is not None:
                if request.is_complete:
                    request.attributes["gen_ai.response.finish_reasons"] = ["stop"]
                    self._end(record.request_id, request, "finished")
                else:
                    request.attributes["forebay.reason"] = record.reason
                    error = "" if record.reason == "cancelled" else record.reason
                    self._end(record.request_id, request, "aborted", error)
            case OwnerClaimed():
                self.claimed(record, self._offset)
                for request in self._open.values():
                    if self._claim is not None and len(request.events) < EVENTS_MAX:
                        request.events.append(self._claim)
            case _:
                pass

    def _accept(self, request_id: str, *, is_new: bool = False) -> _OpenRequest | None:
        """Return the request that a decision is about. The first decision about a submission makes it open.

        If it `is_new`, its id may belong to another request in flight. Then it is not opened.
        """
        found = self._open.get(request_id)
        if found is not None and not is_new:
            return found
        request = self._undecided.pop(request_id, None)
        if request is not None and found is None:
            self._open[request_id] = request
        return request

    def _route(self, request: _OpenRequest, record: RequestRouted) -> None:
        stage, number, now_us = record.stage, record.attempt, self.now_us
        phase = TRANSITIONS[DISPATCHED[stage]].target
        assert phase is not None, "the request is on a worker"
        request.enter(phase, now_us, "superseded")
        request.add("decision", now_us, now_us, f"{stage}/decision", number, attributes=_decision(record))
        request.stage, request.place = stage, (number, record.worker_id, record.worker_epoch)
        request.details = {
            "forebay.stage": stage,
            "forebay.attempt": number,
            "forebay.pool": record.pool,
            "forebay.worker.id": record.worker_id,
            "forebay.worker.epoch": record.worker_epoch,
            "forebay.worker.rank": record.rank,
        }

    def _end(self, request_id: str, request: _OpenRequest, state: str, error: str = "") -> None:
        if self._open.get(request_id) is request:
            del self._open[request_id]
        request.enter(Phase.WAITING, self.now_us, error)
        if self._offset < self._exports_from:
            return
        attributes = request.attributes | {"forebay.state": state} | ({"error.type": error} if error else {})
        root = Span(
            name=f"{attributes['gen_ai.operation.name']} {attributes['gen_ai.request.model']}",
            span_id=request.ids.span(),
            parent_id=request.ids.parent,
            begin_us=request.begin_us,
            end_us=self.now_us,
            attributes=attributes,
            events=tuple(request.events),
            error=error,
        )
        spans = root, *request.spans
        self.traces.append(Trace(trace_id=request.ids.trace, request_id=request_id, tenant=request.tenant, spans=spans))


def _follows(request: _OpenRequest, event: RequestProgress) -> bool:
    """Return whether the core accepts an event in the phase of its request."""
    if request.place != (event.attempt, event.worker_id, event.worker_epoch):
        return False
    match event:
        case TransferFailed() if not request.fetchable:
            return False
        case RequestFinished() if request.stage in ("encode", "prefill"):
            return False
        case RequestFailed() if request.stage == "prefill":
            return False
        case _:
            return request.phase in TRANSITIONS[REPORTED[type(event)]].sources


def _attributes_of(event: RequestSubmitted) -> Attributes:
    """Return the attributes of a request that are known at its beginning."""
    api, model = event.task if event.rendering is None else event.rendering.api, event.lora_name or event.model
    attributes: Attributes = {
        "gen_ai.operation.name": OPERATIONS.get(api, "chat"),
        "gen_ai.provider.name": "forebay",
        "gen_ai.request.model": model,
        "gen_ai.request.max_tokens": event.sampling.max_tokens,
        "gen_ai.request.temperature": event.sampling.temperature,
        "gen_ai.request.top_p": event.sampling.top_p,
        "gen_ai.request.stream": event.rendering is not None and event.rendering.stream,
        "gen_ai.response.id": event.request_id,
        "gen_ai.response.model": model,
        "gen_ai.usage.input_tokens": event.prompt_tokens,
    }
    return attributes | ({"forebay.tenant": event.tenant, "forebay.key.id": event.key_id} if event.tenant else {})


def _decision(record: RequestRouted) -> Attributes:
    """Return what decided a routing: the terms of its cost, and what the runner-up would have cost."""
    terms = msgspec.structs.asdict(record.terms)
    attributes: Attributes = {
        "forebay.router.mode": record.mode,
        "forebay.candidates": record.candidates,
        "forebay.ties": record.ties,
        "forebay.cost": terms.pop("cost"),
        **{f"forebay.cost.{name}": value for name, value in terms.items() if value},
    }
    if (other := record.runner_up) is not None:
        attributes["forebay.runner_up.worker.id"] = other.worker_id
        attributes["forebay.runner_up.worker.rank"] = other.rank
        attributes["forebay.runner_up.cost"] = other.terms.cost
    if record.prefill is not None:
        attributes["forebay.prefill.reason"] = record.prefill.reason
    return attributes
