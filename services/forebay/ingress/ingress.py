"""The core of an ingress: appends requests to the log and reads their responses. It does not use HTTP."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Self

from forebay import runtime
from forebay.events.base import Event
from forebay.events.codec import encode
from forebay.events.request_ids import choice_ids
from forebay.events.requests import RequestCancelled
from forebay.events.tokens import RouteResponse
from forebay.events.topics import REQUESTS
from forebay.ingress.admission import POOL_FULL
from forebay.ingress.errors import ApiError, invalid
from forebay.ingress.front import Front
from forebay.ingress.group import GroupClient
from forebay.ingress.media.tokens import MediaRef
from forebay.ingress.metrics import IngressMetrics
from forebay.ingress.model import Model
from forebay.ingress.openai.embeddings import EmbeddingBody
from forebay.ingress.openai.nvext import RoutingHeaders, routing_headers
from forebay.ingress.openai.requests import AnyBody, ChatBody, TextBody
from forebay.ingress.parsers.selection import ParserFactory
from forebay.ingress.prepare import PreparedRequest, Preparer, Target, TokenizedPrompt
from forebay.ingress.response_fold import CompletionFold, EmbeddingFold, ResponseFold
from forebay.ingress.settings import IngressSettings
from forebay.ingress.streams import Stream
from forebay.transport.base import Draft, Log, LogError, LogFull

logger = logging.getLogger(__name__)

ACKNOWLEDGED_S = 5.0  # a healthy broker takes milliseconds; after this time the client should retry
# A request that is not acknowledged after CHECKED_S fails if the owner's last heartbeat is older than SILENT_S. The
# broker has then accepted nothing from two processes, so it is probably unreachable. An owner writes four heartbeats
# per second.
CHECKED_S = 0.9
SILENT_S = 0.75
GRACE_S = 5.0  # the owner enforces the deadline first; this timeout covers a lost owner
QUERY_S = 10.0  # for a route query: longer than a failover
QUEUE_CODES = frozenset({POOL_FULL, "queue_full", "queue_timeout"})


class Ingress(GroupClient):
    """Appends requests to the log, and reads their responses from one reply slot (a partition of `tokens`)."""

    def __init__(
        self,
        log: Log,
        model: Model,
        settings: IngressSettings,
        metrics: IngressMetrics,
        ready: Callable[[], bool],
        reply_from: int,
        find_partition: Callable[[], int | None] = lambda: 0,
    ) -> None:
        takes_media = bool(model.media.ids)
        front = Front(log, settings, metrics, reply_from, takes_media=takes_media, context_tokens=model.context_tokens)
        super().__init__(front, settings, metrics, ready, find_partition)
        self._use(model)

    @classmethod
    def of_group(cls, group: GroupClient, model: Model) -> Self:
        """Return an ingress that shares all parts of `group`. Raises ConfigError if a parser does not fit the model."""
        ingress = cls.__new__(cls)
        vars(ingress).update(vars(group))
        ingress._use(model)
        return ingress

    def _use(self, model: Model) -> None:
        settings, front = self.settings, self.front
        self.model = model
        self.parsers = ParserFactory(model, settings.tool_call_parser, settings.reasoning_parser)
        self._preparer = Preparer(model, self.parsers, settings)
        self.drain, self.admission = front.drain, front.admission
        self.tokenizer_pool, self._fetcher = front.tokenizer_pool, front.fetcher
        self._log = front.log

    async def run(self) -> None:
        """Dispatch the events of the reply slot, until cancelled. Raises LogError if the log cannot be read."""
        try:
            await self.front.run()
        finally:
            self.close()

    async def prepare(
        self, body: AnyBody, headers: Iterable[tuple[str, str]], model: str = "", *, is_patient: bool = False
    ) -> list[PreparedRequest]:
        """Turn a body into requests for the log: tokenize its prompts or inputs, and fetch their media.

        The result has one request per choice (`n` for the first prompt, then `n` for the next one) or per input.

        Args:
            headers: HTTP headers, or headers of the Kafka record.
            model: name of the model or of its adapter, if it differs from the name in the body.
            is_patient: whether to wait if the tokenizer queue is full, instead of raising ApiError 503.

        Raises ApiError if the request is invalid or cannot be served.
        """
        steps = self._preparer
        lora_name = await self.adapters.resolve(model or body.model)
        if isinstance(body, EmbeddingBody):
            body.require_dimensions(self.model)
        routing = steps.routing(body.nvext, self._routing_headers(headers))
        prepared: list[PreparedRequest] = []
        if isinstance(body, EmbeddingBody):
            target = Target(lora_name, routing, await self._block_size())
            chars = sum(len(text) for text in body.inputs if isinstance(text, str))
            work = partial(steps.tokenize_inputs, body.inputs)
            for index, token_ids in enumerate(await self.tokenizer_pool.run(work, chars, is_patient=is_patient)):
                await asyncio.sleep(0)  # thousands of inputs must not block other requests
                prepared.append(steps.embed(body, index, token_ids, target))
            return prepared
        refs = steps.media_refs(body)
        prompts = await self._tokenize(body, refs, is_patient=is_patient)
        fetched = await self._fetcher.fetch(refs)  # only after the text was validated
        target = Target(lora_name, routing, await self._block_size())
        for number, prompt in enumerate(prompts):
            if number:
                await asyncio.sleep(0)  # many prompts must not block other requests
            prepared += steps.choices(body, steps.complete(body, prompt, refs, fetched, target))
        return prepared

    async def tokenize(self, body: ChatBody | TextBody, model: str = "") -> list[int]:
        """Return the token ids of a chat, or of the only prompt of a text completion.

        Raises ApiError if the body is invalid, too long for the context, or has images or videos.
        """
        await self.resolve_adapter(model or body.model)
        if refs := self._preparer.media_refs(body):
            text = "images and videos cannot be tokenized; leave them out"
            raise invalid(text, "messages", "unsupported_parameter")
        (prompt,) = await self._tokenize(body, refs)
        return prompt.token_ids

    async def resolve_adapter(self, name: str | None) -> None:
        """Raise ApiError (404) if `name` is neither empty, nor the model, nor one of its adapters."""
        if name:
            await self.adapters.resolve(name)

    def fold(self, request_id: str, body: AnyBody, prepared: Sequence[PreparedRequest], created_s: int) -> ResponseFold:
        """Return an empty response, which `ResponseFold.step` fills."""
        if isinstance(body, EmbeddingBody):
            return EmbeddingFold(request_id, body, sum(one.prompt_tokens for one in prepared), len(prepared))
        parts = zip(choice_ids(request_id, len(prepared)), prepared, strict=True)
        composers = [one.output.composer(self.model, self.parsers, name) for name, one in parts]
        prompt_tokens = sum(one.prompt_tokens for one in prepared[:: body.choices_per_prompt])
        return CompletionFold(request_id, body, prompt_tokens, composers, created_s)

    async def submit(self, request_id: str, prepared: PreparedRequest) -> Stream:
        """Append a request with a unique id to the log, and return the stream of its response.

        Raises ApiError: 413 if the request is too large for a record, 503 if there is no router or the log fails.
        """
        partition = self.require_partition()
        event = prepared.submission(
            request_id,
            reply_slot=self.settings.reply_slot,
            reply_from=self.replies.position,
            nonce=runtime.random_int(8),
            at_us=runtime.wall_us(),
            ingress_id=self.settings.ingress_id,
            incarnation=self.settings.incarnation,
        )
        stream = self.replies.open(request_id, event.reply_key)
        try:
            await self._append(partition, request_id, event)
        except BaseException as error:
            self.replies.close(request_id)
            if isinstance(error, asyncio.CancelledError):  # the append continues, but nobody reads its response
                self.cancel(request_id, "the server is stopping")
            raise
        return stream

    async def query(self, request_id: str, prepared: PreparedRequest) -> RouteResponse:
        """Return which worker the owner would select for a request with a unique id.

        Raises ApiError if the owner rejects the request or does not respond in time, or the log fails.
        """
        partition = self.require_partition()
        slot, nonce = self.settings.reply_slot, runtime.random_int(8)
        event = prepared.query(request_id, reply_slot=slot, nonce=nonce, at_us=runtime.wall_us())
        wait_s = min(QUERY_S, self.settings.timeout_s)
        send = partial(self._append, partition, request_id, event)
        return await self.replies.call(RouteResponse, request_id, event.reply_key, send, wait_s)

    def observe(self, error: ApiError) -> ApiError:
        """Return an error of the owner, with the estimated time for a retry if it concerns the router's queue.

        If the queue of the pool is full, new requests for the model are rejected for a short time.
        """
        if error.code == POOL_FULL:
            self.full.mark()
        if error.code in QUEUE_CODES:
            error.retry_after_s = self.admission.retry_after_s
        return error

    def cancel(self, request_id: str, reason: str) -> None:
        """Append the cancellation of a request to the log. If the log fails, only log a warning."""
        event = RequestCancelled(request_id=request_id, reason=reason, at_us=runtime.wall_us())
        try:
            self._log.append_soon([_draft(self.require_partition(), request_id, event)])
        except LogError as error:
            logger.warning("cannot cancel request %s: %s", request_id, error)

    async def _append(self, partition: int, request_id: str, event: Event) -> None:
        try:
            async with asyncio.timeout(None) as limit:
                check = asyncio.get_running_loop().call_later(CHECKED_S, self._check_owner, limit)
                try:
                    await self._log.append([_draft(partition, request_id, event)])
                finally:
                    check.cancel()
        except TimeoutError as error:
            self.cancel(request_id, "log_unavailable")  # the log may still append the request after the client has gone
            text = "Kafka did not acknowledge the request in time; try again soon"
            raise ApiError(503, "log_unavailable", text) from error
        except LogFull as error:
            raise ApiError(503, "log_unavailable", f"{error}; try again soon") from error
        except LogError as error:
            # A failed log does not recover, so all other requests would only reach their deadline.
            self.front.slot.interrupt_all(str(error))
            raise ApiError(503, "log_unavailable", str(error)) from error
        except ValueError as error:
            raise ApiError(413, "request_too_large", str(error)) from error

    def _check_owner(self, limit: asyncio.Timeout) -> None:
        """End the wait for an acknowledgement now if the owner is silent, too, otherwise after `ACKNOWLEDGED_S`."""
        left_s = 0.0 if self.owner_silent_s() > SILENT_S else ACKNOWLEDGED_S - CHECKED_S
        limit.reschedule(asyncio.get_running_loop().time() + left_s)

    async def _tokenize(
        self, body: ChatBody | TextBody, refs: Sequence[MediaRef], *, is_patient: bool = False
    ) -> list[TokenizedPrompt]:
        steps, run = self._preparer, partial(self.tokenizer_pool.run, is_patient=is_patient)
        body_chars = body.size_bytes - sum(len(ref.url) for ref in refs) if isinstance(body, ChatBody) else 0
        rendered = await run(partial(steps.render, body), body_chars)
        chars = sum(len(one) for one in rendered if isinstance(one, str))
        return await run(partial(steps.tokenize, body, rendered), chars)

    def _routing_headers(self, headers: Iterable[tuple[str, str]]) -> RoutingHeaders:
        found = routing_headers(headers)
        if not self.settings.routing_hints:
            for name in found:
                self.metrics.headers_ignored.labels(name).inc()
        return found

    async def _block_size(self) -> int:
        return self.settings.block_size or await self.pools.block_size(self.settings.model_name)


def _draft(partition: int, request_id: str, event: Event) -> Draft:
    return Draft(REQUESTS.name, partition, encode(REQUESTS, event), request_id.encode())
