"""`forebay up`: router, workers and ingress in one process, on the embedded log."""

import logging
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from forebay.cli.common.errors import explained, fail
from forebay.cli.common.option_groups import spread
from forebay.cli.common.sizes import size
from forebay.cli.common.times import span_us
from forebay.cli.policies.allowed import AllowPolicyOption, allowed_policies
from forebay.cli.policies.router_options import router_options
from forebay.cli.processes.engines import EngineChoice, engine_options
from forebay.cli.processes.http_options import HttpOptions
from forebay.cli.processes.options import (
    KvEventsOption,
    LogMaxAgeOption,
    LogMaxSizeOption,
    PlacedTaintsOption,
    SnapshotAgeOption,
    SnapshotEveryOption,
    names,
    placed_taints,
)
from forebay.cli.processes.settings import EmbeddedSettings, Workers
from forebay.events.control import DisaggConfig, RouterConfig
from forebay.live.owner.retention import RetentionLimits

RANKS_MAX = 4_096  # each is an engine of this process, and a candidate of every decision
LOOPBACK = ("127.0.0.1", "::1", "localhost")
DISAGG_OPTIONS = (
    "enforce_disagg",
    "router_conditional_disagg",
    "kv_transport",
    "kv_bytes_per_token",
    "kv_checksum",
    "kv_lease_s",
)
LOG_SIZE = "10GB"  # about a million requests
LOG_SIZE_IN_MEMORY = "1GB"  # small, because the engines of the process need memory, too
LOG_BYTES_MIN = 10_000_000  # room for a snapshot and the records after it; the write-ahead log alone is larger
MOCK_WORKERS = 4  # enough to show routing; a real engine takes the machine for itself


@spread
@router_options
@engine_options
def up(
    context: typer.Context,
    router: RouterConfig,
    engine: EngineChoice,
    http: HttpOptions,
    port: Annotated[int, typer.Option(min=1, max=65535, help="HTTP port.")] = 8000,
    host: Annotated[str, typer.Option(help="Address to listen on. Clients are not authenticated.")] = "127.0.0.1",
    workers: Annotated[
        int | None,
        typer.Option(min=1, max=1024, help="Number of workers. Default: 4 with the mock engine, 1 with a real engine."),
    ] = None,
    prefill_workers: Annotated[
        int | None,
        typer.Option(min=0, max=1024, help="Number of prefill workers. Requires --decode-workers."),
    ] = None,
    decode_workers: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Number of decode workers. Requires --prefill-workers.")
    ] = None,
    log: Annotated[Path | None, typer.Option(help="Log file. Default: the log is kept in memory.")] = None,
    log_max_size: LogMaxSizeOption = None,
    log_max_age: LogMaxAgeOption = None,
    taint: PlacedTaintsOption = None,
    allow_policy: AllowPolicyOption = None,
    kv_events: KvEventsOption = True,
    lease_ttl_s: Annotated[
        float, typer.Option(min=0.1, help="Seconds without a lease renewal after which a worker is lost.")
    ] = 3.0,
    snapshot_every: SnapshotEveryOption = 5_000,
    snapshot_age_s: SnapshotAgeOption = 300,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Write INFO messages to stderr.")] = False,
) -> None:
    """Serve an OpenAI-compatible API with a KV-aware router and workers in one process."""
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO if verbose else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    counts = _workers(engine, workers, prefill_workers, decode_workers)
    if not counts.is_disaggregated:
        _reject_disagg_options(context, router)
    roles = counts.roles(engine)
    with explained():
        policies = allowed_policies(allow_policy, [router.mode])
        taints = placed_taints(names("--taint", taint), list(roles))
        ingress = http.settings(
            model_name=engine.settings.model_name, ingress_id=f"embedded-{os.getpid()}", loras=engine.loras
        )
    settings = EmbeddedSettings(
        log=log,
        engine=engine,
        router=router,
        policies=policies,
        roles=roles,
        taints=taints,
        kv_events=kv_events,
        ingress=ingress,
        allow_hosts=tuple(http.allow_host or ()),
        lease_ttl_s=lease_ttl_s,
        snapshot_every=snapshot_every,
        snapshot_age_s=snapshot_age_s,
        log_limits=_log_limits(log, log_max_size, log_max_age),
    )
    # Imported here, so that other commands do not wait for an HTTP server and its models to load.
    from forebay.cli.processes.embedded import run  # noqa: PLC0415

    with explained():
        run(settings, host, port, lambda disagg: _announce(settings, disagg, host, port))


