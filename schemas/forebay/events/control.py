"""Topic `control`: configuration and admin commands."""

from typing import Annotated, Literal

import msgspec

from forebay.events.base import Count, Event, Name, Part

RouterMode = Literal["kv", "round-robin", "random", "power-of-two", "least-loaded", "direct"]
QueuePolicy = Literal["fcfs", "wspt", "lcfs"]
DisaggPolicy = Literal["always", "never", "classic", "isl_bounding", "prefill_load", "isl_or_load"]
Role = Literal["aggregated", "prefill", "decode", "encode"]  # stage of a request that a worker computes
Weight = Annotated[float, msgspec.Meta(ge=0.0, le=1e6)]  # finite, so that every cost is finite
Fraction = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=31_536_000.0)]  # a year

DEFAULT_CLASS = "default"
CLASSES_MAX = 256  # every queued request is compared with each class


def require_numbers(part: msgspec.Struct, limits: dict[str, float]) -> None:
    """Check that fields are numbers from 0 to their limit; None is allowed. Raises ValueError otherwise.

    The decoder checks events from the wire; this function checks structs that are created in a process.
    """
    for name, most in limits.items():
        value = getattr(part, name)
        if value is not None and not 0 <= value <= most:  # also false for NaN
            raise ValueError(f"{name} must be a number from 0 to {most:g}, not {value}")


Action = Literal["clear_kv_blocks", "load_lora", "unload_lora", "list_loras", "sleep", "wake_up", "pause", "resume"]
LORA_CHANGES: frozenset[Action] = frozenset(("load_lora", "unload_lora"))  # actions that change the loaded adapters

COMMAND_TIMEOUT_US_MAX = 3_600_000_000  # one hour: loading an adapter from a slow disk takes minutes


class Command(Part, frozen=True, kw_only=True):
    """Administrative command to an engine. Action names are Dynamo's and vLLM's.

    Attributes:
        action: what the engine does.
        lora_name: adapter to load or unload.
        lora_path: directory of the adapter, readable by the worker.
        level: sleep level of the action `sleep`: 1 keeps the weights in host memory, 2 drops them.
    """

    action: Action
    lora_name: Annotated[str, msgspec.Meta(max_length=256)] = ""
    lora_path: Annotated[str, msgspec.Meta(max_length=4_096)] = ""
    level: Annotated[int, msgspec.Meta(ge=1, le=2)] = 1


class BusyThresholds(Part, frozen=True, kw_only=True):
    """Thresholds above which a rank counts as busy. A worker is busy if all its ranks are. Names are Dynamo's.

    Attributes:
        active_decode_blocks_threshold: share of the rank's KV blocks in use; null is off.
        active_prefill_tokens_threshold: prompt tokens queued or being computed; null is off.
        active_prefill_tokens_threshold_frac: the same as a multiple of the worker's `max_num_batched_tokens`; null is
            off.
    """

    active_decode_blocks_threshold: Fraction | None = None
    active_prefill_tokens_threshold: Count | None = None
    active_prefill_tokens_threshold_frac: Weight | None = None

    def __post_init__(self) -> None:
        require_numbers(
            self,
            {
                "active_decode_blocks_threshold": 1.0,
                "active_prefill_tokens_threshold": (1 << 63) - 1,
                "active_prefill_tokens_threshold_frac": 1e6,
            },
        )


class QueueClass(Part, frozen=True, kw_only=True):
    """Queue of one policy class.

    Classes take turns by deficit round robin: a turn adds `quantum` tokens, and a request costs its uncached tokens.

    Attributes:
        name: policy class. If several classes share a name, a request enters the one with the highest
            `uncached_tokens_min` that it reaches.
        quantum: tokens that a turn adds to the deficit counter of the class.
        uncached_tokens_min: fewest uncached prompt tokens of a request in this class.
        policy: order of requests; null uses the policy of the queue.
        requests_per_worker_max: maximum length of the queue per ready worker of the pool.
    """

    name: Name = DEFAULT_CLASS
    quantum: Annotated[int, msgspec.Meta(ge=1, le=(1 << 31) - 1)] = 8_192
    uncached_tokens_min: Count = 0
    policy: QueuePolicy | None = None
    requests_per_worker_max: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 1_000


