"""OpenAI's request bodies as far as forebay serves them. What is not served is refused by its name.

Source: OpenAI API reference, chat completions and completions; `ignore_eos` and `cache_salt` are vLLM's extensions.
"""

import re
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, model_validator

from forebay.ingress.errors import ApiError, invalid
from forebay.ingress.fields import NONE_NEUTRAL, Body, Neutral, refuse_extra
from forebay.ingress.nvext import NAME_CHARS_MAX, WORKER_ID, Nvext

REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")

STOP_STRINGS_MAX = 4
MESSAGES_MAX = 10_000
SEED_MAX = (1 << 63) - 1

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


class StreamOptions(Body):
    """How to stream."""

    include_usage: bool = False
    include_obfuscation: bool = False


class TextPart(Body):
    """A piece of a message; only text is served."""

    type: str
    text: str | None = None


class Message(Body):
    """One turn of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None


class CompletionBody(Body):
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
    cache_salt: Annotated[str, Field(max_length=NAME_CHARS_MAX)] | None = None
    nvext: Nvext | None = None

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
    def cache_namespace(self) -> str:
        """The salt of its cache, `nvext`'s before vLLM's; empty, it shares what others cached without one."""
        return (self.nvext and self.nvext.cache_salt) or self.cache_salt or ""

    @property
    def queries_route(self) -> bool:
        """Whether nothing is to be generated: the client asks where its request would go."""
        return self.nvext is not None and self.nvext.queries_route

    @property
    def names_worker(self) -> bool:
        """Whether the answer is to name its worker in `nvext`, too."""
        return self.nvext is not None and WORKER_ID in (self.nvext.extra_fields or ())

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


def adapter_of(name: str, served: str, adapters: Sequence[str]) -> str:
    """The adapter that a request's `model` names, empty for the model itself. Raises ApiError for other names."""
    if name == served:
        return ""
    if name in adapters:
        return name
    known = ", ".join(repr(one) for one in (served, *adapters))
    raise ApiError(404, "model_not_found", f"the model {name!r} is not served; served: {known}", "model")


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
