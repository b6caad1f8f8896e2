"""One ingress without a model directory serves all models of the system, from the cards that their workers stored."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from forebay.events.topics import MODELS
from forebay.ingress.model import DEFAULT_MODEL
from forebay.transport.base import Draft
from forebay.transport.kafka.topics import TopicPlan
from tests.harness.cluster import GROUP, Cluster
from tests.integration.conftest import MakeCluster
from tests.integration.kafka_api import Client

OTHER, THIRD = "org/other-model:chat", "third"
CONTEXT_TOKENS = 700  # of the other model
FAST = ("--speedup", "1000")
PATIENCE_S = 60.0

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]


def model_directory(folder: Path, context_tokens: int) -> Path:
    """Return a copy of the default model with another context length."""
    directory = folder / f"model-{context_tokens}"
    shutil.copytree(DEFAULT_MODEL, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "max_position_embeddings": context_tokens}))
    return directory


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(make_cluster: MakeCluster) -> AsyncIterator[Cluster]:
    """Run two models with a worker each, and one ingress."""
    async with make_cluster("many-models", TopicPlan(groups=3, slots=6, replies=1, kafka_api=2)) as running:
        other = str(model_directory(running.processes.folder, CONTEXT_TOKENS))
        running.worker("b1", *FAST, "--model", other, "--model-name", OTHER)
        await running.serve(workers=("a1",), worker=FAST)
        await running.until_serving(1, OTHER)
        yield running


async def listed(client: httpx.AsyncClient) -> dict[str, int]:
    cards = (await client.get("/v1/models")).json()["data"]
    return {card["id"]: card["max_model_len"] for card in cards}


async def until_listed(client: httpx.AsyncClient, *names: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while set(await listed(client)) != set(names):  # noqa: ASYNC110 - polls another process
            await asyncio.sleep(0.1)


def chat(model: str, text: str = "hello", **fields: object) -> dict[str, object]:
    return {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 4, **fields}


async def test_each_model_is_listed_and_answers(cluster: Cluster, client: httpx.AsyncClient) -> None:
    await until_listed(client, GROUP, OTHER)
    found = await listed(client)
    assert found[OTHER] == CONTEXT_TOKENS < found[GROUP]
    for model, worker in ((GROUP, "a1"), (OTHER, "b1")):
        route = await client.post("/v1/route", json=chat(model))
        assert worker in route.text, route.text
        response = await client.post("/v1/chat/completions", json=chat(model))
        assert response.status_code == 200, response.text
        assert response.json()["model"] == model
    tokens = [await client.post("/tokenize", json={"model": model, "prompt": "a b c"}) for model in (GROUP, OTHER)]
    assert [one.json()["max_model_len"] for one in tokens] == [found[GROUP], CONTEXT_TOKENS]


async def test_the_kafka_api_serves_every_model(cluster: Cluster) -> None:
    bodies = {"first": chat(GROUP), "second": chat(OTHER), "unknown": chat("no-such-model")}
    answers = {}
    async with Client(cluster.settings).running() as client:
        for request_id, body in bodies.items():
            await client.submit(body, request_id=request_id)
        for request_id in bodies:
            (record,) = await client.complete_response(request_id)
            answers[request_id] = record.status, record.body.get("model")
    assert answers == {"first": (200, GROUP), "second": (200, OTHER), "unknown": (404, None)}


async def test_an_alias_is_moved_under_load_without_an_error(cluster: Cluster, client: httpx.AsyncClient) -> None:
    assert await model(cluster, "alias", "prod", GROUP) == 0
    await until_listed(client, GROUP, OTHER, "prod")
    moved = asyncio.Event()
    statuses, models = set(), []

    async def load() -> None:
        while not moved.is_set():
            response = await client.post("/v1/completions", json={"model": "prod", "prompt": "a", "max_tokens": 1})
            statuses.add(response.status_code)
            models.append(response.json()["model"])

    loads = [asyncio.create_task(load()) for _ in range(8)]
    before = await routed(cluster)
    assert await model(cluster, "alias", "prod", OTHER) == 0
    more = lambda routed: routed[OTHER] >= before[OTHER] + 20  # noqa: E731
    await cluster.until("the other model serves the alias", lambda: routed(cluster), more)
    moved.set()
    await asyncio.gather(*loads)
    assert (statuses, set(models)) == ({200}, {"prod"})
    after = await routed(cluster)
    assert after[GROUP] > before[GROUP]
    chosen = await client.post("/v1/completions", json={"model": "prod", "prompt": "a", "max_tokens": 1})
    assert chosen.status_code == 200
    assert (await routed(cluster))[GROUP] == after[GROUP], "the alias names only the other model now"
    assert await model(cluster, "alias", "prod", "--remove") == 0


async def model(cluster: Cluster, *arguments: str) -> int:
    """Run `forebay model` on the cluster, and return its exit code."""
    return (await cluster.command("model", "model", *arguments, *cluster.where, within_s=PATIENCE_S))[0]


async def routed(cluster: Cluster) -> dict[str, int]:
    return {model: await cluster.routed(model) for model in (GROUP, OTHER)}


async def test_models_come_and_go(cluster: Cluster, client: httpx.AsyncClient, tmp_path: Path) -> None:
    await until_listed(client, GROUP, OTHER)
    cards = await cluster.log.end(MODELS.name, 0)
    cluster.worker("c1", *FAST, "--model-name", THIRD)
    await until_listed(client, GROUP, OTHER, THIRD)
    assert (await client.post("/v1/chat/completions", json=chat(THIRD))).status_code == 200
    assert await cluster.log.end(MODELS.name, 0) == cards, "its card is that of the first model"
    await cluster.stop("b1")
    await until_listed(client, GROUP, THIRD)
    response = await client.post("/v1/chat/completions", json=chat(OTHER))
    assert response.status_code == 503, response.text
    other = str(model_directory(tmp_path, CONTEXT_TOKENS * 2))
    cluster.worker("b2", *FAST, "--model", other, "--model-name", OTHER)
    await until_listed(client, GROUP, OTHER, THIRD)
    assert (await listed(client))[OTHER] == 2 * CONTEXT_TOKENS
    long = "word " * (CONTEXT_TOKENS + 50)
    assert (await client.post("/v1/chat/completions", json=chat(OTHER, long))).status_code == 200


async def stored(cluster: Cluster) -> dict[str, str]:
    """Return the model of each stored card by its digest."""
    code, output = await cluster.command("list", "model", "list", "--json", *cluster.where, within_s=PATIENCE_S)
    assert code == 0
    found = map(json.loads, output.splitlines())
    return {one["digest"]: one["model"] for one in found if "digest" in one}


async def test_cards_that_no_worker_uses_are_removed(cluster: Cluster, client: httpx.AsyncClient) -> None:
    """The previous test replaced the workers of OTHER, which have another card."""
    cards: dict[str, str] = await cluster.until(
        "an unused card is removed", lambda: stored(cluster), lambda found: sorted(found.values()) == [GROUP, OTHER]
    )
    assert await model(cluster, "alias", "prod", GROUP) == 0
    newest = next(iter(cards))[:8]
    for name, message in (
        (OTHER, f"{OTHER} has workers: "),
        (GROUP, f"the alias prod names {GROUP}; move it or remove it first"),
        (newest, f"is the newest card of {cards[next(iter(cards))]}; `forebay model remove"),
        ("other", f"unknown model 'other'; models are: {GROUP}, {OTHER}, {THIRD}; `forebay model list` shows"),
    ):
        code = await model(cluster, "remove", name)
        error = (cluster.processes.folder / "model.log").read_text()
        assert (code, message in error) == (2, True), error
    assert await model(cluster, "alias", "prod", "--remove") == 0
    assert await model(cluster, "remove", GROUP) == 2
    await cluster.stop("b2")
    await cluster.until("it is removed", lambda: model(cluster, "remove", OTHER), lambda code: code == 0)
    assert list((await stored(cluster)).values()) == [GROUP]
    end = await cluster.log.end(MODELS.name, 1)
    (last,) = await cluster.log.read(MODELS.name, 1, end - 1, 1)
    assert (last.value, last.fault) == (b"", "its value is null")
    (digest,) = (one for one, model in cards.items() if model == GROUP)
    await cluster.log.append([Draft(MODELS.name, 0, b"", digest.encode())])
    await cluster.until("the card is stored again", lambda: stored(cluster))
    await until_listed(client, GROUP, THIRD)
    assert (await client.post("/v1/chat/completions", json=chat(THIRD))).status_code == 200
