"""Topic `control`: configuration of pools, and commands of operators."""

from typing import Annotated, ClassVar, Literal

import msgspec

from forebay.events.base import Count, Event, Name, Part
from forebay.events.numbers import Fraction, Seconds, Weight, require_numbers
from forebay.events.pools import PoolRule
from forebay.events.privacy import LORA, MODEL, NONCE, PATH, POOL, REQUEST_ID, WORKER, OperatorName, SystemName

RouterMode = Literal["kv", "round-robin", "random", "power-of-two", "least-loaded", "direct"]
QueuePolicy = Literal["fcfs", "wspt", "lcfs"]
DisaggPolicy = Literal["always", "never", "classic", "isl_bounding", "prefill_load", "isl_or_load"]
Role = Literal["aggregated", "prefill", "decode", "encode"]  # stage of a request that a worker computes

DEFAULT_CLASS = "default"
CLASSES_MAX = 256  # every queued request is compared with each class


Action = Literal[
    "clear_kv_blocks", "load_lora", "unload_lora", "list_loras", "sleep", "wake_up", "pause", "resume", "drain"
]
LORA_CHANGES: frozenset[Action] = frozenset(("load_lora", "unload_lora"))  # actions that change the loaded adapters

# SHA-256 of the files of an adapter, in hex; empty if unknown. Masked, because it identifies public adapters.
LoraDigest = Annotated[str, msgspec.Meta(max_length=64), PATH]
COMMAND_TIMEOUT_US_MAX = 3_600_000_000  # one hour: loading an adapter from a slow disk takes minutes


class Command(Part, frozen=True, kw_only=True):
    """Operator's command to a worker. The names of the engine's actions are Dynamo's and vLLM's.

    Attributes:
        action: what the engine does. After `drain` the worker gets no new requests, finishes those it has, and leaves.
        lora_name: adapter to load or unload; empty for other actions.
        lora_path: directory of the adapter, readable by the worker, or its URI; empty for other actions.
        lora_digest: digest that the files at the URI must have; empty for any.
        placement: `workers`: the named workers get the command, or all. `auto`: the owner adds the adapter to its
            catalog, and loads it where requests need it.
        level: level of the action `sleep`: 1 keeps the weights in host memory, 2 discards them.
    """

    ADDED: ClassVar = {"lora_digest": "", "placement": "workers"}

    action: Action
    lora_name: Annotated[str, msgspec.Meta(max_length=256), LORA] = ""
    lora_path: Annotated[str, msgspec.Meta(max_length=4_096), PATH] = ""
    level: Annotated[int, msgspec.Meta(ge=1, le=2)] = 1
    lora_digest: LoraDigest = ""
    placement: Literal["workers", "auto"] = "workers"


class BusyThresholds(Part, frozen=True, kw_only=True):
    """Thresholds above which a rank counts as busy. A worker is busy if all its ranks are. Names are Dynamo's.

    Attributes:
        active_decode_blocks_threshold: share of its KV blocks in use above which a rank is busy; null is off.
        active_prefill_tokens_threshold: prompt tokens sent to a rank and not computed yet above which it is busy; null
            is off.
        active_prefill_tokens_threshold_frac: prompt tokens sent to a rank and not computed yet above which it is busy,
            as a multiple of its `max_num_batched_tokens`; null is off.
    """

    active_decode_blocks_threshold: Fraction | None = None
    active_prefill_tokens_threshold: Count | None = None
    active_prefill_tokens_threshold_frac: Weight | None = None

    def __post_init__(self) -> None:
        require_numbers(self)


class QueueClass(Part, frozen=True, kw_only=True):
    """One of the classes of the router's queue. Each class is a queue of its own.

    Classes are served by deficit round robin: the turn of a class adds `quantum` tokens to its deficit counter, and a
    request that leaves the queue subtracts its uncached tokens. Tenants in a class take turns in the same way, with
    64 tokens, or `quantum` if it is lower, times the weight of the tenant.

    Attributes:
        name: name of the class, as in `RoutingHints.policy_class`. If several classes share a name, a request enters
            the one with the highest `uncached_tokens_min` that the request reaches.
        quantum: tokens that a turn adds to the deficit counter of the class.
        uncached_tokens_min: minimum number of uncached prompt tokens of a request in this class.
        policy: order of the requests in the class; null uses the policy of the queue.
        requests_per_worker_max: maximum number of requests in the class per ready worker of the pool.
        timeout_s: seconds after which the owner aborts a request that is queued in this class; null uses `timeout_s` of
            the queue, and 0 sets no such limit.
    """

    ADDED: ClassVar = {"timeout_s": None}

    name: SystemName = DEFAULT_CLASS
    quantum: Annotated[int, msgspec.Meta(ge=1, le=(1 << 31) - 1)] = 8_192
    uncached_tokens_min: Count = 0
    policy: QueuePolicy | None = None
    requests_per_worker_max: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 1_000
    timeout_s: Seconds | None = None

    def __post_init__(self) -> None:
        require_numbers(self)


