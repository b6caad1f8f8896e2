"""Deltas of a response, as parsers produce them and clients receive them."""

from typing import Protocol

import msgspec


class ToolCallDelta(msgspec.Struct, frozen=True, gc=False):
    """A part of a tool call.

    Attributes:
        index: position of the call in the response, from 0.
        name: name of the function, only in the first delta of a call.
        call_id: id of the call, only in its first delta.
        arguments: the next part of the arguments, as JSON text.
    """

    index: int
    name: str = ""
    call_id: str = ""
    arguments: str = ""


class DecodedLogprob(msgspec.Struct, frozen=True):
    """An output token with its log probability.

    Attributes:
        token: bytes of the token, possibly a part of a UTF-8 character.
        logprob: natural logarithm of its probability.
        top: the most likely alternatives at this position, most likely first.
    """

    token: bytes
    logprob: float
    top: tuple["DecodedLogprob", ...] = ()

    @property
    def text(self) -> str:
        """Return the token as text; incomplete UTF-8 becomes the replacement character."""
        return self.token.decode(errors="replace")


class OutputDelta(msgspec.Struct, frozen=True):
    """Text, tool calls and log probabilities between two events. Falsy when empty."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCallDelta, ...] = ()
    logprobs: tuple[DecodedLogprob, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls or self.logprobs)


EMPTY_DELTA = OutputDelta()


class Parser(Protocol):
    """Finds reasoning and tool calls in one response. How the text is split must not change the merged result."""

    def push(self, text: str, token_ids: list[int]) -> OutputDelta:
        """Return the delta of more text; `token_ids` are its tokens, including special tokens."""

    def finish(self) -> OutputDelta:
        """Return the delta that was buffered until the end of the response."""


def merge_deltas(deltas: list[OutputDelta]) -> OutputDelta:
    """Return all deltas as one, with one entry per tool call, ordered by index."""
    calls: dict[int, ToolCallDelta] = {}
    for call in (call for delta in deltas for call in delta.calls):
        known = calls.get(call.index)
        calls[call.index] = (
            call if known is None else msgspec.structs.replace(known, arguments=known.arguments + call.arguments)
        )
    return OutputDelta(
        content="".join([delta.content for delta in deltas]),
        reasoning="".join([delta.reasoning for delta in deltas]),
        calls=tuple(calls[index] for index in sorted(calls)),
        logprobs=tuple(one for delta in deltas for one in delta.logprobs),
    )
