"""`forebay up`: router, workers and ingress in one process, on the embedded log."""

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from forebay.cli.common.config_file import model_tables
from forebay.cli.common.errors import explained, fail
from forebay.cli.common.logs import AccessLogOption, LoggingOptions, announce
from forebay.cli.common.option_groups import spread
from forebay.cli.common.times import size, span_us
from forebay.cli.console.command import PORT as CONSOLE_PORT
from forebay.cli.policies.allowed import AllowPolicyOption, allowed_policies
from forebay.cli.policies.router_options import router_options
from forebay.cli.processes.http_options import HttpOptions
from forebay.cli.processes.options import (
    DrainOption,
    KvEventsOption,
    SnapshotOptions,
    names,
    placed_taints,
)
from forebay.cli.processes.settings import EmbeddedModel, EmbeddedSettings
from forebay.cli.processes.tier_options import TierOptions
from forebay.cli.processes.up_models import ModelsOptions, WorkerOptions, choose_models
from forebay.events.control import DisaggConfig, Role, RouterConfig
from forebay.ingress.errors import Unusable
from forebay.transport.base import LogSync

if TYPE_CHECKING:
    from forebay.console.settings import ConsoleSettings
    from forebay.ingress.http.endpoint import Endpoint
    from forebay.ingress.settings import IngressSettings
    from forebay.live.owner.retention import RetentionLimits

DISAGG_OPTIONS = (
    "enforce_disagg",
    "router_conditional_disagg",
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
class ConsoleBesideOptions:
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
    models: ModelsOptions,
    tiers: TierOptions,
) -> None:
    """Serve an OpenAI-compatible API with a KV-aware router and workers in one process."""
    from forebay.ingress.settings import ALL_MODELS  # noqa: PLC0415 - --help does not wait for an HTTP server

    logs.start(QUIET, has_access_log=access_log)
    with explained():
        served = choose_models(models, workers, tiers, model_tables(context))
        if not any(place.role == "decode" for model in served for place in model.places.values()):
            _reject_disagg_options(context, router, has_tiers=tiers != TierOptions())
        policies = allowed_policies(allow_policy, [router.mode])
        taints = placed_taints(names("--taint", taint), [name for model in served for name in model.places])
        only = served[0] if len(served) == 1 else None
        ingress = http.settings(
            model_name=ALL_MODELS if only is None else only.name,
            ingress_id=f"embedded-{os.getpid()}",
            loras=() if only is None else only.engine.loras,
        )
        endpoint = http.endpoint(host, port)
        settings = EmbeddedSettings(
            log=log.log,
            models=served,
            router=router,
            policies=policies,
            taints=taints,
            kv_events=kv_events,
            ingress=ingress,
            endpoint=endpoint,
            drain_s=drain_s,
            lease_ttl_s=lease_ttl_s,
            snapshots=snapshots,
            log_limits=log.limits(),
            log_sync=log.log_sync,
            console=console.settings(log.log, served[0].name, ingress, endpoint, policies),
        )
    # Imported here, so that other commands do not wait for an HTTP server and its models to load.
    from forebay.cli.processes.embedded import run  # noqa: PLC0415

    with explained():
        run(settings, lambda disagg: announce_start(settings, disagg))


def _reject_disagg_options(context: typer.Context, router: RouterConfig, *, has_tiers: bool) -> None:
    """Reject options that have no effect without disaggregation."""
    for name in DISAGG_OPTIONS:
        if has_tiers and name == "kv_bytes_per_token":  # also the size of KV in tiers
            continue
        if context.params.get(name) not in (None, False):
            fail(f"--{name.replace('_', '-')} requires --prefill-workers and --decode-workers")
    if router.disagg != DisaggConfig():
        fail("field disagg of the --router-policy-config file requires --prefill-workers and --decode-workers")


def announce_start(settings: EmbeddedSettings, disagg: Mapping[str, DisaggConfig]) -> None:
    """Print what the system serves.

    Args:
        disagg: settings of the disaggregation in effect, by model, which `forebay control` may have changed.
    """
    where, endpoint = settings.log or "memory (lost at exit; use --log FILE to keep it)", settings.endpoint
    for model in settings.models:
        announce(f"forebay: model {model.name}, {_fleet(model)}, {settings.router.mode} router")
        pools = sorted({place.pool for place in model.places.values() if place.role == "aggregated"})
        if len(pools) > 1 and model.routing is None:
            announce(f"forebay: without rules (--pool-routing, `forebay control pools`) {pools[0]} serves all requests")
        if _has(model, "decode"):
            announce(f"forebay: prompts are computed {_where(model, settings.router.disagg, disagg[model.name])}")
    announce(f"forebay: log in {where}")
    if settings.console is not None and len(settings.models) > 1:
        others = f"`forebay console {settings.log} --group MODEL` shows the others"
        announce(f"forebay: the console shows the model {settings.console.group}; {others}")
    announce(f"forebay: OpenAI API on {endpoint.scheme}://{endpoint.host}:{endpoint.port}/v1, stop with Ctrl-C")


def _fleet(model: EmbeddedModel) -> str:
    """Describe the workers for the start message."""
    label, count = model.engine.label, Counter(place.role for place in model.places.values())
    if not count["decode"]:
        pools = Counter(place.pool for place in model.places.values())
        places = "" if len(pools) == 1 else f" ({', '.join(f'{count} in {pool}' for pool, count in pools.items())})"
        return f"{count['aggregated']} {label} worker{'s' if count['aggregated'] > 1 else ''}{places}"
    return f"{label} workers: {count['prefill']} prefill, {count['decode']} decode"


def _has(model: EmbeddedModel, role: Role) -> bool:
    return any(place.role == role for place in model.places.values())


def _where(model: EmbeddedModel, configured: DisaggConfig, disagg: DisaggConfig) -> str:
    """Describe where prompts are computed."""
    source = "" if disagg == configured else " (set by `forebay control policy`)"
    return _prefill_place(model, disagg) + source


def _prefill_place(model: EmbeddedModel, disagg: DisaggConfig) -> str:
    engine = model.engine
    if disagg.policy == "never":
        return "by decode workers"
    if not _has(model, "prefill"):
        if not disagg.enforce:
            return "by decode workers, because there are no prefill workers"
        if disagg.policy == "always":
            return "nowhere: every request is rejected, because there are no prefill workers"
        return f"by decode workers if the policy {disagg.policy} allows it; other requests are rejected"
    which = "" if disagg.policy == "always" else f" if the policy {disagg.policy} requires it"
    last = "; requests that they cannot compute are rejected" if disagg.enforce else ""
    how = ""
    if engine.is_mock:
        from forebay.cli.processes.engines import mock_connector  # noqa: PLC0415 - --help does not wait for engines
        from forebay.workers.kv_transfer.api import NIXL  # noqa: PLC0415

        how = ", KV transfer by nixl" if mock_connector() == NIXL else ", KV transfer in modelled time without NIXL"
    return f"by prefill workers{which}{how}{last}"
