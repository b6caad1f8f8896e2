"""Prefill and decode workers as separate processes, scaled and killed under load. Every token is checked.

The tests of this file share a cluster and depend on their order.
"""

import itertools
import json
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from forebay.events.decisions import RequestRouted
from forebay.events.topics import DECISIONS, REQUESTS
from tests.harness.cluster import GROUP, Cluster
from tests.harness.mock_words import Words
from tests.integration.conftest import MakeCluster
from tests.integration.stream_clients import StreamClients, StreamResult, problems, prompt

PREFILL, DECODE = ("p1", "p2", "p3", "p4"), ("d1", "d2", "d3", "d4")
MORE = ("d5", "d6")
LEASE = ("--lease-ttl-s", "3")  # a killed worker is lost quickly
ARGUMENTS = '{"kv_checksum": true}'
SIZES = ("--speedup", "0.2", "--kv-blocks", "1024", "--engine-args", ARGUMENTS, *LEASE)  # about 28 ms per token
LONG, SHORT = 80, 8  # output tokens
STREAMS = 16
ASK_EVERY_S = 0.06
PATIENCE_S = 60.0
NUMBERS = itertools.count(1)

pytestmark = pytest.mark.asyncio(loop_scope="module")


def worker(cluster: Cluster, name: str, *options: str) -> None:
    """Start a worker whose name begins with its role."""
    cluster.worker(name, "--role", "prefill" if name.startswith("p") else "decode", *SIZES, *options)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(make_cluster: MakeCluster) -> AsyncIterator[Cluster]:
    """Run two routers, an ingress and the decode workers. Prefill workers are started by the tests."""
    async with make_cluster("disagg") as running:
        await running.serve(("r1", "r2"), DECODE, worker=("--role", "decode", *SIZES))
        yield running


@pytest.fixture(scope="module")
def words() -> Words:
    return Words()


def submit(clients: StreamClients, count: int, tokens: int) -> list[StreamResult]:
    return [clients.submit(prompt(next(NUMBERS), blocks=3), tokens) for _ in range(count)]


async def routings(cluster: Cluster, results: Sequence[StreamResult]) -> list[RequestRouted]:
    """Return the routing decisions of these requests, in order."""
    ids = {one.request_id for one in results}
    return [one for one in await cluster.events(DECISIONS, RequestRouted) if one.request_id in ids]


def check_responses(words: Words, results: Sequence[StreamResult], tokens: int) -> None:
    """Check that each response ended once and has the expected tokens."""
    assert problems(results, tokens) == []
    for one in results:
        assert one.text == words.text(one.prompt, tokens), one.request_id


async def until_streaming(cluster: Cluster, results: Sequence[StreamResult], name: str) -> None:
    """Wait until a worker has started to stream one of these responses, which have not ended."""

    def is_streaming(routed: list[RequestRouted]) -> bool:
        last = {one.request_id: one.worker_id for one in routed}
        return any(last.get(one.request_id) == name for one in results if one.text and not one.ends)

    await cluster.until(f"{name} is in the middle of an answer", lambda: routings(cluster, results), is_streaming)