class QueueConfig(Part, frozen=True, kw_only=True):
    """Router queue of a pool: when requests are queued, how many, for how long, and in which order.

    Attributes:
        threshold: a request is queued while every eligible rank has more prompt tokens to compute than this multiple of
            its `max_num_batched_tokens`; null sets no such limit.
        policy: order of the requests in classes that have no policy of their own.
        classes: classes of the queue.
        run_ahead: the owner sends a rank up to `max_num_seqs` * (1 + `run_ahead`) requests at a time and queues all
            others. Null sets no such limit.
        depth: maximum number of queued requests, as a multiple of the `max_num_seqs` of all ranks of the pool; null
            sets no such limit.
        timeout_s: seconds after which the owner aborts a queued request, in classes without a timeout of their own; 0
            sets no such limit.
    """

    threshold: Weight | None = None
    policy: QueuePolicy = "fcfs"
    classes: tuple[QueueClass, ...] = (QueueClass(),)
    run_ahead: Weight | None = None
    depth: Weight | None = None
    timeout_s: Seconds = 0.0

    def __post_init__(self) -> None:
        require_numbers(self)
        if len(self.classes) > CLASSES_MAX:
            raise ValueError(f"too many queue classes: {len(self.classes)}, the maximum is {CLASSES_MAX}")
        kinds = [(one.name, one.uncached_tokens_min) for one in self.classes]
        if len(set(kinds)) < len(kinds):
            raise ValueError("duplicate queue class: two classes have the same name and the same uncached_tokens_min")
        floors = {one.name for one in self.classes if one.uncached_tokens_min == 0}
        if DEFAULT_CLASS not in floors:
            raise ValueError(f"missing queue class: {DEFAULT_CLASS!r} with uncached_tokens_min 0 is required")
        if lacking := sorted({one.name for one in self.classes} - floors):
            raise ValueError(f"missing queue class: {lacking[0]!r} with uncached_tokens_min 0 is required")


class DisaggConfig(Part, frozen=True, kw_only=True):
    """Conditional disaggregation: which prompts of a decode pool the prefill pool of its model computes.

    The worker that generates the response computes all other prompts. Names and meanings are Dynamo's; `classic` is the
    rule of its first releases. The length of a prompt does not include tokens that the selected decode worker has
    cached.

    Attributes:
        policy: `always` uses the prefill pool, `never` does not. `classic` uses it for prompts longer than
            `max_local_prefill_length` while fewer than `max_prefill_queue_size` requests wait there. `isl_bounding`
            uses it for prompts that reach `eff_isl_threshold`, and for prompts whose uncached share reaches
            `eff_isl_ratio_threshold`. `prefill_load` uses it while the selected prefill worker is not busy.
            `isl_or_load` uses it if both `isl_bounding` and `prefill_load` would.
        max_local_prefill_length: limit of `classic`, in tokens.
        max_prefill_queue_size: limit of `classic`, in requests, at least 1. One request per prefill worker is in
            progress; all its others count as waiting.
        eff_isl_threshold: limit of `isl_bounding`, in tokens.
        eff_isl_ratio_threshold: limit of `isl_bounding`, as a share of the prompt.
        prefill_busy_threshold: a prefill worker is busy if it has more prompt tokens to compute than this multiple of
            its `max_num_batched_tokens`; null means never.
        decode_busy_threshold: if more than this share of the decode worker's KV blocks is in use, the prefill pool
            computes the prompt, unless the policy is `classic` or `never`; null means never.
        enforce: whether only the prefill pool may compute prompts that the policy sends there. If it cannot, the owner
            aborts or rejects the request. Otherwise the decode worker computes the prompt.
    """

    policy: DisaggPolicy = "always"
    max_local_prefill_length: Count = 1_000
    max_prefill_queue_size: Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)] = 2
    eff_isl_threshold: Count = 2_048
    eff_isl_ratio_threshold: Fraction = 0.7
    prefill_busy_threshold: Weight | None = 1.0
    decode_busy_threshold: Fraction | None = None
    enforce: bool = False

    def __post_init__(self) -> None:
        require_numbers(self)
        if self.max_prefill_queue_size < 1:
            raise ValueError("max_prefill_queue_size must be at least 1; to disable remote prefill, use policy 'never'")


