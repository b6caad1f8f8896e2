"""`forebay up`: router, workers and ingress in one process, on the embedded log."""

import os
from collections import Counter
from collections.abc import Iterable, Mapping

import click

from forebay.cli.common.config_file import model_tables
from forebay.cli.common.errors import explained, fail, run_service
from forebay.cli.common.extras import require_extra
from forebay.cli.common.times import size, span_us
from forebay.cli.console.run import beside
from forebay.cli.policies.allowed import allowed_policies
from forebay.cli.processes.command import LogOptions, UpCommand
from forebay.cli.processes.options import placed_taints
from forebay.cli.processes.tier_options import TierOptions
from forebay.cli.processes.up_models import choose_models
from forebay.console.settings import ConsoleSettings
from forebay.events.control import DisaggConfig, Role, RouterConfig
from forebay.ingress.http.endpoint import Endpoint
from forebay.ingress.settings import ALL_MODELS, IngressSettings
from forebay.live.owner.retention import RetentionLimits
from forebay.processes.embedded import run
from forebay.processes.embedded_group import EmbeddedModel, EmbeddedSettings
from forebay.processes.engines import mock_connector
from forebay.processes.listening import ADMIN_HOST
from forebay.processes.names import names
from forebay.processes.notices import announce
from forebay.runtime.errors import ConfigError
from forebay.transport.sqlite.checkpoint import WAL_BYTES_MAX
from forebay.workers.kv_transfer.api import NIXL

# Layers of which `up` logs warnings only, because its own lines describe the workers.
QUIET = ("forebay.live", "forebay.transport", "forebay.workers")
LOG_SIZE = "10GB"  # about a million requests
LOG_SIZE_IN_MEMORY = "1GB"  # small, because the engines of the process need memory, too
LOG_BYTES_MIN = 10_000_000  # room for a snapshot, the records after it, and the write-ahead log


def run_up(options: UpCommand) -> None:
    options.logs.start(QUIET, has_access_log=options.access_log)
    with explained():
        if options.spans.otlp is not None:
            require_extra("otlp", "forebay up --otlp", "opentelemetry.proto")
        router = options.router.config()
        served = choose_models(
            options.models, options.workers, options.tiers, model_tables(click.get_current_context())
        )
        if not any(place.role == "decode" for model in served for place in model.places.values()):
            _reject_disagg_options(options, router)
        policies = allowed_policies(options.allow_policy, [router.mode])
        taints = placed_taints(names("--taint", options.taint), [name for model in served for name in model.places])
        only = served[0] if len(served) == 1 else None
        ingress = options.http.settings(
            model_name=ALL_MODELS if only is None else only.name,
            ingress_id=f"embedded-{os.getpid()}",
            loras=() if only is None else only.engine.loras,
        )
        endpoint = options.http.endpoint(options.host, options.port)
        settings = EmbeddedSettings(
            log=options.log.log,
            models=served,
            router=router,
            policies=policies,
            taints=taints,
            kv_events=options.kv_events,
            ingress=ingress,
            endpoint=endpoint,
            drain_s=options.drain_s,
            lease_ttl_s=options.lease_ttl_s,
            snapshot_every=options.snapshots.snapshot_every,
            snapshot_age_s=options.snapshots.snapshot_age_s,
            log_limits=_limits(options.log),
            log_sync=options.log.log_sync,
            console=_console(options, served[0].name, ingress, endpoint, policies),
            console_module=beside.__module__,
            spans=options.spans.settings(),
        )
    run_service(run(settings, lambda disagg: announce_start(settings, disagg)))


def _limits(log: LogOptions) -> RetentionLimits:
    text = log.log_max_size or (LOG_SIZE_IN_MEMORY if log.log is None else LOG_SIZE)
    age_s = None if log.log_max_age is None else span_us("--log-max-age", log.log_max_age) / 1e6
    size_bytes = size("--log-max-size", text, LOG_BYTES_MIN)
    wal_bytes = 0 if log.log is None else min(WAL_BYTES_MAX, size_bytes // 8)
    return RetentionLimits(size_bytes - 3 * wal_bytes, age_s, wal_bytes)  # room for commits during checkpoints


def _console(
    options: UpCommand, model: str, ingress: IngressSettings, endpoint: Endpoint, policies: Iterable[str]
) -> ConsoleSettings | None:
    """Return the settings of the console, None without one. Raises ConfigError if there is no log file."""
    if not options.console.console:
        return None
    if options.log.log is None:
        raise ConfigError("--console requires --log FILE, because the console is another process")
    url = endpoint.own_url if ingress.admin_token else ""
    if ingress.admin_port is not None:
        url = f"http://{ADMIN_HOST}:{ingress.admin_port}"
    return beside(options.log.log, model, options.console.console_port, url, tuple(policies))


def _reject_disagg_options(options: UpCommand, router: RouterConfig) -> None:
    """Reject options that have no effect without disaggregation."""
    engine, has_tiers = options.models, options.tiers != TierOptions()
    given = {
        "--enforce-disagg": options.router.enforce_disagg,
        "--router-conditional-disagg": options.router.router_conditional_disagg,
        "--kv-bytes-per-token": not has_tiers and engine.kv_bytes_per_token,  # also the size of KV in tiers
    }
    for name, value in given.items():
        if value not in (None, False):
            fail(f"{name} requires --prefill-workers and --decode-workers")
    if router.disagg != DisaggConfig():
        fail("field disagg of the --router-policy-config file requires --prefill-workers and --decode-workers")


def announce_start(settings: EmbeddedSettings, disagg: Mapping[str, DisaggConfig]) -> None:
    """Print what the system serves. `disagg` has the settings in effect, which `forebay control` may have changed."""
    where, endpoint = settings.log or "memory (lost at exit; use --log FILE to keep it)", settings.endpoint
    for model in settings.models:
        announce(f"model {model.name}, {_fleet(model)}, {settings.router.mode} router")
        pools = sorted({place.pool for place in model.places.values() if place.role == "aggregated"})
        if len(pools) > 1 and model.routing is None:
            announce(f"without rules (--pool-routing, `forebay control pools`) {pools[0]} serves all requests")
        if _has(model, "decode"):
            announce(f"prompts are computed {_where(model, settings.router.disagg, disagg[model.name])}")
    announce(f"log in {where}")
    if settings.console is not None and len(settings.models) > 1:
        others = f"`forebay console {settings.log} --group MODEL` shows the others"
        announce(f"the console shows the model {settings.console.group}; {others}")
    announce(f"OpenAI API on {endpoint.scheme}://{endpoint.host}:{endpoint.port}/v1, stop with Ctrl-C")


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
        how = ", KV transfer by nixl" if mock_connector() == NIXL else ", KV transfer in modelled time without NIXL"
    return f"by prefill workers{which}{how}{last}"
