"""Render chat templates in the environment for which they are written: that of the library transformers.

Theory of operation. A template expects the globals, filters and tags of transformers, and its input in one form:

- The arguments of a call are JSON text in the API. Most templates need an object, some concatenate the text.
- The content of a message that only calls tools is null. Some templates test for null, others print `None`.
- Some templates print a list of parts as a Python literal, others accept nothing but lists.

The output of a wrong form is often a wrong prompt, not an error. So `ChatTemplate` renders short chats in every form
when the model is loaded, and selects the form whose output contains their texts and no trace of a wrong form. If that
form raises an error for a request with tool calls, the other forms are tried.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from forebay import runtime
from forebay.ingress.errors import invalid

# Exceptions that a template may raise for values from a client.
TEMPLATE_ERRORS = (
    TemplateError,
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
    RuntimeError,  # also RecursionError
    AssertionError,
)
COMPILE_ERRORS = (TemplateError, SyntaxError, ValueError, RecursionError)
# Of a chat: four times the text of a body, because templates add roles and may repeat tools.
RENDERED_CHARS_MAX = 16 << 20
PROBE_CHARS_MAX = 1 << 20
SOURCES_MAX = 64  # templates whose variables are known: parsing one takes milliseconds
ROLES = ("system", "user", "assistant", "tool")
# Texts of the probes: words, so that no template escapes, splits or trims them.
SAID, SAID_TOO, KEY, VALUE = "probetext", "probemore", "probekey", "probevalue"
CALL_ID = "probe0001"  # nine letters and digits, which the templates of Mistral require
FUNCTION = {"name": "probe", "parameters": {"type": "object", "properties": {KEY: {"type": "string"}}}}
TOOLS = [{"type": "function", "function": FUNCTION}]
CALL = {"id": CALL_ID, "type": "function", "function": {"name": "probe", "arguments": json.dumps({KEY: VALUE})}}
HELLO: dict[str, Any] = {"role": "user", "content": "hello"}
CALLING: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT: dict[str, Any] = {"role": "tool", "tool_call_id": CALL_ID, "name": "probe", "content": "1"}
# Appended to the message that the model continues. The space shows whether the template trims the message.
CONTINUED = "forebay-continues-here "

Message = Mapping[str, Any]


class TooLong(Exception):
    """The rendered prompt is longer than the limit."""


@dataclass(frozen=True, slots=True)
class _Form:
    """Form of the messages that a template gets.

    Attributes:
        has_objects: whether the arguments of tool calls are objects instead of JSON text.
        has_null: whether the content of a message without text is null instead of an empty text.
        listed: roles whose content may be a list of parts.
        wrapped: roles whose content must be a list. A text, or parts of a role outside `listed`, become a list of one.
        wraps: whether arguments that are not a JSON object become the argument `arguments` of an object.
    """

    has_objects: bool = True
    has_null: bool = False
    listed: frozenset[str] = frozenset()
    wrapped: frozenset[str] = frozenset()
    wraps: bool = False

    def arguments(self, given: Any) -> Any:
        if not self.has_objects:
            return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        if not isinstance(given, str):
            return given
        try:
            found = json.loads(given or "{}")
        except (ValueError, RecursionError):
            found = None
        if isinstance(found, dict):
            return found
        return {"arguments": given} if self.wraps else given


CALL_FORMS = [_Form(objects, null) for objects in (True, False) for null in (True, False)]


class ChatTemplate:
    """One chat template of a model. Raises COMPILE_ERRORS if it does not compile.

    Args:
        special: variables of the template: the special tokens of the model, such as `bos_token`.
        placeholders: text for an image or a video, by its kind, if the content of a message is one text.
    """

    def __init__(self, source: str, special: Mapping[str, str], placeholders: Mapping[Any, str]) -> None:
        self.source = source
        self._template = ENVIRONMENT.from_string(source)
        self._template.globals = dict(self._template.globals)  # each rendering copies them, a ChainMap slowly
        self._special = special
        self._placeholders = placeholders
        self._forms: Sequence[_Form] = (_Form(),)
        self._forms = self._find_forms()

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        chars_max: int,
        *,
        is_open: bool = True,
        continues: bool = False,
    ) -> str:
        """Return the output. Raises TEMPLATE_ERRORS if the template rejects the messages, TooLong above `chars_max`."""
        if continues and not messages[-1].get("content"):
            raise invalid("continue_final_message requires a last message with text", "continue_final_message")
        calls = any(message.get("tool_calls") for message in messages)
        failure: Exception | None = None
        for form in self._forms if calls else self._forms[:1]:
            try:
                shaped = [self._shape(form, message) for message in messages]
                final = _mark_end(shaped[-1]) if continues else ""
                output = self._render(shaped, tools, {**variables, "add_generation_prompt": is_open}, chars_max)
                return _cut_end(output, final) if continues else output
            except TEMPLATE_ERRORS as error:
                failure = failure or error
        assert failure is not None, "there is at least one form"
        raise failure

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        chars_max: int,
    ) -> str:
        known = {"messages": messages, "tools": tools or None, "documents": None}
        pieces, chars = [], 0
        for piece in self._template.generate({**self._special, **known, **variables}):
            chars += len(piece)
            if chars > chars_max:
                raise TooLong
            pieces.append(piece)
        return "".join(pieces)

    def _shape(self, form: _Form, message: Message) -> dict[str, Any]:
        shaped = dict(message)
        if shaped.get("role") == "developer" and "developer" not in self.source:
            shaped["role"] = "system"
        role = "system" if shaped.get("role") == "developer" else shaped.get("role")
        content = shaped.get("content")
        if isinstance(content, list) and role in form.listed:
            shaped["content"] = [dict(part) for part in content]
        elif isinstance(content, list | str):
            text = content if isinstance(content, str) else self._text(content)
            shaped["content"] = [{"type": "text", "text": text}] if role in form.wrapped else text
        elif content is None and shaped.get("tool_calls") and not form.has_null:
            shaped["content"] = ""
        if calls := shaped.get("tool_calls"):
            shaped["tool_calls"] = [
                {**call, "function": {**called, "arguments": form.arguments(called["arguments"])}}
                for call in calls
                for called in [call["function"]]
            ]
        return shaped

    def _text(self, parts: Iterable[Mapping[str, str]]) -> str:
        return "".join(
            part["text"] if part["type"] == "text" else self._placeholders.get(part["type"], "") for part in parts
        )

    def _find_forms(self) -> list[_Form]:
        """Return the forms in which to try a request: first the one that the template needs."""
        listed, wrapped = set(), set()
        for role in ROLES:
            # Some templates show only the first part of a list.
            if shows_all := self._shows(role, [SAID, SAID_TOO]):
                listed.add(role)
            if not self._shows(role, SAID) and (shows_all or self._shows(role, [SAID])):
                wrapped.add(role)
        content = _Form(listed=frozenset(listed), wrapped=frozenset(wrapped))
        forms = [replace(content, has_objects=one.has_objects, has_null=one.has_null) for one in CALL_FORMS]
        outputs = {form: self._probe(form, [HELLO, CALLING, RESULT]) for form in forms}

        def rank(form: _Form) -> tuple[bool, bool, bool]:
            output = outputs[form]
            if output is None:
                return (False, False, False)
            without = outputs[replace(form, has_null=False)] or ""
            is_shown = VALUE in output and f"'{KEY}'" not in output and f'\\"{KEY}' not in output
            return (True, is_shown, output.count("None") <= without.count("None"))

        forms.sort(key=rank, reverse=True)  # a stable sort
        return [*forms, *(replace(form, wraps=True) for form in forms if form.has_objects)]

    def _shows(self, role: str, said: str | list[str]) -> bool:
        """Return whether the template shows a message of a role, a text or a list of texts, by rendering one."""
        is_list = isinstance(said, list)
        content = [{"type": "text", "text": text} for text in said] if is_list else said
        message: Message = {**(RESULT if role == "tool" else {}), "role": role, "content": content}
        before: Sequence[Message] = {"assistant": [HELLO], "tool": [HELLO, CALLING]}.get(role, [])
        after: list[Message] = [] if role in ("user", "tool") else [HELLO]
        own = frozenset({role}) if is_list else frozenset()
        for form in CALL_FORMS:
            # Some templates accept nothing but lists, also in the other messages.
            for others in (frozenset[str](), frozenset(ROLES) - {role}):
                shape = replace(form, listed=own | others, wrapped=others)
                output = self._probe(shape, [*before, message, *after])
                if output is not None and SAID in output:
                    is_literal = "'type'" in output or f'"text": "{SAID}"' in output
                    return not is_literal and all(
                        text in output for text in ([said] if isinstance(said, str) else said)
                    )
            if role != "tool":
                break  # the other forms differ only in tool calls
        return False

    def _probe(self, form: _Form, messages: Sequence[Message]) -> str | None:
        """Return the output for some messages; None if the template raises an error."""
        try:
            shaped = [self._shape(form, message) for message in messages]
            return self._render(shaped, TOOLS, {"add_generation_prompt": True}, PROBE_CHARS_MAX)
        except (TooLong, *TEMPLATE_ERRORS):
            return None


class _Generation(Extension):
    """The tag `generation`, which marks for training what the model wrote. It renders its content."""

    tags = {"generation"}  # noqa: RUF012 - as declared by jinja2

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the node of a tag and its content, which may not set variables of the template."""
        line = next(parser.stream).lineno
        content = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_render"), [], [], content, lineno=line)

    @staticmethod
    def _render(caller: Callable[[], str]) -> str:
        return caller()


