"""Build the timeline of one request from the steps of a `JournalReader`.

Several requests may use the same ID, one after the other. A use begins with the first decision about a submission.
Progress events count only if they are from the request's current attempt and worker epoch, as in
`forebay.core.state.requests`.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple, get_args

import msgspec

from forebay.core.phases import Phase
from forebay.core.routing.plan import Plan
from forebay.core.state.active_request import ActiveRequest
from forebay.core.state.transitions import REPORTED, TRANSITIONS
from forebay.core.ttft_parts import Part, TimeByPart
from forebay.core.world import World
from forebay.events.base import U64_BYTES, hex_digest
from forebay.events.decisions import (
    AdapterPlaced,
    KvReleased,
    OwnerClaimed,
    RequestAborted,
    RequestHeld,
    RequestRejected,
    RequestRepeated,
    RequestRouted,
    RouteAnswered,
)
from forebay.events.fleet import IngressLost, OwnershipAnnounced, WorkerFact, WorkerLost
from forebay.events.progress import (
    EncodeFinished,
    FirstTokenEmitted,
    OnboardedTokens,
    OutputGrown,
    PrefillFinished,
    ProgressEvent,
    RequestFailed,
    RequestFinished,
    RequestProgress,
    StageEnd,
    TransferFailed,
)
from forebay.events.requests import RequestCancelled, RequestResumed, RequestSubmitted, RouteQueried
from forebay.events.topics import DECISIONS, FLEET, PROGRESS, REQUESTS
from forebay.events.trace_ids import trace_id_of
from forebay.events.transfer import Prefilled
from forebay.journal.reader import Step
from forebay.replay.explain.decisions import excluded_ranks, routing_of, why_held
from forebay.replay.explain.explanation import (
    Ending,
    ExcludedRank,
    Explanation,
    FirstTokenTiming,
    Routing,
    State,
    Submission,
    SubmissionEvent,
    TimelineEntry,
    TokenSource,
)
from forebay.replay.explain.find import RequestRecord, starts_use
from forebay.replay.explain.selection_changes import changes_of
from forebay.replay.explain.wording import (
    choice_text,
    end_text,
    first_token_text,
    held_text,
    placed_text,
    progress_text,
    released_text,
    routed_text,
    takeover_text,
    worker_text,
)
from forebay.replay.takeover import Takeover

STATE_AT: dict[str, State] = {"encode": "encode", "prefill": "remote_prefill", "decode": "transfer"}
ON_WORKER = (*STATE_AT.values(), "prefill", "decode")
PHASES = frozenset(Phase)
TIMELINE_TOPICS = (REQUESTS.name, PROGRESS.name, FLEET.name)  # topics with events that may be about a request

TimelineEvent = ProgressEvent | WorkerFact | RequestCancelled | RequestResumed


class _Place(NamedTuple):
    """Where an entry is on the log, and the owner's clock; None if no owner has applied it yet."""

    topic: str
    offset: int
    now_us: int | None


