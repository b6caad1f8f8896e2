"""The process of `forebay ledger`."""

from forebay.live.ledger import Ledger, LedgerMetrics
from forebay.processes.metrics_server import process_registry
from forebay.processes.notices import announce
from forebay.processes.service import Cluster, connected, until_signal


async def run(cluster: Cluster, name: str, every_s: float) -> None:
    """Write the ledger until SIGINT or SIGTERM, and then the usage that no record has yet."""
    registry = process_registry()
    async with connected(cluster, registry) as (log, _):
        ledger = Ledger(log, name, every_s)
        LedgerMetrics(ledger, registry)

        async def stop() -> None:
            ledger.stop()

        announce(f"ledger {name} writes what the tenants of {cluster.kafka.namespace} use, every {every_s:g} s")
        await until_signal(ledger.run(), stop=stop)
        announce(f"ledger {name} ended")