class RouterConfig(Part, frozen=True, kw_only=True):
    """Routing configuration of a pool. Names, defaults and meanings are those of Dynamo's router configuration.

    Attributes:
        selection_policy: how the cost combines prefill blocks and decode blocks: `default` adds them, `lmetric`
            multiplies them.
        overlap_score_credit: prefill blocks that the cost is reduced by per block cached on the device.
        overlap_score_credit_decay: how much smaller the credit of cached blocks is for ranks that have more prompt
            tokens to compute than others; 0 is off.
        prefill_load_scale: weight of prefill blocks in the cost.
        host_cache_hit_weight: prefill blocks that the cost is reduced by per block cached in host memory.
        disk_cache_hit_weight: prefill blocks that the cost is reduced by per block cached on disk.
        decode_active_request_weight: blocks added to the cost per request in flight.
        temperature: softmax temperature. 0 selects the lowest cost; above 0, the selection is a random draw weighted
            by cost.
        track_prefill_tokens: whether prompts that are not computed yet count as load.
        track_active_blocks: whether blocks of requests in flight count as load.
        track_output_blocks: whether workers report blocks of output tokens, which then count as load.
        assume_kv_reuse: whether a block that several running requests of a rank share counts once in its load.
        use_kv_events: whether the prefix index uses KV events. Otherwise the owner assumes for `ttl_s` that a rank has
            cached each prompt routed to it.
        ttl_s: seconds for which the owner assumes a routed prompt to be cached at a worker without KV events.
        approximate_blocks_max: maximum number of assumed blocks. Beyond it the owner drops the blocks whose time ends
            first.
        predicted_ttl_s: seconds for which the owner assumes a routed prompt to be cached until KV events confirm it; 0
            is off.
        session_ttl_s: seconds after its last request for which a session keeps its worker; 0 disables sessions.
        session_mode: `hard` routes a session to no other worker as long as its worker is in the fleet; `soft` only
            prefers its worker.
        busy: thresholds above which ranks count as busy.
        queue: router queue.
        disagg: conditional disaggregation; for decode pools.
        shared_cache_hit_weight: prefill blocks that the cost is reduced by per block in the shared store of the worker.
        tier_credit: how much blocks outside of the device reduce the cost: `weights` uses the weights above, `measured`
            the durations that the rank measured, or the weights until it has measured them.
        eviction_weight: prefill blocks that the cost is increased by per cached block that the rank must evict for the
            prompt; 0 is off.
    """

    mode: SystemName = "kv"
    selection_policy: Literal["default", "lmetric"] = "default"
    overlap_score_credit: Weight = 1.0
    overlap_score_credit_decay: Weight = 0.0
    prefill_load_scale: Weight = 1.0
    host_cache_hit_weight: Weight = 0.75
    disk_cache_hit_weight: Weight = 0.25
    decode_active_request_weight: Weight = 0.0
    temperature: Weight = 0.0
    track_prefill_tokens: bool = True
    track_active_blocks: bool = True
    track_output_blocks: bool = False
    assume_kv_reuse: bool = True
    use_kv_events: bool = True
    ttl_s: Seconds = 120.0
    approximate_blocks_max: Annotated[int, msgspec.Meta(ge=1, le=1 << 30)] = 1 << 20
    predicted_ttl_s: Seconds = 0.0
    session_ttl_s: Seconds = 0.0
    session_mode: Literal["hard", "soft"] = "hard"
    busy: BusyThresholds = BusyThresholds()
    queue: QueueConfig = QueueConfig()
    disagg: DisaggConfig = DisaggConfig()
    shared_cache_hit_weight: Weight = 0.5
    tier_credit: Literal["weights", "measured"] = "weights"
    eviction_weight: Weight = 4.0

    def __post_init__(self) -> None:
        require_numbers(self)


