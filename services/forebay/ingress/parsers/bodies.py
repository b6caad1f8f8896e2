"""Incremental decoders of the arguments of one tool call, for formats whose calls are not JSON objects with a name.

Theory of operation. A decoder gets the text after the name of the function and emits the arguments as JSON text. Text
that may begin a tag is kept back, so the result does not depend on how the text is split. Values that are not JSON are
converted by the JSON schema of the function. Only strings are emitted before they are complete.
"""

import ast
import json
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Any

import msgspec

from forebay.ingress.parsers.call_scanner import SPACE, Status, ValueScanner, split_at_tag

QUOTES = ("'", '"')
IN_QUOTES = {
    quote: re.compile(rf"\\.|\\|{quote}", re.DOTALL) if quote else re.compile(r"""\'{3}|"{3}|["'()\[\]{}]""")
    for quote in ("", *QUOTES, *(3 * quote for quote in QUOTES))
}
BRACKETS = {")": "(", "]": "[", "}": "{"}
TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}
STRING = frozenset({"string"})
ANY: frozenset[str] = frozenset()  # the value itself shows its type


class CallBody(ABC):
    """Decoder of the arguments of one call. The attributes are those of `CallScanner`."""

    def __init__(self, name: str) -> None:
        self.status = Status.RUNNING
        self.name = name
        self.raw = ""
        self._held = ""
        self._arguments: list[str] = []

    @abstractmethod
    def push(self, text: str) -> str:
        """Decode the next part of the text, and return what follows the call."""

    def finish(self) -> None:  # noqa: B027 - some decoders keep nothing back
        """Emit the part of an incomplete value that was kept back, at the end of the response."""

    def take(self) -> str:
        """Return the arguments decoded since the previous call of `take`."""
        taken = "".join(self._arguments)
        self._arguments.clear()
        return taken

    def _emit(self, text: str) -> None:
        self._arguments.append(text)


class JsonBody(CallBody):
    """Arguments as a JSON object, which is passed on as it is. The text is not a call if it does not begin with one.

    One of the tags `close` instead of an object means no arguments.
    """

    def __init__(self, name: str, close: Sequence[str]) -> None:
        super().__init__("")
        self._name = name
        self._close = close
        self._value = ValueScanner()

    def push(self, text: str) -> str:
        if not self.name:
            text, self.raw = self.raw + text, ""
            bare = text.lstrip(SPACE)
            if not bare or any(tag.startswith(bare) and tag != bare for tag in self._close):
                self.raw = text
                return ""
            if bare.startswith(tuple(self._close)):
                self.name, self.status = self._name, Status.DONE
                self._emit("{}")
                return bare
            if not bare.startswith("{"):
                self.status = Status.FAILED
                return text
            self.name, text = self._name, bare
        end = self._value.take(text, 0)
        self._emit(text[:end])
        if self._value.done:
            self.status = Status.DONE
        return text[end:]


class ParameterTags(msgspec.Struct, frozen=True):
    """Tags of arguments that are XML-like elements, one per parameter.

    Attributes:
        begin: begins a parameter.
        key: text between `begin` and `key_end`, with the groups `key` and optionally `is_string`.
        value: begins the value, after white space; empty if the value follows `key_end`.
        value_end: ends the value.
        end: ends the arguments; a tag in `kept` ends them, too, but belongs to the text that follows.
        has_newlines: whether one newline at the beginning and one at the end of a value belong to the tags.
    """

    begin: str
    key: str
    key_end: str
    value_end: str
    end: tuple[str, ...]
    value: str = ""
    kept: tuple[str, ...] = ()
    has_newlines: bool = False

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.begin, self.key_end, self.value_end, *self.end, *self.kept, *filter(None, [self.value]))


class _At(Enum):
    GAP = auto()
    KEY = auto()
    OPEN = auto()
    VALUE = auto()


