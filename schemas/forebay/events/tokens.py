"""Topic `tokens`: responses of requests, route queries and commands.

A partition of this topic is a reply slot. All events of one response are in the reply slot that its ingress reads, in
order. Groups share the reply slots, and two groups may use the same request id, so every event names its `group`. A
reader ignores the events of other groups, because attempts and owner epochs are comparable within one group only.

Every event also has the `reply_key` of its request, query or command. Only the ingress, the owner and the worker of the
request know this number, because only they read `requests`, `control` and `work`. Readers ignore other events.
"""

from typing import Literal

from forebay.events.base import U32_BYTES, Count, Event, Name, Part, require_packed
from forebay.events.decisions import CommandOutcome, PrefillPlace, ScoredCandidate, Stage


class Usage(Part, frozen=True, kw_only=True):
    """Token counts of a complete response, as in the OpenAI API."""

    prompt_tokens: Count
    output_tokens: Count
    cached_tokens: Count = 0


class ResponseError(Part, frozen=True, kw_only=True):
    """Error that a client gets instead of a complete response.

    Attributes:
        status: HTTP status.
        code: error code of the OpenAI API, or forebay's own.
        message: sentence that explains the error to the caller.
        retry_after_s: seconds after which the request may succeed; 0 if unknown.
    """

    status: Count
    code: Name
    message: str
    retry_after_s: Count = 0


class TopLogprob(Part, frozen=True, kw_only=True):
    """One of the most likely tokens at a position of the output, and its log probability.

    Attributes:
        token_id: the token.
        logprob: natural logarithm of its probability.
    """

    token_id: Count
    logprob: float


class TokenLogprob(Part, frozen=True, kw_only=True):
    """Log probability of one output token, and the most likely tokens at its position.

    Attributes:
        logprob: natural logarithm of the probability of the output token.
        top: most likely tokens at this position; empty if the request did not ask for them.
    """

    logprob: float
    top: tuple[TopLogprob, ...] = ()


class PrefilledBy(Part, frozen=True, kw_only=True):
    """Worker rank that computed the prompt for another worker, which generates the response.

    Attributes:
        worker_id: id of the worker that computed the prompt.
        rank: rank that computed the prompt.
        transferred_bytes: bytes of KV fetched from that worker; 0 if the engine does not report them.
        transfer_us: duration of the KV transfer in microseconds; 0 if the engine does not report it.
    """

    worker_id: Name
    rank: Count = 0
    transferred_bytes: Count = 0
    transfer_us: Count = 0


class TokenChunk(Part, frozen=True, kw_only=True):
    """New output tokens of one request.

    Attributes:
        attempt: attempt in which the worker generated the tokens.
        first_index: position of the first token of this chunk in the whole output, from 0.
        token_ids: tokens, as packed u32.
        logprobs: one entry per token, if the request asked for log probabilities; otherwise empty.
        prefilled: worker that computed the prompt, if it is not the worker that generates the response. Only the chunk
            with the first token of an attempt has it.
        text_only: whether the engine returned text, from which the worker computed the tokens. Another worker cannot
            continue such a response.
        reply_key: key of the request, from its work item.
        objects: JSON values that an endpoint has yielded for a call, one per token. Each one counts as an output token,
            whose id has no meaning. Empty for other tasks.
    """

    request_id: Name
    attempt: Count
    first_index: Count
    token_ids: bytes
    reply_key: Count = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    prefilled: PrefilledBy | None = None
    text_only: bool = False
    objects: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require_packed("token_ids", self.token_ids, U32_BYTES)


class TokensEmitted(Event, tag="tokens.emitted", frozen=True, kw_only=True):
    """New output tokens of all requests that have the same reply slot, from one worker rank.

    Attributes:
        chunks: new output tokens; one item per request and engine step.
    """

    worker_id: Name
    worker_epoch: Count
    owner_epoch: Count
    chunks: tuple[TokenChunk, ...]
    rank: Count = 0
    at_us: int = 0
    group: str = ""


