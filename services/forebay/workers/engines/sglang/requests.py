"""Work items in SGLang's terms, and its answers in ours. Pure: SGLang is not imported here.

What an item says is handed over as it is; what SGLang does not take it refuses itself, in its own words.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from forebay.events.requests import Sampling, StructuredOutput
from forebay.events.tokens import ResponseError, TokenLogprob, TopLogprob

LOGPROB_MIN = -9999.0  # what servers say for minus infinity, which JSON does not have
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
    """The fields of SGLang's `SamplingParams`; raises ValueError for a structure that it has no word for."""
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
    """A regular expression of a JSON list of strings; raises ValueError for anything else."""
    try:
        choices = msgspec.json.decode(text, type=list[str])
    except msgspec.MsgspecError as error:
        raise ValueError(f"the choices must be a JSON list of strings: {error}") from None
    if not choices:
        raise ValueError("the choices must be a JSON list of strings, of one at least")
    return f"({'|'.join(map(re.escape, choices))})"


def logprob_arguments(sampling: Sampling) -> dict[str, Any]:
    """What `async_generate` is told to get the probabilities of output tokens."""
    if sampling.logprobs is None:
        return {}
    return {"return_logprob": True, "top_logprobs_num": sampling.logprobs, "logprob_start_len": -1}


def token_logprobs(meta: Mapping[str, Any], top: int) -> tuple[TokenLogprob, ...]:
    """What a chunk's `meta_info` says of each of its tokens, with the `top` likeliest, the likeliest first."""
    likeliest: Sequence[Any] = meta.get("output_top_logprobs") or ()
    told = []
    for at, (logprob, _, _) in enumerate(meta["output_token_logprobs"]):
        others = (likeliest[at] if at < len(likeliest) else None) or ()
        told.append(
            TokenLogprob(
                logprob=max(logprob, LOGPROB_MIN),
                top=tuple(
                    TopLogprob(token_id=token_id, logprob=max(value, LOGPROB_MIN))
                    for value, token_id, _ in others[:top]
                ),
            )
        )
    return tuple(told)


def abort_error(reason: Mapping[str, Any]) -> ResponseError:
    """What a request is told that SGLang ended: `finish_reason` of the type `abort`."""
    return status_error(reason.get("status_code"), reason.get("message") or "no reason is given")


def status_error(status: Any, message: str) -> ResponseError:
    """By the HTTP status that SGLang would give; without one it dropped the request, which can be asked again."""
    number = 503 if status is None else int(status)
    if 400 <= number < 500:
        return ResponseError(status=number, code="invalid_request", message=message)
    code = "engine_overloaded" if number == 503 else "engine_error"
    return ResponseError(status=number, code=code, message=f"SGLang ended it: {message}")


def engine_priority(priority: int, arguments: Mapping[str, Any]) -> int | None:
    """An item's priority for SGLang, where higher is sooner unless told otherwise; None without an order."""
    if not arguments.get("enable_priority_scheduling"):
        return None
    return -priority if arguments.get("schedule_low_priority_values_first") else priority
