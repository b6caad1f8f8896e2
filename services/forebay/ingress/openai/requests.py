"""The supported part of OpenAI's request bodies. Unsupported fields are rejected by name.

Source: OpenAI API reference, chat completions and completions; `cache_salt` and `chat_template_kwargs` are vLLM's.
"""

import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self

import msgspec
from pydantic import Field, model_validator

from forebay.events.names import unknown_name
from forebay.events.requests import StructuredOutput
from forebay.ingress.body_limits import MESSAGES_MAX
from forebay.ingress.errors import ApiError, invalid
from forebay.ingress.media.tokens import MediaRef
from forebay.ingress.openai.fields import (
    Body,
    CheckedBody,
    Neutral,
    describe_non_empty,
    encoded_options,
    reject_extra,
    require_fields,
    requires,
)
from forebay.ingress.openai.nvext import NAME_CHARS_MAX, WORKER_ID, RoutedBody
from forebay.ingress.openai.sampling import JsonObject, SamplingFields, TokenIds, listed
from forebay.ingress.openai.tools import CallId, ToolCall, ToolChoice, Tools, ToolSelection, choice_of

CHAT_PATH = "/v1/chat/completions"
TEXT_PATH = "/v1/completions"
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")

STOP_STRINGS_MAX = 4
STOP_CHARS_MAX = 1_024  # each delta of a response is compared with prefixes of the stop strings
PARTS_MAX = 10_000  # content parts and tool calls of all messages; each takes microseconds
N_MAX = 128  # OpenAI's limit
PROMPTS_MAX = 1_024
CHOICES_MAX = 1_024  # of one response: `n` for each prompt; each is a request on the log
LOGPROBS_MAX = 20  # OpenAI's limit for chats, and the default limit of engines
TEMPLATE_ARGUMENTS_MAX = 64

# Parameters of OpenAI and vLLM 0.32 that forebay does not support, with the values that have no effect.
NEUTRAL: Neutral = {
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "best_of": (None, 1),
    "ec_transfer_params": (None, {}),
    "guided_decoding_backend": (None,),
    "guided_whitespace_pattern": (None,),
    "include_stop_str_in_output": (None, False),
    "kv_transfer_params": (None, {}),
    "length_penalty": (None, 1),
    "logprob_token_ids": (None,),
    "media_io_kwargs": (None, {}),
    "mm_payload": (None, "tensors", "none"),  # vLLM's render endpoints use it
    "mm_processor_kwargs": (None, {}),
    "priority": (None, 0),
    "prompt_embeds": (None,),
    "prompt_logprobs": (None,),
    "repetition_detection": (None,),
    "request_id": (None,),
    "return_mm_kwargs": (None, False, True),  # vLLM's render endpoints use it
    "return_prompt_text": (None, False),
    "return_token_offsets": (None, False, True),  # vLLM's render endpoints use it
    "return_tokens_as_token_ids": (None, False),
    "routed_experts_prompt_start": (None, 0),
    "service_tier": (None, "auto", "default"),
    "session_id": (None,),
    "spaces_between_special_tokens": (None, True),
    "store": (None, False),
    "stream_interval": (None, 1),
    "thinking_token_budget": (None, -1),
    "truncate_prompt_tokens": (None,),
    "truncation_side": (None, "left", "right"),  # of `truncate_prompt_tokens`
    "use_beam_search": (None, False),
    "vllm_xargs": (None, {}),
    "watermarking": (None, False),
}
CHAT_NEUTRAL: Neutral = {
    **NEUTRAL,
    "echo": (None, False),
    "add_special_tokens": (None, False),  # the chat template contains them
    "audio": (None,),
    "chat_template": (None,),
    "documents": (None, []),
    "function_call": (None, "none"),
    "functions": (None, []),
    "include_reasoning": (None, True),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "prompt_cache_retention": (None,),
    "return_token_ids": (None, False),
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
ECHO_EXCLUDES = {"echo": (None, False), "logprobs": (None,)}  # one of them must have such a value
IGNORED = frozenset({"metadata", "prompt_cache_key", "safety_identifier", "user"})

PART_FIELDS = ("text", "image_url", "video_url")

Role = Literal["system", "developer", "user", "assistant", "tool"]


class CompletionOptions(msgspec.Struct, frozen=True, omit_defaults=True):
    """Fields of a completion body that determine the format of its response, as `Rendering.options` has them.

    Attributes:
        includes_usage: whether the last chunk of a stream contains the token counts.
        counts_each_chunk: whether each chunk of a stream contains the token counts so far.
        names_worker: whether the response has the extension `nvext` with the worker ids.
        returns_tokens: whether the choices of a text completion contain the ids of their output tokens.
    """

    includes_usage: bool = False
    counts_each_chunk: bool = False
    names_worker: bool = False
    returns_tokens: bool = False


class StreamOptions(CheckedBody):
    """`stream_options`: whether the last chunk of a stream, or each one, contains the token counts.

    As in vLLM, `continuous_usage_stats` has no effect without `include_usage`.
    """

    path = "stream_options."

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class MediaUrl(Body):
    """`image_url` or `video_url` of a content part: a URL of an image or video with scheme http, https or data."""

    # The model determines the number of tokens of an image; a client cannot set it.
    neutral: ClassVar[Neutral] = {"detail": (None, "auto")}

    url: str | None = None


class ContentPart(Body):
    """Part of the content of a message: a text, an image or a video."""

    type: str
    text: str | None = None
    image_url: MediaUrl | None = None
    video_url: MediaUrl | None = None


class Message(Body):
    """Element of `messages`: one message of a chat."""

    # Clients send the message of a response back unchanged, so its neutral fields are accepted.
    neutral: ClassVar[Neutral] = {
        "annotations": (None, []),
        "audio": (None,),
        "function_call": (None,),
        "refusal": (None,),
    }
    ignored = frozenset({"parsed"})  # the content as parsed by OpenAI's client

    role: Role
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: CallId | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class CompletionBody(RoutedBody, SamplingFields):
    """Fields that the bodies of chat and text completions share."""

    neutral = NEUTRAL
    ignored = IGNORED

    max_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1, le=N_MAX)] | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @classmethod
    def describe(cls, schema: dict[str, Any]) -> None:
        stop = {"type": "string", "minLength": 1, "maxLength": STOP_CHARS_MAX}
        stops = {"type": "array", "items": stop, "maxItems": STOP_STRINGS_MAX}
        schema["properties"]["stop"] = {"anyOf": [stop, stops, {"type": "null"}]}
        schema["allOf"] = [requires("stream", {"const": True}, {"stream_options": {"type": "null"}})]

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
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def completion(self) -> Self:
        """The body from which the request is prepared."""
        return self

    @property
    def options(self) -> str:
        options = self.stream_options
        counts = options is not None and bool(options.include_usage)
        return encoded_options(
            CompletionOptions(
                includes_usage=counts,
                counts_each_chunk=counts and options is not None and bool(options.continuous_usage_stats),
                names_worker=self.nvext is not None and WORKER_ID in (self.nvext.extra_fields or ()),
                returns_tokens=self.returns_tokens,
            )
        )

    @property
    def returns_tokens(self) -> bool:
        return False

    @property
    def tokens_max(self) -> int | None:
        return self.max_tokens

    @property
    def choices_per_prompt(self) -> int:
        return self.n or 1


