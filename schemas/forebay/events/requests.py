"""Topic `requests`: client requests, tokenized and hashed by an ingress. Contains prompts."""

from math import isfinite
from typing import Annotated, Literal

import msgspec

from forebay.events.base import U32_BYTES, U64, U64_BYTES, Count, Event, Name, Part, require_packed
from forebay.events.control import RouterMode, Weight, require_numbers
from forebay.events.media import Media, require_bounded

TIMEOUT_US_MAX = 86_400_000_000  # one day; no client waits longer


Task = Literal["generate", "embed"]


class StructuredOutput(Part, frozen=True, kw_only=True):
    """Format of the response text; the engine constrains its tokens to it.

    Attributes:
        kind: type of constraint.
        text: by kind a JSON schema, a regular expression, a JSON list of strings, or an EBNF grammar; empty for
            `json_object`.
    """

    kind: Literal["json_object", "json_schema", "regex", "choice", "grammar"]
    text: str = ""


class TokenBias(Part, frozen=True, kw_only=True):
    """Value that is added to the logit of a token.

    Attributes:
        token_id: the token.
        bias: value added to its logit.
    """

    token_id: Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]
    bias: float


class Sampling(Part, frozen=True, kw_only=True):
    """Sampling parameters for the engine. Names and meanings are OpenAI's; from `ignore_eos` on they are vLLM's.

    Attributes:
        max_tokens: maximum number of output tokens.
        logprobs: number of alternatives per token that are returned with log probabilities; null returns none.
        ignore_eos: whether to generate exactly `max_tokens`.
        top_k: number of most likely tokens to sample from; 0 is off.
        stop_token_ids: tokens that end the response, like the model's own end token.
        temperature: softmax temperature; 0 is greedy.
        top_p: probability mass of the tokens to sample from.
        seed: seed of the engine's sampler; null draws one.
        presence_penalty: penalty for tokens that occurred.
        frequency_penalty: penalty per occurrence of a token.
        logit_bias: values added to the logits of single tokens.
        structured: structure that the response must have; null for none.
        min_p: minimum probability, relative to the most likely token.
        repetition_penalty: factor for the logits of tokens that occurred.
        min_tokens: minimum number of output tokens.
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
    top_k: Count = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: Count = 0
    stop_token_ids: tuple[Count, ...] = ()


class TaintWeight(Part, frozen=True, kw_only=True):
    """Preference for workers with a taint (weight above 0) or against them (below 0).

    Attributes:
        taint: label of a worker.
        weight: weight of the preference.
    """

    taint: Name
    weight: Annotated[float, msgspec.Meta(ge=-1e6, le=1e6)]

    def __post_init__(self) -> None:
        if not isfinite(self.weight):
            raise ValueError(f"the weight of the taint {self.taint} must be a number, not {self.weight}")


class RouterOverride(Part, frozen=True, kw_only=True):
    """Fields of the pool's `RouterConfig` that one request overrides; null keeps the pool's value.

    Attributes:
        mode: built-in router mode.
        overlap_score_credit: prefill blocks that one cached block saves.
        prefill_load_scale: weight of prefill blocks in the cost.
        temperature: softmax temperature of the selection; 0 selects the lowest cost.
        assume_kv_reuse: whether a prefix shared by running requests counts once.
        track_prefill_tokens: whether prompt tokens not yet computed count as load.
    """

    mode: RouterMode | None = None
    overlap_score_credit: Weight | None = None
    prefill_load_scale: Weight | None = None
    temperature: Weight | None = None
    assume_kv_reuse: bool | None = None
    track_prefill_tokens: bool | None = None

    def __post_init__(self) -> None:
        require_numbers(self, dict.fromkeys(("overlap_score_credit", "prefill_load_scale", "temperature"), 1e6))


class RoutingHints(Part, frozen=True, kw_only=True):
    """Routing hints of a client. Names and meanings are Dynamo's (`nvext`, routing headers).

    Attributes:
        worker_id: only worker that may take the request; empty for any.
        rank: only rank of that worker; null for any.
        allowed_workers: only workers that may take the request; empty for any.
        required_taints: taints that the worker must have.
        preferred_taints: taints that multiply the cost of a worker by exp(-tanh(sum of weights)).
        session_id: session; its requests stay on one worker.
        priority: seconds by which the request is moved ahead in the router's queue.
        strict_priority: requests with a higher value go first in the router's queue, regardless of cost.
        policy_class: queue class.
        expected_output_tokens: expected length of the response, for its load; 0 if unknown.
        override: router settings of this request.
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
    """A valid request that is ready to be routed.

    Attributes:
        request_id: id of the request.
        model: model that the request names.
        token_ids: prompt tokens, as packed u32.
        sequence_hashes: one u64 per full block of `token_ids`, chained as in `forebay.core.block_hashes` and salted by
            `lora_name` and `cache_namespace`. Blocks with placeholders include the hashes of their media.
        reply_slot: partition of the topic `tokens` for the response.
        timeout_us: deadline in microseconds, counted from the owner's clock when it applies this event.
        tie_seed: seed for tie-breaking and sampling: xxh3_64 of the nonce as little-endian u64.
        sampling: sampling parameters.
        nonce: distinguishes requests with the same id; a redelivered event repeats it; random, except that for
            the Kafka API it is a hash of partition and offset.
        reply_from: no record of the reply slot before this offset belongs to the response.
        ingress_id: id of the ingress.
        at_us: the ingress's wall clock in microseconds, for display and latency metrics only.
        lora_name: adapter that its worker must have loaded.
        cache_namespace: cached blocks are shared only within one namespace.
        routing: routing hints.
        task: whether to generate a response or an embedding.
        withheld_tokens: prompt tokens that an anonymized recording leaves out of `token_ids`.
        media: images and videos, in prompt order.
        ingress_incarnation: incarnation of the ingress whose HTTP client waits; empty if the request outlives its
            ingress.
        patient: whether the bound and the timeout of the router's queue do not apply, so that only its deadline does.
    """

    request_id: Name
    model: Name
    token_ids: bytes
    sequence_hashes: bytes
    reply_slot: Count
    timeout_us: Annotated[int, msgspec.Meta(ge=1, le=TIMEOUT_US_MAX)]
    tie_seed: U64
    sampling: Sampling
    nonce: U64 = 0
    reply_from: Count = 0
    ingress_id: str = ""
    at_us: int = 0
    lora_name: str = ""
    cache_namespace: str = ""
    routing: RoutingHints = NO_HINTS
    task: Task = "generate"
    withheld_tokens: Count = 0
    media: tuple[Media, ...] = ()
    ingress_incarnation: str = ""
    patient: bool = False

    def __post_init__(self) -> None:
        require_packed("token_ids", self.token_ids, U32_BYTES)
        require_packed("sequence_hashes", self.sequence_hashes, U64_BYTES)
        require_bounded(self.media)

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt in tokens."""
        return len(self.token_ids) // U32_BYTES + self.withheld_tokens


class RequestCancelled(Event, tag="request.cancelled", frozen=True, kw_only=True):
    """The client no longer wants the response."""

    request_id: Name
    reason: str = "client disconnected"
    at_us: int = 0


class RouteQueried(Event, tag="request.route_queried", frozen=True, kw_only=True):
    """Query where a request would be routed now. Nothing is booked and nothing is sent.

    Attributes:
        tie_seed: seed for tie-breaking and sampling, derived from a random nonce.
        lora_name: adapter; empty for none.
        routing: routing hints of the client.
    """

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
