"""Incremental scanner of one tool call in JSON. It returns the function name, and the arguments as raw text.

Theory of operation. The scanner looks only at quotes, escapes and brackets. It passes arguments on exactly as the model
wrote them, so a client receives them before they are complete. If the name follows the arguments, they are buffered
until it is known. The result does not depend on how the text is split into calls of `push`.
"""

import re
from collections.abc import Container, Sequence
from enum import Enum, auto

import msgspec

NAME_KEY = "name"
ARGUMENT_KEYS = ("arguments", "parameters")
NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
STRUCTURAL = re.compile(r'["{}\[\]]')
IN_STRING = re.compile(r'["\\]')
SCALAR_END = re.compile(r"[,}\]\s]")
SPACE = " \t\r\n"


class Status(Enum):
    RUNNING = auto()
    DONE = auto()
    FAILED = auto()


class ValueScanner:
    """Finds the end of one JSON value in a text that arrives in parts. It does not validate the value."""

    __slots__ = ("_depth", "_escaped", "_in_string", "_kind", "done")

    def __init__(self) -> None:
        self.done = False
        self._kind = ""
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def take(self, text: str, at: int) -> int:
        """Process the next part of the text, and return the position after the characters that belong to the value."""
        if not self._kind:
            first = text[at]
            self._kind = "string" if first == '"' else "nested" if first in "{[" else "scalar"
        if self._kind == "scalar":
            found = SCALAR_END.search(text, at)
            self.done = found is not None
            return len(text) if found is None else found.start()
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            found = (IN_STRING if self._in_string else STRUCTURAL).search(text, at)
            if found is None:
                return len(text)
            at = found.end()
            self._apply(found.group())
            if self.done:
                return at
        return at

    def _apply(self, char: str) -> None:
        if char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = not self._in_string
            self.done = not self._in_string and not self._depth
        else:
            self._depth += 1 if char in "{[" else -1
            self.done = not self._depth


class _At(Enum):
    """The next token that the object expects, apart from white space."""

    OPEN = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    NEXT = auto()


class CallScanner:
    """Scanner of one tool call: a JSON object with `name` and `arguments` (or `parameters`). It ignores other keys.

    Attributes:
        status: if it is `FAILED` while `name` is empty, the text is not a tool call.
        name: name of the function; empty until the name and the first character of the arguments were scanned.
        arguments: text of the arguments that `take` has not returned yet.
        raw: the scanned text, to be emitted as content if it is not a tool call; empty once `name` is set.
    """

    __slots__ = (
        "_at",
        "_held",
        "_key",
        "_name",
        "_names",
        "_passing",
        "_reading",
        "_value",
        "arguments",
        "name",
        "raw",
        "status",
    )

    def __init__(self, names: Container[str] | None = None) -> None:
        """Accept only calls with arguments of the functions in `names`; None accepts calls of any function."""
        self.status = Status.RUNNING
        self.name = ""
        self.arguments = ""
        self.raw = ""
        self._names = names
        self._at = _At.OPEN
        self._key = ""
        self._name = ""
        self._held: list[str] = []  # text of the key or value that is being read
        self._reading = False
        self._passing = False  # whether the current value is streamed as arguments
        self._value = ValueScanner()

    def push(self, text: str) -> str:
        """Scan the next part of the text, and return what follows the call."""
        at = 0
        while at < len(text) and self.status is Status.RUNNING:
            if self._reading:
                at = self._read(text, at)
            elif text[at] in SPACE:
                at += 1
            else:
                at = self._begin(text, at)
        if not self.name:
            self.raw += text[:at]
        return text[at:]

    def finish(self) -> None:
        """Do nothing: the scanner keeps no arguments back."""

    def take(self) -> str:
        """Return the arguments scanned since the previous call of `take`; empty before the name is known."""
        if not self.name:
            return ""
        taken, self.arguments = self.arguments, ""
        return taken

    def _begin(self, text: str, at: int) -> int:
        char = text[at]
        match self._at:
            case _At.OPEN if char == "{":
                self._at = _At.KEY
            case _At.KEY if char == '"':
                self._start_value(passing=False)
                return at
            case _At.COLON if char == ":":
                self._at = _At.VALUE
            case _At.VALUE if char not in ",:}]":
                first = self._key in ARGUMENT_KEYS and not self.name and not self.arguments
                self._start_value(passing=first and char == "{" and bool(self._name))
                return at
            case _At.NEXT if char == ",":
                self._at = _At.KEY
            case _At.NEXT | _At.KEY if char == "}":
                self._end()
            case _:
                # Once the name was emitted, invalid JSON ends the call; before that, the text is not a call.
                self.status = Status.DONE if self.name else Status.FAILED
                return at
        return at + 1

    def _start_value(self, *, passing: bool) -> None:
        self._value, self._held = ValueScanner(), []
        self._reading, self._passing = True, passing
        if passing:
            self.name, self.raw = self._name, ""

    def _read(self, text: str, at: int) -> int:
        end = self._value.take(text, at)
        if self._passing:
            self.arguments += text[at:end]
        else:
            self._held.append(text[at:end])
        if self._value.done:
            self._reading = False
            self._complete("".join(self._held))
        return end

    def _complete(self, text: str) -> None:
        if self._at is _At.KEY:
            self._key = _string(text) or ""
            self._at = _At.COLON
            return
        self._at = _At.NEXT
        if self._passing or self.name:
            return
        if self._key == NAME_KEY and not self._name:
            self._name = _string(text) or ""
            if not NAME.fullmatch(self._name) or (self._names is not None and self._name not in self._names):
                self.status = Status.FAILED
        elif self._key in ARGUMENT_KEYS and not self.arguments:
            whole = _string(text) if text.startswith('"') else text
            self.arguments = "{}" if whole in (None, "", "null") else whole or "{}"
        if self._name and self.arguments:
            self.name, self.raw = self._name, ""

    def _end(self) -> None:
        if not self.name and self._name and self._names is None:
            self.name, self.raw, self.arguments = self._name, "", "{}"
        self.status = Status.DONE if self.name else Status.FAILED


def _string(text: str) -> str | None:
    try:
        return msgspec.json.decode(text, type=str, strict=True)
    except (msgspec.MsgspecError, ValueError):
        return None


def split_at_overlap(text: str, tag: str) -> tuple[str, str]:
    """Split a text into the part that cannot belong to `tag`, and its longest suffix that may begin the tag."""
    for length in range(min(len(text), len(tag) - 1), 0, -1):
        if text.endswith(tag[:length]):
            return text[:-length], text[-length:]
    return text, ""


def split_at_tag(text: str, tags: Sequence[str]) -> tuple[str, str, str]:
    """Split a text at the first of some tags into the text before it, the tag and the text after it.

    Without a tag, the last part is the longest suffix of the text that may begin one.
    """
    found = [(at, -len(tag), tag) for tag in tags if (at := text.find(tag)) >= 0]
    if found:
        at, _, tag = min(found)
        return text[:at], tag, text[at + len(tag) :]
    before, held = min(split_at_overlap(text, tag) for tag in tags)
    return before, "", held
