"""State of one request while a pass follows it, and its row in the catalog.

A row has the newest state in columns, which queries filter by, and all earlier states as steps, which give the state as
of any moment. Progress events count as in `forebay.core.state.requests`.
"""

from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, get_args

import msgspec

from forebay.core.phases import ON_WORKER, Phase
from forebay.core.state.active_request import ActiveRequest
from forebay.core.state.transitions import DISPATCHED, REPORTED, TRANSITIONS
from forebay.events.decisions import RequestAborted, RequestHeld, RequestRejected, RequestRouted
from forebay.events.progress import FirstTokenEmitted, RequestFailed, RequestFinished, RequestProgress
from forebay.events.requests import RequestSubmitted
from forebay.replay.catalog.facts import RequestRow, RequestState

STATES: tuple[RequestState, ...] = get_args(RequestState)
STATE_OF_PHASE: dict[Phase, RequestState] = {
    Phase.SUBMITTED: "submitted",
    Phase.QUEUED: "queued",
    Phase.ENCODE: "encode",
    Phase.REMOTE_PREFILL: "prefill",
    Phase.TRANSFER: "decode",
    Phase.PREFILL: "prefill",
    Phase.DECODE: "decode",
    Phase.WAITING: "waiting",
}
ENDED: frozenset[RequestState] = frozenset(("finished", "failed", "rejected", "aborted", "cancelled"))
UNSUCCESSFUL: frozenset[RequestState] = frozenset(("failed", "rejected", "aborted"))
REASON_CHARS_MAX = 200  # an engine's error may be a whole stack trace
STEPS_MAX = 256  # a pool may allow any number of attempts; later steps replace the last one
OWN_COLUMNS = ("is_unsuccessful", "is_partial", "steps")  # columns without a field in `RequestRow`
COLUMNS = (*(name for name in RequestRow.__struct_fields__ if name != "itl_us"), *OWN_COLUMNS)

Row = tuple[Any, ...]  # values of COLUMNS


class RoutedRank(msgspec.Struct, frozen=True, array_like=True, gc=False):
    pool: str
    worker_id: str
    rank: int
    attempt: int


