"""`forebay ledger`."""

from forebay.cli.common.errors import explained, run_service
from forebay.cli.processes.command import LedgerCommand
from forebay.live.ledger import ChainWriter
from forebay.live.partitions import Partitions
from forebay.processes.metrics_server import process_registry
from forebay.processes.notices import announce
from forebay.processes.service import Cluster, connected, until_signal


def run_ledger(options: LedgerCommand) -> None:
    options.logs.start()
    with explained():
        cluster = Cluster(options.kafka.settings(), "", options.service.metrics_host, options.service.metrics_port)
    run_service(_run(cluster, options.every_s))


async def _run(cluster: Cluster, every_s: float) -> None:
    """Write the ledger until SIGINT or SIGTERM, and then the usage that no record has yet."""
    registry = process_registry()
    async with connected(cluster, registry) as (log, _):
        ledger = Partitions(log, registry, "ledger", lambda partition: ChainWriter(log, partition, every_s))
        announce(f"the ledger writes what the tenants of {cluster.kafka.namespace} use, every {every_s:g} s")
        await until_signal(ledger.run(), stop=ledger.stop)
        announce("the ledger ended")
