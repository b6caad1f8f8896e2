"""Conversion of work items to SGLang's arguments, and of its results to events. Pure: SGLang is not imported here.

Parameters are passed on unchanged; SGLang rejects those that it does not support with its own messages.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from forebay.events.requests import Sampling, StructuredOutput
from forebay.events.tokens import ResponseError, TokenLogprob, TopLogprob

LOGPROB_MIN = -9999.0  # replaces minus infinity, which JSON does not have
ANY_OBJECT = '{"type": "object"}'

_AS_IS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "ignore_eos",
)


def sampling_arguments(sampling: Sampling) -> dict[str, Any]:
    """Return the fields of SGLang's `SamplingParams`. Raises ValueError for invalid structured output."""
    arguments: dict[str, Any] = {name: getattr(sampling, name) for name in _AS_IS}
    arguments["max_new_tokens"] = sampling.max_tokens
    arguments["min_new_tokens"] = sampling.min_tokens
    arguments["top_k"] = sampling.top_k or -1
    if sampling.seed is not None:
        arguments["sampling_seed"] = sampling.seed
    if sampling.stop_token_ids:
        arguments["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.logit_bias:
        arguments["logit_bias"] = {str(one.token_id): one.bias for one in sampling.logit_bias}
    if sampling.structured is not None:
        name, text = _structure(sampling.structured)
        arguments[name] = text
    return arguments


def _structure(structured: StructuredOutput) -> tuple[str, str]:
    match structured.kind:
        case "json_object":
            return "json_schema", ANY_OBJECT
        case "json_schema":
            return "json_schema", structured.text
        case "regex":
            return "regex", structured.text
        case "grammar":
            return "ebnf", structured.text
        case "choice":
            return "regex", choice_regex(structured.text)


def choice_regex(text: str) -> str:
    """Return a regular expression that matches the strings of a JSON list. Raises ValueError for an invalid list."""
    try:
        choices = msgspec.json.decode(text, type=list[str])
    except msgspec.MsgspecError as error:
        raise ValueError(f"the choices must be a JSON list of strings: {error}") from None
    if not choices:
        raise ValueError("the choices must be a JSON list of strings, got an empty list")
    return f"({'|'.join(map(re.escape, choices))})"


def logprob_arguments(sampling: Sampling) -> dict[str, Any]:
    """Return the arguments of `async_generate` for log probabilities of output tokens."""
    if sampling.logprobs is None:
        return {}
    return {"return_logprob": True, "top_logprobs_num": sampling.logprobs, "logprob_start_len": -1}


def token_logprobs(meta: Mapping[str, Any], top: int) -> tuple[TokenLogprob, ...]:
    """Return the log probabilities of a chunk's tokens, each with the `top` likeliest tokens in descending order."""
    likeliest: Sequence[Any] = meta.get("output_top_logprobs") or ()
    converted = []
    for at, (logprob, _, _) in enumerate(meta["output_token_logprobs"]):
        others = (likeliest[at] if at < len(likeliest) else None) or ()
        converted.append(
            TokenLogprob(
                logprob=max(logprob, LOGPROB_MIN),
                top=tuple(
                    TopLogprob(token_id=token_id, logprob=max(value, LOGPROB_MIN))
                    for value, token_id, _ in others[:top]
                ),
            )
        )
    return tuple(converted)


def abort_error(reason: Mapping[str, Any]) -> ResponseError:
    """Return the error for a `finish_reason` of type `abort`."""
    return status_error(reason.get("status_code"), reason.get("message") or "no reason given")


def status_error(status: Any, message: str) -> ResponseError:
    """Return the error for SGLang's HTTP status. Without one, SGLang dropped the request, and clients may retry."""
    number = 503 if status is None else int(status)
    if 400 <= number < 500:
        return ResponseError(status=number, code="invalid_request", message=message)
    code = "engine_overloaded" if number == 503 else "engine_error"
    return ResponseError(status=number, code=code, message=f"SGLang ended the request: {message}")


def engine_priority(priority: int, arguments: Mapping[str, Any]) -> int | None:
    """Return a priority for SGLang, or None if it does not schedule by priority. Its order is configurable."""
    if not arguments.get("enable_priority_scheduling"):
        return None
    return -priority if arguments.get("schedule_low_priority_values_first") else priority
