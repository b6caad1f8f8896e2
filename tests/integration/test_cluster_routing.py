"""What the router can do, on real parts: routes asked for, busy workers, a queue, sessions, KV gaps, a policy."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from forebay.core.block_hashes import sequence_hashes
from forebay.events.base import pack_u32
from forebay.events.codec import encode
from forebay.events.decisions import CacheResyncRequested, RequestAborted, RequestHeld, RequestRouted
from forebay.events.kv import BlocksStored, CacheCleared
from forebay.events.topics import DECISIONS, KV_EVENTS
from forebay.transport.base import Draft
from forebay.transport.kafka.log import KafkaLog
from forebay.transport.kafka.settings import KafkaSettings
from tests.harness import fork_server
from tests.harness.cluster import GROUP, Cluster
from tests.integration import kafka_api
from tests.integration.conftest import RUN
from tests.integration.listeners import BLOCK, TIMEOUT_S, post, prompt

WORKERS = ("w1", "w2")
SPEEDUP = 0.05  # of the modelled GPU: a token takes about 115 ms, and 400 blocks to prefill 13 s
SHORT, LONG = 2, 400  # blocks of prompts
ENDLESS = 100_000  # tokens of an answer
HELD_S = 1.0  # how long the second ingress lets a request take
NAMESPACE = f"{RUN}-routing"
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
async def cluster(kafka: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """Two workers, two ingresses, and a router for whom requests wait while every worker has anything to prefill."""
    folder = tmp_path_factory.mktemp("routing")
    (folder / "router.yaml").write_text(CONFIG)
    (folder / "mine.py").write_text(POLICY)
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)  # where a policy of one's own is looked for
        async with Cluster(kafka, redis_url, NAMESPACE, folder, spawn=fork_server.spawn) as running:
            running.router("r1", "--router-policy-config", "router.yaml")
            for name in WORKERS:
                running.worker(name, "--speedup", str(SPEEDUP), "--max-num-batched-tokens", "100000")
            running.ingress("i1", "--routing-hints")
            running.ingress("i2", "--routing-hints", "--timeout-s", str(HELD_S))
            await running.until_serving(len(WORKERS))
            yield running


@pytest_asyncio.fixture(loop_scope="module")
async def log(kafka: str, cluster: Cluster) -> AsyncIterator[KafkaLog]:
    """The cluster's log, for who is no part of it."""
    async with kafka_api.opened(KafkaSettings(kafka, NAMESPACE)) as opened:
        yield opened


