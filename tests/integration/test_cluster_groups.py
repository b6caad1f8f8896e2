"""Two models on real processes, each a group with its own control partition."""

from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio

from forebay.transport.kafka.topics import TopicPlan
from tests.harness import fork_server
from tests.harness.cluster import GROUP, Cluster
from tests.integration.conftest import RUN
from tests.integration.stream_clients import problems, prompt, stream_clients

OTHER = "other-model"
NOBODYS = "nobodys-model"
TOKENS = 4

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(kafka: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """Run two models with a worker and an ingress each, and a third model with only an ingress."""
    folder = tmp_path_factory.mktemp("groups")
    plan = TopicPlan(groups=2, slots=4, replies=2, kafka_api=2)
    async with Cluster(kafka, redis_url, f"{RUN}-groups", folder, plan, spawn=fork_server.spawn) as running:
        running.router("r1")
        running.worker("w1", "--speedup", "100")
        running.worker("w2", "--speedup", "100", "--model-name", OTHER)
        for name, model in (("i1", GROUP), ("i2", OTHER)):
            running.ingress(name, "--model-name", model)
        await running.until_serving(1)
        await running.until_serving(1, OTHER)
        yield running


async def test_each_model_has_its_own_control_partition(cluster: Cluster) -> None:
    assert {cluster.partition(GROUP), cluster.partition(OTHER)} == {0, 1}
    for name, model, count in (("i1", GROUP, 3), ("i2", OTHER, 5)):
        async with stream_clients([cluster.urls[name]], model) as clients:
            results = [clients.submit(prompt(number), TOKENS, model) for number in range(count)]
            await clients.all()
        assert problems(results, TOKENS) == []
        report = await cluster.verify(model)
        assert (report["decisions"], report["verified"], report["divergence"]) == (count, count, None)


async def test_an_ingress_lists_its_models(cluster: Cluster) -> None:
    async with httpx.AsyncClient() as client:
        answer = await client.post(f"{cluster.urls['i1']}/v1/completions", json={"model": OTHER, "prompt": "Hello"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (404, "model_not_found")
    assert GROUP in error["message"]


async def test_a_model_without_workers_is_rejected_at_once(cluster: Cluster) -> None:
    url = cluster.ingress("i3", "--model-name", NOBODYS)

    async def refused() -> httpx.Response | None:
        try:
            return await client.post(f"{url}/v1/completions", json={"model": NOBODYS, "prompt": "Hello"})
        except httpx.ConnectError:
            return None

    async with httpx.AsyncClient() as client:
        answer = await cluster.processes.until("i3 answers", refused)
        assert (await client.get(f"{url}/ready")).status_code == httpx.codes.SERVICE_UNAVAILABLE
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_group")
    assert NOBODYS in answer.json()["error"]["message"]
    assert cluster.partition(NOBODYS) is None
    await cluster.stop("i3")
