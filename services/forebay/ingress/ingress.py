"""One ingress: requests onto the log, and their answers back off it. Knows nothing of HTTP."""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from forebay.core.blocks import hash_seed, sequence_hashes
from forebay.events.base import Event, pack_u32
from forebay.events.codec import encode
from forebay.events.requests import (
    NO_HINTS,
    RequestCancelled,
    RequestSubmitted,
    RouteQueried,
    RoutingHints,
    Sampling,
)
from forebay.events.tokens import RouteTold
from forebay.events.topics import REQUESTS
from forebay.ingress.errors import ApiError, Unusable, invalid
from forebay.ingress.metrics import IngressMetrics
from forebay.ingress.model import Model
from forebay.ingress.openai import ChatBody, CompletionBody, TextBody, adapter_of
from forebay.ingress.routing import refuse_hints, routing_headers, routing_of
from forebay.ingress.streams import ReplyReader, Stream
from forebay.ingress.thresholds import Thresholds
from forebay.transport.base import Draft, Log, LogError

logger = logging.getLogger(__name__)

INLINE_CHARS_MAX = 8_000  # longer texts are tokenised in a thread: milliseconds that other requests do not wait
TOKENISER_THREADS = 2
GRACE_S = 5.0  # the owner's deadline comes first; this one catches an owner that is gone
QUERY_S = 10.0  # where a request would go: longer than a take-over, and later nobody wants to know
ADAPTER_CHARS_MAX = 256  # what an event takes for a name


