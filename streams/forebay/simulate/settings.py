"""Settings of a simulation: fleet, delays and life cycle of workers; and the parser of `--policy`."""

import math
from typing import Annotated, Any, Literal, get_args

import msgspec

from forebay.engine_model.model import EngineConfig
from forebay.events.control import RouterConfig, RouterMode
from forebay.events.names import unknown_name
from forebay.events.requests import TIMEOUT_US_MAX
from forebay.runtime.errors import ConfigError, prefixed
from forebay.simulate.field_descriptions import converted, field_types
from forebay.simulate.pool_routing_file import ModelRouting
from forebay.simulate.tiers.settings import BYTES_PER_US, Bandwidth, FleetTiers, TierUnusable, WorkerTiers

WORKERS_MAX = 4_096  # each worker is a candidate of every decision
TIME_US_MAX = 3_155_760_000_000_000  # 100 years, so that sums stay far below 64 bits
TIME_S_MAX = TIME_US_MAX / 1e6
TIMEOUT_S_MAX = TIMEOUT_US_MAX / 1e6
MTBF_S_MIN = 1.0
KV_BYTES_MAX = 1 << 30  # per token; 1,000 times the largest models
ROUTER_SETTINGS = tuple(path for path, _ in field_types(RouterConfig) if path != "mode")

PoolRole = Literal["aggregated", "prefill", "decode"]
Time = Annotated[int, msgspec.Meta(ge=0, le=TIME_US_MAX)]  # microseconds
KvBytes = Annotated[int, msgspec.Meta(ge=1, le=KV_BYTES_MAX)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=TIME_S_MAX)]
Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=TIME_S_MAX)]
Count = Annotated[int, msgspec.Meta(ge=1, le=WORKERS_MAX)]  # of workers


class WorkerGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Identical workers of a pool."""

    count: Count
    engine: EngineConfig  # cache size, batch limits and step timing of each worker
    profile: str = "mocker"  # name of the engine profile, for reports
    gpus: float = 1.0  # GPUs per worker, to compute the GPU hours of a run
    tiers: WorkerTiers | None = None  # host memory and disk of each worker; None uses those of the fleet


class PoolSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Pool of workers that serve one model."""

    name: str = "default"
    model: str = "simulated"
    groups: tuple[WorkerGroup, ...]  # worker groups of the pool. All must have the same block size.
    router: RouterConfig | None = None  # routing configuration of the pool. None uses the policy of the simulation.
    # Role of all workers of the pool. A `prefill` pool computes prompts for the `decode` pool of the same model. The
    # router of the decode pool decides which requests are disaggregated.
    role: PoolRole = "aggregated"


class Delay(msgspec.Struct, frozen=True, kw_only=True):
    """Latency of one hop: a fixed time plus a random time from an exponential distribution.

    Records of one producer on one topic never overtake each other.
    """

    fixed_ms: Milliseconds = 0.0  # constant part, in milliseconds
    jitter_ms: Milliseconds = 0.0  # mean of the exponential part, in milliseconds


class Delays(msgspec.Struct, frozen=True, kw_only=True):
    """Latencies between clients, router and engines. All are 0 by default."""

    submit: Delay = Delay()  # client to router. Includes ingress, tokenization and the topic `requests`.
    # Decision to engine. Includes the acknowledgement of the journal and the topic `work.<pool>`.
    work: Delay = Delay()
    tokens: Delay = Delay()  # engine to client. Includes the topic `tokens` and HTTP. For rejections, router to client.
    kv_events: Delay = Delay()  # engine to the router's prefix index
    progress: Delay = Delay()  # engine to router, for progress events
    metrics: Delay = Delay()  # engine to router, for load reports


