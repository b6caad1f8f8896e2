"""OpenAI's request bodies as far as forebay serves them. What is not served is refused by its name.

Source: OpenAI API reference, chat completions and completions; `ignore_eos` is vLLM's extension.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from forebay.ingress.errors import ApiError, invalid

REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")

STOP_STRINGS_MAX = 4
MESSAGES_MAX = 10_000
SEED_MAX = (1 << 63) - 1

Neutral = Mapping[str, tuple[Any, ...]]

# Parameters that OpenAI has and forebay lacks, with the values that ask for nothing.
NEUTRAL: Neutral = {
    "audio": (None,),
    "best_of": (None, 1),
    "echo": (None, False),
    "frequency_penalty": (None, 0),
    "function_call": (None, "none"),
    "functions": (None, []),
    "logit_bias": (None, {}),
    "logprobs": (None, False),
    "modalities": (None, ["text"]),
    "n": (None, 1),
    "parallel_tool_calls": (None, True, False),
    "prediction": (None,),
    "presence_penalty": (None, 0),
    "prompt_cache_retention": (None,),
    "reasoning_effort": (None,),
    "response_format": (None, {"type": "text"}),
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
    "suffix": (None, ""),
    "tool_choice": (None, "none"),
    "tools": (None, []),
    "top_logprobs": (None, 0),
    "verbosity": (None,),
    "web_search_options": (None,),
}
IGNORED = frozenset({"metadata", "prompt_cache_key", "safety_identifier", "user"})
# Clients send an answer's message back as they got it, so what asks for nothing is taken here too.
MESSAGE_NEUTRAL: Neutral = {
    "annotations": (None, []),
    "audio": (None,),
    "function_call": (None,),
    "refusal": (None,),
    "tool_call_id": (None,),
    "tool_calls": (None, []),
}
NONE_NEUTRAL: Neutral = {}


BodyT = TypeVar("BodyT", bound="CompletionBody")


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", frozen=True)


class StreamOptions(_Body):
    """How to stream."""

    include_usage: bool = False
    include_obfuscation: bool = False


class TextPart(_Body):
    """A piece of a message; only text is served."""

    type: str
    text: str | None = None


class Message(_Body):
    """One turn of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None


class CompletionBody(_Body):
    """What both endpoints share."""

    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0, allow_inf_nan=False)] | None = None
    seed: Annotated[int, Field(ge=-SEED_MAX, le=SEED_MAX)] | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False

    @model_validator(mode="after")
    def _check(self) -> "CompletionBody":
        refuse_extra(self, "", NEUTRAL, IGNORED)
        if len(self.stop_strings) > STOP_STRINGS_MAX or "" in self.stop_strings:
            raise invalid(f"stop takes up to {STOP_STRINGS_MAX} strings, none of them empty", "stop")
        if self.stream_options is not None:
            refuse_extra(self.stream_options, "stream_options.", NONE_NEUTRAL)
            if not self.stream:
                raise invalid("stream_options is only allowed when stream is true", "stream_options")
        return self

    @property
    def stop_strings(self) -> list[str]:
        """The stop strings as a list."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def tokens_max(self) -> int | None:
        """The number of tokens asked for, None for the server's choice."""
        return self.max_tokens


class ChatBody(CompletionBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MESSAGES_MAX)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None

    @property
    def tokens_max(self) -> int | None:
        """`max_completion_tokens`, or its older name."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def chat(self) -> list[dict[str, str]]:
        """The messages as chat templates take them. Raises ApiError for parts that are not text."""
        turns = []
        for at, message in enumerate(self.messages):
            refuse_extra(message, f"messages[{at}].", MESSAGE_NEUTRAL)
            turns.append({"role": _role(message.role), "content": _text(message, at)})
        return turns


class TextBody(CompletionBody):
    """POST /v1/completions."""

    prompt: str | list[Annotated[int, Field(ge=0, lt=1 << 32)]]


def refuse_extra(body: BaseModel, where: str, neutral: Neutral, ignored: frozenset[str] = frozenset()) -> None:
    """Raise ApiError for a parameter that is not served, or that nobody knows."""
    for name, value in (body.model_extra or {}).items():
        if name in ignored:
            continue
        accepted = neutral.get(name)
        if accepted is None:
            raise invalid(f"unknown parameter: {where}{name}", f"{where}{name}", "unknown_parameter")
        # In Python 0 is False and 1 is True, on the wire they are not; but 0.0 is 0 on both.
        if not any(value == known and isinstance(value, bool) == isinstance(known, bool) for known in accepted):
            if name in ("n", "best_of"):
                raise invalid(f"{where}{name} must be 1", f"{where}{name}", "unsupported_parameter")
            raise invalid(f"{where}{name} is not supported", f"{where}{name}", "unsupported_parameter")


def parse(kind: type[BodyT], raw: bytes) -> BodyT:
    """A request body. Raises ApiError naming the first thing that is wrong with it."""
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        if first["type"] == "json_invalid":
            raise invalid(f"the body is not valid JSON: {first['msg']}", code="invalid_json") from error
        where = _path(first["loc"])
        raise invalid(f"{where or 'the body'}: {first['msg']}", where or None) from error


def require_model(name: str, served: str) -> None:
    """Raises ApiError unless the model is the one that is served."""
    if name != served:
        raise ApiError(404, "model_not_found", f"the model {name!r} is not served; {served!r} is", "model")


def _path(location: tuple[int | str, ...]) -> str:
    """`messages[0].content` from a location; the names of union members are left out."""
    path = ""
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        elif step.isidentifier() and step not in ("str", "int"):
            path += f".{step}" if path else step
    return path


def _role(role: str) -> str:
    return "system" if role == "developer" else role


def _text(message: Message, at: int) -> str:
    if message.content is None:
        raise invalid(f"messages[{at}].content is missing", f"messages[{at}].content")
    if isinstance(message.content, str):
        return message.content
    return "".join(_part_text(part, f"messages[{at}].content[{number}]") for number, part in enumerate(message.content))


def _part_text(part: TextPart, where: str) -> str:
    if part.type != "text":
        raise invalid(f"{where}: parts of type {part.type} are not supported", where, "unsupported_parameter")
    refuse_extra(part, f"{where}.", NONE_NEUTRAL)
    if part.text is None:
        raise invalid(f"{where}.text is missing", f"{where}.text")
    return part.text