@dataclass(frozen=True, slots=True)
class IngressSettings:
    """What an ingress is told.

    Attributes:
        model_name: the one model it serves.
        block_size: tokens a KV block, as the pool has it.
        ingress_id: names this process.
        reply_slot: the partition of `tokens` that it reads.
        body_bytes_max: larger bodies are refused with 413.
        timeout_s: for a whole request.
        max_tokens_default: for requests that do not say.
        routing_hints: whether clients may say which worker, priority, session or policy class; else such headers are
            ignored and counted, and such fields refused.
        loras: the adapters that are served, as models of their own.
        admin_api: whether thresholds can be set, routes queried and requests explained.
    """

    model_name: str
    block_size: int
    ingress_id: str
    reply_slot: int = 0
    body_bytes_max: int = 48 << 20
    timeout_s: float = 600.0
    max_tokens_default: int = 256
    routing_hints: bool = False
    loras: tuple[str, ...] = ()
    admin_api: bool = True

    def __post_init__(self) -> None:
        names = (self.model_name, *self.loras)
        if len(set(names)) < len(names) or not all(0 < len(name) <= ADAPTER_CHARS_MAX for name in names):
            text = f"each needs a name of its own, of 1 to {ADAPTER_CHARS_MAX} characters"
            raise Unusable(f"the model and its LoRA adapters ({', '.join(names)}): {text}")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt in packed u32 token ids and packed u64 sequence hashes, which adapter and namespace salt."""

    token_ids: bytes
    sequence_hashes: bytes
    tokens: int
    lora_name: str
    cache_namespace: str


@dataclass(frozen=True, slots=True)
class Prepared:
    """A valid request: all that goes on the log, but for its name and where its answer goes."""

    prompt: Prompt
    sampling: Sampling
    routing: RoutingHints


class Ingress:
    """Submits requests and listens for their answers on one reply slot, from the offset `reply_from` on.

    `place` gives the partition of the model's control topics, None while no router has placed it.
    """

    def __init__(
        self,
        log: Log,
        model: Model,
        settings: IngressSettings,
        metrics: IngressMetrics,
        ready: Callable[[], bool],
        reply_from: int,
        place: Callable[[], int | None] = lambda: 0,
    ) -> None:
        self.model = model
        self.settings = settings
        self.metrics = metrics
        self.ready = ready
        self.place = place
        self.replies = ReplyReader(log, settings.reply_slot, reply_from, metrics.undecodable.inc)
        self.thresholds = Thresholds(log, place, metrics.undecodable.inc)
        self._log = log
        self._threads = ThreadPoolExecutor(TOKENISER_THREADS, "tokenise")

    async def run(self) -> None:
        """Dispatch answers until cancelled. Raises LogError when the log fails."""
        try:
            await self.replies.run()
        finally:
            self._threads.shutdown(wait=False, cancel_futures=True)

    async def prepare(self, body: ChatBody | TextBody, headers: Iterable[tuple[str, str]]) -> Prepared:
        """Tokenise, hash and check a request. Raises ApiError."""
        lora_name = adapter_of(body.model, self.settings.model_name, self.settings.loras)
        routing = self._routing(body, headers)
        prompt = self._prompt(await self._token_ids(body), lora_name, body.cache_namespace)
        return Prepared(prompt, self._sampling(body, prompt), routing)

    def submission(
        self, request_id: str, prepared: Prepared, *, reply_slot: int, reply_from: int, nonce: int
    ) -> RequestSubmitted:
        """A request as it goes on the log; the last three are as in `RequestSubmitted`."""
        settings, prompt = self.settings, prepared.prompt
        return RequestSubmitted(
            request_id=request_id,
            model=settings.model_name,
            token_ids=prompt.token_ids,
            sequence_hashes=prompt.sequence_hashes,
            reply_slot=reply_slot,
            timeout_us=max(1, round(settings.timeout_s * 1e6)),
            tie_seed=xxh3_64_intdigest(request_id.encode()),
            sampling=prepared.sampling,
            nonce=nonce,
            reply_from=reply_from,
            ingress_id=settings.ingress_id,
            at_us=time.time_ns() // 1000,
            lora_name=prompt.lora_name,
            cache_namespace=prompt.cache_namespace,
            routing=prepared.routing,
        )

    async def submit(self, request_id: str, prepared: Prepared) -> Stream:
        """Put a request on the log and listen for its answer. Raises ApiError."""
        partition = self._require_free(request_id)
        event = self.submission(
            request_id,
            prepared,
            reply_slot=self.settings.reply_slot,
            reply_from=self.replies.position,
            nonce=int.from_bytes(os.urandom(8), "little"),
        )
        stream = self.replies.open(request_id)
        submitted = False
        try:
            await self._put(partition, request_id, event)
            submitted = True
        finally:
            if not submitted:
                self.replies.close(request_id)
        return stream

    async def query(self, request_id: str, prepared: Prepared) -> RouteTold:
        """Ask where a request would go. Raises ApiError, also for the router's refusal."""
        partition = self._require_free(request_id)
        prompt = prepared.prompt
        event = RouteQueried(
            request_id=request_id,
            model=self.settings.model_name,
            prompt_tokens=prompt.tokens,
            sequence_hashes=prompt.sequence_hashes,
            reply_slot=self.settings.reply_slot,
            tie_seed=xxh3_64_intdigest(request_id.encode()),
            at_us=time.time_ns() // 1000,
            lora_name=prompt.lora_name,
            routing=prepared.routing,
        )
        wait_s = min(QUERY_S, self.settings.timeout_s)
        answer = self.replies.open_query(request_id)
        try:
            async with asyncio.timeout(wait_s):
                await self._put(partition, request_id, event)
                told = await answer
        except TimeoutError as error:
            raise ApiError(504, "deadline_exceeded", f"no router answered within {wait_s:g} s") from error
        finally:
            self.replies.close_query(request_id)
        if isinstance(told, str):
            raise ApiError(503, "log_unavailable", told)
        if told.error is not None:
            raise ApiError(told.error.status, told.error.code, told.error.message)
        return told

    def cancel(self, request_id: str, reason: str) -> None:
        """Nobody wants the answer any more."""
        event = RequestCancelled(request_id=request_id, reason=reason, at_us=time.time_ns() // 1000)
        try:
            self._log.append_soon([_draft(self.require_place(), request_id, event)])
        except LogError as error:
            logger.warning("request %s is not cancelled: %s", request_id, error)

    def require_place(self) -> int:
        """The partition of the model's control topics. Raises ApiError while it has none."""
        partition = self.place()
        if partition is None:
            raise ApiError(503, "no_group", f"no router serves {self.settings.model_name} yet: has it any worker?")
        return partition

    def _require_free(self, request_id: str) -> int:
        """As `require_place`. Raises ApiError also when the id is under way."""
        partition = self.require_place()
        if request_id in self.replies:
            raise ApiError(409, "duplicate_request_id", f"the request id {request_id} is under way")
        return partition

    async def _put(self, partition: int, request_id: str, event: Event) -> None:
        try:
            await self._log.append([_draft(partition, request_id, event)])
        except LogError as error:
            # A log that failed stays failed: the others would wait for their deadline in vain.
            self.replies.interrupt_all(str(error))
            raise ApiError(503, "log_unavailable", str(error)) from error
        except ValueError as error:
            raise ApiError(413, "request_too_large", str(error)) from error

    def _routing(self, body: CompletionBody, headers: Iterable[tuple[str, str]]) -> RoutingHints:
        found = routing_headers(headers)
        if self.settings.routing_hints:
            return routing_of(body.nvext, found)
        for name in found:
            self.metrics.headers_ignored.labels(name).inc()
        refuse_hints(body.nvext)
        return NO_HINTS

    async def _token_ids(self, body: ChatBody | TextBody) -> list[int]:
        if isinstance(body, ChatBody):
            text = self.model.render(body.chat())
        elif isinstance(body.prompt, str):
            text = body.prompt
        else:
            return body.prompt
        # Long texts do not hold up others.
        if len(text) <= INLINE_CHARS_MAX:
            return self.model.encode(text)
        return await asyncio.get_running_loop().run_in_executor(self._threads, self.model.encode, text)

    def _prompt(self, token_ids: list[int], lora_name: str, cache_namespace: str) -> Prompt:
        """Pack and hash a prompt. Raises ApiError for an empty one and for ids outside of the vocabulary."""
        if not token_ids:
            raise invalid("the prompt is empty", "prompt", "empty_prompt")
        if max(token_ids) >= self.model.vocabulary_size:
            raise invalid(f"token ids lie below {self.model.vocabulary_size} in this model", "prompt")
        packed = pack_u32(token_ids)
        hashes = sequence_hashes(packed, self.settings.block_size, hash_seed(lora_name, cache_namespace))
        return Prompt(packed, hashes, len(token_ids), lora_name, cache_namespace)

    def _sampling(self, body: CompletionBody, prompt: Prompt) -> Sampling:
        """How to generate. Raises ApiError when the context is too short for what is asked."""
        context = self.model.context_tokens
        wanted = body.tokens_max
        if wanted is None:
            wanted = max(1, min(self.settings.max_tokens_default, context - prompt.tokens))
        if prompt.tokens + wanted > context:
            text = (
                f"the context holds {context} tokens: {prompt.tokens} of the prompt and {wanted} to generate do not fit"
            )
            raise invalid(text, "max_tokens", "context_length_exceeded")
        return Sampling(
            max_tokens=wanted,
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            seed=body.seed,
            ignore_eos=body.ignore_eos,
        )


def _draft(partition: int, request_id: str, event: Event) -> Draft:
    return Draft(REQUESTS.name, partition, encode(REQUESTS, event), request_id.encode())
