"""Body of POST /v1/responses, and the chat that it becomes.

Unsupported fields and tools are rejected by name. Source: OpenAI API reference, responses.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self

import msgspec
from pydantic import Field, model_validator

from forebay.ingress.body_limits import MESSAGES_MAX, TOOLS_MAX
from forebay.ingress.errors import invalid
from forebay.ingress.openai.chat_builder import ChatBuilder, Piece
from forebay.ingress.openai.fields import Body, CheckedBody, Neutral, at_most, optional, require_fields
from forebay.ingress.openai.nvext import NAME_CHARS_MAX, RoutedBody
from forebay.ingress.openai.requests import LOGPROBS_MAX, ChatBody
from forebay.ingress.openai.sampling import JsonObject, JsonSchema, ResponseFormat, Temperature, TopP
from forebay.ingress.openai.tools import Function, FunctionName, NamedFunction, NamedTool, Tool, ToolChoice
from forebay.ingress.responses.items import REFERENCE, Item, Items, add_item, plain

RESPONSES_PATH = "/v1/responses"
STORED_BYTES_MAX = 8 << 20  # of a record of at most 16 MiB, which has the prompt, too
METADATA_MAX = 16  # OpenAI's limits
METADATA_KEY_CHARS_MAX = 64
METADATA_CHARS_MAX = 512
LOGPROBS = "message.output_text.logprobs"
# Values of `include` that have no effect: a reasoning item has its text, and input items have their images.
INCLUDED = ("reasoning.encrypted_content", "message.input_image.image_url")
FORMAT_FIELDS = {"json_schema": (("name", "schema_"), ("description", "strict"))}  # by type: required, optional

ShortText = Annotated[str, Field(max_length=METADATA_CHARS_MAX)]
MetadataKey = Annotated[str, Field(max_length=METADATA_KEY_CHARS_MAX)]
Metadata = Annotated[dict[MetadataKey, ShortText], at_most(METADATA_MAX)]


class FunctionTool(Body):
    """Element of `tools`: a function that the model may call."""

    neutral: ClassVar[Neutral] = {
        "allowed_callers": (None, [], ["direct"]),
        "async": (None, False),
        "defer_loading": (None, False),
        "output_schema": (None,),
    }

    type: str = Field(description="`function`.")
    name: FunctionName | None = optional("Name of the function.")
    description: str | None = optional("Part of the prompt.")
    parameters: JsonObject | None = optional("JSON schema of the arguments.")
    strict: bool | None = optional("No effect: the arguments of a forced call always match the schema.")

    def tool(self, where: str) -> Tool:
        """Return the tool of a chat. Raises ApiError (400) for another type of tool."""
        if self.type != "function":
            raise invalid(f"{where}: tools of type {self.type} are not supported", where, "unsupported_parameter")
        require_fields(self, where, self.type, ("name",), ("description", "parameters", "strict"))
        function = Function(name=self.name or "", description=self.description, parameters=self.parameters)
        return Tool(type="function", function=function)


FunctionTools = Annotated[list[FunctionTool], Field(fail_fast=True, max_length=TOOLS_MAX)]


class ChosenTool(Body):
    """Value of `tool_choice` that forces a call of one function."""

    type: str = Field(description="`function`.")
    name: FunctionName | None = optional("Name of the function.")


class TextFormat(CheckedBody):
    """`text.format`: required format of the output."""

    path = "text.format."

    type: str = Field(description="`text`, `json_object` or `json_schema`.")
    name: str | None = optional("Name of the schema.")
    schema_: Annotated[JsonObject | None, Field(alias="schema")] = optional("JSON schema that the output matches.")
    description: str | None = optional("No effect.")
    strict: bool | None = optional("No effect.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        require_fields(self, "text.format", self.type, *FORMAT_FIELDS.get(self.type, ((), ())))
        return self


class TextOptions(CheckedBody):
    """`text`: format of the output."""

    path = "text."

    verbosity: Literal["low", "medium", "high"] | None = optional("No effect: the model determines it.")
    format: TextFormat | None = optional("Format that the output must have.")


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

    effort: Annotated[str, Field(min_length=1, max_length=NAME_CHARS_MAX)] | None = optional(
        "Refused unless the chat template uses it."
    )


class ResponseStreamOptions(CheckedBody):
    """`stream_options`, which are only allowed for a stream."""

    path = "stream_options."

    include_obfuscation: bool | None = optional("No effect: no event has random characters.")


def require_included(names: Sequence[str]) -> None:
    """Raise ApiError (400) for a value of `include` that is not supported."""
    for at, name in enumerate(names):
        if name not in (LOGPROBS, *INCLUDED):
            text = f"include[{at}]: {name!r} is not supported; supported are: {', '.join((LOGPROBS, *INCLUDED))}"
            raise invalid(text, f"include[{at}]", "unsupported_parameter")


class ResponsesBody(RoutedBody):
    """Body of POST /v1/responses. The ingress prepares and runs it as a chat."""

    endpoint = "responses"
    id_prefix = "resp_"
    names: ClassVar[Mapping[str, str]] = {
        "response_format": "text.format",
        "response_format.json_schema.schema": "text.format.schema",
        "response_format.type": "text.format.type",
        "reasoning_effort": "reasoning.effort",
        "max_tokens": "max_output_tokens",
        "messages": "input",
        "prompt": "input",
    }
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

    input: str | Items = Field(description="A text, or a list of [items](#items).")
    instructions: str | None = optional("First message of the chat, with the role system.")
    max_output_tokens: Annotated[int, Field(ge=1)] | None = optional("`max_tokens` of a chat.")
    temperature: Temperature | None = optional("0 to 2; 1 if it is missing.")
    top_p: TopP | None = optional("Above 0, up to 1; 1 if it is missing.")
    top_logprobs: Annotated[int, Field(ge=0, le=LOGPROBS_MAX)] | None = optional("Alternatives per token, up to 20.")
    include: Annotated[list[str], Field(max_length=16)] | None = optional("Additional output, see [output](#output).")
    stream: bool | None = optional("Whether the response is a stream of events.")
    stream_options: ResponseStreamOptions | None = optional("Requires `stream`.")
    store: bool | None = optional("Whether the response is kept, by default true.")
    background: bool | None = optional("Whether the response is sent before it is complete.")
    previous_response_id: str | None = optional("Stored response whose conversation continues.")
    tools: FunctionTools | None = optional("Functions that the model may call. Tools of other types are rejected.")
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = optional(
        "`none`, `auto`, `required`, or a function."
    )
    parallel_tool_calls: bool | None = optional("`false` keeps only the first call.")
    text: TextOptions | None = optional("Format of the output.")
    reasoning: Reasoning | None = optional("How much the model reasons.")
    metadata: Metadata | None = optional("Up to 16 texts, part of the response.")
    user: ShortText | None = optional("Part of the response.")
    safety_identifier: ShortText | None = optional("Part of the response.")
    prompt_cache_key: ShortText | None = optional("Part of the response.")

    @model_validator(mode="after")
    def _check(self) -> "ResponsesBody":
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options is only allowed when stream is true", "stream_options")
        if self.nvext is not None and (self.nvext.annotations or self.nvext.extra_fields):
            raise invalid("nvext: responses have no annotations and no extra fields", "nvext", "unsupported_parameter")
        if self.background and not self.is_stored:
            raise invalid("background requires store; leave store out, or set it to true", "background")
        require_included(self.include or ())
        if self.top_logprobs and not self.has_logprobs:
            raise invalid(f"top_logprobs requires include; add {LOGPROBS!r} to it", "top_logprobs")
        return self

    @property
    def end_user(self) -> str:
        return self.safety_identifier or self.user or ""

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
    def outlives(self) -> bool:
        return self.is_stored or super().outlives

    @property
    def conversation(self) -> str:
        if not self.is_stored:
            return ""
        encoded = msgspec.json.encode(plain([item for _, item in self.placed]))
        if len(encoded) > STORED_BYTES_MAX:
            text = f"the input has {len(encoded):,} bytes; at most {STORED_BYTES_MAX:,} are stored, set store to false"
            raise invalid(text, "input", "input_too_large")
        return encoded.decode()

    def unstored(self) -> "ResponsesBody":
        """Return the body of a request whose response cannot be stored. Raises ApiError (400) if it requires that."""
        needs = [name for name in ("background", "previous_response_id", "store") if getattr(self, name)]
        needs += [path for path, item in self.placed if item.kind == REFERENCE]
        if needs:
            text = f"{needs[0]} is not supported here; send the request to POST {RESPONSES_PATH} of an ingress"
            raise invalid(text, needs[0], "unsupported_parameter")
        return self.model_copy(update={"store": False})

    @property
    def has_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    @cached_property
    def placed(self) -> list[tuple[str, Item]]:
        """The items of the conversation, each with its path in the body."""
        if isinstance(self.input, str):
            return [("input", Item(role="user", content=self.input))]
        return [(f"input[{at}]", item) for at, item in enumerate(self.input)]

    def continued(self, previous: Sequence[Item], referred: Mapping[str, Item], size_bytes: int) -> "ResponsesBody":
        """Return the body with the items of an earlier conversation before its own, and with items by their ids.

        `size_bytes` is the size of these items.
        """
        body = self.model_copy()
        own = [(path, referred[one.id or ""] if one.kind == REFERENCE else one) for path, one in self.placed]
        body.__dict__["placed"] = [*(("previous_response_id", one) for one in previous), *own]
        body.__dict__["size_bytes"] = self.size_bytes + size_bytes
        return body

    @cached_property
    def chat(self) -> ChatBuilder:
        """The messages of the chat. Raises ApiError (400) for an unsupported item, or too many items."""
        if len(self.placed) >= MESSAGES_MAX:
            text = f"the conversation has {len(self.placed):,} items; the limit is {MESSAGES_MAX - 1:,}"
            raise invalid(text, "input")
        chat = ChatBuilder()
        if self.instructions is not None:
            chat.put("system", [Piece(self.instructions)])
        for path, item in self.placed:
            add_item(chat, path, item)
        chat.finish()
        return chat

    @cached_property
    def completion(self) -> ChatBody:
        """The chat from which the request is prepared. Raises ApiError (400) for an unsupported item or tool."""
        chat = ChatBody(
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
        chat.__dict__["size_bytes"] = self.size_bytes
        return chat

    def _tool_choice(self) -> ToolChoice | None:
        choice = self.tool_choice
        if not isinstance(choice, ChosenTool):
            return choice
        if choice.type != "function":
            text = f"tool_choice of type {choice.type} is not supported; give the type function and a name"
            raise invalid(text, "tool_choice", "unsupported_parameter")
        require_fields(choice, "tool_choice", choice.type, ("name",))
        return NamedTool(type="function", function=NamedFunction(name=choice.name or ""))

    def _response_format(self) -> ResponseFormat:
        form = self.format
        schema = None if form.name is None else JsonSchema.model_validate({"name": form.name, "schema": form.schema_})
        return ResponseFormat(type=form.type, json_schema=schema)

    def own_name(self, param: str) -> str:
        return self.chat.paths.get(param) or super().own_name(param)

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
            "text": {"format": form, "verbosity": (self.text and self.text.verbosity) or "medium"},
            "tool_choice": plain(self.tool_choice) or "auto",
            "tools": plain(self.tools or []),
            "top_logprobs": self.top_logprobs or 0,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "truncation": "disabled",
            "user": self.user,
        }
