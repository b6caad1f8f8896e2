"""What `forebay simulate` and `forebay sweep` are both told: the fleet, the workload's shape, the policies."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from forebay.cli.policies.check import require_policy
from forebay.events.control import DisaggConfig, RouterConfig
from forebay.simulate.fleet_file import Fleet, load_fleet, worker_group
from forebay.simulate.profiles.profile import MOCKER, SIZE_MAX, load_profile
from forebay.simulate.settings import (
    BANDWIDTH_MAX,
    DELAYS,
    KV_BYTES_MAX,
    TIME_S_MAX,
    TIME_US_MAX,
    TIMEOUT_S_MAX,
    WORKERS_MAX,
    Delay,
    Delays,
    Fault,
    Life,
    PoolRole,
    PoolSettings,
    Settings,
    SettingsUnusable,
    Transfer,
    policy,
    require_sense,
)
from forebay.simulate.slo import Slo, service_levels
from forebay.simulate.workload import Workload, WorkloadOptions

POLICIES = ("kv", "round-robin")
WORKERS = 8
US_PER_S = 1_000_000
INT_MAX = (1 << 63) - 1
AS_CONFIGURED = "as configured"
LIFE = ("mtbf_s", "repair_s", "cold_start_s", "lease_ttl_s")
TRANSFER = ("kv_bytes_per_token", "kv_transfer_bandwidth", "kv_transfer_latency_us")
SIZES = ("block_size", "blocks", "max_num_seqs", "max_num_batched_tokens")
OF_POOLS = ("workers", "prefill_workers", "decode_workers", "engine", *SIZES)
FAULT = re.compile(r"faults\[(?P<at>\d+)\]")
DEATH = re.compile(r"(?P<worker>.+)@(?P<at>\d+(\.\d+)?)(\+(?P<back>\d+(\.\d+)?))?", re.ASCII)

WORKLOAD = typer.Argument(
    metavar="WORKLOAD",
    help="A file, a folder of runs, several runs, or synthetic:SETTINGS: docs/workloads.md.",
)
WorkloadArgument = Annotated[list[str], WORKLOAD]
OptionalWorkloadArgument = Annotated[list[str] | None, WORKLOAD]
PoliciesOption = Annotated[
    list[str] | None,
    typer.Option("--policy", help="NAME or NAME:setting=value,…; once for each.", show_default=", ".join(POLICIES)),
]
SloOption = Annotated[
    str | None,
    typer.Option(help="What each request is promised, in ms: ttft=500,itl=20,e2e=9000, or some of them."),
]
AttainOption = Annotated[
    float | None,
    typer.Option(min=0.0, max=1.0, help="The share of requests for which --slo must be kept; else exit code 1."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """Who serves; sizes that are None are those of the engine's profile, or of `engine_config`."""

    workers: Annotated[int | None, typer.Option(min=1, max=WORKERS_MAX, help="Workers.", show_default=str(WORKERS))] = (
        None
    )
    prefill_workers: Annotated[
        int | None,
        typer.Option(min=0, max=WORKERS_MAX, help="Workers that compute prompts for --decode-workers, not --workers."),
    ] = None
    decode_workers: Annotated[
        int | None,
        typer.Option(min=1, max=WORKERS_MAX, help="Workers that answer, with the KV of --prefill-workers."),
    ] = None
    pools: Annotated[
        Path | None, typer.Option(help="A TOML file with pools, workers of several kinds, delays and failures.")
    ] = None
    engine: Annotated[
        str | None,
        typer.Option(
            help="How long an engine's steps take, and its sizes: mocker, or an engine profile's file.",
            show_default=MOCKER,
        ),
    ] = None
    block_size: Annotated[
        int | None, typer.Option(min=1, max=SIZE_MAX, help="Tokens a KV block.", show_default="64")
    ] = None
    blocks: Annotated[
        int | None, typer.Option(min=1, max=SIZE_MAX, help="KV blocks a worker.", show_default="16384")
    ] = None
    max_num_seqs: Annotated[
        int | None, typer.Option(min=1, max=SIZE_MAX, help="Sequences a worker runs at once.", show_default="256")
    ] = None
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(min=1, max=SIZE_MAX, help="Tokens of one engine step.", show_default="8192")
    ] = None
    delays: Annotated[
        str | None,
        typer.Option(help=f"How long records take to arrive: {', '.join(DELAYS)}.", show_default="none"),
    ] = None
    kill: Annotated[
        list[str] | None,
        typer.Option(metavar="WORKER@S[+S]", help="It dies at that second, and a new one starts so much later."),
    ] = None
    mtbf_s: Annotated[
        float | None,
        typer.Option(min=0, max=TIME_S_MAX, help="Mean time between failures of a worker.", show_default="never"),
    ] = None
    repair_s: Annotated[
        float | None,
        typer.Option(min=0, max=TIME_S_MAX, help="From such a failure to the new worker's start.", show_default="60"),
    ] = None
    cold_start_s: Annotated[
        float | None,
        typer.Option(min=0, max=TIME_S_MAX, help="From a worker's start to its first request.", show_default="0"),
    ] = None
    lease_ttl_s: Annotated[
        float | None,
        typer.Option(min=0, max=TIME_S_MAX, help="From a death to the router's notice of it.", show_default="10"),
    ] = None
    kv_bytes_per_token: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=KV_BYTES_MAX,
            help="Bytes of KV a token, that prefill workers send.",
            show_default=str(Transfer().kv_bytes_per_token),
        ),
    ] = None
    kv_transfer_bandwidth: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=BANDWIDTH_MAX,
            help="GB a second that a worker sends, and receives; 0 takes no time.",
            show_default=str(Transfer().kv_transfer_bandwidth),
        ),
    ] = None
    kv_transfer_latency_us: Annotated[
        int | None,
        typer.Option(min=0, max=TIME_US_MAX, help="From asking for KV to its first byte.", show_default="0"),
    ] = None
    timeout_s: Annotated[float, typer.Option(min=0.001, max=TIMEOUT_S_MAX, help="For a whole request.")] = TIMEOUT_S_MAX
    seed: Annotated[int, typer.Option(min=0, max=INT_MAX, help="Decides where nothing else does, and draws.")] = 0


