"""Encode OpenAI's completion objects as JSON. The constant parts of stream chunks are encoded once per response."""

from collections.abc import Sequence
from typing import Any

import msgspec

from forebay.events.decisions import RouteAnswered, ScoredCandidate
from forebay.events.rendering import Rendering
from forebay.events.tokens import RouteResponse, Usage
from forebay.ingress.formatter import Formatter, ServingInfo, StreamEvent, WholeChoice, logprob_of
from forebay.ingress.openai.requests import CompletionOptions
from forebay.ingress.parsers.deltas import DecodedLogprob, OutputDelta, ToolCallDelta, merge_deltas

_encode = msgspec.json.encode


class CompletionFormatter(Formatter):
    """Encodes the response to a chat or text completion."""

    done = b"data: [DONE]\n\n"

    def __init__(self, rendering: Rendering, response_id: str) -> None:
        super().__init__(rendering, response_id)
        options = msgspec.json.decode(rendering.options or "{}", type=CompletionOptions)
        self._chat = chat = rendering.api == "chat_completions"
        self._names_worker = options.names_worker
        self._includes_usage = options.includes_usage
        self.counts_each_event = options.counts_each_chunk
        self.needs_tokens = options.returns_tokens
        kind = "chat.completion" if chat else "text_completion"
        self._head = {"id": response_id, "object": kind, "created": rendering.created_s, "model": rendering.model}
        self._chunk_head = dict(self._head, object="chat.completion.chunk" if chat else kind)
        self._opened = _encode(self._chunk_head)[:-1] + b',"choices":[{"index":'
        self._shut = (b"}" if chat else b"") + b',"logprobs":null,"finish_reason":null}]}'
        # By choice, what precedes the text of its next chunk (empty before the first), and the length of its tokens.
        self._opens = [b""] * rendering.parts
        self._offsets = [0] * rendering.parts

    def delta(self, index: int, delta: OutputDelta) -> list[StreamEvent]:
        """Return the chunk for a part of the output. The first chunk of a choice of a chat contains the role."""
        opens = self._opens[index]
        if is_first := not opens:
            opened = self._opened + b"%d," % index
            self._opens[index] = opened + (b'"delta":{"content":' if self._chat else b'"text":')
            opens = opened + b'"delta":{"role":"assistant","content":' if self._chat else self._opens[index]
        if not (delta.reasoning or delta.calls or delta.logprobs or delta.token_ids):
            return [StreamEvent(opens + _encode(delta.content) + self._shut)]
        content: dict[str, Any] = {"text": delta.content, **self._tokens(delta)}
        if self._chat:
            fields: dict[str, Any] = {"role": "assistant", "content": ""} if is_first else {}
            if delta.content:
                fields["content"] = delta.content
            if delta.calls:
                fields["tool_calls"] = [_call_delta(call) for call in delta.calls]
            content = {"delta": fields | _reasoning(delta)}
        choice = {"index": index, **content, "logprobs": self._logprobs(index, delta), "finish_reason": None}
        return [StreamEvent(_encode({**self._chunk_head, "choices": [choice]}))]

    def close(self, index: int, reason: str, served: ServingInfo) -> list[StreamEvent]:
        """Return the chunk after the output, with the finish reason and the extensions `forebay` and `nvext`."""
        content: dict[str, Any] = {"delta": {}} if self._chat else {"text": ""}
        choice = {"index": index, **content, "logprobs": None, "finish_reason": reason}
        return [StreamEvent(_encode({**self._chunk_head, "choices": [choice], **self._extensions([served])}))]

    def finish(self, usage: Usage) -> list[StreamEvent]:
        """Return the chunk with the token counts, if `stream_options.include_usage` requests it."""
        if not self._includes_usage:
            return []
        return [StreamEvent(_encode({**self._chunk_head, "choices": [], "usage": usage_of(usage)}))]

    def with_usage(self, data: bytes, usage: Usage) -> bytes:
        return data[:-1] + b',"usage":' + _encode(usage_of(usage)) + b"}"

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        listed = [self._choice(index, merge_deltas(one.deltas), one.reason) for index, one in enumerate(choices)]
        extensions = self._extensions([one.served for one in choices])
        return _encode({**self._head, "choices": listed, "usage": usage_of(usage), **extensions})

    def _choice(self, index: int, delta: OutputDelta, reason: str) -> dict[str, Any]:
        content: dict[str, Any] = {"text": delta.content, **self._tokens(delta)}
        if self._chat:
            message: dict[str, Any] = {"role": "assistant", "content": delta.content, "refusal": None}
            message |= _reasoning(delta)
            if delta.calls:
                message |= {"content": delta.content or None, "tool_calls": [_call(call) for call in delta.calls]}
            content = {"message": message}
        return {"index": index, **content, "logprobs": self._logprobs(index, delta), "finish_reason": reason}

    def _tokens(self, delta: OutputDelta) -> dict[str, Any]:
        return {"token_ids": delta.token_ids} if self.needs_tokens else {}

    def _logprobs(self, index: int, delta: OutputDelta) -> dict[str, Any] | None:
        if not delta.logprobs:
            return None
        if self._chat:
            return {"content": [logprob_of(one) for one in delta.logprobs], "refusal": None}
        offsets = []
        for one in delta.logprobs:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(one.text)
        return {
            "text_offset": offsets,
            "tokens": [_name(one) for one in delta.logprobs],
            "token_logprobs": [one.logprob for one in delta.logprobs],
            # Of several tokens with one name, the most likely one comes first, and counts.
            "top_logprobs": [{_name(top): top.logprob for top in reversed(one.top)} for one in delta.logprobs],
        }

    def _extensions(self, served: Sequence[ServingInfo]) -> dict[str, Any]:
        """Return the extensions `forebay` and `nvext`. With several choices, `nvext` is about the first one."""
        first, *others = served
        nvext = {"nvext": {"worker_id": first.worker_id()}} if self._names_worker else {}
        plain = {"choices": [one.plain() for one in served]} if others else first.plain()
        return {"forebay": plain, **nvext}


