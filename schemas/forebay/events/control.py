"""Topic `control`: configuration and admin commands."""

from typing import Annotated, Literal

import msgspec

from forebay.events.base import Count, Event, Name, Part

RouterMode = Literal["kv", "round-robin", "random", "power-of-two", "least-loaded", "direct"]
QueuePolicy = Literal["fcfs", "wspt", "lcfs"]
DisaggPolicy = Literal["always", "never", "classic", "isl_bounding", "prefill_load", "isl_or_load"]
Role = Literal["aggregated", "prefill", "decode", "encode"]  # a worker's part in a request
Weight = Annotated[float, msgspec.Meta(ge=0.0, le=1e6)]  # finite, and so is every cost
Fraction = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=31_536_000.0)]  # a year

DEFAULT_CLASS = "default"
CLASSES_MAX = 256  # every request that waits looks at each


def require_numbers(part: msgspec.Struct, limits: dict[str, float]) -> None:
    """Refuse fields that are negative, above their limit or no number (ValueError); None is no field.

    The decoder checks what comes from the wire; this checks what is made in a process.
    """
    for name, most in limits.items():
        value = getattr(part, name)
        if value is not None and not 0 <= value <= most:  # nor does a NaN lie there
            raise ValueError(f"{name} must be a number from 0 to {most:g}, not {value}")


Action = Literal["clear_kv_blocks", "load_lora", "unload_lora", "list_loras", "sleep", "wake_up", "pause", "resume"]
LORA_CHANGES: frozenset[Action] = frozenset(("load_lora", "unload_lora"))  # what changes which adapters are loaded

COMMAND_TIMEOUT_US_MAX = 3_600_000_000  # an hour: loading an adapter over a slow disk takes minutes


class Command(Part, frozen=True, kw_only=True):
    """What an engine is to do beside its work. Names are Dynamo's and vLLM's.

    `lora_path` is a directory that the worker can read; `level` is how deep the engine sleeps: 1 keeps the weights in
    host memory, 2 drops them.
    """

    action: Action
    lora_name: Annotated[str, msgspec.Meta(max_length=256)] = ""
    lora_path: Annotated[str, msgspec.Meta(max_length=4_096)] = ""
    level: Annotated[int, msgspec.Meta(ge=1, le=2)] = 1


class BusyThresholds(Part, frozen=True, kw_only=True):
    """Above any of these a rank is busy; a worker is when all its ranks are. Names are Dynamo's, None is off.

    `active_decode_blocks_threshold` is a share of the rank's KV blocks; prefill tokens are waiting or under way,
    absolute or as a multiple of the worker's `max_num_batched_tokens`.
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
    """A queue of its own for the requests of one policy class.

    Classes take turns by deficit round robin: a turn adds `quantum` tokens, a request costs its uncached tokens.
    Of several classes with one name a request enters the one with the highest `uncached_tokens_min` that it
    reaches. `requests_per_worker_max` bounds its length, times the pool's ready workers.
    """

    name: Name = DEFAULT_CLASS
    quantum: Annotated[int, msgspec.Meta(ge=1, le=(1 << 31) - 1)] = 8_192
    uncached_tokens_min: Count = 0
    policy: QueuePolicy | None = None
    requests_per_worker_max: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 1_000


class QueueConfig(Part, frozen=True, kw_only=True):
    """When requests wait in the router, how many, how long, and in which order.

    Attributes:
        threshold: requests wait while every eligible rank has more than this multiple of its `max_num_batched_tokens`
            to prefill; None sets no such limit.
        policy: the order of a class that has none of its own.
        classes: the classes of the queue.
        run_ahead: a rank is sent at most this share of its `max_num_seqs` beyond these; further requests wait. None
            sends any number.
        depth: at most this multiple of the `max_num_seqs` of all ranks of the pool waits; None sets no such limit.
        timeout_s: a request that has waited this long is aborted; 0 sets no such limit.
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
            raise ValueError(f"{len(self.classes)} queue classes are more than {CLASSES_MAX}")
        kinds = [(one.name, one.uncached_tokens_min) for one in self.classes]
        if len(set(kinds)) < len(kinds):
            raise ValueError("two queue classes have the same name and the same uncached_tokens_min")
        floors = {one.name for one in self.classes if one.uncached_tokens_min == 0}
        if DEFAULT_CLASS not in floors:
            raise ValueError(f"the queue class {DEFAULT_CLASS} with uncached_tokens_min 0 must be there")
        if any(one.name not in floors for one in self.classes):
            raise ValueError("every queue class needs one of its name with uncached_tokens_min 0")


