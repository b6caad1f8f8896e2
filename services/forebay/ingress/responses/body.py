"""Body of POST /v1/responses, and the chat that it becomes.

Unsupported fields and tools are rejected by name. Source: OpenAI API reference, responses.
"""

import re
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import Field, model_validator

from forebay.ingress.body_limits import TOOLS_MAX
from forebay.ingress.errors import ApiError, invalid
from forebay.ingress.openai.fields import Body, CheckedBody, Neutral, at_most, reject_extra, requires
from forebay.ingress.openai.nvext import NAME_CHARS_MAX, RoutedBody
from forebay.ingress.openai.requests import LOGPROBS_MAX, ChatBody
from forebay.ingress.openai.sampling import JsonObject, JsonSchema, ResponseFormat
from forebay.ingress.openai.tools import Function, FunctionName, NamedFunction, NamedTool, Tool, ToolChoice
from forebay.ingress.responses.items import ChatBuilder, Item, Items, MessageItem, plain

RESPONSES_PATH = "/v1/responses"
METADATA_MAX = 16  # OpenAI's limits
METADATA_KEY_CHARS_MAX = 64
METADATA_CHARS_MAX = 512
LOGPROBS = "message.output_text.logprobs"
# Values of `include` that have no effect: a reasoning item has its text, and input items have their images.
INCLUDED = ("reasoning.encrypted_content", "message.input_image.image_url")
MESSAGE = re.compile(r"messages\[(\d+)\](\.content)?")
# Names in a chat of fields that have another name here.
NAMES = {
    "response_format.json_schema.schema": "text.format.schema",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "prompt": "input",
}
NAME = re.compile(rf"\b({'|'.join(map(re.escape, NAMES))})\b")

ShortText = Annotated[str, Field(max_length=METADATA_CHARS_MAX)]
MetadataKey = Annotated[str, Field(max_length=METADATA_KEY_CHARS_MAX)]


class FunctionTool(Body):
    """Element of `tools`: a function that the model may call."""

    neutral: ClassVar[Neutral] = {
        "allowed_callers": (None, [], ["direct"]),
        "async": (None, False),
        "defer_loading": (None, False),
        "output_schema": (None,),
    }

    type: str = Field(description="`function`.")
    name: FunctionName | None = Field(default=None, description="Name of the function.")
    description: str | None = Field(default=None, description="Part of the prompt.")
    parameters: JsonObject | None = Field(default=None, description="JSON schema of the arguments.")
    strict: bool | None = Field(
        default=None, description="No effect: the arguments of a forced call always match the schema."
    )

    def tool(self, where: str) -> Tool:
        """Return the tool of a chat. Raises ApiError (400) for another type of tool."""
        if self.type != "function":
            raise invalid(f"{where}: tools of type {self.type} are not supported", where, "unsupported_parameter")
        reject_extra(self, f"{where}.")
        if self.name is None:
            raise invalid(f"{where}.name is missing", f"{where}.name")
        function = Function(name=self.name, description=self.description, parameters=self.parameters)
        return Tool(type="function", function=function)


class ChosenTool(Body):
    """Value of `tool_choice` that forces a call of one function."""

    type: str = Field(description="`function`.")
    name: FunctionName | None = Field(default=None, description="Name of the function.")


class TextFormat(CheckedBody):
    """`text.format`: required format of the output."""

    path = "text.format."

    type: str = Field(description="`text`, `json_object` or `json_schema`.")
    name: str | None = Field(default=None, description="Name of the schema.")
    schema_: Annotated[JsonObject | None, Field(alias="schema")] = Field(
        default=None, description="JSON schema, which the output always matches."
    )
    description: str | None = Field(default=None, description="No effect.")
    strict: bool | None = Field(default=None, description="No effect.")


class TextOptions(CheckedBody):
    """`text`: format of the output."""

    path = "text."
    neutral: ClassVar[Neutral] = {"verbosity": (None, "medium")}

    format: TextFormat | None = Field(default=None, description="Format that the output must have.")


class Reasoning(CheckedBody):
    """`reasoning`: how much the model reasons."""

    path = "reasoning."
    # The output has the whole text of the reasoning, so a summary adds nothing.
    neutral: ClassVar[Neutral] = {
        "context": (None, "auto"),
        "generate_summary": (None, "auto"),
        "mode": (None, "standard"),
        "summary": (None, "auto"),
    }

    effort: Annotated[str, Field(min_length=1, max_length=NAME_CHARS_MAX)] | None = Field(
        default=None, description="`reasoning_effort` of a chat: rejected unless the chat template uses it."
    )


