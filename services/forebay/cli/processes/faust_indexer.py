"""The indexer as a plain Faust app, to run it with Faust's own command line.

    export FOREBAY_KAFKA=host:9092
    faust -A forebay.cli.processes.faust_indexer worker -l warn

Each option of `forebay indexer` has a variable. Importing this module only creates the app. The replicas and the HTTP
API run as a task of the app.
"""

from forebay.cli.common.command_class import CliCommand
from forebay.cli.common.options import built
from forebay.cli.processes.command import IndexerCommand
from forebay.cli.processes.indexer import indexer_settings
from forebay.live.indexer.faust_app import IndexerApp
from forebay.live.indexer.indexer import Indexer
from forebay.processes import indexer as process
from forebay.processes.metrics_server import process_registry

# As `forebay indexer` without arguments, so every option has its value from a variable or its default.
context = CliCommand("indexer", IndexerCommand, "indexer").make_context("indexer", [])
settings = indexer_settings(built(IndexerCommand, context.params))
indexer = Indexer(process_registry(), settings.policies)
app = IndexerApp(settings.kafka, indexer, settings.url)


@app.task  # type: ignore[untyped-decorator]  # Faust ships no types
async def serve() -> None:
    """Serve until the app stops."""
    await process.serve(settings, indexer)
