"""Clients of a cluster: they ask for streams and note all that comes, token by token."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.harness.cluster import GROUP

TIMEOUT_S = 120.0
BLOCK = 64  # tokens of a KV block, as workers have it by default
TOKEN_IDS = 1_000  # every vocabulary has the lowest ids


@dataclass(slots=True)
class Heard:
    """What a client got for one request.

    Attributes:
        ends: how often the answer ended.
        problem: an error in place of the answer or of its rest; empty for none.
    """

    request_id: str
    prompt: list[int]
    text: str = ""
    ends: int = 0
    usage: dict[str, Any] = field(default_factory=dict)
    served: dict[str, Any] = field(default_factory=dict)
    problem: str = ""

    @property
    def worker(self) -> str:
        """Who answered in the end."""
        return str(self.served["worker"])

    @property
    def attempts(self) -> int:
        """How many workers it took."""
        return int(self.served["attempts"])

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the worker had in its cache."""
        return int(self.usage["prompt_tokens_details"]["cached_tokens"])


def prompt(number: int, blocks: int = 2) -> list[int]:
    """A prompt of its own: another number gives another first block."""
    return [(number * 7_919 + place * (number % 13 + 1)) % TOKEN_IDS for place in range(blocks * BLOCK + 1)]


class Listeners:
    """Asks the ingresses in turn; `heard` is every answer, also those under way."""

    def __init__(self, client: httpx.AsyncClient, urls: Sequence[str], prefix: str) -> None:
        self.heard: list[Heard] = []
        self._client = client
        self._urls = itertools.cycle(urls)
        self._prefix = prefix
        self._tasks: list[asyncio.Task[None]] = []

    def ask(self, token_ids: list[int], tokens: int, model: str = GROUP) -> Heard:
        """Ask for a stream of so many tokens; returns at once, the answer comes into what it returns."""
        heard = Heard(f"{self._prefix}-{len(self.heard)}", token_ids)
        self.heard.append(heard)
        self._tasks.append(asyncio.create_task(self._hear(heard, next(self._urls), tokens, model)))
        return heard

    async def all(self) -> None:
        """Wait for every answer."""
        await asyncio.gather(*self._tasks)

    async def answers(self, prompts: Sequence[list[int]], tokens: int) -> list[Heard]:
        """Ask all at once and wait for every answer; those to these prompts, in order."""
        asked = [self.ask(one, tokens) for one in prompts]
        await self.all()
        return asked

    @asynccontextmanager
    async def asking(self, every_s: float, tokens: int, first: int) -> AsyncIterator[None]:
        """Ask again and again while the body runs, prompts from number `first` on; then wait for the answers."""

        async def go_on() -> None:
            for number in itertools.count(first):
                self.ask(prompt(number), tokens)
                await asyncio.sleep(every_s)

        going_on = asyncio.create_task(go_on())
        try:
            yield
        finally:
            going_on.cancel()
            await asyncio.gather(going_on, return_exceptions=True)
        await self.all()

    async def drop(self) -> None:
        """Hang up on answers that are still under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _hear(self, heard: Heard, url: str, tokens: int, model: str) -> None:
        body = {
            "model": model,
            "prompt": heard.prompt,
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        give_up_s = asyncio.get_running_loop().time() + TIMEOUT_S
        while (after_s := await self._hear_once(heard, url, body)) is not None:
            if asyncio.get_running_loop().time() > give_up_s:
                heard.problem = f"no owner for {TIMEOUT_S:g} s"
                return
            await asyncio.sleep(after_s)

    async def _hear_once(self, heard: Heard, url: str, body: dict[str, Any]) -> float | None:
        """Ask once; when to ask again if no owner decides at the moment, as while one is replaced."""
        headers = {"x-request-id": heard.request_id}
        async with self._client.stream("POST", f"{url}/v1/completions", json=body, headers=headers) as response:
            if response.status_code != httpx.codes.OK:
                text = (await response.aread()).decode()
                if '"no_owner"' in text:
                    return float(response.headers["retry-after"])
                heard.problem = f"{response.status_code} {text}"
                return None
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    _note(heard, line.removeprefix("data: "))
        return None


def _note(heard: Heard, data: str) -> None:
    if data == "[DONE]":
        heard.ends += 1
        return
    chunk = json.loads(data)
    if "error" in chunk:
        heard.problem = data
        return
    assert chunk["id"] == heard.request_id
    for choice in chunk["choices"]:
        heard.text += choice["text"]
    heard.usage = chunk.get("usage") or heard.usage
    heard.served = chunk.get("forebay") or heard.served


async def post(client: httpx.AsyncClient, url: str, **content: Any) -> httpx.Response:
    """Post, again for as long as no owner decides, as while one is replaced."""
    give_up_s = asyncio.get_running_loop().time() + TIMEOUT_S
    while True:
        response = await client.post(url, **content)
        if '"no_owner"' not in response.text or asyncio.get_running_loop().time() > give_up_s:
            return response
        await asyncio.sleep(float(response.headers["retry-after"]))


@asynccontextmanager
async def listeners(urls: Sequence[str], prefix: str) -> AsyncIterator[Listeners]:
    """Clients of these ingresses, whose request ids begin with `prefix`; at the end they hang up."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    async with httpx.AsyncClient(timeout=TIMEOUT_S, limits=limits) as client:
        clients = Listeners(client, urls, prefix)
        try:
            yield clients
        finally:
            await clients.drop()


def problems(heard: Sequence[Heard], tokens: int) -> list[str]:
    """What is wrong with answers that were to have so many tokens."""
    found = []
    for one in heard:
        said = one.usage.get("completion_tokens")
        if one.problem or one.ends != 1 or said != tokens:
            found.append(f"{one.request_id}: {one.ends} ends, {said} tokens, {one.problem or 'no error'}")
    return found
