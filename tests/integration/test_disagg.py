"""Prefill and decode workers as processes of their own: scaled live and killed under load; every token is checked.

The tests of this file go on with what the one before left running.
"""

import functools
import itertools
import json
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from forebay.events.decisions import RequestRouted
from forebay.events.topics import DECISIONS, REQUESTS
from tests.harness import fork_server
from tests.harness.cluster import GROUP, Cluster
from tests.harness.mock_words import Words, begins_of
from tests.integration.conftest import RUN
from tests.integration.listeners import Heard, Listeners, listeners, problems, prompt

PREFILL, DECODE = ("p1", "p2", "p3", "p4"), ("d1", "d2", "d3", "d4")
MORE = ("d5", "d6")
LEASE = ("--lease-ttl-s", "3")  # a killed worker is lost soon
SIZES = ("--speedup", "0.2", "--kv-blocks", "1024", "--kv-checksum", *LEASE)  # a token takes about 28 ms
LONG, SHORT = 80, 8  # tokens of answers
STREAMS = 16
ASK_EVERY_S = 0.06
PATIENCE_S = 60.0
NUMBERS = itertools.count(1)

pytestmark = pytest.mark.asyncio(loop_scope="module")


def worker(cluster: Cluster, name: str, *options: str) -> None:
    """Start one, whose name says its role."""
    cluster.worker(name, "--role", "prefill" if name.startswith("p") else "decode", *SIZES, *options)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(kafka: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """Two routers, an ingress and the decode workers; prefill workers come later."""
    async with Cluster(
        kafka, redis_url, f"{RUN}-disagg", tmp_path_factory.mktemp("disagg"), spawn=fork_server.spawn
    ) as running:
        for name in ("r1", "r2"):
            running.router(name)
        for name in DECODE:
            worker(running, name)
        running.ingress("i1")
        await running.until_serving(len(DECODE))
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def clients(cluster: Cluster) -> AsyncIterator[Listeners]:
    async with listeners(list(cluster.urls.values()), uuid.uuid4().hex[:8]) as speaking:
        yield speaking


@pytest.fixture(scope="module")
def words() -> Words:
    return Words()


def ask(clients: Listeners, count: int, tokens: int) -> list[Heard]:
    """Prompts that nobody asked before."""
    return [clients.ask(prompt(next(NUMBERS), blocks=3), tokens) for _ in range(count)]


async def members(cluster: Cluster, *names: str) -> None:
    """Wait until these are members and no others."""

    async def are() -> bool:
        return set(await cluster.members()) == set(names)

    await cluster.processes.until(f"{', '.join(names)} are the members", are)


async def routings(cluster: Cluster, heard: Sequence[Heard]) -> list[RequestRouted]:
    """Where these requests were sent, in order."""
    ids = {one.request_id for one in heard}
    decided = await cluster.events(DECISIONS)
    return [one for one in decided if isinstance(one, RequestRouted) and one.request_id in ids]


async def right(cluster: Cluster, words: Words, heard: Sequence[Heard], tokens: int) -> None:
    """Each answer ended once, with exactly the tokens that it should have."""
    assert problems(heard, tokens) == []
    begins = begins_of(await cluster.replies())
    for one in heard:
        assert one.text == words.text(one.prompt, tokens, begins[one.request_id]), one.request_id


async def at_work(cluster: Cluster, heard: Sequence[Heard], name: str) -> bool:
    """Whether a worker answers one of these, and has said something of it."""
    routed = await routings(cluster, heard)
    spoke = {one.request_id for one in heard if one.text and not one.ends}
    last = {one.request_id: one.worker_id for one in routed}
    return any(last.get(request_id) == name for request_id in spoke)


async def test_disagg_with_no_prefill_worker_decode_workers_do_it_themselves(
    cluster: Cluster, clients: Listeners, words: Words
) -> None:
    heard = ask(clients, STREAMS, SHORT)
    await clients.all()
    await right(cluster, words, heard, SHORT)
    places = [(one.stage, one.prefill and one.prefill.reason) for one in await routings(cluster, heard)]
    assert places == [("aggregated", "no_prefill_worker")] * STREAMS


async def test_disagg_what_is_enforced_shows_in_readiness(cluster: Cluster) -> None:
    (url,) = cluster.urls.values()
    async with httpx.AsyncClient(timeout=PATIENCE_S, headers=cluster.admin_headers) as client:

        async def ready(status: int) -> bool:
            return (await client.get(f"{url}/ready")).status_code == status

        for enforce, status in ((True, 503), (False, 200)):
            told = await client.post(f"{url}/disaggregation", json={"model": GROUP, "enforce": enforce})
            assert told.json()["enforce"] is enforce
            await cluster.processes.until(f"readiness is {status}", functools.partial(ready, status))


async def test_disagg_a_worker_whose_blocks_do_not_fit_is_refused_naming_both(cluster: Cluster) -> None:
    worker(cluster, "p9", "--kv-bytes-per-token", "128")
    owner = await cluster.owner()
    assert owner is not None
    says = (
        "worker p9 was rejected: its KV block layout is uint8, 8192 bytes, 1 layer, nixl connector, "
        "but the layout of d1 in the pool decode is uint8, 16384 bytes, 1 layer, nixl connector"
    )

    async def refused() -> bool:
        return says in cluster.processes[owner].output()

    await cluster.processes.until("p9 is refused", refused)
    assert set(await cluster.members()) == set(DECODE)
    await cluster.stop("p9")


async def test_disagg_4_and_4_become_2_and_6_and_one_of_each_is_killed_under_load(
    cluster: Cluster, clients: Listeners, words: Words, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in PREFILL:
        worker(cluster, name)
    await members(cluster, *DECODE, *PREFILL)
    streams: list[Heard] = []
    async with clients.asking(ASK_EVERY_S, SHORT, first=10_000):
        first = ask(clients, STREAMS, LONG)
        for name in MORE:
            worker(cluster, name)
        for name in PREFILL[2:]:
            cluster.processes.ask_to_end(name)
        for name in PREFILL[2:]:
            assert await cluster.processes.ended(name, within_s=PATIENCE_S) == 0
        await members(cluster, *DECODE, *PREFILL[:2], *MORE)
        second = ask(clients, STREAMS, LONG)
        working = functools.partial(at_work, cluster, second, "d1")
        await cluster.processes.until("d1 is in the middle of an answer", working)
        cluster.kill("d1")
        cluster.kill("p1")
        await members(cluster, *DECODE[1:], "p2", *MORE)
        streams = [*first, *second, *ask(clients, STREAMS, LONG)]
    others = [one for one in clients.heard if one not in streams]
    await right(cluster, words, streams, LONG)
    await right(cluster, words, others, SHORT)
    routed = await routings(cluster, clients.heard)
    stages = Counter((one.stage, one.attempt) for one in routed)
    with capsys.disabled():
        print(f"\n  {len(clients.heard)} requests; stages and attempts: {dict(sorted(stages.items()))}")
    assert stages["prefill", 1] == len(clients.heard), "every prompt went to the prefill pool first"
    assert stages["prefill", 2] > 0, "the killed prefill worker had nothing to do"
    assert sum(count for (stage, attempt), count in stages.items() if stage != "prefill" and attempt > 1) > 0
    by_late_workers = Counter(one.worker_id for one in routed if one.worker_id in MORE)
    assert set(by_late_workers) == set(MORE), "who came later got nothing to do"


async def test_disagg_an_owner_is_killed_in_the_middle(cluster: Cluster, clients: Listeners, words: Words) -> None:
    owner = await cluster.owner()
    assert owner is not None
    async with clients.asking(ASK_EVERY_S, SHORT, first=20_000):
        streams = ask(clients, STREAMS, LONG)
        await cluster.processes.until("streams have begun", functools.partial(begun, streams))
        cluster.kill(owner)
        await cluster.taken_over(owner, within_s=PATIENCE_S)
    await right(cluster, words, streams, LONG)
    await right(cluster, words, [one for one in clients.heard if one not in streams], SHORT)


async def test_disagg_all_prefill_workers_die_in_the_middle(cluster: Cluster, clients: Listeners, words: Words) -> None:
    worker(cluster, "p5")
    decoding = (*DECODE[1:], *MORE)
    await members(cluster, *decoding, "p2", "p5")
    async with clients.asking(ASK_EVERY_S, SHORT, first=30_000):
        streams = ask(clients, STREAMS, LONG)
        await cluster.processes.until("streams have begun", functools.partial(begun, streams))
        for name in ("p2", "p5"):
            cluster.kill(name)
        await members(cluster, *decoding)
        after = ask(clients, STREAMS, LONG)
    await right(cluster, words, [*streams, *after], LONG)
    await right(cluster, words, [one for one in clients.heard if one not in streams and one not in after], SHORT)
    assert {one.stage for one in await routings(cluster, after)} == {"aggregated"}


async def test_disagg_what_was_recorded_of_all_this_derives_equal(cluster: Cluster, tmp_path: Path) -> None:
    out = tmp_path / "slice.db"
    where = ("--kafka", cluster.settings.bootstrap, "--namespace", cluster.namespace)
    code, said = await cluster.command("record", "record", *where, "--json", str(out), within_s=PATIENCE_S)
    assert code == 0, said
    code, said = await cluster.command("verify", "replay", "verify", str(out), "--json", within_s=PATIENCE_S)
    report: dict[str, Any] = json.loads(said)
    assert (code, report["divergence"]) == (0, None)
    assert report["verified"] == report["decisions"] == await cluster.decided() > 0
    assert report["claims"] == 2
    asked = await cluster.events(REQUESTS)
    assert len(asked) >= report["decisions"] // 3
    assert Words().wrong(asked, await cluster.replies()) == []


async def begun(streams: Sequence[Heard]) -> bool:
    """Whether half of these have begun."""
    return sum(bool(one.text) for one in streams) >= len(streams) // 2
