"""`forebay up`: router, workers and ingress in one process, on the embedded log."""

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from forebay.cli.common.errors import explained, fail
from forebay.cli.common.logs import AccessLogOption, LoggingOptions, announce
from forebay.cli.common.option_groups import spread
from forebay.cli.common.sizes import size
from forebay.cli.common.times import span_us
from forebay.cli.console.command import PORT as CONSOLE_PORT
from forebay.cli.policies.allowed import AllowPolicyOption, allowed_policies
from forebay.cli.policies.router_options import router_options
from forebay.cli.processes.engine_options import DEFAULT_POOL, EngineOptions
from forebay.cli.processes.http_options import HttpOptions
from forebay.cli.processes.options import (
    DrainOption,
    KvEventsOption,
    PoolRoutingOption,
    SnapshotOptions,
    named,
    names,
    placed_taints,
    pool_routing_of,
)
from forebay.cli.processes.settings import EmbeddedSettings, WorkerPlace, Workers
from forebay.events.control import DisaggConfig, Role, RouterConfig
from forebay.events.names import unknown_name
from forebay.events.pools import PoolRouting
from forebay.ingress.errors import Unusable
from forebay.transport.base import LogSync

if TYPE_CHECKING:
    from forebay.cli.processes.engines import EngineChoice
    from forebay.console.settings import ConsoleSettings
    from forebay.ingress.http.endpoint import Endpoint
    from forebay.ingress.settings import IngressSettings
    from forebay.live.owner.retention import RetentionLimits

RANKS_MAX = 4_096  # each is an engine of this process, and a candidate of every decision
DISAGG_OPTIONS = (
    "enforce_disagg",
    "router_conditional_disagg",
    "kv_transport",
    "kv_bytes_per_token",
    "kv_checksum",
    "kv_lease_s",
)
# Layers of which `up` logs warnings only, because its own lines describe the workers.
QUIET = ("forebay.live", "forebay.transport", "forebay.workers")
DRAIN_S = 7.0  # with the time to send errors and close, within the 10 s that `docker stop` allows
LOG_SIZE = "10GB"  # about a million requests
LOG_SIZE_IN_MEMORY = "1GB"  # small, because the engines of the process need memory, too
LOG_BYTES_MIN = 10_000_000  # room for a snapshot and the records after it; the write-ahead log alone is larger
MOCK_WORKERS = 4  # enough to show routing; a real engine takes the machine for itself

LeaseTtlOption = Annotated[
    float, typer.Option(min=0.1, help="Seconds without a lease renewal after which a worker is lost.")
]


