"""Parsers of answers: reasoning in tags, and the common formats of tool calls.

Theory of operation. Text goes through a chain: reasoning is split off first, tool calls are looked for in the rest.
Each link keeps back what could be the beginning of a tag. Everything follows from the text alone, so however it is cut
the pieces make the same whole; and what begins like a call but is none is given out as the text that it is.
"""

import re
from collections.abc import Callable, Container
from enum import Enum, auto

from xxhash import xxh3_128_hexdigest

from forebay.ingress.parsers.call_scanner import NAME, SPACE, CallScanner, Status, ValueScanner
from forebay.ingress.parsers.deltas import OutputDelta, ToolCallDelta, merge_deltas
from forebay.ingress.parsers.text import split_at_overlap

THINK, END_THINK = "<think>", "</think>"
TOOL_CALL, END_TOOL_CALL = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
TOOL_CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"

IdOf = Callable[[int], str]  # the id of an answer's call, by its index: the same whoever parses the answer


def call_ids(request_id: str, *, chars: int = 24, prefix: str = "call_") -> IdOf:
    """Ids of the calls of one answer."""
    return lambda index: prefix + xxh3_128_hexdigest(f"{request_id}/{index}".encode())[:chars]


class DeltaCollector:
    """What a chain of parsers found in one push."""

    def __init__(self, id_of: IdOf, *, parallel: bool = True) -> None:
        self._id_of = id_of
        self._parallel = parallel
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCallDelta] = []
        self._spaces = ""  # at the end of the content: they count once more text follows
        self._begun = 0

    def content(self, text: str) -> None:
        """Text for the reader. Spaces before a tool call are left out."""
        text = self._spaces + text
        kept = text.rstrip()
        self._spaces = text[len(kept) :]
        self._content.append(kept)

    def reasoning(self, text: str) -> None:
        """How the answer was thought out."""
        self._reasoning.append(text)

    def call(self, name: str) -> None:
        """A call begins."""
        self._spaces = ""
        self._begun += 1
        if self._wanted:
            index = self._begun - 1
            self._calls.append(ToolCallDelta(index, name, self._id_of(index)))

    def arguments(self, text: str) -> None:
        """More arguments of the call that began last."""
        if text and self._wanted:
            self._calls.append(ToolCallDelta(self._begun - 1, arguments=text))

    @property
    def _wanted(self) -> bool:
        return self._parallel or self._begun == 1

    def take(self, *, last: bool = False) -> OutputDelta:
        """What came since the last time."""
        if last and not self._begun:
            self._content.append(self._spaces)
        said = merge_deltas([OutputDelta("".join(self._content), "".join(self._reasoning), tuple(self._calls))])
        self._content, self._reasoning, self._calls = [], [], []
        return said


class ParserStage:
    """A part of the chain. `push` and `finish` write to the sink."""

    def __init__(self, sink: DeltaCollector) -> None:
        self._sink = sink

    def push(self, text: str) -> None:
        """Take in more text."""
        raise NotImplementedError

    def finish(self) -> None:
        """Give out what was held back."""


class ParserChain:
    """The parser of one answer."""

    def __init__(self, sink: DeltaCollector, first: ParserStage) -> None:
        self._sink = sink
        self._first = first

    def push(self, text: str, token_ids: list[int]) -> OutputDelta:
        """As `Parser` has it."""
        self._first.push(text)
        return self._sink.take()

    def finish(self) -> OutputDelta:
        """As `Parser` has it."""
        self._first.finish()
        return self._sink.take(last=True)


class PlainText(ParserStage):
    """All is content."""

    def push(self, text: str) -> None:
        """As `ParserStage` has it."""
        self._sink.content(text)


class _Think(Enum):
    BEFORE = auto()
    OPENED = auto()
    INSIDE = auto()
    CLOSED = auto()
    BEHIND = auto()


