"""What is simulated: the size of the workers, the pace of the workload, and the policies to compare."""

import math
from difflib import get_close_matches
from pathlib import PurePosixPath
from typing import Annotated, Literal, get_args

import msgspec

from forebay.engine_model.model import EngineConfig
from forebay.events.control import BusyThresholds, DisaggConfig, QueueConfig, RouterConfig, RouterMode
from forebay.events.requests import TIMEOUT_US_MAX
from forebay.simulate.field_descriptions import refused

WORKERS_MAX = 4_096  # each is a candidate of every decision
TIME_US_MAX = 3_155_760_000_000_000  # a century: sums of some stay far below 64 bits
TIME_S_MAX = TIME_US_MAX / 1e6
TIMEOUT_S_MAX = TIMEOUT_US_MAX / 1e6
MTBF_S_MIN = 1.0
KV_BYTES_MAX = 1 << 30  # of one token: a thousand times what the largest models have
BANDWIDTH_MAX = 1e6  # GB a second
BYTES_PER_US = 1_000  # of 1 GB/s
PARTS: dict[str, type[msgspec.Struct]] = {
    "": RouterConfig,
    "busy": BusyThresholds,
    "queue": QueueConfig,
    "disagg": DisaggConfig,
}
ROUTER_SETTINGS = tuple(
    f"{part}.{name}" if part else name
    for part, kind in PARTS.items()
    for name in kind.__struct_fields__
    if part or name not in ("mode", *PARTS)
)

PoolRole = Literal["aggregated", "prefill", "decode"]
Time = Annotated[int, msgspec.Meta(ge=0, le=TIME_US_MAX)]  # microseconds
KvBytes = Annotated[int, msgspec.Meta(ge=1, le=KV_BYTES_MAX)]
Bandwidth = Annotated[float, msgspec.Meta(ge=0, le=BANDWIDTH_MAX)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=TIME_S_MAX)]


class WorkerGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Equal workers.

    Attributes:
        engine: the size of each, and how long its steps take.
        profile: what that is called.
        gpus: GPUs a worker, for what it costs.
    """

    count: Annotated[int, msgspec.Meta(ge=1, le=WORKERS_MAX)]
    engine: EngineConfig
    profile: str = "mocker"
    gpus: float = 1.0


class PoolSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Workers that serve one model. Without a `router` it routes by the policy that is simulated.

    One of the role `prefill` computes prompts for the model's `decode` pool, whose router says which.
    """

    name: str = "default"
    model: str = "simulated"
    groups: tuple[WorkerGroup, ...]
    router: RouterConfig | None = None
    role: PoolRole = "aggregated"


class Delay(msgspec.Struct, frozen=True, kw_only=True):
    """How long something is on its way: `fixed_us`, and a draw from an exponential distribution on top.

    Records of one producer on one topic never overtake each other.
    """

    fixed_us: Time = 0
    jitter_us: Time = 0  # the mean of what is drawn


class Delays(msgspec.Struct, frozen=True, kw_only=True):
    """How long what is said takes to arrive; nothing takes any time by default.

    Attributes:
        submit: from the client to the router: ingress, tokenising, the hop on `requests`.
        work: from the decision to the engine: the journal's acknowledgement, the hop on `work.<pool>`.
        tokens: from the engine to the client: the hop on `tokens`, HTTP; and from the router, which refuses.
        kv_events: from the engine to the router's index; `progress` and `metrics` likewise.
    """

    submit: Delay = Delay()
    work: Delay = Delay()
    tokens: Delay = Delay()
    kv_events: Delay = Delay()
    progress: Delay = Delay()
    metrics: Delay = Delay()