class QueueConfig(Part, frozen=True, kw_only=True):
    """Router queue of a pool: when requests are queued, how many, for how long, and in which order.

    Attributes:
        threshold: requests are queued while every eligible rank has more than this multiple of its
            `max_num_batched_tokens` to prefill; null sets no such limit.
        policy: order of a class that has no policy of its own.
        classes: classes of the queue.
        run_ahead: a rank is sent at most this share of its `max_num_seqs` beyond `max_num_seqs`; further requests are
            queued. Null sends any number.
        depth: maximum number of queued requests, as a multiple of the `max_num_seqs` of all ranks of the pool; null
            sets no such limit.
        timeout_s: seconds after which a queued request is aborted; 0 sets no such limit.
    """

    threshold: Weight | None = None
    policy: QueuePolicy = "fcfs"
    classes: tuple[QueueClass, ...] = (QueueClass(),)
    run_ahead: Weight | None = None
    depth: Weight | None = None
    timeout_s: Seconds = 0.0

    def __post_init__(self) -> None:
        require_numbers(self, {"threshold": 1e6, "run_ahead": 1e6, "depth": 1e6, "timeout_s": 31_536_000.0})
        if len(self.classes) > CLASSES_MAX:
            raise ValueError(f"too many queue classes: {len(self.classes)}, the maximum is {CLASSES_MAX}")
        kinds = [(one.name, one.uncached_tokens_min) for one in self.classes]
        if len(set(kinds)) < len(kinds):
            raise ValueError("duplicate queue class: two classes have the same name and the same uncached_tokens_min")
        floors = {one.name for one in self.classes if one.uncached_tokens_min == 0}
        if DEFAULT_CLASS not in floors:
            raise ValueError(f"missing queue class: {DEFAULT_CLASS!r} with uncached_tokens_min 0 is required")
        if any(one.name not in floors for one in self.classes):
            raise ValueError("every queue class needs one of its name with uncached_tokens_min 0")