class Timeline:
    """Explains the last request with a given ID, from the steps of a `JournalReader`.

    The caller registers `on_plan` with the reader's world. If the request is already active where the reader begins,
    the timeline starts there, without the submission.
    """

    def __init__(self, request_id: str, world: World) -> None:
        self.request_id = request_id
        self._world = world
        self._now_us = world.now_us
        self._owner_epoch = world.fleet.owner_epoch
        self._takeover: Takeover | None = None  # by the owner that reads the events now
        self._in_flight: set[str] = set()  # at the takeover, and not ended since
        self.is_behind = False  # whether the last step has events that were written before the takeover
        self._plans: deque[Routing] = deque()
        self._submission_event: tuple[SubmissionEvent, int] | None = None
        self._ingresses: set[str] = set()  # incarnations of the ingresses whose clients wait
        self._clear(None, world.now_us)
        request = world.requests.get(request_id)
        if request is not None:
            self._begin_in_flight(request)

    @property
    def begun(self) -> bool:
        return self._state is not None

    @property
    def over(self) -> bool:
        return self._ending is not None

    def on_plan(self, plan: Plan, *, with_changes: bool) -> None:
        if plan.request.request_id == self.request_id:
            routing = routing_of(self._world, plan)
            if with_changes:
                changes, notes = changes_of(self._world, plan)
                routing = msgspec.structs.replace(routing, changes=changes, notes=notes)
            self._plans.append(routing)

    def apply(self, step: Step) -> None:
        """Apply one step: first its events, then its decision."""
        self.is_behind = False
        for run, events in step.runs():
            self._flush()
            self._now_us = run.now_us
            if self._takeover is not None:
                self._takeover.settle(run.now_us)
            if run.topic in TIMELINE_TOPICS:
                for offset, event in events:
                    self._consume(run.topic, offset, event)
        place = _Place(DECISIONS.name, step.offset, self._now_us)
        record = step.record
        if isinstance(record, RequestRecord) and record.request_id == self.request_id:
            self._decide(record, place)
        elif isinstance(record, AdapterPlaced) and self._state in ("queued", "waiting"):
            if self._submission is not None and self._submission.lora_name == record.lora_name:
                self._add("adapter_placed", placed_text(record), place)
        elif isinstance(record, OwnerClaimed):
            self._takeover = Takeover.of(step.offset, record, self._world, self._takeover)
            self._in_flight = {one.submitted.request_id for one in self._world.requests.active()}
            if self.begun and not self.over:
                self._entries.append(self._takeover)
        self._flush()

    def continue_in(self, world: World) -> None:
        """Continue in the world of a snapshot. The caller registers `on_plan`."""
        self._world = world

    def observe(self, topic: str, offset: int, event: TimelineEvent, now_us: int | None) -> None:
        """Add an event that may be about the request; `now_us` is None if no owner has applied the event yet."""
        place = _Place(topic, offset, now_us)
        if not self.begun:
            return
        if isinstance(event, WorkerFact):
            self._observe_worker(event, place)
        elif event.request_id != self.request_id:
            return
        elif isinstance(event, RequestCancelled):
            text = f"cancellation requested: {event.reason}"
            others = self._ingresses - {event.ingress_incarnation} if event.ingress_incarnation else set()
            self._ingresses = others or self._ingresses
            self._add("cancel_requested", text, place, event, counted=not self.over and not others)
        elif isinstance(event, RequestResumed):
            counted = not self.over and bool(self._ingresses)
            if counted:
                self._ingresses.add(event.ingress_incarnation)
            self._add("resumed", "a client reads the response at another ingress", place, event, counted=counted)
        elif isinstance(event, RequestProgress):
            self._observe_progress(event, place)

    def explanation(self, *, diverged: bool) -> Explanation:
        """Return the explanation. The caller fills in the fields that depend on the search and on the reader."""
        return Explanation(
            request_id=self.request_id,
            kind="query" if isinstance(self._event, RouteQueried) else "request",
            state="unknown" if self._state is None or (diverged and not self.over) else self._state,
            submitted=self._submission,
            routings=tuple(self._routings),
            first_token=self._first_token,
            output_tokens=self._output_tokens,
            ending=self._ending,
            timeline=tuple(chain.from_iterable(self._shown(one) for one in self._entries)),
        )

    def _clear(self, event: SubmissionEvent | None, zero_us: int) -> None:
        self._event = event
        self._zero_us = zero_us
        self._state: State | None = None
        self._submission: Submission | None = None
        self._routings: list[Routing] = []
        self._first_token: FirstTokenTiming | None = None
        self._output_tokens: int | None = None
        self._ending: Ending | None = None
        self._entries: list[TimelineEntry | Takeover] = []
        self._times: TimeByPart | None = None  # None if the beginning is missing
        self._on: tuple[int, str, int] = (0, "", 0)  # attempt, worker ID, worker epoch
        self._ingresses = {event.ingress_incarnation} - {""} if isinstance(event, RequestSubmitted) else set()
        self._stage = "aggregated"
        self._embedded = False  # the encoded images and videos wait to be fetched
        self._kept_by: tuple[str, int] | None = None  # worker and epoch that keep its KV to be fetched
        self._kept: Prefilled | None = None  # the last KV that a prefill worker kept

    def _begin_in_flight(self, request: ActiveRequest) -> None:
        self._state = next(state for state in get_args(State) if state == request.phase)
        self._stage, self._embedded = request.stage, request.encoded is not None
        self._kept = kept = request.prefilled
        self._kept_by = None if kept is None else (kept.worker_id, kept.worker_epoch)
        self._on = request.stage_attempt, request.worker_id, request.worker_epoch
        submitted = request.submitted
        self._ingresses = set(submitted.ingresses)
        self._submission = Submission(
            offset=submitted.offset,
            model=self._world.pools[submitted.pool].model,
            lora_name=submitted.lora_name,
            prompt_tokens=submitted.prompt_tokens,
            full_blocks=len(submitted.blocks),
            tie_seed=hex_digest(submitted.tie_seed),
            hints=msgspec.to_builtins(submitted.hints),
            tenant=submitted.tenant,
        )
        where = f", attempt {request.stage_attempt} on {request.worker_id}" if request.on_worker else ""
        text = f"already active ({request.phase}{where}); this log does not hold earlier events"
        self._add("taken_up", text, _Place(REQUESTS.name, submitted.offset, self._zero_us))

    def _consume(self, topic: str, offset: int, event: Any) -> None:
        self._flush()
        ended = {event.request_id} if isinstance(event, RequestFinished | RequestFailed) else set()
        if self._takeover is not None and ended <= self._in_flight and self._takeover.count(event):
            self.is_behind = True
        self._in_flight -= ended
        match event:
            case RequestSubmitted() | RouteQueried():
                if event.request_id == self.request_id:
                    self._submission_event = event, offset
            case OwnershipAnnounced():
                self._owner_epoch = max(self._owner_epoch, event.owner_epoch)
            case IngressLost():
                self._ingresses.discard(event.incarnation)
            case ProgressEvent() | RequestCancelled() | RequestResumed() | WorkerFact():
                self.observe(topic, offset, event, self._now_us)

    def _flush(self) -> None:
        """Record a repeated submission: no decision followed it, so the ID was already in use."""
        if self._submission_event is not None and self.begun:
            place = _Place(REQUESTS.name, self._submission_event[1], self._now_us)
            self._add("submitted_again", "submitted again with the same content; ignored", place, counted=False)
        self._submission_event = None

    def _decide(self, record: RequestRecord, place: _Place) -> None:
        if isinstance(record, RequestRejected) and record.reason == "duplicate_id" and self.begun:
            self._submission_event = None
            text = f"another request with this ID is rejected: {record.message}"
            self._add("duplicate_refused", text, place, counted=False)
            return
        if not self.begun or starts_use(record, held=self._state == "queued"):
            self._begin()
        for choice in () if isinstance(record, RequestRepeated | RequestAborted | KvReleased) else record.pools:
            self._add("pool_chosen", choice_text(choice, self._prompt_tokens), place)
        match record:
            case RequestHeld():
                self._state = "queued"
                self._add("held", f"{held_text(record)}: {why_held(self._world, record)}", place)
            case RequestRouted():
                self._route(record, place)
            case RequestRejected() | RouteAnswered() if record.reason is not None:
                left_out = excluded_ranks(self._world, self._event, record)
                self._end("rejected", record.reason, record.message, place.now_us, left_out=left_out)
                self._add("rejected" if isinstance(record, RequestRejected) else "answered", end_text(record), place)
            case RequestRepeated():
                text = f"the request at {REQUESTS.name} offset {record.offset} has the same idempotency key"
                self._end("repeated", "", text, place.now_us)
                self._add("repeated", f"not run: {text}", place)
            case RequestAborted():
                self._end("aborted", record.reason, record.message, place.now_us)
                self._add("aborted", end_text(record), place)
            case KvReleased():
                self._add("kv_released", released_text(record), place)
            case RouteAnswered():
                text = self._selection_text(record, place, attempt=0, would_wait=record.would_wait)
                self._end("answered", "", "", place.now_us)
                self._add("answered", text, place)

    def _begin(self) -> None:
        if self._submission_event is None:  # the log does not hold the submission
            self._clear(None, self._now_us)
            self._state = "submitted"
            return
        event, offset = self._submission_event
        self._submission_event = None
        self._clear(event, self._now_us)
        self._state = "submitted"
        self._submission = submission = submission_of(event, offset, self._now_us)
        verb = "route query" if isinstance(event, RouteQueried) else "submitted"
        called = f"call of {event.routing.endpoint}, " if event.routing.endpoint else ""
        text = f"{verb}: {called}{submission.prompt_tokens:,} prompt tokens for {submission.model}"
        self._times = TimeByPart(self._now_us)
        if self._takeover is not None and self._takeover.is_late(event):
            self._entries.append(self._takeover)
        self._add("submitted", text, _Place(REQUESTS.name, offset, self._now_us), event)

    def _route(self, record: RequestRouted, place: _Place) -> None:
        text = self._selection_text(record, place, waited_us=record.waited_us)
        self._state, self._stage = STATE_AT.get(record.stage, "prefill"), record.stage
        if record.stage != "decode":
            self._kept_by = None
        self._on = record.attempt, record.worker_id, record.worker_epoch
        self._add("routed", text, place._replace(now_us=self._routings[-1].now_us))

    def _selection_text(self, record: RequestRouted | RouteAnswered, place: _Place, **fields: Any) -> str:
        """Return a sentence about a selection, and keep the derived routing decision that belongs to the record."""
        routing = self._plans.popleft()
        assert routing.table_digest == record.table_digest, "the reader compares the digests"
        fields |= {"stage": record.stage, "prefill": record.prefill, "after_us": routing.now_us - self._zero_us}
        self._routings.append(msgspec.structs.replace(routing, offset=place.offset, **fields))
        return routed_text(self._routings[-1])

    def _observe_worker(self, event: WorkerFact, place: _Place) -> None:
        worker = event.worker_id, event.worker_epoch
        counted = event.owner_epoch >= self._owner_epoch  # otherwise the event is stale
        if self._state == "waiting" and worker == self._kept_by:
            if counted and isinstance(event, WorkerLost):
                self._kept_by = None
                self._add("holder_lost", f"worker {event.worker_id}, which keeps its KV, is lost", place)
            return
        if self._state not in ON_WORKER or worker != self._on[1:]:
            return
        if counted and isinstance(event, WorkerLost):
            self._state, self._embedded, self._kept_by = "waiting", False, None
        self._add(*worker_text(event), place, counted=counted)

    def _observe_progress(self, event: RequestProgress, place: _Place) -> None:
        if self.over or (event.attempt, event.worker_id, event.worker_epoch) != self._on or not self._follows(event):
            tag = type(event).__struct_config__.tag
            text = f"{event.worker_id}, attempt {event.attempt}, reports {tag}: stale, ignored"
            self._add("outdated", text, place, event, counted=False)
            return
        if isinstance(event, FirstTokenEmitted):
            self._state, self._kept_by = "decode", None
            first = self._first(event, place.now_us)
            self._first_token = self._first_token or first  # a later attempt continues the response
            self._add("first_token", first_token_text(first, event, self._prompt_tokens), place, event)
            return
        saved = None
        if isinstance(event, PrefillFinished):
            saved = saved_us(self._world, event.worker_id, event.prefilled.rank, event.onboarded)
        what, text = progress_text(event, keeps_kv=self._kept_by is not None, saved_us=saved)
        match event:
            case OutputGrown():
                self._output_tokens = event.output_tokens
                if self._entries and getattr(self._entries[-1], "what", "") == what:  # a long response has hundreds
                    self._entries.pop()
            case RequestFinished():
                self._output_tokens = event.output_tokens
                self._end("finished", event.finish_reason, "", place.now_us)
            case RequestFailed():
                self._end("failed", "", event.error, place.now_us)
            case _ if isinstance(event, StageEnd):  # successful or not, the request waits for its next worker
                self._state, self._embedded, self._kept_by = "waiting", isinstance(event, EncodeFinished), None
                if isinstance(event, PrefillFinished):
                    self._kept, self._kept_by = event.prefilled, (event.worker_id, event.worker_epoch)
        self._add(what, text, place, event)

    def _follows(self, event: RequestProgress) -> bool:
        """Return whether the core would accept the event in the current state."""
        rule = TRANSITIONS[REPORTED[type(event)]]
        match event:
            case TransferFailed():
                return self._state in rule.sources and (self._embedded or self._kept_by is not None)
            case RequestFinished():
                return self._stage not in ("encode", "prefill")
            case RequestFailed():
                return self._stage != "prefill"
            case _:
                return self._state in rule.sources

    def _first(self, event: FirstTokenEmitted, now_us: int | None) -> FirstTokenTiming:
        answers = (one for one in self._routings if one.stage not in ("encode", "prefill"))
        routing = next((one for one in answers if one.attempt == event.attempt), None)
        predicted, saved, parts_us = None, None, None
        if routing is not None:
            seen = routing.candidates[routing.winner].seen
            saved = saved_us(self._world, event.worker_id, seen.rank, event.onboarded)
            if routing.stage != "decode" and self._prompt_tokens is not None:
                predicted = min(seen.device_overlap * routing.block_size, self._prompt_tokens)
        if self._times is not None and (until_us := now_us or event.at_us):
            spent = self._times.until(until_us, event.transfer_us)
            parts_us = {part: spent[part] for part in get_args(Part) if spent.get(part)}
        return FirstTokenTiming(
            attempt=event.attempt,
            worker_id=event.worker_id,
            ttft_us=self._since(now_us),
            wall_ttft_us=self._wall_since(event.at_us),
            cached_tokens=event.cached_tokens,
            predicted_tokens=predicted,
            transferred_bytes=event.transferred_bytes,
            transfer_us=event.transfer_us,
            sources=tokens_by_source(event, self._prompt_tokens, self._kept),
            loads_us={one.tier: one.us for one in event.onboarded},
            saved_us=saved,
            parts_us=parts_us,
        )

    @property
    def _prompt_tokens(self) -> int | None:
        return None if self._submission is None else self._submission.prompt_tokens

    def _end(
        self,
        state: State,
        reason: str,
        text: str,
        now_us: int | None,
        *,
        left_out: tuple[ExcludedRank, ...] = (),
    ) -> None:
        self._state = state
        self._ending = Ending(
            state=state,
            reason=reason,
            text=text,
            attempt=self._on[0],
            output_tokens=self._output_tokens,
            duration_us=self._since(now_us),
            left_out=left_out,
        )

    def _since(self, now_us: int | None) -> int | None:
        """Return microseconds since the submission, or None if either time is unknown."""
        if now_us is None or self._submission is None or self._submission.now_us is None:
            return None
        return now_us - self._submission.now_us

    def _wall_since(self, wall_us: int) -> int | None:
        began_us = 0 if self._submission is None else self._submission.wall_us
        return wall_us - began_us if wall_us and began_us else None

    def _add(self, what: str, text: str, place: _Place, event: Any = None, *, counted: bool = True) -> None:
        """Add an entry about a journal record, or about an input event, which says when a late event was written."""
        if self._times is not None and place.now_us is not None and self._state in PHASES:
            self._times.enter(Phase(self._state), place.now_us)
        fields: dict[str, Any] = {"counted": counted}
        if self._takeover is not None and self._takeover.is_late(event):
            fields["written_us"] = event.at_us
            text += f"; written at {(event.at_us - self._zero_us) / 1e6:+.3f} s, before the takeover"
        self._entries.append(self._entry(what, text, place, **fields))

    def _entry(self, what: str, text: str, place: _Place, **fields: Any) -> TimelineEntry:
        after_us = None if place.now_us is None else place.now_us - self._zero_us
        return TimelineEntry(what=what, text=text, after_us=after_us, **place._asdict(), **fields)

    def _shown(self, entry: TimelineEntry | Takeover) -> Iterator[TimelineEntry]:
        if isinstance(entry, TimelineEntry):
            yield entry
            return
        place, text = _Place(DECISIONS.name, entry.offset, entry.at_us), f"no router owns the group: {entry.text}"
        if outage_us := entry.outage_us:
            began = place._replace(now_us=entry.begin_us)
            yield self._entry("outage", text, began, outage_us=outage_us, delayed=entry.delayed)
        yield self._entry("owner_claimed", takeover_text(entry.claim), place)


