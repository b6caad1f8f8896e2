"""The supported part of OpenAI's request bodies. Unsupported fields are rejected by name.

Source: OpenAI API reference, chat completions and completions; `cache_salt` and `chat_template_kwargs` are vLLM's.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from forebay.events.requests import StructuredOutput
from forebay.ingress.errors import ApiError, invalid
from forebay.ingress.media.refs import MediaRef
from forebay.ingress.media.tokens import MediaTokens
from forebay.ingress.openai.fields import Body, CheckedBody, Neutral, reject_extra
from forebay.ingress.openai.nvext import NAME_CHARS_MAX, WORKER_ID, Nvext
from forebay.ingress.openai.sampling import JsonObject, SamplingFields, TokenIds
from forebay.ingress.openai.tools import (
    CALLS_MAX,
    NO_TOOLS,
    CallId,
    ToolCall,
    ToolChoice,
    Tools,
    ToolSelection,
    choice_of,
)

REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")

STOP_STRINGS_MAX = 4
STOP_CHARS_MAX = 1_024  # each delta of a response is compared with prefixes of the stop strings
MESSAGES_MAX = 10_000
PARTS_MAX = 10_000  # content parts and tool calls of all messages; each takes microseconds
LOGPROBS_MAX = 20  # OpenAI's limit for chats, and the default limit of engines
TEMPLATE_ARGUMENTS_MAX = 64

# Parameters of OpenAI and vLLM that forebay does not support, with the values that have no effect.
NEUTRAL: Neutral = {
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "best_of": (None, 1),
    "echo": (None, False),
    "guided_decoding_backend": (None,),
    "guided_whitespace_pattern": (None,),
    "include_stop_str_in_output": (None, False),
    "length_penalty": (None, 1),
    "n": (None, 1),
    "priority": (None, 0),
    "prompt_logprobs": (None,),
    "return_token_ids": (None, False),
    "return_tokens_as_token_ids": (None, False),
    "service_tier": (None, "auto", "default"),
    "spaces_between_special_tokens": (None, True),
    "store": (None, False),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": (None, False),
}
CHAT_NEUTRAL: Neutral = {
    **NEUTRAL,
    "add_generation_prompt": (None, True),
    "add_special_tokens": (None, False),  # the chat template contains them
    "audio": (None,),
    "chat_template": (None,),
    "continue_final_message": (None, False),
    "documents": (None, []),
    "function_call": (None, "none"),
    "functions": (None, []),
    "include_reasoning": (None, True),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "prompt_cache_retention": (None,),
    "verbosity": (None,),
    "web_search_options": (None,),
}
TEXT_NEUTRAL: Neutral = {
    **NEUTRAL,
    "parallel_tool_calls": (None,),
    "reasoning_effort": (None,),
    "suffix": (None, ""),
    "tool_choice": (None, "none"),
    "tools": (None, []),
    "top_logprobs": (None, 0),
}
IGNORED = frozenset({"metadata", "prompt_cache_key", "safety_identifier", "user"})
# Clients send the message of a response back unchanged, so its neutral fields are accepted.
MESSAGE_NEUTRAL: Neutral = {
    "annotations": (None, []),
    "audio": (None,),
    "function_call": (None,),
    "refusal": (None,),
}
MESSAGE_IGNORED = frozenset({"parsed"})  # the content as parsed by OpenAI's client

# The model determines the number of tokens of an image; a client cannot set it.
MEDIA_URL_NEUTRAL: Neutral = {"detail": (None, "auto")}
PART_FIELDS = ("text", "image_url", "video_url")


class StreamOptions(CheckedBody):
    """Options of a stream."""

    path = "stream_options."

    include_usage: bool = False
    include_obfuscation: bool = False


class MediaUrl(Body):
    """URL of an image or a video: http, https or data."""

    neutral = MEDIA_URL_NEUTRAL

    url: str | None = None


class ContentPart(Body):
    """Part of a message: text, an image or a video."""

    type: str
    text: str | None = None
    image_url: MediaUrl | None = None
    video_url: MediaUrl | None = None


class Message(Body):
    """One message of a chat."""

    neutral = MESSAGE_NEUTRAL
    ignored = MESSAGE_IGNORED

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=CALLS_MAX)] | None = None
    tool_call_id: CallId | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class CompletionBody(SamplingFields):
    """Fields that chat and text completions share."""

    neutral = NEUTRAL
    ignored = IGNORED

    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, Field(max_length=NAME_CHARS_MAX)] | None = None
    nvext: Nvext | None = None

    @classmethod
    def describe(cls, schema: dict[str, Any]) -> None:
        """Add the limits of `stop`, and that `stream_options` requires `stream`."""
        stop = {"type": "string", "minLength": 1, "maxLength": STOP_CHARS_MAX}
        stops = {"type": "array", "items": stop, "maxItems": STOP_STRINGS_MAX}
        schema["properties"]["stop"] = {"anyOf": [stop, stops, {"type": "null"}]}
        schema["allOf"] = [
            {
                "anyOf": [
                    {"properties": {"stream": {"const": True}}, "required": ["stream"]},
                    {"properties": {"stream_options": {"type": "null"}}},
                ]
            }
        ]

    @model_validator(mode="after")
    def _check(self) -> "CompletionBody":
        if len(self.stop_strings) > STOP_STRINGS_MAX or "" in self.stop_strings:
            raise invalid(
                f"stop has {len(self.stop_strings)} strings; give at most {STOP_STRINGS_MAX}, none of them empty",
                "stop",
            )
        if any(len(stop) > STOP_CHARS_MAX for stop in self.stop_strings):
            raise invalid(f"a stop string is too long; the limit is {STOP_CHARS_MAX} characters", "stop")
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options is only allowed when stream is true", "stream_options")
        return self

    @property
    def stop_strings(self) -> list[str]:
        """Stop strings as a list."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def cache_namespace(self) -> str:
        """Salt of the KV cache: `nvext.cache_salt`, else `cache_salt`; empty for the shared cache."""
        return (self.nvext and self.nvext.cache_salt) or self.cache_salt or ""

    @property
    def queries_route(self) -> bool:
        """Whether the request is a route query, for which nothing is generated."""
        return self.nvext is not None and self.nvext.queries_route

    @property
    def names_worker(self) -> bool:
        """Whether the response includes the worker ids in `nvext`."""
        return self.nvext is not None and WORKER_ID in (self.nvext.extra_fields or ())

    @property
    def tokens_max(self) -> int | None:
        """Maximum number of output tokens, None for the default of the server."""
        return self.max_tokens


