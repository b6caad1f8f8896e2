"""Each query of the dashboards has data on a distributed system under load. See also tests/infra/test_dashboard.py."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from forebay.transport.kafka.settings import KafkaSettings
from infra.kafka.kafka import HOST
from tests.dashboard import APART, KAFKA, SHADOW, SHARED, of_rows, without_zero
from tests.harness.cluster import GROUP
from tests.harness.local import free_ports
from tests.harness.prometheus import require_prometheus, scraping
from tests.integration import kafka_api
from tests.integration.conftest import MakeCluster
from tests.integration.stream_clients import problems, stream_clients

SERVICES = ("r1", "p1", "d1", "round")  # those with --metrics-port; the ingress serves metrics on its port
ROLES = {"p1": "prefill", "d1": "decode"}
ASK_EVERY_S = 0.1
TOKENS = 8

pytestmark = pytest.mark.timeout(400)


@asynccontextmanager
async def kafka_api_load(settings: KafkaSettings) -> AsyncIterator[None]:
    """Complete requests of the Kafka API one after the other while the body runs. The first one is invalid."""
    client = kafka_api.Client(settings)

    async def complete_all() -> None:
        await client.submit(b"{no json", request_id="invalid")
        for number in itertools.count():
            body = {"model": GROUP, "prompt": f"request {number}", "max_tokens": TOKENS}
            await client.submit(body, request_id=f"k-{number}", path="/v1/completions")
            await client.complete_response(f"k-{number}")

    async with client.running():
        completing = asyncio.create_task(complete_all())
        try:
            yield
        finally:
            completing.cancel()
            await asyncio.gather(completing, return_exceptions=True)


async def test_queries_have_data_on_a_distributed_system(make_cluster: MakeCluster, tmp_path: Path) -> None:
    require_prometheus()
    async with make_cluster("dashboard") as cluster:
        first = free_ports(len(SERVICES))
        ports = {name: ("--metrics-port", str(first + number)) for number, name in enumerate(SERVICES)}
        cluster.router("r1", *ports["r1"])
        for name, role in ROLES.items():
            cluster.worker(name, "--role", role, *ports[name])
        url = cluster.ingress("i1")
        await cluster.until_serving(len(ROLES))
        cluster.begin("round", "shadow", *cluster.where, "--group", GROUP, "--policy", "round-robin", *ports["round"])
        targets = {name: [f"{HOST}:{port}"] for name, (_, port) in ports.items()}
        targets["ingress"] = [url.removeprefix("http://")]
        async with stream_clients([url], "load") as clients, kafka_api_load(cluster.settings):
            async with clients.load(ASK_EVERY_S, TOKENS, first=0):
                await asyncio.to_thread(check, tmp_path, targets)
            assert problems(clients.results, TOKENS) == []


def check(folder: Path, targets: dict[str, list[str]]) -> None:
    """Scrape the targets, and require data for each query and metrics that follow the conventions of Prometheus."""
    with scraping(folder, targets) as prometheus:
        assert prometheus.empty(of_rows(*SHARED, *KAFKA, APART, SHADOW)) == []
        assert prometheus.empty(without_zero(of_rows("Kafka API"))) == []
        assert prometheus.empty(["sum(rate(forebay_kafka_api_requests_total[1m])) > 0"]) == []
        assert prometheus.query("count(forebay_build_info)") == [len(targets)]
        assert prometheus.query("count(process_cpu_seconds_total)") == [len(targets)]
        assert prometheus.lint() == {}
