"""Topic `tokens`: all that a client needs, in one partition (its reply slot), in order.

Groups share the reply slots, and two groups may use one request id. Every event names the `group` that it is from: its
readers take only those of their own group, because attempts and owner epochs are ordered within one group only.
"""

from typing import Literal

from forebay.events.base import U32_BYTES, Count, Event, Name, Part, require_packed
from forebay.events.decisions import CommandOutcome, PrefillPlace, ScoredCandidate, Stage


class Usage(Part, frozen=True, kw_only=True):
    """Token counts of a whole answer."""

    prompt_tokens: Count
    output_tokens: Count
    cached_tokens: Count = 0


class ResponseError(Part, frozen=True, kw_only=True):
    """Why there is no (whole) answer: an HTTP status, OpenAI's error code, a sentence for the caller."""

    status: Count
    code: Name
    message: str


class TopLogprob(Part, frozen=True, kw_only=True):
    """A token that could have been said, and the logarithm of its probability."""

    token_id: Count
    logprob: float


class TokenLogprob(Part, frozen=True, kw_only=True):
    """The logarithm of the probability of a token that was said, and of the likeliest in its place."""

    logprob: float
    top: tuple[TopLogprob, ...] = ()


class PrefilledBy(Part, frozen=True, kw_only=True):
    """The worker rank that computed the prompt of an answer for the one that gives it.

    `transferred_bytes` of KV came from there in `transfer_us`; 0 where the engine does not say.
    """

    worker_id: Name
    rank: Count = 0
    transferred_bytes: Count = 0
    transfer_us: Count = 0


class TokenChunk(Part, frozen=True, kw_only=True):
    """New tokens of one request; `first_index` is the position of the first among its output tokens.

    `logprobs` has one entry for each token, if the request asked for them. `prefilled` comes with the first token,
    where somebody else computed the prompt.
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
    """What one engine step gave the requests of one slot."""

    worker_id: Name
    worker_epoch: Count
    owner_epoch: Count
    chunks: tuple[TokenChunk, ...]
    rank: Count = 0
    at_us: int = 0
    group: str = ""


class Embedded(Event, tag="tokens.embedded", frozen=True, kw_only=True):
    """The vector of a prompt, packed little-endian f32."""

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
    """A later attempt begins: tokens of lower attempts after this are void."""

    request_id: Name
    attempt: Count
    owner_epoch: Count
    worker_id: Name
    group: str = ""


class ResponseEnded(Event, tag="tokens.response_ended", frozen=True, kw_only=True):
    """Nothing of this request follows. Either `usage` or `error` is set."""

    request_id: Name
    attempt: Count
    owner_epoch: Count
    finish_reason: Literal["stop", "length", "cancelled", "error"]
    usage: Usage | None = None
    error: ResponseError | None = None
    group: str = ""


class RouteResponse(Event, tag="tokens.route_told", frozen=True, kw_only=True):
    """The answer to a `RouteQueried`: the decision in the journal, or the error."""

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
    """The answer to a `WorkerCommanded`: what became of it at every worker, or why it went nowhere."""

    command_id: Name
    owner_epoch: Count
    outcomes: tuple[CommandOutcome, ...] = ()
    error: ResponseError | None = None
    group: str = ""


TokenEvent = TokensEmitted | Embedded | AttemptStarted | ResponseEnded | RouteResponse | CommandResponse
