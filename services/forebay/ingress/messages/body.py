"""Body of POST /v1/messages, and the chat that it becomes.

Unsupported fields, blocks and tools are rejected by name. Source: Anthropic API reference, messages.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import Field, model_validator

from forebay.ingress.body_limits import MESSAGES_MAX, TOOLS_MAX
from forebay.ingress.chat_template import variables_of
from forebay.ingress.errors import invalid
from forebay.ingress.openai.chat_builder import ChatBuilder, Piece
from forebay.ingress.openai.fields import Body, CheckedBody, Neutral, optional, require_fields
from forebay.ingress.openai.nvext import NAME_CHARS_MAX, RoutedBody
from forebay.ingress.openai.requests import PARTS_MAX, STOP_CHARS_MAX, ChatBody, Role
from forebay.ingress.openai.sampling import TOKENS_MAX, JsonObject, JsonSchema, ResponseFormat, TopP
from forebay.ingress.openai.tools import CallId, Function, FunctionName, NamedFunction, NamedTool, Tool, ToolChoice

STOPS_MAX = 16  # each delta of a response is compared with each of them
IGNORED = frozenset({"cache_control"})  # forebay caches every prefix by itself
ERROR = "Error: "  # precedes the result of a tool that failed, because chat templates have no field for that
SOURCES = {"base64": ("media_type", "data"), "url": ("url",)}  # fields of each source of an image
FIELDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # of each type of block: required, optional
    "text": (("text",), ()),
    "image": (("source",), ()),
    "thinking": (("thinking",), ()),
    "tool_use": (("id", "name", "input"), ()),
    "tool_result": (("tool_use_id",), ("content", "is_error")),
}
BLOCKS_OF = {  # types of blocks in messages of each role
    "system": ("text",),
    "user": ("text", "image", "tool_result"),
    "assistant": ("text", "thinking", "tool_use"),
}
# Variables of chat templates that turn reasoning on and off.
SWITCHES = {"enable_thinking", "thinking"}


class ImageSource(Body):
    """`source` of an image: a URL, or the image in base64."""

    type: str = Field(description="`base64` or `url`.")
    media_type: str | None = optional("MIME type of an image in base64.")
    data: str | None = optional("Image in base64.")
    url: str | None = optional("URL with scheme http, https or data.")

    def link(self, where: str) -> str:
        """Return the URL of the image, with scheme data for base64. Raises ApiError (400) for another source."""
        if self.type not in SOURCES:
            text = f"{where}: sources of type {self.type} are not supported; use base64 or url"
            raise invalid(text, where, "unsupported_parameter")
        require_fields(self, where, self.type, SOURCES[self.type])
        return self.url or f"data:{self.media_type};base64,{self.data}"


class Block(Body):
    """Block of a message. A block has only fields of its type."""

    ignored = IGNORED | {"signature"}
    neutral: ClassVar[Neutral] = {
        "caller": (None, {"type": "direct"}),
        "citations": (None, []),
        "toolset_name": (None,),
        "transformations": (None, {}),
    }

    type: str = Field(description="`text`, `image`, `thinking`, `tool_use` or `tool_result`.")
    text: str | None = optional("Of the type `text`.")
    source: ImageSource | None = optional("Of the type `image`: the [image](#images).")
    thinking: str | None = optional("Of the type `thinking`: reasoning of an earlier response.")
    id: CallId | None = optional("Of the type `tool_use`: id of a call in an earlier response.")
    name: FunctionName | None = optional("Of the type `tool_use`: tool that was called.")
    input: JsonObject | None = optional("Of the type `tool_use`: arguments of the call.")
    tool_use_id: CallId | None = optional("Of the type `tool_result`: id of the call.")
    content: str | Annotated[list["Block"], Field(fail_fast=True)] | None = optional(
        "Of the type `tool_result`: a text, or blocks of text and images."
    )
    is_error: bool | None = optional(f"Of the type `tool_result`: `true` begins the result with `{ERROR}`.")

    def piece(self, path: str) -> Piece:
        """Return a text or an image. Raises ApiError (400) for an unsupported source of an image."""
        where = f"{path}.source"
        return Piece(self.text or "") if self.source is None else Piece(url=self.source.link(where), path=where)


Content = str | Annotated[list[Block], Field(fail_fast=True)]


class MessageParam(Body):
    """Element of `messages`: one message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: Content = Field(description="A text, or a list of [blocks](#blocks).")


