"""Topic `requests`: client requests, as tokenized and hashed by an ingress. The events contain prompts."""

from math import isfinite
from typing import Annotated, Literal

import msgspec

from forebay.events.base import U32_BYTES, U64, U64_BYTES, Count, Event, Name, Part, require_packed
from forebay.events.control import RouterMode
from forebay.events.keys import Weight as TenantWeight
from forebay.events.media import Media, require_bounded
from forebay.events.numbers import Milliseconds, PinSeconds, Weight, require_numbers
from forebay.events.privacy import (
    DROPPED,
    HASHES,
    IDEMPOTENCY_KEY,
    INGRESS,
    KEPT,
    LORA,
    MODEL,
    NAMESPACE,
    QUEUE_CLASS,
    REQUEST_ID,
    SESSION,
    TAINT,
    TENANT,
    UNSET,
    WORKER,
    ZEROED,
    SystemName,
)
from forebay.events.rendering import Rendering

TIMEOUT_US_MAX = 86_400_000_000  # one day; no client waits longer
# Time in which a client may read its response again after its connection or its ingress was lost. Then its request is
# cancelled or aborted. Clients of SSE reconnect after about 3 s by default, and a longer time wastes more output.
RESUME_GRACE_S = 5.0


Task = Literal["generate", "embed", "call"]
Delivery = Literal["worker", "external"]
ENDPOINTS_MAX = 1_024


class StructuredOutput(Part, frozen=True, kw_only=True):
    """Format that the response text must have. The engine generates only tokens that keep to the format.

    Attributes:
        kind: type of the format.
        text: the format. Depending on `kind`, a JSON schema, a regular expression, a JSON list of strings (`choice`) or
            an EBNF grammar. Empty for `json_object`.
    """

    kind: Literal["json_object", "json_schema", "regex", "choice", "grammar"]
    text: Annotated[str, DROPPED] = ""


class TokenBias(Part, frozen=True, kw_only=True):
    """Value that the engine adds to the logit of one token.

    Attributes:
        token_id: the token.
        bias: value added to its logit.
    """

    token_id: Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1), ZEROED]
    bias: float


class Sampling(Part, frozen=True, kw_only=True):
    """Sampling parameters for the engine. Names and meanings are OpenAI's; from `ignore_eos` on they are vLLM's.

    Attributes:
        max_tokens: maximum number of output tokens.
        temperature: softmax temperature; 0 always takes the most likely token.
        top_p: probability mass of the tokens to sample from.
        seed: seed of the engine's sampler; null lets the engine choose one.
        presence_penalty: reduction of the logits of tokens that the text already contains.
        frequency_penalty: reduction of the logit of a token per occurrence in the text.
        logit_bias: values added to the logits of single tokens.
        logprobs: number of most likely tokens returned per output token, with log probabilities; null returns no log
            probabilities.
        structured: format that the response text must have; null for none.
        ignore_eos: whether to continue after the model's end token, so that the output has exactly `max_tokens`.
        top_k: number of most likely tokens to sample from; 0 sets no limit.
        min_p: minimum probability of a token, as a share of the probability of the most likely token.
        repetition_penalty: factor that makes tokens less likely if the text already contains them; 1 is off.
        min_tokens: minimum number of output tokens.
        stop_token_ids: tokens that end the response, in addition to the model's own end token.
    """

    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=(1 << 31) - 1)]
    temperature: float = 1.0
    top_p: float = 1.0
    seed: Annotated[int | None, UNSET] = None
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
    stop_token_ids: Annotated[tuple[Count, ...], ZEROED] = ()


class TaintWeight(Part, frozen=True, kw_only=True):
    """Preference of a request for workers with a taint (weight above 0) or against them (below 0).

    Attributes:
        taint: label of a worker.
        weight: strength of the preference.
    """

    taint: Annotated[Name, TAINT]
    weight: Annotated[float, msgspec.Meta(ge=-1e6, le=1e6)]

    def __post_init__(self) -> None:
        if not isfinite(self.weight):
            raise ValueError(f"the weight of the taint {self.taint} must be a number, not {self.weight}")


class RouterOverride(Part, frozen=True, kw_only=True):
    """Fields of the pool's `RouterConfig` that one request overrides. A null field keeps the pool's value.

    Attributes:
        mode: built-in router mode.
        overlap_score_credit: prefill blocks that the cost is reduced by per block cached on the device.
        prefill_load_scale: weight of prefill blocks in the cost.
        temperature: softmax temperature of the selection; 0 selects the lowest cost.
        assume_kv_reuse: whether a prefix that several running requests of a rank share counts once in its load.
        track_prefill_tokens: whether prompt tokens that are not computed yet count as load.
    """

    mode: RouterMode | None = None
    overlap_score_credit: Weight | None = None
    prefill_load_scale: Weight | None = None
    temperature: Weight | None = None
    assume_kv_reuse: bool | None = None
    track_prefill_tokens: bool | None = None

    def __post_init__(self) -> None:
        require_numbers(self)