# One request at a time, nothing else to do: medians and 99th percentiles of docs/performance.md as an exponential tail
# on a fixed time, which is (p99 - p50) / 3.91 and p50 - 0.69 of that. Kafka: the table of hops at one connection; KV
# events and metrics take the way of progress. HTTP, tokenising and SSE are in `submit`. Embedded: the first token of
# the table of HTTP, of which the four records on the log take 26 microseconds each.
DELAYS = {
    "none": Delays(),
    "embedded": Delays(
        submit=Delay(fixed_us=1_290),
        work=Delay(fixed_us=52),
        tokens=Delay(fixed_us=26),
        kv_events=Delay(fixed_us=26),
        progress=Delay(fixed_us=26),
        metrics=Delay(fixed_us=26),
    ),
    "kafka": Delays(
        submit=Delay(fixed_us=2_740, jitter_us=940),
        work=Delay(fixed_us=1_990, jitter_us=1_690),
        tokens=Delay(fixed_us=1_110, jitter_us=780),
        kv_events=Delay(fixed_us=2_920, jitter_us=1_470),
        progress=Delay(fixed_us=2_920, jitter_us=1_470),
        metrics=Delay(fixed_us=2_920, jitter_us=1_470),
    ),
}


class Transfer(msgspec.Struct, frozen=True, kw_only=True):
    """How long the KV of a prompt takes from a prefill worker to a decode worker. Names are those of Dynamo's mocker.

    A worker has one link each way, which moves the blocks of one request at a time, first come, first served.

    Attributes:
        kv_bytes_per_token: over all layers: 2 * layers * KV heads * head dimension * bytes of a number.
        kv_transfer_bandwidth: of a link, in GB (10^9 bytes) a second; 0 for no delay.
        kv_transfer_latency_us: from asking for blocks to the first of them.
    """

    kv_bytes_per_token: KvBytes = 131_072  # of Llama 3.1 8B
    kv_transfer_bandwidth: Bandwidth = 64.0
    kv_transfer_latency_us: Time = 0

    def lasts_us(self, tokens: int) -> int:
        """How long a link is busy with so many tokens' KV, rounded up."""
        if not self.kv_transfer_bandwidth:
            return 0
        return math.ceil(tokens * self.kv_bytes_per_token / (self.kv_transfer_bandwidth * BYTES_PER_US))


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that dies without a word at `at_us`; `back_us` later a new process starts, None for never.

    Nothing happens if another failure was quicker.
    """

    worker: str
    at_us: Time
    back_us: Time | None = None


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """`count` more workers of a pool's group, counted from 0, are started at `at_us`."""

    at_us: Time
    pool: str = "default"
    group: Annotated[int, msgspec.Meta(ge=0)] = 0
    count: Annotated[int, msgspec.Meta(ge=1, le=WORKERS_MAX)] = 1


class Life(msgspec.Struct, frozen=True, kw_only=True):
    """How workers come and go.

    Attributes:
        faults: those that die at given times; `starts` those that are started at such.
        mtbf_s: mean time from a worker's first lease to a failure, drawn with the seed; 0 for none.
        repair_s: from such a failure to the start of a new process.
        cold_start_s: from the start of a process to its first lease: loading weights, warming up. Who is there at the
            beginning is warm.
        lease_ttl_s: from a worker's death to the router's notice of it; after half of it nothing new is sent there.
    """

    faults: tuple[Fault, ...] = ()
    starts: tuple[Start, ...] = ()
    mtbf_s: Seconds = 0.0
    repair_s: Seconds = 60.0
    cold_start_s: Seconds = 0.0
    lease_ttl_s: Seconds = 10.0


class SettingsUnusable(ValueError):
    """Settings that do not go together; `where` names the setting, as `life.faults[0].worker`."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(f"{where}: {reason}")
        self.where = where
        self.reason = reason


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What is simulated, whatever the policy and the workload.

    Attributes:
        timeout_s: how long a client waits for its answer.
        seed: decides between equal candidates, and wherever something is drawn.
    """

    pools: tuple[PoolSettings, ...]
    delays: Delays = Delays()
    life: Life = Life()
    transfer: Transfer = Transfer()
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=TIMEOUT_S_MAX)] = TIMEOUT_S_MAX
    seed: int = 0

    @property
    def models(self) -> int:
        """How many are served; two pools of one model are a prefill and a decode pool."""
        return len({pool.model for pool in self.pools})

    @property
    def workers(self) -> int:
        """How many there are at the start."""
        return sum(group.count for pool in self.pools for group in pool.groups)

    @property
    def workers_ever(self) -> int:
        """How many there are at the start, and are started later."""
        return self.workers + sum(start.count for start in self.life.starts)


