"""Routing features on real services: route queries, busy workers, queue, sessions, KV gaps, custom policy."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import httpx
import pytest
import pytest_asyncio

from forebay.core.block_hashes import sequence_hashes
from forebay.events.base import pack_u32
from forebay.events.codec import encode
from forebay.events.decisions import CacheResyncRequested, RequestAborted, RequestHeld, RequestRouted
from forebay.events.kv import BlocksStored, CacheCleared
from forebay.events.request_ids import log_id_of
from forebay.events.topics import DECISIONS, KV_EVENTS
from forebay.transport.base import Draft
from forebay.transport.kafka.log import KafkaLog
from tests.harness.cluster import GROUP, Cluster
from tests.integration import kafka_api
from tests.integration.conftest import MakeCluster
from tests.integration.stream_clients import BLOCK, TIMEOUT_S, post, prompt

WORKERS = ("w1", "w2")
SPEEDUP = 0.05  # about 115 ms per token, and 13 s to prefill 400 blocks
SHORT, LONG = 2, 400  # prompt blocks
ENDLESS = 100_000  # output tokens
HELD_S = 1.0  # request timeout of the second ingress
SESSION = "x-dynamo-session-id"

CONFIG = """
session_ttl_s: 600
queue:
  threshold: 0.0
"""
POLICY = """
class Last:
    def decide(self, world, request):
        return len(world.candidates) - 1
"""

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(make_cluster: MakeCluster) -> AsyncIterator[Cluster]:
    """Run two workers, two ingresses, and a router that queues requests while every worker has prefill load."""
    running = make_cluster("routing")
    folder = running.processes.folder
    (folder / "router.yaml").write_text(CONFIG)
    (folder / "mine.py").write_text(POLICY)
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)  # custom policies are imported from here
        async with running:
            running.router("r1", "--router-policy-config", "router.yaml")
            running.ingress("i1", "--routing-hints")
            running.ingress("i2", "--routing-hints", "--timeout-s", str(HELD_S))
            slow = ("--speedup", str(SPEEDUP), "--max-num-batched-tokens", "100000")
            await running.serve((), WORKERS, (), worker=slow)
            yield running


@pytest_asyncio.fixture(loop_scope="module")
async def log(cluster: Cluster) -> AsyncIterator[KafkaLog]:
    """Open the cluster's log from outside of the cluster."""
    async with kafka_api.opened(cluster.settings) as opened:
        yield opened


