"""Broker outages, also during a takeover: services stay up, reject requests, recover, and stop on a signal."""

import asyncio
import itertools
import time
import uuid
from collections.abc import AsyncIterator, Callable
from random import Random

import httpx
import msgspec
import pytest
import pytest_asyncio

from forebay.events.topics import OPENAI_REQUESTS, OPENAI_RESPONSES
from forebay.transport.base import Draft
from tests.depth import sampled
from tests.harness.brokers import StoppableBroker
from tests.harness.cluster import GROUP, PLAN, Cluster
from tests.harness.failover import TOKENS, Counts, System
from tests.harness.local import local_kafka
from tests.integration.conftest import MakeCluster, available_or_skipped
from tests.integration.stream_clients import post, stream_clients

OUTAGE_S = 20.0  # longer than the 10 s request timeout of Kafka clients
ASK_EVERY_S = 0.1
AT_ONCE_S = 4.0  # a rejection takes at most a second; margin for a busy machine
PATIENCE_S = 120.0
AGAIN = 30  # requests after the outage
LINES_MAX = 150  # per service and outage; uncounted repeats would log 100 per second
ENDED_WITHIN_S = 60.0  # the bound is 19 s, and 64 s for a worker whose engine hangs
TAKEOVERS = range(10)
KILLED_AT_S_MAX = 3.0  # a takeover takes about a second, and the consumer group of a dead router up to 10 s more
KILLED_S_MAX = 2.0
API_REQUESTS = 20
READ_MAX = 500

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("quiet_clients"),
]