class RoutingHints(Part, frozen=True, kw_only=True):
    """Conditions and wishes of a client for the routing of its request.

    Names and meanings are Dynamo's (`nvext`, routing headers).

    Attributes:
        worker_id: only worker that may take the request; empty for any.
        rank: only rank of `worker_id` that may take the request; null for any.
        allowed_workers: only workers that may take the request; empty for any.
        required_taints: taints that the worker must have.
        preferred_taints: preferences for taints. The cost of a worker is multiplied by exp(-tanh(sum of the weights of
            its taints)).
        session_id: id of the session; empty for none. One worker rank serves all requests of a session.
        priority: seconds by which the request is moved ahead in the router's queue.
        strict_priority: requests with a higher value leave the router's queue first, whatever their `priority`.
        policy_class: name of the queue class (`QueueClass`) in which the request waits; the default class if no class
            has this name.
        expected_output_tokens: expected length of the response, used to estimate the load of its rank; 0 if unknown.
        override: router settings for this request; null for the pool's.
        ttft_target_ms: wanted time to first token in milliseconds, for the choice of a pool; null for none.
        itl_target_ms: wanted inter-token latency in milliseconds, for the choice of a pool; null for none.
        endpoints: only servers (`WorkerSpec.endpoint`) that may take an external request, as its gateway names them;
            empty for any.
        endpoint: endpoint that a call is for, `namespace.component.endpoint`, which the worker must have; empty for a
            request to the model.
    """

    worker_id: Annotated[str, WORKER] = ""
    rank: Count | None = None
    allowed_workers: Annotated[tuple[Name, ...], WORKER] = ()
    required_taints: Annotated[tuple[Name, ...], TAINT] = ()
    preferred_taints: tuple[TaintWeight, ...] = ()
    session_id: Annotated[str, SESSION] = ""
    priority: Annotated[int, msgspec.Meta(ge=-(1 << 31), le=(1 << 31) - 1)] = 0
    strict_priority: Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)] = 0
    policy_class: Annotated[str, QUEUE_CLASS] = ""
    expected_output_tokens: Count = 0
    override: RouterOverride | None = None
    ttft_target_ms: Milliseconds | None = None
    itl_target_ms: Milliseconds | None = None
    endpoints: Annotated[tuple[SystemName, ...], msgspec.Meta(max_length=ENDPOINTS_MAX)] = ()
    endpoint: Annotated[str, KEPT] = ""


NO_HINTS = RoutingHints()


def reply_key_of(tie_seed: int) -> int:
    """Return the number that every event of a response has: the seed of its request, without the lowest bit."""
    return tie_seed >> 1  # JSON events have 63 bits