class ChatBody(CompletionBody):
    """Body of POST /v1/chat/completions: fields of `CompletionBody`, messages and tools."""

    endpoint = "chat_completions"
    id_prefix = "chatcmpl-"
    neutral = CHAT_NEUTRAL

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MESSAGES_MAX)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=LOGPROBS_MAX)] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Annotated[str, Field(min_length=1, max_length=NAME_CHARS_MAX)] | None = None
    chat_template_kwargs: Annotated[JsonObject, Field(max_length=TEMPLATE_ARGUMENTS_MAX)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @classmethod
    def describe(cls, schema: dict[str, Any]) -> None:
        super().describe(schema)
        choices = {"tool_choice": {"enum": [None, "none", "auto"]}}
        schema["allOf"] += [
            requires("logprobs", {"const": True}, {"top_logprobs": {"enum": [None, 0]}}),
            requires("tools", {"type": "array", "minItems": 1}, choices),
        ]

    @model_validator(mode="after")
    def _check_chat(self) -> "ChatBody":
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs is only allowed when logprobs is true", "top_logprobs")
        parts = sum(map(_parts_count, self.messages))
        if parts > PARTS_MAX:
            raise invalid(f"messages have {parts:,} parts and tool calls; the limit is {PARTS_MAX:,}", "messages")
        _ = self.choice  # raises ApiError for an invalid choice
        return self

    @property
    def tokens_max(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def logprobs_wanted(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @cached_property
    def choice(self) -> ToolSelection:
        return choice_of(self.tools, self.tool_choice, self.parallel_tool_calls)

    @property
    def forced(self) -> StructuredOutput | None:
        return self.choice.structure()

    def template_arguments(self, template: str) -> dict[str, Any]:
        """Return the arguments of the chat template with this source. Raises ApiError (400) for an unsupported one."""
        arguments: dict[str, Any] = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            if "reasoning_effort" not in template:
                text = "reasoning_effort is not supported by the chat template of this model; leave it out"
                raise invalid(text, "reasoning_effort", "unsupported_parameter")
            arguments["reasoning_effort"] = self.reasoning_effort
        return arguments

    def chat(self) -> list[dict[str, Any]]:
        """Return the messages as input of `Model.render`. Raises ApiError for an unsupported field or content part."""
        turns = []
        for at, message in enumerate(self.messages):
            reject_extra(message, f"messages[{at}].")
            turns.append({"role": message.role, "content": _content(message, at), **_other_fields(message, at)})
        return turns

    def media(self) -> list[MediaRef]:
        """Return the images and videos of all messages, in order. Raises ApiError for an unsupported content part."""
        turns = enumerate(self.messages)
        return [part for at, message in turns for part in _parts(message, at) if isinstance(part, MediaRef)]


class TextBody(CompletionBody):
    """Body of POST /v1/completions: fields of `CompletionBody`, and one or several prompts as text or token ids."""

    endpoint = "completions"
    id_prefix = "cmpl-"
    neutral = TEXT_NEUTRAL

    prompt: (
        str
        | TokenIds
        | Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=PROMPTS_MAX)]
        | Annotated[list[TokenIds], Field(fail_fast=True, min_length=1, max_length=PROMPTS_MAX)]
    )
    max_tokens: Annotated[int, Field(ge=1)] | None = 16  # OpenAI's default
    add_special_tokens: bool | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=LOGPROBS_MAX)] | None = None
    return_token_ids: bool | None = None

    @classmethod
    def describe(cls, schema: dict[str, Any]) -> None:
        super().describe(schema)
        describe_non_empty(schema["properties"]["prompt"])
        schema["allOf"].append(
            {"anyOf": [{"properties": {name: {"enum": list(values)}}} for name, values in ECHO_EXCLUDES.items()]}
        )

    @model_validator(mode="after")
    def _check_text(self) -> "TextBody":
        if self.echo and self.logprobs is not None:
            text = "echo is not supported together with logprobs: engines report none for the prompt"
            raise invalid(text, "echo", "unsupported_parameter")
        if len(self.prompts) * self.choices_per_prompt > CHOICES_MAX:
            of = f"{len(self.prompts)} prompts with n {self.choices_per_prompt}"
            text = f"{of} exceed the limit of {CHOICES_MAX:,} choices; send fewer prompts"
            raise invalid(text, "n")
        return self

    @property
    def returns_tokens(self) -> bool:
        return bool(self.return_token_ids)

    @property
    def prompts(self) -> list[str | list[int]]:
        return listed(self.prompt)

    @property
    def logprobs_wanted(self) -> int | None:
        return self.logprobs


