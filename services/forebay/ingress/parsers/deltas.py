"""Pieces of an answer, as parsers find them in its text and as clients get them."""

from typing import Protocol

import msgspec


class ToolCallDelta(msgspec.Struct, frozen=True, gc=False):
    """A part of a tool call; `name` and `call_id` come with the first of its pieces, `arguments` is JSON text."""

    index: int
    name: str = ""
    call_id: str = ""
    arguments: str = ""


class DecodedLogprob(msgspec.Struct, frozen=True):
    """A token with the logarithm of its probability. `top` are the likeliest in its place."""

    token: bytes
    logprob: float
    top: tuple["DecodedLogprob", ...] = ()

    @property
    def text(self) -> str:
        """The token as text; what is no whole character is shown as the replacement character."""
        return self.token.decode(errors="replace")


class OutputDelta(msgspec.Struct, frozen=True):
    """What an answer says from one moment to another; an empty one is false."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCallDelta, ...] = ()
    logprobs: tuple[DecodedLogprob, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls or self.logprobs)


EMPTY_DELTA = OutputDelta()


class Parser(Protocol):
    """Finds reasoning and tool calls in one answer. However the text is cut, the pieces make the same whole."""

    def push(self, text: str, token_ids: list[int]) -> OutputDelta:
        """What more text gives; `token_ids` are those that it came from, special ones too."""

    def finish(self) -> OutputDelta:
        """What was held back, now that nothing follows."""


def merge_deltas(pieces: list[OutputDelta]) -> OutputDelta:
    """All pieces as one, the calls whole and in order."""
    calls: dict[int, ToolCallDelta] = {}
    for call in (call for piece in pieces for call in piece.calls):
        known = calls.get(call.index)
        calls[call.index] = (
            call if known is None else msgspec.structs.replace(known, arguments=known.arguments + call.arguments)
        )
    return OutputDelta(
        content="".join([piece.content for piece in pieces]),
        reasoning="".join([piece.reasoning for piece in pieces]),
        calls=tuple(calls[index] for index in sorted(calls)),
        logprobs=tuple(told for piece in pieces for told in piece.logprobs),
    )
