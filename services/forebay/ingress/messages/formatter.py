"""Format of the responses of the Messages API: its message, and the events of its streams.

A message consists of blocks: thinking, text, and calls of tools. Nothing depends on a clock or on chance.

Source: Anthropic API reference, messages and streaming.
"""

from typing import Any

from pydantic_core import from_json

from forebay.events.rendering import Rendering
from forebay.events.tokens import Usage
from forebay.ingress.errors import MESSAGES_PATH, ApiError
from forebay.ingress.formatter import CALL, REASONING, TEXT, Block, BlockFormatter, ServingInfo, StreamEvent
from forebay.ingress.parsers.deltas import OutputDelta

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
# Type of the deltas of each kind of block, and the field of the delta that has the output.
DELTAS = {
    REASONING: ("thinking_delta", "thinking"),
    TEXT: ("text_delta", "text"),
    CALL: ("input_json_delta", "partial_json"),
}


class MessagesFormatter(BlockFormatter):
    """Encodes the response to one request of the Messages API, which has one choice."""

    def __init__(self, rendering: Rendering, response_id: str) -> None:
        super().__init__(rendering, response_id)
        self._has_begun = False
        self._stop: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}
        self._usage = _usage_of(Usage(prompt_tokens=rendering.prompt_tokens, output_tokens=0, cached_tokens=0))

    def delta(self, index: int, delta: OutputDelta) -> list[StreamEvent]:
        if not self._has_begun:
            self._has_begun = True
            self._emit("message_start", message=self.plain())
        return super().delta(index, delta)

    def close(self, index: int, reason: str, served: ServingInfo) -> list[StreamEvent]:
        self._end_all()
        self._stop["stop_reason"] = STOP_REASONS[reason]
        if reason == "stop" and served.stop:
            self._stop = {"stop_reason": "stop_sequence", "stop_sequence": served.stop}
        return self._taken()

    def finish(self, usage: Usage) -> list[StreamEvent]:
        self._usage = _usage_of(usage)
        self._emit("message_delta", delta=self._stop, usage=self._usage)
        self._emit("message_stop")
        return self._taken()

    def error(self, error: ApiError) -> list[StreamEvent]:
        return [StreamEvent(error.encoded(MESSAGES_PATH, self.response_id), "error")]

    def plain(self) -> dict[str, Any]:
        return {
            "id": self.response_id,
            "type": "message",
            "role": "assistant",
            "model": self.rendering.model,
            "content": [self._block(block) for block in self.blocks],
            **self._stop,
            "usage": self._usage,
        }

    def _begin(self, block: Block) -> None:
        self._emit("content_block_start", index=block.index, content_block=self._block(block))

    def _append(self, block: Block, text: str) -> None:
        block.texts.append(text)
        name, field = DELTAS[block.kind]
        self._emit("content_block_delta", index=block.index, delta={"type": name, field: text})

    def _end(self, block: Block) -> None:
        block.status = "completed"
        if block.kind == REASONING:
            delta = {"type": "signature_delta", "signature": self.response_id}
            self._emit("content_block_delta", index=block.index, delta=delta)
        self._emit("content_block_stop", index=block.index)

    def _block(self, block: Block) -> dict[str, Any]:
        if block.call is not None:
            return {
                "type": "tool_use",
                "id": block.call.call_id,
                "name": block.call.name,
                "input": _input_of(block.text),
            }
        if block.kind == TEXT:
            return {"type": "text", "text": block.text}
        # Clients send thinking back only if it has a signature.
        signature = "" if block.is_open else self.response_id
        return {"type": "thinking", "thinking": block.text, "signature": signature}


def _usage_of(usage: Usage) -> dict[str, int]:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.output_tokens,
    }


def _input_of(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call. They may be incomplete, and are one text if they are no JSON object."""
    try:
        found = from_json(arguments or "{}", allow_partial=True)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"arguments": arguments}
