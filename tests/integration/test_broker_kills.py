"""The broker is killed at a random moment of a takeover: no process ends, and no request is lost."""

import asyncio
import itertools
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import msgspec
import pytest
import pytest_asyncio

from forebay.events.topics import OPENAI_REQUESTS, OPENAI_RESPONSES
from forebay.transport.base import Draft
from tests.depth import sampled
from tests.harness import fork_server
from tests.harness.brokers import StoppableBroker
from tests.harness.cluster import GROUP, PLAN, Cluster
from tests.harness.failover import Counts, System, served
from tests.harness.local import local_kafka
from tests.integration.conftest import RUN, available_or_skipped
from tests.integration.stream_clients import stream_clients

TIMES = range(10)
AT_S_MAX = 3.0  # a takeover takes about a second, and the consumer group of a dead router or ingress up to 10 s more
AWAY_S_MAX = 2.0
EVERY_S = 0.2
TOKENS = 6
API_REQUESTS = 20
SERVED_WITHIN_S = 120.0
READ_MAX = 500

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("quiet_clients"),
]


@dataclass(slots=True)
class Scene:
    """A system, and a broker that only this system uses.

    Attributes:
        system: two routers, two workers and two ingresses. Clients of HTTP use the first ingress.
    """

    system: System
    broker: StoppableBroker


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Scene]:
    folder: Path = tmp_path_factory.mktemp("broker-kills")
    (folder / "kafka").mkdir()
    with available_or_skipped(local_kafka(folder / "kafka")) as local:
        broker = StoppableBroker(local)
        async with Cluster(local.address, redis_url, f"{RUN}-kills", folder, spawn=fork_server.spawn) as cluster:
            for name in ("r1", "r2"):
                cluster.router(name)
            for name in ("w1", "w2"):
                cluster.worker(name)
            for name in ("i1", "i2"):
                cluster.ingress(name)
            await cluster.until_serving(2)
            yield Scene(System(cluster), broker)
        broker.end()


@pytest.mark.parametrize("victim", ["owner", "ingress"])
@pytest.mark.parametrize("number", sampled(TIMES, 2))
async def test_a_takeover_survives_the_broker(
    scene: Scene, report: Callable[[str], None], number: int, victim: str
) -> None:
    random, system, counts = Random(f"{victim}/{number}"), scene.system, Counts()
    cluster, processes = system.cluster, system.cluster.processes
    at_s, away_s = random.uniform(0.0, AT_S_MAX), random.uniform(0.0, AWAY_S_MAX)
    async with stream_clients([cluster.urls["i1"]], uuid.uuid4().hex[:8]) as clients:
        async with clients.load(EVERY_S, TOKENS, first=1_000 * number):
            await processes.until("responses arrive", lambda: served(clients, 5))
            sent = submit_to_the_kafka_api(cluster)
            name = await system.owner() if victim == "owner" else "i2"
            cluster.kill(name)
            pids = system.pids()
            await asyncio.sleep(at_s)
            scene.broker.kill()
            first = len(clients.results)
            await asyncio.sleep(away_s)
            await scene.broker.restart()
            await processes.until("requests are served", lambda: served(clients, 10, first), within_s=SERVED_WITHIN_S)
        system.count(clients, TOKENS, counts)

    async def answered() -> bool:
        return {key for key, numbers in (await responses(cluster)).items() if numbers[1]} >= sent

    await processes.until("the Kafka API has responded", answered, within_s=SERVED_WITHIN_S)
    assert system.pids() == pids, "a process ended"
    assert counts.problems == []
    for key, (numbers, _) in (await responses(cluster)).items():
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