def _workers(engine: EngineChoice, aggregated: int | None, prefill: int | None, decode: int | None) -> Workers:
    """Return the number of workers per role. Contradictory options end the command."""
    if engine.settings.role != "aggregated":
        role = engine.settings.role
        fail(
            f"--role {role}: `forebay up` has no other role than aggregated; use --prefill-workers and --decode-workers"
        )
    if (prefill is None) != (decode is None):
        fail(
            "--prefill-workers and --decode-workers require each other; use --prefill-workers 0 for decode workers only"
        )
    if decode is not None and aggregated is not None:
        fail("--workers cannot be combined with --decode-workers")
    if prefill is not None and decode is not None:
        workers = Workers(prefill=prefill, decode=decode)
    else:
        workers = Workers(aggregated=aggregated or (MOCK_WORKERS if engine.is_mock else 1))
    count = workers.aggregated + workers.prefill + workers.decode
    ranks = count * engine.settings.dp_size
    if ranks > RANKS_MAX:
        workers_text = f"{count} workers" if workers.is_disaggregated else f"--workers {count}"
        fail(f"{workers_text} with --dp-size {engine.settings.dp_size} are {ranks} ranks; maximum {RANKS_MAX}")
    return workers


def _log_limits(log: Path | None, max_size: str | None, max_age: str | None) -> RetentionLimits:
    text = max_size or (LOG_SIZE_IN_MEMORY if log is None else LOG_SIZE)
    age_s = None if max_age is None else span_us("--log-max-age", max_age) / 1e6
    return RetentionLimits(size("--log-max-size", text, LOG_BYTES_MIN), age_s)


def _reject_disagg_options(context: typer.Context, router: RouterConfig) -> None:
    """Reject options that have no effect without disaggregation."""
    for name in DISAGG_OPTIONS:
        if context.params.get(name) not in (None, False):
            fail(f"--{name.replace('_', '-')} requires --prefill-workers and --decode-workers")
    if router.disagg != DisaggConfig():
        fail("field disagg of the --router-policy-config file requires --prefill-workers and --decode-workers")


def _announce(settings: EmbeddedSettings, disagg: DisaggConfig, host: str, port: int) -> None:
    where = settings.log or "memory (lost at exit; use --log FILE to keep it)"
    engine = settings.engine
    typer.echo(f"forebay: model {engine.settings.model_name}, {_fleet(settings)}, {settings.router.mode} router")
    if "decode" in settings.roles.values():
        typer.echo(f"forebay: prompts are computed {_where(settings, disagg)}")
    typer.echo(f"forebay: log in {where}")
    typer.echo(f"forebay: OpenAI API on http://{host}:{port}/v1, stop with Ctrl-C")
    if host not in LOOPBACK:
        typer.echo(
            "forebay: WARNING: no authentication: every client that reaches this address can send requests", err=True
        )


def _fleet(settings: EmbeddedSettings) -> str:
    """Describe the workers for the start message."""
    label, count = settings.engine.label, Counter(settings.roles.values())
    if not count["decode"]:
        return f"{count['aggregated']} {label} worker{'s' if count['aggregated'] > 1 else ''}"
    return f"{label} workers: {count['prefill']} prefill, {count['decode']} decode"


def _where(settings: EmbeddedSettings, disagg: DisaggConfig) -> str:
    """Describe where prompts are computed. `disagg` is the current policy, which `forebay control` may have changed."""
    source = "" if disagg == settings.router.disagg else " (set by `forebay control disaggregation`)"
    return _prefill_place(settings, disagg) + source


def _prefill_place(settings: EmbeddedSettings, disagg: DisaggConfig) -> str:
    engine = settings.engine
    if disagg.policy == "never":
        return "by decode workers"
    if "prefill" not in settings.roles.values():
        if not disagg.enforce:
            return "by decode workers, because there are no prefill workers"
        if disagg.policy == "always":
            return "nowhere: every request is rejected, because there are no prefill workers"
        return f"by decode workers if the policy {disagg.policy} allows it; other requests are rejected"
    which = "" if disagg.policy == "always" else f" if the policy {disagg.policy} requires it"
    last = "; requests that they cannot compute are rejected" if disagg.enforce else ""
    how = f", KV transfer by {engine.settings.kv_transport}" if engine.is_mock else ""
    return f"by prefill workers{which}{how}{last}"
