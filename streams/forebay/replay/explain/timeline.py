"""The life of one request, folded from a walk: what was asked, chosen and said, in order.

A use of an id begins with the record that first decides on a submission. What workers say counts only for the attempt
and the worker epoch that the request is on, as in `forebay.core.state.requests`.
"""

from collections import deque
from collections.abc import Mapping
from typing import Any, get_args

import msgspec

from forebay.core.phases import Phase
from forebay.core.routing.router import Selection
from forebay.core.state.active_request import ActiveRequest
from forebay.core.step import CLOCK
from forebay.core.ttft_parts import Part, TimeByPart
from forebay.core.world import World
from forebay.events.control import PoolConfigured
from forebay.events.decisions import (
    KvReleased,
    OwnerClaimed,
    RequestAborted,
    RequestHeld,
    RequestRejected,
    RequestRouted,
    RouteAnswered,
)
from forebay.events.fleet import OwnershipAnnounced, WorkerFact, WorkerLost
from forebay.events.progress import (
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
    TransferFailed,
)
from forebay.events.requests import RequestCancelled, RequestSubmitted, RouteQueried
from forebay.events.topics import DECISIONS, FLEET, PROGRESS, REQUESTS
from forebay.replay.explain.choices import routing_of
from forebay.replay.explain.explanation import (
    Ending,
    Explanation,
    FirstToken,
    Moment,
    Routing,
    State,
    Submission,
    Waiting,
)
from forebay.replay.explain.find import OfRequest, opens
from forebay.replay.explain.timeline_parts import (
    Asked,
    as_submission,
    first_token_text,
    held_text,
    kept_out,
    of_request,
    prefilled_text,
    released_text,
    routed_text,
    waiting_of,
    worker_text,
)
from forebay.replay.walk import Step

STATE_AT: dict[str, State] = {"encode": "encode", "prefill": "remote_prefill", "decode": "transfer"}
ON_WORKER = (*STATE_AT.values(), "prefill", "decode")
PHASES = frozenset(Phase)
HEARD = (REQUESTS.name, PROGRESS.name, FLEET.name)  # topics whose events may be about a request

Heard = ProgressEvent | WorkerFact | RequestCancelled


