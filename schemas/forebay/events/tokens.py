"""Topic `tokens`: everything that a client needs, in order, in one partition (its reply slot).

Groups share the reply slots, and two groups may use the same request id. Every event names its `group`. Readers take
only the events of their own group, because attempts and owner epochs are ordered within one group only.
"""

from typing import Literal

from forebay.events.base import U32_BYTES, Count, Event, Name, Part, require_packed
from forebay.events.decisions import CommandOutcome, PrefillPlace, ScoredCandidate, Stage


class Usage(Part, frozen=True, kw_only=True):
    """Token counts of a complete response."""

    prompt_tokens: Count
    output_tokens: Count
    cached_tokens: Count = 0


class ResponseError(Part, frozen=True, kw_only=True):
    """Why a response is missing or incomplete: HTTP status, OpenAI error code, and a sentence for the caller.

    Attributes:
        status: HTTP status.
        code: error code of the OpenAI API, or forebay's own.
    """

    status: Count
    code: Name
    message: str


class TopLogprob(Part, frozen=True, kw_only=True):
    """Alternative token and its log probability.

    Attributes:
        token_id: the token.
        logprob: natural logarithm of its probability.
    """

    token_id: Count
    logprob: float


class TokenLogprob(Part, frozen=True, kw_only=True):
    """Log probability of an output token, and of the most likely tokens at its position.

    Attributes:
        logprob: natural logarithm of the probability.
        top: most likely tokens at this position.
    """

    logprob: float
    top: tuple[TopLogprob, ...] = ()


class PrefilledBy(Part, frozen=True, kw_only=True):
    """Worker rank that computed the prompt for another worker, which generates the response.

    Attributes:
        worker_id: id of the worker.
        rank: rank of the worker.
        transferred_bytes: bytes of KV fetched from there; 0 if the engine does not report them.
        transfer_us: duration of the fetch in microseconds; 0 if not reported.
    """

    worker_id: Name
    rank: Count = 0
    transferred_bytes: Count = 0
    transfer_us: Count = 0


class TokenChunk(Part, frozen=True, kw_only=True):
    """New output tokens of one request.

    Attributes:
        request_id: id of the request.
        attempt: attempt of the worker.
        first_index: position of the first token in the output, from 0.
        token_ids: tokens, as packed u32.
        logprobs: one entry per token, if the request asked for them.
        prefilled: worker that computed the prompt, with the first token, if it is another worker.
    """

    request_id: Name
    attempt: Count
    first_index: Count
    token_ids: bytes
    logprobs: tuple[TokenLogprob, ...] = ()
    prefilled: PrefilledBy | None = None

    def __post_init__(self) -> None:
        require_packed("token_ids", self.token_ids, U32_BYTES)


class TokensEmitted(Event, tag="tokens.emitted", frozen=True, kw_only=True):
    """Output tokens of one engine step, for the requests of one reply slot.

    Attributes:
        chunks: output tokens, one item per engine step.
    """

    worker_id: Name
    worker_epoch: Count
    owner_epoch: Count
    chunks: tuple[TokenChunk, ...]
    rank: Count = 0
    at_us: int = 0
    group: str = ""


class Embedded(Event, tag="tokens.embedded", frozen=True, kw_only=True):
    """Embedding of a prompt, as packed little-endian f32.

    Attributes:
        vector: the embedding, as packed f32.
    """

    request_id: Name
    attempt: Count
    owner_epoch: Count
    worker_id: Name
    vector: bytes
    rank: Count = 0
    group: str = ""

    def __post_init__(self) -> None:
        require_packed("vector", self.vector, U32_BYTES)


class AttemptStarted(Event, tag="tokens.attempt_started", frozen=True, kw_only=True):
    """A later attempt starts; tokens of lower attempts after this record are stale."""

    request_id: Name
    attempt: Count
    owner_epoch: Count
    worker_id: Name
    group: str = ""


class ResponseEnded(Event, tag="tokens.response_ended", frozen=True, kw_only=True):
    """Last record of a response. Either `usage` or `error` is set.

    Attributes:
        finish_reason: why the response ended.
        usage: token counts; null for an error.
    """

    request_id: Name
    attempt: Count
    owner_epoch: Count
    finish_reason: Literal["stop", "length", "cancelled", "error"]
    usage: Usage | None = None
    error: ResponseError | None = None
    group: str = ""


class RouteResponse(Event, tag="tokens.route_told", frozen=True, kw_only=True):
    """Response to a `RouteQueried`: the decision in the journal, or an error.

    Attributes:
        mode: router mode that selected the rank.
        choice: selected rank; null if there is none.
        candidates: all candidates with their costs.
        would_wait: whether the request would be queued.
        stage: stage that the selected rank would compute.
        prefill: where the prompt would be computed; null without a decode pool.
    """

    request_id: Name
    owner_epoch: Count
    pool: str = ""
    mode: str = ""
    choice: ScoredCandidate | None = None
    candidates: tuple[ScoredCandidate, ...] = ()
    would_wait: bool = False
    error: ResponseError | None = None
    stage: Stage = "aggregated"
    prefill: PrefillPlace | None = None
    group: str = ""


class CommandResponse(Event, tag="tokens.command_told", frozen=True, kw_only=True):
    """Response to a `WorkerCommanded`: the outcome at every worker, or why it was not sent.

    Attributes:
        outcomes: outcome at each worker.
    """

    command_id: Name
    owner_epoch: Count
    outcomes: tuple[CommandOutcome, ...] = ()
    error: ResponseError | None = None
    group: str = ""


TokenEvent = TokensEmitted | Embedded | AttemptStarted | ResponseEnded | RouteResponse | CommandResponse
