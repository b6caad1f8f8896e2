"""Topic `progress`: worker events about requests and commands."""

from typing import Annotated, ClassVar, Literal

import msgspec

from forebay.events.base import Count, Event, Name
from forebay.events.control import Action
from forebay.events.media import Encoded
from forebay.events.privacy import DROPPED, KEPT, LORA, REQUEST_ID
from forebay.events.transfer import Prefilled

FinishReason = Literal["stop", "length", "cancelled"]


class ProgressEvent(Event, frozen=True, kw_only=True):
    """Fields of every progress event: request, attempt, worker, and the owner whose decision the worker follows.

    `SUMMARY` describes the event in a few words, with its fields in braces. `replay` prints it.
    """

    SUMMARY: ClassVar[str]

    request_id: Annotated[Name, REQUEST_ID]
    attempt: Count
    worker_id: Annotated[Name, KEPT]
    worker_epoch: Count
    owner_epoch: Count
    at_us: int = 0


class FirstTokenEmitted(ProgressEvent, tag="progress.first_token_emitted", frozen=True, kw_only=True):
    """The prompt is computed and the first token was generated.

    Attributes:
        request_id: id of the request.
        attempt: attempt of the worker.
        worker_id: id of the worker.
        worker_epoch: epoch of the worker.
        owner_epoch: owner whose work item the worker follows.
        at_us: wall clock in microseconds.
        cached_tokens: prompt tokens that this worker did not compute.
        transferred_bytes: bytes of KV fetched from a prefill worker; 0 if the engine does not report them.
        transfer_us: time from the first request for KV to the last check, in microseconds; 0 if not reported.
        unfetched: whether KV kept for this attempt was not needed, because an earlier attempt had emitted tokens and
            this worker computes the prompt itself.
    """

    SUMMARY = "first token"

    cached_tokens: Count = 0
    transferred_bytes: Count = 0
    transfer_us: Count = 0
    unfetched: bool = False


class OutputGrown(ProgressEvent, tag="progress.output_grown", frozen=True, kw_only=True):
    """The output filled another KV block. Sent only if the work item requests it (`WorkItem.report_output`)."""

    SUMMARY = "{0.output_tokens} tokens"

    output_tokens: Count


class RequestFinished(ProgressEvent, tag="progress.request_finished", frozen=True, kw_only=True):
    """The attempt completed; its last tokens are on the reply slot.

    Attributes:
        finish_reason: why the response ended, as in the OpenAI API.
    """

    SUMMARY = "finished ({0.finish_reason})"

    finish_reason: FinishReason
    output_tokens: Count = 0
    cached_tokens: Count = 0


class RequestFailed(ProgressEvent, tag="progress.request_failed", frozen=True, kw_only=True):
    """The attempt failed."""

    SUMMARY = "failed ({0.error})"

    error: Annotated[str, DROPPED]


class EncodeFinished(ProgressEvent, tag="progress.encode_finished", frozen=True, kw_only=True):
    """The media of a request are encoded, and kept for the next worker for a limited time.

    Attributes:
        encoded: location and size of the embeddings.
    """

    SUMMARY = "images and videos encoded as {0.encoded.shape_text} {0.encoded.dtype}"

    encoded: Encoded


class EncodeFailed(ProgressEvent, tag="progress.encode_failed", frozen=True, kw_only=True):
    """This worker cannot encode the media; another worker may. The client was not informed."""

    SUMMARY = "encoding images and videos failed ({0.error})"

    error: Annotated[str, DROPPED]


class PrefillFinished(ProgressEvent, tag="progress.prefill_finished", frozen=True, kw_only=True):
    """The prompt is computed, and its KV is kept for the decode worker for a limited time.

    Attributes:
        prefilled: location and size of the KV, and how long the worker keeps it.
    """

    SUMMARY = "prefill finished, KV of {0.prefilled.tokens:,} tokens kept for {0.prefilled.lease_s:g} s"

    prefilled: Prefilled


class PrefillFailed(ProgressEvent, tag="progress.prefill_failed", frozen=True, kw_only=True):
    """This worker cannot compute the prompt; another worker may, unless `status` is below 500.

    The client was not informed.

    Attributes:
        request_id: id of the request.
        attempt: attempt of the worker.
        worker_id: id of the worker.
        worker_epoch: epoch of the worker.
        owner_epoch: owner whose work item the worker follows.
        at_us: wall clock in microseconds.
        error: what failed.
        status: HTTP status of the error.
        code: error code, as in an error response.
    """

    SUMMARY = "prefill failed ({0.error})"

    error: Annotated[str, DROPPED]
    status: Annotated[int, msgspec.Meta(ge=400, le=599)] = 500
    code: Annotated[str, msgspec.Meta(max_length=256), DROPPED] = ""


class TransferFailed(ProgressEvent, tag="progress.transfer_failed", frozen=True, kw_only=True):
    """Embeddings or KV of another worker could not be fetched. The client was not informed."""

    SUMMARY = "fetching embeddings or KV failed ({0.error})"

    error: Annotated[str, DROPPED]


class CommandReport(Event, frozen=True, kw_only=True):
    """Fields of every response to a command: command, worker, and the owner whose order the worker follows."""

    command_id: Annotated[Name, REQUEST_ID]
    action: Action
    worker_id: Annotated[Name, KEPT]
    worker_epoch: Count
    owner_epoch: Count
    at_us: int = 0


class CommandDone(CommandReport, tag="progress.command_done", frozen=True, kw_only=True):
    """The engine executed the command; `loras` are the adapters that are loaded now.

    Attributes:
        loras: adapters that the worker has loaded now.
    """

    loras: Annotated[tuple[Name, ...], msgspec.Meta(max_length=1_024), LORA] = ()


class CommandRefused(CommandReport, tag="progress.command_refused", frozen=True, kw_only=True):
    """The engine did not execute the command; nothing changed."""

    error: Annotated[str, msgspec.Meta(max_length=2_000), DROPPED]


class EngineFailed(Event, tag="progress.engine_failed", frozen=True, kw_only=True):
    """The engine could not start or failed, so the worker ends. Its loss is reported separately on `fleet`.

    Attributes:
        worker_id: id of the worker.
        pool: pool of the worker.
        engine: name of the engine.
        error: what failed.
        worker_epoch: epoch of the worker; null before it joined.
        at_us: wall clock in microseconds.
    """

    worker_id: Annotated[Name, KEPT]
    pool: Annotated[Name, KEPT]
    engine: Annotated[str, KEPT]
    error: Annotated[str, msgspec.Meta(max_length=2_000), DROPPED]
    worker_epoch: Count | None = None
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
