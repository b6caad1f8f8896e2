"""The core of an ingress: appends requests to the log and reads their responses. Independent of HTTP."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from xxhash import xxh3_64_intdigest

from forebay import runtime
from forebay.core.block_hashes import hash_seed, mm_hashes, sequence_hashes
from forebay.events.base import Event, pack_u32
from forebay.events.codec import encode
from forebay.events.media import Media
from forebay.events.requests import (
    NO_HINTS,
    RequestCancelled,
    RequestSubmitted,
    RouteQueried,
    RoutingHints,
    Sampling,
    Task,
)
from forebay.events.tokens import ResponseError, RouteResponse
from forebay.events.topics import REQUESTS
from forebay.ingress.adapters import Adapters
from forebay.ingress.admission import POOL_FULL, IngressAdmission
from forebay.ingress.commands import CommandClient
from forebay.ingress.errors import RETRY_AFTER_S, ApiError, Unusable, invalid
from forebay.ingress.http.body import BodyMemory
from forebay.ingress.http.body_limits import MEDIA_BYTES_MAX, TEXT_BYTES_MAX, VALUES_MAX, BodyLimits
from forebay.ingress.http.drain import IngressDrain
from forebay.ingress.http.pool_settings import PoolConfigurator
from forebay.ingress.kafka_api.topics import require_patterns
from forebay.ingress.media.fetch import MediaFetcher
from forebay.ingress.media.refs import PUBLIC_ONLY, MediaRef, MediaSettings
from forebay.ingress.media.tokens import ExpandedPrompt
from forebay.ingress.metrics import IngressMetrics
from forebay.ingress.model import RENDERED_CHARS_MAX, Model
from forebay.ingress.openai.embeddings import EmbeddingBody
from forebay.ingress.openai.nvext import Nvext
from forebay.ingress.openai.requests import ChatBody, CompletionBody, TextBody
from forebay.ingress.openai.routing_hints import refuse_hints, routing_headers, routing_of
from forebay.ingress.openai.sampling import sampling_of
from forebay.ingress.parsers.composer import OutputPlan
from forebay.ingress.parsers.selection import AUTO, ParseOptions, ParserFactory
from forebay.ingress.streams import ReplyReader, Stream, interruption
from forebay.ingress.tokenizer import TokenizerPool
from forebay.transport.base import Draft, Log, LogError, LogFull

logger = logging.getLogger(__name__)

ACKNOWLEDGED_S = 5.0  # a healthy broker takes milliseconds; after this time the client should retry
GRACE_S = 5.0  # the owner enforces the deadline first; this timeout covers a lost owner
QUERY_S = 10.0  # for a route query: longer than a failover
ADAPTER_CHARS_MAX = 256  # maximum length of a name in an event


@dataclass(frozen=True, slots=True)
class IngressSettings:
    """Settings of an ingress.

    Attributes:
        model_name: the model that the ingress serves.
        ingress_id: name of the process.
        block_size: tokens per KV block of the pool; None reads the value from the log.
        reply_slot: partition of `tokens` that the ingress reads.
        body_bytes_max: maximum bytes of a request body without its images and videos; larger bodies get 413.
        media_body_bytes_max: maximum bytes of a whole request body, if the model accepts images or videos.
        timeout_s: seconds for a whole request.
        max_tokens_default: output tokens of requests that set no limit.
        routing_hints: whether clients may set worker, priority, session or policy class. Otherwise such headers are
            ignored and counted, and such fields are rejected.
        loras: adapters that are always served as models, in addition to those that workers have loaded.
        admin_token: token of the admin API, empty for no admin API.
        tool_call_parser: `auto` (by the chat template), `none`, or the name of a parser.
        reasoning_parser: `auto`, `none`, or the name of a parser.
        media: where images and videos may be fetched from.
        reply_topics: patterns of full topic names that the Kafka API may respond to; `<namespace>.replies.*` if empty.
        incarnation: incarnation of the lease, which distinguishes processes with the same id; empty without a lease.
    """

    model_name: str
    ingress_id: str
    block_size: int | None = None
    reply_slot: int = 0
    body_bytes_max: int = TEXT_BYTES_MAX
    media_body_bytes_max: int = MEDIA_BYTES_MAX
    timeout_s: float = 600.0
    max_tokens_default: int = 256
    routing_hints: bool = False
    loras: tuple[str, ...] = ()
    admin_token: str = field(default="", repr=False)
    tool_call_parser: str = AUTO
    reasoning_parser: str = AUTO
    media: MediaSettings = PUBLIC_ONLY
    reply_topics: tuple[str, ...] = ()
    incarnation: str = ""

    def __post_init__(self) -> None:
        require_patterns(self.reply_topics)
        names = (self.model_name, *self.loras)
        if len(set(names)) < len(names) or not all(0 < len(name) <= ADAPTER_CHARS_MAX for name in names):
            text = f"names must be unique and have 1 to {ADAPTER_CHARS_MAX} characters"
            raise Unusable(f"the model and its LoRA adapters ({', '.join(names)}): {text}")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A tokenised prompt.

    Attributes:
        token_ids: packed u32.
        sequence_hashes: packed u64, one per full block, salted by adapter and cache namespace.
        tokens: number of tokens.
        lora_name: the adapter, empty for the base model.
        cache_namespace: salt of the KV cache, empty for the shared cache.
        media: images and videos, in order.
    """

    token_ids: bytes
    sequence_hashes: bytes
    tokens: int
    lora_name: str
    cache_namespace: str
    media: tuple[Media, ...] = ()