class RequestStep(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Change of a request's state. `journal_offset` is that of the decision; None if an event changed the state."""

    after_us: int
    state: int
    journal_offset: int | None = None
    place: RoutedRank | None = None


# Plain strings and tuples, because Python computes the hash of a `StrEnum` slowly.
_NUMBERS = {state: number for number, state in enumerate(STATES)}
_PHASES = {stage: phase for stage, transition in DISPATCHED.items() if (phase := TRANSITIONS[transition].target)}
_STATES_BY_STAGE = {stage: STATE_OF_PHASE[phase] for stage, phase in _PHASES.items()}
_SOURCES = {kind: tuple(TRANSITIONS[transition].sources) for kind, transition in REPORTED.items()}
_FIELDS_OF = attrgetter(*COLUMNS[: -len(OWN_COLUMNS)])
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(list[RequestStep])


@dataclass(slots=True)
class CatalogRequest:
    """Request that a pass follows. The fields without a description are those of `RequestRow`.

    `is_partial` means that the log does not hold the submission, so that `submitted_us` is the log's beginning.
    """

    number: int
    request_id: str
    model: str
    lora_name: str
    prompt_tokens: int
    submitted_us: int
    is_partial: bool = False
    tenant: str = ""
    pool: str = ""
    worker_id: str = ""
    rank: int = 0
    worker_epoch: int = 0
    attempt: int = 0
    phase: Phase = Phase.SUBMITTED
    stage: str = "aggregated"
    state: RequestState = "submitted"
    routed_us: int | None = None
    first_token_us: int | None = None
    ended_us: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    reason: str = ""
    ttft_us: int | None = None
    journal_offset: int | None = None
    steps: list[RequestStep] = field(default_factory=list)

    @classmethod
    def of_submission(cls, number: int, event: RequestSubmitted, now_us: int) -> "CatalogRequest":
        names = event.request_id, event.model, event.lora_name
        return cls(number, *names, event.prompt_tokens, now_us, tenant=event.tenant)

    @classmethod
    def of_active(cls, request: ActiveRequest, model: str, begin_us: int) -> "CatalogRequest":
        """Return a request that is active at the beginning of the log, which does not hold its submission."""
        submitted = request.submitted
        made = cls(
            submitted.offset,
            submitted.request_id,
            model,
            submitted.lora_name,
            submitted.prompt_tokens,
            begin_us,
            is_partial=True,
            tenant=submitted.tenant,
            pool=submitted.pool,
            worker_id=request.worker_id,
            rank=request.rank,
            attempt=request.stage_attempt,
            routed_us=begin_us if request.was_dispatched else None,
        )
        made.follow(request)
        place = RoutedRank(made.pool, made.worker_id, made.rank, made.attempt)
        made._add_step(STATE_OF_PHASE[request.phase], begin_us, None, place)
        return made

    @classmethod
    def of_row(cls, row: Row) -> "CatalogRequest":
        """Return an active request from its row. `follow` adds what the row does not have."""
        values = dict(zip(COLUMNS, row, strict=True))
        del values["is_unsuccessful"]
        values["steps"] = decode_steps(values["steps"])
        values["is_partial"] = bool(values["is_partial"])
        made = cls(**values)
        made.phase = Phase.QUEUED if made.state == "queued" else Phase.WAITING
        return made

    def follow(self, request: ActiveRequest) -> None:
        self.phase, self.stage, self.worker_epoch = request.phase, request.stage, request.worker_epoch

    def copy(self) -> "CatalogRequest":
        return replace(self, steps=list(self.steps))

    def row(self) -> Row:
        return *_FIELDS_OF(self), self.state in UNSUCCESSFUL, self.is_partial, _ENCODER.encode(self.steps)

    def is_on(self, worker_id: str, worker_epoch: int) -> bool:
        return self.phase in ON_WORKER and (self.worker_id, self.worker_epoch) == (worker_id, worker_epoch)

    def accepts(self, event: RequestProgress) -> bool:
        """Return whether the owner applies the event in this state.

        The owner also ignores a `TransferFailed` without anything to fetch, which this state does not show.
        """
        if (
            event.attempt != self.attempt
            or event.worker_id != self.worker_id
            or event.worker_epoch != self.worker_epoch
            or (self.stage == "prefill" and isinstance(event, RequestFinished | RequestFailed))
            or (self.stage == "encode" and isinstance(event, RequestFinished))
        ):
            return False
        return self.phase in _SOURCES[type(event)]

    def hold(self, record: RequestHeld, offset: int, now_us: int) -> None:
        self.pool, self.phase = record.pool, Phase.QUEUED
        self._add_step("queued", now_us, offset, RoutedRank(self.pool, "", 0, 0))

    def route(self, record: RequestRouted, offset: int, now_us: int, pool: str) -> None:
        """Send the request to a worker rank. `pool` generates the response."""
        self.pool, self.worker_id, self.rank, self.attempt = pool, record.worker_id, record.rank, record.attempt
        self.worker_epoch, self.stage = record.worker_epoch, record.stage
        if self.routed_us is None:
            self.routed_us = now_us
        self.phase = _PHASES[record.stage]
        place = RoutedRank(pool, record.worker_id, record.rank, record.attempt)
        self._add_step(_STATES_BY_STAGE[record.stage], now_us, offset, place)

    def wait(self, now_us: int) -> None:
        self.phase = Phase.WAITING
        self._add_step("waiting", now_us, None, None)

    def emit_first_token(self, event: FirstTokenEmitted, now_us: int) -> bool:
        """Record a first token. Return whether it is the first one of the response: a retry emits another one."""
        self.phase = Phase.DECODE
        self._add_step("decode", now_us, None, None)
        if self.first_token_us is not None:
            return False
        self.first_token_us = now_us
        self.cached_tokens = min(event.cached_tokens, self.prompt_tokens)
        if not self.is_partial:
            self.ttft_us = now_us - self.submitted_us
        return True

    def finish(self, event: RequestFinished, now_us: int) -> None:
        self.output_tokens = event.output_tokens
        self._end("finished", event.finish_reason, now_us, None)

    def fail(self, event: RequestFailed, now_us: int) -> None:
        self._end("failed", event.error[:REASON_CHARS_MAX], now_us, None)

    def refuse(self, record: RequestRejected | RequestAborted, offset: int, now_us: int) -> None:
        if isinstance(record, RequestRejected):
            self._end("rejected", record.reason, now_us, offset)
        else:
            self._end("cancelled" if record.reason == "cancelled" else "aborted", record.reason, now_us, offset)

    @property
    def itl_us(self) -> float | None:
        return mean_itl_us(self.first_token_us, self.ended_us, self.output_tokens)

    def _end(self, state: RequestState, reason: str, now_us: int, offset: int | None) -> None:
        self.reason, self.ended_us = reason, now_us
        self._add_step(state, now_us, offset, None)

    def _add_step(self, state: RequestState, now_us: int, offset: int | None, place: RoutedRank | None) -> None:
        self.state = state
        if offset is not None:
            self.journal_offset = offset
        if len(self.steps) == STEPS_MAX:
            self.steps.pop()
        self.steps.append(RequestStep(now_us - self.submitted_us, _NUMBERS[state], offset, place))


def mean_itl_us(first_token_us: int | None, ended_us: int | None, output_tokens: int | None) -> float | None:
    """Return the mean time between two output tokens in microseconds; None with fewer than two."""
    if first_token_us is None or ended_us is None or output_tokens is None or output_tokens < 2:
        return None
    return (ended_us - first_token_us) / (output_tokens - 1)


def decode_steps(encoded: bytes) -> list[RequestStep]:
    return _DECODER.decode(encoded)
