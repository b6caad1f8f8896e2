"""Encode OpenAI's response objects as JSON. The constant parts of stream chunks are encoded once per response."""

from collections.abc import Sequence
from typing import Any

import msgspec

from forebay.events.decisions import ScoredCandidate
from forebay.events.tokens import RouteResponse, Usage
from forebay.ingress.formatter import ServingInfo
from forebay.ingress.parsers.deltas import DecodedLogprob, OutputDelta, ToolCallDelta

_encode = msgspec.json.encode


class ResponseFormatter:
    """Encodes one choice of a completion as JSON. `names_worker` adds the worker ids as the extension `nvext`."""

    def __init__(
        self, *, chat: bool, response_id: str, model: str, created: int, index: int = 0, names_worker: bool = False
    ) -> None:
        self._chat = chat
        self._index = index
        self._names_worker = names_worker
        kind = "chat.completion" if chat else "text_completion"
        self._head = {"id": response_id, "object": kind, "created": created, "model": model}
        chunk_head = dict(self._head, object="chat.completion.chunk" if chat else kind)
        opened = _encode(chunk_head)[:-1] + b',"choices":[{"index":%d,' % index
        self._open = opened + (b'"delta":{"content":' if chat else b'"text":')
        self._first = opened + b'"delta":{"role":"assistant","content":' if chat else self._open
        self._shut = (b"}" if chat else b"") + b',"logprobs":null,"finish_reason":null}]}'
        self._chunk_head = chunk_head
        self._offset = 0  # position of the next token in the text, for `text_offset`

    def delta(self, delta: OutputDelta, *, first: bool) -> bytes:
        """Return the stream chunk for a part of the output. The `first` chunk of a chat contains the role."""
        if not (delta.reasoning or delta.calls or delta.logprobs):
            return (self._first if first else self._open) + _encode(delta.content) + self._shut
        content: dict[str, Any] = {"text": delta.content}
        if self._chat:
            fields: dict[str, Any] = {"role": "assistant", "content": ""} if first else {}
            if delta.content:
                fields["content"] = delta.content
            if delta.calls:
                fields["tool_calls"] = [_call_delta(call) for call in delta.calls]
            content = {"delta": fields | _reasoning(delta)}
        choice = {"index": self._index, **content, "logprobs": self._logprobs(delta), "finish_reason": None}
        return _encode({**self._chunk_head, "choices": [choice]})

    def last(self, reason: str, served: ServingInfo) -> bytes:
        """Return the stream chunk after the output, with the finish reason and the extensions `forebay` and `nvext`."""
        content: dict[str, Any] = {"delta": {}} if self._chat else {"text": ""}
        choice = {"index": self._index, **content, "logprobs": None, "finish_reason": reason}
        return _encode({**self._chunk_head, "choices": [choice], **self._extensions([served])})

    def usage(self, usage: Usage) -> bytes:
        """Return the last stream chunk, with the token counts. `stream_options.include_usage` requests it."""
        return _encode({**self._chunk_head, "choices": [], "usage": usage_of(usage)})

    def choice(self, delta: OutputDelta, reason: str) -> dict[str, Any]:
        content: dict[str, Any] = {"text": delta.content}
        if self._chat:
            message: dict[str, Any] = {"role": "assistant", "content": delta.content, "refusal": None}
            message |= _reasoning(delta)
            if delta.calls:
                message |= {"content": delta.content or None, "tool_calls": [_call(call) for call in delta.calls]}
            content = {"message": message}
        return {"index": self._index, **content, "logprobs": self._logprobs(delta), "finish_reason": reason}

    def whole(self, choices: Sequence[dict[str, Any]], usage: Usage, served: Sequence[ServingInfo]) -> bytes:
        return _encode({**self._head, "choices": choices, "usage": usage_of(usage), **self._extensions(served)})

    def _logprobs(self, delta: OutputDelta) -> dict[str, Any] | None:
        if not delta.logprobs:
            return None
        if self._chat:
            return {"content": [_logprob(one) for one in delta.logprobs], "refusal": None}
        offsets = []
        for one in delta.logprobs:
            offsets.append(self._offset)
            self._offset += len(one.text)
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


def _logprob(one: DecodedLogprob) -> dict[str, Any]:
    return {**_alternative(one), "top_logprobs": [_alternative(top) for top in one.top]}


def _name(one: DecodedLogprob) -> str:
    """Return the text of a token, or `bytes:` and its bytes if it is a part of a character, as OpenAI does."""
    try:
        return one.token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in one.token)


def _alternative(one: DecodedLogprob) -> dict[str, Any]:
    return {"token": one.text, "logprob": one.logprob, "bytes": [*one.token]}


def with_usage(chunk: bytes, usage: Usage) -> bytes:
    """Return a stream chunk with the token counts so far. `stream_options.continuous_usage_stats` requests them."""
    return chunk[:-1] + b',"usage":' + _encode(usage_of(usage)) + b"}"


def usage_of(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def route_of(result: RouteResponse, model: str, prompt_tokens: int) -> dict[str, Any]:
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
