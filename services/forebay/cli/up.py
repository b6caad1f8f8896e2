"""`forebay up`: everything in one process, on the embedded log."""

import logging
import sys
from pathlib import Path
from typing import Annotated

import typer

from forebay.cli.engines import EngineChoice, engine_options
from forebay.cli.errors import explained, fail
from forebay.cli.part_options import (
    AdminApiOption,
    KvEventsOption,
    MediaAllowHostOption,
    MediaAllowPrivateOption,
    PlacedTaintsOption,
    ReasoningParserOption,
    RoutingHintsOption,
    SnapshotAgeOption,
    SnapshotEveryOption,
    ToolCallParserOption,
    names,
    placed_taints,
)
from forebay.cli.router_options import router_options
from forebay.cli.settings import Embedded, worker_ids
from forebay.events.control import RouterConfig
from forebay.ingress.media_refs import MediaSettings

RANKS_MAX = 4_096  # each is an engine of this process, and a candidate of every decision
LOOPBACK = ("127.0.0.1", "::1", "localhost")
MOCK_WORKERS = 4  # there is something to route; a real engine takes the machine for itself


@router_options
@engine_options
def up(
    router: RouterConfig,
    engine: EngineChoice,
    port: Annotated[int, typer.Option(min=1, max=65535, help="HTTP port.")] = 8000,
    host: Annotated[str, typer.Option(help="Address to listen on. There is no authentication.")] = "127.0.0.1",
    workers: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Workers; 4 mock ones or 1 with a real engine when left out.")
    ] = None,
    log: Annotated[Path | None, typer.Option(help="Log file; kept in memory when left out.")] = None,
    taint: PlacedTaintsOption = None,
    kv_events: KvEventsOption = True,
    routing_hints: RoutingHintsOption = False,
    admin_api: AdminApiOption = True,
    tool_call_parser: ToolCallParserOption = "auto",
    reasoning_parser: ReasoningParserOption = "auto",
    media_allow_host: MediaAllowHostOption = None,
    media_allow_private: MediaAllowPrivateOption = False,
    lease_ttl_s: Annotated[float, typer.Option(min=0.1, help="A worker silent for this long is lost.")] = 30.0,
    timeout_s: Annotated[float, typer.Option(min=0.001, max=86_400, help="For a whole request.")] = 600.0,
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
    if engine.settings.role != "aggregated":
        role = engine.settings.role
        fail(f"--role {role} is for forebay worker, in a pool of its own: here a worker does all of a request")
    workers = workers or (MOCK_WORKERS if engine.is_mock else 1)
    ranks = workers * engine.settings.dp_size
    if ranks > RANKS_MAX:
        fail(f"--workers {workers} with --dp-size {engine.settings.dp_size}: {ranks} ranks are more than {RANKS_MAX}")
    with explained():
        taints = placed_taints(names("--taint", taint), worker_ids(engine, workers))
        media = MediaSettings(names("--media-allow-host", media_allow_host), media_allow_private)
    settings = Embedded(
        log=log,
        engine=engine,
        router=router,
        taints=taints,
        kv_events=kv_events,
        routing_hints=routing_hints,
        admin_api=admin_api,
        tool_call_parser=tool_call_parser,
        reasoning_parser=reasoning_parser,
        media=media,
        lease_ttl_s=lease_ttl_s,
        timeout_s=timeout_s,
        snapshot_every=snapshot_every,
        snapshot_age_s=snapshot_age_s,
    )
    # Imported here, because no other command should wait for an HTTP server and its models to load.
    from forebay.cli.embedded import run  # noqa: PLC0415

    with explained():
        run(settings, host, port, lambda: _announce(settings, host, port))


def _announce(settings: Embedded, host: str, port: int) -> None:
    where = settings.log or "memory (nothing is kept; give --log FILE to keep it)"
    engine = settings.engine
    workers = f"{len(settings.taints)} {engine.label} worker{'s' if len(settings.taints) > 1 else ''}"
    typer.echo(f"forebay: model {engine.settings.model_name}, {workers}, {settings.router.mode} router")
    typer.echo(f"forebay: log in {where}")
    typer.echo(f"forebay: OpenAI API on http://{host}:{port}/v1, stop with Ctrl-C")
    if host not in LOOPBACK:
        typer.echo("forebay: WARNING: no authentication: everybody who reaches this address is served", err=True)
