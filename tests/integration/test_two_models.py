"""Two models that share the default pool, the reply slot, request ids and a worker name: each runs its own requests."""

import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Sequence

import pytest
import pytest_asyncio

from forebay.events.progress import CommandDone, CommandRefused
from forebay.events.request_ids import client_id_of
from forebay.events.tokens import TokensEmitted
from forebay.events.topics import PROGRESS, work_topic
from forebay.transport.kafka.topics import SLOTS_ADDED, TopicPlan, partitions_of
from tests.harness.cluster import GROUP, POOL, Cluster
from tests.integration.conftest import MakeCluster
from tests.integration.stream_clients import StreamResult, problems, prompt, stream_clients

OTHER = "org/other-model:chat"
REQUESTS = 1_000  # per model
IN_FLIGHT = 100  # per model; as many as a busy machine handles without a queue
TOKENS = 4
FAST = ("--speedup", "1000")
SHARED_WORKER = "w"
WORKERS = {GROUP: ("a1", SHARED_WORKER), OTHER: ("b1", SHARED_WORKER)}
INGRESSES = {GROUP: "i1", OTHER: "i2"}

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(make_cluster: MakeCluster) -> AsyncIterator[Cluster]:
    """Run two models with two workers and an ingress each, and one reply slot read by both ingresses."""
    async with make_cluster("two-models", TopicPlan(groups=2, slots=1, replies=1, kafka_api=2)) as running:
        running.router("r1")
        for model, workers in WORKERS.items():
            running.ingress(INGRESSES[model], "--model-name", model)
            for worker in workers:
                process = f"{worker}-{INGRESSES[model]}"
                running.worker(process, *FAST, "--model-name", model, "--id", worker)
        for model, workers in WORKERS.items():
            await running.until_serving(len(workers), model)
        yield running


async def answers(cluster: Cluster, prefix: str, models: Sequence[str], count: int) -> dict[str, list[StreamResult]]:
    """Send `count` requests to each model, with equal request ids across models. Return the results by model."""
    async with contextlib.AsyncExitStack() as stack:
        clients = {
            model: await stack.enter_async_context(stream_clients([cluster.urls[INGRESSES[model]]], prefix))
            for model in models
        }
        for first in range(0, count, IN_FLIGHT):
            for number in range(first, min(first + IN_FLIGHT, count)):
                for model in models:
                    clients[model].submit(prompt(number), TOKENS, model)
            for model in models:
                await clients[model].all()
        return {model: clients[model].results for model in models}


async def executions(cluster: Cluster, prefix: str) -> Counter[str]:
    """Return how often a worker emitted the first token of each request id, over all workers of both models."""
    first_tokens = (
        client_id_of(chunk.request_id)
        for event in await cluster.replies()
        if isinstance(event, TokensEmitted)
        for chunk in event.chunks
        if chunk.first_index == 0 and chunk.request_id.startswith(prefix)
    )
    return Counter(first_tokens)


async def test_each_model_runs_its_own_requests_exactly_once(cluster: Cluster) -> None:
    assert {cluster.partition(model) for model in WORKERS} == {0, 1}
    results = await answers(cluster, "same", [GROUP, OTHER], REQUESTS)
    for model in (GROUP, OTHER):
        assert problems(results[model], TOKENS) == []
        answered_by = Counter(one.worker for one in results[model])
        assert set(answered_by) <= set(WORKERS[model]), answered_by
        assert {one.attempts for one in results[model]} == {1}
    # Each id was used for one request per model, so it has two first tokens.
    assert Counter((await executions(cluster, "same")).values()) == {2: REQUESTS}
    for model in (GROUP, OTHER):
        report = await cluster.require_verified(model)
        assert (report["decisions"], report["unverified"]) == (REQUESTS, {})


async def test_the_router_added_slots_as_workers_joined(cluster: Cluster) -> None:
    assert (await partitions_of(cluster.settings))[work_topic(POOL).name] == SLOTS_ADDED * len(WORKERS)
    slots = [worker.slot for model in WORKERS for worker in (await cluster.members(model)).values()]
    assert sorted(slots) == [0, 1, 2, 3]


async def test_a_command_for_one_model_does_not_affect_the_other(cluster: Cluster) -> None:
    at_first = ["--url", cluster.urls[INGRESSES[GROUP]], "--json", *cluster.admin_options]
    code, out = await cluster.command("control", "control", "power", "pause", *at_first, within_s=60)
    assert (code, {one["worker_id"] for one in json.loads(out)["outcomes"]}) == (0, set(WORKERS[GROUP]))
    results = await answers(cluster, "meanwhile", [OTHER], IN_FLIGHT)
    assert problems(results[OTHER], TOKENS) == []
    assert {one.worker for one in results[OTHER]} <= set(WORKERS[OTHER])
    code, _ = await cluster.command("control", "control", "power", "resume", *at_first, within_s=60)
    assert code == 0
    results = await answers(cluster, "after", [GROUP], IN_FLIGHT)
    assert problems(results[GROUP], TOKENS) == []
    assert await cluster.events(PROGRESS, CommandDone | CommandRefused, group=OTHER) == []