async def until_begun(cluster: Cluster, streams: Sequence[StreamResult]) -> None:
    begun = lambda: sum(bool(one.text) for one in streams)  # noqa: E731
    await cluster.until("streams have begun", begun, lambda count: count >= len(streams) // 2)


async def test_disagg_decode_workers_prefill_without_prefill_workers(
    cluster: Cluster, clients: StreamClients, words: Words
) -> None:
    results = submit(clients, STREAMS, SHORT)
    await clients.all()
    check_responses(words, results, SHORT)
    places = [(one.stage, one.prefill and one.prefill.reason) for one in await routings(cluster, results)]
    assert places == [("aggregated", "no_prefill_worker")] * STREAMS


async def test_disagg_enforcement_without_prefill_workers_is_not_ready(cluster: Cluster) -> None:
    (url,) = cluster.urls.values()
    async with httpx.AsyncClient(timeout=PATIENCE_S, headers=cluster.admin_headers) as client:
        for enforce, status in ((True, 503), (False, 200)):
            response = await client.post(f"{url}/disaggregation", json={"model": GROUP, "enforce": enforce})
            assert response.json()["enforce"] is enforce
            is_reached = lambda answer, status=status: answer.status_code == status  # noqa: E731
            await cluster.until(f"readiness is {status}", lambda: client.get(f"{url}/ready"), is_reached)


async def test_disagg_a_worker_with_another_block_size_is_rejected(cluster: Cluster) -> None:
    worker(cluster, "p9", "--kv-bytes-per-token", "128")
    owner = await cluster.owner()
    message = (
        "worker p9 was rejected: its KV block layout is uint8, 8192 bytes, 1 layer, nixl connector, "
        "but the layout of d1 in the pool decode is uint8, 16384 bytes, 1 layer, nixl connector"
    )
    await cluster.until("p9 is refused", cluster.processes[owner].output, lambda output: message in output)
    assert set(await cluster.members()) == set(DECODE)
    await cluster.stop("p9")


async def test_disagg_workers_change_roles_and_are_killed_under_load(
    cluster: Cluster, clients: StreamClients, words: Words, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in PREFILL:
        worker(cluster, name)
    await cluster.until_members(*DECODE, *PREFILL)
    streams: list[StreamResult] = []
    async with clients.load(ASK_EVERY_S, SHORT, first=10_000):
        first = submit(clients, STREAMS, LONG)
        for name in MORE:
            worker(cluster, name)
        for name in PREFILL[2:]:
            cluster.processes.ask_to_end(name)
        for name in PREFILL[2:]:
            assert await cluster.processes.ended(name, within_s=PATIENCE_S) == 0
        await cluster.until_members(*DECODE, *PREFILL[:2], *MORE)
        second = submit(clients, STREAMS, LONG)
        await until_streaming(cluster, second, "d1")
        cluster.kill("d1")
        cluster.kill("p1")
        await cluster.until_members(*DECODE[1:], "p2", *MORE)
        streams = [*first, *second, *submit(clients, STREAMS, LONG)]
    others = [one for one in clients.results if one not in streams]
    check_responses(words, streams, LONG)
    check_responses(words, others, SHORT)
    routed = await routings(cluster, clients.results)
    # After a takeover on a busy machine, the journal may also have decisions of the previous owner.
    decided = {(one.request_id, one.stage, one.attempt) for one in routed}
    stages = Counter((stage, attempt) for _, stage, attempt in decided)
    with capsys.disabled():
        print(f"\n  {len(clients.results)} requests; stages and attempts: {dict(sorted(stages.items()))}")
    assert stages["prefill", 1] == len(clients.results), "every prompt went to the prefill pool first"
    assert stages["prefill", 2] > 0, "the killed prefill worker had nothing to do"
    assert sum(count for (stage, attempt), count in stages.items() if stage != "prefill" and attempt > 1) > 0
    by_late_workers = Counter(one.worker_id for one in routed if one.worker_id in MORE)
    assert set(by_late_workers) == set(MORE), "who came later got nothing to do"


async def test_disagg_clients_survive_the_kill_of_the_owner(
    cluster: Cluster, clients: StreamClients, words: Words
) -> None:
    owner = await cluster.owner()
    async with clients.load(ASK_EVERY_S, SHORT, first=20_000):
        streams = submit(clients, STREAMS, LONG)
        await until_begun(cluster, streams)
        cluster.kill(owner)
        await cluster.taken_over(owner, within_s=PATIENCE_S)
    check_responses(words, streams, LONG)
    check_responses(words, [one for one in clients.results if one not in streams], SHORT)


async def test_disagg_clients_survive_the_kill_of_all_prefill_workers(
    cluster: Cluster, clients: StreamClients, words: Words
) -> None:
    worker(cluster, "p5")
    decoding = (*DECODE[1:], *MORE)
    await cluster.until_members(*decoding, "p2", "p5")
    async with clients.load(ASK_EVERY_S, SHORT, first=30_000):
        streams = submit(clients, STREAMS, LONG)
        await until_begun(cluster, streams)
        for name in ("p2", "p5"):
            cluster.kill(name)
        await cluster.until_members(*decoding)
        after = submit(clients, STREAMS, LONG)
    check_responses(words, [*streams, *after], LONG)
    check_responses(words, [one for one in clients.results if one not in [*streams, *after]], SHORT)
    assert {one.stage for one in await routings(cluster, after)} == {"aggregated"}


async def test_disagg_the_recording_of_these_tests_verifies(cluster: Cluster, tmp_path: Path) -> None:
    out = tmp_path / "slice.db"
    code, output = await cluster.command("record", "record", *cluster.where, "--json", str(out), within_s=PATIENCE_S)
    assert code == 0, output
    code, output = await cluster.command("verify", "verify", str(out), "--json", within_s=PATIENCE_S)
    report: dict[str, Any] = json.loads(output)
    assert (code, report["divergence"]) == (0, None)
    assert report["verified"] == report["decisions"] == await cluster.decided() > 0
    assert report["claims"] == len(await cluster.ownerships()) > 1
    submitted = await cluster.events(REQUESTS)
    assert len(submitted) >= report["decisions"] // 3
    assert Words().wrong(submitted, await cluster.replies()) == []