class CustomTool(Body):
    """Element of `tools`: a tool that the client runs. Anthropic's own tools are rejected by name."""

    ignored = IGNORED | {"eager_input_streaming", "strict"}  # a forced call always follows its schema
    neutral: ClassVar[Neutral] = {
        "allowed_callers": (None, [], ["direct"]),
        "defer_loading": (None, False),
        "input_examples": (None, []),
    }

    type: str | None = optional("`custom`.")
    name: FunctionName = Field(description="Name of the tool.")
    description: str | None = optional("Part of the prompt.")
    input_schema: JsonObject | None = optional("JSON schema of the input.")

    def tool(self, where: str) -> Tool:
        """Return the tool of a chat. Raises ApiError (400) for a tool that the client does not run."""
        if self.type not in (None, "custom"):
            text = f"{where}: tools of type {self.type} are not supported; define a tool with input_schema"
            raise invalid(text, f"{where}.type", "unsupported_parameter")
        require_fields(self, where, "custom", ("name", "input_schema"), ("description",))
        function = Function(name=self.name, description=self.description, parameters=self.input_schema)
        return Tool(type="function", function=function)


class ToolChoiceParam(CheckedBody):
    """`tool_choice`: whether the model may, must or must not call tools."""

    path = "tool_choice."

    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = optional("Tool that must be called, if the type is `tool`.")
    disable_parallel_tool_use: bool | None = optional("`true` keeps only the first call.")

    @model_validator(mode="after")
    def _check(self) -> "ToolChoiceParam":
        others = () if self.type == "none" else ("disable_parallel_tool_use",)
        require_fields(self, "tool_choice", self.type, ("name",) if self.type == "tool" else (), others)
        return self


class Thinking(CheckedBody):
    """`thinking`: whether the model reasons."""

    path = "thinking."
    neutral: ClassVar[Neutral] = {"display": (None, "summarized")}

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = optional(
        "No effect: `max_tokens` limits reasoning and text together."
    )

    @model_validator(mode="after")
    def _check(self) -> "Thinking":
        require_fields(self, "thinking", self.type, (), ("budget_tokens",) if self.type == "enabled" else ())
        return self


class OutputFormat(CheckedBody):
    """`output_config.format`: required format of the output."""

    path = "output_config.format."

    type: Literal["json_schema"]
    schema_: Annotated[JsonObject, Field(alias="schema")] = Field(description="JSON schema of the output.")


class OutputConfig(CheckedBody):
    """`output_config`: effort and format of the output."""

    path = "output_config."

    effort: Annotated[str, Field(min_length=1, max_length=NAME_CHARS_MAX)] | None = optional(
        "`reasoning_effort` of the chat template; rejected unless the template uses it."
    )
    format: OutputFormat | None = optional("JSON schema that the output matches.")