def submission_of(event: SubmissionEvent, offset: int, now_us: int | None) -> Submission:
    submission = Submission(
        offset=offset,
        now_us=now_us,
        wall_us=event.at_us,
        model=event.model,
        lora_name=event.lora_name,
        prompt_tokens=event.prompt_tokens,
        full_blocks=len(event.sequence_hashes) // U64_BYTES,
        tie_seed=hex_digest(event.tie_seed),
        hints=msgspec.to_builtins(event.routing),
    )
    if not isinstance(event, RequestSubmitted):
        return submission
    return msgspec.structs.replace(
        submission,
        max_tokens=event.sampling.max_tokens,
        timeout_us=event.timeout_us,
        anonymised=event.withheld_tokens > 0,
        tenant=event.tenant,
        key_id=event.key_id,
        traceparent=event.traceparent,
        trace_id=trace_id_of(event.request_id, event.reply_key, event.traceparent),
    )


def tokens_by_source(
    event: FirstTokenEmitted, prompt_tokens: int | None, kept: Prefilled | None
) -> dict[TokenSource, int]:
    """Return the prompt tokens from each source, without sources of no tokens.

    Without `prompt_tokens`, the computed tokens are unknown. `kept` is the KV that a prefill worker kept for the
    request.
    """
    found: dict[TokenSource, int] = {"device": 0}
    for one in event.onboarded:
        found[one.tier] = found.get(one.tier, 0) + one.tokens
    left = max(0, event.cached_tokens - sum(found.values()))
    if event.transferred_bytes and kept is not None and kept.bytes:
        found["transferred"] = min(left, round(event.transferred_bytes * kept.tokens / kept.bytes))
        left -= found["transferred"]
    found["device"] = left
    if prompt_tokens is not None:
        found["computed"] = max(0, prompt_tokens - event.cached_tokens)
    return {source: tokens for source, tokens in found.items() if tokens}


def saved_us(world: World, worker_id: str, rank: int, onboarded: Sequence[OnboardedTokens]) -> int | None:
    """Return how many microseconds sooner the tokens were loaded than they would have been computed, negative if later.

    The result is None if no tokens were loaded or the rank has not reported how long it computes a block.
    """
    worker = world.fleet.get(worker_id)
    if not onboarded or worker is None or rank not in worker.spec.ranks:
        return None
    costs = world.load.rank_load(worker_id, rank).costs
    if costs is None or not costs.prefill_block_us:
        return None
    tokens = sum(one.tokens for one in onboarded)
    return round(tokens / worker.spec.block_size * costs.prefill_block_us) - max(one.us for one in onboarded)