def adapter_of(name: str, served: str, adapters: Sequence[str]) -> str:
    """Return the LoRA adapter that the field `model` of a request names; empty for the base model.

    Raises ApiError (404) for an unknown name.
    """
    if name == served:
        return ""
    if name in adapters:
        return name
    raise ApiError(404, "model_not_found", unknown_name("model", name, (served, *adapters)), "model")


def _parts_count(message: Message) -> int:
    return (len(message.content) if isinstance(message.content, list) else 0) + len(message.tool_calls or ())


def _content(message: Message, at: int) -> str | list[dict[str, str]] | None:
    parts = list(_parts(message, at))
    if not isinstance(message.content, list):
        return message.content
    return [{"type": "text", "text": one} if isinstance(one, str) else {"type": one.kind} for one in parts]


def _other_fields(message: Message, at: int) -> dict[str, Any]:
    """Return the name, calls, reasoning and call id of a message. Raises ApiError if its role does not allow them."""
    where = f"messages[{at}]"
    found: dict[str, Any] = {} if message.name is None else {"name": message.name}
    if message.role != "assistant":
        for name in ("tool_calls", "reasoning_content", "reasoning"):
            if getattr(message, name):
                raise invalid(f"{where}.{name} requires the role assistant", f"{where}.{name}")
    if message.tool_calls:
        calls = enumerate(message.tool_calls)
        found["tool_calls"] = [call.plain(f"{where}.tool_calls[{number}]") for number, call in calls]
    if reasoning := message.reasoning_content or message.reasoning:
        found |= {"reasoning_content": reasoning, "reasoning": reasoning}  # templates use either name
    if message.role == "tool":
        if message.tool_call_id is None:
            raise invalid(f"{where}.tool_call_id is missing", f"{where}.tool_call_id")
        found["tool_call_id"] = message.tool_call_id
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
        text = f"{where}: parts of type {part.type} are not supported; supported types are {', '.join(PART_FIELDS)}"
        raise invalid(text, where, "unsupported_parameter")
    require_fields(part, where, part.type, (part.type,))
    value = getattr(part, part.type)
    if isinstance(value, str):
        return value
    require_fields(value, f"{where}.{part.type}", part.type, ("url",))
    return MediaRef("image" if part.type == "image_url" else "video", value.url, f"{where}.{part.type}.url")