class MessagesBody(RoutedBody):
    """Body of POST /v1/messages. The ingress prepares and runs it as a chat."""

    endpoint = "messages"
    id_prefix = "msg_"
    names: ClassVar[Mapping[str, str]] = {
        "response_format": "output_config.format",
        "response_format.json_schema.schema": "output_config.format.schema",
        "reasoning_effort": "output_config.effort",
        "continue_final_message": "messages",
    }
    ignored = IGNORED | {"metadata"}
    neutral: ClassVar[Neutral] = {
        "container": (None,),
        "context_management": (
            None,
            {"edits": []},
            {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        ),
        "diagnostics": (None,),
        "inference_geo": (None,),
        "mcp_servers": (None, []),
        "service_tier": (None, "auto", "standard_only"),
        "speed": (None, "standard"),
    }

    max_tokens: Annotated[int, Field(ge=1)] = Field(
        description="Maximum number of output tokens. Prompt and response must fit into the context."
    )
    messages: Annotated[list[MessageParam], Field(fail_fast=True, min_length=1, max_length=MESSAGES_MAX)] = Field(
        description="The conversation: texts or [blocks](#blocks). If the last message has the role assistant, the "
        "model continues it."
    )
    system: Content | None = optional("First message of the chat, a text or blocks of text.")
    stop_sequences: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=STOP_CHARS_MAX)]],
            Field(fail_fast=True, max_length=STOPS_MAX),
        ]
        | None
    ) = optional(f"Up to {STOPS_MAX} strings, each of up to {STOP_CHARS_MAX:,} characters.")
    stream: bool | None = optional("Whether the response is a stream of events.")
    temperature: Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)] | None = optional(
        "0 to 1; 1 if it is missing."
    )
    top_p: TopP | None = optional("Above 0, up to 1; 1 if it is missing.")
    top_k: Annotated[int, Field(ge=0, le=TOKENS_MAX)] | None = optional("0 disables it.")
    tools: Annotated[list[CustomTool], Field(fail_fast=True, max_length=TOOLS_MAX)] | None = optional(
        "Tools that the client runs. Anthropic's own tools are rejected by name."
    )
    tool_choice: ToolChoiceParam | None = optional("`auto`, `any`, `tool` or `none`.")
    thinking: Thinking | None = optional("Whether the model reasons, see [thinking](#thinking).")
    output_config: OutputConfig | None = optional("Effort and format of the output.")

    @model_validator(mode="after")
    def _check(self) -> "MessagesBody":
        lists = [
            content for content in (self.system, *(one.content for one in self.messages)) if isinstance(content, list)
        ]
        results = [one.content for blocks in lists for one in blocks if isinstance(one.content, list)]
        blocks = sum(map(len, lists + results))
        if blocks > PARTS_MAX:
            raise invalid(f"messages have {blocks:,} blocks; the limit is {PARTS_MAX:,}", "messages")
        if self.nvext is not None and self.nvext.extra_fields:
            text = "nvext.extra_fields is not supported: the response of this API has no such fields; leave it out"
            raise invalid(text, "nvext.extra_fields", "unsupported_parameter")
        return self

    @property
    def end_user(self) -> str:
        metadata = (self.model_extra or {}).get("metadata")
        name = metadata.get("user_id") if isinstance(metadata, dict) else None
        return name if isinstance(name, str) else ""

    @cached_property
    def chat(self) -> ChatBuilder:
        """The messages of the chat. Raises ApiError (400) for an invalid block."""
        chat = ChatBuilder()
        if self.system:
            _add(chat, "system", "system", self.system)
        for at, message in enumerate(self.messages):
            require_fields(message, f"messages[{at}]", "message", ("role", "content"))
            _add(chat, f"messages[{at}].content", message.role, message.content)
        return chat

    def own_name(self, param: str) -> str:
        return self.chat.paths.get(param) or super().own_name(param)

    @cached_property
    def completion(self) -> "Conversation":
        """The chat from which the request is prepared. Raises ApiError (400) for an invalid block or tool."""
        messages, last = self.chat.messages, self.messages[-1]
        continues = last.role == "assistant"
        if continues and not (last.content and getattr(last.content[-1], "type", "text") == "text"):
            text = "the last message has the role assistant and does not end with text that the model could continue"
            raise invalid(text, f"messages[{len(self.messages) - 1}]")
        form, choice = self.output_config and self.output_config.format, self.tool_choice
        schema = form and JsonSchema.model_construct(name="output", schema_=form.schema_)
        conversation = Conversation.model_construct(
            model=self.model,
            cache_salt=self.cache_salt,
            nvext=self.nvext,
            messages=messages,
            thinking=self.thinking and self.thinking.type,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=self.stop_sequences,
            stream=self.stream,
            tools=None if self.tools is None else [one.tool(f"tools[{at}]") for at, one in enumerate(self.tools)],
            tool_choice=self._tool_choice(),
            parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
            reasoning_effort=self.output_config and self.output_config.effort,
            continue_final_message=continues,
            response_format=form and ResponseFormat.model_construct(type=form.type, json_schema=schema),
        )
        conversation.__dict__["size_bytes"] = self.size_bytes
        return conversation

    def _tool_choice(self) -> ToolChoice | None:
        choice = self.tool_choice
        if choice is None or choice.type in ("auto", "none"):
            return "none" if choice and choice.type == "none" else None
        if not self.tools:
            raise invalid(f"tool_choice is {choice.type}, but the request has no tools", "tool_choice")
        if choice.type == "any":
            return "required"
        return NamedTool(type="function", function=NamedFunction(name=choice.name or ""))


