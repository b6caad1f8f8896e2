"""Engine of the stand-in: computes or fetches prompts, and generates output tokens."""

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from forebay.events.requests import Sampling
from forebay.ingress.model import Model
from tests.harness.openai_server.cache import BlocksCleared, CacheEvent, LittleCache, StandinRequest
from tests.harness.openai_server.settings import Counters, Faults, ServerSettings
from tests.harness.openai_server.tokens import TokenSource

FETCH_TIMEOUT_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Delta:
    """Output tokens of a request.

    Attributes:
        cached_tokens: prompt tokens that were not computed; for a prompt that another server computed, those that that
            server did not compute.
        finish_reason: why the output ends with these tokens; None if it goes on.
        transfer: parameters with which another server fetches the KV of the prompt.
    """

    token_ids: list[int]
    cached_tokens: int
    finish_reason: str | None = None
    transfer: dict[str, Any] | None = None


class StandInEngine:
    """Engine of the stand-in.

    The KV of a prompt is its tokens. A server fetches it over HTTP from the port of the server that computed it, with
    the parameters of vLLM's NixlConnector. A prompt with the KV of other tokens gets the output of those.

    Args:
        publish: called with the changes of the cache, in order.

    Attributes:
        port: port of the server.
    """

    def __init__(
        self,
        settings: ServerSettings,
        model: Model,
        counters: Counters,
        faults: Callable[[], Faults],
        publish: Callable[[list[CacheEvent]], None],
    ) -> None:
        self.blocks = settings.kv_blocks - (settings.flavor == "vllm")
        longest = settings.max_model_len or model.context_tokens
        self.max_model_len = min(longest, self.blocks * settings.block_size)
        self.port = 0
        self._engine_id = str(uuid.uuid4())
        self._cache = LittleCache(settings.block_size, self.blocks)
        self._settings = settings
        self._tokens = TokenSource(model)
        self._counters = counters
        self._faults = faults
        self._publish = publish
        self._places = asyncio.Semaphore(settings.max_num_seqs)
        self._requests: dict[str, StandinRequest] = {}
        self._offered: dict[str, list[int]] = {}  # prompts by request id

    @property
    def vocabulary(self) -> tuple[int, ...]:
        return self._tokens.vocabulary

    @property
    def running(self) -> list[StandinRequest]:
        return list(self._requests.values())[: self._settings.max_num_seqs]

    @property
    def waiting(self) -> int:
        return len(self._requests) - len(self.running)

    @property
    def usage(self) -> float:
        """Return the part of the KV blocks that running requests use."""
        size = self._cache.block_size
        return sum(-(-len(one.prompt + one.generated) // size) for one in self.running) / self.blocks

    def reset_prefix_cache(self) -> bool:
        """Clear the prefix cache, unless a request uses blocks."""
        if self._requests:
            return False
        self._cache.names.clear()
        self._publish([BlocksCleared()])
        return True

    def read(self, params: Mapping[str, Any]) -> list[int] | None:
        """Return the KV of a prompt that this engine has offered; None if there is none, as after a restart."""
        if params.get("remote_engine_id") != self._engine_id:
            return None
        kv = self._offered.get(params["remote_request_id"])
        self._counters.kv_fetched += kv is not None
        return kv

    async def generate(
        self, request: StandinRequest, client_id: str, sampling: Sampling, transfer: Mapping[str, Any]
    ) -> AsyncGenerator[Delta, None]:
        """Yield the output of a request, token by token. Closing the iterator aborts the request.

        Args:
            client_id: id that the client gave; the seed of sampling depends on it.
            transfer: parameters of the KV transfer; empty for none.
        """
        has_finished = False
        self._requests[request.name] = request
        try:
            async with self._places:
                kv, cached = request.prompt, self._cache.cached_tokens(request)
                reported = cached
                if transfer.get("do_remote_prefill"):
                    fetched = await _fetch(transfer)
                    if fetched is None:
                        yield Delta(token_ids=[], cached_tokens=cached, finish_reason="error")
                        return
                    kv = [*kv[:cached], *fetched[cached:], *kv[max(cached, len(fetched)) :]]
                    self._counters.fetched_tokens += len(kv) - cached
                    remote = transfer.get("remote_prefill_cached_tokens")
                    reported = remote if isinstance(remote, int) else len(kv)
                self._counters.cached_tokens += cached
                tokens = self._tokens.tokens(self._tokens.output(kv, client_id, sampling))
                for count in range(1, sampling.max_tokens + 1):
                    if count > 1:
                        await asyncio.sleep(self._token_s())
                    self._store(request)
                    token = next(tokens, None)
                    if token is not None:
                        request.generated.append(token)
                        self._counters.generated_tokens += 1
                    reason = self._finish_reason(token, count, sampling)
                    has_finished = reason is not None
                    offers = has_finished and transfer.get("do_remote_decode")
                    yield Delta(
                        token_ids=[] if token is None else [token],
                        cached_tokens=reported,
                        finish_reason=reason,
                        transfer=self._offer(request, cached) if offers else None,
                    )
                    if has_finished:
                        return
                    await asyncio.sleep(0)
        finally:
            del self._requests[request.name]
            self._counters.finished += has_finished
            self._counters.aborted += not has_finished

    def _finish_reason(self, token: int | None, count: int, sampling: Sampling) -> str | None:
        if token is None or (self._tokens.is_end(token) and not sampling.ignore_eos):
            return "stop"
        if count >= sampling.min_tokens and token in sampling.stop_token_ids:
            return "stop"
        return "length" if count == sampling.max_tokens else None

    def _token_s(self) -> float:
        slow = self._faults().token_s
        return self._settings.token_s if slow is None else slow

    def _store(self, request: StandinRequest) -> None:
        tokens = request.prompt + request.generated
        may_fill_block = not request.generated or len(tokens) % self._cache.block_size == 0
        if may_fill_block and (changes := self._cache.store(request, tokens)):
            self._publish(changes)

    def _offer(self, request: StandinRequest, cached: int) -> dict[str, Any]:
        self._offered[request.name] = request.prompt
        self._counters.kv_offered += 1
        blocks = -(-len(request.prompt) // self._cache.block_size)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(range(1, blocks + 1))],
            "remote_engine_id": self._engine_id,
            "remote_request_id": request.name,
            "remote_host": "127.0.0.1",
            "remote_port": self.port,
            "tp_size": 1,
            "remote_num_tokens": len(request.prompt),
            "remote_prefill_cached_tokens": cached,
        }


async def _fetch(params: Mapping[str, Any]) -> list[int] | None:
    """Return the KV that another server offered; None if that server does not answer or does not have it."""
    url = f"http://{params.get('remote_host')}:{params.get('remote_port')}/kv"
    try:
        async with httpx.AsyncClient(timeout=FETCH_TIMEOUT_S) as client:
            response = await client.post(url, json=dict(params))
    except (httpx.HTTPError, httpx.InvalidURL):
        return None
    kv: list[int] | None = response.json()["kv"] if response.is_success else None
    return kv