@dataclass(frozen=True, slots=True)
class ShapeOptions:
    """What is made of the workload before it is played."""

    speed: Annotated[float, typer.Option(min=0.001, max=1e6, help="Divides the times between arrivals.")] = 1.0
    duration_s: Annotated[
        float | None, typer.Option(min=0.001, max=TIME_S_MAX, help="Only the first seconds of the trace.")
    ] = None
    requests: Annotated[int | None, typer.Option(min=1, help="Only the first so many requests.")] = None
    prefix_multiplier: Annotated[
        float, typer.Option(min=0.001, max=1e3, help="Scales what prompts share with others.")
    ] = 1.0
    prefix_roots: Annotated[
        int, typer.Option(min=1, max=1 << 20, help="So many copies of what is shared, which share nothing.")
    ] = 1
    prompt_multiplier: Annotated[
        float, typer.Option(min=0.001, max=1e3, help="Scales what belongs to one prompt alone.")
    ] = 1.0
    session_spacing_s: Annotated[
        float | None,
        typer.Option(min=0, max=TIME_S_MAX, help="From the start of one run to the next's, where files are runs."),
    ] = None
    tokenizer: Annotated[
        str | None, typer.Option(help="A tokenizer.json for workloads of text; without, 4 characters are a token.")
    ] = None
    by_model: Annotated[
        bool, typer.Option("--by-model", help="Requests are for the models they name, not all for the only one.")
    ] = False
    skip_bad_rows: Annotated[
        bool, typer.Option("--skip-bad-rows", help="Leave out rows that cannot be played, and count them.")
    ] = False


