"""Engine of the stand-in: admits requests, computes prompts in its block cache, and generates output tokens."""

import asyncio
import bisect
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from xxhash import xxh3_64_intdigest

from forebay.events.requests import Sampling
from forebay.ingress.model import Model
from tests.harness.openai_server.cache import BlockCache, BlockTable, CacheEvent, Prefix
from tests.harness.openai_server.settings import Counters, Faults, ServerSettings
from tests.harness.openai_server.tokens import TokenSource
from tests.harness.openai_server.transfer import FetchFailed, KvKeeper

US_PER_S = 1_000_000
FinishReason = Literal["stop", "length", "error"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineRequest:
    """One prompt.

    Attributes:
        client_id: id that the client gave; the seed of sampling depends on it.
        sampling: sampling parameters; `max_tokens` fits into the context.
        prefix: what cached blocks depend on besides tokens.
        priority: a lower value goes first.
    """

    request_id: str
    client_id: str
    prompt: list[int]
    sampling: Sampling
    prefix: Prefix
    priority: int = 0
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
    """Request in the queue, which is ordered by `key`."""

    key: tuple[int, int]
    blocks: int
    admitted: asyncio.Event = field(default_factory=asyncio.Event)


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
        self.keeper = KvKeeper(self.cache, counters, settings.kv_lease_s, self._admit) if settings.kv_transfer else None
        longest = settings.max_model_len or model.context_tokens
        self.max_model_len = min(longest, self.cache.total * settings.block_size)
        self.running = 0
        self._settings = settings
        self._tokens = TokenSource(model)
        self._counters = counters
        self._faults = faults
        self._publish = publish
        self._queue: list[_Entry] = []
        self._numbers = itertools.count()
        self._reserved = 0  # blocks that the running requests use or will use

    @property
    def vocabulary(self) -> tuple[int, ...]:
        """Token ids that words are sampled from."""
        return self._tokens.vocabulary

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def reset_prefix_cache(self) -> bool:
        """Clear the prefix cache, unless a request uses blocks. vLLM publishes the event with the next step."""
        done = self.cache.clear()
        self._counters.cache_resets += done
        if self._settings.flavor == "sglang":
            self._flush()
        return done

    async def generate(self, request: EngineRequest) -> AsyncGenerator[Delta, None]:
        """Yield the output of a request, token by token. Closing the iterator aborts the request."""
        self._counters.requests += 1
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
        self._count_prompt(len(prompt), cached, fetched)
        await asyncio.sleep((len(prompt) - cached - fetched) * self._settings.prefill_us_per_token / US_PER_S)
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
            ids = [] if token is None else [token]
            yield Delta(
                token_ids=ids,
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

    def _count_prompt(self, tokens: int, cached: int, fetched: int) -> None:
        self._counters.prompt_tokens += tokens
        self._counters.cached_tokens += cached
        self._counters.fetched_tokens += fetched

    def _flush(self) -> None:
        events, self.cache.events = self.cache.events, []
        if events:
            self._publish(events)

    @asynccontextmanager
    async def _place(self, request: EngineRequest) -> AsyncIterator[None]:
        """Wait until the request may run. All blocks that it may need are reserved, so no request is preempted."""
        tokens = len(request.prompt) + request.sampling.max_tokens
        priority = request.priority if self._settings.priorities else 0
        entry = _Entry((priority, next(self._numbers)), -(-tokens // self.cache.block_size))
        bisect.insort(self._queue, entry, key=lambda one: one.key)
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
            del self._queue[0]
            self.running += 1
            self._reserved += entry.blocks
            entry.admitted.set()
