"""Engine of the stand-in: admits requests, computes or fetches prompts, and generates output tokens."""

import asyncio
import uuid
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx
from xxhash import xxh3_64_intdigest

from forebay.events.requests import Sampling
from forebay.ingress.model import Model
from tests.harness.openai_server.cache import BlockCache, BlockTable, CacheEvent, Prefix
from tests.harness.openai_server.settings import Counters, Faults, ServerSettings
from tests.harness.openai_server.tokens import TokenSource

FETCH_TIMEOUT_S = 5.0
FinishReason = Literal["stop", "length", "error"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineRequest:
    """One prompt.

    Attributes:
        client_id: id that the client gave; the seed of sampling depends on it.
        sampling: sampling parameters; `max_tokens` fits into the context.
        prefix: what cached blocks depend on besides tokens.
    """

    request_id: str
    client_id: str
    prompt: list[int]
    sampling: Sampling
    prefix: Prefix
    transfer: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Delta:
    """Output tokens of a request.

    Attributes:
        cached_tokens: prompt tokens that were not computed; for a prompt that another server computed, those that that
            server did not compute.
        finish_reason: why the output ends with these tokens; None if it goes on.
        stop_reason: token of `stop_token_ids` that ended the output, and with SGLang also the end token; None for none.
    """

    token_ids: list[int]
    cached_tokens: int
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    transfer: dict[str, Any] | None = None


@dataclass(slots=True)
class _Entry:
    """Request in the queue."""

    blocks: int
    admitted: asyncio.Event = field(default_factory=asyncio.Event)


class FetchFailed(Exception):
    """The KV of a prompt cannot be fetched."""


class KvKeeper:
    """Keeps the KV of prompts until another server has fetched it, and fetches KV from others.

    The parameters are those of vLLM's NixlConnector. KV is the contents of blocks, fetched over HTTP from the port of
    the server itself. As with NIXL, a known server is found by the id of its engine, and its blocks are read even if it
    has freed them. If it has used them again, the output is wrong, without an error.

    Args:
        freed: called when blocks were freed.

    Attributes:
        engine_id: id of this engine, which is different after a restart.
    """

    def __init__(self, cache: BlockCache, counters: Counters, freed: Callable[[], None]) -> None:
        self.engine_id = str(uuid.uuid4())
        self.port = 0
        self.blocks = 0
        self._cache = cache
        self._counters = counters
        self._freed = freed
        self._kept: dict[str, BlockTable] = {}  # by request id
        self._peers: dict[str, str] = {}  # URLs by the id of the engine

    def offer(self, request_id: str, table: BlockTable, prompt_tokens: int, cached_tokens: int) -> dict[str, Any]:
        """Keep the blocks of a prompt, and return the parameters with which another server fetches them."""
        kept = self._kept[request_id] = BlockTable(table.prefix, [], list(table.blocks))
        for block in kept.blocks:
            block.users += 1
        self.blocks += len(kept.blocks)
        self._counters.kv_offered += 1
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[block.number for block in kept.blocks]],
            "remote_engine_id": self.engine_id,
            "remote_request_id": request_id,
            "remote_host": "127.0.0.1",
            "remote_port": self.port,
            "tp_size": 1,
            "remote_num_tokens": prompt_tokens,
            "remote_prefill_cached_tokens": cached_tokens,
        }

    def read(self, params: dict[str, Any]) -> list[int] | None:
        """Return the contents of blocks, and free them if they are kept; None if these are blocks of another engine."""
        if params.get("remote_engine_id") != self.engine_id:
            return None
        contents = self._cache.contents(params["remote_block_ids"][0])
        self._counters.kv_fetched += contents is not None
        if params.get("remote_request_id") in self._kept:
            self._release(params["remote_request_id"])
        return contents

    async def fetch(self, params: dict[str, Any]) -> list[int]:
        """Return the contents of blocks of another server.

        Raises FetchFailed if the server does not answer, or has another engine.
        """
        engine_id = str(params.get("remote_engine_id"))
        url = self._peers.get(engine_id, f"http://{params.get('remote_host')}:{params.get('remote_port')}/kv")
        try:
            async with httpx.AsyncClient(timeout=FETCH_TIMEOUT_S) as client:
                response = await client.post(url, json=params)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise FetchFailed(str(error)) from error
        if response.status_code != httpx.codes.OK:
            raise FetchFailed(response.text)
        self._peers[engine_id] = url
        contents: list[int] = response.json()["contents"]
        return contents

    def _release(self, request_id: str) -> None:
        kept = self._kept.pop(request_id)
        self.blocks -= len(kept.blocks)
        self._cache.close(kept)
        self._freed()


