"""Topic `scaling`: the planner's journal, from which every decision about the sizes of pools derives.

All records are inputs. Every reader applies them in the order of the one partition (`forebay.core.scaling.state`).
Records of a planner with a lower epoch than the newest claim have no effect. A decision names the offset up to which
its planner had applied the topic. If a record with an effect lies between that offset and the decision, such as a claim
or a manual size, the decision is stale: actuators refuse it, and the planner decides again.
"""

from typing import Annotated, Literal

import msgspec

from forebay.events.base import Count, Event, Name, Part
from forebay.events.control import Role
from forebay.events.privacy import DROPPED, KEPT, OWNER, SystemName

PoolSize = Annotated[int, msgspec.Meta(ge=0, le=10_000)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class PrefillPoint(Part, frozen=True, kw_only=True):
    """Measured prefill of one worker at one prompt length.

    Attributes:
        isl: uncached prompt tokens per request.
        ttft_ms: time to first token in milliseconds, without waiting.
        tokens_per_s: prompt tokens per second of one busy worker.
    """

    isl: Positive
    ttft_ms: NotNegative
    tokens_per_s: Positive


class DecodePoint(Part, frozen=True, kw_only=True):
    """Measured decode of one worker at one context length and one number of concurrent requests.

    Attributes:
        context: mean context length of the requests, in tokens.
        concurrency: requests that generate at the same time.
        itl_ms: mean inter-token latency in milliseconds.
        tokens_per_s: output tokens per second of one worker.
    """

    context: Positive
    concurrency: Positive
    itl_ms: Positive
    tokens_per_s: Positive


class PoolScaling(Part, frozen=True, kw_only=True):
    """Limits and profile of one pool that the planner scales.

    Attributes:
        role: stage of requests that the workers of the pool compute.
        min_size: lowest number of workers.
        max_size: highest number of workers.
        gpus_per_worker: GPUs of one worker.
        startup_s: seconds from the start of a worker until it is ready.
        kv_tokens: tokens in the KV cache of one worker; 0 if unknown.
        prefill: measured prefill, for pools that compute prompts.
        decode: measured decode, for pools that generate.
    """

    group: SystemName
    pool: SystemName
    role: Role = "aggregated"
    min_size: PoolSize = 1
    max_size: PoolSize = 64
    gpus_per_worker: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    startup_s: NotNegative = 120.0
    kv_tokens: Count = 0
    prefill: tuple[PrefillPoint, ...] = ()
    decode: tuple[DecodePoint, ...] = ()


Method = Literal["throughput", "load", "both", "simulate"]
Equations = Literal["plain", "corrected"]


class PlannerSettings(Part, frozen=True, kw_only=True):
    """Settings of a planner. Its claim records them, so that its decisions derive from the topic alone.

    Attributes:
        pools: pools to scale.
        interval_s: seconds between observations.
        method: what proposes sizes. `throughput`: the forecast and the profile. `load`: the load of the workers.
            `both`: load, with the result of throughput as lower bound. `simulate`: simulations of the forecast.
        equations: `plain`: the profile as it is. `corrected`: the profile with observed TTFT and ITL as corrections.
        ttft_ms: target of the time to first token in milliseconds.
        itl_ms: target of the inter-token latency in milliseconds.
        gpu_budget: highest number of GPUs of all pools; 0 for no limit.
        min_gpus: lowest number of GPUs of all pools; 0 for no limit.
        max_change: highest change of a pool per decision, in workers. Only the limits of its size may exceed it.
        down_sensitivity: share of a target below which the estimate after a reduction must be.
        min_observations: observations that method `load` needs before it decides.
        cooldown_s: seconds after a change of a pool in which the planner does not change it in the opposite direction.
        action_timeout_s: seconds after which the change of a pool without reply of an actuator counts as failed.
        predictor: name of the predictor of demand.
        advisory: whether decisions are only recorded and have no effect.
    """

    pools: tuple[PoolScaling, ...]
    interval_s: Positive = 180.0
    method: Method = "throughput"
    equations: Equations = "plain"
    ttft_ms: Positive = 500.0
    itl_ms: Positive = 50.0
    gpu_budget: Count = 8
    min_gpus: Count = 0
    max_change: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 8
    down_sensitivity: Share = 0.8
    min_observations: Annotated[int, msgspec.Meta(ge=1, le=1_000)] = 5
    cooldown_s: NotNegative = 0.0
    action_timeout_s: Positive = 1800.0
    predictor: Annotated[str, KEPT] = "constant"
    advisory: bool = False


class PlannerRecord(Event, frozen=True, kw_only=True):
    """Base class of the records of a planner. After a later claim, records with a lower epoch are stale.

    Attributes:
        planner_epoch: epoch of the planner, which is the offset of its claim.
    """

    planner_epoch: int = -1
    at_us: int = 0


class PlannerClaimed(PlannerRecord, tag="planner.claimed", frozen=True, kw_only=True):
    """A planner claims the topic: from this record on it observes and decides.

    Attributes:
        planner_epoch: always -1; the offset of this record is the new planner epoch.
        planner_id: name of the planner.
        rules_version: version of the rules by which decisions derive.
        settings: settings of the planner.
    """

    planner_id: Annotated[Name, OWNER]
    rules_version: Count
    settings: PlannerSettings


class PlannerStopped(PlannerRecord, tag="planner.stopped", frozen=True, kw_only=True):
    """The planner stops. A standby claims the topic at once instead of after missing observations."""


class WorkerObserved(Part, frozen=True, kw_only=True):
    """Load of one worker at the end of an interval, and its speed during the interval.

    Attributes:
        prefill_tokens: uncached prompt tokens that the worker has not computed yet.
        kv_tokens: tokens in KV blocks in use.
        kv_tokens_max: tokens of all KV blocks.
        ttft_ms: mean time to first token in milliseconds; null without a request.
        itl_ms: mean inter-token latency in milliseconds; null without a request.
    """

    worker_id: SystemName
    running: Count
    waiting: Count
    prefill_tokens: Count
    kv_tokens: Count
    kv_tokens_max: Count
    ttft_ms: float | None = None
    itl_ms: float | None = None


class PoolObserved(Part, frozen=True, kw_only=True):
    """Demand, latency and size of one pool in one interval.

    Attributes:
        ready: workers that are ready.
        draining: workers that drain.
        requests: requests that arrived. A request that was rejected for lack of workers counts, too.
        isl: mean prompt tokens per request; null without a request.
        osl: mean output tokens of the requests that ended; null without one.
        ttft_ms: mean time to first token of the prompts that the pool computed, in milliseconds; null without one.
        itl_ms: mean inter-token latency of the output that the pool generated, in milliseconds; null without one.
        kv_hit_rate: share of the prompt tokens to compute that the router found in caches; null without a request.
        queued: requests in the router's queue at the end of the interval. The queue of a decode pool counts for its
            prefill pool, too.
        workers: load of the ready workers. A worker with requests that did not report its load is missing.
    """

    group: SystemName
    pool: SystemName
    ready: PoolSize
    draining: PoolSize = 0
    requests: Count = 0
    isl: float | None = None
    osl: float | None = None
    ttft_ms: float | None = None
    itl_ms: float | None = None
    kv_hit_rate: float | None = None
    queued: Count = 0
    workers: tuple[WorkerObserved, ...] = ()


class ScalingObserved(PlannerRecord, tag="scaling.observed", frozen=True, kw_only=True):
    """Observation of all pools over one interval.

    Attributes:
        interval_s: length of the interval in seconds.
        pools: the pools.
    """

    interval_s: Positive
    pools: tuple[PoolObserved, ...]


class PoolDemand(Part, frozen=True, kw_only=True):
    """Expected demand of one pool.

    Attributes:
        requests_per_s: requests per second.
        isl: mean prompt tokens per request.
        osl: mean output tokens per request.
        kv_hit_rate: share of prompt tokens found in caches.
    """

    group: SystemName
    pool: SystemName
    requests_per_s: NotNegative
    isl: NotNegative
    osl: NotNegative
    kv_hit_rate: Share = 0.0


class DemandForecast(PlannerRecord, tag="scaling.demand_forecast", frozen=True, kw_only=True):
    """Forecast of the next interval. The predictor runs outside of the rules; its result is recorded before its use.

    Attributes:
        predictor: name of the predictor.
        observed: offset of the last observation that the predictor has read.
        pools: the pools. A pool without an observed request is missing.
    """

    predictor: Annotated[str, KEPT]
    observed: Count
    pools: tuple[PoolDemand, ...]


class SimulatedSize(Part, frozen=True, kw_only=True):
    """Simulation of the forecast with one size of a pool.

    Attributes:
        size: number of workers.
        attained: share of the requests that met both targets.
    """

    group: SystemName
    pool: SystemName
    size: PoolSize
    attained: Share


class SizesSimulated(PlannerRecord, tag="scaling.sizes_simulated", frozen=True, kw_only=True):
    """Simulations of the forecast, for method `simulate`.

    Attributes:
        forecast: offset of the forecast.
        target: share of requests that must meet both targets.
        sizes: the simulated sizes.
    """

    forecast: Count
    target: Share
    sizes: tuple[SimulatedSize, ...]


Reason = Literal[
    "scale_up",
    "scale_down",
    "hold",
    "manual",
    "paused",
    "no_observation",
    "no_demand",
    "no_profile",
    "profile_exceeded",
    "target_unattainable",
    "insufficient_data",
    "in_progress",
    "starting",
    "cooldown",
    "consolidation_refused",
    "limited",
    "gpu_budget",
    "budget_below_minimum",
]


class PoolDecision(Part, frozen=True, kw_only=True):
    """Decision about one pool.

    Attributes:
        from_size: size before.
        to_size: size from now on.
        proposed: size that the method proposed, before limits and guards.
        reason: `scale_up`, `scale_down`: the proposal. `hold`: the proposal is the present size. `manual`: an operator
            has set the size. `paused`: an operator has paused the planner. `no_observation`, `no_demand`, `no_profile`,
            `insufficient_data`: the method lacks an input. `profile_exceeded`: the demand lies outside the profile, and
            the nearest point was used. `target_unattainable`: one request alone misses a target, or too many requests
            do with each simulated size. `in_progress`: the last change of the pool has no reply yet. `starting`:
            workers of the last decision start. `cooldown`: the direction would change too soon.
            `consolidation_refused`: fewer workers would miss a target. `limited`: by the smallest, the largest or the
            change of a size. `gpu_budget`: by the number of GPUs. `budget_below_minimum`: the budget does not suffice
            for the smallest sizes.
    """

    group: SystemName
    pool: SystemName
    from_size: PoolSize
    to_size: PoolSize
    proposed: PoolSize
    reason: Reason


class ScalingDecided(PlannerRecord, tag="scaling.decided", frozen=True, kw_only=True):
    """Sizes of all pools from now on. Its offset identifies the decision, and an actuator executes it once.

    Attributes:
        after: offset of the last record that the planner had applied.
        pools: the pools.
        advisory: whether the decision has no effect.
    """

    after: Count
    pools: tuple[PoolDecision, ...]
    advisory: bool = False


class ReachedSize(Part, frozen=True, kw_only=True):
    """Size that an actuator reached.

    Attributes:
        size: number of workers that run or start.
    """

    group: SystemName
    pool: SystemName
    size: PoolSize


class ScalingApplied(Event, tag="scaling.applied", frozen=True, kw_only=True):
    """An actuator executed a decision for its pools. Other actuators reply for the other pools of the decision.

    Attributes:
        pools: sizes that its pools reached. Another size than the decided one tells the planner that the rest failed.
        message: why a size was not reached; empty if all were.
    """

    decision: Count
    actuator: SystemName
    pools: tuple[ReachedSize, ...]
    message: Annotated[str, DROPPED] = ""
    at_us: int = 0


class RefusedPool(Part, frozen=True, kw_only=True):
    """Pool whose size an actuator did not change."""

    group: SystemName
    pool: SystemName


class ScalingRefused(Event, tag="scaling.refused", frozen=True, kw_only=True):
    """An actuator did not execute a decision for its pools.

    Attributes:
        pools: its pools, whose sizes stay as they were.
        reason: `stale`: the planner had not applied all records before the decision. `failed`: nothing could be
            changed.
        message: description of the cause.
    """

    decision: Count
    actuator: SystemName
    pools: tuple[RefusedPool, ...]
    reason: Literal["stale", "failed"]
    message: Annotated[str, DROPPED] = ""
    at_us: int = 0


class PoolSizeSet(Event, tag="scaling.pool_size_set", frozen=True, kw_only=True):
    """An operator sets the size of a pool, or releases it to the planner.

    Attributes:
        size: number of workers; null to release the pool.
    """

    group: SystemName
    pool: SystemName
    size: PoolSize | None
    operator: Annotated[str, OWNER] = ""
    at_us: int = 0


class PlannerPaused(Event, tag="planner.paused", frozen=True, kw_only=True):
    """An operator pauses or resumes the planner. A paused planner observes, but changes no size.

    Attributes:
        paused: whether the planner is paused from now on.
    """

    paused: bool
    operator: Annotated[str, OWNER] = ""
    at_us: int = 0


ScalingEvent = (
    PlannerClaimed
    | PlannerStopped
    | ScalingObserved
    | DemandForecast
    | SizesSimulated
    | ScalingDecided
    | ScalingApplied
    | ScalingRefused
    | PoolSizeSet
    | PlannerPaused
)
