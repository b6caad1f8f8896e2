"""`forebay indexer`."""

from forebay.cli.common.errors import explained, run_service
from forebay.cli.policies.allowed import allowed_policies
from forebay.cli.processes.command import IndexerCommand
from forebay.processes.indexer import IndexerSettings, run


def run_indexer(options: IndexerCommand) -> None:
    options.logs.start(quiet=("forebay.live.indexer.faust_app",))  # Faust logs each part that it starts and stops
    with explained():
        settings = indexer_settings(options)
    run_service(run(settings))


def indexer_settings(options: IndexerCommand) -> IndexerSettings:
    """Return the settings of an indexer. Raises ConfigError if one is invalid."""
    policies = allowed_policies(options.allow_policy)
    return IndexerSettings(options.kafka.settings(), options.host, options.port, policies)
