"""The route `/v1/completions`: reads a request, runs its prompts, and writes the response of the imitated server."""

import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from forebay.events.requests import Sampling
from forebay.ingress.model import Decoder, Model
from tests.harness.openai_server.cache import Prefix
from tests.harness.openai_server.engine import Delta, EngineRequest, StandInEngine
from tests.harness.openai_server.protocol import ApiFailure, CompletionBody, error_body, invalid
from tests.harness.openai_server.settings import Faults, ServerSettings
from tests.harness.openai_server.tokens import structure_of

FINGERPRINT = "vllm-0.32.0-standin"
LOGPROB = -0.7  # of the generated token, as with a mock engine; each further token is as much less likely


class StreamCut(Exception):
    """The connection of a stream is closed, by a fault."""


class StopText:
    """Decodes output tokens, and finds stop strings."""

    def __init__(self, decoder: Decoder, stops: Sequence[str]) -> None:
        self._decoder = decoder
        self._stops = stops
        self._held = max((len(stop) - 1 for stop in stops), default=0)  # characters that may begin a stop string
        self._text = ""
        self._taken = 0
        self._end: int | None = None

    def push(self, token_ids: list[int], *, has_ended: bool) -> str | None:
        """Add tokens. Return the stop string that the output contains now, without which it ends."""
        before = max(0, len(self._text) - self._held)
        self._text += self._decoder.push(token_ids)
        for stop in self._stops:
            at = self._text.find(stop, before)
            if at >= 0:
                self._end = at
                return stop
        if has_ended:
            self._end = len(self._text)
        return None

    def take(self) -> str:
        """Return the new text. The end that may be the beginning of a stop string is returned later."""
        end = max(self._taken, len(self._text) - self._held) if self._end is None else self._end
        text = self._text[self._taken : end]
        self._taken = end
        return text


@dataclass(slots=True)
class Choice:
    """Response to one prompt.

    Attributes:
        text: text of the output, up to a stop string.
        cached_tokens: cached prompt tokens, as `usage` reports them.
        stop_reason: stop string or stop token that ended the output.
    """

    index: int
    prompt: list[int]
    request: EngineRequest
    text: StopText
    token_ids: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    transfer: dict[str, Any] | None = None


