"""Incremental parser of tool calls in the content of a response, for all formats that are a row of a table.

Theory of operation. A tag begins calls within the content. After it, tags and separators are skipped until a call
begins with a name or a JSON object. A decoder of the format reads its arguments. Only text that may begin a tag or a
name is kept back. Text that turns out not to be a call becomes content, with the tags before it.
"""

import re
from collections.abc import Callable, Container
from enum import Enum, auto
from typing import Any

import msgspec

from forebay.ingress.openai.tools import ToolSelection
from forebay.ingress.parsers.bodies import CallBody
from forebay.ingress.parsers.call_scanner import NAME, SPACE, CallScanner, Status, split_at_tag
from forebay.ingress.parsers.parsers import DeltaCollector, ParserStage

HEAD_CHARS_MAX = 256  # a name, an id and their tags
SPACED_NAME = re.compile(r"\s*(?P<name>\S+)\s*")


class CallFormat(msgspec.Struct, frozen=True):
    """Format of the tool calls of a model family.

    Attributes:
        begin: tags that begin calls.
        end: tags after calls.
        open: tag before the name of each call; empty if the name follows the other tags, None if calls have no name
            outside of their JSON object.
        head: text between `open` and `head_end`, with the groups `name` and optionally `id`.
        head_end: tags that end the head; with `keeps_head_end` the arguments begin with it.
        close: tags after the arguments of each call.
        body: returns the decoder of the arguments, given the name and the schema of the function.
        tokens: further special tokens that the format needs.
        has_objects: whether a call may be a JSON object with the name.
        has_list: whether calls may be in a list.
        is_listed: whether calls whose name precedes the arguments are always in a list.
        is_first: whether calls are only at the beginning of the response, where they need no tag.
        is_known: whether text is a call only if it calls a function of the request.
        ends_reasoning: whether the tags end reasoning, because models of the family may omit its end tag.
    """

    begin: tuple[str, ...]
    end: tuple[str, ...] = ()
    open: str | None = None
    head: re.Pattern[str] = SPACED_NAME
    head_end: tuple[str, ...] = ()
    keeps_head_end: bool = False
    close: tuple[str, ...] = ()
    body: Callable[[str, dict[str, Any]], CallBody] | None = None
    tokens: tuple[str, ...] = ()
    has_objects: bool = False
    has_list: bool = False
    is_listed: bool = False
    is_first: bool = False
    is_known: bool = False
    ends_reasoning: bool = False

    @property
    def texts(self) -> tuple[str, ...]:
        """Texts that may be special tokens of the model."""
        return (*self.begin, *self.end, *self.head_end, *self.close, *self.tokens, *filter(None, [self.open]))


REQUIRED = CallFormat(
    begin=(), has_objects=True, has_list=True, is_first=True
)  # the output of a forced call of any function


class _At(Enum):
    TEXT = auto()
    NEXT = auto()
    HEAD = auto()
    BODY = auto()