class ResponseStreamOptions(CheckedBody):
    """`stream_options`, which are only allowed for a stream."""

    path = "stream_options."

    include_obfuscation: bool | None = Field(default=None, description="No effect: no event has random characters.")


class ResponsesBody(RoutedBody):
    """Body of POST /v1/responses. The ingress prepares and runs it as a chat."""

    endpoint = "responses"
    id_prefix = "resp_"
    neutral: ClassVar[Neutral] = {
        "access_programs": (None, {}),
        "background_options": (None, {}, {"completion_window": "soonest"}),
        "context_management": (None, []),
        "conversation": (None,),
        "image": (None, {}, {"context_compression": "auto"}, {"context_compression": "disabled"}),
        "max_tool_calls": (None,),
        "moderation": (None,),
        "prompt": (None,),
        "prompt_cache_options": (None, {}),
        "prompt_cache_retention": (None,),
        "service_tier": (None, "auto", "default"),
        "truncation": (None, "disabled"),
    }

    input: str | Items = Field(description="A text, or a list of [items](#item-message).")
    instructions: str | None = Field(default=None, description="First message of the chat, with the role system.")
    max_output_tokens: Annotated[int, Field(ge=1)] | None = Field(default=None, description="`max_tokens` of a chat.")
    temperature: Annotated[float, Field(ge=0.0, le=2.0, allow_inf_nan=False)] | None = Field(
        default=None, description="0 to 2; 1 if it is missing."
    )
    top_p: Annotated[float, Field(gt=0.0, le=1.0, allow_inf_nan=False)] | None = Field(
        default=None, description="Above 0, up to 1; 1 if it is missing."
    )
    top_logprobs: Annotated[int, Field(ge=0, le=LOGPROBS_MAX)] | None = Field(
        default=None, description=f"Alternatives per token, up to {LOGPROBS_MAX}. Requires `include`."
    )
    include: Annotated[list[str], Field(max_length=16)] | None = Field(
        default=None,
        description=f"`{LOGPROBS}`. Also {' and '.join(f'`{name}`' for name in INCLUDED)}, without effect.",
    )
    stream: bool | None = Field(default=None, description="Whether the response is a stream of events.")
    stream_options: ResponseStreamOptions | None = Field(default=None, description="Requires `stream`.")
    store: bool | None = Field(default=None, description="Whether the response is kept, by default true.")
    background: bool | None = Field(default=None, description="Whether the response is sent before it is complete.")
    previous_response_id: str | None = Field(default=None, description="Stored response whose conversation continues.")
    tools: Annotated[list[FunctionTool], Field(fail_fast=True, max_length=TOOLS_MAX)] | None = Field(
        default=None, description="Functions that the model may call. Tools of other types are rejected."
    )
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = Field(
        default=None, description="`none`, `auto`, `required`, or a function."
    )
    parallel_tool_calls: bool | None = Field(default=None, description="`false` keeps only the first call.")
    text: TextOptions | None = Field(default=None, description="Format of the output.")
    reasoning: Reasoning | None = Field(default=None, description="How much the model reasons.")
    metadata: Annotated[dict[MetadataKey, ShortText], at_most(METADATA_MAX)] | None = Field(
        default=None, description="Up to 16 texts, part of the response."
    )
    user: ShortText | None = Field(default=None, description="Part of the response.")
    safety_identifier: ShortText | None = Field(default=None, description="Part of the response.")
    prompt_cache_key: ShortText | None = Field(default=None, description="Part of the response.")

    @classmethod
    def describe(cls, schema: dict[str, Any]) -> None:
        schema["allOf"] = [requires("stream", {"const": True}, {"stream_options": {"type": "null"}})]

    @model_validator(mode="after")
    def _check(self) -> "ResponsesBody":
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options is only allowed when stream is true", "stream_options")
        for name in ("background", "previous_response_id"):
            if getattr(self, name):
                raise invalid(f"{name} is not supported yet", name, "unsupported_parameter")
        if self.background and not self.is_stored:
            raise invalid("background requires store; leave store out, or set it to true", "background")
        for at, name in enumerate(self.include or ()):
            if name != LOGPROBS and name not in INCLUDED:
                text = f"include[{at}]: {name!r} is not supported; supported are: {', '.join((LOGPROBS, *INCLUDED))}"
                raise invalid(text, f"include[{at}]", "unsupported_parameter")
        if self.top_logprobs and not self.has_logprobs:
            raise invalid(f"top_logprobs requires include; add {LOGPROBS!r} to it", "top_logprobs")
        form = self.format
        if form.type == "json_schema" and form.name is None:
            raise invalid("text.format.name is missing", "text.format.name")
        return self

    @property
    def format(self) -> TextFormat:
        return (self.text and self.text.format) or TextFormat(type="text")

    @property
    def effort(self) -> str | None:
        return None if self.reasoning is None else self.reasoning.effort

    @property
    def is_stored(self) -> bool:
        return self.store is not False

    @property
    def has_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    @cached_property
    def placed(self) -> list[tuple[str, Item]]:
        """The items of the conversation, each with its path in the body."""
        if isinstance(self.input, str):
            return [("input", MessageItem(role="user", content=self.input))]
        return [(f"input[{at}]", item) for at, item in enumerate(self.input)]

    @cached_property
    def chat(self) -> ChatBuilder:
        """The messages of the chat. Raises ApiError (400) for an unsupported item."""
        chat = ChatBuilder()
        if self.instructions is not None:
            chat.put("instructions", "system", self.instructions)
        for path, item in self.placed:
            chat.add(path, item)
        chat.finish()
        return chat

    @cached_property
    def completion(self) -> ChatBody:
        """The chat from which the request is prepared. Raises ApiError (400) for an unsupported item or tool."""
        return ChatBody(
            model=self.model,
            cache_salt=self.cache_salt,
            nvext=self.nvext,
            messages=self.chat.messages,
            max_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            logprobs=self.has_logprobs,
            top_logprobs=self.top_logprobs,
            stream=self.stream,
            tools=None if self.tools is None else [tool.tool(f"tools[{at}]") for at, tool in enumerate(self.tools)],
            tool_choice=self._tool_choice(),
            parallel_tool_calls=self.parallel_tool_calls,
            reasoning_effort=self.effort,
            response_format=self._response_format(),
        )

    def _tool_choice(self) -> ToolChoice | None:
        choice = self.tool_choice
        if not isinstance(choice, ChosenTool):
            return choice
        if choice.type != "function" or choice.name is None:
            text = f"tool_choice of type {choice.type} is not supported; give the type function and a name"
            raise invalid(text, "tool_choice", "unsupported_parameter")
        reject_extra(choice, "tool_choice.")
        return NamedTool(type="function", function=NamedFunction(name=choice.name))

    def _response_format(self) -> ResponseFormat:
        form = self.format
        schema = None if form.name is None else JsonSchema.model_validate({"name": form.name, "schema": form.schema_})
        return ResponseFormat(type=form.type, json_schema=schema)

    def renamed(self, error: ApiError) -> ApiError:
        """Return an error that was raised while `completion` was prepared, with the names of fields of this body."""
        message, param = self._rename(error.message), self._rename(error.param or "") or None
        return ApiError(error.status, error.code, message, param, retry_after_s=error.retry_after_s)

    def _rename(self, text: str) -> str:
        def path(found: re.Match[str]) -> str:
            paths = self.chat.paths
            return paths[int(found[1])] if int(found[1]) < len(paths) else found[0]

        text = MESSAGE.sub(path, text).replace(".image_url.url", ".image_url")
        return NAME.sub(lambda found: NAMES[found[0]], text)

    @property
    def options(self) -> str:
        return msgspec.json.encode(self._echo()).decode()

    def _echo(self) -> dict[str, Any]:
        """Return the fields of the response that depend on the request only."""
        form = self.format.model_dump(by_alias=True, exclude_none=True)
        return {
            "background": bool(self.background),
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": self.previous_response_id,
            "prompt_cache_key": self.prompt_cache_key,
            "reasoning": {"effort": self.effort, "summary": None},
            "safety_identifier": self.safety_identifier,
            "service_tier": "default",
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "text": {"format": form, "verbosity": "medium"},
            "tool_choice": plain(self.tool_choice) or "auto",
            "tools": plain(self.tools or []),
            "top_logprobs": self.top_logprobs or 0,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "truncation": "disabled",
            "user": self.user,
        }