class ParameterBody(CallBody):
    """Arguments as elements. The end of the arguments or the next parameter also ends a value that has no end tag."""

    def __init__(self, name: str, tags: ParameterTags, schema: Mapping[str, Any]) -> None:
        super().__init__(name)
        self._tags = tags
        self._schema = schema
        self._at = _At.GAP
        self._types: frozenset[str] = STRING
        self._value: list[str] | None = None  # parts of a value that is no string; None while a string is emitted
        self._is_first = False  # whether the current value has no text yet
        self._separator = ""
        self._emit("{")

    def push(self, text: str) -> str:
        text, self._held = self._held + text, ""
        while text and self.status is Status.RUNNING:
            text = self._step(text)
        return text

    def finish(self) -> None:
        if self._value:
            self._emit("".join(self._value))

    def _step(self, text: str) -> str:
        tags = self._tags
        match self._at:
            case _At.GAP:
                return self._next(text)
            case _At.KEY:
                head, found, rest = split_at_tag(text, (tags.key_end,))
                if found:
                    self._begin_value(head)
                else:
                    rest, self._held = "", text
                return rest
            case _At.OPEN:
                bare = text.lstrip(SPACE)
                if len(bare) < len(tags.value) and tags.value.startswith(bare):
                    self._held = text
                    return ""
                self._at = _At.VALUE
                return bare.removeprefix(tags.value)
            case _:
                return self._read_value(text)

    def _next(self, text: str) -> str:
        bare, tags = text.lstrip(SPACE), self._tags
        if bare.startswith(tags.begin):
            self._at = _At.KEY
            return bare.removeprefix(tags.begin)
        if any(tag.startswith(bare) and tag != bare for tag in (tags.begin, *tags.end, *tags.kept)):
            self._held = text
            return ""
        self._emit("}")
        self.status = Status.DONE
        return bare.removeprefix(next((tag for tag in tags.end if bare.startswith(tag)), ""))

    def _begin_value(self, head: str) -> None:
        match = re.fullmatch(self._tags.key, head, re.DOTALL)
        groups = match.groupdict() if match else {}
        key = groups.get("key", head).strip()
        self._emit(f"{self._separator}{quoted(key)}: ")
        is_string = groups.get("is_string")
        self._types = types_of(self._schema, key) if is_string is None else STRING if is_string == "true" else ANY
        self._value = None if self._types == STRING else []
        if self._value is None:
            self._emit('"')
        self._separator, self._is_first = ", ", self._tags.has_newlines
        self._at = _At.OPEN if self._tags.value else _At.VALUE

    def _read_value(self, text: str) -> str:
        tags = self._tags
        if self._is_first:
            text, self._is_first = text.removeprefix("\n"), False
        value, tag, rest = split_at_tag(text, (tags.value_end, tags.begin, *tags.end, *tags.kept))
        if tags.has_newlines and value.endswith("\n"):
            value, rest = value[:-1], rest if tag else "\n" + rest
        if self._value is None:
            self._emit(quoted(value)[1:-1])
        else:
            self._value.append(value)
        if not tag:
            self._held = rest
            return ""
        self._emit('"' if self._value is None else to_json("".join(self._value), self._types))
        self._value, self._at = None, _At.GAP
        return rest if tag == tags.value_end else tag + rest


class BracesBody(CallBody):
    """Arguments of Gemma: `{key:value,…}` with unquoted keys, and strings between two tags `quote`."""

    def __init__(self, name: str, quote: str, schema: Mapping[str, Any]) -> None:
        super().__init__(name)
        self._quote = quote
        self._marks = re.compile(rf"{re.escape(quote)}|[{{}}\[\],:]")
        self._schema = schema
        self._key = ""
        self._depth = 0
        self._in_string = False
        self._is_string = False  # whether the current value is a string

    def push(self, text: str) -> str:
        text, self._held = self._held + text, ""
        while text and self.status is Status.RUNNING:
            text = self._read_string(text) if self._in_string else self._read_token(text)
        return text

    def finish(self) -> None:
        self._emit("" if self._in_string else split_at_tag(self._held, (self._quote,))[0])

    def _read_string(self, text: str) -> str:
        value, tag, rest = split_at_tag(text, (self._quote,))
        self._emit(quoted(value)[1:-1])
        if not tag:
            self._held = rest
            return ""
        self._emit('"')
        self._in_string = False
        return rest

    def _read_token(self, text: str) -> str:
        found = self._marks.search(text)
        if found is None:
            self._held = text
            return ""
        word, mark = text[: found.start()].strip(), found.group()
        if mark == self._quote:
            self._emit(word + '"')
            self._in_string = self._is_string = True
        elif mark == ":":
            if not self._is_string:
                self._emit(quoted(word))
                self._key = word if self._depth == 1 else self._key
            self._emit(": ")
        else:
            if word:
                types = types_of(self._schema, self._key, ANY) if self._depth == 1 else ANY
                self._emit(to_json(word, types))
            self._emit(", " if mark == "," else mark)
            self._depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(mark, 0)
            if not self._depth:
                self.status = Status.DONE
        if mark != self._quote:
            self._is_string = False
        return text[found.end() :]