class ReasoningParser(ParserStage):
    """Reasoning up to `</think>`. With `is_open` the answer begins inside, else only if it begins with the tag.

    Newlines behind a tag belong to it.
    """

    def __init__(self, sink: DeltaCollector, rest: ParserStage, *, is_open: bool) -> None:
        super().__init__(sink)
        self._rest = rest
        self._is_open = is_open
        self._at = _Think.BEFORE
        self._held = ""

    def push(self, text: str) -> None:
        """As `ParserStage` has it."""
        text, self._held = self._held + text, ""
        while text:
            text = self._step(text)

    def finish(self) -> None:
        """As `ParserStage` has it."""
        if self._at is _Think.INSIDE or (self._at is _Think.BEFORE and self._is_open):
            self._sink.reasoning(self._held)
        else:
            self._rest.push(self._held)
        self._rest.finish()

    def _step(self, text: str) -> str:
        """Deal with the beginning of the text; the rest of it."""
        match self._at:
            case _Think.BEFORE:
                bare = text.lstrip()
                if len(bare) < len(THINK) and THINK.startswith(bare):
                    self._held = text
                    return ""
                if bare.startswith(THINK):  # though a prompt opened it, some models say it again
                    self._at = _Think.OPENED
                    return bare.removeprefix(THINK)
                self._at = _Think.OPENED if self._is_open else _Think.BEHIND
                return text
            case _Think.OPENED | _Think.CLOSED:
                bare = text.lstrip("\n")
                if bare:
                    self._at = _Think.INSIDE if self._at is _Think.OPENED else _Think.BEHIND
                return bare
            case _Think.INSIDE:
                thought, tag, behind = text.partition(END_THINK)
                if tag:
                    self._at = _Think.CLOSED
                else:
                    thought, self._held = split_at_overlap(text, END_THINK)
                self._sink.reasoning(thought)
                return behind
            case _:
                self._rest.push(text)
                return ""


class _Calling(Enum):
    TEXT = auto()
    OPEN = auto()
    CALL = auto()
    CLOSE = auto()
    NAMED = auto()
    VALUE = auto()


class ToolCallParser(ParserStage):
    """What formats of tool calls have in common: text, and calls as JSON objects in it."""

    def __init__(self, sink: DeltaCollector, at: _Calling) -> None:
        super().__init__(sink)
        self._at = at
        self._held = ""
        self._lead = ""  # the tag before a call: text after all, when none follows
        self._scanner = CallScanner()
        self._begun = False  # the scanner's call was given out

    def push(self, text: str) -> None:
        """As `ParserStage` has it."""
        text, self._held = self._held + text, ""
        while text:
            text = self._scan(text) if self._at is _Calling.CALL else self._step(text)

    def finish(self) -> None:
        """As `ParserStage` has it. A call that was given out stays as it is; half of what ends one is none of the text."""
        if self._at is _Calling.CALL and not self._begun:
            self._sink.content(self._lead + self._scanner.raw)
        elif self._at is not _Calling.CALL and (self._at is not _Calling.CLOSE or self._lead):
            self._sink.content(self._lead + self._held)

    def _step(self, text: str) -> str:
        """Deal with the beginning of the text; the rest of it, or none when more has to come."""
        raise NotImplementedError

    def _scan(self, text: str) -> str:
        scanner = self._scanner
        end = scanner.push(text)
        if scanner.name and not self._begun:
            self._begun = True
            self._sink.call(scanner.name)
        self._sink.arguments(scanner.take())
        if scanner.status is Status.DONE:
            self._at, self._lead = _Calling.CLOSE, ""
        elif scanner.status is Status.FAILED:
            self._give_up(scanner.raw)
        return text[end:]

    def _start(self, names: Container[str] | None = None) -> None:
        self._at, self._scanner, self._begun = _Calling.CALL, CallScanner(names), False

    def _give_up(self, text: str) -> None:
        """It is no call."""
        self._sink.content(self._lead + text)
        self._at, self._lead = _Calling.TEXT, ""

    def _find(self, text: str, tag: str) -> str:
        """Text up to a tag is content; what stands behind the tag."""
        before, found, behind = text.partition(tag)
        if found:
            self._at, self._lead = _Calling.OPEN, tag
        else:
            before, self._held = split_at_overlap(text, tag)
        self._sink.content(before)
        return behind


class HermesParser(ToolCallParser):
    """`<tool_call>{…}</tool_call>`, with text around: Hermes, Qwen 2.5 and 3."""

    def __init__(self, sink: DeltaCollector) -> None:
        super().__init__(sink, _Calling.TEXT)

    def _step(self, text: str) -> str:
        if self._at is _Calling.TEXT:
            return self._find(text, TOOL_CALL)
        bare = text.lstrip(SPACE)
        if self._at is _Calling.OPEN:
            self._start()
            return text
        if len(bare) < len(END_TOOL_CALL) and END_TOOL_CALL.startswith(bare):
            self._held = text
            return ""
        if bare.startswith("{"):
            self._start()
            return bare
        self._at = _Calling.TEXT
        return bare.removeprefix(END_TOOL_CALL)


