"""Streaming clients of a cluster that record every response."""

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from forebay.events.request_ids import client_id_of, log_id_of
from tests.harness.cluster import GROUP

TIMEOUT_S = 120.0
BLOCK = 64  # tokens per KV block, the default of workers
TOKEN_IDS = 1_000  # valid in every vocabulary
SHUTTING_DOWN = '"shutting_down"'
RETRIED = ('"no_owner"', '"log_unavailable"')  # error codes after which a client sends its request again


@dataclass(slots=True)
class StreamResult:
    """Streamed response to one request.

    Attributes:
        request_id: id of the request; until the response begins, the id that the client chose.
        url: the ingress to which the request was sent.
        problem: error that replaced or ended the response; empty for none.
        at_s: wall clock at which the request was due.
        ttft_s: seconds until its first token; None before.
    """

    request_id: str
    prompt: list[int]
    text: str = ""
    ends: int = 0
    usage: dict[str, Any] = field(default_factory=dict)
    served: dict[str, Any] = field(default_factory=dict)
    problem: str = ""
    url: str = ""
    at_s: float = field(default_factory=time.time)
    ttft_s: float | None = None

    @property
    def worker(self) -> str:
        return str(self.served["worker"])

    @property
    def attempts(self) -> int:
        return int(self.served["attempts"])

    @property
    def cached_tokens(self) -> int:
        return int(self.usage["prompt_tokens_details"]["cached_tokens"])


def prompt(number: int, blocks: int = 2) -> list[int]:
    """Return a prompt whose first block is unique to `number`."""
    return [(number * 7_919 + place * (number % 13 + 1)) % TOKEN_IDS for place in range(blocks * BLOCK + 1)]


class StreamClients:
    """Sends requests to the ingresses in turn.

    Attributes:
        urls: the ingresses. The list may change while the clients run, as that of a load balancer.
        results: every response, including those in flight.
        rejected: number of times that an ingress rejected a request, which was then sent again.
    """

    def __init__(self, client: httpx.AsyncClient, urls: Sequence[str], prefix: str) -> None:
        self.results: list[StreamResult] = []
        self.rejected = 0
        self._client = client
        self.urls = list(urls)
        self._prefix = prefix
        self._tasks: list[asyncio.Task[None]] = []

    def submit(self, token_ids: list[int], tokens: int, model: str = GROUP) -> StreamResult:
        """Request a stream of `tokens` tokens. Return at once; the result is filled as the response arrives."""
        url = self.urls[len(self.results) % len(self.urls)]
        result = StreamResult(f"{self._prefix}-{len(self.results)}", token_ids, url=url)
        self.results.append(result)
        self._tasks.append(asyncio.create_task(self._receive(result, tokens, model)))
        return result

    async def all(self) -> None:
        await asyncio.gather(*self._tasks)

    async def answers(self, prompts: Sequence[list[int]], tokens: int) -> list[StreamResult]:
        """Send the prompts concurrently, wait for every response, and return those to `prompts` in order."""
        submitted = [self.submit(one, tokens) for one in prompts]
        await self.all()
        return submitted

    async def answer(self, token_ids: list[int], tokens: int) -> StreamResult:
        result = self.submit(token_ids, tokens)
        await self._tasks[-1]
        return result

    @asynccontextmanager
    async def load(self, every_s: float, tokens: int, first: int) -> AsyncIterator[None]:
        """Send prompts from number `first` on while the body runs, then wait for the responses."""

        async def send_requests() -> None:
            for number in itertools.count(first):
                self.submit(prompt(number), tokens)
                await asyncio.sleep(every_s)

        sending = asyncio.create_task(send_requests())
        try:
            yield
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        await self.all()

    async def drop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _receive(self, result: StreamResult, tokens: int, model: str) -> None:
        body = {
            "model": model,
            "prompt": result.prompt,
            "max_tokens": tokens,
            "temperature": 0,  # so that the output follows from the prompt
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        give_up_s = asyncio.get_running_loop().time() + TIMEOUT_S
        try:
            while (after_s := await self._receive_once(result, body)) is not None:
                if asyncio.get_running_loop().time() > give_up_s:
                    result.problem = f"rejected for {TIMEOUT_S:g} s"
                    return
                await asyncio.sleep(after_s)
        except httpx.HTTPError as error:
            result.problem = f"{type(error).__name__} {error}"

    async def _receive_once(self, result: StreamResult, body: dict[str, Any]) -> float | None:
        """Send a request. Return the seconds to wait before a retry if it was rejected, otherwise None."""
        headers = {"x-request-id": result.request_id}
        if result.url not in self.urls:
            result.url = self.urls[len(self.results) % len(self.urls)]
        async with self._client.stream("POST", f"{result.url}/v1/completions", json=body, headers=headers) as response:
            if response.status_code != httpx.codes.OK:
                text = (await response.aread()).decode()
                # A request may be on its way to an ingress that is removed and stopped.
                is_removed = result.url not in self.urls and SHUTTING_DOWN in text
                if is_removed or any(code in text for code in RETRIED):
                    self.rejected += 1
                    return float(response.headers["retry-after"])
                result.problem = f"{response.status_code} {text}"
                return None
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    _record(result, line.removeprefix("data: "))
        return None


def _record(result: StreamResult, data: str) -> None:
    if data == "[DONE]":
        result.ends += 1
        return
    chunk = json.loads(data)
    if "error" in chunk:
        result.problem = data
        return
    assert client_id_of(chunk["id"]) == client_id_of(result.request_id)
    result.request_id = log_id_of(chunk["id"])
    for choice in chunk["choices"]:
        result.text += choice["text"]
        result.ttft_s = result.ttft_s or time.time() - result.at_s
    result.usage = chunk.get("usage") or result.usage
    result.served = chunk.get("forebay") or result.served


async def post(client: httpx.AsyncClient, url: str, **content: Any) -> httpx.Response:
    """Post, with retries while there is no owner or the log does not respond, as during a takeover."""
    give_up_s = asyncio.get_running_loop().time() + TIMEOUT_S
    while True:
        response = await client.post(url, **content)
        if not any(code in response.text for code in RETRIED) or asyncio.get_running_loop().time() > give_up_s:
            return response
        await asyncio.sleep(float(response.headers["retry-after"]))


@asynccontextmanager
async def stream_clients(urls: Sequence[str], prefix: str) -> AsyncIterator[StreamClients]:
    """Run clients of these ingresses, whose request ids begin with `prefix`. Disconnect them at the end."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    async with httpx.AsyncClient(timeout=TIMEOUT_S, limits=limits) as client:
        clients = StreamClients(client, urls, prefix)
        try:
            yield clients
        finally:
            await clients.drop()


def problems(results: Sequence[StreamResult], tokens: int) -> list[str]:
    """Return the faults of responses that should have `tokens` tokens."""
    found = []
    for one in results:
        output_tokens = one.usage.get("completion_tokens")
        if one.problem or one.ends != 1 or output_tokens != tokens:
            found.append(f"{one.request_id}: {one.ends} ends, {output_tokens} tokens, {one.problem or 'no error'}")
    return found