def settings_of(fleet: FleetOptions) -> Settings:
    """The fleet that options stand for; they win over a file. Raises ValueError, in the user's terms."""
    described = _described(fleet)
    if fleet.delays is not None and fleet.delays not in DELAYS:
        raise ValueError(f"--delays {fleet.delays}: there is {', '.join(DELAYS)}")
    life = described.life or Life()
    said, moved = (
        {name: value for name in names if (value := getattr(fleet, name)) is not None} for names in (LIFE, TRANSFER)
    )
    settings = Settings(
        pools=described.pools,
        delays=(described.delays or Delays()) if fleet.delays is None else DELAYS[fleet.delays],
        life=msgspec.structs.replace(life, faults=(*life.faults, *map(_fault, fleet.kill or ())), **said),
        transfer=msgspec.structs.replace(described.transfer or Transfer(), **moved),
        timeout_s=fleet.timeout_s,
        seed=fleet.seed,
    )
    try:
        require_sense(settings)
    except SettingsUnusable as error:
        raise ValueError(f"{_flag(error.where, fleet, len(life.faults))}: {error.reason}") from None
    return settings


def _described(fleet: FleetOptions) -> Fleet:
    """What the file says, or the options of a single pool. Raises ValueError."""
    if fleet.pools is not None:
        given = [f"--{name.replace('_', '-')}" for name in OF_POOLS if getattr(fleet, name) is not None]
        if given:
            raise ValueError(f"--pools {fleet.pools} says who serves: leave {' and '.join(given)} out")
        return load_fleet(fleet.pools)
    profile = load_profile(MOCKER if fleet.engine is None else fleet.engine)
    sizes = {size: getattr(fleet, size) for size in SIZES}
    pools = tuple(
        PoolSettings(name=name, role=role, groups=(worker_group(profile, count, **sizes),))
        for name, role, count in _counts(fleet)
        if count
    )
    # A profile that is fitted to a recording has measured the way to the engine, too.
    delays = Delays(work=Delay(fixed_us=profile.work_us)) if profile.work_us else None
    return Fleet(pools=pools, delays=delays)


def _counts(fleet: FleetOptions) -> tuple[tuple[str, PoolRole, int], ...]:
    """The pools of one model: their names, what they do, and how many workers they have. Raises ValueError."""
    if fleet.decode_workers is None:
        if fleet.prefill_workers is not None:
            raise ValueError(f"--prefill-workers {fleet.prefill_workers}: --decode-workers says how many answer")
        return (("default", "aggregated", fleet.workers or WORKERS),)
    if fleet.workers is not None:
        raise ValueError("--workers does both, --prefill-workers and --decode-workers a part each: one of them")
    if fleet.prefill_workers is None:
        raise ValueError(f"--decode-workers {fleet.decode_workers}: --prefill-workers says how many compute prompts")
    return ("prefill", "prefill", fleet.prefill_workers), ("decode", "decode", fleet.decode_workers)


def policies_of(given: Sequence[str] | None, settings: Settings) -> Sequence[str]:
    """The policies that are simulated. Raises ValueError for some that decide nothing, or stand there twice."""
    for name in given or ():
        if list(given or ()).count(name) > 1:
            raise ValueError(f"--policy {name}: stands there twice")
    if any(pool.router is None for pool in settings.pools):
        if AS_CONFIGURED in (given or ()):
            raise ValueError(f"--policy {AS_CONFIGURED}: not every pool has a router of its own")
        return given or POLICIES
    if given:
        raise ValueError(f"--policy {given[0]}: every pool has a router of its own, so it decides nothing")
    return (AS_CONFIGURED,)


def router_of(text: str) -> RouterConfig:
    """What pools without a router of their own are given. Raises ValueError."""
    return RouterConfig() if text == AS_CONFIGURED else policy(text)


