"""Topic `progress`: what workers say of the requests they run, and of what they were commanded."""

from typing import Annotated, Literal

import msgspec

from forebay.events.base import Count, Event, Name
from forebay.events.control import Action
from forebay.events.media import Encoded
from forebay.events.transfer import Prefilled

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
    """Prefill is over. `cached_tokens` of the prompt were not computed here.

    Some of them may have come from a prefill worker: `transferred_bytes`, which took `transfer_us` from the first
    byte asked for to the last one checked; 0 where the engine does not say. `unfetched`: KV was kept for this attempt
    and is not wanted, as an earlier one had said tokens, and who goes on from there computes it all.
    """

    cached_tokens: Count = 0
    transferred_bytes: Count = 0
    transfer_us: Count = 0
    unfetched: bool = False


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


class EncodeFinished(ProgressEvent, tag="progress.encode_finished", frozen=True, kw_only=True):
    """The media of a request are encoded, and kept for whoever gets it next, for a while."""

    encoded: Encoded


class EncodeFailed(ProgressEvent, tag="progress.encode_failed", frozen=True, kw_only=True):
    """This worker cannot encode the media; another may. The client was told nothing."""

    error: str


class PrefillFinished(ProgressEvent, tag="progress.prefill_finished", frozen=True, kw_only=True):
    """The prompt is computed, and its KV kept for whoever answers the request, for a while."""

    prefilled: Prefilled


class PrefillFailed(ProgressEvent, tag="progress.prefill_failed", frozen=True, kw_only=True):
    """This worker cannot compute the prompt; another may, unless `status` is below 500: then no worker will.

    The client was told nothing. `status` and `code` are as in an answer's error.
    """

    error: str
    status: Annotated[int, msgspec.Meta(ge=400, le=599)] = 500
    code: Annotated[str, msgspec.Meta(max_length=256)] = ""


class TransferFailed(ProgressEvent, tag="progress.transfer_failed", frozen=True, kw_only=True):
    """What another worker made could not be fetched from it: embeddings, or KV. The client was told nothing."""

    error: str


class CommandReport(Event, frozen=True, kw_only=True):
    """Which command was for whom, on whose order."""

    command_id: Name
    action: Action
    worker_id: Name
    worker_epoch: Count
    owner_epoch: Count
    at_us: int = 0


class CommandDone(CommandReport, tag="progress.command_done", frozen=True, kw_only=True):
    """The engine did what it was told; `loras` are the adapters that it has loaded now."""

    loras: Annotated[tuple[Name, ...], msgspec.Meta(max_length=1_024)] = ()


class CommandRefused(CommandReport, tag="progress.command_refused", frozen=True, kw_only=True):
    """The engine did not do it, and nothing changed."""

    error: Annotated[str, msgspec.Meta(max_length=2_000)]


class EngineFailed(Event, tag="progress.engine_failed", frozen=True, kw_only=True):
    """Why a worker ends: its engine could not start, or broke. That it is lost is for `fleet` to say."""

    worker_id: Name
    pool: Name
    engine: str
    error: Annotated[str, msgspec.Meta(max_length=2_000)]
    worker_epoch: Count | None = None  # None before it was admitted
    at_us: int = 0


RequestProgress = (
    FirstTokenEmitted
    | OutputGrown
    | RequestFinished
    | RequestFailed
    | EncodeFinished
    | EncodeFailed
    | PrefillFinished
    | PrefillFailed
    | TransferFailed
)
AnyProgressEvent = RequestProgress | CommandDone | CommandRefused | EngineFailed
