"""One ingress: requests onto the log, and their answers back off it. Knows nothing of HTTP."""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from xxhash import xxh3_64_intdigest

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

ACKNOWLEDGED_S = 5.0  # a broker that is well takes milliseconds; beyond it the client may as well ask again
GRACE_S = 5.0  # the owner's deadline comes first; this one catches an owner that is gone
QUERY_S = 10.0  # where a request would go: longer than a take-over, and later nobody wants to know
ADAPTER_CHARS_MAX = 256  # what an event takes for a name


@dataclass(frozen=True, slots=True)
class IngressSettings:
    """What an ingress is told.

    Attributes:
        model_name: the one model it serves.
        ingress_id: names this process.
        incarnation: Of its lease, which tells it from an earlier process of the same id; empty if it takes none.
        block_size: tokens a KV block, as the pool has it; None reads that off the log.
        reply_slot: the partition of `tokens` that it reads.
        body_bytes_max: bytes of a request body beside images and videos; larger bodies get 413.
        media_body_bytes_max: bytes of a whole request body, if the model takes images or videos.
        timeout_s: for a whole request.
        max_tokens_default: for requests that do not say.
        routing_hints: whether clients may say which worker, priority, session or policy class; else such headers are
            ignored and counted, and such fields refused.
        loras: the adapters that are served as models of their own, whatever workers say; others when one has them.
        admin_token: what clients of the admin API send; empty without an admin API.
        tool_call_parser: finds tool calls in answers: `auto` (by the chat template), `none`, or its name.
        reasoning_parser: likewise finds reasoning.
        media: from where images and videos may be fetched.
        reply_topics: patterns of full topic names that the Kafka API responds to; `<namespace>.replies.*` when empty.
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
    media: tuple[Media, ...] = ()


PLAIN = OutputPlan()
EMBEDDING = Sampling(max_tokens=1, temperature=0.0)  # nothing is generated, so one embedding is like another


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A valid request: all that goes on the log, but for its name and where its answer goes.

    `plan` is how its answer is put into words.
    """

    prompt: Prompt
    sampling: Sampling
    routing: RoutingHints
    plan: OutputPlan = PLAIN
    task: Task = "generate"


NO_OWNER = "no router decides at the moment: its owner is being replaced, or Kafka does not answer; try again soon"
QUEUE_CODES = frozenset({POOL_FULL, "queue_full", "queue_timeout"})
NO_WORKER = "no worker is ready"
NO_PREFILL_WORKER = "no worker that computes prompts is ready, and prompts must not be computed by who answers"


