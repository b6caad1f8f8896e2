"""OpenAI's response objects as bytes. The constant parts of a stream's chunks are rendered once."""

from dataclasses import dataclass
from typing import Any

import msgspec

from forebay.events.decisions import ScoredCandidate
from forebay.events.tokens import PrefilledBy, RouteResponse, Usage
from forebay.ingress.parsers.deltas import DecodedLogprob, OutputDelta, ToolCallDelta

_encode = msgspec.json.encode


@dataclass(frozen=True, slots=True)
class ServingInfo:
    """Who served a request; goes out as the `forebay` extension. `prefilled` is None where one worker did it all."""

    request_id: str
    worker: str
    rank: int
    attempts: int
    prefilled: PrefilledBy | None = None

    def worker_id(self) -> dict[str, Any]:
        """As Dynamo's `nvext` has it."""
        prefilled = self.prefilled
        return {
            "prefill_worker_id": self.worker if prefilled is None else prefilled.worker_id,
            "prefill_dp_rank": self.rank if prefilled is None else prefilled.rank,
            "decode_worker_id": self.worker,
            "decode_dp_rank": self.rank,
        }

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
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
    """How one endpoint words its answers. `names_worker` puts the worker into `nvext`, too."""

    def __init__(self, *, chat: bool, response_id: str, model: str, created: int, names_worker: bool = False) -> None:
        self._chat = chat
        self._names_worker = names_worker
        kind = "chat.completion" if chat else "text_completion"
        self._head = {"id": response_id, "object": kind, "created": created, "model": model}
        chunk_head = dict(self._head, object="chat.completion.chunk" if chat else kind)
        opened = _encode(chunk_head)[:-1] + b',"choices":[{"index":0,'
        self._open = b"data: " + opened + (b'"delta":{"content":' if chat else b'"text":')
        self._first = b"data: " + opened + b'"delta":{"role":"assistant","content":' if chat else self._open
        self._shut = (b"}" if chat else b"") + b',"logprobs":null,"finish_reason":null}]}\n\n'
        self._chunk_head = chunk_head
        self._offset = 0  # of the next token in the text, as completions tell it

    def piece(self, said: OutputDelta, *, first: bool) -> bytes:
        """A chunk with what is new."""
        if not (said.reasoning or said.calls or said.logprobs):
            return (self._first if first else self._open) + _encode(said.content) + self._shut
        content: dict[str, Any] = {"text": said.content}
        if self._chat:
            delta: dict[str, Any] = {"role": "assistant", "content": ""} if first else {}
            if said.content:
                delta["content"] = said.content
            if said.calls:
                delta["tool_calls"] = [_call_delta(call) for call in said.calls]
            content = {"delta": delta | _reasoning(said)}
        choice = {"index": 0, **content, "logprobs": self._logprobs(said), "finish_reason": None}
        return b"data: " + _encode({**self._chunk_head, "choices": [choice]}) + b"\n\n"

    def last(self, reason: str, served: ServingInfo) -> bytes:
        """The chunk that says why the answer ended and who gave it."""
        content: dict[str, Any] = {"delta": {}} if self._chat else {"text": ""}
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": reason}
        return b"data: " + _encode({**self._chunk_head, "choices": [choice], **self._extensions(served)}) + b"\n\n"

    def usage(self, usage: Usage) -> bytes:
        """The chunk that `stream_options.include_usage` asks for."""
        return b"data: " + _encode({**self._chunk_head, "choices": [], "usage": usage_of(usage)}) + b"\n\n"

    def whole(self, said: OutputDelta, reason: str, usage: Usage, served: ServingInfo) -> bytes:
        """The answer to a request that does not stream."""
        content: dict[str, Any] = {"text": said.content}
        if self._chat:
            message: dict[str, Any] = {"role": "assistant", "content": said.content, "refusal": None}
            message |= _reasoning(said)
            if said.calls:
                message |= {"content": said.content or None, "tool_calls": [_call(call) for call in said.calls]}
            content = {"message": message}
        choice = {"index": 0, **content, "logprobs": self._logprobs(said), "finish_reason": reason}
        return _encode({**self._head, "choices": [choice], "usage": usage_of(usage), **self._extensions(served)})

    def _logprobs(self, said: OutputDelta) -> dict[str, Any] | None:
        """The probabilities of tokens, where they were told."""
        if not said.logprobs:
            return None
        if self._chat:
            return {"content": [_told(one) for one in said.logprobs], "refusal": None}
        offsets = []
        for one in said.logprobs:
            offsets.append(self._offset)
            self._offset += len(one.text)
        return {
            "text_offset": offsets,
            "tokens": [one.text for one in said.logprobs],
            "token_logprobs": [one.logprob for one in said.logprobs],
            "top_logprobs": [{top.text: top.logprob for top in one.top} for one in said.logprobs],
        }

    def _extensions(self, served: ServingInfo) -> dict[str, Any]:
        nvext = {"nvext": {"worker_id": served.worker_id()}} if self._names_worker else {}
        return {"forebay": served.plain(), **nvext}


def _reasoning(said: OutputDelta) -> dict[str, str]:
    """Under both names that clients know."""
    return {"reasoning_content": said.reasoning, "reasoning": said.reasoning} if said.reasoning else {}


def _call(call: ToolCallDelta) -> dict[str, Any]:
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _call_delta(call: ToolCallDelta) -> dict[str, Any]:
    if call.name:
        return {"index": call.index, **_call(call)}
    return {"index": call.index, "function": {"arguments": call.arguments}}


def _told(one: DecodedLogprob) -> dict[str, Any]:
    told = {"token": one.text, "logprob": one.logprob, "bytes": [*one.token]}
    return {**told, "top_logprobs": [_alternative(top) for top in one.top]}


def _alternative(one: DecodedLogprob) -> dict[str, Any]:
    return {"token": one.text, "logprob": one.logprob, "bytes": [*one.token]}


def usage_of(usage: Usage) -> dict[str, Any]:
    """Token counts as OpenAI names them."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def route_of(told: RouteResponse, model: str, prompt_tokens: int) -> dict[str, Any]:
    """Where a request would go, and what every candidate would cost; all `None` when it would go nowhere yet."""
    choice = told.choice
    return {
        "object": "forebay.route",
        "id": told.request_id,
        "model": model,
        "pool": told.pool,
        "mode": told.mode,
        "worker_id": None if choice is None else choice.worker_id,
        "dp_rank": None if choice is None else choice.rank,
        "overlap_blocks": None if choice is None else choice.terms.device_overlap,
        "would_wait": told.would_wait,
        **({} if told.prefill is None else {"stage": told.stage, "prefill": msgspec.to_builtins(told.prefill)}),
        "prompt_tokens": prompt_tokens,
        "candidates": [_candidate(one) for one in told.candidates],
    }


def _candidate(one: ScoredCandidate) -> dict[str, Any]:
    return {"worker_id": one.worker_id, "dp_rank": one.rank, **msgspec.structs.asdict(one.terms)}
