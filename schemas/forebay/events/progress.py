"""Topic `progress`: what workers say of the requests they run."""

from typing import Literal

from forebay.events.base import Count, Event, Name

FinishReason = Literal["stop", "length", "cancelled"]


class ProgressEvent(Event, frozen=True, kw_only=True):
    """Which attempt of which request, by whom, on whose order."""

    request_id: Name
    attempt: Count
    worker_id: Name
    worker_epoch: Count
    owner_epoch: Count
    at_us: int = 0


class FirstTokenEmitted(ProgressEvent, tag="progress.first_token_emitted", frozen=True, kw_only=True):
    """Prefill is over."""

    cached_tokens: Count = 0


class OutputGrown(ProgressEvent, tag="progress.output_grown", frozen=True, kw_only=True):
    """The answer filled another KV block; said only of work that asks for it (`WorkItem.report_output`)."""

    output_tokens: Count


class RequestFinished(ProgressEvent, tag="progress.request_finished", frozen=True, kw_only=True):
    """The attempt ended well; its last tokens are on the reply slot."""

    finish_reason: FinishReason
    output_tokens: Count = 0
    cached_tokens: Count = 0


class RequestFailed(ProgressEvent, tag="progress.request_failed", frozen=True, kw_only=True):
    """The attempt ended badly."""

    error: str


AnyProgressEvent = FirstTokenEmitted | OutputGrown | RequestFinished | RequestFailed
