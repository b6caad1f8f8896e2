"""`forebay up`: everything in one process, on the embedded log."""

import logging
import math
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from forebay.cli.errors import explained, fail
from forebay.cli.part_options import (
    AdminApiOption,
    DpSizeOption,
    KvEventsOption,
    LorasOption,
    PlacedTaintsOption,
    RoutingHintsOption,
    SnapshotAgeOption,
    SnapshotEveryOption,
    names,
    placed_taints,
)
from forebay.cli.router_options import router_options
from forebay.cli.settings import Embedded, worker_ids
from forebay.events.control import RouterConfig

RANKS_MAX = 4_096  # each is an engine of this process, and a candidate of every decision
LOOPBACK = ("127.0.0.1", "::1", "localhost")


class EngineKind(StrEnum):
    """The engines that run in one process with everything else."""

    MOCK = "mock"


@router_options
def up(
    router: RouterConfig,
    port: Annotated[int, typer.Option(min=1, max=65535, help="HTTP port.")] = 8000,
    host: Annotated[str, typer.Option(help="Address to listen on. There is no authentication.")] = "127.0.0.1",
    workers: Annotated[int, typer.Option(min=1, max=1024, help="Mock workers.")] = 4,
    engine: Annotated[EngineKind, typer.Option(help="What the workers run.")] = EngineKind.MOCK,
    model: Annotated[
        Path | None, typer.Option(help="Model directory: tokenizer.json, chat template. No weights.")
    ] = None,
    model_name: Annotated[str, typer.Option(help="Name in the API; the directory's name when empty.")] = "",
    log: Annotated[Path | None, typer.Option(help="Log file; kept in memory when left out.")] = None,
    speedup: Annotated[float, typer.Option(help="How much faster than the modelled GPU.")] = 1.0,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens a KV block.")] = 64,
    kv_blocks: Annotated[int, typer.Option(min=1, help="KV blocks a worker.")] = 16_384,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Sequences a worker runs at once.")] = 256,
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="Tokens of one engine step.")] = 8_192,
    dp_size: DpSizeOption = 1,
    taint: PlacedTaintsOption = None,
    lora: LorasOption = None,
    kv_events: KvEventsOption = True,
    routing_hints: RoutingHintsOption = False,
    admin_api: AdminApiOption = True,
    lease_ttl_s: Annotated[float, typer.Option(min=0.1, help="A worker silent for this long is lost.")] = 30.0,
    timeout_s: Annotated[float, typer.Option(min=0.001, max=86_400, help="For a whole request.")] = 600.0,
    snapshot_every: SnapshotEveryOption = 5_000,
    snapshot_age_s: SnapshotAgeOption = 300,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what the parts do.")] = False,
) -> None:
    """Serve an OpenAI-compatible API with a KV-aware router and mock workers, in one process."""
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO if verbose else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    if not math.isfinite(speedup) or speedup <= 0:
        fail(f"--speedup must be a positive number, not {speedup}")
    if workers * dp_size > RANKS_MAX:
        fail(f"--workers {workers} with --dp-size {dp_size}: {workers * dp_size} ranks are more than {RANKS_MAX}")
    with explained():
        taints = placed_taints(names("--taint", taint), worker_ids(workers))
        loras = names("--lora", lora)
    settings = Embedded(
        log=log,
        model=model,
        model_name=model_name,
        workers=workers,
        router=router,
        speedup=speedup,
        block_size=block_size,
        kv_blocks=kv_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        dp_size=dp_size,
        taints=taints,
        loras=loras,
        kv_events=kv_events,
        routing_hints=routing_hints,
        admin_api=admin_api,
        lease_ttl_s=lease_ttl_s,
        timeout_s=timeout_s,
        snapshot_every=snapshot_every,
        snapshot_age_s=snapshot_age_s,
    )
    # Imported here, because no other command should wait for an HTTP server and its models to load.
    from forebay.cli.embedded import run  # noqa: PLC0415

    with explained():
        run(settings, host, port, lambda name: _announce(settings, name, host, port, engine))


def _announce(settings: Embedded, name: str, host: str, port: int, engine: EngineKind) -> None:
    where = settings.log or "memory (nothing is kept; give --log FILE to keep it)"
    typer.echo(f"forebay: model {name}, {settings.workers} {engine} workers, {settings.router.mode} router")
    typer.echo(f"forebay: log in {where}")
    typer.echo(f"forebay: OpenAI API on http://{host}:{port}/v1, stop with Ctrl-C")
    if host not in LOOPBACK:
        typer.echo("forebay: WARNING: no authentication: everybody who reaches this address is served", err=True)
