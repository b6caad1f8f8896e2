"""Serialise OpenAI's response objects. The constant parts of stream chunks are encoded once per response."""

from dataclasses import dataclass
from typing import Any

import msgspec

from forebay.events.decisions import ScoredCandidate
from forebay.events.tokens import PrefilledBy, RouteResponse, Usage
from forebay.ingress.parsers.deltas import DecodedLogprob, OutputDelta, ToolCallDelta

_encode = msgspec.json.encode


@dataclass(frozen=True, slots=True)
class ServingInfo:
    """Which workers served a request; sent as the extension `forebay` of a response.

    Attributes:
        request_id: id of the request.
        worker: id of the worker that generated the output.
        rank: data parallel rank of that worker.
        attempts: number of attempts.
        prefilled: the prefill worker, None for aggregated serving.
    """

    request_id: str
    worker: str
    rank: int
    attempts: int
    prefilled: PrefilledBy | None = None

    def worker_id(self) -> dict[str, Any]:
        """Return the worker ids in the format of Dynamo's `nvext`."""
        prefilled = self.prefilled
        return {
            "prefill_worker_id": self.worker if prefilled is None else prefilled.worker_id,
            "prefill_dp_rank": self.rank if prefilled is None else prefilled.rank,
            "decode_worker_id": self.worker,
            "decode_dp_rank": self.rank,
        }

    def plain(self) -> dict[str, Any]:
        """Return the extension `forebay` as a JSON object."""
        plain: dict[str, Any] = {
            "request_id": self.request_id,
            "worker": self.worker,
            "rank": self.rank,
            "attempts": self.attempts,
        }
        if (prefilled := self.prefilled) is not None:
            plain["prefill"] = {
                "worker": prefilled.worker_id,
                "rank": prefilled.rank,
                "transferred_bytes": prefilled.transferred_bytes,
                "transfer_ms": prefilled.transfer_us / 1e3,
            }
        return plain


class ResponseFormatter:
    """Serialises one response of a chat or text completion.

    Args:
        chat: whether it is a chat completion.
        response_id: id of the response.
        model: name of the model in the response.
        created: Unix time in seconds.
        names_worker: whether to include the worker ids in `nvext`.
    """

    def __init__(self, *, chat: bool, response_id: str, model: str, created: int, names_worker: bool = False) -> None:
        self._chat = chat
        self._names_worker = names_worker
        kind = "chat.completion" if chat else "text_completion"
        self._head = {"id": response_id, "object": kind, "created": created, "model": model}
        chunk_head = dict(self._head, object="chat.completion.chunk" if chat else kind)
        opened = _encode(chunk_head)[:-1] + b',"choices":[{"index":0,'
        self._open = opened + (b'"delta":{"content":' if chat else b'"text":')
        self._first = opened + b'"delta":{"role":"assistant","content":' if chat else self._open
        self._shut = (b"}" if chat else b"") + b',"logprobs":null,"finish_reason":null}]}'
        self._chunk_head = chunk_head
        self._offset = 0  # of the next token in the text, for `text_offset`

    def delta(self, delta: OutputDelta, *, first: bool) -> bytes:
        """Return the chunk of a delta."""
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
        choice = {"index": 0, **content, "logprobs": self._logprobs(delta), "finish_reason": None}
        return _encode({**self._chunk_head, "choices": [choice]})

    def last(self, reason: str, served: ServingInfo) -> bytes:
        """Return the chunk with the finish reason and the extensions."""
        content: dict[str, Any] = {"delta": {}} if self._chat else {"text": ""}
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": reason}
        return _encode({**self._chunk_head, "choices": [choice], **self._extensions(served)})

    def usage(self, usage: Usage) -> bytes:
        """Return the usage chunk of `stream_options.include_usage`."""
        return _encode({**self._chunk_head, "choices": [], "usage": usage_of(usage)})

    def whole(self, delta: OutputDelta, reason: str, usage: Usage, served: ServingInfo) -> bytes:
        """Return the response to a request without streaming."""
        content: dict[str, Any] = {"text": delta.content}
        if self._chat:
            message: dict[str, Any] = {"role": "assistant", "content": delta.content, "refusal": None}
            message |= _reasoning(delta)
            if delta.calls:
                message |= {"content": delta.content or None, "tool_calls": [_call(call) for call in delta.calls]}
            content = {"message": message}
        choice = {"index": 0, **content, "logprobs": self._logprobs(delta), "finish_reason": reason}
        return _encode({**self._head, "choices": [choice], "usage": usage_of(usage), **self._extensions(served)})

    def _logprobs(self, delta: OutputDelta) -> dict[str, Any] | None:
        """Return the log probabilities, None if the engine reported none."""
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
            "tokens": [one.text for one in delta.logprobs],
            "token_logprobs": [one.logprob for one in delta.logprobs],
            "top_logprobs": [{top.text: top.logprob for top in one.top} for one in delta.logprobs],
        }

    def _extensions(self, served: ServingInfo) -> dict[str, Any]:
        nvext = {"nvext": {"worker_id": served.worker_id()}} if self._names_worker else {}
        return {"forebay": served.plain(), **nvext}


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


def _alternative(one: DecodedLogprob) -> dict[str, Any]:
    return {"token": one.text, "logprob": one.logprob, "bytes": [*one.token]}


def usage_of(usage: Usage) -> dict[str, Any]:
    """Return token counts under OpenAI's names."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def route_of(result: RouteResponse, model: str, prompt_tokens: int) -> dict[str, Any]:
    """Return the result of a route query: the selected worker, None if no worker is available, and all candidates."""
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