class RoutingClient:
    """Client that sends requests with routing hints."""

    def __init__(self, client: httpx.AsyncClient, cluster: Cluster) -> None:
        self._client = client
        self._cluster = cluster
        self._urls = cluster.urls

    async def post(self, path: str, ingress: str = "i1", **body: Any) -> httpx.Response:
        return await post(self._client, f"{self._urls[ingress]}{path}", json={"model": GROUP, **body})

    async def get(self, path: str, ingress: str = "i1") -> httpx.Response:
        return await self._client.get(f"{self._urls[ingress]}{path}")

    async def complete(self, number: int, session: str = "", ingress: str = "i1", **nvext: Any) -> httpx.Response:
        body = {"model": GROUP, "prompt": prompt(number), "max_tokens": 1, "nvext": nvext}
        headers = {SESSION: session} if session else {}
        return await post(self._client, f"{self._urls[ingress]}/v1/completions", json=body, headers=headers)

    async def overlaps(self, number: int) -> dict[str, int]:
        """Return the blocks of a short prompt that each worker has cached on its device."""
        route = (await self.post("/v1/route", prompt=prompt(number))).raise_for_status().json()
        return {one["worker_id"]: one["device_overlap"] for one in route["candidates"]}

    @contextlib.asynccontextmanager
    async def occupied(self, first: int, blocks: int) -> AsyncIterator[None]:
        """Keep each worker busy with an endless request, cancelled when the body ends."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._endless(first + at, blocks, name)) for at, name in enumerate(WORKERS)]
            one_each = lambda active: active == [1] * len(WORKERS)  # noqa: E731
            await self._cluster.until("each worker has a request", self._active_requests, one_each)
            yield
            for task in tasks:
                task.cancel()

    async def _endless(self, number: int, blocks: int, worker: str) -> None:
        options: dict[str, Any] = {"max_tokens": ENDLESS, "ignore_eos": True, "stream": True}
        await self.post("/v1/completions", prompt=prompt(number, blocks), nvext={"decode_worker_id": worker}, **options)

    async def _active_requests(self) -> list[int]:
        route = (await self.post("/v1/route", prompt="?")).json()
        return [one["active_requests"] for one in route.get("candidates", ())]


@pytest_asyncio.fixture(loop_scope="module")
async def client(cluster: Cluster) -> AsyncIterator[RoutingClient]:
    async with httpx.AsyncClient(timeout=TIMEOUT_S, headers=cluster.admin_headers) as client:
        yield RoutingClient(client, cluster)


async def test_route_queries_are_answered_and_busy_workers_reject(cluster: Cluster, client: RoutingClient) -> None:
    async def route_query() -> Any:
        return (await client.post("/v1/route", prompt=prompt(1))).json()

    route = (await client.post("/v1/route", prompt=prompt(0))).json()
    assert [one["cost"] for one in route["candidates"]] == [2 * (SHORT * BLOCK + 1) / BLOCK - 1 / BLOCK] * 2
    assert route["worker_id"] in WORKERS
    assert await client.overlaps(0) == dict.fromkeys(WORKERS, 0), "route queries are not counted as load"
    off = {"active_prefill_tokens_threshold": None, "active_prefill_tokens_threshold_frac": None}
    async with client.occupied(10, SHORT):
        changed = await client.post("/busy_threshold", active_decode_blocks_threshold=0.0)
        assert changed.json() == {"model": GROUP, "active_decode_blocks_threshold": 0.0, **off}
        # The threshold is only on the log.
        await cluster.until("the owner has applied the threshold", route_query, lambda route: "error" in route)
        rejected = await client.complete(1)
        assert (rejected.status_code, rejected.headers["retry-after"]) == (503, "1")
        assert rejected.json()["error"]["code"] == "busy"
        route = (await client.post("/v1/route", "i2", prompt=prompt(1))).json()
        assert route["error"]["code"] == "busy"
        changed = await client.post("/busy_threshold", "i2", active_decode_blocks_threshold=None)
        assert changed.json() == {"model": GROUP, "active_decode_blocks_threshold": None, **off}
        await cluster.until("the owner has applied its removal", route_query, lambda route: "error" not in route)
        answered = await client.complete(1)
        assert answered.status_code == httpx.codes.OK, answered.text


async def test_a_response_is_explained_by_its_ingress_and_the_command(cluster: Cluster, client: RoutingClient) -> None:
    await client.complete(50)
    answer = (await client.complete(50)).raise_for_status()
    name = answer.json()["id"]

    async def explained() -> Any:
        return (await client.get(f"/v1/requests/{name}/explain")).raise_for_status().json()

    explanation = await cluster.until("its end is on the log", explained, lambda found: found["ending"])
    assert (explanation["request_id"], explanation["state"], explanation["divergence"]) == (
        log_id_of(name),
        "finished",
        None,
    )
    (routing,) = explanation["routings"]
    seen = routing["candidates"][routing["winner"]]["seen"]
    assert (seen["worker_id"], len(routing["candidates"])) == (answer.json()["forebay"]["worker"], len(WORKERS))
    missing = await client.get("/v1/requests/nobody/explain", "i2")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "request_not_found")
    shell = await cluster.explain(name)
    assert [one["table_digest"] for one in shell["routings"]] == [routing["table_digest"]]
    assert (shell["state"], shell["earlier_uses"], explanation["earlier_uses"]) == ("finished", 0, None)


async def test_a_worker_reannounces_its_cache_after_a_gap_in_its_kv_events(
    cluster: Cluster, client: RoutingClient, log: KafkaLog
) -> None:
    home = (await client.complete(20)).json()["forebay"]["worker"]
    none = dict.fromkeys(WORKERS, 0)
    known = partial(
        cluster.until, fetch=partial(client.overlaps, 20), reached=lambda found: found == {**none, home: SHORT}
    )
    await known("its cache is known")
    member = (await cluster.members())[home]
    sequence_numbers = [event.seq for event in await cluster.events(KV_EVENTS) if event.worker_id == home]
    forged = BlocksStored(
        worker_id=home,
        worker_epoch=member.worker_epoch,
        seq=max(sequence_numbers) + 10,
        sequence_hashes=sequence_hashes(pack_u32(prompt(21)), BLOCK),
    )
    values = (b"no event", encode(KV_EVENTS, forged))
    await log.append([Draft(KV_EVENTS.name, cluster.partition(), value) for value in values])

    def is_cleared(events: list[CacheCleared]) -> bool:
        return [(event.worker_id, event.seq) for event in events] == [(home, forged.seq + 1)]

    await cluster.until("the worker cleared its cache", lambda: cluster.events(KV_EVENTS, CacheCleared), is_cleared)
    await cluster.until("the cleared cache is applied", lambda: client.overlaps(21), lambda found: found == none)
    await known("the worker has re-announced its cache")
    (resync,) = await cluster.events(DECISIONS, CacheResyncRequested)
    assert (resync.worker_id, resync.expected_seq, resync.found_seq) == (home, max(sequence_numbers) + 1, forged.seq)
    assert await client.overlaps(21) == none
    await client.complete(22, decode_worker_id=home)
    await cluster.until("events go on", lambda: client.overlaps(22), lambda found: found[home] == SHORT)


async def test_a_session_keeps_its_worker_when_a_router_with_a_custom_policy_takes_over(
    cluster: Cluster, client: RoutingClient
) -> None:
    async def routed(number: int, session: str = "", **nvext: Any) -> str:
        answer = (await client.complete(number, session, **nvext)).raise_for_status().json()
        return str(answer["forebay"]["worker"])

    async def mode() -> str:
        return str((await client.post("/v1/route", prompt="?")).json()["mode"])

    assert await routed(30, "s", routing_constraints={"allowed_worker_ids": ["w1"]}) == "w1"
    cluster.router("r2", "--router-policy-config", "router.yaml", "--router-mode", "mine.Last")
    await cluster.until_joined("r2")
    await cluster.stop("r1")
    assert await routed(31, "s") == "w1"
    # The settings of r2 are a record on `control`. Earlier requests are decided by the settings of r1.
    await cluster.until("r2 decides by its policy", mode, lambda mode: mode == "mine.Last")
    assert [await routed(number) for number in (30, 31, 33)] == ["w2", "w2", "w2"]
    assert await routed(34, "s") == "w1"
    decided = await cluster.events(DECISIONS, RequestRouted)
    assert [event.mode for event in decided[-4:]] == ["mine.Last"] * 4


async def test_queued_requests_expire_or_are_routed_when_a_worker_is_free(
    cluster: Cluster, client: RoutingClient
) -> None:
    async def ids(kind: type) -> list[str]:
        return [event.request_id for event in await cluster.events(DECISIONS, kind)]

    before = len(await ids(RequestHeld))
    async with asyncio.TaskGroup() as group:
        async with client.occupied(40, LONG):
            patient = group.create_task(client.complete(42))
            late = await client.complete(43, ingress="i2")
            assert (late.status_code, late.json()["error"]["code"]) == (504, "queue_deadline_exceeded")
            held = await cluster.until("both are held", lambda: ids(RequestHeld), lambda ids: len(ids) == before + 2)
            aborted = await cluster.events(DECISIONS, RequestAborted)
            (expired,) = [one.request_id for one in aborted if one.reason == "queue_deadline"]
            (waits,) = {*held[before:]} - {expired}
            assert waits not in await ids(RequestRouted)
        await cluster.until("the other one is routed", lambda: ids(RequestRouted), lambda ids: waits in ids)
        patient.cancel()  # the engines are still busy with cancelled requests
    report = await cluster.require_verified(GROUP, "--allow-policy", "mine.Last")
    assert (report["verified"], report["claims"]) == (await cluster.decided(), 2)