# Source: medians and 99th percentiles, measured once for one request at a time on an idle system. Each pair is modelled
# as a fixed time plus an exponential tail: tail = (p99 - p50) / 3.91, fixed = p50 - 0.69 * tail. KV events and metrics
# use the latency of progress. HTTP, tokenization and SSE are part of `submit`.
DELAYS = {
    "none": Delays(),
    "embedded": Delays(
        submit=Delay(fixed_ms=1.29),
        work=Delay(fixed_ms=0.052),
        tokens=Delay(fixed_ms=0.026),
        kv_events=Delay(fixed_ms=0.026),
        progress=Delay(fixed_ms=0.026),
        metrics=Delay(fixed_ms=0.026),
    ),
    "kafka": Delays(
        submit=Delay(fixed_ms=2.74, jitter_ms=0.94),
        work=Delay(fixed_ms=1.99, jitter_ms=1.69),
        tokens=Delay(fixed_ms=1.11, jitter_ms=0.78),
        kv_events=Delay(fixed_ms=2.92, jitter_ms=1.47),
        progress=Delay(fixed_ms=2.92, jitter_ms=1.47),
        metrics=Delay(fixed_ms=2.92, jitter_ms=1.47),
    ),
}


def named_delays(where: str, name: str) -> Delays:
    """Return delays by their name. Raises ConfigError, which begins with `where`, for an unknown name."""
    if name not in DELAYS:
        raise ConfigError(f"{where}: {unknown_name('delay profile', name, DELAYS)}")
    return DELAYS[name]


class Transfer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Time to move the KV of a prompt from a prefill to a decode worker. The names of the fields are Dynamo's.

    Each worker has one outgoing and one incoming link. A link moves the blocks of one request at a time, first come,
    first served.
    """

    # Bytes per token over all layers: 2 * layers * KV heads * head dimension * bytes per number.
    kv_bytes_per_token: KvBytes = 131_072  # Llama 3.1 8B
    # Bandwidth of a link in GB (10^9 bytes) per second; 0 for an unlimited bandwidth.
    kv_transfer_bandwidth: Bandwidth = 64.0
    kv_transfer_latency_us: Time = 0  # microseconds from the request for blocks to the first block

    def lasts_us(self, tokens: int) -> int:
        """Return how many microseconds a link needs for the KV of `tokens` tokens, rounded up."""
        if not self.kv_transfer_bandwidth:
            return 0
        return math.ceil(tokens * self.kv_bytes_per_token / (self.kv_transfer_bandwidth * BYTES_PER_US))


class WorkerFault(msgspec.Struct, frozen=True, kw_only=True):
    """Scheduled crash of a worker's process. It has no effect if the process is already dead."""

    worker: str
    at_s: Seconds
    # Seconds from the crash to the start of a replacement process; None for no replacement.
    back_s: Seconds | None = None


class WorkerStart(msgspec.Struct, frozen=True, kw_only=True):
    at_s: Seconds
    pool: str = "default"
    group: Annotated[int, msgspec.Meta(ge=0)] = 0  # index of the worker group in the pool, from 0
    count: Count = 1


class LifeTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Times of failures and restarts of workers, in seconds."""

    mtbf_s: Seconds = 0.0  # mean time from a worker's first lease to a random failure; 0 for no random failures
    repair_s: Seconds = 60.0  # from a random failure to the start of the replacement process
    # From the start of a process to its first lease. Workers of the initial fleet are warm.
    cold_start_s: Seconds = 0.0
    # From the death of a worker until the router marks it lost. After half of this time the router marks it suspect and
    # sends it no new requests.
    lease_ttl_s: Seconds = 3.0


class LifeCycleSettings(LifeTimes, frozen=True, kw_only=True):
    """Failures, restarts and additional starts of workers during a simulation."""

    faults: tuple[WorkerFault, ...] = ()
    starts: tuple[WorkerStart, ...] = ()


class SettingsUnusable(ConfigError):
    """A setting contradicts another one. `where` is its path, such as `life.faults[0].worker`."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(f"{where}: {reason}")
        self.where = where
        self.reason = reason


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a simulation, except the policy and the workload that a comparison varies."""

    pools: tuple[PoolSettings, ...]
    delays: Delays = Delays()  # latencies between clients, router and engines
    life: LifeCycleSettings = LifeCycleSettings()  # failures, restarts and additional starts of workers
    transfer: Transfer = Transfer()  # time that KV transfers between workers take
    # Host memory, disks and shared stores; None for none, except those of engine profiles.
    tiers: FleetTiers | None = None
    model_rules: tuple[ModelRouting, ...] = ()  # rules by which requests are routed to the pools of a model
    # Seconds that a client waits for its response.
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=TIMEOUT_S_MAX)] = TIMEOUT_S_MAX
    seed: int = 0  # seed for sampling and tie-breaking

    @property
    def models(self) -> int:
        """Return the number of models that the pools serve. A prefill pool and its decode pool serve the same model."""
        return len({pool.model for pool in self.pools})

    @property
    def workers(self) -> int:
        return sum(group.count for pool in self.pools for group in pool.groups)

    @property
    def workers_ever(self) -> int:
        """Return the number of workers at the start plus those of all scheduled starts."""
        return self.workers + sum(start.count for start in self.life.starts)


def validate_settings(settings: Settings) -> None:
    """Raise SettingsUnusable for the first setting that contradicts another one."""
    names: dict[str, int] = {}
    if not settings.pools:
        raise SettingsUnusable("pools", "no pool is configured; add at least one")
    for at, pool in enumerate(settings.pools):
        if pool.name in names:
            raise SettingsUnusable(f"pools[{at}].name", f"duplicate pool name {pool.name!r}")
        if not pool.groups:
            raise SettingsUnusable(f"pools[{at}].workers", f"pool {pool.name!r} has no workers; add at least one group")
        for group_at, group in enumerate(pool.groups):
            block_size, first = group.engine.block_size, pool.groups[0].engine.block_size
            if block_size != first:
                reason = f"got {block_size}, but the first group of the pool has {first}; a pool has one block size"
                raise SettingsUnusable(f"pools[{at}].workers[{group_at}].block_size", reason)
            try:
                tiers_of(settings, group).limits(block_size * settings.transfer.kv_bytes_per_token)
            except TierUnusable as error:
                raise SettingsUnusable(f"tiers.{error.tier}", error.reason) from None
        names[pool.name] = at
    require_pools(settings.pools, settings.model_rules)
    if settings.workers_ever > WORKERS_MAX:
        raise SettingsUnusable("pools", f"got {settings.workers_ever} workers; the maximum is {WORKERS_MAX}")
    for at, start in enumerate(settings.life.starts):
        if start.pool not in names:
            raise SettingsUnusable(f"starts[{at}].pool", unknown_name("pool", start.pool, names))
        groups = len(settings.pools[names[start.pool]].groups)
        if start.group >= groups:
            reason = f"got {start.group}, but pool {start.pool!r} has {groups} worker groups, counted from 0"
            raise SettingsUnusable(f"starts[{at}].group", reason)
    _require_faults(settings)


def tiers_of(settings: Settings, group: WorkerGroup) -> FleetTiers:
    """Return the tiers of the workers of a group, and their shared store."""
    return (settings.tiers or FleetTiers()).of(group.tiers)


def require_pools(pools: tuple[PoolSettings, ...], rules: tuple[ModelRouting, ...]) -> None:
    """Check the roles, block sizes and rules of the pools of each model."""
    _require_rules(pools, rules)
    first: dict[tuple[str, bool], PoolSettings] = {}
    ruled = {model.name for model in rules}
    for at, pool in enumerate(pools):
        other = first.setdefault((pool.model, pool.role == "prefill"), pool)
        if other is not pool and (other.role != pool.role or pool.model not in ruled):
            does = "compute prompts for" if pool.role == "prefill" else "serve"
            reason = f"pools {other.name!r} and {pool.name!r} both {does} model {pool.model!r}"
            remedy = ", or add grids in models" if other.role == pool.role else ""
            raise SettingsUnusable(f"pools[{at}].model", f"{reason}; remove one of them{remedy}")
    for at, pool in enumerate(pools):
        serving = first.get((pool.model, False))
        if pool.role == "prefill" and (serving is None or serving.role != "decode"):
            reason = f"prefill pool {pool.name!r} needs a pool with role 'decode' for model {pool.model!r}"
            raise SettingsUnusable(f"pools[{at}].role", reason)
        assert serving is not None, "a model without a prefill pool has another pool"
        theirs, ours = (one.groups[0].engine.block_size for one in (serving, pool))
        if ours != theirs:
            reason = f"got {ours}, but {serving.role} pool {serving.name!r} has {theirs}; a model has one block size"
            raise SettingsUnusable(f"pools[{at}].workers[0].block_size", reason)


def _require_rules(pools: tuple[PoolSettings, ...], rules: tuple[ModelRouting, ...]) -> None:
    """Check that the rules name pools of the fleet."""
    models = sorted({pool.model for pool in pools})
    for at, model in enumerate(rules):
        if model.name not in models:
            raise SettingsUnusable(f"models[{at}].name", unknown_name("model", model.name, models))
        for grid_at, grid in enumerate(model.grids):
            known = [pool.name for pool in pools if (pool.model, pool.role) == (model.name, grid.role)]
            for name in (one.pool for one in grid.pools):
                if name not in known:
                    where = f"models[{at}].grids[{grid_at}].pools"
                    raise SettingsUnusable(where, unknown_name(f"{grid.role} pool", name, known))


def worker_id(number: int) -> str:
    """Return the id of worker `number`. Initial workers are numbered by pool and group, then come scheduled starts."""
    return f"mock-{number}"


def _require_faults(settings: Settings) -> None:
    life = settings.life
    if 0 < life.mtbf_s < MTBF_S_MIN:
        reason = f"got {life.mtbf_s}; must be 0 or at least {MTBF_S_MIN:g} s"
        raise SettingsUnusable("life.mtbf_s", reason)
    starts = sorted(life.starts, key=lambda start: start.at_s)
    begins = [0.0] * settings.workers + [start.at_s for start in starts for _ in range(start.count)]
    free_s: dict[str, float | None] = {worker_id(number): begin_s for number, begin_s in enumerate(begins)}
    for fault in sorted(life.faults, key=lambda fault: fault.at_s):
        where = f"faults[{life.faults.index(fault)}]"
        if fault.worker not in free_s:
            known = [f"{worker_id(0)} to {worker_id(len(begins) - 1)}"]
            raise SettingsUnusable(f"{where}.worker", unknown_name("worker", fault.worker, known))
        there_s = free_s[fault.worker]
        if there_s is None or round(fault.at_s - there_s, 6) < 0:
            state = "is not replaced after an earlier fault" if there_s is None else f"starts at {there_s:g} s"
            raise SettingsUnusable(f"{where}.at_s", f"worker {fault.worker} {state}, so it cannot die at this time")
        free_s[fault.worker] = None if fault.back_s is None else fault.at_s + fault.back_s


def engine_config(
    *, block_size: int = 64, kv_blocks: int = 16_384, max_num_seqs: int = 256, max_num_batched_tokens: int = 8_192
) -> EngineConfig:
    """Return the configuration of an engine. The defaults are those of Dynamo's mocker."""
    return EngineConfig(
        vocabulary=None,  # a simulation needs no output text
        block_size=block_size,
        kv_blocks_total=kv_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
    )