def workload_options(shape: ShapeOptions, seed: int, *, models: int = 1) -> WorkloadOptions:
    """The shape as a workload takes it; of several `models` each request names its own."""
    return WorkloadOptions(
        speed=shape.speed,
        duration_s=shape.duration_s,
        requests_max=shape.requests,
        prefix_multiplier=shape.prefix_multiplier,
        prefix_roots=shape.prefix_roots,
        prompt_multiplier=shape.prompt_multiplier,
        session_spacing_s=shape.session_spacing_s,
        tokenizer=shape.tokenizer,
        by_model=shape.by_model or models > 1,
        skip_bad_rows=shape.skip_bad_rows,
        seed=seed,
    )


def slo_of(text: str | None, attain: float | None) -> Slo | None:
    """What is promised, if anything. Raises ValueError."""
    if text is None:
        if attain is not None:
            raise ValueError("--attain is a share of the requests that --slo is kept for: give that, too")
        return None
    try:
        return service_levels(text)
    except ValueError as error:
        raise ValueError(f"--slo {text}: {error}") from None


def require_routers(routers: Iterable[RouterConfig], pools: Iterable[PoolSettings] = ()) -> None:
    """Refuse a policy, or a pool's own, that is not there or not deterministic (Unusable)."""
    own = (pool.router for pool in pools if pool.router is not None)
    for mode in dict.fromkeys(router.mode for router in (*routers, *own)):
        require_policy(mode)


def require_apart(name: str, router: RouterConfig, pools: Iterable[PoolSettings]) -> None:
    """Refuse (ValueError) to say which prompts are computed elsewhere if nobody does: it would change nothing."""
    if router.disagg != DisaggConfig() and all(pool.role == "aggregated" for pool in pools):
        raise ValueError(f"{name}: disagg is of --prefill-workers and --decode-workers, and there are none")


def require_possible(workload: Workload, settings: Settings) -> None:
    """Refuse a workload of which no request fits any worker (ValueError): all of it would fail."""
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
        raise ValueError(f"{workload.name} holds no request")
    room = {
        pool.name: max(group.engine.block_size * group.engine.kv_blocks_total for group in pool.groups)
        for pool in settings.pools
        if pool.role != "prefill"
    }
    said = ", ".join(f"{tokens} tokens in pool {name}" for name, tokens in room.items())
    raise ValueError(
        f"no request of {workload.name} can be served: the smallest, request {smallest[1] + 1}, has {smallest[0]} "
        f"prompt and output tokens, and a worker has room for {said}; requests also go only to pools of their model"
    )


def echo(settings: Settings, options: WorkloadOptions, workload: str) -> dict[str, Any]:
    """All that decides beside the policies, for JSON."""
    return {"workload": workload, "workload_options": in_full(options), **in_full(settings)}


def in_full(settings: Any) -> Any:
    """A struct for JSON with its defaults, which those of the wire leave out."""
    if isinstance(settings, msgspec.Struct):
        return {name: in_full(getattr(settings, name)) for name in settings.__struct_fields__}
    return [in_full(one) for one in settings] if isinstance(settings, tuple) else settings


def _fault(text: str) -> Fault:
    said = DEATH.fullmatch(text)
    if said is None:
        raise ValueError(f"--kill {text}: not of the form WORKER@SECONDS or WORKER@SECONDS+SECONDS, as in mock-0@60+30")
    at_us, back_us = (None if time is None else float(time) * US_PER_S for time in (said["at"], said["back"]))
    if max(at_us or 0, back_us or 0) > TIME_US_MAX:
        raise ValueError(f"--kill {text}: more than a century")
    return Fault(worker=said["worker"], at_us=round(at_us or 0), back_us=None if back_us is None else round(back_us))


def _flag(where: str, fleet: FleetOptions, faults: int) -> str:
    """The option behind a setting, if the first so many faults are of a file."""
    fault = FAULT.match(where)
    if fault is not None and fleet.kill and int(fault["at"]) >= faults:
        return f"--kill {fleet.kill[int(fault['at']) - faults]}"
    name = where.rpartition(".")[2]
    if name in LIFE:
        return f"--{name.replace('_', '-')}"
    return f"{fleet.pools or ('--workers' if fleet.decode_workers is None else '--decode-workers')}: {where}"