def _environment() -> ImmutableSandboxedEnvironment:
    extensions = [_Generation, "jinja2.ext.loopcontrols"]
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    made.filters["tojson"] = _to_json
    made.globals |= {"raise_exception": _raise, "strftime_now": _strftime_now}
    return made


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(layout: str) -> str:
    """Return the local time. The prompt is on the log as tokens, so nothing renders it again at another time."""
    return datetime.fromtimestamp(runtime.wall_s()).strftime(layout)  # noqa: DTZ006 - local, as in transformers


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


ENVIRONMENT = _environment()


@lru_cache(SOURCES_MAX)
def variables_of(source: str) -> frozenset[str]:
    """Return the variables that a template uses and a request may set."""
    return frozenset(find_undeclared_variables(ENVIRONMENT.parse(source)))


def _mark_end(message: dict[str, Any]) -> str:
    """Append the mark to the text of a message, and return the text."""
    content = message["content"]
    if isinstance(content, str):
        message["content"] = content + CONTINUED
        return content
    texts = [part for part in content if part["type"] == "text"]
    if not texts:
        raise invalid("continue_final_message requires a last message with text", "continue_final_message")
    text: str = texts[-1]["text"]
    texts[-1]["text"] = text + CONTINUED
    return text


def _cut_end(output: str, final: str) -> str:
    """Return the output up to the mark. Raises ApiError if the template changed the text of the last message."""
    end = output.rfind(CONTINUED.strip())
    if end < 0 or final.strip() not in output:
        text = "the chat template changes or omits the last message, so the model cannot continue it"
        raise invalid(text, "continue_final_message")
    return output[:end] if output.startswith(CONTINUED, end) else output[:end].rstrip()
