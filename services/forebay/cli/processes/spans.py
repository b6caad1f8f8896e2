"""`forebay spans`."""

from forebay.cli.common.errors import explained, fail, run_service
from forebay.cli.processes.command import SpansCommand
from forebay.live.spans import SpanSettings
from forebay.processes.metrics_server import process_registry
from forebay.processes.notices import announce
from forebay.processes.service import Cluster, connected, until_signal
from forebay.processes.spans import exporting


def run_spans(options: SpansCommand) -> None:
    options.logs.start()
    with explained():
        cluster = Cluster(options.kafka.settings(), "", options.service.metrics_host, options.service.metrics_port)
        settings = options.spans.settings()
    if settings is None:
        fail("--otlp URL is missing: the receiver of the spans, for example http://localhost:4318")
    run_service(_run(cluster, settings))


async def _run(cluster: Cluster, settings: SpanSettings) -> None:
    """Export spans until SIGINT or SIGTERM, and then those of the requests that have ended meanwhile."""
    registry, namespace = process_registry(), cluster.kafka.namespace
    async with (
        connected(cluster, registry) as (log, _),
        exporting(log, registry, settings, namespace) as exporters,
    ):
        announce(f"the spans of {namespace} are exported to {settings.url}")
        await until_signal(exporters.run(), stop=exporters.stop)
        announce("the export of spans ended")