class Completion:
    """One request to `/v1/completions`.

    Args:
        request_id: id that the client gave; None for none.

    Raises:
        ApiFailure: the request is invalid.
    """

    def __init__(
        self,
        settings: ServerSettings,
        model: Model,
        engine: StandInEngine,
        faults: Callable[[], Faults],
        *,
        body: CompletionBody,
        request_id: str | None,
        model_name: str,
        lora: tuple[str, int] | None,
    ) -> None:
        self._settings = settings
        self._model = model
        self._engine = engine
        self._faults = faults
        self._body = body
        self._is_vllm = settings.flavor == "vllm"
        self._client_id = uuid.uuid4().hex if request_id is None else request_id
        self._id = f"cmpl-{self._client_id}" if self._is_vllm or request_id is None else request_id
        self._created = int(time.time())
        self._model_name = model_name
        self._shows_ids = bool(body.return_token_ids) and settings.flavor != "plain" and not faults().without_token_ids
        if body.n != 1 or body.echo:
            raise ApiFailure(400, "the stand-in supports neither `echo` nor `n` other than 1")
        self._choices = [self._choice(at, prompt, lora) for at, prompt in enumerate(self._prompts())]

    def _prompts(self) -> list[list[int]]:
        prompt = self._body.prompt
        if isinstance(prompt, str):
            prompts: Sequence[Any] = [prompt]
        else:
            assert prompt is not None
            prompts = [prompt] if prompt and isinstance(prompt[0], int) else prompt
        if self._settings.flavor == "plain" and not all(isinstance(one, str) for one in prompts):
            raise ApiFailure(400, "prompt must be a string", "invalid_request_error", "prompt")
        if not prompts:
            raise ApiFailure(400, "You must pass at least one prompt")
        special = self._body.add_special_tokens
        found = [self._model.encode(one, special=special) if isinstance(one, str) else list(one) for one in prompts]
        longest, most = self._engine.max_model_len, self._body.max_tokens or 0
        if most > longest:
            message = (
                f"max_tokens={most} cannot be greater than max_model_len={longest}. Please request fewer output tokens."
            )
            raise invalid(message, "max_tokens", most)
        for one in found:
            if len(one) > longest:
                message = (
                    f"This model's maximum context length is {longest} tokens. However, your prompt contains {len(one)}"
                    " input tokens, which exceeds this limit even without any output tokens. Please reduce the length"
                    " of the input prompt."
                )
                raise invalid(message, "input_tokens", len(one))
            if not one:
                raise ApiFailure(400, "The decoder prompt cannot be empty", param="prompt")
            if max(one) >= self._model.vocabulary_size:
                raise ApiFailure(400, f"Token id {max(one)} is out of vocabulary")
        return found

    def _choice(self, index: int, prompt: list[int], lora: tuple[str, int] | None) -> Choice:
        body = self._body
        most = min(body.max_tokens or 0, self._engine.max_model_len - len(prompt))
        if most < 1:
            raise invalid(f"max_tokens must be at least 1, got {most}.", "max_tokens", most)
        if body.min_tokens > most:
            text = f"min_tokens must be less than or equal to max_tokens={most}, got {body.min_tokens}."
            raise ApiFailure(400, text)
        sampling = Sampling(
            max_tokens=most,
            min_tokens=body.min_tokens,
            temperature=1.0 if body.temperature is None else body.temperature,
            seed=body.seed,
            ignore_eos=body.ignore_eos,
            stop_token_ids=tuple(body.stop_token_ids or ()),
            structured=structure_of(body.model_dump(include={"structured_outputs", "response_format"})),
        )
        request = EngineRequest(
            request_id=f"{self._id}-{index}-{uuid.uuid4().hex[:8]}",
            client_id=self._client_id,
            prompt=prompt,
            sampling=sampling,
            prefix=Prefix(body.cache_salt or "", *(lora or ())),
            priority=body.priority,
            transfer=body.kv_transfer_params,
        )
        stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
        hides = body.skip_special_tokens
        return Choice(index, prompt, request, StopText(self._model.decoder(() if hides else None), stops))

    async def stream(self) -> AsyncIterator[str]:
        """Yield the events of a stream. Raises StreamCut if a fault closes the connection."""
        options = self._body.stream_options
        for choice in self._choices:
            is_first = True
            offset = 0
            async for text, ids in self._run(choice):
                if choice.finish_reason == "error":
                    failure = ApiFailure(500, "Internal server error", "InternalServerError")
                    yield _event(error_body(self._settings.flavor, failure))
                    yield "data: [DONE]\n\n"
                    return
                chunk = self._chunk(choice, text, ids, offset)
                offset += sum(len(token) for token in (chunk["choices"][0]["logprobs"] or {}).get("tokens", ()))
                if self._shows_ids:
                    chunk["choices"][0]["prompt_token_ids"] = choice.prompt if is_first else None
                if options is not None and options.continuous_usage_stats:
                    chunk["usage"] = self._usage([choice], details=False)
                if choice.finish_reason is not None and not (options is not None and options.include_usage):
                    chunk |= self._fingerprint()
                is_first = False
                yield _event(chunk)
                cut = self._faults().cut_after_tokens
                if cut is not None and len(choice.token_ids) >= cut:
                    raise StreamCut
        if options is not None and options.include_usage:
            usage = self._usage(self._choices, details=True)
            yield _event({**self._head(), "choices": [], "usage": usage, **self._fingerprint()})
        yield "data: [DONE]\n\n"

    async def response(self) -> dict[str, Any]:
        """Return the whole response. Raises ApiFailure if the KV of a prompt could not be fetched."""
        texts = []
        for choice in self._choices:
            texts.append("".join([text async for text, _ in self._run(choice)]))
            if choice.finish_reason == "error":
                raise ApiFailure(500, "Internal server error", "InternalServerError")
        choices = [
            self._choice_body(choice, text, choice.token_ids, 0)
            for choice, text in zip(self._choices, texts, strict=True)
        ]
        body = {**self._head(), "choices": choices, "usage": self._usage(self._choices, details=True)}
        if self._is_vllm:
            for choice, written in zip(self._choices, choices, strict=True):
                written |= {
                    "token_ids": choice.token_ids if self._shows_ids else None,
                    "prompt_logprobs": None,
                    "prompt_token_ids": choice.prompt if self._shows_ids else None,
                    "routed_experts": None,
                }
            details = body["usage"].setdefault("prompt_tokens_details", None)
            if details is not None:
                details |= {"created_cache_tokens": None, "multimodal_tokens": None}
            body["usage"]["completion_tokens_details"] = None
            body |= {"service_tier": None, **self._fingerprint(), "kv_transfer_params": self._choices[0].transfer}
            body |= {"ec_transfer_params": None, "metrics": None}
        elif self._settings.flavor == "sglang":
            body["metadata"] = {"weight_version": "default"}
            for choice, written in zip(self._choices, choices, strict=True):
                if self._shows_ids:
                    written["prompt_token_ids"] = choice.prompt
        return body

    async def _run(self, choice: Choice) -> AsyncGenerator[tuple[str, list[int]], None]:
        """Yield text and tokens of each chunk of a response, and update the choice before."""
        pending: list[int] = []
        async with aclosing(self._engine.generate(choice.request)) as deltas:
            async for delta in deltas:
                self._apply(choice, delta)
                pending += delta.token_ids
                stopped = choice.text.push(delta.token_ids, has_ended=delta.finish_reason is not None)
                if stopped is not None and len(choice.token_ids) >= self._body.min_tokens:
                    choice.finish_reason, choice.stop_reason = "stop", stopped
                is_first = len(choice.token_ids) == len(pending)
                if is_first or choice.finish_reason is not None or len(pending) >= self._settings.chunk_tokens:
                    text = choice.text.take()
                    yield text, pending
                    pending = []
                if choice.finish_reason is not None:
                    return

    def _apply(self, choice: Choice, delta: Delta) -> None:
        choice.token_ids += delta.token_ids
        choice.cached_tokens = delta.cached_tokens
        choice.finish_reason = delta.finish_reason
        choice.stop_reason = delta.stop_reason
        choice.transfer = delta.transfer

    def _chunk(self, choice: Choice, text: str, ids: list[int], offset: int) -> dict[str, Any]:
        written = self._choice_body(choice, text, ids, offset)
        if self._is_vllm:
            written |= {"prompt_token_ids": None, "token_ids": ids if self._shows_ids else None}
        usage = {"usage": None} if self._settings.flavor == "sglang" else {}
        return {**self._head(), "choices": [written], **usage}

    def _choice_body(self, choice: Choice, text: str, ids: list[int], offset: int) -> dict[str, Any]:
        body: dict[str, Any] = {
            "index": choice.index,
            "text": text,
            "logprobs": None if self._body.logprobs is None else self._logprobs(ids, self._body.logprobs, offset),
            "finish_reason": choice.finish_reason,
        }
        if self._settings.flavor == "plain":
            return body
        body["stop_reason" if self._is_vllm else "matched_stop"] = choice.stop_reason
        if self._shows_ids and not self._is_vllm:
            body["token_ids"] = ids
        return body

    def _logprobs(self, ids: list[int], count: int, offset: int) -> dict[str, Any]:
        tokens = [self._token(token_id) for token_id in ids]
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        return {
            "text_offset": offsets,
            "token_logprobs": [LOGPROB] * len(ids),
            "tokens": tokens,
            "top_logprobs": [self._top(token_id, max(1, count)) for token_id in ids],
        }

    def _top(self, token_id: int, count: int) -> dict[str, float]:
        """Return the most likely tokens at a position: the generated one, then others, as with a mock engine."""
        others = (other for other in self._engine.vocabulary if other != token_id)
        likeliest = [token_id, *(other for other, _ in zip(others, range(count - 1), strict=False))]
        return {self._token(other): LOGPROB * (at + 1) for at, other in enumerate(likeliest)}

    def _token(self, token_id: int) -> str:
        if self._body.return_tokens_as_token_ids and self._is_vllm:
            return f"token_id:{token_id}"
        text: str = self._model.tokenizer.decode([token_id], skip_special_tokens=False)
        return text

    def _head(self) -> dict[str, Any]:
        return {"id": self._id, "object": "text_completion", "created": self._created, "model": self._model_name}

    def _fingerprint(self) -> dict[str, Any]:
        return {"system_fingerprint": FINGERPRINT} if self._is_vllm else {}

    def _usage(self, choices: list[Choice], *, details: bool) -> dict[str, Any]:
        prompt_tokens = sum(len(choice.prompt) for choice in choices)
        output_tokens = sum(len(choice.token_ids) for choice in choices)
        usage: dict[str, Any] = {
            "prompt_tokens": prompt_tokens,
            "total_tokens": prompt_tokens + output_tokens,
            "completion_tokens": output_tokens,
        }
        if details and self._settings.prompt_tokens_details and self._settings.flavor != "plain":
            usage["prompt_tokens_details"] = {"cached_tokens": choices[-1].cached_tokens}
        return usage


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"