class CountTokensBody(MessagesBody):
    """Body of POST /v1/messages/count_tokens. Other fields of POST /v1/messages are accepted."""

    max_tokens: Annotated[int, Field(ge=1)] = 1


class Conversation(ChatBody):
    """The chat that a body of the Messages API becomes.

    `thinking` is `thinking.type` of the body.
    """

    thinking: str | None = None

    def template_arguments(self, template: str) -> dict[str, Any]:
        """Return the arguments of the chat template with this source.

        Raises ApiError (400) if the body turns reasoning on or off, and the template does not support that.
        """
        arguments = super().template_arguments(template)
        if self.thinking in ("enabled", "disabled"):
            wanted = self.thinking == "enabled"
            switches = dict.fromkeys(SWITCHES & variables_of(template), wanted)
            if not switches and wanted != ("</think>" in template):
                text = f"thinking: the chat template of this model does not support the type {self.thinking!r}"
                raise invalid(f"{text}; leave thinking out", "thinking", "unsupported_parameter")
            arguments |= switches
        return arguments


def _add(chat: ChatBuilder, where: str, role: Role, content: Content) -> None:
    """Add a message, whose content has this path. One with results of tools becomes several messages of the chat."""
    pieces: list[Piece] = []
    blocks = [Block(type="text", text=content)] if isinstance(content, str) else content
    for path, block in _checked(where, blocks, BLOCKS_OF[role], f"messages of the role {role}"):
        match block.type:
            case "tool_result":
                if pieces:
                    chat.put(role, pieces)
                    pieces = []
                chat.put_result(f"{path}.tool_use_id", block.tool_use_id, _result(path, block))
            case "thinking":
                chat.reasoning.append(block.thinking or "")
            case "tool_use":
                chat.call(block.id, block.name, msgspec.json.encode(block.input).decode())
            case "text" if role == "assistant":
                chat.texts.append(block.text or "")
            case _:
                pieces.append(block.piece(path))
    if pieces:
        chat.put(role, pieces)
    chat.finish()


def _result(where: str, block: Block) -> Iterator[Piece]:
    if block.is_error:
        yield Piece(ERROR)
    if isinstance(block.content, str):
        yield Piece(block.content)
    else:
        for path, part in _checked(f"{where}.content", block.content or (), ("text", "image"), "results of tools"):
            yield part.piece(path)


def _checked(where: str, blocks: Sequence[Block], types: Sequence[str], owner: str) -> Iterator[tuple[str, Block]]:
    """Yield blocks, each with its path. Raises ApiError (400) for another type, or for missing or other fields."""
    for at, block in enumerate(blocks):
        path = f"{where}[{at}]"
        if block.type not in types:
            text = f"{path}: blocks of type {block.type} are not supported in {owner}; use {', '.join(types)}"
            raise invalid(text, f"{path}.type", "unsupported_parameter")
        require_fields(block, path, block.type, *FIELDS[block.type])
        yield path, block