def _reasoning(delta: OutputDelta) -> dict[str, str]:
    """Return reasoning under both names that clients use."""
    return {"reasoning_content": delta.reasoning, "reasoning": delta.reasoning} if delta.reasoning else {}


def _call(call: ToolCallDelta) -> dict[str, Any]:
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _call_delta(call: ToolCallDelta) -> dict[str, Any]:
    if call.name:
        return {"index": call.index, **_call(call)}
    return {"index": call.index, "function": {"arguments": call.arguments}}


def _name(one: DecodedLogprob) -> str:
    """Return the text of a token, or `bytes:` and its bytes if it is a part of a character, as OpenAI does."""
    try:
        return one.token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in one.token)


def usage_of(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def route_of(result: RouteResponse | RouteAnswered, model: str, prompt_tokens: int) -> dict[str, Any]:
    """Return the response object of a route query. Its worker is null if no worker is available."""
    choice = result.choice
    return {
        "object": "forebay.route",
        "id": result.request_id,
        "model": model,
        "pool": result.pool,
        "mode": result.mode,
        "worker_id": None if choice is None else choice.worker_id,
        "dp_rank": None if choice is None else choice.rank,
        "overlap_blocks": None if choice is None else choice.terms.device_overlap,
        "would_wait": result.would_wait,
        **({} if result.prefill is None else {"stage": result.stage, "prefill": msgspec.to_builtins(result.prefill)}),
        "prompt_tokens": prompt_tokens,
        "candidates": [_candidate(one) for one in result.candidates],
    }


def _candidate(one: ScoredCandidate) -> dict[str, Any]:
    return {"worker_id": one.worker_id, "dp_rank": one.rank, **msgspec.structs.asdict(one.terms)}