class Asking:
    """A client that says where its requests are to go."""

    def __init__(self, client: httpx.AsyncClient, cluster: Cluster) -> None:
        self._client = client
        self._cluster = cluster
        self._urls = cluster.urls

    async def post(self, path: str, ingress: str = "i1", **body: Any) -> httpx.Response:
        """Post a body about the group's model."""
        return await post(self._client, f"{self._urls[ingress]}{path}", json={"model": GROUP, **body})

    async def get(self, path: str, ingress: str = "i1") -> httpx.Response:
        """Get what an ingress has there."""
        return await self._client.get(f"{self._urls[ingress]}{path}")

    async def complete(self, number: int, session: str = "", ingress: str = "i1", **nvext: Any) -> httpx.Response:
        """Ask for one token after a short prompt."""
        body = {"model": GROUP, "prompt": prompt(number), "max_tokens": 1, "nvext": nvext}
        headers = {SESSION: session} if session else {}
        return await post(self._client, f"{self._urls[ingress]}/v1/completions", json=body, headers=headers)

    async def overlaps(self, number: int) -> dict[str, int]:
        """Blocks of a short prompt that each worker has on its device, for the router."""
        told = (await self.post("/v1/route", prompt=prompt(number))).raise_for_status().json()
        return {one["worker_id"]: one["device_overlap"] for one in told["candidates"]}

    @contextlib.asynccontextmanager
    async def occupied(self, first: int, blocks: int) -> AsyncIterator[None]:
        """Give each worker a request without an end, which the client hangs up on when the body is over."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._endless(first + at, blocks, name)) for at, name in enumerate(WORKERS)]
            await self._cluster.processes.until("each worker has a request", self._all_occupied)
            yield
            for task in tasks:
                task.cancel()

    async def _endless(self, number: int, blocks: int, worker: str) -> None:
        options: dict[str, Any] = {"max_tokens": ENDLESS, "ignore_eos": True, "stream": True}
        await self.post("/v1/completions", prompt=prompt(number, blocks), nvext={"decode_worker_id": worker}, **options)

    async def _all_occupied(self) -> bool:
        told = (await self.post("/v1/route", prompt="?")).json()
        return [one["active_requests"] for one in told.get("candidates", ())] == [1] * len(WORKERS)


@pytest_asyncio.fixture(loop_scope="module")
async def asking(cluster: Cluster) -> AsyncIterator[Asking]:
    async with httpx.AsyncClient(timeout=TIMEOUT_S, headers=cluster.admin_headers) as client:
        yield Asking(client, cluster)


async def test_a_route_is_told_and_busy_workers_refuse(asking: Asking) -> None:
    told = (await asking.post("/v1/route", prompt=prompt(0))).json()
    assert [one["cost"] for one in told["candidates"]] == [2 * (SHORT * BLOCK + 1) / BLOCK - 1 / BLOCK] * 2
    assert told["worker_id"] in WORKERS
    assert await asking.overlaps(0) == dict.fromkeys(WORKERS, 0), "what is only asked for is not booked"
    off = {"active_prefill_tokens_threshold": None, "active_prefill_tokens_threshold_frac": None}
    async with asking.occupied(10, SHORT):
        changed = await asking.post("/busy_threshold", active_decode_blocks_threshold=0.0)
        assert changed.json() == {"model": GROUP, "active_decode_blocks_threshold": 0.0, **off}
        refused = await asking.complete(1)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.json()["error"]["code"] == "busy"
        told = (await asking.post("/v1/route", "i2", prompt=prompt(1))).json()
        assert told["error"]["code"] == "busy"
        changed = await asking.post("/busy_threshold", "i2", active_decode_blocks_threshold=None)
        assert changed.json() == {"model": GROUP, "active_decode_blocks_threshold": None, **off}
        answered = await asking.complete(1)
        assert answered.status_code == httpx.codes.OK, answered.text


async def test_an_answer_is_explained_by_its_ingress_and_from_a_shell(cluster: Cluster, asking: Asking) -> None:
    await asking.complete(50)
    answer = (await asking.complete(50)).raise_for_status()
    name = answer.headers["x-request-id"]

    async def explained() -> Any:
        told = (await asking.get(f"/v1/requests/{name}/explain")).raise_for_status().json()
        return told if told["ending"] else None

    told = await cluster.processes.until("its end is on the log", explained)
    assert (told["request_id"], told["state"], told["divergence"]) == (name, "finished", None)
    (routing,) = told["routings"]
    seen = routing["candidates"][routing["winner"]]["seen"]
    assert (seen["worker_id"], len(routing["candidates"])) == (answer.json()["forebay"]["worker"], len(WORKERS))
    missing = await asking.get("/v1/requests/nobody/explain", "i2")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "request_not_found")
    shell = await cluster.explain(name)
    assert [one["table_digest"] for one in shell["routings"]] == [routing["table_digest"]]
    assert (shell["state"], shell["earlier_uses"], told["earlier_uses"]) == ("finished", 0, None)


async def test_kv_events_with_a_gap_are_said_anew_by_the_worker(
    cluster: Cluster, asking: Asking, log: KafkaLog
) -> None:
    async def healed() -> bool:
        return await asking.overlaps(20) == {**dict.fromkeys(WORKERS, 0), home: SHORT}

    home = (await asking.complete(20)).json()["forebay"]["worker"]
    await cluster.processes.until("its cache is known", healed)
    place, member = cluster.partition(), (await cluster.members())[home]
    assert place is not None
    said = [event.seq for event in await cluster.events(KV_EVENTS) if event.worker_id == home]
    forged = BlocksStored(
        worker_id=home,
        worker_epoch=member.worker_epoch,
        seq=max(said) + 10,
        sequence_hashes=sequence_hashes(pack_u32(prompt(21)), BLOCK),
    )
    await log.append([Draft(KV_EVENTS.name, place, value) for value in (b"no event", encode(KV_EVENTS, forged))])

    async def goes_on() -> bool:
        return (await asking.overlaps(22))[home] == SHORT

    async def cleared() -> bool:
        events = [event for event in await cluster.events(KV_EVENTS) if isinstance(event, CacheCleared)]
        return [(event.worker_id, event.seq) for event in events] == [(home, forged.seq + 1)]

    await cluster.processes.until("the worker cleared its cache", cleared)
    await cluster.processes.until("it said it anew", healed)
    (asked,) = [event for event in await cluster.events(DECISIONS) if isinstance(event, CacheResyncRequested)]
    assert (asked.worker_id, asked.expected_seq, asked.found_seq) == (home, max(said) + 1, forged.seq)
    assert await asking.overlaps(21) == dict.fromkeys(WORKERS, 0)
    await asking.complete(22, decode_worker_id=home)
    await cluster.processes.until("events go on after that", goes_on)


async def test_a_session_stays_when_a_router_with_a_policy_of_ones_own_takes_over(
    cluster: Cluster, asking: Asking
) -> None:
    async def routed(number: int, session: str = "", **nvext: Any) -> str:
        answer = (await asking.complete(number, session, **nvext)).raise_for_status().json()
        return str(answer["forebay"]["worker"])

    async def member() -> bool:
        return "router r2 is a member of" in cluster.processes["r2"].output()

    async def decides() -> bool:
        return bool((await asking.post("/v1/route", prompt="?")).json()["mode"] == "mine.Last")

    assert await routed(30, "s", routing_constraints={"allowed_worker_ids": ["w1"]}) == "w1"
    cluster.router("r2", "--router-policy-config", "router.yaml", "--router-mode", "mine.Last")
    await cluster.processes.until("r2 runs", member)
    await cluster.stop("r1")
    assert await routed(31, "s") == "w1"
    # Its own settings are a record on `control`: what came before that was decided by those of r1.
    await cluster.processes.until("r2 decides by its policy", decides)
    assert [await routed(number) for number in (30, 31, 33)] == ["w2", "w2", "w2"]
    assert await routed(34, "s") == "w1"
    decided = [event for event in await cluster.events(DECISIONS) if isinstance(event, RequestRouted)]
    assert [event.mode for event in decided[-4:]] == ["mine.Last"] * 4


async def test_requests_wait_until_their_deadline_or_a_workers_turn(cluster: Cluster, asking: Asking) -> None:
    async def decisions(kind: type) -> list[Any]:
        return [event for event in await cluster.events(DECISIONS) if isinstance(event, kind)]

    async def held() -> list[str]:
        return [one.request_id for one in await decisions(RequestHeld)][before:]

    async def two_held() -> bool:
        return len(await held()) == 2

    async def first_routed() -> bool:
        return waits in {event.request_id for event in await decisions(RequestRouted)}

    before = len(await decisions(RequestHeld))
    async with asyncio.TaskGroup() as group:
        async with asking.occupied(40, LONG):
            patient = group.create_task(asking.complete(42))
            late = await asking.complete(43, ingress="i2")
            assert (late.status_code, late.json()["error"]["code"]) == (504, "queue_deadline_exceeded")
            await cluster.processes.until("both were held", two_held)
            (given_up,) = [one for one in await decisions(RequestAborted) if one.reason == "queue_deadline"]
            (waits,) = set(await held()) - {given_up.request_id}
            assert not await first_routed()
        await cluster.processes.until("the other one is routed", first_routed)
        patient.cancel()  # the engines are busy with what nobody wants any more
    report = await cluster.verify()
    assert report["divergence"] is None
    assert (report["verified"], report["claims"]) == (await cluster.decided(), 2)