class Ingress:
    """Submits requests and listens for their answers on one reply slot, from the offset `reply_from` on.

    `place` gives the partition of the model's control topics, None while no router has placed it. `told_ready` is what
    readiness says beside that it is so, `why_not_ready` what it says when it is not. `has_owner` returns whether an
    owner decides now; in the embedded system it is a task of this process, which ends with it.
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
        self.parsing = ParserFactory(model, settings.tool_call_parser, settings.reasoning_parser)
        self.metrics = metrics
        self.ready = ready
        self.why_not_ready: Callable[[], str] = lambda: NO_WORKER
        self.told_ready: dict[str, str] = {}
        self.has_owner: Callable[[], bool] = lambda: True
        self.drain = IngressDrain()
        self.place = place
        self.admission = IngressAdmission(metrics)
        self.replies = ReplyReader(log, settings.model_name, settings.reply_slot, reply_from, metrics.undecodable.inc)
        self.thresholds = PoolConfigurator(log, place, metrics.undecodable.inc)
        self.commands = CommandClient(log, self.replies, settings.model_name, settings.reply_slot, self.require_owner)
        self.adapters = Adapters(log, self.commands, settings.model_name, settings.loras, place)
        self._log = log
        limits = BodyLimits(
            text_bytes_max=settings.body_bytes_max,
            media_bytes_max=settings.media_body_bytes_max,
            takes_media=bool(model.media.ids),
            values_max=VALUES_MAX + model.context_tokens,
        )
        self.bodies = BodyMemory(limits)
        self.tokeniser = TokenizerPool(model)
        self._fetcher = MediaFetcher(settings.media)

    async def run(self) -> None:
        """Dispatch answers until cancelled. Raises LogError when the log fails."""
        try:
            await self.replies.run()
        finally:
            self.adapters.close()
            await self._fetcher.close()
            self.tokeniser.close()

    async def prepare(
        self, body: ChatBody | TextBody, headers: Iterable[tuple[str, str]], *, is_patient: bool = False
    ) -> PreparedRequest:
        """Tokenise, hash and check a request. Raises ApiError, 503 for a full tokenizer queue unless `is_patient`."""
        lora_name = await self.adapters.of(body.model)
        routing = self._routing(body.nvext, headers)
        asked, parsing = await self._asked(body, is_patient=is_patient)
        wanted = self._wanted(body, len(asked.token_ids))
        prompt = self._prompt(asked, await self._block_size(), lora_name, body.cache_namespace)
        sampling = sampling_of(body, wanted, self.model.vocabulary_size)
        if parsing is not None and sampling.structured is not None:
            parsing = replace(parsing, structured=True)
        plan = OutputPlan(body.stop_strings, parsing, sampling.logprobs, special=not body.skip_special_tokens)
        return PreparedRequest(prompt, sampling, routing, plan)

    async def prepare_embedding(
        self, body: EmbeddingBody, headers: Iterable[tuple[str, str]], *, is_patient: bool = False
    ) -> list[PreparedRequest]:
        """As `prepare`, for each input of an embedding request."""
        lora_name = await self.adapters.of(body.model)
        body.require_dimensions(self.model)
        routing = self._routing(body.nvext, headers)
        context, block_size = self.model.context_tokens, await self._block_size()
        inputs = body.inputs
        chars = sum(len(given) for given in inputs if isinstance(given, str))
        parts = []
        found = await self.tokeniser.run(partial(self._input_tokens, inputs), chars, is_patient=is_patient)
        for index, token_ids in enumerate(found):
            await asyncio.sleep(0)  # thousands of inputs must not hold up others
            if len(token_ids) > context:
                text = f"input[{index}] has {len(token_ids)} tokens, but the context holds {context}"
                raise invalid(text, "input", "context_length_exceeded")
            prompt = self._prompt(ExpandedPrompt(token_ids), block_size, lora_name, body.cache_namespace, "input")
            parts.append(PreparedRequest(prompt, EMBEDDING, routing, task="embed"))
        return parts

    def _input_tokens(self, inputs: Sequence[str | list[int]]) -> list[list[int]]:
        """The token ids of each input of an embedding request. Raises ApiError for the first that is too long."""
        return [
            given if isinstance(given, list) else self.tokeniser.encode(given, f"input[{index}]", "input", special=True)
            for index, given in enumerate(inputs)
        ]

    async def _block_size(self) -> int:
        return self.settings.block_size or await self.thresholds.block_size(self.settings.model_name)

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
        """A request as it goes on the log; the last four are as in `RequestSubmitted`."""
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
            task=prepared.task,
            media=prompt.media,
            ingress_incarnation=incarnation,
            patient=patient,
        )

    async def submit(self, request_id: str, prepared: PreparedRequest) -> Stream:
        """Put a request on the log and listen for its answer. Raises ApiError."""
        partition = self._require_free(request_id)
        event = self.submission(
            request_id,
            prepared,
            reply_slot=self.settings.reply_slot,
            reply_from=self.replies.position,
            nonce=int.from_bytes(os.urandom(8), "little"),
            incarnation=self.settings.incarnation,
        )
        stream = self.replies.open(request_id)
        try:
            await self._put(partition, request_id, event)
        except BaseException as error:
            self.replies.close(request_id)
            if isinstance(error, asyncio.CancelledError):  # the append goes on, and nobody waits for its response
                self.cancel(request_id, "the server is stopping")
            raise
        return stream

    async def query(self, request_id: str, prepared: PreparedRequest) -> RouteResponse:
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
            raise interruption(told)
        if told.error is not None:
            raise ApiError(told.error.status, told.error.code, told.error.message)
        return told

    def error_of(self, error: ResponseError) -> ApiError:
        """What a client is told of an error on the reply slot; admission learns from it whether the queue is full."""
        after_s = RETRY_AFTER_S
        if error.code == POOL_FULL:
            self.admission.queue_full()
        if error.code in QUEUE_CODES:
            after_s = self.admission.retry_after_s
        return ApiError(error.status, error.code, error.message, retry_after_s=after_s)

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

    def require_owner(self) -> int:
        """Return the partition of the model's control topics. Raises ApiError while nobody would decide a request."""
        partition = self.require_place()
        if not self.has_owner():
            raise ApiError(503, "no_owner", NO_OWNER)
        return partition

    def _require_free(self, request_id: str) -> int:
        """As `require_place`. Raises ApiError also when the id is under way."""
        partition = self.require_place()
        if request_id in self.replies:
            raise ApiError(409, "duplicate_request_id", f"the request id {request_id} is under way")
        return partition

    async def _put(self, partition: int, request_id: str, event: Event) -> None:
        try:
            async with asyncio.timeout(ACKNOWLEDGED_S):
                await self._log.append([_draft(partition, request_id, event)])
        except TimeoutError as error:
            self.cancel(request_id, "log_unavailable")  # the log may take the request later, when nobody waits for it
            text = f"Kafka did not acknowledge the request within {ACKNOWLEDGED_S:g} s; try again soon"
            raise ApiError(503, "log_unavailable", text) from error
        except LogFull as error:
            raise ApiError(503, "log_unavailable", f"{error}; try again soon") from error
        except LogError as error:
            # A log that failed stays failed: the others would wait for their deadline in vain.
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

    async def _asked(
        self, body: ChatBody | TextBody, *, is_patient: bool
    ) -> tuple[ExpandedPrompt, ParseOptions | None]:
        """The tokens of the prompt, and what is looked for in the answer. Raises ApiError."""
        refs: list[MediaRef] = []
        parsing = None
        if isinstance(body, ChatBody):
            refs = body.media()
            self.model.media.require(refs)
            chars = body.size_bytes - sum(len(ref.url) for ref in refs)
            text = await self.tokeniser.run(partial(self._render, body), chars, is_patient=is_patient)
            self.parsing.require(body.choice)
            encode = partial(self.tokeniser.encode, text, "prompt", "messages")
            token_ids = await self.tokeniser.run(encode, len(text), is_patient=is_patient)
            parsing = ParseOptions(body.choice, self.parsing.is_open(text), prompt_ids=token_ids)
        elif isinstance(body.prompt, str):
            encode = partial(self.tokeniser.encode, body.prompt, "prompt", "prompt", special=body.add_special_tokens)
            token_ids = await self.tokeniser.run(encode, len(body.prompt), is_patient=is_patient)
        else:
            token_ids = body.prompt
        # Looking for placeholders in more tokens would take time and lead to the same end.
        if not self.model.media.ids or len(token_ids) > self.model.context_tokens:
            return ExpandedPrompt(token_ids), parsing
        # What is wrong with the text is said before others are asked for anything.
        return self.model.media.expand(token_ids, refs, await self._fetcher.fetch(refs)), parsing

    def _render(self, body: ChatBody) -> str:
        """The prompt of a chat. Raises ApiError for what its template does not take."""
        arguments: dict[str, Any] = dict(body.chat_template_kwargs or {})
        if body.reasoning_effort is not None:
            if not self.model.takes_argument("reasoning_effort"):
                text = "reasoning_effort is not supported: the chat template of this model has no use for it"
                raise invalid(text, "reasoning_effort", "unsupported_parameter")
            arguments["reasoning_effort"] = body.reasoning_effort
        chars_max = max(RENDERED_CHARS_MAX, 4 * self.settings.body_bytes_max)
        return self.model.render(body.chat(self.model.media), body.choice.plain(), arguments, chars_max)

    def _prompt(
        self, asked: ExpandedPrompt, block_size: int, lora_name: str, cache_namespace: str, where: str = "prompt"
    ) -> Prompt:
        """Pack and hash a prompt. Raises ApiError for an empty one and for ids outside of the vocabulary."""
        token_ids = asked.token_ids
        if not token_ids:
            raise invalid(f"the {where} is empty", where, "empty_prompt")
        if max(token_ids) >= self.model.vocabulary_size:
            raise invalid(f"token ids lie below {self.model.vocabulary_size} in this model", where)
        packed = pack_u32(token_ids)
        named = mm_hashes(asked.media, block_size)
        hashes = sequence_hashes(packed, block_size, hash_seed(lora_name, cache_namespace), named)
        return Prompt(packed, hashes, len(token_ids), lora_name, cache_namespace, asked.media)

    def _wanted(self, body: CompletionBody, prompt_tokens: int) -> int:
        """How many tokens to generate. Raises ApiError when the context is too short; nothing was hashed by then."""
        context = self.model.context_tokens
        wanted = body.tokens_max
        if wanted is None:
            wanted = max(1, min(self.settings.max_tokens_default, context - prompt_tokens))
        if prompt_tokens + wanted > context:
            text = (
                f"the context holds {context} tokens: {prompt_tokens} of the prompt and {wanted} to generate do not fit"
            )
            raise invalid(text, "max_tokens", "context_length_exceeded")
        return wanted


def _draft(partition: int, request_id: str, event: Event) -> Draft:
    return Draft(REQUESTS.name, partition, encode(REQUESTS, event), request_id.encode())
