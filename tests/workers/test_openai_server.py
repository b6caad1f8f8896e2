"""The stand-in for servers of engines: its API and its tokens. Tests of attached engines cover the rest."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import httpx
import pytest

from forebay.engine_model.model import EngineConfig
from forebay.events.requests import Sampling
from forebay.ingress.model import DEFAULT_MODEL, Model, word_token_ids
from forebay.workers.engines.mock.engine import MockEngine
from forebay.workers.engines.mock.outputs import OutputScripts
from forebay.workers.runtime.resume import continued
from tests.harness.openai_server import OpenAiServer
from tests.workers.conftest import work_item
from tests.workers.work_items import finish, tokens_of

BLOCK = 4
PROMPT = list(range(300, 330))
MODEL = Model(DEFAULT_MODEL)


@asynccontextmanager
async def served(**settings: Any) -> AsyncIterator[tuple[OpenAiServer, httpx.AsyncClient]]:
    async with OpenAiServer(block_size=BLOCK, **settings) as server, httpx.AsyncClient(base_url=server.url) as client:
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
    return tokens_of(await finish(engine, continued(item, list(earlier), BLOCK) if earlier else item))


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


async def test_stop_strings_and_stop_tokens_end_the_output() -> None:
    tokens = await mock_output(PROMPT, 10)
    async with served() as (_, client):
        choice = (await complete(client, stop_token_ids=[tokens[3]]))["choices"][0]
        assert (choice["token_ids"], choice["finish_reason"], choice["stop_reason"]) == (tokens[:4], "stop", tokens[3])
        word = MODEL.decode([tokens[2]])
        chunks = await streamed(client, stop=[word])
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == MODEL.decode(tokens[:2])
        assert chunks[-1]["choices"][0]["stop_reason"] == word