def require_sense(settings: Settings) -> None:
    """Refuse what cannot be. Raises SettingsUnusable."""
    names: dict[str, int] = {}
    if not settings.pools:
        raise SettingsUnusable("pools", "there is none")
    for at, pool in enumerate(settings.pools):
        if pool.name in names:
            raise SettingsUnusable(f"pools[{at}].name", f"there are two pools {pool.name!r}")
        if not pool.groups:
            raise SettingsUnusable(f"pools[{at}].workers", f"the pool {pool.name!r} has none")
        for group_at, group in enumerate(pool.groups):
            block_size, first = group.engine.block_size, pool.groups[0].engine.block_size
            if block_size != first:
                reason = f"{block_size} is not the {first} of the pool's first workers, but a pool has one block size"
                raise SettingsUnusable(f"pools[{at}].workers[{group_at}].block_size", reason)
        names[pool.name] = at
    _require_roles(settings.pools)
    if settings.workers_ever > WORKERS_MAX:
        raise SettingsUnusable("pools", f"{settings.workers_ever} workers are more than {WORKERS_MAX}")
    for at, start in enumerate(settings.life.starts):
        if start.pool not in names:
            raise SettingsUnusable(f"starts[{at}].pool", f"there is no pool {start.pool!r}")
        groups = len(settings.pools[names[start.pool]].groups)
        if start.group >= groups:
            reason = f"the pool {start.pool!r} has {groups} groups of workers, counted from 0"
            raise SettingsUnusable(f"starts[{at}].group", reason)
    _require_faults(settings)


def _require_roles(pools: tuple[PoolSettings, ...]) -> None:
    """One pool answers the requests of a model; if that is a decode pool, another may compute their prompts."""
    answering: dict[str, PoolSettings] = {}
    prefilling: dict[str, tuple[int, PoolSettings]] = {}
    for at, pool in enumerate(pools):
        other = answering.get(pool.model) if pool.role != "prefill" else prefilling.get(pool.model, (0, None))[1]
        if other is not None:
            does = "compute prompts for" if pool.role == "prefill" else "serve"
            reason = f"the pools {other.name!r} and {pool.name!r} both {does} {pool.model!r}"
            raise SettingsUnusable(f"pools[{at}].model", f"{reason}, but a router sends all requests for it to one")
        if pool.role == "prefill":
            prefilling[pool.model] = at, pool
        else:
            answering[pool.model] = pool
    for at, pool in prefilling.values():
        decode = answering.get(pool.model)
        if decode is None or decode.role != "decode":
            reason = f"{pool.name!r} computes prompts for {pool.model!r}, but no pool of the role 'decode' answers them"
            raise SettingsUnusable(f"pools[{at}].role", reason)
        theirs, ours = (one.groups[0].engine.block_size for one in (decode, pool))
        if ours != theirs:
            reason = f"{ours} is not the {theirs} of the decode pool {decode.name!r}, which could not read the KV"
            raise SettingsUnusable(f"pools[{at}].workers[0].block_size", reason)


def worker_id(number: int) -> str:
    """Workers are numbered as their pools and groups stand, then as they are started."""
    return f"mock-{number}"


