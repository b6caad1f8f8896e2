"""Build the timeline of one request from the steps of a `forebay.replay.walk.Walk`.

Several requests may use the same ID, one after the other. A use begins with the first decision about a submission.
Progress events count only if they are from the request's current attempt and worker epoch, as in
`forebay.core.state.requests`.
"""

from collections import deque
from collections.abc import Mapping
from typing import Any, get_args

import msgspec

from forebay.core.phases import Phase
from forebay.core.rederive import RecordedEvents
from forebay.core.routing.plan import Plan
from forebay.core.state.active_request import ActiveRequest
from forebay.core.state.transitions import REPORTED, TRANSITIONS
from forebay.core.step import CLOCK
from forebay.core.ttft_parts import Part, TimeByPart
from forebay.core.world import World
from forebay.events.decisions import (
    ConsumedRun,
    JournalRecord,
    KvReleased,
    OwnerClaimed,
    RequestAborted,
    RequestHeld,
    RequestRejected,
    RequestRouted,
    RouteAnswered,
)
from forebay.events.fleet import OwnershipAnnounced, WorkerFact, WorkerLost
from forebay.events.pools import PoolChoice
from forebay.events.progress import (
    AttemptRejected,
    EncodeFailed,
    EncodeFinished,
    FirstTokenEmitted,
    OutputGrown,
    PrefillFailed,
    PrefillFinished,
    ProgressEvent,
    RequestFailed,
    RequestFinished,
    RequestProgress,
    StageEnd,
    TransferFailed,
)
from forebay.events.requests import RequestCancelled, RequestSubmitted, RouteQueried
from forebay.events.topics import DECISIONS, FLEET, PROGRESS, REQUESTS
from forebay.events.transfer import Prefilled
from forebay.replay.explain.choices import routing_of
from forebay.replay.explain.explanation import (
    Ending,
    ExcludedRank,
    Explanation,
    FirstTokenTiming,
    QueueWait,
    Routing,
    State,
    Submission,
    TimelineEntry,
)
from forebay.replay.explain.find import RequestRecord, starts_use
from forebay.replay.explain.timeline_parts import (
    SubmissionEvent,
    choice_text,
    excluded_ranks,
    first_token_of,
    first_token_text,
    held_text,
    prefilled_text,
    queue_wait_of,
    released_text,
    routed_text,
    submission_of_event,
    submission_of_state,
    takeover_text,
    worker_text,
)
from forebay.replay.walk import Step

STATE_AT: dict[str, State] = {"encode": "encode", "prefill": "remote_prefill", "decode": "transfer"}
ON_WORKER = (*STATE_AT.values(), "prefill", "decode")
PHASES = frozenset(Phase)
TIMELINE_TOPICS = (REQUESTS.name, PROGRESS.name, FLEET.name)  # topics with events that may be about a request

TimelineEvent = ProgressEvent | WorkerFact | RequestCancelled


