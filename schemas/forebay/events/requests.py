"""Topic `requests`: what clients ask for, tokenised and hashed by an ingress. Holds prompts."""

from typing import Annotated

import msgspec

from forebay.events.base import U32_BYTES, U64, U64_BYTES, Count, Event, Name, Part, require_packed

TIMEOUT_US_MAX = 86_400_000_000  # a day: whoever waits longer is gone


class Sampling(Part, frozen=True, kw_only=True):
    """How to generate; passed through to the engine. Names and meanings are OpenAI's."""

    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=(1 << 31) - 1)]
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    ignore_eos: bool = False  # vLLM's extension: generate exactly max_tokens


class RequestSubmitted(Event, tag="request.submitted", frozen=True, kw_only=True):
    """A valid request, ready to be routed.

    `sequence_hashes` has one u64 for each full block of `token_ids`, chained as in `forebay.core.blocks`.
    `timeout_us` counts from the owner's clock when it applies this event. `tie_seed` decides between
    equal candidates; it is xxh3_64 of the request id unless the recording was anonymised.
    """

    request_id: Name
    model: Name
    token_ids: bytes
    sequence_hashes: bytes
    reply_slot: Count
    timeout_us: Annotated[int, msgspec.Meta(ge=1, le=TIMEOUT_US_MAX)]
    tie_seed: U64
    sampling: Sampling
    nonce: U64 = 0  # one for each submission: a redelivery repeats it, another use of the same id does not
    reply_from: Count = 0  # of the reply slot: no record before this offset belongs to the answer
    ingress_id: str = ""
    at_us: int = 0  # the ingress's clock: for people and latency figures only

    def __post_init__(self) -> None:
        require_packed("token_ids", self.token_ids, U32_BYTES)
        require_packed("sequence_hashes", self.sequence_hashes, U64_BYTES)

    @property
    def prompt_tokens(self) -> int:
        """The length of the prompt."""
        return len(self.token_ids) // U32_BYTES


class RequestCancelled(Event, tag="request.cancelled", frozen=True, kw_only=True):
    """The client no longer wants the answer."""

    request_id: Name
    reason: str = "client disconnected"
    at_us: int = 0


RequestEvent = RequestSubmitted | RequestCancelled
