"""A tool call in JSON, read as it comes: its name, then its arguments as the text that they are.

Theory of operation. Only what decides is looked at: where keys and values begin and end, that is quotes, escapes and
brackets. Arguments are handed on as the model wrote them, so their pieces are the same however the text was cut, and
a client gets them before they are complete. Who is called may stand behind the arguments: then they wait for it.
"""

import re
from collections.abc import Container
from enum import Enum, auto

import msgspec

NAME_KEY = "name"
ARGUMENT_KEYS = ("arguments", "parameters")
NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
DECIDES = re.compile(r'["{}\[\]]')
IN_STRING = re.compile(r'["\\]')
SCALAR_END = re.compile(r"[,}\]\s]")
SPACE = " \t\r\n"


class Status(Enum):
    """How far a scanner is."""

    RUNNING = auto()
    DONE = auto()
    FAILED = auto()


class ValueScanner:
    """Finds the end of one JSON value that begins with its first character. Looks at brackets and strings alone."""

    __slots__ = ("_depth", "_escaped", "_in_string", "_kind", "done")

    def __init__(self) -> None:
        self.done = False
        self._kind = ""
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def take(self, text: str, at: int) -> int:
        """The position behind what belongs to the value, from `at` on."""
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
            found = (IN_STRING if self._in_string else DECIDES).search(text, at)
            if found is None:
                return len(text)
            at = found.end()
            self._see(found.group())
            if self.done:
                return at
        return at

    def _see(self, char: str) -> None:
        if char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = not self._in_string
            self.done = not self._in_string and not self._depth
        else:
            self._depth += 1 if char in "{[" else -1
            self.done = not self._depth


class _At(Enum):
    """What comes next in the object, spaces aside."""

    OPEN = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    NEXT = auto()


class CallScanner:
    """One object `{"name": …, "arguments": {…}}`; other keys are passed over, `parameters` is the same.

    Attributes:
        status: whether it is over. A failed one is no call, and `raw` is all of its text.
        name: of the function, empty until it and its arguments are known.
        arguments: the text of them that was not taken away yet.
    """

    __slots__ = (
        "_at",
        "_bare",
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
        """With `names` only a call of one of them, with arguments, is one."""
        self.status = Status.RUNNING
        self.name = ""
        self.arguments = ""
        self.raw = ""
        self._names = names
        self._at = _At.OPEN
        self._key = ""
        self._name = ""
        self._held: list[str] = []  # of the key or value that is being read
        self._reading = False
        self._passing = False  # what is being read are arguments, given out as they come
        self._value = ValueScanner()

    def push(self, text: str) -> int:
        """Read on; how many characters belong to the call."""
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
        return at

    def take(self) -> str:
        """The arguments since the last time, none before the name is known."""
        if not self.name:
            return ""
        taken, self.arguments = self.arguments, ""
        return taken

    def _begin(self, text: str, at: int) -> int:
        """What the next character that is no space begins; the position from which on to read."""
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
                # Behind a name that was given out there is a call, if a broken one; before it there is none.
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
