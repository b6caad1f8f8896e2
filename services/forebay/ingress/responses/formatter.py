"""Format of the responses of the Responses API: its objects, and the events of its streams.

Theory of operation. A response consists of output items, one per block: reasoning, a message, and calls of functions.
Reasoning and messages have one part. Nothing depends on a clock: the ids of items are derived from the id of the
response. A response with `background` is queued until its first output.

Source: OpenAI API reference, responses and streaming events.
"""

import re
from typing import Any

import msgspec

from forebay.events.rendering import Rendering
from forebay.events.tokens import Usage
from forebay.ingress.errors import ApiError
from forebay.ingress.formatter import CALL, REASONING, TEXT, Block, BlockFormatter, ServingInfo, StreamEvent, logprob_of
from forebay.ingress.parsers.deltas import DecodedLogprob, OutputDelta

PREFIXES = {REASONING: "rs", TEXT: "msg", CALL: "fc"}
TEXT_EVENTS = {
    REASONING: "response.reasoning_text",
    TEXT: "response.output_text",
    CALL: "response.function_call_arguments",
}
ITEM_ID = re.compile(rf"(?:{'|'.join(PREFIXES.values())})_[0-9]{{1,9}}_(.+)")
# Why a response is incomplete, by its finish reason.
INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
ERROR_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}  # by HTTP status; other errors are `server_error`

_encode = msgspec.json.encode


def response_of(item_id: str) -> str | None:
    """Return the id of the response that an output item belongs to; None for any other id."""
    found = ITEM_ID.fullmatch(item_id)
    return None if found is None else found[1]


class ResponsesFormatter(BlockFormatter):
    """Encodes the response to one request of the Responses API, which has one choice."""

    def __init__(self, rendering: Rendering, response_id: str) -> None:
        super().__init__(rendering, response_id)
        self._fields = {
            "id": response_id,
            "object": "response",
            "created_at": rendering.created_s,
            "model": rendering.model,
            "error": None,
            "incomplete_details": None,
            "usage": None,
            **msgspec.json.decode(rendering.options),
        }
        self._status = "queued" if self._fields["background"] else "in_progress"
        self._logprobs: list[DecodedLogprob] = []  # of tokens without text so far
        self._reasoning_tokens = 0
        self._number = 0  # of events so far

    def begin(self) -> list[StreamEvent]:
        self._emit("response.created", response=self.plain())
        self._emit(f"response.{self._status}", response=self.plain())
        return self._taken()

    def delta(self, index: int, delta: OutputDelta) -> list[StreamEvent]:
        if self._status == "queued":
            self._status = "in_progress"
            self._emit("response.in_progress", response=self.plain())
        self._logprobs += delta.logprobs
        self._reasoning_tokens += bool(delta.reasoning)
        return super().delta(index, delta)

    def close(self, index: int, reason: str, served: ServingInfo) -> list[StreamEvent]:
        if not self.blocks:
            self._open(TEXT)
        if (why := INCOMPLETE.get(reason)) is not None:
            self._fields["incomplete_details"] = {"reason": why}
        self._status = "completed" if why is None else "incomplete"
        self._end_all()
        return self._taken()

    def finish(self, usage: Usage) -> list[StreamEvent]:
        self._fields["usage"] = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.output_tokens,
            # The end may add text that was kept back, without a token.
            "output_tokens_details": {"reasoning_tokens": min(self._reasoning_tokens, usage.output_tokens)},
            "total_tokens": usage.prompt_tokens + usage.output_tokens,
        }
        self._emit(f"response.{self._status}", response=self.plain())
        return self._taken()

    def error(self, error: ApiError) -> list[StreamEvent]:
        self.fail(error)
        self._emit("response.failed", response=self.plain())
        return self._taken()

    def fail(self, error: ApiError) -> None:
        """Set the error with which the response ended. A cancellation is a status of its own."""
        self._status = "cancelled" if error.code == "cancelled" else "failed"
        if self._status == "failed":
            code = ERROR_CODES.get(error.status, "server_error")
            self._fields["error"] = {"code": code, "message": f"{error.code}: {error.message}"}
        for block in self.blocks:
            if block.is_open:
                block.status = "incomplete"

    def plain(self) -> dict[str, Any]:
        return {**self._fields, "status": self._status, "output": [self._item(block) for block in self.blocks]}

    def _begin(self, block: Block) -> None:
        self._emit("response.output_item.added", output_index=block.index, item=self._item(block))
        if block.call is None:
            self._emit("response.content_part.added", **self._place(block), part=_part(block))

    def _append(self, block: Block, text: str) -> None:
        block.texts.append(text)
        logprobs = {}
        if block.kind == TEXT:
            own = _of_text(self._logprobs, text)
            block.logprobs += own
            logprobs = {"logprobs": [logprob_of(one, has_bytes=False) for one in own]}
        self._logprobs = []
        self._emit(f"{TEXT_EVENTS[block.kind]}.delta", **self._place(block), delta=text, **logprobs)

    def _end(self, block: Block) -> None:
        block.status = "completed" if self._status == "in_progress" else self._status
        name = "text" if block.call is None else "arguments"
        done: dict[str, Any] = {**self._place(block), name: block.text}
        if block.kind == TEXT:
            done["logprobs"] = [logprob_of(one, has_bytes=False) for one in block.logprobs]
        self._emit(f"{TEXT_EVENTS[block.kind]}.done", **done)
        if block.call is None:
            self._emit("response.content_part.done", **self._place(block), part=_part(block))
        self._emit("response.output_item.done", output_index=block.index, item=self._item(block))

    def _item(self, block: Block) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self._id(block), "status": block.status}
        if block.call is not None:
            call = {"call_id": block.call.call_id, "name": block.call.name, "arguments": block.text}
            return {**item, "type": "function_call", **call}
        item["content"] = [_part(block)] if block.texts or not block.is_open else []
        if block.kind == REASONING:
            return {**item, "type": "reasoning", "summary": []}
        return {**item, "type": "message", "role": "assistant"}

    def _id(self, block: Block) -> str:
        return f"{PREFIXES[block.kind]}_{block.index}_{self.response_id}"

    def _place(self, block: Block) -> dict[str, Any]:
        """Return the fields of the events of an item."""
        part = {"content_index": 0} if block.call is None else {}
        return {"item_id": self._id(block), "output_index": block.index, **part}

    def _emit(self, name: str, **fields: Any) -> None:
        super()._emit(name, sequence_number=self._number, **fields)
        self._number += 1


def _part(block: Block) -> dict[str, Any]:
    if block.kind == REASONING:
        return {"type": "reasoning_text", "text": block.text}
    logprobs = [logprob_of(one) for one in block.logprobs]
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": logprobs}


def _of_text(tokens: list[DecodedLogprob], text: str) -> list[DecodedLogprob]:
    """Return the last of these tokens, as many as the text needs. The earlier ones are tags, which have no text."""
    missing, begin = len(text.encode()), len(tokens)
    while missing > 0 and begin:
        begin -= 1
        missing -= len(tokens[begin].token)
    return tokens[begin:]
