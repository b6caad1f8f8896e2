"""Topic `requests`: what clients ask for, tokenised and hashed by an ingress. Holds prompts."""

from math import isfinite
from typing import Annotated, Literal

import msgspec

from forebay.events.base import U32_BYTES, U64, U64_BYTES, Count, Event, Name, Part, require_packed
from forebay.events.control import RouterMode, Weight, require_numbers
from forebay.events.media import Media, require_bounded

TIMEOUT_US_MAX = 86_400_000_000  # a day: whoever waits longer is gone


Task = Literal["generate", "embed"]


class StructuredOutput(Part, frozen=True, kw_only=True):
    """What the text of an answer must be; the engine constrains its tokens to it.

    `text` is by kind a JSON schema, a regular expression, a JSON list of strings, or a grammar in EBNF; empty
    for `json_object`.
    """

    kind: Literal["json_object", "json_schema", "regex", "choice", "grammar"]
    text: str = ""


class TokenBias(Part, frozen=True, kw_only=True):
    """What is added to the logit of a token."""

    token_id: Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]
    bias: float


class Sampling(Part, frozen=True, kw_only=True):
    """How to generate; passed through to the engine. Names and meanings are OpenAI's, from `ignore_eos` on vLLM's.

    Attributes:
        logprobs: how many alternatives to each token are told with their logarithmic probabilities; None tells none.
        ignore_eos: generate exactly `max_tokens`.
        stop_token_ids: end the answer, as the model's own end does.
    """

    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=(1 << 31) - 1)]
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[TokenBias, ...] = ()
    logprobs: Count | None = None
    structured: StructuredOutput | None = None
    ignore_eos: bool = False
    top_k: Count = 0  # 0 is off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: Count = 0
    stop_token_ids: tuple[Count, ...] = ()


class TaintWeight(Part, frozen=True, kw_only=True):
    """A taint that a worker should have (weight above 0) or rather not have (below)."""

    taint: Name
    weight: Annotated[float, msgspec.Meta(ge=-1e6, le=1e6)]

    def __post_init__(self) -> None:
        if not isfinite(self.weight):
            raise ValueError(f"the weight of the taint {self.taint} must be a number, not {self.weight}")


class RouterOverride(Part, frozen=True, kw_only=True):
    """What one request changes of its pool's `RouterConfig`; None leaves it."""

    mode: RouterMode | None = None
    overlap_score_credit: Weight | None = None
    prefill_load_scale: Weight | None = None
    temperature: Weight | None = None
    assume_kv_reuse: bool | None = None
    track_prefill_tokens: bool | None = None

    def __post_init__(self) -> None:
        require_numbers(self, dict.fromkeys(("overlap_score_credit", "prefill_load_scale", "temperature"), 1e6))


class RoutingHints(Part, frozen=True, kw_only=True):
    """What a client wants of the router. Names and meanings are Dynamo's (`nvext`, routing headers).

    Attributes:
        worker_id: the only worker that may take it; empty for any.
        rank: the only rank of that worker.
        allowed_workers: the only workers that may take it; empty for any.
        required_taints: the worker must have them all.
        preferred_taints: multiply the cost of workers that have them by exp(-tanh(sum of weights)).
        session_id: requests of a session stay on one worker.
        priority: in the router's queue, seconds by which it goes before its time.
        strict_priority: in the router's queue, higher ones go first whatever they cost.
        policy_class: the queue class.
        expected_output_tokens: how long the answer will be, for the load that it is; 0 for unknown.
    """

    worker_id: str = ""
    rank: Count | None = None
    allowed_workers: tuple[Name, ...] = ()
    required_taints: tuple[Name, ...] = ()
    preferred_taints: tuple[TaintWeight, ...] = ()
    session_id: str = ""
    priority: Annotated[int, msgspec.Meta(ge=-(1 << 31), le=(1 << 31) - 1)] = 0
    strict_priority: Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)] = 0
    policy_class: str = ""
    expected_output_tokens: Count = 0
    override: RouterOverride | None = None


NO_HINTS = RoutingHints()


class RequestSubmitted(Event, tag="request.submitted", frozen=True, kw_only=True):
    """A valid request, ready to be routed.

    `sequence_hashes` has one u64 for each full block of `token_ids`, chained as in `forebay.core.block_hashes` and
    salted by `lora_name` and `cache_namespace`; blocks in which `media` stand name them. `timeout_us` counts from the
    owner's clock when it applies this event. `tie_seed` decides between equal candidates; it is xxh3_64 of the request
    id unless the recording was anonymised.
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
    lora_name: str = ""  # the adapter that must be resident on its worker
    cache_namespace: str = ""  # caches are shared only within one
    routing: RoutingHints = NO_HINTS
    task: Task = "generate"
    withheld_tokens: Count = 0  # of the prompt: an anonymised recording has none of them in `token_ids`
    media: tuple[Media, ...] = ()  # in the order in which they stand in the prompt
    ingress_incarnation: str = ""  # of the ingress whose HTTP client waits; empty if the request outlives its ingress
    patient: bool = False  # no bound or time limit of the router's queue applies: it waits until its deadline

    def __post_init__(self) -> None:
        require_packed("token_ids", self.token_ids, U32_BYTES)
        require_packed("sequence_hashes", self.sequence_hashes, U64_BYTES)
        require_bounded(self.media)

    @property
    def prompt_tokens(self) -> int:
        """The length of the prompt."""
        return len(self.token_ids) // U32_BYTES + self.withheld_tokens


class RequestCancelled(Event, tag="request.cancelled", frozen=True, kw_only=True):
    """The client no longer wants the answer."""

    request_id: Name
    reason: str = "client disconnected"
    at_us: int = 0


class RouteQueried(Event, tag="request.route_queried", frozen=True, kw_only=True):
    """Where would such a request go? Nothing is booked and nothing is sent."""

    request_id: Name
    model: Name
    prompt_tokens: Annotated[int, msgspec.Meta(ge=1, le=(1 << 31) - 1)]
    sequence_hashes: bytes
    reply_slot: Count
    tie_seed: U64
    at_us: int = 0
    lora_name: str = ""
    routing: RoutingHints = NO_HINTS

    def __post_init__(self) -> None:
        require_packed("sequence_hashes", self.sequence_hashes, U64_BYTES)


RequestEvent = RequestSubmitted | RequestCancelled | RouteQueried
