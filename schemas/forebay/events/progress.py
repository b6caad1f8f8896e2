"""Topic `progress`: what workers report about requests and commands."""

from typing import Annotated, ClassVar, Literal

import msgspec

from forebay.events.base import Count, Event, Name, Part
from forebay.events.control import Action, LoraDigest
from forebay.events.kv import LowerTier
from forebay.events.media import Encoded
from forebay.events.privacy import DROPPED, KEPT, LORA, REQUEST_ID, SystemName
from forebay.events.transfer import Prefilled

FinishReason = Literal["stop", "length", "cancelled"]


class ProgressEvent(Event, frozen=True, kw_only=True):
    """Base class of a worker's events about a request. `owner_epoch` is the epoch of the owner that sent the work.

    `SUMMARY` is a format string that describes the event in a few words. `replay` formats it with the event as argument
    0 and prints the result.
    """

    SUMMARY: ClassVar[str]

    request_id: Annotated[Name, REQUEST_ID]
    attempt: Count
    worker_id: SystemName
    worker_epoch: Count
    owner_epoch: Count
    at_us: int = 0


class OnboardedTokens(Part, frozen=True, kw_only=True):
    """Prompt tokens whose KV was loaded from one tier into device memory instead of being computed.

    Attributes:
        tier: tier from which the KV was loaded.
        tokens: number of prompt tokens.
        us: duration of the load in microseconds. Loads from several tiers may overlap in time.
    """

    tier: LowerTier
    tokens: Count
    us: Count = 0


class FirstTokenEmitted(ProgressEvent, tag="progress.first_token_emitted", frozen=True, kw_only=True):
    """The worker has computed the prompt and generated the first token.

    Attributes:
        cached_tokens: prompt tokens that this worker did not compute.
        transferred_bytes: bytes of KV fetched from a prefill worker; 0 if the engine does not report them.
        transfer_us: microseconds from the first request for KV to the last check of fetched blocks; 0 if not reported.
        unfetched: whether this worker computed the prompt itself although a prefill worker keeps its KV, because an
            earlier attempt had already emitted tokens. The owner then orders the prefill worker to free the KV.
        onboarded: the part of `cached_tokens` that was loaded from other tiers, at most one entry per tier.
    """

    SUMMARY = "first token"

    cached_tokens: Count = 0
    transferred_bytes: Count = 0
    transfer_us: Count = 0
    unfetched: bool = False
    onboarded: tuple[OnboardedTokens, ...] = ()


class OutputGrown(ProgressEvent, tag="progress.output_grown", frozen=True, kw_only=True):
    """The output of a request filled another KV block.

    A worker sends this event only if the work item requests it (`WorkItem.report_output`).

    Attributes:
        output_tokens: output tokens so far, including those of earlier attempts.
    """

    SUMMARY = "{0.output_tokens} tokens"

    output_tokens: Count


class RequestFinished(ProgressEvent, tag="progress.request_finished", frozen=True, kw_only=True):
    """The worker completed the response. The last tokens are already in the reply slot.

    Attributes:
        finish_reason: why the response ended, as in the OpenAI API.
    """

    SUMMARY = "finished ({0.finish_reason})"

    finish_reason: FinishReason
    output_tokens: Count = 0
    cached_tokens: Count = 0


class RequestFailed(ProgressEvent, tag="progress.request_failed", frozen=True, kw_only=True):
    """The request failed at the worker, and ends with this error."""

    SUMMARY = "failed ({0.error})"

    error: Annotated[str, DROPPED]


class AttemptRejected(ProgressEvent, tag="progress.attempt_rejected", frozen=True, kw_only=True):
    """The worker's engine or server rejected an attempt, for which it has emitted no token.

    The worker itself is alive, and the request is not at fault. The client is not informed, because the owner may try
    another worker.

    Attributes:
        error: why it was rejected, for the client if no other worker takes the request.
        status: HTTP status for the client in this case.
        code: error code for the client in this case.
        retry_after_s: seconds for which the server asked to get no requests; 0 if it did not ask.
    """

    SUMMARY = "rejected ({0.error})"

    error: Annotated[str, DROPPED]
    status: Annotated[int, msgspec.Meta(ge=400, le=599)]
    code: Annotated[str, msgspec.Meta(max_length=256), DROPPED]
    retry_after_s: Count = 0


class AttemptMoved(ProgressEvent, tag="progress.attempt_moved", frozen=True, kw_only=True):
    """A gateway sent an external request to another server than that of the selected worker.

    A picker writes this event before the first token. The owner then routes the request to the worker of this server.

    Attributes:
        endpoint: server that got the request, as in `WorkerSpec.endpoint`.
    """

    SINCE = 3
    SUMMARY = "not used: the gateway sent the request to {0.endpoint}"

    endpoint: SystemName