@dataclass(frozen=True, slots=True)
class LogOptions:
    """Options that set where the log is kept, and which records are removed from it."""

    PANEL: ClassVar = "Log"

    log: Annotated[Path | None, typer.Option(help="Log file. Default: the log is kept in memory.")] = None
    log_max_size: Annotated[
        str | None,
        typer.Option(
            help="Maximum log size, such as 500MB. The oldest records are removed, up to a snapshot. Default: 10GB for"
            " a file, 1GB in memory."
        ),
    ] = None
    log_max_age: Annotated[
        str | None, typer.Option(help="Maximum age of records, such as 12h or 7d. Default: no limit.")
    ] = None
    log_sync: Annotated[
        LogSync,
        typer.Option(
            help="full: an acknowledged record survives a power loss, because each commit waits for the disk. normal:"
            " a power loss may remove the newest records."
        ),
    ] = "normal"

    def limits(self) -> "RetentionLimits":
        """Return the maximum size and age of the log."""
        from forebay.live.owner.retention import RetentionLimits  # noqa: PLC0415 - --help does not wait for an owner

        text = self.log_max_size or (LOG_SIZE_IN_MEMORY if self.log is None else LOG_SIZE)
        age_s = None if self.log_max_age is None else span_us("--log-max-age", self.log_max_age) / 1e6
        return RetentionLimits(size("--log-max-size", text, LOG_BYTES_MIN), age_s)


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Options that set the number of workers, their pools, and how requests are routed to the pools."""

    PANEL: ClassVar = "Workers"

    workers: Annotated[
        int | None,
        typer.Option(min=1, max=1024, help="Number of workers. Default: 4 with the mock engine, 1 with a real engine."),
    ] = None
    prefill_workers: Annotated[
        int | None,
        typer.Option(min=0, max=1024, help="Number of prefill workers. Requires --decode-workers."),
    ] = None
    decode_workers: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Number of decode workers. Requires --prefill-workers.")
    ] = None
    pool_workers: Annotated[
        list[str] | None, typer.Option(help="NAME=COUNT: a pool and its number of workers. Repeatable.")
    ] = None
    pool_routing: PoolRoutingOption = None

    def counts(self, engine: "EngineChoice") -> Workers:
        """Return the number of workers by role and pool. Contradictory options end the command."""
        prefill, decode = self.prefill_workers, self.decode_workers
        if engine.settings.role != "aggregated":
            fail(
                f"--role {engine.settings.role}: `forebay up` has no other role than aggregated; use --prefill-workers"
                " and --decode-workers"
            )
        if (prefill is None) != (decode is None):
            fail(
                "--prefill-workers and --decode-workers require each other; use --prefill-workers 0 for decode workers"
                " only"
            )
        given = ["--workers"] * (self.workers is not None) + ["--pool-workers"] * bool(self.pool_workers)
        given += ["--decode-workers"] * (decode is not None)
        if len(given) > 1:
            fail(f"{given[0]} cannot be combined with {given[1]}")
        if prefill is not None and decode is not None:
            workers = Workers(prefill=prefill, decode=decode)
        elif self.pool_workers:
            workers = Workers(aggregated=_pools(self.pool_workers))
        else:
            workers = Workers(aggregated={DEFAULT_POOL: self.workers or (MOCK_WORKERS if engine.is_mock else 1)})
        ranks = workers.count * engine.settings.dp_size
        if ranks > RANKS_MAX:
            many = f"--workers {workers.count}" if self.workers is not None else f"{workers.count} workers"
            fail(f"{many} with --dp-size {engine.settings.dp_size} are {ranks} ranks; the maximum is {RANKS_MAX}")
        return workers

    def routing(self, model: str, places: Iterable[WorkerPlace]) -> PoolRouting | None:
        """Return the rules for the pools in the file of `--pool-routing`, None without a file.

        Raises Unusable if the file is invalid or names a pool without workers.
        """
        if self.pool_routing is None:
            return None
        found = pool_routing_of(self.pool_routing, model)
        for grid in found.grids:
            known = list(dict.fromkeys(place.pool for place in places if place.role == grid.role))
            for name in (one.pool for one in grid.pools):
                if name not in known:
                    raise Unusable(f"--pool-routing {self.pool_routing}: {unknown_name('pool', name, known)}")
        return found


def _pools(given: Sequence[str]) -> dict[str, int]:
    """Return the number of workers of each pool. Raises Unusable if a value of --pool-workers is invalid."""
    found: dict[str, int] = {}
    for text in given:
        name, _, count = text.partition("=")
        if not count.isdecimal() or not 1 <= int(count[:6]) <= RANKS_MAX:
            raise Unusable(f"--pool-workers {text}: expected NAME=COUNT, a pool and its number of workers from 1")
        if named("--pool-workers", "pool", name) in found:
            raise Unusable(f"--pool-workers {text}: the name {name} appears twice")
        found[name] = int(count)
    return found


@dataclass(frozen=True, slots=True)
class ConsoleBesideOptions:
    """Options of the console beside the system."""

    PANEL: ClassVar = "Console"

    console: Annotated[
        bool, typer.Option("--console", help="Serve a web page that shows this system. Requires --log.")
    ] = False
    console_port: Annotated[int, typer.Option(min=1, max=65535, help="HTTP port of the console.")] = CONSOLE_PORT

    def settings(
        self, log: Path | None, model: str, ingress: "IngressSettings", endpoint: "Endpoint", policies: Iterable[str]
    ) -> "ConsoleSettings | None":
        """Return the settings of the console, None without one. Raises Unusable if there is no log file."""
        if not self.console:
            return None
        if log is None:
            raise Unusable("--console requires --log FILE, because the console is another process")
        from forebay.cli.console.run import beside  # noqa: PLC0415 - --help does not wait for an HTTP server

        url = endpoint.own_url if ingress.admin_token else ""
        return beside(log, model, self.console_port, url, tuple(policies))


@spread
@router_options
def up(
    context: typer.Context,
    router: RouterConfig,
    http: HttpOptions,
    port: Annotated[int, typer.Option(min=1, max=65535, help="HTTP port.")] = 8000,
    host: Annotated[str, typer.Option(help="Address to listen on. Other machines need an API key.")] = "127.0.0.1",
    *,
    workers: WorkerOptions,
    log: LogOptions,
    taint: Annotated[
        list[str] | None,
        typer.Option(
            "--taint", help="Worker label that requests may require or prefer; mock-2:LABEL for one worker. Repeatable."
        ),
    ] = None,
    allow_policy: AllowPolicyOption = None,
    kv_events: KvEventsOption = True,
    lease_ttl_s: LeaseTtlOption = 3.0,
    drain_s: DrainOption = DRAIN_S,
    snapshots: SnapshotOptions,
    console: ConsoleBesideOptions,
    access_log: AccessLogOption = True,
    logs: LoggingOptions,
    engine_given: EngineOptions,
) -> None:
    """Serve an OpenAI-compatible API with a KV-aware router and workers in one process."""
    logs.start(QUIET, has_access_log=access_log)
    with explained():
        engine = engine_given.choice()
        counts = workers.counts(engine)
        if not counts.is_disaggregated:
            _reject_disagg_options(context, router)
        places = counts.places(engine)
        policies = allowed_policies(allow_policy, [router.mode])
        taints = placed_taints(names("--taint", taint), list(places))
        ingress = http.settings(
            model_name=engine.settings.model_name, ingress_id=f"embedded-{os.getpid()}", loras=engine.loras
        )
        endpoint = http.endpoint(host, port)
        settings = EmbeddedSettings(
            log=log.log,
            engine=engine,
            router=router,
            policies=policies,
            places=places,
            routing=workers.routing(engine.settings.model_name, places.values()),
            taints=taints,
            kv_events=kv_events,
            ingress=ingress,
            endpoint=endpoint,
            drain_s=drain_s,
            lease_ttl_s=lease_ttl_s,
            snapshots=snapshots,
            log_limits=log.limits(),
            log_sync=log.log_sync,
            console=console.settings(log.log, engine.settings.model_name, ingress, endpoint, policies),
        )
    # Imported here, so that other commands do not wait for an HTTP server and its models to load.
    from forebay.cli.processes.embedded import run  # noqa: PLC0415

    with explained():
        run(settings, lambda disagg: _announce(settings, disagg))


def _reject_disagg_options(context: typer.Context, router: RouterConfig) -> None:
    """Reject options that have no effect without disaggregation."""
    for name in DISAGG_OPTIONS:
        if context.params.get(name) not in (None, False):
            fail(f"--{name.replace('_', '-')} requires --prefill-workers and --decode-workers")
    if router.disagg != DisaggConfig():
        fail("field disagg of the --router-policy-config file requires --prefill-workers and --decode-workers")


def _announce(settings: EmbeddedSettings, disagg: DisaggConfig) -> None:
    where = settings.log or "memory (lost at exit; use --log FILE to keep it)"
    engine, endpoint = settings.engine, settings.endpoint
    announce(f"forebay: model {engine.settings.model_name}, {_fleet(settings)}, {settings.router.mode} router")
    pools = sorted({place.pool for place in settings.places.values() if place.role == "aggregated"})
    if len(pools) > 1 and settings.routing is None:
        announce(f"forebay: without rules (--pool-routing, `forebay control pools`) {pools[0]} serves all requests")
    if _has(settings, "decode"):
        announce(f"forebay: prompts are computed {_where(settings, disagg)}")
    announce(f"forebay: log in {where}")
    announce(f"forebay: OpenAI API on {endpoint.scheme}://{endpoint.host}:{endpoint.port}/v1, stop with Ctrl-C")


def _fleet(settings: EmbeddedSettings) -> str:
    """Describe the workers for the start message."""
    label, count = settings.engine.label, Counter(place.role for place in settings.places.values())
    if not count["decode"]:
        pools = Counter(place.pool for place in settings.places.values())
        places = "" if len(pools) == 1 else f" ({', '.join(f'{count} in {pool}' for pool, count in pools.items())})"
        return f"{count['aggregated']} {label} worker{'s' if count['aggregated'] > 1 else ''}{places}"
    return f"{label} workers: {count['prefill']} prefill, {count['decode']} decode"


def _has(settings: EmbeddedSettings, role: Role) -> bool:
    return any(place.role == role for place in settings.places.values())


def _where(settings: EmbeddedSettings, disagg: DisaggConfig) -> str:
    """Describe where prompts are computed. `disagg` is the current policy, which `forebay control` may have changed."""
    source = "" if disagg == settings.router.disagg else " (set by `forebay control disaggregation`)"
    return _prefill_place(settings, disagg) + source


def _prefill_place(settings: EmbeddedSettings, disagg: DisaggConfig) -> str:
    engine = settings.engine
    if disagg.policy == "never":
        return "by decode workers"
    if not _has(settings, "prefill"):
        if not disagg.enforce:
            return "by decode workers, because there are no prefill workers"
        if disagg.policy == "always":
            return "nowhere: every request is rejected, because there are no prefill workers"
        return f"by decode workers if the policy {disagg.policy} allows it; other requests are rejected"
    which = "" if disagg.policy == "always" else f" if the policy {disagg.policy} requires it"
    last = "; requests that they cannot compute are rejected" if disagg.enforce else ""
    how = f", KV transfer by {engine.settings.kv_transport}" if engine.is_mock else ""
    return f"by prefill workers{which}{how}{last}"