class ChatBody(CompletionBody):
    """Body of POST /v1/chat/completions."""

    neutral = CHAT_NEUTRAL

    messages: Annotated[list[Message], Field(min_length=1, max_length=MESSAGES_MAX)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=LOGPROBS_MAX)] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Annotated[str, Field(min_length=1, max_length=NAME_CHARS_MAX)] | None = None
    chat_template_kwargs: Annotated[JsonObject, Field(max_length=TEMPLATE_ARGUMENTS_MAX)] | None = None

    _choice: ToolSelection = NO_TOOLS

    @classmethod
    def describe(cls, schema: dict[str, Any]) -> None:
        """Add that `top_logprobs` requires `logprobs`, and `tool_choice` requires `tools`."""
        super().describe(schema)
        schema["allOf"] += [
            {
                "anyOf": [
                    {"properties": {"logprobs": {"const": True}}, "required": ["logprobs"]},
                    {"properties": {"top_logprobs": {"enum": [None, 0]}}},
                ]
            },
            {
                "anyOf": [
                    {"properties": {"tools": {"type": "array", "minItems": 1}}, "required": ["tools"]},
                    {"properties": {"tool_choice": {"enum": [None, "none", "auto"]}}},
                ]
            },
        ]

    @model_validator(mode="after")
    def _check_chat(self) -> "ChatBody":
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs is only allowed when logprobs is true", "top_logprobs")
        parts = sum(map(_parts_count, self.messages))
        if parts > PARTS_MAX:
            raise invalid(f"messages have {parts:,} parts and tool calls; the limit is {PARTS_MAX:,}", "messages")
        self._choice = choice_of(self.tools, self.tool_choice, self.parallel_tool_calls)
        return self

    @property
    def tokens_max(self) -> int | None:
        """Maximum number of output tokens: `max_completion_tokens`, else `max_tokens`."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def logprobs_wanted(self) -> int | None:
        """Number of alternatives per token to report, None for no log probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def choice(self) -> ToolSelection:
        """Selected tools."""
        return self._choice

    @property
    def forced(self) -> StructuredOutput | None:
        """Structure of the output that a forced tool call requires, None for no forced call."""
        return self._choice.structure()

    def chat(self, tokens: MediaTokens) -> list[dict[str, Any]]:
        """Return the messages as input of a chat template. Raises ApiError for unsupported parts."""
        turns = []
        for at, message in enumerate(self.messages):
            reject_extra(message, f"messages[{at}].")
            content = tokens.content(list(_parts(message, at)))
            turns.append({"role": _role(message.role), "content": content, **_assistant_fields(message, at)})
        return turns

    def media(self) -> list[MediaRef]:
        """Return the images and videos in order. Raises ApiError for unsupported parts."""
        turns = enumerate(self.messages)
        return [part for at, message in turns for part in _parts(message, at) if isinstance(part, MediaRef)]


