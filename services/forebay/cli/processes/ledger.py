"""`forebay ledger`."""

from forebay.cli.common.errors import explained, run_service
from forebay.cli.processes.command import LedgerCommand
from forebay.processes.ledger import run
from forebay.processes.names import named, process_name
from forebay.processes.service import Cluster


def run_ledger(options: LedgerCommand) -> None:
    options.logs.start()
    with explained():
        cluster = Cluster(options.kafka.settings(), "", options.service.metrics_host, options.service.metrics_port)
        name = named("--id", "ledger", options.ledger_id or process_name())
    run_service(run(cluster, name, options.every_s))