class PoolConfigured(Event, tag="control.pool_configured", frozen=True, kw_only=True):
    """A pool has this configuration from now on. It replaces the whole earlier configuration.

    A pool of the role `encode` encodes the images and videos of requests to its model. A pool of the role `prefill`
    computes prompts for the `decode` pool of its model with the same block size, which generates the responses.

    Attributes:
        router: routing configuration.
        attempts_max: number of attempts at a request. The owner aborts a request after it has lost this many workers.
        role: stage of requests that the pool computes.
    """

    NOUN: ClassVar = "pools"

    pool: SystemName
    model: SystemName
    block_size: Annotated[int, msgspec.Meta(ge=1, le=(1 << 31) - 1)]
    router: RouterConfig = RouterConfig()
    attempts_max: Annotated[int, msgspec.Meta(ge=1)] = 3
    at_us: int = 0
    role: Role = "aggregated"

    def with_mode(self, mode: str) -> "PoolConfigured":
        """Return this configuration with another router mode."""
        return msgspec.structs.replace(self, router=msgspec.structs.replace(self.router, mode=mode))

    def without_class_timeouts(self) -> "PoolConfigured":
        """Return this configuration as an owner applies it that does not know `QueueClass.timeout_s`."""
        queue = self.router.queue
        classes = tuple(msgspec.structs.replace(one, timeout_s=None) for one in queue.classes)
        queue = msgspec.structs.replace(queue, classes=classes)
        return msgspec.structs.replace(self, router=msgspec.structs.replace(self.router, queue=queue))


class BusyThresholdsSet(Event, tag="control.busy_thresholds_set", frozen=True, kw_only=True):
    """An operator changed the busy thresholds of a model's pools.

    They are valid until the next change or `PoolConfigured`.

    Attributes:
        thresholds: new busy thresholds.
    """

    NOUN: ClassVar = "busy thresholds"

    model: Annotated[Name, MODEL]
    thresholds: BusyThresholds
    at_us: int = 0
    operator: OperatorName = ""


class DisaggregationSet(Event, tag="control.disaggregation_set", frozen=True, kw_only=True):
    """An operator changed the disaggregation of a model's decode pools.

    The change is valid until the next change or `PoolConfigured`.

    Attributes:
        disagg: new disaggregation settings.
    """

    NOUN: ClassVar = "disaggregation settings"

    model: Annotated[Name, MODEL]
    disagg: DisaggConfig
    at_us: int = 0
    operator: OperatorName = ""


class PolicySet(Event, tag="control.policy_set", frozen=True, kw_only=True):
    """An operator changed the policy that selects the workers of a pool's requests.

    The change is valid until the next change or `PoolConfigured`.
    """

    NOUN: ClassVar = "policies"

    model: Annotated[Name, MODEL]
    pool: SystemName
    mode: SystemName
    at_us: int = 0
    operator: OperatorName = ""


class WorkerCommanded(Event, tag="control.worker_commanded", frozen=True, kw_only=True):
    """An operator gives a command to workers of a model. The owner writes the outcomes to the reply slot.

    Attributes:
        model: model whose workers get the command.
        timeout_us: microseconds on the owner's clock after which a worker without a response has timed out.
        pool: pool whose workers get the command; empty for all pools of the model.
        worker_ids: workers that get the command; empty for all workers of the pools.
        nonce: distinguishes commands with the same id. A redelivered event has the same nonce.
        operator: name of the operator; empty for commands that an ingress sends by itself.
    """

    command_id: Annotated[Name, REQUEST_ID]
    model: Annotated[Name, MODEL]
    command: Command
    reply_slot: Count
    timeout_us: Annotated[int, msgspec.Meta(ge=1, le=COMMAND_TIMEOUT_US_MAX)]
    pool: Annotated[str, msgspec.Meta(max_length=256), POOL] = ""
    worker_ids: Annotated[tuple[Name, ...], msgspec.Meta(max_length=1_024), WORKER] = ()
    nonce: Annotated[Count, NONCE] = 0
    at_us: int = 0
    operator: OperatorName = ""


PoolSetting = PoolConfigured | PolicySet | BusyThresholdsSet | DisaggregationSet | PoolRule
ControlEvent = PoolSetting | WorkerCommanded