class TextBody(CompletionBody):
    """Body of POST /v1/completions."""

    neutral = TEXT_NEUTRAL

    prompt: str | TokenIds
    add_special_tokens: bool = True
    logprobs: Annotated[int, Field(ge=0, le=LOGPROBS_MAX)] | None = None

    @property
    def logprobs_wanted(self) -> int | None:
        """Number of alternatives per token to report, None for no log probabilities."""
        return self.logprobs


def adapter_of(name: str, served: str, adapters: Sequence[str]) -> str:
    """Return the adapter that the field `model` names, empty for the base model. Raises ApiError if unknown."""
    if name == served:
        return ""
    if name in adapters:
        return name
    known = ", ".join(repr(one) for one in (served, *adapters))
    raise ApiError(404, "model_not_found", f"unknown model {name!r}; models are: {known}", "model")


def _parts_count(message: Message) -> int:
    return (len(message.content) if isinstance(message.content, list) else 0) + len(message.tool_calls or ())


def _role(role: str) -> str:
    return "system" if role == "developer" else role


def _assistant_fields(message: Message, at: int) -> dict[str, Any]:
    """Return the fields of tool calls, tool results and reasoning. Raises ApiError if the role does not allow them."""
    where = f"messages[{at}]"
    found: dict[str, Any] = {}
    if message.role != "assistant":
        for name in ("tool_calls", "reasoning_content", "reasoning"):
            if getattr(message, name):
                raise invalid(f"{where}.{name} requires the role assistant", f"{where}.{name}")
    if message.tool_calls:
        calls = enumerate(message.tool_calls)
        found["tool_calls"] = [call.plain(f"{where}.tool_calls[{number}]") for number, call in calls]
    if reasoning := message.reasoning_content or message.reasoning:
        found["reasoning_content"] = reasoning
    if message.role == "tool":
        if message.tool_call_id is None:
            raise invalid(f"{where}.tool_call_id is missing", f"{where}.tool_call_id")
        found["tool_call_id"] = message.tool_call_id
        if message.name is not None:
            found["name"] = message.name
    elif message.tool_call_id is not None:
        raise invalid(f"{where}.tool_call_id requires the role tool", f"{where}.tool_call_id")
    return found


def _parts(message: Message, at: int) -> Iterator[str | MediaRef]:
    """Yield the parts of a message. Raises ApiError for missing content or an unsupported part."""
    if message.content is None:
        if not message.tool_calls:
            raise invalid(f"messages[{at}].content is missing", f"messages[{at}].content")
    elif isinstance(message.content, str):
        yield message.content
    else:
        for number, part in enumerate(message.content):
            yield _part(part, f"messages[{at}].content[{number}]")


def _part(part: ContentPart, where: str) -> str | MediaRef:
    if part.type not in PART_FIELDS:
        raise invalid(f"{where}: parts of type {part.type} are not supported", where, "unsupported_parameter")
    reject_extra(part, f"{where}.")
    for name in PART_FIELDS:
        if name != part.type and getattr(part, name) is not None:
            raise invalid(f"{where}.{name} is not allowed in a part of type {part.type}", f"{where}.{name}")
    value = getattr(part, part.type)
    if value is None:
        raise invalid(f"{where}.{part.type} is missing", f"{where}.{part.type}")
    if isinstance(value, str):
        return value
    reject_extra(value, f"{where}.{part.type}.")
    if value.url is None:
        raise invalid(f"{where}.{part.type}.url is missing", f"{where}.{part.type}.url")
    return MediaRef("image" if part.type == "image_url" else "video", value.url, f"{where}.{part.type}.url")