class DisaggConfig(Part, frozen=True, kw_only=True):
    """Which prompts of a decode pool's requests its model's prefill pool computes; the others stay with who answers.

    Names and meanings are Dynamo's (conditional disaggregation; `classic` is that of its first releases). Prompt
    lengths are counted without what the decode worker that would be chosen has in its cache.

    Attributes:
        policy: `always` and `never`; `classic` computes prompts longer than `max_local_prefill_length` remotely while
            fewer than `max_prefill_queue_size` wait; `isl_bounding` those that reach `eff_isl_threshold` or are not
            cached to more than 1 - `eff_isl_ratio_threshold`; `prefill_load` all while the prefill worker that would
            be chosen is not busy; `isl_or_load` what both of these compute remotely.
        max_local_prefill_length: in tokens.
        max_prefill_queue_size: requests at prefill workers beyond one each; at least 1.
        eff_isl_threshold: in tokens.
        eff_isl_ratio_threshold: share of the prompt.
        prefill_busy_threshold: a prefill worker with more steps than this to compute is busy, in multiples of its
            `max_num_batched_tokens`; with None none is ever busy.
        decode_busy_threshold: a decode worker with a larger share of its KV blocks in use computes no prompt itself if
            the policy leaves it the choice; with None none is ever busy.
        enforce: no request is answered whose prompt was to be computed remotely and cannot be; else who answers it
            computes it then.
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
            raise ValueError("max_prefill_queue_size must be at least 1: with 0 the rule is the policy never")


class RouterConfig(Part, frozen=True, kw_only=True):
    """How a pool routes. Names, defaults and meanings are Dynamo's (router configuration).

    Attributes:
        mode: a `RouterMode`, or the dotted path of a policy class.
        selection_policy: `default` adds prefill and decode blocks, `lmetric` multiplies them.
        overlap_score_credit: blocks of prefill saved by a block found on the device.
        overlap_score_credit_decay: takes from the credit of ranks that have more to prefill than others.
        prefill_load_scale: weight of prefill blocks; Dynamo's old name is `overlap_score_weight`.
        host_cache_hit_weight: the credit of a block in host memory; disk likewise.
        decode_active_request_weight: blocks that a request under way counts for.
        temperature: 0 takes the lowest cost, above it a draw weighted by cost.
        track_prefill_tokens: whether prompts that are not computed yet are load.
        track_active_blocks: whether blocks of requests under way are load.
        track_output_blocks: whether workers report the blocks of output, as load.
        assume_kv_reuse: whether requests that share a prefix share its blocks while they run.
        use_kv_events: off, no worker's KV events are used: what was routed is taken for cached.
        ttl_s: how long what was routed to a worker without KV events is taken for cached.
        approximate_blocks_max: bounds that; beyond it those due soonest go.
        predicted_ttl_s: how long a routed prompt is taken for cached before KV events say so; 0 is off.
        session_ttl_s: how long a session keeps its worker after its last request; 0 is off.
        session_mode: `hard` sends a session nowhere else while its worker lives, `soft` prefers it.
        disagg: which prompts are computed by the model's prefill pool; of decode pools.
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
    """A pool serves one model with blocks of one size; its routing rule is replaced as a whole.

    A pool of the role `encode` encodes the images and videos of requests that the model's other pool answers. One of
    the role `prefill` computes prompts for its `decode` pool, which answers; their blocks have one size.
    """

    pool: Name
    model: Name
    block_size: Annotated[int, msgspec.Meta(ge=1, le=(1 << 31) - 1)]
    router: RouterConfig = RouterConfig()
    attempts_max: Annotated[int, msgspec.Meta(ge=1)] = 3  # a request that loses this many workers is given up
    at_us: int = 0
    role: Role = "aggregated"


class BusyThresholdsSet(Event, tag="control.busy_thresholds_set", frozen=True, kw_only=True):
    """An operator changed when workers of a model are busy; stands until the next, or the next `PoolConfigured`."""

    model: Name
    thresholds: BusyThresholds
    at_us: int = 0


class DisaggregationSet(Event, tag="control.disaggregation_set", frozen=True, kw_only=True):
    """An operator changed which prompts of a model are computed remotely; stands until the next, as thresholds do."""

    model: Name
    disagg: DisaggConfig
    at_us: int = 0


class WorkerCommanded(Event, tag="control.worker_commanded", frozen=True, kw_only=True):
    """An operator commands workers of a model: those of `worker_ids`, else all of `pool`, else all.

    The outcomes are told on `reply_slot`. Who has not answered `timeout_us` after the owner applied this is given up.
    `nonce` is one for each command: a redelivery repeats it, another use of the same id does not.
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
