"""Format of the responses of the Responses API: its objects, and the events of its streams.

Theory of operation. A response consists of output items: reasoning, a message, and calls of functions, each of which
has one part. The formatter keeps the items, because the last event of a stream has the whole response. A response
without a stream is built by the same methods, so both have the same items. Nothing depends on a clock: the ids of
items are derived from the id of the response.

Source: OpenAI API reference, responses and streaming events.
"""

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from forebay.events.rendering import Rendering
from forebay.events.tokens import Usage
from forebay.ingress.errors import ApiError
from forebay.ingress.formatter import Formatter, ServingInfo, SseEvent, WholeChoice
from forebay.ingress.parsers.deltas import DecodedLogprob, OutputDelta, ToolCallDelta

REASONING, MESSAGE, CALL = "reasoning", "message", "function_call"
PREFIXES = {REASONING: "rs", MESSAGE: "msg", CALL: "fc"}
TEXT_EVENTS = {
    REASONING: "response.reasoning_text",
    MESSAGE: "response.output_text",
    CALL: "response.function_call_arguments",
}
ITEM_ID = re.compile(rf"({'|'.join(PREFIXES.values())})_([0-9]{{1,9}})_(.+)")
# Why a response is incomplete, by its finish reason.
INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
ERROR_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}  # by HTTP status; other errors are `server_error`

_encode = msgspec.json.encode


def response_of(item_id: str) -> tuple[str, int] | None:
    """Return the id of the response that an output item belongs to, and its position; None for any other id."""
    found = ITEM_ID.fullmatch(item_id)
    return None if found is None else (found[3], int(found[2]))


class _Item:
    """An output item. It has one part, or it is a call of a function.

    Attributes:
        place: fields of the item's events.
        logprobs: the tokens of a message, if the client requested their log probabilities.
    """

    def __init__(self, kind: str, index: int, response_id: str, call: ToolCallDelta | None) -> None:
        self.kind = kind
        self.id = f"{PREFIXES[kind]}_{index}_{response_id}"
        self.status = "in_progress"
        self.place: dict[str, Any] = {"item_id": self.id, "output_index": index}
        if call is None:
            self.place["content_index"] = 0
        # A delta event is `head`, its number, its text, and the log probabilities of a message.
        self.head = _encode({"type": f"{TEXT_EVENTS[kind]}.delta", **self.place})[:-1] + b',"sequence_number":'
        self.texts: list[str] = []
        self.logprobs: list[DecodedLogprob] = []
        self._call = call

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def part(self) -> dict[str, Any]:
        if self.kind == REASONING:
            return {"type": "reasoning_text", "text": self.text}
        logprobs = [_logprob(one, has_bytes=True) for one in self.logprobs]
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": logprobs}

    def plain(self) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self.id, "type": self.kind, "status": self.status}
        if self._call is not None:
            return item | {"call_id": self._call.call_id, "name": self._call.name, "arguments": self.text}
        item["content"] = [self.part()] if self.texts or self.status != "in_progress" else []
        if self.kind == REASONING:
            return item | {"summary": []}
        return item | {"role": "assistant"}


