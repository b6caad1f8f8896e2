"""One ingress: requests onto the log, and their answers back off it. Knows nothing of HTTP."""

import asyncio
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from forebay.core.blocks import sequence_hashes
from forebay.events.base import Event, pack_u32
from forebay.events.codec import encode
from forebay.events.requests import RequestCancelled, RequestSubmitted, Sampling
from forebay.events.topics import REQUESTS
from forebay.ingress.errors import ApiError, invalid
from forebay.ingress.metrics import IngressMetrics
from forebay.ingress.model import Model
from forebay.ingress.openai import CompletionBody
from forebay.ingress.streams import ReplyReader, Stream
from forebay.transport.base import Draft, Log, LogError

logger = logging.getLogger(__name__)

INLINE_CHARS_MAX = 8_000  # longer texts are tokenised in a thread: milliseconds that other requests do not wait
TOKENISER_THREADS = 2
GRACE_S = 5.0  # the owner's deadline comes first; this one catches an owner that is gone


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
    """

    model_name: str
    block_size: int
    ingress_id: str
    reply_slot: int = 0
    body_bytes_max: int = 48 << 20
    timeout_s: float = 600.0
    max_tokens_default: int = 256


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt in packed u32 token ids and packed u64 sequence hashes."""

    token_ids: bytes
    sequence_hashes: bytes
    tokens: int


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
        self._log = log
        self._threads = ThreadPoolExecutor(TOKENISER_THREADS, "tokenise")

    async def run(self) -> None:
        """Dispatch answers until cancelled. Raises LogError when the log fails."""
        try:
            await self.replies.run()
        finally:
            self._threads.shutdown(wait=False, cancel_futures=True)

    async def tokenise(self, text: str) -> list[int]:
        """Token ids of a text; long texts do not hold up others."""
        if len(text) <= INLINE_CHARS_MAX:
            return self.model.encode(text)
        return await asyncio.get_running_loop().run_in_executor(self._threads, self.model.encode, text)

    def prompt(self, token_ids: list[int]) -> Prompt:
        """Pack and hash a prompt. Raises ApiError for an empty one and for ids outside of the vocabulary."""
        if not token_ids:
            raise invalid("the prompt is empty", "prompt", "empty_prompt")
        if max(token_ids) >= self.model.vocabulary_size:
            raise invalid(f"token ids lie below {self.model.vocabulary_size} in this model", "prompt")
        packed = pack_u32(token_ids)
        return Prompt(packed, sequence_hashes(packed, self.settings.block_size), len(token_ids))

    def sampling(self, body: CompletionBody, prompt: Prompt) -> Sampling:
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

    def submission(
        self, request_id: str, prompt: Prompt, sampling: Sampling, *, reply_slot: int, reply_from: int, nonce: int
    ) -> RequestSubmitted:
        """A request as it goes on the log; the last three are as in `RequestSubmitted`."""
        settings = self.settings
        return RequestSubmitted(
            request_id=request_id,
            model=settings.model_name,
            token_ids=prompt.token_ids,
            sequence_hashes=prompt.sequence_hashes,
            reply_slot=reply_slot,
            timeout_us=max(1, round(settings.timeout_s * 1e6)),
            tie_seed=xxh3_64_intdigest(request_id.encode()),
            sampling=sampling,
            nonce=nonce,
            reply_from=reply_from,
            ingress_id=settings.ingress_id,
            at_us=time.time_ns() // 1000,
        )

    async def submit(self, request_id: str, prompt: Prompt, sampling: Sampling) -> Stream:
        """Put a request on the log and listen for its answer. Raises ApiError."""
        partition = self.require_place()
        if request_id in self.replies:
            raise ApiError(409, "duplicate_request_id", f"the request id {request_id} is under way")
        event = self.submission(
            request_id,
            prompt,
            sampling,
            reply_slot=self.settings.reply_slot,
            reply_from=self.replies.position,
            nonce=int.from_bytes(os.urandom(8), "little"),
        )
        stream = self.replies.open(request_id)
        submitted = False
        try:
            await self._log.append([_draft(partition, request_id, event)])
            submitted = True
        except LogError as error:
            # A log that failed stays failed: the others would wait for their deadline in vain.
            self.replies.interrupt_all(str(error))
            raise ApiError(503, "log_unavailable", str(error)) from error
        except ValueError as error:
            raise ApiError(413, "request_too_large", str(error)) from error
        finally:
            if not submitted:
                self.replies.close(request_id)
        return stream

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


def _draft(partition: int, request_id: str, event: Event) -> Draft:
    return Draft(REQUESTS.name, partition, encode(REQUESTS, event), request_id.encode())