class Embedded(Event, tag="tokens.embedded", frozen=True, kw_only=True):
    """Embedding of a prompt: the result of an embedding request.

    Attributes:
        vector: the embedding, as packed little-endian f32.
    """

    request_id: Name
    attempt: Count
    owner_epoch: Count
    worker_id: Name
    vector: bytes
    rank: Count = 0
    group: str = ""
    reply_key: Count = 0

    def __post_init__(self) -> None:
        require_packed("vector", self.vector, U32_BYTES)


class AttemptStarted(Event, tag="tokens.attempt_started", frozen=True, kw_only=True):
    """A worker starts a later attempt at a request, for example because the previous worker was lost.

    Readers of the reply slot ignore events of lower attempts that follow this event.
    """

    request_id: Name
    attempt: Count
    owner_epoch: Count
    worker_id: Name
    group: str = ""
    reply_key: Count = 0


class ResponseEnded(Event, tag="tokens.response_ended", frozen=True, kw_only=True):
    """Last event of a response. It has either `usage` or `error`.

    Attributes:
        finish_reason: why the response ended.
        usage: token counts of a complete response; null if `error` is set.
        error: why the response is incomplete; null if `usage` is set.
        filtered: whether a content filter of the engine ended the output; the reason is then `stop`.
    """

    request_id: Name
    attempt: Count
    owner_epoch: Count
    finish_reason: Literal["stop", "length", "cancelled", "error"]
    usage: Usage | None = None
    error: ResponseError | None = None
    group: str = ""
    reply_key: Count = 0
    filtered: bool = False


class RequestLocated(Event, tag="tokens.request_located", frozen=True, kw_only=True):
    """The owner did not run a request, because an earlier request has the same idempotency key.

    The response of the earlier request is the response of this request. No other event of this response follows.

    Attributes:
        request_id: id of the request that was not run.
        partition: partition of the earlier request on the topic `requests`.
        offset: offset of the earlier request.
    """

    request_id: Name
    partition: Count
    offset: Count
    owner_epoch: Count
    group: str = ""
    reply_key: Count = 0


class DestinationSelected(Event, tag="tokens.destination_selected", frozen=True, kw_only=True):
    """The owner routed an external request to a worker. The gateway sends the request to the server of this worker.

    Progress events about this attempt name the worker.

    Attributes:
        endpoint: server of the worker.
        fallback: server with the lowest cost apart from this one, if the gateway cannot reach it; empty if none is
            known.
        cached_tokens: prompt tokens that the rank probably has cached; 0 if unknown.
        report_every: output tokens between two `OutputGrown`; 0 if the owner needs none.
    """

    request_id: Name
    attempt: Count
    owner_epoch: Count
    worker_id: Name
    worker_epoch: Count
    rank: Count
    endpoint: str
    fallback: str = ""
    cached_tokens: Count = 0
    report_every: Count = 0
    group: str = ""
    reply_key: Count = 0


class RouteResponse(Event, tag="tokens.route_told", frozen=True, kw_only=True):
    """Response to a `RouteQueried`: the worker rank that the owner would select now, or an error.

    The journal has the same result as `RouteAnswered`.

    Attributes:
        request_id: id of the query.
        pool: pool of the selected rank.
        choice: selected rank; null if no rank may take the request.
        candidates: all candidates with their costs.
        would_wait: whether the owner would queue the request.
        error: why no rank may take the request; null if one may.
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
    reply_key: Count = 0


class CommandResponse(Event, tag="tokens.command_told", frozen=True, kw_only=True):
    """Response to a `WorkerCommanded`: the outcome at every worker, or why the owner did not send the command.

    Attributes:
        outcomes: outcome at each worker.
        error: why the owner rejected the command; null if the owner sent it.
        placed: as in `CommandEnded`.
    """

    command_id: Name
    owner_epoch: Count
    outcomes: tuple[CommandOutcome, ...] = ()
    error: ResponseError | None = None
    group: str = ""
    reply_key: Count = 0
    placed: tuple[Name, ...] = ()


TokenEvent = (
    TokensEmitted
    | Embedded
    | AttemptStarted
    | ResponseEnded
    | RequestLocated
    | DestinationSelected
    | RouteResponse
    | CommandResponse
)