PLAIN = OutputPlan()
EMBEDDING = Sampling(max_tokens=1, temperature=0.0)  # no tokens are generated, so sampling has no effect


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A valid request without its id and reply slot.

    Attributes:
        prompt: the tokenised prompt.
        sampling: sampling parameters.
        routing: routing hints.
        output: how output tokens become deltas.
        task: `generate` or `embed`.
    """

    prompt: Prompt
    sampling: Sampling
    routing: RoutingHints
    output: OutputPlan = PLAIN
    task: Task = "generate"


NO_OWNER = "no router owns this model now: a failover is in progress, or Kafka does not respond; try again soon"
QUEUE_CODES = frozenset({POOL_FULL, "queue_full", "queue_timeout"})
NO_WORKER = "no worker is ready"
NO_PREFILL_WORKER = "no prefill worker is ready, and decode workers must not compute prompts"


class Ingress:
    """Submits requests and reads their responses from one reply slot.

    Args:
        log: the log.
        model: the model directory.
        settings: settings of the ingress.
        metrics: metrics of the ingress.
        ready: returns whether requests can be served.
        reply_from: first offset of the reply slot to read.
        find_partition: returns the partition of the model's control topics, None while no router has placed it.

    Attributes:
        ready_details: additional fields of the readiness response.
        not_ready_reason: returns the message of the readiness response while the ingress is not ready.
        has_owner: returns whether the model has an owner. In the embedded system the owner is a task of this process.
    """

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
        self.model = model
        self.settings = settings
        self.parsers = ParserFactory(model, settings.tool_call_parser, settings.reasoning_parser)
        self.metrics = metrics
        self.ready = ready
        self.not_ready_reason: Callable[[], str] = lambda: NO_WORKER
        self.ready_details: dict[str, str] = {}
        self.has_owner: Callable[[], bool] = lambda: True
        self.drain = IngressDrain()
        self.find_partition = find_partition
        self.admission = IngressAdmission(metrics)
        self.replies = ReplyReader(log, settings.model_name, settings.reply_slot, reply_from, metrics.undecodable.inc)
        self.pools = PoolConfigurator(log, find_partition, metrics.undecodable.inc)
        self.commands = CommandClient(log, self.replies, settings.model_name, settings.reply_slot, self.require_owner)
        self.adapters = Adapters(log, self.commands, settings.model_name, settings.loras, find_partition)
        self._log = log
        limits = BodyLimits(
            text_bytes_max=settings.body_bytes_max,
            media_bytes_max=settings.media_body_bytes_max,
            takes_media=bool(model.media.ids),
            values_max=VALUES_MAX + model.context_tokens,
        )
        self.bodies = BodyMemory(limits)
        self.tokenizer_pool = TokenizerPool(model)
        self._fetcher = MediaFetcher(settings.media)

    async def run(self) -> None:
        """Dispatch responses until cancelled. Raises LogError if the log fails."""
        try:
            await self.replies.run()
        finally:
            self.adapters.close()
            await self._fetcher.close()
            self.tokenizer_pool.close()

    async def prepare(
        self, body: ChatBody | TextBody, headers: Iterable[tuple[str, str]], *, is_patient: bool = False
    ) -> PreparedRequest:
        """Validate, tokenise and hash a request. Raises ApiError: 503 for a full queue unless `is_patient`."""
        lora_name = await self.adapters.resolve(body.model)
        routing = self._routing(body.nvext, headers)
        prompt_input, parsing = await self._tokenize(body, is_patient=is_patient)
        max_tokens = self._max_tokens(body, len(prompt_input.token_ids))
        prompt = self._prompt(prompt_input, await self._block_size(), lora_name, body.cache_namespace)
        sampling = sampling_of(body, max_tokens, self.model.vocabulary_size)
        if parsing is not None and sampling.structured is not None:
            parsing = replace(parsing, structured=True)
        output = OutputPlan(body.stop_strings, parsing, sampling.logprobs, special=not body.skip_special_tokens)
        return PreparedRequest(prompt, sampling, routing, output)

    async def prepare_embedding(
        self, body: EmbeddingBody, headers: Iterable[tuple[str, str]], *, is_patient: bool = False
    ) -> list[PreparedRequest]:
        """Validate, tokenise and hash each input of an embedding request. Raises ApiError as `prepare` does."""
        lora_name = await self.adapters.resolve(body.model)
        body.require_dimensions(self.model)
        routing = self._routing(body.nvext, headers)
        context, block_size = self.model.context_tokens, await self._block_size()
        inputs = body.inputs
        chars = sum(len(text) for text in inputs if isinstance(text, str))
        parts = []
        tokenized = await self.tokenizer_pool.run(partial(self._input_tokens, inputs), chars, is_patient=is_patient)
        for index, token_ids in enumerate(tokenized):
            await asyncio.sleep(0)  # thousands of inputs must not block other requests
            if len(token_ids) > context:
                text = (
                    f"input[{index}] has {len(token_ids)} tokens, more than the context of {context} tokens; shorten it"
                )
                raise invalid(text, "input", "context_length_exceeded")
            prompt = self._prompt(ExpandedPrompt(token_ids), block_size, lora_name, body.cache_namespace, "input")
            parts.append(PreparedRequest(prompt, EMBEDDING, routing, task="embed"))
        return parts

    def _input_tokens(self, inputs: Sequence[str | list[int]]) -> list[list[int]]:
        """Return the token ids of each input. Raises ApiError for the first input that is too long."""
        return [
            one if isinstance(one, list) else self.tokenizer_pool.encode(one, f"input[{index}]", "input", special=True)
            for index, one in enumerate(inputs)
        ]

    async def _block_size(self) -> int:
        return self.settings.block_size or await self.pools.block_size(self.settings.model_name)

    def submission(
        self,
        request_id: str,
        prepared: PreparedRequest,
        *,
        reply_slot: int,
        reply_from: int,
        nonce: int,
        incarnation: str = "",
        patient: bool = False,
    ) -> RequestSubmitted:
        """Return the event that submits a request. The keyword arguments are fields of `RequestSubmitted`."""
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
            at_us=runtime.wall_us(),
            lora_name=prompt.lora_name,
            cache_namespace=prompt.cache_namespace,
            routing=prepared.routing,
            task=prepared.task,
            media=prompt.media,
            ingress_incarnation=incarnation,
            patient=patient,
        )

    async def submit(self, request_id: str, prepared: PreparedRequest) -> Stream:
        """Append a request to the log and return the stream of its response. Raises ApiError."""
        partition = self._require_free(request_id)
        event = self.submission(
            request_id,
            prepared,
            reply_slot=self.settings.reply_slot,
            reply_from=self.replies.position,
            nonce=runtime.random_int(8),
            incarnation=self.settings.incarnation,
        )
        stream = self.replies.open(request_id)
        try:
            await self._append(partition, request_id, event)
        except BaseException as error:
            self.replies.close(request_id)
            if isinstance(error, asyncio.CancelledError):  # the append continues, but nobody reads its response
                self.cancel(request_id, "the server is stopping")
            raise
        return stream

    async def query(self, request_id: str, prepared: PreparedRequest) -> RouteResponse:
        """Return which worker the router would select for a request. Raises ApiError, also if the router rejects it."""
        partition = self._require_free(request_id)
        prompt = prepared.prompt
        event = RouteQueried(
            request_id=request_id,
            model=self.settings.model_name,
            prompt_tokens=prompt.tokens,
            sequence_hashes=prompt.sequence_hashes,
            reply_slot=self.settings.reply_slot,
            tie_seed=xxh3_64_intdigest(request_id.encode()),
            at_us=runtime.wall_us(),
            lora_name=prompt.lora_name,
            routing=prepared.routing,
        )
        wait_s = min(QUERY_S, self.settings.timeout_s)
        future = self.replies.open_query(request_id)
        try:
            async with asyncio.timeout(wait_s):
                await self._append(partition, request_id, event)
                result = await future
        except TimeoutError as error:
            raise ApiError(504, "deadline_exceeded", f"no router responded within {wait_s:g} s") from error
        finally:
            self.replies.close_query(request_id)
        if isinstance(result, str):
            raise interruption(result)
        if result.error is not None:
            raise ApiError(result.error.status, result.error.code, result.error.message)
        return result

    def to_api_error(self, error: ResponseError) -> ApiError:
        """Return the response for an error on the reply slot, and update admission if a queue is full."""
        after_s = RETRY_AFTER_S
        if error.code == POOL_FULL:
            self.admission.mark_queue_full()
        if error.code in QUEUE_CODES:
            after_s = self.admission.retry_after_s
        return ApiError(error.status, error.code, error.message, retry_after_s=after_s)

    def cancel(self, request_id: str, reason: str) -> None:
        """Append the cancellation of a request."""
        event = RequestCancelled(request_id=request_id, reason=reason, at_us=runtime.wall_us())
        try:
            self._log.append_soon([_draft(self.require_partition(), request_id, event)])
        except LogError as error:
            logger.warning("cannot cancel request %s: %s", request_id, error)

    def require_partition(self) -> int:
        """Return the partition of the model's control topics. Raises ApiError while no router has placed the model."""
        partition = self.find_partition()
        if partition is None:
            raise ApiError(
                503, "no_group", f"no router serves {self.settings.model_name} yet; start a router and a worker for it"
            )
        return partition

    def require_owner(self) -> int:
        """Return the partition of the model's control topics. Raises ApiError while the model has no owner."""
        partition = self.require_partition()
        if not self.has_owner():
            raise ApiError(503, "no_owner", NO_OWNER)
        return partition

    def _require_free(self, request_id: str) -> int:
        """Return the partition of the model's control topics. Raises ApiError also if the id is in flight."""
        partition = self.require_partition()
        if request_id in self.replies:
            raise ApiError(
                409, "duplicate_request_id", f"the request id {request_id} is already in flight; use another id"
            )
        return partition

    async def _append(self, partition: int, request_id: str, event: Event) -> None:
        try:
            async with asyncio.timeout(ACKNOWLEDGED_S):
                await self._log.append([_draft(partition, request_id, event)])
        except TimeoutError as error:
            self.cancel(request_id, "log_unavailable")  # the log may still append the request after the client has gone
            text = f"Kafka did not acknowledge the request within {ACKNOWLEDGED_S:g} s; try again soon"
            raise ApiError(503, "log_unavailable", text) from error
        except LogFull as error:
            raise ApiError(503, "log_unavailable", f"{error}; try again soon") from error
        except LogError as error:
            # A failed log does not recover, so all other requests would only reach their deadline.
            self.replies.interrupt_all(str(error))
            raise ApiError(503, "log_unavailable", str(error)) from error
        except ValueError as error:
            raise ApiError(413, "request_too_large", str(error)) from error

    def _routing(self, nvext: Nvext | None, headers: Iterable[tuple[str, str]]) -> RoutingHints:
        found = routing_headers(headers)
        if self.settings.routing_hints:
            return routing_of(nvext, found)
        for name in found:
            self.metrics.headers_ignored.labels(name).inc()
        refuse_hints(nvext)
        return NO_HINTS

    async def _tokenize(
        self, body: ChatBody | TextBody, *, is_patient: bool
    ) -> tuple[ExpandedPrompt, ParseOptions | None]:
        """Return the tokens of the prompt and the options for parsing the response. Raises ApiError."""
        refs: list[MediaRef] = []
        parsing = None
        if isinstance(body, ChatBody):
            refs = body.media()
            self.model.media.require(refs)
            chars = body.size_bytes - sum(len(ref.url) for ref in refs)
            text = await self.tokenizer_pool.run(partial(self._render, body), chars, is_patient=is_patient)
            self.parsers.require(body.choice)
            encode = partial(self.tokenizer_pool.encode, text, "prompt", "messages")
            token_ids = await self.tokenizer_pool.run(encode, len(text), is_patient=is_patient)
            parsing = ParseOptions(body.choice, self.parsers.is_open(text), prompt_ids=token_ids)
        elif isinstance(body.prompt, str):
            encode = partial(
                self.tokenizer_pool.encode, body.prompt, "prompt", "prompt", special=body.add_special_tokens
            )
            token_ids = await self.tokenizer_pool.run(encode, len(body.prompt), is_patient=is_patient)
        else:
            token_ids = body.prompt
        # A prompt that exceeds the context is rejected later, so its placeholders need not be expanded.
        if not self.model.media.ids or len(token_ids) > self.model.context_tokens:
            return ExpandedPrompt(token_ids), parsing
        # Media are fetched only after the text was validated.
        return self.model.media.expand(token_ids, refs, await self._fetcher.fetch(refs)), parsing

    def _render(self, body: ChatBody) -> str:
        """Return the prompt of a chat. Raises ApiError for arguments that the template does not support."""
        arguments: dict[str, Any] = dict(body.chat_template_kwargs or {})
        if body.reasoning_effort is not None:
            if not self.model.uses_template_argument("reasoning_effort"):
                text = "reasoning_effort is not supported by the chat template of this model; leave it out"
                raise invalid(text, "reasoning_effort", "unsupported_parameter")
            arguments["reasoning_effort"] = body.reasoning_effort
        chars_max = max(RENDERED_CHARS_MAX, 4 * self.settings.body_bytes_max)
        return self.model.render(body.chat(self.model.media), body.choice.plain(), arguments, chars_max)

    def _prompt(
        self, prompt: ExpandedPrompt, block_size: int, lora_name: str, cache_namespace: str, where: str = "prompt"
    ) -> Prompt:
        """Pack and hash a prompt. Raises ApiError for an empty prompt and for unknown token ids."""
        token_ids = prompt.token_ids
        if not token_ids:
            raise invalid(f"the {where} is empty", where, "empty_prompt")
        if max(token_ids) >= self.model.vocabulary_size:
            raise invalid(
                f"token id {max(token_ids)} is not in the vocabulary; ids must be below {self.model.vocabulary_size}",
                where,
            )
        packed = pack_u32(token_ids)
        named = mm_hashes(prompt.media, block_size)
        hashes = sequence_hashes(packed, block_size, hash_seed(lora_name, cache_namespace), named)
        return Prompt(packed, hashes, len(token_ids), lora_name, cache_namespace, prompt.media)

    def _max_tokens(self, body: CompletionBody, prompt_tokens: int) -> int:
        """Return the maximum number of output tokens. Raises ApiError if they do not fit into the context."""
        context = self.model.context_tokens
        max_tokens = body.tokens_max
        if max_tokens is None:
            max_tokens = max(1, min(self.settings.max_tokens_default, context - prompt_tokens))
        if prompt_tokens + max_tokens > context:
            text = f"{prompt_tokens} prompt tokens and max_tokens {max_tokens} exceed the context of {context} tokens"
            raise invalid(text, "max_tokens", "context_length_exceeded")
        return max_tokens


def _draft(partition: int, request_id: str, event: Event) -> Draft:
    return Draft(REQUESTS.name, partition, encode(REQUESTS, event), request_id.encode())
