"""Options shared by `forebay simulate` and `forebay sweep`: the fleet, the workload's shape and the policies."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from forebay.cli.common.options import Argument, Option
from forebay.cli.policies.allowed import AllowPolicyOption, require_policy
from forebay.events.control import DisaggConfig, RouterConfig
from forebay.events.names import unknown_name
from forebay.runtime.errors import ConfigError, prefixed
from forebay.simulate.fleet_file import load_fleet, worker_group
from forebay.simulate.profiles.profile import MOCKER, SIZE_MAX, load_profile
from forebay.simulate.settings import (
    DELAYS,
    KV_BYTES_MAX,
    TIME_S_MAX,
    TIME_US_MAX,
    TIMEOUT_S_MAX,
    WORKERS_MAX,
    Delay,
    Delays,
    PoolRole,
    PoolSettings,
    Settings,
    SettingsUnusable,
    Transfer,
    WorkerFault,
    named_delays,
    policy,
    validate_settings,
)
from forebay.simulate.slo import Slo, parse_slo
from forebay.simulate.tiers.settings import (
    BANDWIDTH_MAX,
    DiskTier,
    FleetTiers,
    HostTier,
    StoreTier,
    TierModel,
    WorkerTiers,
)
from forebay.simulate.workload import Workload, WorkloadOptions

POLICIES = ("kv", "round-robin")
WORKERS = 8
INT_MAX = (1 << 63) - 1
AS_CONFIGURED = "as configured"
LIFE = ("cold_start_s", "lease_ttl_s")
TRANSFER = ("kv_bytes_per_token", "kv_transfer_bandwidth", "kv_transfer_latency_us")
SIZES = ("block_size", "kv_blocks", "max_num_seqs", "max_num_batched_tokens")
TIERS = ("host", "disk", "store")
OF_POOLS = ("workers", "prefill_workers", "decode_workers", "engine_profile", *SIZES)
FAULT = re.compile(r"faults\[(?P<at>\d+)\]")
DEATH = re.compile(r"(?P<worker>.+)@(?P<at>\d+(\.\d+)?)(\+(?P<back>\d+(\.\d+)?))?", re.ASCII)

Tier = TypeVar("Tier", bound=TierModel)

WORKLOAD = Argument(
    metavar="WORKLOAD",
    help="A file, or synthetic:SETTINGS. See docs/workloads.md.",
)
WorkloadArgument = Annotated[str, WORKLOAD]
OptionalWorkloadArgument = Annotated[str | None, WORKLOAD]
PoliciesOption = Annotated[
    list[str] | None,
    Option("--policy", help="Policy as NAME or NAME:setting=value,…. Repeatable.", default_text=", ".join(POLICIES)),
]
SloOption = Annotated[str | None, Option(help="Objectives per request in ms: one or more of ttft=500,itl=20,e2e=9000.")]
AttainOption = Annotated[
    float | None,
    Option(min=0.0, max=1.0, help="Required SLO attainment, as a share of requests; exit 1 if it is missed."),
]


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """Options of the simulated fleet. A size that is None comes from the engine profile or from `engine_config`."""

    workers: Annotated[
        int | None, Option(min=1, max=WORKERS_MAX, help="Number of workers.", default_text=str(WORKERS))
    ] = None
    prefill_workers: Annotated[
        int | None, Option(min=0, max=WORKERS_MAX, help="Number of prefill workers. Requires --decode-workers.")
    ] = None
    decode_workers: Annotated[
        int | None, Option(min=1, max=WORKERS_MAX, help="Number of decode workers. Requires --prefill-workers.")
    ] = None
    file: Annotated[
        Path | None, Option("--fleet", help="Fleet file: TOML with pools, kinds of workers, delays and failures.")
    ] = None
    engine_profile: Annotated[
        str | None,
        Option(
            help="Engine profile with step times and sizes: mocker, or the path of a profile file.", default_text=MOCKER
        ),
    ] = None
    block_size: Annotated[int | None, Option(min=1, max=SIZE_MAX, help="Tokens per KV block.", default_text="64")] = (
        None
    )
    kv_blocks: Annotated[
        int | None, Option(min=1, max=SIZE_MAX, help="KV blocks per worker.", default_text="16384")
    ] = None
    max_num_seqs: Annotated[
        int | None, Option(min=1, max=SIZE_MAX, help="Running sequences per worker.", default_text="256")
    ] = None
    max_num_batched_tokens: Annotated[
        int | None, Option(min=1, max=SIZE_MAX, help="Tokens per engine step.", default_text="8192")
    ] = None
    delays: Annotated[
        str | None, Option(help=f"Latencies between the processes: {', '.join(DELAYS)}.", default_text="none")
    ] = None
    kill: Annotated[
        list[str] | None,
        Option(
            metavar="WORKER@S[+S]", help="Kill WORKER at second S, and start a replacement S seconds later. Repeatable."
        ),
    ] = None
    cold_start_s: Annotated[
        float | None, Option(min=0, max=TIME_S_MAX, help="Seconds from a worker's start until ready.", default_text="0")
    ] = None
    lease_ttl_s: Annotated[
        float | None,
        Option(
            min=0,
            max=TIME_S_MAX,
            help="Seconds from the death of a worker until the router declares it lost.",
            default_text="3",
        ),
    ] = None
    kv_bytes_per_token: Annotated[
        int | None,
        Option(
            min=1,
            max=KV_BYTES_MAX,
            help="Bytes of KV per token, for KV transfers.",
            default_text=str(Transfer().kv_bytes_per_token),
        ),
    ] = None
    kv_transfer_bandwidth: Annotated[
        float | None,
        Option(
            min=0,
            max=BANDWIDTH_MAX,
            help="GB per second of each worker's link; 0 for instant transfers.",
            default_text=str(Transfer().kv_transfer_bandwidth),
        ),
    ] = None
    kv_transfer_latency_us: Annotated[
        int | None, Option(min=0, max=TIME_US_MAX, help="Latency of a KV transfer in microseconds.", default_text="0")
    ] = None
    kv_tier: Annotated[
        list[str] | None,
        Option(
            metavar="KIND:size=SIZE",
            help="Tier for KV: host or disk per worker, or store per model, as host:size=64GB or host:size=4096blocks;"
            " size 0 is no tier. Repeatable.",
        ),
    ] = None
    timeout_s: Annotated[float, Option(min=0.001, max=TIMEOUT_S_MAX, help="Timeout of a request in seconds.")] = (
        TIMEOUT_S_MAX
    )
    seed: Annotated[int, Option(min=0, max=INT_MAX, help="Random seed for sampling and tie-breaking.")] = 0


@dataclass(frozen=True, slots=True)
class ShapeOptions:
    """Options that transform the workload before it is played."""

    speed: Annotated[float, Option(min=0.001, max=1e6, help="Divide the times between arrivals by this number.")] = 1.0
    duration_s: Annotated[
        float | None, Option(min=0.001, max=TIME_S_MAX, help="Play only the first SECONDS of the workload.")
    ] = None
    requests: Annotated[int | None, Option(min=1, help="Play only the first N requests.")] = None
    columns: Annotated[
        str | None,
        Option(metavar="FIELD=NAME,…", help="Columns of a table: time, prompt, output; optionally session, model."),
    ] = None
    skip_bad_rows: Annotated[
        bool, Option("--skip-bad-rows", help="Skip and count unusable rows instead of failing.")
    ] = False


@dataclass(frozen=True, slots=True)
class AgainstOptions:
    """Options of `forebay simulate` that compare a simulation with a recording."""

    against: Annotated[
        Path | None, Option(help="Simulate this recording with its own fleet and requests, and report the error.")
    ] = None
    speedup: Annotated[
        float, Option(min=1e-6, max=1e6, help="With --against: `forebay up --speedup` of the recorded mock engines.")
    ] = 1.0
    fail_above: Annotated[
        str | None,
        Option(
            help="With --against: exit 1 if an error exceeds its bound: ttft=10,itl=15,e2e=10 (% of p50 and p90), "
            "reuse=1 (percentage points), load=5 (%)."
        ),
    ] = None
    allow_policy: AllowPolicyOption = None


def settings_of(fleet: FleetOptions) -> Settings:
    """Return the settings of the fleet; options override a file. Raises ConfigError, naming the option, if invalid."""
    settings = _described(fleet)
    faults = len(settings.life.faults)
    life, transfer = (
        {name: value for name in names if (value := getattr(fleet, name)) is not None} for names in (LIFE, TRANSFER)
    )
    life["faults"] = (*settings.life.faults, *map(_fault, fleet.kill or ()))
    settings = msgspec.structs.replace(
        settings,
        delays=settings.delays if fleet.delays is None else named_delays("--delays", fleet.delays),
        life=msgspec.structs.replace(settings.life, **life),
        transfer=msgspec.structs.replace(settings.transfer, **transfer),
        timeout_s=fleet.timeout_s,
        seed=fleet.seed,
    )
    settings = _with_tier_sizes(settings, _tier_sizes(fleet))
    try:
        validate_settings(settings)
    except SettingsUnusable as error:
        raise ConfigError(f"{_flag(error.where, fleet, faults)}: {error.reason}") from None
    return settings


def _described(fleet: FleetOptions) -> Settings:
    """Return the fleet from the file, or from the options. Raises ConfigError if the file conflicts with an option."""
    if fleet.file is not None:
        given = [f"--{name.replace('_', '-')}" for name in OF_POOLS if getattr(fleet, name) is not None]
        if given:
            raise ConfigError(f"--fleet {fleet.file} defines the fleet; remove {' and '.join(given)}")
        return load_fleet(fleet.file)
    profile = load_profile(MOCKER if fleet.engine_profile is None else fleet.engine_profile)
    sizes = {size: getattr(fleet, size) for size in SIZES}
    pools = tuple(
        PoolSettings(name=name, role=role, groups=(worker_group(profile, count, **sizes),))
        for name, role, count in _counts(fleet)
        if count
    )
    # A fitted profile has measured the latency from the router to the engine, too.
    return Settings(pools=pools, delays=Delays(work=Delay(fixed_ms=profile.work_us / 1e3)))


def _counts(fleet: FleetOptions) -> tuple[tuple[str, PoolRole, int], ...]:
    """Return name, role and number of workers of each pool that the options define."""
    if fleet.decode_workers is None:
        if fleet.prefill_workers is not None:
            raise ConfigError(f"--prefill-workers {fleet.prefill_workers} requires --decode-workers")
        return (("default", "aggregated", fleet.workers or WORKERS),)
    if fleet.workers is not None:
        raise ConfigError("--workers cannot be combined with --prefill-workers and --decode-workers")
    if fleet.prefill_workers is None:
        raise ConfigError(f"--decode-workers {fleet.decode_workers} requires --prefill-workers")
    return ("prefill", "prefill", fleet.prefill_workers), ("decode", "decode", fleet.decode_workers)


def policies_of(given: Sequence[str] | None, settings: Settings) -> Sequence[str]:
    """Return the policies to simulate. Raises ConfigError if one is a duplicate or has no effect."""
    for name in given or ():
        if list(given or ()).count(name) > 1:
            raise ConfigError(f"--policy {name}: duplicate policy")
    if any(pool.router is None for pool in settings.pools):
        if AS_CONFIGURED in (given or ()):
            raise ConfigError(f"--policy {AS_CONFIGURED}: requires that every pool has its own router")
        return given or POLICIES
    if given:
        raise ConfigError(f"--policy {given[0]}: has no effect, because every pool has its own router")
    return (AS_CONFIGURED,)


def router_of(text: str) -> RouterConfig:
    """Return the routing of the pools that have none of their own. Raises ConfigError if the policy is invalid."""
    return RouterConfig() if text == AS_CONFIGURED else policy(text)


def workload_options(shape: ShapeOptions, seed: int, *, models: int = 1) -> WorkloadOptions:
    """Return the workload options. If the fleet has several `models`, each request goes to the model that it names."""
    fields = asdict(shape)
    return WorkloadOptions(requests_max=fields.pop("requests"), by_model=models > 1, seed=seed, **fields)


def slo_of(text: str | None, attain: float | None) -> Slo | None:
    """Return the limits of --slo, None without. Raises ConfigError if invalid, or for --attain without --slo."""
    if text is None:
        if attain is not None:
            raise ConfigError("--attain requires --slo")
        return None
    with prefixed(f"--slo {text}"):
        return parse_slo(text)


def require_routers(routers: Iterable[RouterConfig], pools: Iterable[PoolSettings] = ()) -> None:
    """Raise ConfigError if the policy of a router does not exist or cannot be used."""
    own = (pool.router for pool in pools if pool.router is not None)
    for mode in dict.fromkeys(router.mode for router in (*routers, *own)):
        require_policy(mode)


def require_disaggregation(name: str, router: RouterConfig, pools: Iterable[PoolSettings]) -> None:
    """Raise ConfigError if disaggregation settings have no effect, because all workers are aggregated."""
    if router.disagg != DisaggConfig() and all(pool.role == "aggregated" for pool in pools):
        raise ConfigError(f"{name}: disagg settings require --prefill-workers and --decode-workers")


def require_servable(workload: Workload, settings: Settings) -> None:
    """Raise ConfigError if no worker can serve any request of the workload."""
    smallest: tuple[int, int] | None = None
    for turn in workload.turns():
        tokens = turn.prompt_tokens + turn.output_tokens
        if any(
            -(-tokens // group.engine.block_size) <= group.engine.kv_blocks_total
            for pool in settings.pools
            if turn.model in ("", pool.model) and pool.role != "prefill"
            for group in pool.groups
        ):
            return
        smallest = min(smallest or (tokens, turn.number), (tokens, turn.number))
    if smallest is None:
        raise ConfigError(f"{workload.name} contains no request")
    room = {
        pool.name: max(group.engine.block_size * group.engine.kv_blocks_total for group in pool.groups)
        for pool in settings.pools
        if pool.role != "prefill"
    }
    available = ", ".join(f"{tokens} tokens in pool {name}" for name, tokens in room.items())
    raise ConfigError(
        f"no request of {workload.name} fits a worker: the smallest, request {smallest[1] + 1}, has {smallest[0]} "
        f"prompt and output tokens, and the KV cache of a worker holds {available}; use more blocks, or check that a "
        "pool serves the model of the requests"
    )


def settings_json(settings: Settings, options: WorkloadOptions, workload: str) -> dict[str, Any]:
    """Return all settings except the policies as JSON values."""
    return {"workload": workload, "workload_options": to_json(options), **to_json(settings)}


def to_json(settings: Any) -> Any:
    """Return a struct as JSON values, with the default values that msgspec would omit, but without tiers of None."""
    if isinstance(settings, msgspec.Struct):
        fields = {name: getattr(settings, name) for name in settings.__struct_fields__}
        return {name: to_json(value) for name, value in fields.items() if name != "tiers" or value is not None}
    return [to_json(one) for one in settings] if isinstance(settings, tuple) else settings


def _fault(text: str) -> WorkerFault:
    match = DEATH.fullmatch(text)
    if match is None:
        raise ConfigError(f"--kill {text}: expected WORKER@SECONDS or WORKER@SECONDS+SECONDS, as in mock-0@60+30")
    at_s, back_s = float(match["at"]), None if match["back"] is None else float(match["back"])
    if max(at_s, back_s or 0.0) > TIME_S_MAX:
        raise ConfigError(f"--kill {text}: the maximum is 100 years")
    return WorkerFault(worker=match["worker"], at_s=at_s, back_s=back_s)


def _flag(where: str, fleet: FleetOptions, faults: int) -> str:
    """Return the name of the option that sets a setting, for errors. The first `faults` faults come from the file."""
    fault = FAULT.match(where)
    if fault is not None and fleet.kill and int(fault["at"]) >= faults:
        return f"--kill {fleet.kill[int(fault['at']) - faults]}"
    name = where.rpartition(".")[2]
    if name in LIFE:
        return f"--{name.replace('_', '-')}"
    if where.startswith("tiers.") and name in _tier_sizes(fleet):
        return f"--kv-tier {name}"
    if where.startswith("tiers."):
        return f"{fleet.file or fleet.engine_profile}: {where}"
    return f"{fleet.file or ('--workers' if fleet.decode_workers is None else '--decode-workers')}: {where}"


def _tier_sizes(fleet: FleetOptions) -> dict[str, str]:
    """Return the sizes that the options give, by kind of tier. Later options override earlier ones."""
    sizes = {}
    for text in fleet.kv_tier or ():
        kind, _, size = text.partition(":size=")
        if kind not in TIERS:
            raise ConfigError(f"--kv-tier {text}: {unknown_name('kind of tier', kind, TIERS)}")
        sizes[kind] = size
    return sizes


def _with_tier_sizes(settings: Settings, sizes: Mapping[str, str]) -> Settings:
    """Return settings with other sizes of the tiers. Raises ConfigError with the option if a size is invalid."""
    if not sizes:
        return settings
    tiers = settings.tiers or FleetTiers()
    tiers = msgspec.structs.replace(
        tiers,
        host=_sized("host", HostTier, tiers.host, sizes),
        disk=_sized("disk", DiskTier, tiers.disk, sizes),
        store=_sized("store", StoreTier, tiers.store, sizes),
    )
    pools = tuple(
        msgspec.structs.replace(
            pool,
            groups=tuple(msgspec.structs.replace(group, tiers=_own_tiers(group.tiers, sizes)) for group in pool.groups),
        )
        for pool in settings.pools
    )
    return msgspec.structs.replace(settings, pools=tuple(pools), tiers=tiers)


def _own_tiers(tiers: WorkerTiers | None, sizes: Mapping[str, str]) -> WorkerTiers | None:
    """Return the tiers of an engine profile with the sizes of the options."""
    if tiers is None:
        return None
    return WorkerTiers(
        host=tiers.host and _sized("host", HostTier, tiers.host, sizes),
        disk=tiers.disk and _sized("disk", DiskTier, tiers.disk, sizes),
    )


def _sized(name: str, kind: Callable[..., Tier], tier: Tier | None, sizes: Mapping[str, str]) -> Tier | None:
    if name not in sizes:
        return tier
    with prefixed(f"--kv-tier {name}"):
        return kind(size=sizes[name]) if tier is None else msgspec.structs.replace(tier, size=sizes[name])