class Clients:
    """Sends requests at a fixed rate. `answers` has the start time, duration and response of each request."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.answers: list[tuple[float, float, httpx.Response]] = []
        self._client = client
        self._tasks: list[asyncio.Task[None]] = []

    async def send_for(self, seconds: float) -> None:
        """Send a request every `ASK_EVERY_S` seconds, without waiting for responses."""
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            self._tasks.append(asyncio.create_task(self._send(len(self._tasks))))
            await asyncio.sleep(ASK_EVERY_S)

    async def all(self) -> None:
        """Wait for every response. Raises httpx.TimeoutException for a request that hangs."""
        await asyncio.gather(*self._tasks)

    async def _send(self, number: int) -> None:
        began_s = time.monotonic()
        body = {"model": GROUP, "prompt": [number % 900 + 1, 2, number % 7 + 1], "max_tokens": 5, "ignore_eos": True}
        answer = await self._client.post("/v1/completions", json=body)
        self.answers.append((began_s, time.monotonic() - began_s, answer))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def broker(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[StoppableBroker]:
    with available_or_skipped(local_kafka(tmp_path_factory.mktemp("outage-kafka"))) as broker:
        given = StoppableBroker(broker)
        yield given
        given.end()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system(make_cluster: MakeCluster, broker: StoppableBroker) -> AsyncIterator[System]:
    """Run two routers, two workers and two ingresses. The clients of HTTP use the first ingress."""
    async with make_cluster("outage", kafka=broker.broker.address) as running:
        await running.serve(("r1", "r2"), ("w1", "w2"), ("i1", "i2"))
        yield System(running)


@pytest.fixture
def cluster(system: System) -> Cluster:
    return system.cluster


@pytest.mark.parametrize("victim", ["owner", "ingress"])
@pytest.mark.parametrize("number", sampled(TAKEOVERS, 2))
async def test_a_takeover_survives_a_killed_broker(
    system: System, broker: StoppableBroker, report: Callable[[str], None], number: int, victim: str
) -> None:
    random, cluster, counts = Random(f"{victim}/{number}"), system.cluster, Counts()
    at_s, away_s = random.uniform(0.0, KILLED_AT_S_MAX), random.uniform(0.0, KILLED_S_MAX)
    async with stream_clients([cluster.urls["i1"]], uuid.uuid4().hex[:8]) as clients:
        async with clients.load(2 * ASK_EVERY_S, TOKENS, first=1_000 * number):
            await system.until_served(clients, 5)
            sent = submit_to_the_kafka_api(cluster)
            cluster.kill(await cluster.owner() if victim == "owner" else "i2")
            pids = system.pids()
            await asyncio.sleep(at_s)
            broker.kill()
            first = len(clients.results)
            await asyncio.sleep(away_s)
            await broker.restart()
            await system.until_served(clients, 10, first)
        system.count(clients, TOKENS, counts)

    def are_whole(found: dict[bytes, tuple[set[int], bool]]) -> bool:
        return {key for key, (_, is_whole) in found.items() if is_whole} >= sent

    found = await cluster.until(
        "the Kafka API has responded", lambda: responses(cluster), are_whole, within_s=PATIENCE_S
    )
    assert system.pids() == pids, "a process ended"
    assert counts.problems == []
    for key, (numbers, _) in found.items():
        assert numbers == set(range(len(numbers))), f"the response to {key.decode()} has a gap"
    report(f"{victim} killed, the broker {at_s:.2f} s later: {counts.sent} requests over HTTP, {len(sent)} over Kafka")
    if victim == "owner":
        await system.replace_router()
    else:
        cluster.ingress("i2")
        await cluster.until_serving(2)


def submit_to_the_kafka_api(cluster: Cluster) -> set[bytes]:
    """Append requests to `openai-requests`, and return their ids."""
    prefix = uuid.uuid4().hex[:8]
    names = [f"{prefix}-{number}" for number in range(API_REQUESTS)]
    for name, partition in zip(names, itertools.cycle(range(PLAN.kafka_api)), strict=False):
        body = {"model": GROUP, "prompt": [1, 2, 3], "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
        headers = {"request-id": name, "path": "/v1/completions"}
        value = msgspec.json.encode(body)
        cluster.log.append_soon([Draft(OPENAI_REQUESTS.name, partition, value, name.encode(), headers)])
    return {name.encode() for name in names}


async def responses(cluster: Cluster) -> dict[bytes, tuple[set[int], bool]]:
    """Return the record numbers of each response of the Kafka API, and whether its last record was written."""
    found: dict[bytes, tuple[set[int], bool]] = {}
    for partition in range(PLAN.kafka_api):
        position, end = 0, await cluster.log.end(OPENAI_RESPONSES.name, partition)
        while position < end:
            for record in await cluster.log.read(OPENAI_RESPONSES.name, partition, position, READ_MAX):
                position = record.offset + 1
                headers = record.headers or {}
                numbers, is_whole = found.get(record.key or b"", (set(), False))
                found[record.key or b""] = numbers | {int(headers["index"])}, is_whole or headers["last"] == "1"
    return found


@pytest.mark.parametrize("way", ["paused", "killed"])
async def test_services_recover_after_a_broker_outage(
    system: System, broker: StoppableBroker, client: httpx.AsyncClient, report: Callable[[str], None], way: str
) -> None:
    cluster, clients, pids = system.cluster, Clients(client), system.pids()
    await clients.send_for(2)
    lines = log_lines(cluster)
    (broker.pause if way == "paused" else broker.kill)()
    outage_s = time.monotonic()
    load = asyncio.create_task(clients.send_for(OUTAGE_S))
    await cluster.until("the ingress misses the owner", lambda: is_ready(client, httpx.codes.SERVICE_UNAVAILABLE))
    known_s = time.monotonic()
    assert (await client.get("/live")).status_code == httpx.codes.OK
    await load
    ended_s = time.monotonic()
    assert [name for name, count in log_lines(cluster).items() if count - lines[name] > LINES_MAX] == []
    if way == "paused":
        broker.resume()
    else:
        await broker.restart()
    await cluster.until("the ingress has an owner", lambda: is_ready(client, httpx.codes.OK), within_s=PATIENCE_S)
    # Clients that retry as instructed complete, although ownership may still change after the outage.
    for number in range(AGAIN):
        body = {"model": GROUP, "prompt": [number + 1, 5, 6], "max_tokens": 5}
        assert (await post(client, "/v1/completions", json=body)).status_code == httpx.codes.OK
    await clients.all()
    during = [answer for began_s, _, answer in clients.answers if known_s < began_s < ended_s]
    assert {answer.status_code for answer in during} == {httpx.codes.SERVICE_UNAVAILABLE}
    refusals = [(took_s, answer) for began_s, took_s, answer in clients.answers if outage_s < began_s < ended_s]
    refusals = [(took_s, answer) for took_s, answer in refusals if answer.status_code != httpx.codes.OK]
    assert {answer.status_code for _, answer in refusals} == {httpx.codes.SERVICE_UNAVAILABLE}
    assert all("retry-after" in answer.headers for _, answer in refusals)
    report(f"{way}: {len(refusals)} requests rejected, the slowest after {max(took_s for took_s, _ in refusals):.2f} s")
    assert [took_s for took_s, _ in refusals if took_s > AT_ONCE_S] == []
    assert system.pids() == pids
    assert await system.settled() == []
    assert (await cluster.require_verified())["verified"] > 0


async def test_services_stop_on_a_signal_without_a_broker(cluster: Cluster, broker: StoppableBroker) -> None:
    cluster.begin("shadow", "shadow", *cluster.where, "--group", GROUP, "--policy", "round-robin")
    output = cluster.processes.folder / "shadow.out"
    await cluster.until("the shadow follows", output.read_text, lambda text: "decisions from journal offset" in text)
    broker.kill()
    names = [one.name for one in cluster.processes.running()]
    lines = log_lines(cluster)
    for name in names:
        cluster.processes.ask_to_end(name)
    for name in names:
        await cluster.processes.ended(name, within_s=ENDED_WITHIN_S)
    assert cluster.processes.running() == []
    logs = {name: count_lines((cluster.processes.folder / f"{name}.log").read_text()) for name in names}
    assert [name for name, count in logs.items() if count - lines[name] > LINES_MAX] == []


async def is_ready(client: httpx.AsyncClient, status: int) -> bool:
    """Return whether `/ready` and `/health` have this status."""
    return {(await client.get(path)).status_code for path in ("/ready", "/health")} == {status}


def log_lines(cluster: Cluster) -> dict[str, int]:
    return {one.name: count_lines(one.output()) for one in cluster.processes.running()}


def count_lines(text: str) -> int:
    """Return the number of lines, without those of the access log, because each request has one."""
    return sum("forebay.access" not in line for line in text.splitlines())