class RequestSubmitted(Event, tag="request.submitted", frozen=True, kw_only=True):
    """A valid request that is ready to be routed.

    Attributes:
        token_ids: prompt tokens, as packed u32.
        sequence_hashes: one u64 per full block of `token_ids`, as computed by `forebay.core.block_hashes`. They depend
            on `lora_name` and `cache_namespace`, too. Hashes of blocks with placeholder tokens also depend on the
            hashes of the images and videos.
        timeout_us: microseconds after which the request expires. They count from the moment when the owner applies this
            event, on the owner's clock.
        tie_seed: seed for tie-breaking and sampling: xxh3_64 of the nonce as little-endian u64.
        nonce: distinguishes requests with the same id. A redelivered event has the same nonce. The HTTP ingress draws
            it at random; for the Kafka API it is a hash of partition and offset.
        reply_from: first offset of the reply slot that may have a record of the response.
        at_us: the ingress's wall clock in microseconds, for display and latency metrics only.
        lora_name: adapter that the worker must have loaded; empty for none.
        cache_namespace: requests share cached blocks only if they have the same value.
        withheld_tokens: number of prompt tokens that an anonymized recording leaves out of `token_ids`.
        media: images and videos, in prompt order.
        ingress_incarnation: incarnation of the ingress whose HTTP client waits; empty if the request outlives its
            ingress.
        patient: whether the request ignores the length limit and the timeout of the router's queue. Then only its
            deadline ends the wait.
        kv_pin_s: seconds for which the worker keeps the KV of the prompt in its host memory and on its disk; 0 to keep
            it until it is evicted.
        rendering: how the output becomes the response of the client; null for a part of a response other than the
            first, and for a request whose ingress was older.
        idempotency_key: hash of the client's key; 0 for none. While the owner knows the key from an earlier request, it
            does not run the request, but locates the earlier one for its client (`RequestRepeated`).
        body_hash: hash of the client's request, to recognise a key that was reused with another body; 0 without a key.
        delivery: who brings the request to the server. `worker`: the owner sends a work item to the worker. `external`:
            a gateway sends the request to the server of the selected worker, whose endpoint it gets by
            `DestinationSelected`; nobody writes the output to the reply slot.
        tenant: tenant that owns the API key; empty for a request without a key of a tenant.
        key_id: public id of this API key (`KeySet.key_id`).
        weight: share of the tenant in the router's queue, relative to the weights of other tenants.
        end_user: hash of the tenant and the value by which the client names its own user (`safety_identifier` or
            `user`); 0 for none.
        traceparent: trace context of the client, as in the header `traceparent` of W3C; empty for none.
        shares_prompt: whether the request is a further choice of the client for a prompt, whose tokens count once.
        payload: argument of a call, as JSON; empty for other tasks.
    """

    request_id: Annotated[Name, REQUEST_ID]
    model: Annotated[Name, MODEL]
    token_ids: Annotated[bytes, DROPPED]
    sequence_hashes: Annotated[bytes, HASHES]
    reply_slot: Count
    timeout_us: Annotated[int, msgspec.Meta(ge=1, le=TIMEOUT_US_MAX)]
    tie_seed: U64
    sampling: Sampling
    nonce: U64 = 0
    reply_from: Count = 0
    ingress_id: Annotated[str, DROPPED] = ""
    at_us: int = 0
    lora_name: Annotated[str, LORA] = ""
    cache_namespace: Annotated[str, NAMESPACE] = ""
    routing: RoutingHints = NO_HINTS
    task: Task = "generate"
    withheld_tokens: Count = 0
    media: tuple[Media, ...] = ()
    ingress_incarnation: Annotated[str, INGRESS] = ""
    patient: bool = False
    kv_pin_s: PinSeconds = 0
    rendering: Rendering | None = None
    idempotency_key: Annotated[U64, IDEMPOTENCY_KEY] = 0
    body_hash: Annotated[U64, ZEROED] = 0
    delivery: Delivery = "worker"
    tenant: Annotated[str, TENANT] = ""
    key_id: Annotated[str, DROPPED] = ""
    weight: TenantWeight = 1
    end_user: Annotated[U64, ZEROED] = 0
    traceparent: Annotated[str, DROPPED] = ""
    shares_prompt: bool = False
    payload: Annotated[str, DROPPED] = ""

    def __post_init__(self) -> None:
        require_packed("token_ids", self.token_ids, U32_BYTES)
        require_packed("sequence_hashes", self.sequence_hashes, U64_BYTES)
        require_bounded(self.media)

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt in tokens, including withheld tokens."""
        return len(self.token_ids) // U32_BYTES + self.withheld_tokens

    @property
    def reply_key(self) -> int:
        """Number that every event of the response has."""
        return reply_key_of(self.tie_seed)


class RequestCancelled(Event, tag="request.cancelled", frozen=True, kw_only=True):
    """The client disconnected or cancelled the request, so nobody needs further output.

    Attributes:
        reason: who cancelled the request, or how.
        ingress_incarnation: incarnation of the ingress whose clients have left; empty for a cancellation that does not
            depend on the ingress. If a client waits at another ingress, the request continues.
        is_complete: whether the client has its complete response, for example because of a stop string. The idempotency
            key of the request then stays known.
        output_tokens: output tokens that the ingress has passed to the client; null if it does not know.
    """

    request_id: Annotated[Name, REQUEST_ID]
    reason: Annotated[str, DROPPED] = "client disconnected"
    at_us: int = 0
    ingress_incarnation: Annotated[str, INGRESS] = ""
    is_complete: bool = False
    output_tokens: Count | None = None


class RequestResumed(Event, tag="request.resumed", frozen=True, kw_only=True):
    """A further client reads the response of a request, at any ingress.

    The request runs until every ingress with such a client has cancelled it or is lost. The event has no effect if the
    request has ended, or outlives its ingress.

    Attributes:
        ingress_incarnation: incarnation of this ingress; without it, the event has no effect.
    """

    SINCE = 2

    request_id: Annotated[Name, REQUEST_ID]
    ingress_incarnation: Annotated[str, INGRESS] = ""
    at_us: int = 0


class RouteQueried(Event, tag="request.route_queried", frozen=True, kw_only=True):
    """Question where the owner would route a request now. The owner books nothing and sends no work.

    Attributes:
        request_id: id of the query.
        tie_seed: seed for tie-breaking and sampling, derived from a random nonce.
    """

    request_id: Annotated[Name, REQUEST_ID]
    model: Annotated[Name, MODEL]
    prompt_tokens: Annotated[int, msgspec.Meta(ge=1, le=(1 << 31) - 1)]
    sequence_hashes: Annotated[bytes, HASHES]
    reply_slot: Count
    tie_seed: U64
    at_us: int = 0
    lora_name: Annotated[str, LORA] = ""
    routing: RoutingHints = NO_HINTS

    def __post_init__(self) -> None:
        require_packed("sequence_hashes", self.sequence_hashes, U64_BYTES)

    @property
    def reply_key(self) -> int:
        """Number that the response has."""
        return reply_key_of(self.tie_seed)


RequestEvent = RequestSubmitted | RequestCancelled | RequestResumed | RouteQueried
