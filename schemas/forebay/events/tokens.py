"""Topic `tokens`: all that a client needs, in one partition (its reply slot), in order."""

from typing import Literal

from forebay.events.base import U32_BYTES, Count, Event, Name, Part, require_packed
from forebay.events.decisions import Candidate


class Usage(Part, frozen=True, kw_only=True):
    """Token counts of a whole answer."""

    prompt_tokens: Count
    output_tokens: Count
    cached_tokens: Count = 0


class AnswerError(Part, frozen=True, kw_only=True):
    """Why there is no (whole) answer: an HTTP status, OpenAI's error code, a sentence for the caller."""

    status: Count
    code: Name
    message: str


class TokenChunk(Part, frozen=True, kw_only=True):
    """New tokens of one request; `first_index` is the position of the first among its output tokens."""

    request_id: Name
    attempt: Count
    first_index: Count
    token_ids: bytes

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


class AttemptStarted(Event, tag="tokens.attempt_started", frozen=True, kw_only=True):
    """A later attempt begins: tokens of lower attempts after this are void."""

    request_id: Name
    attempt: Count
    owner_epoch: Count
    worker_id: Name


class ResponseEnded(Event, tag="tokens.response_ended", frozen=True, kw_only=True):
    """Nothing of this request follows. Either `usage` or `error` is set."""

    request_id: Name
    attempt: Count
    owner_epoch: Count
    finish_reason: Literal["stop", "length", "cancelled", "error"]
    usage: Usage | None = None
    error: AnswerError | None = None


class RouteTold(Event, tag="tokens.route_told", frozen=True, kw_only=True):
    """The answer to a `RouteQueried`: the decision in the journal, or the error."""

    request_id: Name
    owner_epoch: Count
    pool: str = ""
    mode: str = ""
    choice: Candidate | None = None
    candidates: tuple[Candidate, ...] = ()
    would_wait: bool = False
    error: AnswerError | None = None


TokenEvent = TokensEmitted | AttemptStarted | ResponseEnded | RouteTold