class Timeline:
    """Explains the last request with a given ID, from the steps of a `Walk` through the journal.

    The caller registers `on_plan` with the walk's world. If the request is already active where the walk begins, the
    timeline starts there, without the submission.
    """

    def __init__(self, request_id: str, world: World) -> None:
        self.request_id = request_id
        self._world = world
        self._now_us = world.now_us
        self._owner_epoch = world.fleet.owner_epoch
        self._choices: deque[Routing] = deque()
        self._submission_event: tuple[SubmissionEvent, int] | None = None
        self._clear(None, world.now_us)
        request = world.requests.get(request_id)
        if request is not None:
            self._begin_in_flight(request)

    @property
    def begun(self) -> bool:
        """Whether any record about the request has been seen."""
        return self._state is not None

    @property
    def over(self) -> bool:
        return self._ending is not None

    def on_plan(self, plan: Plan) -> None:
        """Keep a derived routing decision if it is about this request."""
        if plan.request.request_id == self.request_id:
            self._choices.append(routing_of(self._world, plan))

    def apply(self, step: Step, offsets: Mapping[str, int]) -> None:
        """Apply one step: first its input events, then its decision.

        Args:
            offsets: offset of the first input event of the step, by topic.
        """
        self._apply_events(step.record.consumed, step.events, offsets)
        self._apply_record(step.offset, step.record)

    def _apply_events(
        self, consumed: tuple[ConsumedRun, ...], events: RecordedEvents, begins: Mapping[str, int]
    ) -> None:
        taken = dict.fromkeys(events, 0)
        for run in consumed:
            self._flush()
            self._now_us = run.now_us
            if run.topic == CLOCK:
                continue
            begin = taken[run.topic]
            taken[run.topic] += run.count
            if run.topic in TIMELINE_TOPICS:
                some = events[run.topic][begin : begin + run.count]
                for offset, event in enumerate(some, begins[run.topic] + begin):
                    self._consume(run.topic, offset, event)

    def _apply_record(self, offset: int, record: JournalRecord) -> None:
        if isinstance(record, RequestRecord) and record.request_id == self.request_id:
            self._decide(offset, record)
        elif isinstance(record, OwnerClaimed) and self.begun and not self.over:
            self._add_entry("owner_claimed", takeover_text(record), self._now_us, DECISIONS.name, offset)
        self._flush()

    def observe(self, topic: str, offset: int, event: TimelineEvent, now_us: int | None) -> None:
        """Add an event that may be about the request; `now_us` is None if no owner has applied the event yet."""
        if not self.begun:
            return
        if isinstance(event, WorkerFact):
            self._observe_worker(offset, event, now_us)
        elif event.request_id != self.request_id:
            return
        elif isinstance(event, RequestCancelled):
            text = f"cancellation requested: {event.reason}"
            self._add_entry("cancel_requested", text, now_us, topic, offset, counted=not self.over)
        elif isinstance(event, RequestProgress):
            self._observe_progress(offset, event, now_us)

    def explanation(self, *, diverged: bool) -> Explanation:
        """Return the explanation. The caller fills in the fields that depend on the search and on the walk.

        Args:
            diverged: whether the walk ended at a divergence.
        """
        return Explanation(
            request_id=self.request_id,
            kind="query" if isinstance(self._event, RouteQueried) else "request",
            state="unknown" if self._state is None or (diverged and not self.over) else self._state,
            earlier_uses=None,
            derived_from=0,
            derived_to=0,
            submitted=self._submission,
            held=self._held,
            routings=tuple(self._routings),
            first_token=self._first_token,
            output_tokens=self._output_tokens,
            ending=self._ending,
            timeline=tuple(self._moments),
            pools=self._pools,
        )

    def _clear(self, event: SubmissionEvent | None, zero_us: int) -> None:
        self._event = event
        self._zero_us = zero_us
        self._state: State | None = None
        self._submission: Submission | None = None
        self._held: QueueWait | None = None
        self._pools: tuple[PoolChoice, ...] = ()
        self._routings: list[Routing] = []
        self._first_token: FirstTokenTiming | None = None
        self._output_tokens: int | None = None
        self._ending: Ending | None = None
        self._moments: list[TimelineEntry] = []
        self._times: TimeByPart | None = None  # None if the beginning is missing
        self._on: tuple[int, str, int] = (0, "", 0)  # attempt, worker ID, worker epoch
        self._stage = "aggregated"
        self._embedded = False  # the encoded images and videos wait to be fetched
        self._kept_by: tuple[str, int] | None = None  # worker and epoch that keep its KV to be fetched
        self._kept: Prefilled | None = None  # the last KV that a prefill worker kept

    def _begin_in_flight(self, request: ActiveRequest) -> None:
        """Start with a request that is already active where the walk begins."""
        self._state = _state(request.phase)
        self._stage, self._embedded = request.stage, request.encoded is not None
        kept = request.prefilled
        self._kept_by = None if kept is None else (kept.worker_id, kept.worker_epoch)
        self._kept = kept
        self._on = request.stage_attempt, request.worker_id, request.worker_epoch
        self._submission = submission_of_state(request, self._world.pools[request.submitted.pool].model)
        where = f", attempt {request.stage_attempt} on {request.worker_id}" if request.on_worker else ""
        text = f"already active ({request.phase}{where}); this log does not hold earlier events"
        self._add_entry("taken_up", text, self._zero_us, REQUESTS.name, request.submitted.offset)

    def _consume(self, topic: str, offset: int, event: Any) -> None:
        self._flush()
        match event:
            case RequestSubmitted() | RouteQueried():
                if event.request_id == self.request_id:
                    self._submission_event = event, offset
            case OwnershipAnnounced():
                self._owner_epoch = max(self._owner_epoch, event.owner_epoch)
            case ProgressEvent() | RequestCancelled() | WorkerFact():
                self.observe(topic, offset, event, self._now_us)

    def _flush(self) -> None:
        """Record a repeated submission: no decision followed it, so the ID was already in use."""
        if self._submission_event is not None and self.begun:
            text, offset = "submitted again with the same content; ignored", self._submission_event[1]
            self._add_entry("submitted_again", text, self._now_us, REQUESTS.name, offset, counted=False)
        self._submission_event = None

    def _decide(self, offset: int, record: RequestRecord) -> None:
        if isinstance(record, RequestRejected) and record.reason == "duplicate_id" and self.begun:
            self._submission_event = None
            text = f"another request with this ID is rejected: {record.message}"
            self._add_entry("duplicate_refused", text, self._now_us, DECISIONS.name, offset, counted=False)
            return
        if not self.begun or starts_use(record, held=self._state == "queued"):
            self._begin()
        self._choose_pools(offset, () if isinstance(record, RequestAborted | KvReleased) else record.pools)
        match record:
            case RequestHeld():
                self._state = "queued"
                self._hold(offset, record)
            case RequestRouted():
                self._route(offset, record)
            case RequestRejected():
                left_out = self._left_out(record)
                self._end("rejected", record.reason, record.message, self._now_us, left_out=left_out)
                text = f"rejected ({record.reason}): {record.message}"
                self._add_entry("rejected", text, self._now_us, DECISIONS.name, offset)
            case RequestAborted():
                self._end("aborted", record.reason, record.message, self._now_us)
                text = f"aborted ({record.reason}): {record.message}"
                self._add_entry("aborted", text, self._now_us, DECISIONS.name, offset)
            case KvReleased():
                self._add_entry("kv_released", released_text(record), self._now_us, DECISIONS.name, offset)
            case RouteAnswered():
                self._answer(offset, record)

    def _begin(self) -> None:
        if self._submission_event is None:  # the log does not hold the submission
            self._clear(None, self._now_us)
            self._state = "submitted"
            return
        event, offset = self._submission_event
        self._submission_event = None
        self._clear(event, self._now_us)
        self._state = "submitted"
        self._submission = submission = submission_of_event(event, offset, self._now_us)
        verb = "route query" if isinstance(event, RouteQueried) else "submitted"
        text = f"{verb}: {submission.prompt_tokens:,} prompt tokens for {submission.model}"
        self._times = TimeByPart(self._now_us)
        self._add_entry("submitted", text, self._now_us, REQUESTS.name, offset)

    def _choose_pools(self, offset: int, pools: tuple[PoolChoice, ...]) -> None:
        self._pools += pools
        prompt_tokens = None if self._submission is None else self._submission.prompt_tokens
        for choice in pools:
            text = choice_text(choice, prompt_tokens)
            self._add_entry("pool_chosen", text, self._now_us, DECISIONS.name, offset)

    def _chosen(self, offset: int, table_digest: str | None, **fields: Any) -> Routing:
        """Return the derived routing decision that belongs to a journal record."""
        routing = self._choices.popleft()
        assert routing.table_digest == table_digest, "the walk compares the digests"
        fields["after_us"] = routing.now_us - self._zero_us
        routing = msgspec.structs.replace(routing, offset=offset, **fields)
        self._routings.append(routing)
        return routing

    def _left_out(self, record: RequestRejected | RouteAnswered) -> tuple[ExcludedRank, ...]:
        return excluded_ranks(self._world, self._event, record)

    def _hold(self, offset: int, record: RequestHeld) -> None:
        self._held = queue_wait_of(self._world, offset, self._now_us, record)
        self._add_entry("held", held_text(self._held), self._now_us, DECISIONS.name, offset)

    def _route(self, offset: int, record: RequestRouted) -> None:
        fields = {"waited_us": record.waited_us, "stage": record.stage, "prefill": record.prefill}
        routing = self._chosen(offset, record.table_digest, **fields)
        self._send(offset, record, routed_text(routing), routing.now_us)

    def _send(self, offset: int, record: RequestRouted, text: str, now_us: int) -> None:
        self._state, self._stage = STATE_AT.get(record.stage, "prefill"), record.stage
        if record.stage != "decode":
            self._kept_by = None
        self._on = record.attempt, record.worker_id, record.worker_epoch
        self._add_entry("routed", text, now_us, DECISIONS.name, offset)

    def _answer(self, offset: int, record: RouteAnswered) -> None:
        if record.reason is not None:
            left_out = self._left_out(record)
            self._end("rejected", record.reason, record.message, self._now_us, left_out=left_out)
            text = f"would be rejected ({record.reason}): {record.message}"
        else:
            text = self._selected_text(offset, record)
            self._end("answered", "", "", self._now_us)
        self._add_entry("answered", text, self._now_us, DECISIONS.name, offset)

    def _selected_text(self, offset: int, record: RouteAnswered) -> str:
        fields = {"would_wait": record.would_wait, "stage": record.stage, "prefill": record.prefill}
        return routed_text(self._chosen(offset, record.table_digest, attempt=0, **fields))

    def _observe_worker(self, offset: int, event: WorkerFact, now_us: int | None) -> None:
        worker = event.worker_id, event.worker_epoch
        counted = event.owner_epoch >= self._owner_epoch  # otherwise the event is stale
        if self._state == "waiting" and worker == self._kept_by:
            if counted and isinstance(event, WorkerLost):
                self._kept_by = None
                text = f"worker {event.worker_id}, which keeps its KV, is lost"
                self._add_entry("holder_lost", text, now_us, FLEET.name, offset)
            return
        if self._state not in ON_WORKER or worker != self._on[1:]:
            return
        what, text = worker_text(event)
        if counted and isinstance(event, WorkerLost):
            self._state, self._embedded, self._kept_by = "waiting", False, None
        self._add_entry(what, text, now_us, FLEET.name, offset, counted=counted)

    def _observe_progress(self, offset: int, event: RequestProgress, now_us: int | None) -> None:
        name = f"{event.worker_id}, attempt {event.attempt},"
        if self.over or (event.attempt, event.worker_id, event.worker_epoch) != self._on or not self._follows(event):
            text = f"{name} reports {type(event).__struct_config__.tag}: stale, ignored"
            self._add_entry("outdated", text, now_us, PROGRESS.name, offset, counted=False)
            return
        match event:
            case FirstTokenEmitted():
                self._state, self._kept_by = "decode", None
                prompt_tokens = None if self._submission is None else self._submission.prompt_tokens
                first = self._first(event, now_us, prompt_tokens)
                self._first_token = self._first_token or first  # a later attempt continues the response
                text = first_token_text(first, event, prompt_tokens)
                self._add_entry("first_token", text, now_us, PROGRESS.name, offset)
            case OutputGrown():
                self._grow(offset, event.output_tokens, now_us)
            case RequestFinished():
                self._output_tokens = event.output_tokens
                self._end("finished", event.finish_reason, "", now_us, wall_us=event.at_us)
                text = f"finished ({event.finish_reason}) with {event.output_tokens:,} output tokens"
                self._add_entry("finished", text, now_us, PROGRESS.name, offset)
            case RequestFailed():
                self._end("failed", "", event.error, now_us, wall_us=event.at_us)
                self._add_entry("failed", f"{name} failed: {event.error}", now_us, PROGRESS.name, offset)
            case _ if isinstance(event, StageEnd):
                self._observe_stage_end(offset, event, name, now_us)
            case _:  # an event without an entry of its own
                text = f"{name} {event.SUMMARY.format(event)}"
                self._add_entry(
                    str(type(event).__struct_config__.tag).rpartition(".")[2], text, now_us, PROGRESS.name, offset
                )

    def _observe_stage_end(
        self,
        offset: int,
        event: StageEnd,
        name: str,
        now_us: int | None,
    ) -> None:
        """Handle the end of a stage, successful or not: the request waits for its next worker."""
        self._state = "waiting"
        match event:
            case AttemptRejected():
                self._embedded, self._kept_by = False, None
                what, text = "rejected", f"{name} rejected it: {event.error}"
            case EncodeFinished():
                self._embedded = True
                what, text = "encoded", f"{event.worker_id} encoded its images and videos"
            case EncodeFailed():
                what, text = "not_encoded", f"{name} could not encode its images and videos: {event.error}"
            case PrefillFinished():
                self._embedded, self._kept_by = False, (event.worker_id, event.worker_epoch)
                self._kept = event.prefilled
                what, text = "prefilled", prefilled_text(self._world, event)
            case PrefillFailed():
                self._embedded = False
                what, text = "not_prefilled", f"{name} could not compute its prompt: {event.error}"
            case TransferFailed():
                fetched = "embeddings" if self._kept_by is None else "KV"
                self._embedded, self._kept_by = False, None
                what, text = "not_transferred", f"{name} could not fetch its {fetched}: {event.error}"
        self._add_entry(what, text, now_us, PROGRESS.name, offset)

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

    def _first(self, event: FirstTokenEmitted, now_us: int | None, prompt_tokens: int | None) -> FirstTokenTiming:
        answers = (one for one in self._routings if one.stage not in ("encode", "prefill"))
        routing = next((one for one in answers if one.attempt == event.attempt), None)
        return msgspec.structs.replace(
            first_token_of(self._world, event, routing, prompt_tokens, self._kept),
            ttft_us=self._since(now_us),
            wall_ttft_us=self._wall_since(event.at_us),
            parts_us=self._parts(event, now_us or event.at_us),
        )

    def _parts(self, event: FirstTokenEmitted, now_us: int) -> dict[Part, int] | None:
        if self._times is None or not now_us:
            return None
        spent = self._times.until(now_us, event.transfer_us)
        return {part: spent[part] for part in get_args(Part) if spent.get(part)}

    def _grow(self, offset: int, output_tokens: int, now_us: int | None) -> None:
        """Merge consecutive output reports into one entry, because a long response has hundreds."""
        self._output_tokens = output_tokens
        if self._moments and self._moments[-1].what == "output_grown":
            self._moments.pop()
        self._add_entry("output_grown", f"{output_tokens:,} output tokens so far", now_us, PROGRESS.name, offset)

    def _end(
        self,
        state: State,
        reason: str,
        text: str,
        now_us: int | None,
        *,
        wall_us: int = 0,
        left_out: tuple[Any, ...] = (),
    ) -> None:
        self._state = state
        self._ending = Ending(
            state=state,
            reason=reason,
            text=text,
            attempt=self._on[0],
            output_tokens=self._output_tokens,
            duration_us=self._since(now_us),
            wall_duration_us=self._wall_since(wall_us),
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

    def _add_entry(
        self, what: str, text: str, now_us: int | None, topic: str, offset: int, *, counted: bool = True
    ) -> None:
        after_us = None if now_us is None else now_us - self._zero_us
        if self._times is not None and now_us is not None and self._state in PHASES:
            self._times.enter(Phase(self._state), now_us)
        self._moments.append(
            TimelineEntry(
                what=what, text=text, now_us=now_us, after_us=after_us, topic=topic, offset=offset, counted=counted
            )
        )


def _state(phase: str) -> State:
    found: State = next(state for state in get_args(State) if state == phase)
    return found
