"""The process of `forebay indexer`: a Faust app, replicas of groups and an HTTP server on one event loop."""

import asyncio
import logging
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path

from aiokafka.errors import KafkaError

from forebay.core.routing.policies import CustomPolicies
from forebay.indexer.app import build_indexer_app
from forebay.indexer.prompts import Tokenizers
from forebay.ingress.http.guards import allowed_hosts
from forebay.ingress.http.server import build_server, listen
from forebay.live.indexer.faust_app import IndexerApp
from forebay.live.indexer.faust_batches import GROUP
from forebay.live.indexer.indexer import Indexer
from forebay.processes.metrics_server import process_registry
from forebay.processes.notices import announce
from forebay.processes.service import Cluster, connected, until_signal
from forebay.processes.shutdown import CLOSE_S, ending_within
from forebay.transport.base import LogError, LogUnavailable
from forebay.transport.directory import Directory
from forebay.transport.kafka.errors import explain, is_transient
from forebay.transport.kafka.group import require_joinable
from forebay.transport.kafka.settings import KafkaSettings
from forebay.transport.models import ModelStore

logger = logging.getLogger(__name__)

REJOIN_S = 1.0
LEAVE_S = 10.0  # seconds; Faust's consumer commits and leaves within one second if the broker responds
WILDCARDS = ("0.0.0.0", "::")  # noqa: S104 - not bound here


@dataclass(frozen=True, slots=True)
class IndexerSettings:
    """Settings of an indexer. `host` and `port` are the address of its HTTP API."""

    kafka: KafkaSettings
    host: str
    port: int
    policies: CustomPolicies

    @property
    def url(self) -> str:
        """Address that other instances tell their clients."""
        host = socket.gethostname() if self.host in WILDCARDS else self.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"


async def run(settings: IndexerSettings) -> None:
    """Serve until SIGINT or SIGTERM. Raises ConfigError or LogError."""
    indexer = Indexer(process_registry(), settings.policies)
    await require_joinable(settings.kafka, GROUP)
    await until_signal(serve(settings, indexer), _stay_member(settings, indexer))


async def serve(settings: IndexerSettings, indexer: Indexer) -> None:
    """Follow the groups that Faust assigns to `indexer`, and serve HTTP until cancelled.

    Raises ConfigError or LogError.
    """
    cluster = Cluster(settings.kafka, redis_url="", metrics_host=settings.host, metrics_port=None)
    with listen(settings.host, settings.port) as listener, tempfile.TemporaryDirectory() as folder:
        async with connected(cluster, indexer.registry) as (log, _):
            directory, store = Directory(log), ModelStore(log)
            await directory.start()
            await store.start()
            hosts = allowed_hosts(settings.host, listener.getsockname()[0], ())
            app = build_indexer_app(indexer, Tokenizers(store, Path(folder)), hosts)
            server = build_server(app, lambda: announce(f"indexer serves {settings.url}"))
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(store.run())
                    tasks.create_task(indexer.run(log, directory))
                    tasks.create_task(server.serve([listener]))
            finally:
                server.should_exit = True


async def _stay_member(settings: IndexerSettings, indexer: Indexer) -> None:
    """Be a member of the consumer group of indexers until cancelled, and join it again if the membership breaks.

    Raises LogError if Kafka does not let this program join.
    """
    while True:
        app = IndexerApp(settings.kafka, indexer, settings.url)
        app.finalize()
        try:
            await app.start()
            announce(f"indexer {settings.url} is a member of {app.conf.id}")
            await app.until_broken()
        except LogUnavailable as error:
            logger.warning("%s; joining again", error)
        except (KafkaError, OSError) as error:
            text = f"the indexer cannot join {app.conf.id}: {explain(error)}"
            if not is_transient(error):
                raise LogError(text) from error
            logger.warning("%s; trying again", text)
        finally:
            with ending_within(LEAVE_S + CLOSE_S, f"its work ended, because it cannot leave the group {app.conf.id}"):
                await app.stop()
        indexer.assign(None, {})
        await asyncio.sleep(REJOIN_S)
