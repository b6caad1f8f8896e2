"""Format of the responses of the Messages API: its message, and the events of its streams.

Theory of operation. A message consists of blocks: thinking, text, and calls of tools. In a stream, at most one block is
open at a time; output of another kind closes it. Nothing depends on a clock or on chance.

Source: Anthropic API reference, messages and streaming.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
from pydantic_core import from_json

from forebay.events.rendering import Rendering
from forebay.events.tokens import Usage
from forebay.ingress.errors import MESSAGES_PATH, ApiError
from forebay.ingress.formatter import Formatter, ServingInfo, SseEvent, WholeChoice
from forebay.ingress.parsers.deltas import OutputDelta, ToolCallDelta, merge_deltas

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
THINKING, TEXT, TOOL_USE = "thinking", "text", "tool_use"
# Type of the deltas of each block, and the field of the delta that has the output.
DELTAS = {
    THINKING: ("thinking_delta", "thinking"),
    TEXT: ("text_delta", "text"),
    TOOL_USE: ("input_json_delta", "partial_json"),
}

_encode = msgspec.json.encode


class MessagesFormatter(Formatter):
    """Encodes the response to one request of the Messages API, which has one choice."""

    def __init__(self, rendering: Rendering, response_id: str) -> None:
        super().__init__(rendering, response_id)
        self._has_begun = False
        self._open = ""  # kind of the open block; empty for none
        self._blocks = -1  # index of the last block
        self._stop: dict[str, Any] = {}

    def delta(self, index: int, delta: OutputDelta) -> list[SseEvent]:
        events: list[SseEvent] = []
        if not self._has_begun:
            self._has_begun = True
            usage = Usage(prompt_tokens=self.rendering.prompt_tokens, output_tokens=0, cached_tokens=0)
            message = self._message([], {"stop_reason": None, "stop_sequence": None}, usage)
            events.append(_event("message_start", message=message))
        if delta.reasoning:
            self._add(events, THINKING, delta.reasoning, {"thinking": "", "signature": ""})
        if delta.content:
            self._add(events, TEXT, delta.content, {"text": ""})
        for call in delta.calls:
            if call.name:
                self._begin(events, TOOL_USE, {"id": call.call_id, "name": call.name, "input": {}})
            if call.arguments:
                self._add(events, TOOL_USE, call.arguments, {})
        return events

    def close(self, index: int, reason: str, served: ServingInfo) -> list[SseEvent]:
        events: list[SseEvent] = []
        self._end(events)
        self._stop = _stop_of(reason, served)
        return events

    def finish(self, usage: Usage) -> list[SseEvent]:
        return [_event("message_delta", delta=self._stop, usage=_usage_of(usage)), _event("message_stop")]

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        ((deltas, reason, served),) = choices
        output = merge_deltas(deltas)
        content: list[dict[str, Any]] = []
        if output.reasoning:
            content.append({"type": THINKING, "thinking": output.reasoning, "signature": self.response_id})
        if output.content:
            content.append({"type": TEXT, "text": output.content})
        for call in output.calls:
            content += [{"type": TOOL_USE, "id": call.call_id, "name": call.name, "input": _input_of(call)}]
        return _encode(self._message(content, _stop_of(reason, served), usage))

    @staticmethod
    def error_body(error: ApiError) -> bytes:
        return error.encoded(MESSAGES_PATH)

    def error(self, error: ApiError) -> list[SseEvent]:
        return [SseEvent(error.encoded(MESSAGES_PATH, self.response_id), "error")]

    def _message(self, content: list[dict[str, Any]], stop: dict[str, Any], usage: Usage) -> dict[str, Any]:
        return {
            "id": self.response_id,
            "type": "message",
            "role": "assistant",
            "model": self.rendering.model,
            "content": content,
            **stop,
            "usage": _usage_of(usage),
        }

    def _add(self, events: list[SseEvent], kind: str, text: str, block: dict[str, Any]) -> None:
        """Add the events for output of a block, which is opened unless it is the open one."""
        if self._open != kind:
            self._begin(events, kind, block)
        name, field = DELTAS[kind]
        events.append(_event("content_block_delta", index=self._blocks, delta={"type": name, field: text}))

    def _begin(self, events: list[SseEvent], kind: str, block: dict[str, Any]) -> None:
        self._end(events)
        self._blocks += 1
        self._open = kind
        events.append(_event("content_block_start", index=self._blocks, content_block={"type": kind, **block}))

    def _end(self, events: list[SseEvent]) -> None:
        if self._open == THINKING:  # clients send thinking back only if it has a signature
            delta = {"type": "signature_delta", "signature": self.response_id}
            events.append(_event("content_block_delta", index=self._blocks, delta=delta))
        if self._open:
            events.append(_event("content_block_stop", index=self._blocks))
        self._open = ""


def _event(name: str, **fields: Any) -> SseEvent:
    return SseEvent(_encode({"type": name, **fields}), name)


def _stop_of(reason: str, served: ServingInfo) -> dict[str, Any]:
    """Return the reason and the stop sequence of a message."""
    if reason == "stop" and served.stop:
        return {"stop_reason": "stop_sequence", "stop_sequence": served.stop}
    return {"stop_reason": STOP_REASONS[reason], "stop_sequence": None}


def _usage_of(usage: Usage) -> dict[str, int]:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.output_tokens,
    }


def _input_of(call: ToolCallDelta) -> dict[str, Any]:
    """Return the arguments of a call. They may be incomplete, and are one text if they are no JSON object."""
    try:
        found = from_json(call.arguments or "{}", allow_partial=True)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"arguments": call.arguments}