class DisaggConfig(Part, frozen=True, kw_only=True):
    """Conditional disaggregation: which prompts of a decode pool the prefill pool of its model computes.

    All other prompts are computed by the worker that generates the response. Names and meanings are Dynamo's; `classic`
    is the rule of its first releases. Prompt lengths do not count tokens that the decode worker in question has cached.

    Attributes:
        policy: `always` or `never` use the prefill pool. `classic` uses it for prompts longer than
            `max_local_prefill_length` while fewer than `max_prefill_queue_size` requests wait there. `isl_bounding`
            uses it for prompts that reach `eff_isl_threshold` or are cached to less than 1 - `eff_isl_ratio_threshold`.
            `prefill_load` uses it while the prefill worker in question is not busy. `isl_or_load` uses it if both of
            these rules would.
        max_local_prefill_length: in tokens.
        max_prefill_queue_size: requests at prefill workers beyond one per worker; at least 1.
        eff_isl_threshold: in tokens.
        eff_isl_ratio_threshold: share of the prompt.
        prefill_busy_threshold: a prefill worker is busy with more prompt tokens than this multiple of its
            `max_num_batched_tokens`; null means never.
        decode_busy_threshold: a decode worker whose share of KV blocks in use is above this computes no prompt itself,
            if the policy leaves the choice; null means never.
        enforce: whether a request is aborted or rejected if its prompt cannot be computed in the prefill pool.
            Otherwise the decode worker computes it.
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
        require_numbers(
            self,
            {
                "max_local_prefill_length": (1 << 63) - 1,
                "max_prefill_queue_size": (1 << 63) - 1,
                "eff_isl_threshold": (1 << 63) - 1,
                "eff_isl_ratio_threshold": 1.0,
                "prefill_busy_threshold": 1e6,
                "decode_busy_threshold": 1.0,
            },
        )
        if self.max_prefill_queue_size < 1:
            raise ValueError("max_prefill_queue_size must be at least 1; to disable remote prefill, use policy 'never'")


class RouterConfig(Part, frozen=True, kw_only=True):
    """Routing configuration of a pool. Names, defaults and meanings are Dynamo's (router configuration).

    Attributes:
        mode: router mode, or the dotted path of a custom policy class.
        selection_policy: `default` adds prefill and decode blocks, `lmetric` multiplies them.
        overlap_score_credit: prefill blocks saved per block that is cached on the device.
        overlap_score_credit_decay: reduction of that credit for ranks with more to prefill than others.
        prefill_load_scale: weight of prefill blocks; formerly `overlap_score_weight` in Dynamo.
        host_cache_hit_weight: prefill blocks saved per block in host memory.
        disk_cache_hit_weight: prefill blocks saved per block on disk.
        decode_active_request_weight: blocks added to the cost per request in flight.
        temperature: 0 selects the lowest cost; above 0, the selection is a random draw weighted by cost.
        track_prefill_tokens: whether prompts that are not computed yet count as load.
        track_active_blocks: whether blocks of requests in flight count as load.
        track_output_blocks: whether workers report blocks of output tokens, which then count as load.
        assume_kv_reuse: whether requests that share a prefix share its blocks while they run.
        use_kv_events: whether KV events are used. If not, routed prompts are assumed to be cached.
        ttl_s: seconds for which a prompt routed to a worker without KV events is assumed to be cached.
        approximate_blocks_max: maximum number of assumed blocks; beyond it the blocks with the earliest due time are
            removed.
        predicted_ttl_s: seconds for which a routed prompt is assumed to be cached until KV events confirm it; 0 is off.
        session_ttl_s: seconds for which a session keeps its worker after its last request; 0 is off.
        session_mode: `hard` routes a session to no other worker while its worker lives, `soft` prefers its worker.
        busy: thresholds above which ranks count as busy.
        queue: router queue.
        disagg: conditional disaggregation; for decode pools.
    """

    mode: Name = "kv"
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

    def __post_init__(self) -> None:
        weights = (
            "overlap_score_credit",
            "overlap_score_credit_decay",
            "prefill_load_scale",
            "host_cache_hit_weight",
            "disk_cache_hit_weight",
            "decode_active_request_weight",
            "temperature",
        )
        require_numbers(self, dict.fromkeys(weights, 1e6))
        require_numbers(self, dict.fromkeys(("ttl_s", "predicted_ttl_s", "session_ttl_s"), 31_536_000.0))


class PoolConfigured(Event, tag="control.pool_configured", frozen=True, kw_only=True):
    """The configuration of a pool is set; its router configuration is replaced as a whole.

    A pool of the role `encode` encodes the images and videos of requests to its model. A pool of the role `prefill`
    computes prompts for a `decode` pool of its model with the same block size, which generates the responses.

    Attributes:
        pool: name of the pool.
        model: model that the pool serves.
        block_size: tokens per KV block.
        router: routing configuration.
        attempts_max: workers that may be lost before a request is aborted.
        at_us: wall clock in microseconds.
        role: stage of requests that the pool computes.
    """

    pool: Name
    model: Name
    block_size: Annotated[int, msgspec.Meta(ge=1, le=(1 << 31) - 1)]
    router: RouterConfig = RouterConfig()
    attempts_max: Annotated[int, msgspec.Meta(ge=1)] = 3
    at_us: int = 0
    role: Role = "aggregated"


class BusyThresholdsSet(Event, tag="control.busy_thresholds_set", frozen=True, kw_only=True):
    """An operator changed the busy thresholds of a model. Valid until the next change or `PoolConfigured`.

    Attributes:
        thresholds: new busy thresholds of the model's pools.
    """

    model: Name
    thresholds: BusyThresholds
    at_us: int = 0


class DisaggregationSet(Event, tag="control.disaggregation_set", frozen=True, kw_only=True):
    """An operator changed the disaggregation of a model. Valid until the next change or `PoolConfigured`.

    Attributes:
        disagg: new disaggregation settings of the model's decode pools.
    """

    model: Name
    disagg: DisaggConfig
    at_us: int = 0


class WorkerCommanded(Event, tag="control.worker_commanded", frozen=True, kw_only=True):
    """An operator sent a command to workers of a model. The outcomes are written to the reply slot.

    Attributes:
        command_id: id of the command.
        model: model whose workers get the command.
        command: what the workers do.
        reply_slot: partition of the topic `tokens` for the outcomes.
        timeout_us: microseconds on the owner's clock after which a worker without a response has timed out.
        pool: pool whose workers get the command; empty for all pools of the model.
        worker_ids: workers that get the command; empty for all workers of the pools.
        nonce: distinguishes commands with the same id; a redelivered event repeats it.
        at_us: wall clock in microseconds.
    """

    command_id: Name
    model: Name
    command: Command
    reply_slot: Count
    timeout_us: Annotated[int, msgspec.Meta(ge=1, le=COMMAND_TIMEOUT_US_MAX)]
    pool: Annotated[str, msgspec.Meta(max_length=256)] = ""
    worker_ids: Annotated[tuple[Name, ...], msgspec.Meta(max_length=1_024)] = ()
    nonce: Count = 0
    at_us: int = 0


ControlEvent = PoolConfigured | BusyThresholdsSet | DisaggregationSet | WorkerCommanded
