"""`forebay up`: everything in one process, on the embedded log."""

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
from forebay.cli.processes.settings import Embedded, Workers
from forebay.events.control import DisaggConfig, RouterConfig
from forebay.live.owner.retention import RetentionLimits

RANKS_MAX = 4_096  # each is an engine of this process, and a candidate of every decision
LOOPBACK = ("127.0.0.1", "::1", "localhost")
OF_APART = (
    "enforce_disagg",
    "router_conditional_disagg",
    "kv_transport",
    "kv_bytes_per_token",
    "kv_checksum",
    "kv_lease_s",
)
LOG_SIZE = "10GB"  # a million requests or so
LOG_SIZE_IN_MEMORY = "1GB"  # which the process holds beside its engines
LOG_BYTES_MIN = 10_000_000  # of a snapshot and the records after it; the write-ahead log alone is larger
MOCK_WORKERS = 4  # there is something to route; a real engine takes the machine for itself


@spread
@router_options
@engine_options
def up(
    context: typer.Context,
    router: RouterConfig,
    engine: EngineChoice,
    http: HttpOptions,
    port: Annotated[int, typer.Option(min=1, max=65535, help="HTTP port.")] = 8000,
    host: Annotated[str, typer.Option(help="Address to listen on. There is no authentication.")] = "127.0.0.1",
    workers: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Workers; 4 mock ones or 1 with a real engine when left out.")
    ] = None,
    prefill_workers: Annotated[
        int | None,
        typer.Option(min=0, max=1024, help="Workers that compute prompts for others; with --decode-workers."),
    ] = None,
    decode_workers: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Workers that answer, and may have prompts computed elsewhere.")
    ] = None,
    log: Annotated[Path | None, typer.Option(help="Log file; kept in memory when left out.")] = None,
    log_max_size: LogMaxSizeOption = None,
    log_max_age: LogMaxAgeOption = None,
    taint: PlacedTaintsOption = None,
    kv_events: KvEventsOption = True,
    lease_ttl_s: Annotated[float, typer.Option(min=0.1, help="A worker without a renewal this long is lost.")] = 3.0,
    snapshot_every: SnapshotEveryOption = 5_000,
    snapshot_age_s: SnapshotAgeOption = 300,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what the parts do.")] = False,
) -> None:
    """Serve an OpenAI-compatible API with a KV-aware router and workers, in one process."""
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO if verbose else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    counts = _workers(engine, workers, prefill_workers, decode_workers)
    if not counts.apart:
        _refuse_of_apart(context, router)
    roles = counts.roles(engine)
    with explained():
        taints = placed_taints(names("--taint", taint), list(roles))
        ingress = http.settings(
            model_name=engine.settings.model_name, ingress_id=f"embedded-{os.getpid()}", loras=engine.loras
        )
    settings = Embedded(
        log=log,
        engine=engine,
        router=router,
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
    # Imported here, because no other command should wait for an HTTP server and its models to load.
    from forebay.cli.processes.embedded import run  # noqa: PLC0415

    with explained():
        run(settings, host, port, lambda disagg: _announce(settings, disagg, host, port))


def _workers(engine: EngineChoice, whole: int | None, prefill: int | None, decode: int | None) -> Workers:
    """How many of each there are; what makes no sense ends the command."""
    if engine.settings.role != "aggregated":
        role = engine.settings.role
        fail(f"--role {role} is for forebay worker; here there are --prefill-workers and --decode-workers")
    if (prefill is None) != (decode is None):
        fail("--prefill-workers and --decode-workers belong together: give both, --prefill-workers 0 for none")
    if decode is not None and whole is not None:
        fail("--workers are those that do all of a request: leave it out beside --decode-workers")
    if prefill is not None and decode is not None:
        workers = Workers(prefill=prefill, decode=decode)
    else:
        workers = Workers(whole=whole or (MOCK_WORKERS if engine.is_mock else 1))
    count = workers.whole + workers.prefill + workers.decode
    ranks = count * engine.settings.dp_size
    if ranks > RANKS_MAX:
        asked = f"{count} workers" if workers.apart else f"--workers {count}"
        fail(f"{asked} with --dp-size {engine.settings.dp_size}: {ranks} ranks are more than {RANKS_MAX}")
    return workers


def _log_limits(log: Path | None, max_size: str | None, max_age: str | None) -> RetentionLimits:
    text = max_size or (LOG_SIZE_IN_MEMORY if log is None else LOG_SIZE)
    age_s = None if max_age is None else span_us("--log-max-age", max_age) / 1e6
    return RetentionLimits(size("--log-max-size", text, LOG_BYTES_MIN), age_s)


def _refuse_of_apart(context: typer.Context, router: RouterConfig) -> None:
    """Refuse what would do nothing where workers do all of a request."""
    for name in OF_APART:
        if context.params.get(name) not in (None, False):
            fail(f"--{name.replace('_', '-')} needs --prefill-workers and --decode-workers")
    if router.disagg != DisaggConfig():
        fail("disagg in the file of --router-policy-config needs --prefill-workers and --decode-workers")


def _announce(settings: Embedded, disagg: DisaggConfig, host: str, port: int) -> None:
    where = settings.log or "memory (nothing is kept; give --log FILE to keep it)"
    engine = settings.engine
    typer.echo(f"forebay: model {engine.settings.model_name}, {_fleet(settings)}, {settings.router.mode} router")
    if "decode" in settings.roles.values():
        typer.echo(f"forebay: prompts are computed {_where(settings, disagg)}")
    typer.echo(f"forebay: log in {where}")
    typer.echo(f"forebay: OpenAI API on http://{host}:{port}/v1, stop with Ctrl-C")
    if host not in LOOPBACK:
        typer.echo("forebay: WARNING: no authentication: everybody who reaches this address is served", err=True)


def _fleet(settings: Embedded) -> str:
    """The workers, in words."""
    label, count = settings.engine.label, Counter(settings.roles.values())
    if not count["decode"]:
        return f"{count['aggregated']} {label} worker{'s' if count['aggregated'] > 1 else ''}"
    return f"{label} workers: {count['prefill']} prefill, {count['decode']} decode"


def _where(settings: Embedded, disagg: DisaggConfig) -> str:
    """By whom prompts are computed, in words. `disagg` is what holds: an operator may have changed what is set."""
    said = "" if disagg == settings.router.disagg else " (as an operator said; `forebay control disaggregation`)"
    return _by_whom(settings, disagg) + said


def _by_whom(settings: Embedded, disagg: DisaggConfig) -> str:
    engine = settings.engine
    if disagg.policy == "never":
        return "by decode workers themselves"
    if "prefill" not in settings.roles.values():
        if not disagg.enforce:
            return "by decode workers themselves: there are no prefill workers"
        if disagg.policy == "always":
            return "by nobody: there are no prefill workers, and what they cannot compute is refused"
        return f"by decode workers where the policy {disagg.policy} says so; others are refused: no prefill workers"
    which = "" if disagg.policy == "always" else f" where the policy {disagg.policy} says so"
    last = "; what they cannot is refused" if disagg.enforce else ""
    how = f", KV moves by {engine.settings.kv_transport}" if engine.is_mock else ""
    return f"by prefill workers{which}{how}{last}"
