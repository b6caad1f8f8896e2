"""A router that Faust's own command line runs owns a group, and hands it over like `forebay router`."""

import sys
import uuid
from pathlib import Path

from tests.harness.cluster import Cluster
from tests.integration.conftest import RUN
from tests.integration.stream_clients import problems, prompt, stream_clients

TOKENS = 6
PATIENCE_S = 60.0
FAUST = Path(sys.executable).with_name("faust")


async def test_faust_runs_a_router(kafka: str, redis_url: str, tmp_path: Path) -> None:
    namespace = f"{RUN}-faust"
    async with Cluster(kafka, redis_url, namespace, tmp_path) as cluster:
        settings = {
            "FOREBAY_KAFKA": kafka,
            "FOREBAY_REDIS": redis_url,
            "FOREBAY_NAMESPACE": namespace,
            "FOREBAY_ID": "faust",
        }
        environment = [f"{name}={value}" for name, value in settings.items()]
        app = ("-A", "forebay.cli.processes.faust_router", "worker", "-l", "warn")
        cluster.processes.start("faust", ["/usr/bin/env", *environment, str(FAUST), *app])
        cluster.worker("w1")
        cluster.ingress("i1")
        await cluster.until_serving(1)
        async with stream_clients(list(cluster.urls.values()), uuid.uuid4().hex[:8]) as clients:
            assert problems(await clients.answers([prompt(number) for number in range(8)], TOKENS), TOKENS) == []
            assert await cluster.owner() == "faust"
            cluster.router("r2")
            await cluster.processes.stop("faust", within_s=PATIENCE_S)
            assert problems(await clients.answers([prompt(number) for number in range(8)], TOKENS), TOKENS) == []
        assert await cluster.owner() == "r2"
        report = await cluster.verify()
        assert report["verified"] == report["decisions"] == await cluster.decided()