class Life:
    """Takes the steps of a walk, and tells of the last use of an id that they hold.

    `on_selection` is for the walk's world. A request that is under way where the walk begins has no beginning here.
    """

    def __init__(self, request_id: str, world: World) -> None:
        self.request_id = request_id
        self._world = world
        self._now_us = world.now_us
        self._owner_epoch = world.fleet.owner_epoch
        self._choices: deque[Routing] = deque()
        self._asked: tuple[Asked, int] | None = None
        self._clear(None, world.now_us)
        request = world.requests.get(request_id)
        if request is not None:
            self._take_up(request)

    @property
    def begun(self) -> bool:
        """Whether anything is known of it."""
        return self._state is not None

    @property
    def over(self) -> bool:
        """Whether it ended."""
        return self._ending is not None

    def on_selection(self, pool: PoolConfigured, request: ActiveRequest, choice: Selection) -> None:
        """A choice is made: kept if it is for this request."""
        if request.request_id == self.request_id:
            self._choices.append(routing_of(self._world, pool, request, choice))

    def take(self, step: Step, offsets: Mapping[str, int]) -> None:
        """Apply one step: what was consumed, from these offsets of its topics on, then what was decided by it."""
        taken = dict.fromkeys(step.events, 0)
        for run in step.record.consumed:
            self._flush()
            self._now_us = run.now_us
            if run.topic == CLOCK:
                continue
            begin = taken[run.topic]
            taken[run.topic] += run.count
            if run.topic in HEARD:
                events = step.events[run.topic][begin : begin + run.count]
                for offset, event in enumerate(events, offsets[run.topic] + begin):
                    self._consume(run.topic, offset, event)
        record = step.record
        if isinstance(record, OfRequest) and record.request_id == self.request_id:
            self._decide(step.offset, record)
        elif isinstance(record, OwnerClaimed) and self.begun and not self.over:
            text = f"{record.owner_id} takes the group over"
            self._tell("owner_claimed", text, self._now_us, DECISIONS.name, step.offset)
        self._flush()

    def hear(self, topic: str, offset: int, event: Heard, now_us: int | None) -> None:
        """Something was said that may be about it; `now_us` is None for what no owner applied yet."""
        if not self.begun:
            return
        if isinstance(event, WorkerFact):
            self._hear_worker(offset, event, now_us)
        elif event.request_id != self.request_id:
            return
        elif isinstance(event, RequestCancelled):
            text = f"asked to be cancelled: {event.reason}"
            self._tell("cancel_requested", text, now_us, topic, offset, counted=not self.over)
        elif isinstance(event, RequestProgress):
            self._hear_progress(offset, event, now_us)

    def told(self, *, diverged: bool) -> Explanation:
        """All of it; what the caller knows of the search is left at zero."""
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
        )

    def _clear(self, event: Asked | None, zero_us: int) -> None:
        self._event = event
        self._zero_us = zero_us
        self._state: State | None = None
        self._submission: Submission | None = None
        self._held: Waiting | None = None
        self._routings: list[Routing] = []
        self._first_token: FirstToken | None = None
        self._output_tokens: int | None = None
        self._ending: Ending | None = None
        self._moments: list[Moment] = []
        self._times: TimeByPart | None = None  # while nothing of its life is missing
        self._on: tuple[int, str, int] = (0, "", 0)  # attempt, worker, its epoch
        self._stage = "aggregated"
        self._embedded = False  # its images and videos are encoded, and wait to be fetched
        self._kept_by: tuple[str, int] | None = None  # its KV waits to be fetched from there

    def _take_up(self, request: ActiveRequest) -> None:
        """It is under way where the walk begins."""
        self._state = _state(request.phase)
        self._stage, self._embedded = request.stage, request.encoded is not None
        kept = request.prefilled
        self._kept_by = None if kept is None else (kept.worker_id, kept.worker_epoch)
        self._on = request.stage_attempt, request.worker_id, request.worker_epoch
        self._submission = of_request(request, self._world.pools[request.pool].model)
        where = f", attempt {request.stage_attempt} on {request.worker_id}" if request.on_worker else ""
        text = f"under way ({request.phase}{where}): this log does not hold what came before"
        self._tell("taken_up", text, self._zero_us, REQUESTS.name, request.offset)

    def _consume(self, topic: str, offset: int, event: Any) -> None:
        self._flush()
        match event:
            case RequestSubmitted() | RouteQueried():
                if event.request_id == self.request_id:
                    self._asked = event, offset
            case OwnershipAnnounced():
                self._owner_epoch = max(self._owner_epoch, event.owner_epoch)
            case ProgressEvent() | RequestCancelled() | WorkerFact():
                self.hear(topic, offset, event, self._now_us)

    def _flush(self) -> None:
        """A submission that led to no decision, as the last of what a record consumed, was known before."""
        if self._asked is not None and self.begun:
            text = "submitted again, as it was before"
            self._tell("submitted_again", text, self._now_us, REQUESTS.name, self._asked[1], counted=False)
        self._asked = None

    def _decide(self, offset: int, record: OfRequest) -> None:
        if isinstance(record, RequestRejected) and record.reason == "duplicate_id" and self.begun:
            self._asked = None
            text = f"another request of this id is refused: {record.message}"
            self._tell("duplicate_refused", text, self._now_us, DECISIONS.name, offset, counted=False)
            return
        if not self.begun or opens(record, held=self._state == "queued"):
            self._begin()
        match record:
            case RequestHeld():
                self._state = "queued"
                self._held = waiting_of(self._world, offset, self._now_us, record)
                self._tell("held", held_text(self._held), self._now_us, DECISIONS.name, offset)
            case RequestRouted():
                self._route(offset, record)
            case RequestRejected():
                left_out = kept_out(self._world, self._event, record.reason)
                self._end("rejected", record.reason, record.message, self._now_us, left_out=left_out)
                text = f"refused ({record.reason}): {record.message}"
                self._tell("rejected", text, self._now_us, DECISIONS.name, offset)
            case RequestAborted():
                self._end("aborted", record.reason, record.message, self._now_us)
                text = f"given up ({record.reason}): {record.message}"
                self._tell("aborted", text, self._now_us, DECISIONS.name, offset)
            case KvReleased():
                self._tell("kv_released", released_text(record), self._now_us, DECISIONS.name, offset)
            case RouteAnswered():
                self._answer(offset, record)

    def _begin(self) -> None:
        if self._asked is None:  # a record of a submission that this log does not hold
            self._clear(None, self._now_us)
            self._state = "submitted"
            return
        event, offset = self._asked
        self._asked = None
        self._clear(event, self._now_us)
        self._state = "submitted"
        self._submission = submission = as_submission(event, offset, self._now_us)
        asks = "asked where it would go" if isinstance(event, RouteQueried) else "submitted"
        text = f"{asks}: {submission.prompt_tokens:,} prompt tokens for {submission.model}"
        self._times = TimeByPart(self._now_us)
        self._tell("submitted", text, self._now_us, REQUESTS.name, offset)

    def _chosen(self, offset: int, table_digest: str | None, **fields: Any) -> Routing:
        """The choice that led to a record. Both came out of one derivation, which is equal to the record."""
        routing = self._choices.popleft()
        assert routing.table_digest == table_digest, "the walk compares it"
        fields["after_us"] = routing.now_us - self._zero_us
        routing = msgspec.structs.replace(routing, offset=offset, **fields)
        self._routings.append(routing)
        return routing

    def _route(self, offset: int, record: RequestRouted) -> None:
        told = {"waited_us": record.waited_us, "stage": record.stage, "prefill": record.prefill}
        routing = self._chosen(offset, record.table_digest, **told)
        self._state, self._stage = STATE_AT.get(record.stage, "prefill"), record.stage
        if record.stage != "decode":
            self._kept_by = None
        self._on = record.attempt, record.worker_id, record.worker_epoch
        self._tell("routed", routed_text(routing), routing.now_us, DECISIONS.name, offset)

    def _answer(self, offset: int, record: RouteAnswered) -> None:
        if record.reason is not None:
            left_out = kept_out(self._world, self._event, record.reason)
            self._end("rejected", record.reason, record.message, self._now_us, left_out=left_out)
            text = f"it would be refused ({record.reason}): {record.message}"
        else:
            told = {"would_wait": record.would_wait, "stage": record.stage, "prefill": record.prefill}
            routing = self._chosen(offset, record.table_digest, attempt=0, **told)
            self._end("answered", "", "", self._now_us)
            text = routed_text(routing)
        self._tell("answered", text, self._now_us, DECISIONS.name, offset)

    def _hear_worker(self, offset: int, event: WorkerFact, now_us: int | None) -> None:
        worker = event.worker_id, event.worker_epoch
        counted = event.owner_epoch >= self._owner_epoch  # else it is void
        if self._state == "waiting" and worker == self._kept_by:
            if counted and isinstance(event, WorkerLost):
                self._kept_by = None
                text = f"{event.worker_id}, which keeps its KV, is lost"
                self._tell("holder_lost", text, now_us, FLEET.name, offset)
            return
        if self._state not in ON_WORKER or worker != self._on[1:]:
            return
        what, text = worker_text(event)
        if counted and isinstance(event, WorkerLost):
            self._state, self._embedded, self._kept_by = "waiting", False, None
        self._tell(what, text, now_us, FLEET.name, offset, counted=counted)

    def _hear_progress(self, offset: int, event: RequestProgress, now_us: int | None) -> None:
        name = f"{event.worker_id}, attempt {event.attempt},"
        if self.over or (event.attempt, event.worker_id, event.worker_epoch) != self._on or not self._follows(event):
            text = f"{name} says {type(event).__struct_config__.tag}: it counts no more"
            self._tell("outdated", text, now_us, PROGRESS.name, offset, counted=False)
            return
        match event:
            case FirstTokenEmitted():
                self._state, self._kept_by = "decode", None
                self._first_token = self._first(event, now_us)
                prompt_tokens = None if self._submission is None else self._submission.prompt_tokens
                text = first_token_text(self._first_token, prompt_tokens)
                self._tell("first_token", text, now_us, PROGRESS.name, offset)
            case OutputGrown():
                self._grow(offset, event.output_tokens, now_us)
            case RequestFinished():
                self._output_tokens = event.output_tokens
                self._end("finished", event.finish_reason, "", now_us, wall_us=event.at_us)
                text = f"finished ({event.finish_reason}) with {event.output_tokens:,} tokens"
                self._tell("finished", text, now_us, PROGRESS.name, offset)
            case RequestFailed():
                self._end("failed", "", event.error, now_us, wall_us=event.at_us)
                self._tell("failed", f"{name} failed: {event.error}", now_us, PROGRESS.name, offset)
            case _:
                self._hear_part(offset, event, name, now_us)

    def _hear_part(
        self,
        offset: int,
        event: EncodeFinished | EncodeFailed | PrefillFinished | PrefillFailed | TransferFailed,
        name: str,
        now_us: int | None,
    ) -> None:
        """A part of it is done, or failed: it waits for its next worker."""
        self._state = "waiting"
        match event:
            case EncodeFinished():
                self._embedded = True
                what, text = "encoded", f"its images and videos are encoded by {event.worker_id}"
            case EncodeFailed():
                what, text = "not_encoded", f"{name} could not encode its images and videos: {event.error}"
            case PrefillFinished():
                self._embedded, self._kept_by = False, (event.worker_id, event.worker_epoch)
                what, text = "prefilled", prefilled_text(event)
            case PrefillFailed():
                self._embedded = False
                what, text = "not_prefilled", f"{name} could not compute its prompt: {event.error}"
            case TransferFailed():
                fetched = "embeddings" if self._kept_by is None else "KV"
                self._embedded, self._kept_by = False, None
                what, text = "not_transferred", f"{name} could not fetch its {fetched}: {event.error}"
        self._tell(what, text, now_us, PROGRESS.name, offset)

    def _follows(self, event: RequestProgress) -> bool:
        match event:
            case FirstTokenEmitted():
                return self._state in ("prefill", "transfer")
            case OutputGrown():
                return self._state == "decode"
            case EncodeFinished() | EncodeFailed():
                return self._state == "encode"
            case PrefillFinished() | PrefillFailed():
                return self._state == "remote_prefill"
            case TransferFailed():
                fetches = self._state in ("prefill", "remote_prefill", "transfer")
                return fetches and (self._embedded or self._kept_by is not None)
            case RequestFinished():
                return self._stage not in ("encode", "prefill")
            case RequestFailed():
                return self._stage != "prefill"

    def _first(self, event: FirstTokenEmitted, now_us: int | None) -> FirstToken:
        answers = (one for one in self._routings if one.stage not in ("encode", "prefill"))
        routing = next((one for one in answers if one.attempt == event.attempt), None)
        predicted = None
        if routing is not None and routing.stage != "decode" and self._submission is not None:
            overlap = routing.candidates[routing.winner].seen.device_overlap
            predicted = min(overlap * routing.block_size, self._submission.prompt_tokens)
        return FirstToken(
            attempt=event.attempt,
            worker_id=event.worker_id,
            ttft_us=self._since(now_us),
            wall_ttft_us=self._wall_since(event.at_us),
            cached_tokens=event.cached_tokens,
            predicted_tokens=predicted,
            transferred_bytes=event.transferred_bytes,
            transfer_us=event.transfer_us,
            parts_us=self._parts(event, now_us or event.at_us),
        )

    def _parts(self, event: FirstTokenEmitted, now_us: int) -> dict[Part, int] | None:
        if self._times is None or not now_us:
            return None
        spent = self._times.until(now_us, event.transfer_us)
        return {part: spent[part] for part in get_args(Part) if spent.get(part)}

    def _grow(self, offset: int, output_tokens: int, now_us: int | None) -> None:
        """Reports of output that come one after another are one moment: a long answer has hundreds."""
        self._output_tokens = output_tokens
        if self._moments and self._moments[-1].what == "output_grown":
            self._moments.pop()
        self._tell("output_grown", f"{output_tokens:,} tokens so far", now_us, PROGRESS.name, offset)

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
        """Microseconds since the submission; None where one of the two is not known."""
        if now_us is None or self._submission is None or self._submission.now_us is None:
            return None
        return now_us - self._submission.now_us

    def _wall_since(self, wall_us: int) -> int | None:
        began_us = 0 if self._submission is None else self._submission.wall_us
        return wall_us - began_us if wall_us and began_us else None

    def _tell(self, what: str, text: str, now_us: int | None, topic: str, offset: int, *, counted: bool = True) -> None:
        after_us = None if now_us is None else now_us - self._zero_us
        if self._times is not None and now_us is not None and self._state in PHASES:
            self._times.enter(Phase(self._state), now_us)
        self._moments.append(
            Moment(what=what, text=text, now_us=now_us, after_us=after_us, topic=topic, offset=offset, counted=counted)
        )


def _state(phase: str) -> State:
    found: State = next(state for state in get_args(State) if state == phase)
    return found
