"""Tools of a chat request: they are input of the chat template, and `tool_choice` can force a call.

A forced call is a structured output, as in vLLM: the arguments of the named tool, or a list of calls of any tool.
Source: OpenAI API reference, function calling.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field

from forebay.events.names import unknown_name
from forebay.events.requests import StructuredOutput
from forebay.ingress.body_limits import TOOLS_MAX
from forebay.ingress.errors import ApiError, invalid
from forebay.ingress.openai.fields import Body, Neutral, reject_extra
from forebay.ingress.openai.sampling import JsonObject, encoded_schema

ID_CHARS_MAX = 256
FUNCTION_NAME = r"^[a-zA-Z0-9_.-]{1,128}$"
TOOL_NEUTRAL: Neutral = {"defer_loading": (None, False)}
FUNCTION_NEUTRAL: Neutral = {**TOOL_NEUTRAL, "strict": (None, False, True)}  # a forced call always follows its schema

FunctionName = Annotated[str, Field(pattern=FUNCTION_NAME)]
CallId = Annotated[str, Field(min_length=1, max_length=ID_CHARS_MAX)]


class Function(Body):
    """Definition of a function that the model may call: name, description and JSON schema of its parameters."""

    neutral = FUNCTION_NEUTRAL

    name: FunctionName
    description: str | None = None
    parameters: JsonObject | None = None


class Tool(Body):
    """Element of `tools`: a function that the model may call."""

    neutral = TOOL_NEUTRAL

    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    """Name of the function in a `tool_choice` that forces one function."""

    name: FunctionName


class NamedTool(Body):
    """Value of `tool_choice` that forces a call of one function."""

    type: Literal["function"]
    function: NamedFunction


class CalledFunction(Body):
    """Function that the model called in an earlier message, with its arguments as JSON text.

    Both may be any text, because the model has written them.
    """

    ignored = frozenset({"parsed_arguments"})  # the arguments as parsed by OpenAI's client

    name: str
    arguments: str


class ToolCall(Body):
    """Tool call in an earlier message of the assistant."""

    ignored = frozenset({"index"})  # clients copy this field from the deltas of a stream

    id: CallId
    type: Literal["function"] = "function"
    function: CalledFunction

    def plain(self, where: str) -> dict[str, Any]:
        """Return the call as input of `Model.render`. Raises ApiError (400) if a field is not supported.

        The arguments need not be a JSON object, because an earlier response may have been cut off.
        """
        reject_extra(self, f"{where}.")
        reject_extra(self.function, f"{where}.function.")
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.function.name, "arguments": self.function.arguments},
        }


Tools = Annotated[list[Tool], Field(fail_fast=True, max_length=TOOLS_MAX)]
ToolChoice = Literal["none", "auto", "required"] | NamedTool


class ToolSelection(msgspec.Struct, frozen=True):
    """The tools of a chat request that the model may call, and whether it must call one.

    `forced` names the tool that it must call; empty for any tool, None if no call is required. `parallel` permits
    several calls per response.
    """

    tools: tuple[Tool, ...]
    forced: str | None
    parallel: bool

    def plain(self) -> list[dict[str, Any]]:
        return [tool.model_dump(exclude_none=True) for tool in self.tools]

    def encoded(self) -> str:
        """Return the selection as JSON, which `decode_selection` reads; empty without tools."""
        if not self.tools:
            return ""
        return msgspec.json.encode({"tools": self.plain(), "forced": self.forced, "parallel": self.parallel}).decode()

    def structure(self) -> StructuredOutput | None:
        """Return the structure of a forced call, None without one. Raises ApiError (400) for an unusable schema."""
        if self.forced is None:
            return None
        if self.forced:
            named = next(tool.function for tool in self.tools if tool.function.name == self.forced)
            schema = _parameters(named)
        else:
            schema = _any_call(self.tools, parallel=self.parallel)
        return StructuredOutput(kind="json_schema", text=encoded_schema(schema, "tools"))


NO_TOOLS = ToolSelection((), None, parallel=True)


def decode_selection(text: str) -> ToolSelection:
    """Return the selection that `ToolSelection.encoded` has encoded."""
    if not text:
        return NO_TOOLS
    found: dict[str, Any] = msgspec.json.decode(text)
    tools = tuple(Tool.model_validate(tool) for tool in found["tools"])
    return ToolSelection(tools, found["forced"], parallel=found["parallel"])


def choice_of(tools: list[Tool] | None, choice: ToolChoice | None, parallel: bool | None) -> ToolSelection:
    """Return the tools that the model may or must call.

    Raises ApiError (400) for a choice without tools or of an unknown tool, duplicate names, or unsupported fields.
    """
    for at, tool in enumerate(tools or ()):
        reject_extra(tool, f"tools[{at}].")
        reject_extra(tool.function, f"tools[{at}].function.")
    names = [tool.function.name for tool in tools or ()]
    if len(set(names)) < len(names):
        raise invalid("tools: two functions have the same name; names must be unique", "tools")
    if isinstance(choice, NamedTool):
        reject_extra(choice, "tool_choice.")
        reject_extra(choice.function, "tool_choice.function.")
        name = choice.function.name
        if name not in names:
            raise invalid(f"tool_choice: {unknown_name('function', name, names)}", "tool_choice")
        return ToolSelection(tuple(tools or ()), name, parallel=False)
    if choice == "required" and not names:
        raise invalid("tool_choice is required, but the request has no tools", "tool_choice")
    if not names or choice == "none":
        return NO_TOOLS
    return ToolSelection(tuple(tools or ()), "" if choice == "required" else None, parallel=parallel is not False)


def _parameters(function: Function) -> JsonObject:
    return function.parameters or {"type": "object", "properties": {}}


def _any_call(tools: tuple[Tool, ...], *, parallel: bool) -> JsonObject:
    """Return the schema of a list of calls. Definitions move to its root, because references start there."""
    definitions: dict[str, Any] = {}
    calls: list[Any] = []
    for tool in tools:
        schema: dict[str, Any] = dict(_parameters(tool.function))
        _hoist(definitions, schema.pop("$defs", None), tool.function.name)
        properties = {"name": {"type": "string", "enum": [tool.function.name]}, "parameters": schema}
        calls.append({"type": "object", "properties": properties, "required": ["name", "parameters"]})
    whole: JsonObject = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if not parallel:
        whole["maxItems"] = 1
    if definitions:
        whole["$defs"] = definitions
    return whole


def _hoist(definitions: dict[str, Any], own: Any, name: str) -> None:
    if own is None:
        return
    if not isinstance(own, Mapping):
        raise invalid(f"tools: $defs in the parameters of {name} is not an object", "tools")
    for key, schema in own.items():
        if definitions.setdefault(key, schema) != schema:
            text = f"tools: {key!r} has two definitions in the parameters of tools; a required call needs a single one"
            raise ApiError(400, "invalid_value", text, "tools")