def policy(text: str) -> RouterConfig:
    """Parse `NAME` or `NAME:setting=value,setting=value` into a routing configuration.

    NAME is a router mode or the dotted path of a policy class. A setting is a field of `RouterConfig`, or of one of its
    structs, as in `busy.name` and `queue.name`. Raises ConfigError if the policy or a setting is unknown or
    invalid.
    """
    name, _, rest = text.partition(":")
    if name == "direct":
        raise ConfigError("policy 'direct' cannot be simulated: the requests of a workload name no workers")
    if name.endswith(".py"):
        raise ConfigError(f"policy {text!r}: give a class as a dotted path, as in module.Class, not as a file")
    modes = [mode for mode in get_args(RouterMode) if mode != "direct"]
    if name not in modes and "." not in name:
        raise ConfigError(unknown_name("router mode", name, (*modes, "module.Class")))
    fields: dict[str, Any] = {"mode": name}
    with prefixed(f"policy {text!r}"):
        for one in rest.split(",") if rest else ():
            setting, equals, value = one.partition("=")
            if setting not in ROUTER_SETTINGS:
                raise ConfigError(unknown_name("setting", setting, ROUTER_SETTINGS))
            if not equals:
                raise ConfigError(f"expected setting=value, got {one!r}")
            part, _, field = setting.rpartition(".")
            group = fields.setdefault(part, {}) if part else fields
            if field in group:
                raise ConfigError(f"duplicate setting {setting}")
            group[field] = value
        return converted(fields, RouterConfig, "setting", strict=False)