class LlamaJsonParser(ToolCallParser):
    """The whole answer is `{"name": …, "parameters": {…}}`, several with `;` between: Llama 3."""

    def __init__(self, sink: DeltaCollector, names: Container[str]) -> None:
        super().__init__(sink, _Calling.OPEN)
        self._names = names

    def _step(self, text: str) -> str:
        if self._at is _Calling.TEXT:
            self._sink.content(text)
            return ""
        bare = text.lstrip(SPACE + ";" if self._at is _Calling.CLOSE else SPACE)
        if len(bare) < len(PYTHON_TAG) and PYTHON_TAG.startswith(bare):
            self._held = text
            return ""
        if bare.startswith(PYTHON_TAG) and not self._lead:
            self._lead = PYTHON_TAG
            return bare.removeprefix(PYTHON_TAG)
        if bare.startswith("{"):
            self._start(self._names)
            return bare
        self._give_up(bare if self._at is _Calling.CLOSE else text)
        return ""


class MistralParser(ToolCallParser):
    """`[TOOL_CALLS]` before a list of calls, or before each call as `name{…}` or `name[ARGS]{…}`."""

    HEAD = re.compile(r"[{\n]")
    HEAD_CHARS_MAX = 256  # a name, an id and their tags

    def __init__(self, sink: DeltaCollector) -> None:
        super().__init__(sink, _Calling.TEXT)
        self._value = ValueScanner()
        self._listed = False

    def _step(self, text: str) -> str:
        match self._at:
            case _Calling.TEXT:
                return self._find(text, TOOL_CALLS)
            case _Calling.OPEN:
                return self._open(text)
            case _Calling.CLOSE:
                return self._next(text)
            case _Calling.NAMED:
                return self._named(text)
            case _:
                end = self._value.take(text, 0)
                self._sink.arguments(text[:end])
                if self._value.done:
                    self._at = _Calling.TEXT
                return text[end:]

    def _open(self, text: str) -> str:
        bare = text.lstrip(SPACE)
        self._listed = bare.startswith("[")
        if not bare:
            self._held = text
        elif self._listed:
            self._at = _Calling.CLOSE
            self._lead += text[: len(text) - len(bare) + 1]
            return bare[1:]
        elif bare.startswith("{"):
            self._start()
        else:
            self._at = _Calling.NAMED
            return text
        return bare

    def _next(self, text: str) -> str:
        """Behind a call, or before the first one of a list."""
        bare = text.lstrip(SPACE + "," if self._listed else "")
        if not bare:
            self._held = text
        elif self._listed and bare.startswith("{"):
            self._start()
        elif self._lead:
            self._give_up("")
            return text
        else:
            bare = bare[1:] if self._listed and bare.startswith("]") else bare
            self._at = _Calling.TEXT
        return bare

    def _named(self, text: str) -> str:
        begin = len(text) - len(text.lstrip(SPACE))
        found = self.HEAD.search(text, begin, self.HEAD_CHARS_MAX)
        if found is None and len(text) < self.HEAD_CHARS_MAX:
            self._held = text
            return ""
        head = "" if found is None or found.group() != "{" else text[: found.start()]
        name = head.partition(CALL_ID)[0].partition(ARGS)[0].strip()
        if not NAME.fullmatch(name):
            self._give_up("")
            return text
        self._sink.call(name)
        self._lead, self._at, self._value = "", _Calling.VALUE, ValueScanner()
        return text[len(head) :]


class RequiredCallParser(MistralParser):
    """A list of calls and nothing else, as the structure of an answer that must call demands."""

    def __init__(self, sink: DeltaCollector) -> None:
        super().__init__(sink)
        self._at = _Calling.OPEN

    def _step(self, text: str) -> str:
        if self._at is _Calling.NAMED:
            self._give_up("")
        if self._at is _Calling.TEXT:
            self._sink.content(text)
            return ""
        return super()._step(text)


class NamedCallParser(ParserStage):
    """The arguments of one function and nothing else, as the structure of an answer that must call it demands."""

    def __init__(self, sink: DeltaCollector, name: str) -> None:
        super().__init__(sink)
        self._name = name

    def push(self, text: str) -> None:
        """As `ParserStage` has it."""
        if self._name and text:
            self._sink.call(self._name)
            self._name = ""
        self._sink.arguments(text)