class ResponsesFormatter(Formatter):
    """Encodes the response to one request of the Responses API, which has one choice."""

    needs_positions = True

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
        self._status = "in_progress"
        self._items: list[_Item] = []
        self._calls: dict[int, _Item] = {}
        self._logprobs: list[DecodedLogprob] = []  # of tokens without text so far
        self._reasoning_tokens = 0
        self._events: list[SseEvent] = []
        self._number = 0  # of events so far

    def begin(self) -> list[SseEvent]:
        self._emit("response.created", response=self.plain())
        self._emit("response.in_progress", response=self.plain())
        return self._taken()

    def delta(self, index: int, delta: OutputDelta) -> list[SseEvent]:
        self._logprobs += delta.logprobs
        if delta.reasoning:
            self._reasoning_tokens += 1
            self._add_text(REASONING, delta.reasoning)
        if delta.content:
            self._add_text(MESSAGE, delta.content)
        for call in delta.calls:
            item = self._calls.get(call.index)
            if item is None:
                item = self._calls[call.index] = self._open(CALL, call)
                self._logprobs = []
            if call.arguments:
                self._add_delta(item, call.arguments)
        return self._taken()

    def close(self, index: int, reason: str, served: ServingInfo) -> list[SseEvent]:
        if not self._items:
            self._open(MESSAGE)
        if (why := INCOMPLETE.get(reason)) is not None:
            self._fields["incomplete_details"] = {"reason": why}
        self._status = "completed" if why is None else "incomplete"
        if self._items[-1].kind == MESSAGE:
            self._items[-1].logprobs += self._logprobs
        self._close_last(self._status)
        return self._taken()

    def finish(self, usage: Usage) -> list[SseEvent]:
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

    def error(self, error: ApiError) -> list[SseEvent]:
        self.fail(error)
        self._emit("response.failed", response=self.plain())
        return self._taken()

    def fail(self, error: ApiError) -> None:
        """Set the error with which the response ended. A cancellation is a status of its own."""
        self._status = "cancelled" if error.code == "cancelled" else "failed"
        if self._status == "failed":
            code = ERROR_CODES.get(error.status, "server_error")
            self._fields["error"] = {"code": code, "message": f"{error.code}: {error.message}"}
        for item in self._items[-1:]:
            item.status = "incomplete"

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        for choice in choices:
            for delta in choice.deltas:
                self.delta(0, delta)
            self.close(0, choice.reason, choice.served)
        self.finish(usage)
        return _encode(self.plain())

    def plain(self) -> dict[str, Any]:
        """Return the response object, with the output so far."""
        return {**self._fields, "status": self._status, "output": [item.plain() for item in self._items]}

    def _add_text(self, kind: str, text: str) -> None:
        item = self._items[-1] if self._items and self._items[-1].kind == kind else self._open(kind)
        self._add_delta(item, text)

    def _open(self, kind: str, call: ToolCallDelta | None = None) -> _Item:
        self._close_last("completed")
        item = _Item(kind, len(self._items), self.response_id, call)
        self._items.append(item)
        self._emit("response.output_item.added", output_index=item.place["output_index"], item=item.plain())
        if call is None:
            self._emit("response.content_part.added", **item.place, part=item.part())
        return item

    def _add_delta(self, item: _Item, text: str) -> None:
        item.texts.append(text)
        data = b'%b%d,"delta":%b' % (item.head, self._number, _encode(text))
        if item.kind == MESSAGE:
            item.logprobs += self._logprobs
            data += b',"logprobs":' + _encode([_logprob(one) for one in self._logprobs])
        self._logprobs = []
        self._number += 1
        self._events.append(SseEvent(data + b"}", f"{TEXT_EVENTS[item.kind]}.delta"))

    def _close_last(self, status: str) -> None:
        if not self._items:
            return
        item = self._items[-1]
        item.status = status
        name = "arguments" if item.kind == CALL else "text"
        done: dict[str, Any] = {**item.place, name: item.text}
        if item.kind == MESSAGE:
            done["logprobs"] = [_logprob(one) for one in item.logprobs]
        self._emit(f"{TEXT_EVENTS[item.kind]}.done", **done)
        if item.kind != CALL:
            self._emit("response.content_part.done", **item.place, part=item.part())
        self._emit("response.output_item.done", output_index=item.place["output_index"], item=item.plain())

    def _emit(self, name: str, **fields: Any) -> None:
        self._events.append(SseEvent(_encode({"type": name, "sequence_number": self._number, **fields}), name))
        self._number += 1

    def _taken(self) -> list[SseEvent]:
        events, self._events = self._events, []
        return events


def _logprob(one: DecodedLogprob, *, has_bytes: bool = False) -> dict[str, Any]:
    return {**_token(one, has_bytes), "top_logprobs": [_token(top, has_bytes) for top in one.top]}


def _token(one: DecodedLogprob, has_bytes: bool) -> dict[str, Any]:
    token = {"token": one.text, "logprob": one.logprob}
    return token | {"bytes": [*one.token]} if has_bytes else token
