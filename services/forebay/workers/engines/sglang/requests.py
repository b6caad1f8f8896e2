"""Convert work items to SGLang's arguments, and SGLang's results to events. This module does not import SGLang.

Parameters are passed on unchanged. If SGLang does not support a parameter, it rejects the request with its own message.
Requests with a parameter that it would ignore silently are rejected here.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from forebay.events.requests import Sampling, StructuredOutput
from forebay.events.tokens import TokenLogprob
from forebay.workers.engine import AttemptFailed
from forebay.workers.engines.vllm.requests import token_logprob

ANY_OBJECT = '{"type": "object"}'

_AS_IS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "ignore_eos")
# Parameters that SGLang's diffusion algorithms ignore, with the values that have no effect. They also ignore
# temperature, top_p, top_k, min_p and repetition_penalty, but requests have these from the model's own defaults, too.
_AUTOREGRESSIVE: dict[str, Any] = {
    "seed": None,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": (),
    "logprobs": None,
    "structured": None,
    "min_tokens": 0,
}


def ignored(sampling: Sampling, resolved: Mapping[str, Any]) -> str | None:
    """Return which parameter SGLang with these arguments would ignore, and what to do; None if it ignores none."""
    if sampling.seed is not None and sampling.temperature and not resolved["enable_deterministic_inference"]:
        return (
            "SGLang ignores the seed: send none or a temperature of 0, or start the engine with the argument"
            " enable_deterministic_inference"
        )
    if sampling.stop_token_ids and sampling.ignore_eos:
        return "SGLang ignores stop_token_ids if ignore_eos is true: send only one of the two"
    if resolved.get("dllm_algorithm"):
        names = [name for name, neutral in _AUTOREGRESSIVE.items() if getattr(sampling, name) != neutral]
        if names:
            return f"SGLang ignores {', '.join(names)} for diffusion models: remove the parameter"
    return None


def sampling_arguments(sampling: Sampling) -> dict[str, Any]:
    """Return the fields of SGLang's `SamplingParams`. Raises ValueError if the choices of the output are invalid."""
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
        name, text = structured_argument(sampling.structured)
        arguments[name] = text
    return arguments


def structured_argument(structured: StructuredOutput) -> tuple[str, str]:
    """Return the name and value of SGLang's argument for a format. Raises ValueError if the choices are invalid."""
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
    """Return a regular expression that matches exactly the strings of a JSON list.

    Raises ValueError if the text is no such list, or the list is empty.
    """
    try:
        choices = msgspec.json.decode(text, type=list[str])
    except msgspec.MsgspecError as error:
        raise ValueError(f"the choices must be a JSON list of strings: {error}") from None
    if not choices:
        raise ValueError("the choices must be a JSON list of strings, got an empty list")
    return f"({'|'.join(map(re.escape, choices))})"


def logprob_arguments(sampling: Sampling) -> dict[str, Any]:
    """Return the arguments of SGLang's `async_generate` that request log probabilities; empty if none are requested."""
    if sampling.logprobs is None:
        return {}
    return {"return_logprob": True, "top_logprobs_num": sampling.logprobs, "logprob_start_len": -1}


def token_logprobs(meta: Mapping[str, Any], top: int) -> tuple[TokenLogprob, ...]:
    likeliest: Sequence[Any] = meta.get("output_top_logprobs") or ()
    converted = []
    for at, (logprob, _, _) in enumerate(meta["output_token_logprobs"]):
        others = (likeliest[at] if at < len(likeliest) else None) or ()
        converted.append(token_logprob(logprob, [(token_id, value) for value, token_id, _ in others[:top]]))
    return tuple(converted)


def abort_error(reason: Mapping[str, Any]) -> AttemptFailed:
    return status_error(reason.get("status_code"), reason.get("message") or "no reason given")


def status_error(status: Any, message: str) -> AttemptFailed:
    """Return the error for a request that SGLang ended with an HTTP status.

    None means that SGLang dropped the request: the error has status 503, so that the client may retry.
    """
    number = 503 if status is None else int(status)
    if 400 <= number < 500:
        return AttemptFailed(number, "invalid_request", message)
    code = "engine_overloaded" if number == 503 else "engine_error"
    return AttemptFailed(number, code, f"SGLang ended the request: {message}")


def engine_priority(priority: int, arguments: Mapping[str, Any]) -> int | None:
    """Return the priority of a request for SGLang; None if SGLang does not schedule by priority.

    Its arguments determine that, and whether higher or lower values run sooner there.
    """
    if not arguments.get("enable_priority_scheduling"):
        return None
    return -priority if arguments.get("schedule_low_priority_values_first") else priority