def _require_faults(settings: Settings) -> None:
    life = settings.life
    if 0 < life.mtbf_s < MTBF_S_MIN:
        raise SettingsUnusable("life.mtbf_s", f"{life.mtbf_s} is below {MTBF_S_MIN:g} s, so nothing would ever run")
    starts = sorted(life.starts, key=lambda start: start.at_us)
    begins = [0] * settings.workers + [start.at_us for start in starts for _ in range(start.count)]
    free_us: dict[str, int | None] = {worker_id(number): begin_us for number, begin_us in enumerate(begins)}
    for fault in sorted(life.faults, key=lambda fault: fault.at_us):
        where = f"faults[{life.faults.index(fault)}]"
        if fault.worker not in free_us:
            reason = f"there is no worker {fault.worker!r}; they are mock-0 to {worker_id(len(begins) - 1)}"
            raise SettingsUnusable(f"{where}.worker", reason)
        there_us = free_us[fault.worker]
        if there_us is None or fault.at_us < there_us:
            reason = "stays dead after the fault before" if there_us is None else f"is started at {there_us / 1e6:g} s"
            raise SettingsUnusable(f"{where}.at", f"{fault.worker} {reason}")
        free_us[fault.worker] = None if fault.back_us is None else fault.at_us + fault.back_us


def engine_config(
    *, block_size: int = 64, blocks: int = 16_384, max_num_seqs: int = 256, max_num_batched_tokens: int = 8_192
) -> EngineConfig:
    """An engine of these sizes, defaults are those of Dynamo's mocker; ValueError if they do not go together."""
    return EngineConfig(
        vocabulary=None,  # whoever only compares times and caches needs nobody to speak
        block_size=block_size,
        kv_blocks_total=blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
    )


def one_pool(workers: int, engine: EngineConfig, *, seed: int = 0) -> Settings:
    """Equal workers in one pool, and nothing happens to them."""
    return Settings(pools=(PoolSettings(groups=(WorkerGroup(count=workers, engine=engine),)),), seed=seed)


class PolicyUnusable(ValueError):
    """A policy that does not exist, has no such setting or cannot be simulated; the text says which."""


def policy(text: str) -> RouterConfig:
    """The routing rule that `NAME` or `NAME:setting=value,setting=value` stands for.

    NAME is a mode of the router or the dotted path of a policy class, the settings are fields of `RouterConfig`, those
    of its parts as `busy.name` and `queue.name`. Raises PolicyUnusable.
    """
    name, _, rest = text.partition(":")
    if name == "direct":
        raise PolicyUnusable("the policy direct cannot be simulated: the requests of a trace name no workers")
    if name.endswith(".py"):
        raise PolicyUnusable(f"policy {text!r}: a class of a file is said as {_dotted(name, rest)}")
    modes = [mode for mode in get_args(RouterMode) if mode != "direct"]
    if name not in modes and "." not in name:
        raise PolicyUnusable(f"there is no policy {name!r}; there are {', '.join(modes)} and dotted paths of your own")
    parts: dict[str, dict[str, str]] = {part: {} for part in PARTS}
    for one in rest.split(",") if rest else ():
        setting, equals, value = one.partition("=")
        part, _, field = setting.rpartition(".")
        if not equals or part not in PARTS or field not in PARTS[part].__struct_fields__ or setting == "mode":
            reason = f"{one!r} is no setting=value of the router's configuration; {_near(setting)}"
            raise PolicyUnusable(f"policy {text!r}: {reason}")
        if field in parts[part]:
            raise PolicyUnusable(f"policy {text!r}: {setting} is given twice")
        parts[part][field] = value
    fields = parts.pop("")
    given = {"mode": name, **parts, **fields}
    try:
        return msgspec.convert(given, RouterConfig, strict=False)
    except msgspec.ValidationError as error:
        raise PolicyUnusable(f"policy {text!r}: {refused(given, RouterConfig, error, strict=False)}") from error


def _near(setting: str) -> str:
    """The settings of a router that may be meant by one that there is not; all of them if none is like it."""
    return f"there is {', '.join(get_close_matches(setting, ROUTER_SETTINGS, n=2) or ROUTER_SETTINGS)}"


def _dotted(file: str, rest: str) -> str:
    """The dotted path of the class that `FILE.py:CLASS` seems to mean, from the current directory."""
    path = PurePosixPath(file).with_suffix("")
    parts = path.parts if all(part.isidentifier() for part in path.parts) else (path.name,)
    return ".".join((*parts, rest if rest.isidentifier() else "CLASS"))
