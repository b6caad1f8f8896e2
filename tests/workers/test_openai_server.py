"""The stand-in for servers of engines: its API, its tokens, and its KV events as forebay's decoders read them."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import httpx
import pytest

from forebay.core.block_hashes import hash_seed, sequence_hashes
from forebay.engine_model.model import EngineConfig
from forebay.events.base import pack_u32, unpack_u32, unpack_u64
from forebay.events.requests import Sampling
from forebay.ingress.model import DEFAULT_MODEL, DEFAULT_NAME, Model, word_token_ids
from forebay.workers.engine import EngineBatch
from forebay.workers.engines.mock.engine import MockEngine
from forebay.workers.engines.mock.scripts import OutputScripts
from forebay.workers.kv_events.engine_events import Decode
from forebay.workers.kv_events.resident import ResidentBlocks
from forebay.workers.kv_events.sglang_wire import decode_sglang
from forebay.workers.kv_events.vllm_wire import VllmDecoder
from forebay.workers.kv_events.zmq_feed import KvFeed, KvSource
from forebay.workers.runtime.resume import continued
from tests.harness.openai_server import OpenAiServer
from tests.workers.conftest import until, work_item

BLOCK = 4
PROMPT = list(range(300, 330))
MODEL = Model(DEFAULT_MODEL)


@asynccontextmanager
async def served(**settings: Any) -> AsyncIterator[tuple[OpenAiServer, httpx.AsyncClient]]:
    async with (
        OpenAiServer(block_size=BLOCK, **settings) as server,
        httpx.AsyncClient(base_url=server.url) as client,
    ):
        yield server, client


async def complete(client: httpx.AsyncClient, prompt: Any = PROMPT, count: int = 10, **more: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": count, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
    response = await client.post("/v1/completions", json={**body, **more})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


async def output(client: httpx.AsyncClient, prompt: Any = PROMPT, count: int = 10, **more: Any) -> list[int]:
    found: list[int] = (await complete(client, prompt, count, **more))["choices"][0]["token_ids"]
    return found


async def streamed(client: httpx.AsyncClient, **more: Any) -> list[dict[str, Any]]:
    body = {"prompt": PROMPT, "max_tokens": 5, "temperature": 0, "return_token_ids": True, "stream": True, **more}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        data = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
    assert data[-1] == "[DONE]"
    return [json.loads(one) for one in data[:-1]]


async def mock_output(prompt: list[int], count: int, earlier: Sequence[int] = (), **sampling: Any) -> list[int]:
    """Return the output of a mock engine for a prompt, or the rest of it after some output."""
    config = EngineConfig(vocabulary=word_token_ids(MODEL.tokenizer), block_size=BLOCK, kv_blocks_total=400)
    decode = partial(MODEL.tokenizer.decode, skip_special_tokens=False)
    words = [word for one in config.vocabulary or () if (word := MODEL.decode([one]).strip())]
    engine = MockEngine(config, speedup=1e5, scripts=OutputScripts(MODEL.encode, decode, words))
    given = Sampling(**{"max_tokens": count, "temperature": 0.0, "ignore_eos": True, **sampling})
    item = work_item("request-1", prompt, count, sampling=given)
    engine.submit(continued(item, list(earlier), BLOCK) if earlier else item)
    tokens: list[int] = []
    ended = asyncio.Event()

    def publish(batch: EngineBatch) -> None:
        for chunk in batch.emitted:
            tokens.extend(unpack_u32(chunk.token_ids))
        if batch.finished:
            ended.set()

    running = asyncio.create_task(engine.run(publish))
    await ended.wait()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    return tokens


@asynccontextmanager
async def feed_of(server: OpenAiServer, decode: Decode, *, copies: bool = True) -> AsyncIterator[KvFeed]:
    resident = ResidentBlocks(BLOCK, counts_copies=copies)
    feed = KvFeed(0, KvSource(server.kv_events, server.kv_replay), decode, resident, quiet_s=0.05)
    running = asyncio.create_task(feed.run(lambda *_: None, lambda *_: None))
    try:
        yield feed
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def hashes(tokens: Sequence[int], salt: str = "", lora: str = "") -> list[int]:
    return list(unpack_u64(sequence_hashes(pack_u32(list(tokens)), BLOCK, hash_seed(lora, salt))))


async def test_tokens_are_those_of_a_mock_engine() -> None:
    async with served() as (_, client):
        assert await output(client) == await mock_output(PROMPT, 10)
        seeded = await output(client, temperature=0.8, seed=7)
        assert seeded == await mock_output(PROMPT, 10, temperature=0.8, seed=7)
        body = {"prompt": PROMPT, "max_tokens": 6, "return_token_ids": True, "ignore_eos": True}
        response = await client.post("/v1/completions", json=body, headers={"X-Request-Id": "request-1"})
        assert response.json()["id"] == "cmpl-request-1"
        assert response.json()["choices"][0]["token_ids"] == await mock_output(PROMPT, 6, temperature=1.0)


@pytest.mark.parametrize("earlier", [1, 3, 9])
async def test_output_after_output_of_a_mock_engine_continues_it(earlier: int) -> None:
    whole = await mock_output(PROMPT, 12)
    async with served() as (_, client):
        assert await output(client, PROMPT + whole[:earlier], 12 - earlier) == whole[earlier:]
    assert await mock_output(PROMPT, 12, whole[:earlier]) == whole[earlier:]


@pytest.mark.parametrize("earlier", [0, 4, 20])
async def test_reasoning_is_that_of_a_mock_engine(earlier: int) -> None:
    prompt = MODEL.encode("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n<think>\n")
    whole = await mock_output(prompt, 40, ignore_eos=False)
    assert "</think>" in MODEL.decode(whole)
    async with served() as (_, client):
        found = await output(client, prompt + whole[:earlier], 40 - earlier, ignore_eos=False)
        assert found == whole[earlier:]


async def test_stream_has_the_fields_of_vllm() -> None:
    async with served() as (_, client):
        chunks = await streamed(
            client, stream_options={"include_usage": True}, logprobs=2, return_tokens_as_token_ids=True
        )
        *parts, last = chunks
        choices = [part["choices"][0] for part in parts]
        assert [choice["prompt_token_ids"] for choice in choices] == [PROMPT, None, None, None, None]
        ids = [token for choice in choices for token in choice["token_ids"]]
        assert ids == await mock_output(PROMPT, 5)
        assert "".join(choice["text"] for choice in choices) == MODEL.decode(ids)
        assert [choice["finish_reason"] for choice in choices] == [None] * 4 + ["length"]
        assert choices[0]["logprobs"]["tokens"] == [f"token_id:{ids[0]}"]
        assert len(choices[0]["logprobs"]["top_logprobs"][0]) == 2
        assert set(choices[0]) == {
            *("index", "text", "logprobs", "finish_reason", "stop_reason", "prompt_token_ids", "token_ids"),
        }
        assert last["choices"] == []
        assert last["usage"] == {
            "prompt_tokens": 30,
            "total_tokens": 35,
            "completion_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 0},
        }


async def test_models_metrics_and_errors_are_those_of_vllm() -> None:
    async with served() as (server, client):
        (card,) = (await client.get("/v1/models")).json()["data"]
        assert (card["id"], card["owned_by"], card["root"]) == (DEFAULT_NAME, "vllm", str(DEFAULT_MODEL))
        assert card["max_model_len"] == 4095 * BLOCK
        assert (await client.get("/health")).status_code == 200
        await complete(client)
        await complete(client)
        metrics = (await client.get("/metrics")).text.splitlines()
        labels = f'{{engine="0",model_name="{DEFAULT_NAME}"}}'
        assert f"vllm:prefix_cache_queries_total{labels} 60.0" in metrics
        assert f"vllm:prefix_cache_hits_total{labels} 28.0" in metrics
        assert f"vllm:num_requests_running{labels} 0.0" in metrics
        assert any(line.startswith('vllm:cache_config_info{block_size="4"') for line in metrics)
        missing = await client.post("/v1/completions", json={"model": "other", "prompt": "hello"})
        assert missing.status_code == 404
        assert missing.json()["error"] == {
            "message": f"The model `other` does not exist. Valid aliases: {DEFAULT_NAME}.",
            "type": "NotFoundError",
            "param": "model",
            "code": 404,
        }
        long = await client.post("/v1/completions", json={"prompt": [300] * (server.engine.max_model_len + 1)})
        assert long.status_code == 400
        assert "maximum context length" in long.json()["error"]["message"]
        wrong = await client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": "many"})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "body.max_tokens")


async def caught_up(server: OpenAiServer, feed: KvFeed) -> None:
    """Wait until the feed has processed all batches."""
    assert server.events is not None
    events = server.events
    await until(lambda: feed.sequence.next_seq == events.batches)


async def test_decoder_reads_the_events_of_vllm() -> None:
    async with served(kv_events=True) as (server, client):
        await complete(client, count=11, cache_salt="tenant-1")  # published before the feed connects
        async with feed_of(server, VllmDecoder()) as feed:
            tokens = PROMPT + await output(client, count=11)
            await caught_up(server, feed)
            salted = hashes(tokens[:40], salt="tenant-1")
            assert set(feed.held()) == {*hashes(tokens[:40]), *salted}
            assert feed.totals()["replayed"]
            await client.post("/reset_prefix_cache")
            await caught_up(server, feed)
            assert set(feed.held()) == {*hashes(tokens[:40]), *salted}, "vLLM publishes the event with the next step"
            await complete(client, PROMPT[:5], 1)
            await caught_up(server, feed)
            assert list(feed.held()) == hashes(PROMPT[:4])


PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


async def test_decode_server_fetches_the_kv_of_a_prefill_server() -> None:
    async with served(kv_transfer=True) as (prefill, first), served(kv_transfer=True) as (decode, second):
        params = (await complete(first, count=1, kv_transfer_params=PREFILL))["kv_transfer_params"]
        assert params["remote_num_tokens"] == len(PROMPT)
        assert (await first.post("/reset_prefix_cache")).json() == {"success": False}, "blocks are kept"
        found = await complete(second, kv_transfer_params=params)
        assert found["choices"][0]["token_ids"] == await mock_output(PROMPT, 10)
        assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, "that of the prefill server"
        assert (prefill.counters.kv_fetched, decode.counters.fetched_tokens) == (1, len(PROMPT))
        freed = await output(second, [*PROMPT[:-1], 7], kv_transfer_params=params)
        assert freed != await mock_output([*PROMPT[:-1], 7], 10), "vLLM reads the wrong blocks, without an error"
        unknown = {**params, "remote_engine_id": "other"}
        for wrong in (unknown, {**unknown, "remote_port": 1}):
            failed = await second.post("/v1/completions", json={"prompt": "hello", "kv_transfer_params": wrong})
            assert failed.status_code == 500
            assert failed.json()["error"]["message"] == "Internal server error"
        await prefill.restart()
        gone = await second.post("/v1/completions", json={"prompt": "hello", "kv_transfer_params": params})
        assert gone.status_code == 500, "the engine of a restarted server has another id"


async def test_stop_strings_and_stop_tokens_end_the_output() -> None:
    tokens = await mock_output(PROMPT, 10)
    async with served() as (_, client):
        choice = (await complete(client, stop_token_ids=[tokens[3]]))["choices"][0]
        assert (choice["token_ids"], choice["finish_reason"], choice["stop_reason"]) == (tokens[:4], "stop", tokens[3])
        word = MODEL.decode([tokens[2]])
        chunks = await streamed(client, stop=[word])
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == MODEL.decode(tokens[:2])
        assert chunks[-1]["choices"][0]["stop_reason"] == word


async def test_sglang() -> None:
    async with served(flavor="sglang", kv_events=True) as (server, client):
        async with feed_of(server, decode_sglang, copies=False) as feed:
            found = await complete(client, count=11)
            tokens = found["choices"][0]["token_ids"]
            assert tokens == await mock_output(PROMPT, 11)
            assert "matched_stop" in found["choices"][0]
            await complete(client, count=11)
            await caught_up(server, feed)
            assert list(feed.held()) == hashes((PROMPT + tokens)[:40])
            assert (await client.post("/flush_cache")).status_code == 200
            await caught_up(server, feed)
            assert not feed.held()
        assert "sglang:max_total_num_tokens" in (await client.get("/metrics")).text
        info = (await client.get("/server_info")).json()
        assert (info["page_size"], info["kv_events"]["block_size"]) == (BLOCK, BLOCK)
        assert (await client.get("/get_model_info")).json()["served_model_name"] == DEFAULT_NAME