class StandInEngine:
    """Engine of the stand-in.

    Args:
        publish: called with the changes of the cache, in order.

    Attributes:
        keeper: KV that is kept for other servers; None unless the server transfers KV.
    """

    def __init__(
        self,
        settings: ServerSettings,
        model: Model,
        counters: Counters,
        faults: Callable[[], Faults],
        publish: Callable[[list[CacheEvent]], None],
    ) -> None:
        is_vllm = settings.flavor == "vllm"
        self.cache = BlockCache(settings.kv_blocks - is_vllm, settings.block_size, counts_copies=is_vllm)
        self.keeper = KvKeeper(self.cache, counters, self._admit) if settings.kv_transfer else None
        longest = settings.max_model_len or model.context_tokens
        self.max_model_len = min(longest, self.cache.total * settings.block_size)
        self.running = 0
        self._settings = settings
        self._tokens = TokenSource(model)
        self._counters = counters
        self._faults = faults
        self._publish = publish
        self._queue: deque[_Entry] = deque()
        self._reserved = 0  # blocks that the running requests use or will use

    @property
    def vocabulary(self) -> tuple[int, ...]:
        return self._tokens.vocabulary

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def reset_prefix_cache(self) -> bool:
        """Clear the prefix cache, unless a request uses blocks. vLLM publishes the event with the next step."""
        done = self.cache.clear()
        if self._settings.flavor == "sglang":
            self._flush()
        return done

    async def generate(self, request: EngineRequest) -> AsyncGenerator[Delta, None]:
        """Yield the output of a request, token by token. Closing the iterator aborts the request."""
        finished = False
        try:
            async with self._place(request):
                table = self.cache.open(request.prompt, request.prefix)
                try:
                    async with aclosing(self._run(request, table)) as deltas:
                        async for delta in deltas:
                            finished = delta.finish_reason in ("stop", "length")
                            yield delta
                finally:
                    self.cache.close(table)
        finally:
            if finished:
                self._counters.finished += 1
            else:
                self._counters.aborted += 1

    async def _run(self, request: EngineRequest, table: BlockTable) -> AsyncGenerator[Delta, None]:
        sampling, prompt = request.sampling, request.prompt
        params = request.transfer or {} if self.keeper is not None else {}
        cached = len(table.blocks) * self.cache.block_size
        contents: list[int] | None = None
        fetched = 0
        if params.get("do_remote_prefill") and self.keeper is not None:
            try:
                contents = await self.keeper.fetch(params)
            except FetchFailed:
                yield Delta(token_ids=[], cached_tokens=cached, finish_reason="error")
                return
            fetched = len(prompt) - cached
        remote = params.get("remote_prefill_cached_tokens") if fetched else None
        reported = remote if isinstance(remote, int) else cached + fetched
        self._counters.prompt_tokens += len(prompt)
        self._counters.cached_tokens += cached
        self._counters.fetched_tokens += fetched
        first = len(table.blocks)
        self.cache.compute(table, len(prompt))
        expected = [block.content for block in table.blocks]
        is_right = contents is None or contents[first:] == expected[first:]
        seen = 0 if is_right else xxh3_64_intdigest(repr(contents).encode())
        output = self._tokens.output(prompt, request.client_id, sampling)
        tokens = self._tokens.tokens(output, seen)
        for count in range(1, sampling.max_tokens + 1):
            if count > 1:
                await asyncio.sleep(self._token_s())
            self.cache.compute(table, len(table.tokens))
            self._flush()
            token = next(tokens, None)
            if token is not None:
                table.tokens.append(token)
                self._counters.generated_tokens += 1
            reason, stopped = self._ending(token, count, sampling)
            transfer = None
            if reason is not None and params.get("do_remote_decode") and self.keeper is not None:
                transfer = self.keeper.offer(request.request_id, table, len(prompt), cached)
            yield Delta(
                token_ids=[] if token is None else [token],
                cached_tokens=reported,
                finish_reason=reason,
                stop_reason=stopped,
                transfer=transfer,
            )
            if reason is not None:
                return
            await asyncio.sleep(0)

    def _ending(self, token: int | None, count: int, sampling: Sampling) -> tuple[FinishReason | None, int | None]:
        """Return why the output ends with a token, and the stop token that ended it."""
        if token is None or (self._tokens.is_end(token) and not sampling.ignore_eos):
            return "stop", token if self._settings.flavor == "sglang" else None
        if count >= sampling.min_tokens and token in sampling.stop_token_ids:
            return "stop", token
        return ("length" if count == sampling.max_tokens else None), None

    def _token_s(self) -> float:
        slow = self._faults().token_s
        return self._settings.token_s if slow is None else slow

    def _flush(self) -> None:
        events, self.cache.events = self.cache.events, []
        if events:
            self._publish(events)

    @asynccontextmanager
    async def _place(self, request: EngineRequest) -> AsyncIterator[None]:
        """Wait until the request may run. All blocks that it may need are reserved, so no request is preempted."""
        tokens = len(request.prompt) + request.sampling.max_tokens
        entry = _Entry(-(-tokens // self.cache.block_size))
        self._queue.append(entry)
        self._admit()
        try:
            await entry.admitted.wait()
            yield
        finally:
            if entry.admitted.is_set():
                self.running -= 1
                self._reserved -= entry.blocks
            else:
                self._queue.remove(entry)
            self._admit()

    def _admit(self) -> None:
        kept = 0 if self.keeper is None else self.keeper.blocks
        while self._queue and self.running < self._settings.max_num_seqs:
            entry = self._queue[0]
            if self._reserved + kept + entry.blocks > self.cache.total:
                return
            self._queue.popleft()
            self.running += 1
            self._reserved += entry.blocks
            entry.admitted.set()