class PythonBody(CallBody):
    """Arguments of a call in Python: literals by keyword. Only a complete call is known to be one."""

    def __init__(self, name: str) -> None:
        super().__init__("")
        self._name = name
        self._opened = ["("]  # the parenthesis before the text
        self._quote = ""
        self._at = 0  # position in `raw` up to which the text is scanned

    def push(self, text: str) -> str:
        self.raw += text
        while found := IN_QUOTES[self._quote].search(self.raw, self._at):
            mark = found.group()
            if mark == "\\" or (mark in QUOTES and not self._quote and found.end() > len(self.raw) - 2):
                return ""  # an escape or a triple quote may be incomplete
            self._at = found.end()
            if self._quote:
                self._quote = "" if mark == self._quote else self._quote
            elif mark[0] in QUOTES:
                self._quote = mark
            elif mark in BRACKETS:
                if self._opened.pop() != BRACKETS[mark] or not self._opened:
                    return self._complete()
            else:
                self._opened.append(mark)
        self._at = max(self._at, len(self.raw) - 2)
        return ""

    def _complete(self) -> str:
        self.raw, rest = self.raw[: self._at], self.raw[self._at :]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of unknown escapes
                call = ast.parse(f"_({self.raw}", mode="eval").body
            keywords = call.keywords if isinstance(call, ast.Call) and not call.args else []
            arguments = {one.arg: ast.literal_eval(one.value) for one in keywords if one.arg}
            is_valid = isinstance(call, ast.Call) and not call.args and len(arguments) == len(keywords)
            encoded = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
            encoded.encode()
        except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
            is_valid, encoded = False, ""
        if not is_valid:
            self.status = Status.FAILED
            return rest
        self.name, self.raw, self.status = self._name, "", Status.DONE
        self._emit(encoded)
        return rest


def quoted(text: str) -> str:
    """Return a text as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def to_json(text: str, types: frozenset[str]) -> str:
    """Return a value that a model wrote as JSON text, as one of these types if it can be one, or else as a string."""
    bare = text.strip()
    if types == STRING:
        return quoted(text)
    if "null" in types and bare.lower() == "null":
        return "null"
    if "boolean" in types and bare.lower() in ("true", "false"):
        return bare.lower()
    try:
        value = json.loads(bare, parse_constant=_reject)
    except (ValueError, RecursionError):
        return quoted(text)
    kind = TYPES.get(type(value), "null")
    is_kind = kind in types or (kind == "integer" and "number" in types)
    return bare if is_kind or "string" not in types else quoted(text)


def types_of(schema: Mapping[str, Any], key: str, default: frozenset[str] = STRING) -> frozenset[str]:
    """Return the JSON types that the schema of a function permits for a parameter, `default` if it has none."""
    properties = schema.get("properties")
    found = _types(properties.get(key) if isinstance(properties, Mapping) else None, schema, set())
    return frozenset(found) or default


def _types(schema: Any, root: Mapping[str, Any], seen: set[str]) -> set[str]:
    if not isinstance(schema, Mapping):
        return set()
    given = schema.get("type")
    found = {one for one in (given if isinstance(given, list) else [given]) if isinstance(one, str)}
    values = schema.get("enum")
    values = [*(values if isinstance(values, list) else []), *([schema["const"]] if "const" in schema else [])]
    found |= {TYPES.get(type(value), "null") for value in values}
    for name in ("anyOf", "oneOf", "allOf"):
        choices = schema.get(name)
        for choice in choices if isinstance(choices, list) else ():
            found |= _types(choice, root, seen)
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/") and reference not in seen:
        seen.add(reference)
        target: Any = root
        for part in reference.removeprefix("#/").split("/"):
            target = target.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
        found |= _types(target, root, seen)
    return found


def _reject(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