class ToolCallParser(ParserStage):
    def __init__(self, sink: DeltaCollector, row: CallFormat, choice: ToolSelection) -> None:
        super().__init__(sink)
        self._row = row
        self._schemas = {tool.function.name: dict(tool.function.parameters or {}) for tool in choice.tools}
        self._known: Container[str] | None = self._schemas if row.is_known else None
        self._at = _At.NEXT if row.is_first else _At.TEXT
        self._held = ""
        self._lead = ""  # tags before a call; emitted as content if no call follows
        self._is_begun = False  # whether a call followed the tag that began the calls
        self._in_list = False
        self._body: CallBody | CallScanner = CallScanner()
        self._is_named = False  # whether the current call was emitted
        self._id = ""

    def push(self, text: str) -> None:
        text, self._held = self._held + text, ""
        while text:
            text = self._step(text)

    def finish(self) -> None:
        """Emit buffered text as content, except a partial end tag. A call whose name was emitted stays incomplete."""
        if self._at is _At.BODY:
            self._body.finish()
            self._emit_body()
            self._sink.content("" if self._is_named else self._lead + self._body.raw)
        elif self._at is not _At.NEXT or not self._is_begun or self._lead:
            self._sink.content(self._lead + self._held)

    def _step(self, text: str) -> str:
        match self._at:
            case _At.TEXT:
                return self._find(text)
            case _At.NEXT:
                return self._next(text)
            case _At.HEAD:
                return self._read_head(text)
            case _:
                rest = self._body.push(text)
                self._emit_body()
                if self._body.status is Status.DONE:
                    self._end_call()
                elif self._body.status is Status.FAILED:
                    self._reject(self._body.raw)
                return rest

    def _find(self, text: str) -> str:
        row = self._row
        if row.is_first:
            self._sink.content(text)
            return ""
        before, tag, rest = split_at_tag(text, row.begin)
        self._sink.content(before)
        if not tag:
            self._held = rest
            return ""
        self._at, self._lead, self._is_begun, self._in_list = _At.NEXT, tag, False, False
        if tag == row.open:
            self._at = _At.HEAD
        return rest

    def _next(self, text: str) -> str:
        row = self._row
        # Lists separate calls by commas, Llama 3 by semicolons. Neither begins a call.
        bare = text.lstrip(SPACE + ("," if self._in_list else ";" if row.is_first and self._is_begun else ""))
        skipped = (*row.close, *row.end) if self._is_begun else ()
        if row.is_first and not self._in_list:
            skipped = row.end if self._is_begun else (*row.begin, *row.end)
        tags = [tag for tag in (row.open, *skipped) if tag]
        tag = next((tag for tag in tags if bare.startswith(tag)), "")
        if not bare or (not tag and any(one.startswith(bare) for one in tags)):
            self._held = text
        elif tag:
            return self._skip(text, bare, tag)
        elif bare.startswith("[") and row.has_list and not self._in_list and not self._is_begun:
            self._in_list = True
            self._lead += text[: len(text) - len(bare) + 1]
            return bare[1:]
        elif bare.startswith("]") and self._in_list and self._is_begun:
            self._in_list = False
            self._at = _At.NEXT if row.end else _At.TEXT
            return bare[1:]
        elif bare.startswith("{") and row.has_objects:
            self._at, self._body, self._is_named, self._id = _At.BODY, CallScanner(self._known), False, ""
            self._lead += text[: len(text) - len(bare)]
            return bare
        elif row.open == "" and (self._in_list or not row.is_listed):
            self._at = _At.HEAD
            self._lead += text[: len(text) - len(bare)]
            return bare
        elif self._is_begun:
            self._reject("")
            return bare
        else:
            self._reject("")
            return text
        return ""

    def _skip(self, text: str, bare: str, tag: str) -> str:
        if tag == self._row.open:
            self._at = _At.HEAD
        elif self._is_begun and tag in self._row.end:
            self._at, self._lead = _At.TEXT, ""
            return bare.removeprefix(tag)
        if not self._is_begun or tag == self._row.open:
            self._lead += text[: len(text) - len(bare)] + tag
        return bare.removeprefix(tag)

    def _read_head(self, text: str) -> str:
        row = self._row
        head, tag, _ = split_at_tag(text[:HEAD_CHARS_MAX], row.head_end)
        if not tag and len(text) < HEAD_CHARS_MAX:
            self._held = text
            return ""
        match = row.head.fullmatch(head) if tag else None
        name = match["name"] if match else ""
        if match is None or not NAME.fullmatch(name) or (self._known is not None and name not in self._known):
            self._reject("")
            return text
        assert row.body is not None, "a format with names has a decoder"
        self._id = match.groupdict().get("id") or ""
        self._at, self._is_named = _At.BODY, False
        self._body = row.body(name, self._schemas.get(name, {}))
        taken = len(head) if row.keeps_head_end else len(head) + len(tag)
        self._lead += text[:taken]
        if self._body.name:
            self._emit_body()
        return text[taken:]

    def _emit_body(self) -> None:
        body = self._body
        if body.name and not self._is_named:
            self._sink.call(body.name, self._id)
            self._is_named, self._is_begun, self._lead = True, True, ""
        self._sink.arguments(body.take())

    def _end_call(self) -> None:
        row = self._row
        is_followed = self._in_list or row.is_first or row.end or row.close
        self._at = _At.NEXT if is_followed else _At.TEXT

    def _reject(self, text: str) -> None:
        self._sink.content(self._lead + text)
        self._at, self._lead = _At.TEXT, ""


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
