"""`forebay router`."""

from forebay.cli.common.errors import explained, run_service
from forebay.cli.policies.allowed import allowed_policies
from forebay.cli.processes.command import RouterCommand
from forebay.cli.processes.options import pool_routing_by_model
from forebay.live.router.router import RouterSettings
from forebay.processes.names import named, process_name
from forebay.processes.notices import announce
from forebay.processes.router import run
from forebay.processes.service import Cluster


def run_router(options: RouterCommand) -> None:
    options.logs.start()
    with explained():
        settings = router_settings(options)
    run_service(run(*settings))


def router_settings(options: RouterCommand) -> tuple[Cluster, RouterSettings]:
    """Return the addresses and the settings of a router. Raises ConfigError if one is invalid."""
    cluster = options.addresses.cluster(options.service.metrics_host, options.service.metrics_port)
    config = options.router.config()
    accepts_loss = options.take_over_at_last_snapshot
    router = RouterSettings(
        router_id=named("--id", "router", options.router_id or process_name()),
        partitions=0,
        slots_max=0,
        config=config,
        policies=allowed_policies(options.allow_policy, [config.mode]),
        routing=pool_routing_by_model(options.pool_routing),
        snapshot_every=options.snapshots.snapshot_every,
        snapshot_age_s=options.snapshots.snapshot_age_s,
        on_loss=(lambda tail: announce(tail.text())) if accepts_loss else None,
    )
    return cluster, router
