"""Incremental parsers of generated text: reasoning in tags, and the common formats of tool calls.

Theory of operation. Generated text passes through a chain of stages: the first splits off reasoning, the next extracts
tool calls. Each stage buffers text that could be the beginning of a tag. The result does not depend on how the text was
split into deltas. Text that begins like a tool call but turns out not to be one is emitted as content.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Container
from enum import Enum, auto

from xxhash import xxh3_128_hexdigest

from forebay.ingress.parsers.call_scanner import NAME, SPACE, CallScanner, Status, ValueScanner, split_at_overlap
from forebay.ingress.parsers.deltas import OutputDelta, ToolCallDelta, merge_deltas

THINK, END_THINK = "<think>", "</think>"
TOOL_CALL, END_TOOL_CALL = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
TOOL_CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"

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

    def call(self, name: str) -> None:
        self._spaces = ""
        self._begun += 1
        if self._is_kept:
            index = self._begun - 1
            self._calls.append(ToolCallDelta(index, name, self._id_of(index)))

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


class ReasoningParser(ParserStage):
    """Stage that splits off reasoning, which ends with `</think>`, and passes on the remaining text.

    Newlines after a tag belong to the tag. Unless the response `is_open`, reasoning must begin with `<think>`.
    """

    def __init__(self, sink: DeltaCollector, rest: ParserStage, *, is_open: bool) -> None:
        super().__init__(sink)
        self._rest = rest
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
                if len(bare) < len(THINK) and THINK.startswith(bare):
                    self._held = text
                    return ""
                if bare.startswith(THINK):  # some models repeat the tag that the prompt already opened
                    self._at = _ReasoningState.OPENED
                    return bare.removeprefix(THINK)
                self._at = _ReasoningState.OPENED if self._is_open else _ReasoningState.AFTER
                return text
            case _ReasoningState.OPENED | _ReasoningState.CLOSED:
                bare = text.lstrip("\n")
                if bare:
                    self._at = _ReasoningState.INSIDE if self._at is _ReasoningState.OPENED else _ReasoningState.AFTER
                return bare
            case _ReasoningState.INSIDE:
                reasoning, tag, after = text.partition(END_THINK)
                if tag:
                    self._at = _ReasoningState.CLOSED
                else:
                    reasoning, self._held = split_at_overlap(text, END_THINK)
                self._sink.reasoning(reasoning)
                return after
            case _:
                self.is_transparent = self._rest.is_transparent
                self._rest.push(text)
                return ""


class _CallState(Enum):
    TEXT = auto()
    OPEN = auto()
    CALL = auto()
    CLOSE = auto()
    NAMED = auto()
    VALUE = auto()


class ToolCallParser(ParserStage):
    """Base of the stages for tool call formats. In all of them calls are JSON objects within the content."""

    def __init__(self, sink: DeltaCollector, at: _CallState) -> None:
        super().__init__(sink)
        self._at = at
        self._held = ""
        self._lead = ""  # the tag before a call; emitted as content if no call follows
        self._scanner = CallScanner()
        self._begun = False  # whether the scanner's call was emitted

    def push(self, text: str) -> None:
        text, self._held = self._held + text, ""
        while text:
            text = self._scan(text) if self._at is _CallState.CALL else self._step(text)

    def finish(self) -> None:
        """Emit buffered text as content, except a partial end tag. A call whose name was emitted stays incomplete."""
        if self._at is _CallState.CALL and not self._begun:
            self._sink.content(self._lead + self._scanner.raw)
        elif self._at is not _CallState.CALL and (self._at is not _CallState.CLOSE or self._lead):
            self._sink.content(self._lead + self._held)

    @abstractmethod
    def _step(self, text: str) -> str:
        """Consume the beginning of the text and return the remaining text, empty if more text is needed."""

    def _scan(self, text: str) -> str:
        scanner = self._scanner
        end = scanner.push(text)
        if scanner.name and not self._begun:
            self._begun = True
            self._sink.call(scanner.name)
        self._sink.arguments(scanner.take())
        if scanner.status is Status.DONE:
            self._at, self._lead = _CallState.CLOSE, ""
        elif scanner.status is Status.FAILED:
            self._reject_call(scanner.raw)
        return text[end:]

    def _start(self, names: Container[str] | None = None) -> None:
        self._at, self._scanner, self._begun = _CallState.CALL, CallScanner(names), False

    def _reject_call(self, text: str) -> None:
        self._sink.content(self._lead + text)
        self._at, self._lead = _CallState.TEXT, ""

    def _find(self, text: str, tag: str) -> str:
        before, found, after = text.partition(tag)
        if found:
            self._at, self._lead = _CallState.OPEN, tag
        else:
            before, self._held = split_at_overlap(text, tag)
        self._sink.content(before)
        return after


class HermesParser(ToolCallParser):
    """Stage for the tool calls of Hermes, Qwen 2.5 and Qwen 3: `<tool_call>{…}</tool_call>` within the content."""

    def __init__(self, sink: DeltaCollector) -> None:
        super().__init__(sink, _CallState.TEXT)

    def _step(self, text: str) -> str:
        if self._at is _CallState.TEXT:
            return self._find(text, TOOL_CALL)
        bare = text.lstrip(SPACE)
        if self._at is _CallState.OPEN:
            self._start()
            return text
        if len(bare) < len(END_TOOL_CALL) and END_TOOL_CALL.startswith(bare):
            self._held = text
            return ""
        if bare.startswith("{"):
            self._start()
            return bare
        self._at = _CallState.TEXT
        return bare.removeprefix(END_TOOL_CALL)


class LlamaJsonParser(ToolCallParser):
    """Stage for the tool calls of Llama 3: objects `{"name": …, "parameters": {…}}`, separated by `;`."""

    def __init__(self, sink: DeltaCollector, names: Container[str]) -> None:
        super().__init__(sink, _CallState.OPEN)
        self._names = names

    def _step(self, text: str) -> str:
        if self._at is _CallState.TEXT:
            self._sink.content(text)
            return ""
        bare = text.lstrip(SPACE + ";" if self._at is _CallState.CLOSE else SPACE)
        if len(bare) < len(PYTHON_TAG) and PYTHON_TAG.startswith(bare):
            self._held = text
            return ""
        if bare.startswith(PYTHON_TAG) and not self._lead:
            self._lead = PYTHON_TAG
            return bare.removeprefix(PYTHON_TAG)
        if bare.startswith("{"):
            self._start(self._names)
            return bare
        self._reject_call(bare if self._at is _CallState.CLOSE else text)
        return ""


class MistralParser(ToolCallParser):
    """Stage for the tool calls of Mistral: `[TOOL_CALLS]` before a list of calls, or before each call.

    In the second format a call is `name{…}` or `name[ARGS]{…}`.
    """

    HEAD = re.compile(r"[{\n]")
    HEAD_CHARS_MAX = 256  # a name, an id and their tags

    def __init__(self, sink: DeltaCollector) -> None:
        super().__init__(sink, _CallState.TEXT)
        self._value = ValueScanner()
        self._listed = False

    def _step(self, text: str) -> str:
        match self._at:
            case _CallState.TEXT:
                return self._find(text, TOOL_CALLS)
            case _CallState.OPEN:
                return self._open(text)
            case _CallState.CLOSE:
                return self._next(text)
            case _CallState.NAMED:
                return self._parse_name(text)
            case _:
                end = self._value.take(text, 0)
                self._sink.arguments(text[:end])
                if self._value.done:
                    self._at = _CallState.TEXT
                return text[end:]

    def _open(self, text: str) -> str:
        bare = text.lstrip(SPACE)
        self._listed = bare.startswith("[")
        if not bare:
            self._held = text
        elif self._listed:
            self._at = _CallState.CLOSE
            self._lead += text[: len(text) - len(bare) + 1]
            return bare[1:]
        elif bare.startswith("{"):
            self._start()
        else:
            self._at = _CallState.NAMED
            return text
        return bare

    def _next(self, text: str) -> str:
        bare = text.lstrip(SPACE + "," if self._listed else "")
        if not bare:
            self._held = text
        elif self._listed and bare.startswith("{"):
            self._start()
        elif self._lead:
            self._reject_call("")
            return text
        else:
            bare = bare[1:] if self._listed and bare.startswith("]") else bare
            self._at = _CallState.TEXT
        return bare

    def _parse_name(self, text: str) -> str:
        begin = len(text) - len(text.lstrip(SPACE))
        found = self.HEAD.search(text, begin, self.HEAD_CHARS_MAX)
        if found is None and len(text) < self.HEAD_CHARS_MAX:
            self._held = text
            return ""
        head = "" if found is None or found.group() != "{" else text[: found.start()]
        name = head.partition(CALL_ID)[0].partition(ARGS)[0].strip()
        if not NAME.fullmatch(name):
            self._reject_call("")
            return text
        self._sink.call(name)
        self._lead, self._at, self._value = "", _CallState.VALUE, ValueScanner()
        return text[len(head) :]


class RequiredCallParser(MistralParser):
    """Stage for a response with `tool_choice: required`, which is a JSON list of calls and nothing else."""

    def __init__(self, sink: DeltaCollector) -> None:
        super().__init__(sink)
        self._at = _CallState.OPEN

    def _step(self, text: str) -> str:
        if self._at is _CallState.NAMED:
            self._reject_call("")
        if self._at is _CallState.TEXT:
            self._sink.content(text)
            return ""
        return super()._step(text)


class NamedCallParser(ParserStage):
    """Stage for a response with a `tool_choice` that names a function: the whole text is the arguments of the call."""

    def __init__(self, sink: DeltaCollector, name: str) -> None:
        super().__init__(sink)
        self._name = name

    def push(self, text: str) -> None:
        if self._name and text:
            self._sink.call(self._name)
            self._name = ""
        self._sink.arguments(text)
