"""Stages that parse generated text incrementally: their base, and the one that splits off reasoning in tags.

Theory of operation. Generated text passes through a chain of stages: the first splits off reasoning, the next extracts
tool calls. Each stage buffers text that could be the beginning of a tag. The result does not depend on how the text was
split into deltas. Text that begins like a tool call but turns out not to be one is emitted as content.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import Enum, auto

import msgspec
from xxhash import xxh3_128_hexdigest

from forebay.ingress.parsers.call_scanner import split_at_tag
from forebay.ingress.parsers.deltas import OutputDelta, ToolCallDelta, merge_deltas

CallIdOf = Callable[[int], str]  # maps the index of a tool call to its id; the same in every ingress


def call_ids(request_id: str, *, chars: int = 24, prefix: str = "call_") -> CallIdOf:
    """Return a function that maps the index of a tool call to an id with `chars` characters after its prefix."""
    return lambda index: prefix + xxh3_128_hexdigest(f"{request_id}/{index}".encode())[:chars]


class DeltaCollector:
    """Collects what the stages of a `ParserChain` emit. Unless `parallel`, it drops all tool calls after the first."""

    def __init__(self, id_of: CallIdOf, *, parallel: bool = True) -> None:
        self._id_of = id_of
        self._parallel = parallel
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCallDelta] = []
        self._spaces = ""  # trailing white space of the content; emitted once more text follows
        self._begun = 0
        self._ids: set[str] = set()

    def text(self, text: str) -> None:
        """Add text to the content of a response without tool calls."""
        self._content.append(text)

    def content(self, text: str) -> None:
        """Add text to the content. White space at its end is dropped if a tool call follows."""
        text = self._spaces + text
        kept = text.rstrip()
        self._spaces = text[len(kept) :]
        self._content.append(kept)

    def reasoning(self, text: str) -> None:
        self._reasoning.append(text)

    def call(self, name: str, call_id: str = "") -> None:
        """Begin a tool call. Its id is `call_id`, which the model wrote, unless that is empty or not unique."""
        self._spaces = ""
        self._begun += 1
        if self._is_kept:
            index = self._begun - 1
            if not call_id or call_id in self._ids:
                call_id = self._id_of(index)
            self._ids.add(call_id)
            self._calls.append(ToolCallDelta(index, name, call_id))

    def arguments(self, text: str) -> None:
        if text and self._is_kept:
            self._calls.append(ToolCallDelta(self._begun - 1, arguments=text))

    @property
    def _is_kept(self) -> bool:
        return self._parallel or self._begun == 1

    def take(self, *, last: bool = False) -> OutputDelta:
        """Return all that was added since the previous call. `last` also emits white space at the end of content."""
        if last and not self._begun:
            self._content.append(self._spaces)
        delta = OutputDelta("".join(self._content), "".join(self._reasoning), tuple(self._calls))
        self._content.clear()
        self._reasoning.clear()
        if self._calls:
            self._calls.clear()
            return merge_deltas([delta])
        return delta


class ParserStage(ABC):
    """A stage of a `ParserChain`. It emits content, reasoning or tool calls, or passes text on to the next stage.

    `is_transparent` means that all further text is content.
    """

    is_transparent = False

    def __init__(self, sink: DeltaCollector) -> None:
        self._sink = sink

    @abstractmethod
    def push(self, text: str) -> None:
        """Process the next part of the text."""

    def finish(self) -> None:  # noqa: B027 - stages without a buffer have nothing to emit
        """Emit the buffered text at the end of the response."""


class ParserChain:
    def __init__(self, sink: DeltaCollector, first: ParserStage) -> None:
        self._sink = sink
        self._first = first

    def push(self, text: str, token_ids: list[int]) -> OutputDelta:
        if self._first.is_transparent:  # most of the text of most responses
            return OutputDelta(text)
        self._first.push(text)
        return self._sink.take()

    def finish(self) -> OutputDelta:
        self._first.finish()
        return self._sink.take(last=True)


class PlainText(ParserStage):
    is_transparent = True

    def push(self, text: str) -> None:
        self._sink.text(text)


class _ReasoningState(Enum):
    BEFORE = auto()
    OPENED = auto()
    INSIDE = auto()
    CLOSED = auto()
    AFTER = auto()


class ReasoningFormat(msgspec.Struct, frozen=True):
    """Format of the reasoning at the beginning of a response.

    Attributes:
        begin: tags that may begin reasoning.
        end: tag that ends reasoning.
        is_implicit: whether all text before the end tag is reasoning, without a tag that begins it.
        tokens: special tokens that are a part of the tags.
    """

    begin: tuple[str, ...]
    end: str
    is_implicit: bool = False
    tokens: tuple[str, ...] = ()

    @property
    def texts(self) -> tuple[str, ...]:
        """Texts that may be special tokens of the model."""
        return (*self.begin, self.end, *self.tokens)


class ReasoningParser(ParserStage):
    """Stage that splits off reasoning, and passes on the remaining text.

    Newlines after a tag belong to the tag. Unless the response `is_open`, reasoning must begin with its tag. The tags
    `calls` end reasoning, too, but are passed on.
    """

    def __init__(
        self, sink: DeltaCollector, rest: ParserStage, row: ReasoningFormat, calls: Sequence[str], *, is_open: bool
    ) -> None:
        super().__init__(sink)
        self._rest = rest
        self._row = row
        self._calls = calls
        self._is_open = is_open
        self._at = _ReasoningState.BEFORE
        self._held = ""

    def push(self, text: str) -> None:
        text, self._held = self._held + text, ""
        while text:
            text = self._step(text)

    def finish(self) -> None:
        if self._at is _ReasoningState.INSIDE or (self._at is _ReasoningState.BEFORE and self._is_open):
            self._sink.reasoning(self._held)
        else:
            self._rest.push(self._held)
        self._rest.finish()

    def _step(self, text: str) -> str:
        match self._at:
            case _ReasoningState.BEFORE:
                bare = text.lstrip()
                if any(len(bare) < len(tag) and tag.startswith(bare) for tag in self._row.begin):
                    self._held = text
                    return ""
                tag = next((tag for tag in self._row.begin if bare.startswith(tag)), "")
                if tag:  # some models repeat the tag that the prompt already opened
                    self._at = _ReasoningState.OPENED
                    return bare.removeprefix(tag)
                self._at = _ReasoningState.OPENED if self._is_open else _ReasoningState.AFTER
                return text
            case _ReasoningState.OPENED | _ReasoningState.CLOSED:
                bare = text.lstrip("\n")
                if bare:
                    self._at = _ReasoningState.INSIDE if self._at is _ReasoningState.OPENED else _ReasoningState.AFTER
                return bare
            case _ReasoningState.INSIDE:
                reasoning, tag, after = split_at_tag(text, (self._row.end, *self._calls))
                self._sink.reasoning(reasoning)
                if tag in self._calls:
                    self._at = _ReasoningState.AFTER
                    return tag + after
                if tag:
                    self._at = _ReasoningState.CLOSED
                    return after
                self._held = after
                return ""
            case _:
                self.is_transparent = self._rest.is_transparent
                self._rest.push(text)
                return ""
