"""Deltas (consecutive parts) of a response, as parsers produce them and clients receive them."""

from collections.abc import Sequence
from typing import Protocol

import msgspec


class ToolCallDelta(msgspec.Struct, frozen=True, gc=False):
    """A part of a tool call. Only the first delta of a call has its `name` and `call_id`; others have empty texts.

    Attributes:
        index: position of the call in the response, from 0.
        arguments: the next part of the arguments, as JSON text.
    """

    index: int
    name: str = ""
    call_id: str = ""
    arguments: str = ""


class DecodedLogprob(msgspec.Struct, frozen=True):
    """An output token with the natural logarithm of its probability.

    Attributes:
        token: bytes of the token, possibly only a part of a UTF-8 character.
        top: the most likely tokens at this position, in descending order; empty inside of `top`.
    """

    token: bytes
    logprob: float
    top: tuple["DecodedLogprob", ...] = ()

    @property
    def text(self) -> str:
        """The token as text. Incomplete UTF-8 characters become the replacement character."""
        return self.token.decode(errors="replace")


class OutputDelta(msgspec.Struct, frozen=True):
    """Next part of a response. Falsy when all fields are empty. `content` excludes reasoning and tool calls.

    `token_ids` are the output tokens, if the format of the response contains them.
    """

    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCallDelta, ...] = ()
    logprobs: tuple[DecodedLogprob, ...] = ()
    token_ids: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls or self.logprobs or self.token_ids)


EMPTY_DELTA = OutputDelta()


class Parser(Protocol):
    """Finds reasoning and tool calls in one response, independently of how its text is split into calls of `push`."""

    def push(self, text: str, token_ids: list[int]) -> OutputDelta:
        """Return the delta of the next part of the text. Text that could be a part of a tag is kept back.

        `token_ids` include special tokens.
        """

    def finish(self) -> OutputDelta:
        """Return the delta of the text that was kept back, at the end of the response."""


def merge_deltas(deltas: Sequence[OutputDelta]) -> OutputDelta:
    """Return consecutive deltas as one delta. Its `calls` has one entry per tool call, ordered by index."""
    calls: dict[int, list[ToolCallDelta]] = {}
    for call in (call for delta in deltas for call in delta.calls):
        calls.setdefault(call.index, []).append(call)
    return OutputDelta(
        content="".join([delta.content for delta in deltas]),
        reasoning="".join([delta.reasoning for delta in deltas]),
        calls=tuple(_joined(calls[index]) for index in sorted(calls)),
        logprobs=tuple(one for delta in deltas for one in delta.logprobs),
        token_ids=tuple(one for delta in deltas for one in delta.token_ids),
    )


def _joined(parts: Sequence[ToolCallDelta]) -> ToolCallDelta:
    return msgspec.structs.replace(parts[0], arguments="".join([part.arguments for part in parts]))


def is_json(text: str) -> bool:
    """Return whether a text is a complete JSON value."""
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except (msgspec.MsgspecError, RecursionError):
        return False
    return True
