"""Two real vLLM workers behind router and ingress on real Kafka and Redis.

The tests share one cluster and run in order; those at the end take its workers away.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from functools import partial
from operator import eq
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
import zmq
import zmq.asyncio

from forebay.core.block_hashes import block_hashes, extend_chain, hash_seed, sequence_hashes
from forebay.core.state.prefix_index import PrefixIndex
from forebay.events.base import pack_u32, pack_u64, unpack_u64
from forebay.events.fleet import WorkerLost
from forebay.events.kv import BlocksRemoved, BlocksStored
from forebay.events.topics import FLEET, KV_EVENTS
from forebay.ingress.model import Model
from tests.engines.oracle import Transformers
from tests.engines.serving import BLOCK, BLOCKS, MODEL, Answer, Serving, vllm_cluster
from tests.harness.processes import still_running
from tests.integration.conftest import RUN

WORKERS = ("v1", "v2")
NAMESPACE = f"{RUN}-vllm"
TOKENS = 24
LONG = 800  # tokens of an answer that outlasts what is done to its worker
LONG_PROMPTS = 5  # of 20 blocks each: more than a worker has room for
REPLAYED_WITHIN_S = 30.0
END_OF_REPLAY = b"\xff" * 8
EPOCH = 1  # of a private index
DRAINED_WITHIN_S = 60.0  # the answer is finished, then vLLM ended

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def serving(
    kafka: str, redis_url: str, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Serving]:
    folder, workers = tmp_path_factory.mktemp("vllm"), dict.fromkeys(WORKERS, ())
    async with vllm_cluster(kafka, redis_url, NAMESPACE, folder, model, workers, "--routing-hints") as serving:
        yield serving


def long_prompt(number: int) -> list[int]:
    """Return a prompt of twenty blocks and one token; `number` selects the first block."""
    return [10 + number, *(100 + place % 200 for place in range(20 * BLOCK))]


async def test_chat_streams_the_tokens_of_transformers(serving: Serving, oracle: Transformers, model: Path) -> None:
    messages = [{"role": "user", "content": "hello world"}]
    prompt = oracle.prompt(messages)
    expected = oracle.greedy(prompt, TOKENS)
    observed = await serving.chat(messages, TOKENS)
    reply = await serving.generated(observed)
    assert (observed.status, observed.problem) == (200, "")
    assert reply.tokens == expected
    decoder = Model(model).decoder()
    assert observed.text == "".join(decoder.push([token]) for token in expected)
    again = [await serving.chat(messages, TOKENS) for _ in range(4)]  # a busy machine may merge the tokens of one
    assert any(len(one.pieces) > 1 for one in (observed, *again)), "each came in one piece: that is no stream"
    assert (observed.usage["prompt_tokens"], observed.usage["completion_tokens"]) == (len(prompt), TOKENS)
    assert observed.worker == reply.worker_id
    assert observed.worker in WORKERS


async def test_evictions_are_events_and_the_index_is_vllms_own(serving: Serving, oracle: Transformers) -> None:
    for number in range(LONG_PROMPTS):
        observed = await serving.complete(long_prompt(number), TOKENS, "v1")
        assert (observed.worker, observed.problem) == ("v1", "")
        assert await serving.tokens(observed) == oracle.greedy(long_prompt(number), TOKENS)
    first = set(unpack_u64(sequence_hashes(pack_u32(long_prompt(0)), BLOCK)))

    async def evicted() -> set[int]:
        removed = await events(serving, BlocksRemoved, "v1")
        return {block for event in removed for block in unpack_u64(event.sequence_hashes)}

    await serving.cluster.until("the first prompt is evicted, all of it", evicted, first.issubset)
    assert await serving.metric("v1", "vllm:cache_config_info") == 1
    await agreed(serving)
    assert 0 < len((await serving.index())["v1"]) < BLOCKS
    again = await serving.complete(long_prompt(0), 1, "v1")
    assert again.cached_tokens == 0


async def test_response_of_a_killed_worker_continues_on_another(serving: Serving, oracle: Transformers) -> None:
    cluster, prompt = serving.cluster, list(range(120, 280))
    assert set(await serving.index()) == set(WORKERS)
    observed = Answer()
    listening = asyncio.create_task(serving.observe(observed, prompt, LONG))
    await serving.until_begun(observed)
    victim, (other,) = observed.worker, set(WORKERS) - {observed.worker}
    epoch = (await cluster.members(MODEL))[victim].worker_epoch
    family = cluster.processes[victim].family()
    assert len(family) > 1, "vLLM's core is a process of its own"
    cluster.kill(victim, alone=True)
    assert not listening.done()
    (fact,) = await cluster.until("the worker is lost", lambda: cluster.events(FLEET, WorkerLost, MODEL))
    assert (fact.worker_id, fact.worker_epoch) == (victim, epoch)
    await listening
    assert await serving.tokens(observed) == oracle.greedy(prompt, LONG), (
        "the continuation does not follow the earlier output"
    )
    assert (observed.problem, observed.usage["completion_tokens"]) == ("", LONG)
    assert (observed.served["worker"], observed.served["attempts"]) == (other, 2)
    try:
        await cluster.until("nothing that it started still runs", lambda: not still_running(family))
    finally:
        for pid in still_running(family):
            os.kill(pid, signal.SIGKILL)
    assert set(await serving.index()) == {other}
    assert set(await serving.overlaps(prompt)) == {other}


async def test_stopped_worker_finishes_its_response(serving: Serving, oracle: Transformers) -> None:
    cluster, prompt = serving.cluster, list(range(110, 200))
    (last,) = await cluster.members(MODEL)
    observed = Answer()
    listening = asyncio.create_task(serving.observe(observed, prompt, LONG))
    await serving.until_begun(observed)
    family = cluster.processes[last].family()
    await cluster.stop(last, within_s=DRAINED_WITHIN_S)
    await listening
    assert (observed.problem, observed.served["worker"], observed.served["attempts"]) == ("", last, 1)
    assert await serving.tokens(observed) == oracle.greedy(prompt, LONG)
    assert still_running(family) == []
    assert (await cluster.require_verified(MODEL))["verified"] == await cluster.decided(MODEL)


async def agreed(serving: Serving) -> None:
    """Wait until the index equals the cache that each vLLM reports."""
    expected = {
        name: digest_of(canonical(await replayed(serving.ports[name].replay)))  # vLLM is at rest
        for name in WORKERS
    }

    async def indexed() -> dict[str, int]:
        await serving.overlaps([100])  # journaled by the query: the index is read as of the journal's end
        index = await serving.index()
        return {name: digest_of(index.get(name, set())) for name in WORKERS}

    await serving.cluster.until("the index equals the cache of vLLM", indexed, partial(eq, expected))


async def events(serving: Serving, kind: type, worker: str) -> list[Any]:
    return [event for event in await serving.cluster.events(KV_EVENTS, kind, MODEL) if event.worker_id == worker]


async def replayed(port: int) -> list[Any]:
    """Return every KV event since the engine started, in order, without forebay's adapter. Raises TimeoutError.

    Source: vLLM 0.32 `ZmqEventPublisher`: a DEALER asks `["", first sequence number]` and gets `["", topic, sequence
    number, batch]` for each batch that is kept, then one with sequence number -1. A batch is `[timestamp, events,
    rank]`.
    """
    events: list[Any] = []
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(f"tcp://127.0.0.1:{port}")
        await socket.send_multipart([b"", bytes(8)])
        while True:
            if not await socket.poll(REPLAYED_WITHIN_S * 1000):
                raise TimeoutError(f"no replay from port {port}")
            _, *frames = await socket.recv_multipart()
            number, payload = frames[-2:]
            if number == END_OF_REPLAY:
                return events
            _, reported, _ = msgspec.msgpack.decode(payload)
            events += reported


def canonical(events: Sequence[Any]) -> set[int]:
    """Sequence hashes of the blocks that are there after these events, by the tokens that the engine names."""
    held: dict[int, int] = {}  # by the engine's own hash
    for event in events:
        match event["type"]:
            case "BlockStored":
                seed = hash_seed(event.get("lora_name") or "")
                blocks = block_hashes(pack_u32(event["token_ids"]), event["block_size"], seed)
                parent = event["parent_block_hash"]
                chain = extend_chain(None if parent is None else held[parent], blocks)
                held.update(zip(event["block_hashes"], chain, strict=True))
            case "BlockRemoved":
                for engine_hash in event["block_hashes"]:
                    del held[engine_hash]
            case "AllBlocksCleared":
                held.clear()
            case other:
                raise AssertionError(f"what is a {other}?")
    return set(held.values())


def digest_of(blocks: set[int]) -> int:
    """Return the digest of an index in which one worker holds these blocks."""
    index = PrefixIndex()
    index.add_holder("worker", 0, EPOCH)
    packed = pack_u64(sorted(blocks))
    index.apply(BlocksStored(worker_id="worker", worker_epoch=EPOCH, seq=1, sequence_hashes=packed))
    return index.digest()
