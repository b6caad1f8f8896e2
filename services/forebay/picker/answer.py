"""Follow the answer of a server to a chat or text completion. Performs no I/O.

The client gets the bytes of the server. Only the event with the token counts is left out, if the picker asked for it.
"""

import re
from typing import Any

import msgspec

from forebay.events.codec import MALFORMED
from forebay.events.progress import FinishReason

EVENT_END = re.compile(rb"\r\n\r\n|\n\n|\r\r")
EVENT_END_BYTES = 4
FOLLOWED_MAX = 8 << 20  # bytes of an event, or of a whole answer; a longer one is passed on without being read
EVENT_STREAM = "text/event-stream"


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Choice(msgspec.Struct):
    text: str = ""
    delta: dict[str, Any] = {}
    finish_reason: str | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice] = []
    usage: Usage | None = None


class Answer:
    """Answer to one request, as far as the server has sent it.

    Attributes:
        output_tokens: number of output tokens: as the server says, or before that, of parts with output.
        usage: the token counts of the server; None if it has not sent them.
        is_stream: whether it consists of server-sent events.
    """

    def __init__(self, *, is_stream: bool, hides_usage: bool) -> None:
        self.output_tokens = 0
        self.usage: Usage | None = None
        self.finish_reason: FinishReason = "stop"
        self.is_stream = is_stream
        self._hides_usage = hides_usage
        self._pending = bytearray()
        self._searched = 0  # bytes of `_pending` that contain no end of an event
        self._is_followed = True

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that the server had cached; None if it has not said."""
        details = None if self.usage is None else self.usage.prompt_tokens_details
        return None if details is None else details.cached_tokens

    def feed(self, body: bytes, *, is_last: bool) -> bytes:
        """Follow the next bytes of the answer, and return what the client gets of them.

        An incomplete event is returned with its end, because it may have to be left out.
        """
        if not self._is_followed:
            return body
        passed = b"" if self.is_stream else body
        self._pending += body
        if self.is_stream:
            passed = self._feed_events()
        elif is_last:
            self._follow(self._pending)
        if is_last or len(self._pending) > FOLLOWED_MAX:
            self._is_followed = False
            passed += self._pending if self.is_stream else b""
            self._pending.clear()
        return passed

    def _feed_events(self) -> bytes:
        passed, begin = [], 0
        for end in EVENT_END.finditer(self._pending, max(0, self._searched - EVENT_END_BYTES + 1)):
            event = self._pending[begin : end.end()]
            begin = end.end()
            lines = event.splitlines()
            data = b"\n".join(line[5:] for line in lines if line.startswith(b"data:"))
            if not (self._follow(data) and self._hides_usage):
                passed.append(event)
        del self._pending[:begin]
        self._searched = len(self._pending)
        return b"".join(passed)

    def _follow(self, data: bytes | bytearray) -> bool:
        """Count the output in a part of the answer. Return whether it has token counts and nothing else."""
        try:
            found = msgspec.json.decode(data, type=_Completion)
        except MALFORMED:  # a comment, the end of the stream, or an error
            return False
        for choice in found.choices:
            if choice.finish_reason is not None:
                self.finish_reason = "length" if choice.finish_reason == "length" else "stop"
            self.output_tokens += bool(choice.text) or any(choice.delta.get(name) for name in OUTPUT)
        if found.usage is not None:
            self.usage = found.usage
            self.output_tokens = max(self.output_tokens, found.usage.completion_tokens)
        return found.usage is not None and not found.choices


OUTPUT = ("content", "reasoning", "reasoning_content", "tool_calls")


def with_usage(raw: bytes) -> tuple[bytes, bool]:
    """Return the body of a request that asks for token counts, and whether that is new to it."""
    body: dict[str, Any] = msgspec.json.decode(raw)
    options = body.get("stream_options") or {}
    if not body.get("stream") or options.get("include_usage"):
        return raw, False
    options = {**options, "include_usage": True, "continuous_usage_stats": False}
    return msgspec.json.encode({**body, "stream_options": options}), True