class EncodeFinished(ProgressEvent, tag="progress.encode_finished", frozen=True, kw_only=True):
    """The worker encoded the images and videos of a request.

    It keeps the embeddings for a limited time, until another worker fetches them.

    Attributes:
        encoded: location and size of the embeddings.
        cached: number of images and videos whose embeddings were in the worker's cache.
    """

    SUMMARY = "images and videos encoded as {0.encoded.shape_text} {0.encoded.dtype}"

    encoded: Encoded
    cached: Count = 0


class EncodeFailed(ProgressEvent, tag="progress.encode_failed", frozen=True, kw_only=True):
    """The worker could not encode the images and videos of a request.

    The client is not informed, because the owner may try another worker.
    """

    SUMMARY = "encoding images and videos failed ({0.error})"

    error: Annotated[str, DROPPED]


class PrefillFinished(ProgressEvent, tag="progress.prefill_finished", frozen=True, kw_only=True):
    """The prefill worker computed the prompt. It keeps the KV for a limited time, until the decode worker fetches it.

    Attributes:
        prefilled: location and size of the KV, and how long the worker keeps it.
        onboarded: the part of `prefilled.cached_tokens` that was loaded from other tiers, at most one entry per tier.
    """

    SUMMARY = "prefill finished, KV of {0.prefilled.tokens:,} tokens kept for {0.prefilled.lease_s:g} s"

    prefilled: Prefilled
    onboarded: tuple[OnboardedTokens, ...] = ()


class PrefillFailed(ProgressEvent, tag="progress.prefill_failed", frozen=True, kw_only=True):
    """The prefill worker could not compute the prompt.

    The client is not informed, because the owner may try another worker. If `status` is below 500, the request itself
    is at fault and the owner does not retry it.

    Attributes:
        status: HTTP status of the error.
        code: error code, as in an error response.
    """

    SUMMARY = "prefill failed ({0.error})"

    error: Annotated[str, DROPPED]
    status: Annotated[int, msgspec.Meta(ge=400, le=599)] = 500
    code: Annotated[str, msgspec.Meta(max_length=256), DROPPED] = ""


class TransferFailed(ProgressEvent, tag="progress.transfer_failed", frozen=True, kw_only=True):
    """The worker could not fetch embeddings or KV from another worker.

    The client is not informed, because the owner may try again.
    """

    SUMMARY = "fetching embeddings or KV failed ({0.error})"

    error: Annotated[str, DROPPED]


class CommandReport(Event, frozen=True, kw_only=True):
    """Base class of a worker's responses to a command.

    `owner_epoch` is the epoch of the owner that sent the command.
    """

    command_id: Annotated[Name, REQUEST_ID]
    action: Action
    worker_id: SystemName
    worker_epoch: Count
    owner_epoch: Count
    at_us: int = 0


class CommandDone(CommandReport, tag="progress.command_done", frozen=True, kw_only=True):
    """The engine executed the command.

    Attributes:
        loras: adapters that the worker has loaded now.
        lora_digest: digest of the files of the adapter that the command loaded from a URI; otherwise empty.
    """

    loras: Annotated[tuple[Name, ...], msgspec.Meta(max_length=1_024), LORA] = ()
    lora_digest: LoraDigest = ""


class CommandRefused(CommandReport, tag="progress.command_refused", frozen=True, kw_only=True):
    """The engine did not execute the command, and changed nothing."""

    error: Annotated[str, msgspec.Meta(max_length=2_000), DROPPED]


class EngineFailed(Event, tag="progress.engine_failed", frozen=True, kw_only=True):
    """The engine could not start or failed, so the worker process ends.

    The owner reports the loss of the worker separately, on `fleet`.

    Attributes:
        worker_epoch: epoch of the worker; null if it had not joined yet.
    """

    worker_id: SystemName
    pool: SystemName
    engine: Annotated[str, KEPT]
    error: Annotated[str, msgspec.Meta(max_length=2_000), DROPPED]
    worker_epoch: Count | None = None
    at_us: int = 0


StageEnd = (
    AttemptRejected | AttemptMoved | EncodeFinished | EncodeFailed | PrefillFinished | PrefillFailed | TransferFailed
)
"""After these events the request waits for its next worker."""
RequestProgress = FirstTokenEmitted | OutputGrown | RequestFinished | RequestFailed | StageEnd
AnyProgressEvent = RequestProgress | CommandDone | CommandRefused | EngineFailed
