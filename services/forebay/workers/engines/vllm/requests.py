"""Convert work items to vLLM's arguments, and vLLM's results to events. This module does not import vLLM.

Parameters are passed on unchanged. If vLLM does not support a parameter, it rejects the request with its own message.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from forebay.events.requests import Sampling, StructuredOutput
from forebay.events.tokens import TokenLogprob, TopLogprob

LOGPROB_MIN = -9999.0  # replaces minus infinity, which JSON does not have, as in vLLM's own server

_CONVERTED = ("structured", "stop_token_ids", "logit_bias")
_AS_IS = tuple(name for name in Sampling.__struct_fields__ if name not in _CONVERTED)


class Logprob(Protocol):
    """Fields of vLLM's `Logprob`. `rank` is 1 for the most likely token at the position."""

    logprob: float
    rank: int | None


def prompt_of(token_ids: list[int], cache_namespace: str = "") -> dict[str, Any]:
    """Return a prompt of token ids as vLLM's `TokensInput`. A `cache_namespace` becomes the salt of vLLM's cache."""
    prompt: dict[str, Any] = {"type": "token", "prompt_token_ids": token_ids}
    if cache_namespace:
        prompt["cache_salt"] = cache_namespace
    return prompt


def sampling_arguments(sampling: Sampling) -> dict[str, Any]:
    """Return the keyword arguments of vLLM's `SamplingParams`, except `structured_outputs`.

    vLLM does not detokenize and gets no stop strings, because the ingress handles text.
    """
    arguments: dict[str, Any] = {name: getattr(sampling, name) for name in _AS_IS}
    arguments["detokenize"] = False
    if sampling.stop_token_ids:
        arguments["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.logit_bias:
        arguments["logit_bias"] = {one.token_id: one.bias for one in sampling.logit_bias}
    return arguments


def structured_arguments(structured: StructuredOutput) -> dict[str, Any]:
    """Return the keyword arguments of vLLM's `StructuredOutputsParams`. Raises ValueError for a bad `choice` list."""
    match structured.kind:
        case "json_object":
            return {"json_object": True}
        case "json_schema":
            return {"json": structured.text}
        case "choice":
            try:
                return {"choice": msgspec.json.decode(structured.text, type=list[str])}
            except msgspec.MsgspecError as error:
                raise ValueError(f"the choices must be a JSON list of strings: {error}") from None
        case "regex" | "grammar" as kind:
            return {kind: structured.text}


def engine_priority(priority: int, scheduling_policy: str) -> int:
    """Return the priority of a request for vLLM, where lower values run sooner; 0 unless its policy is `priority`."""
    return -priority if scheduling_policy == "priority" else 0


def token_logprobs(
    token_ids: Sequence[int], places: Sequence[Mapping[int, Logprob]], top: int
) -> tuple[TokenLogprob, ...]:
    converted = []
    for token_id, place in zip(token_ids, places, strict=True):
        ranked = sorted((one.rank, other, one.logprob) for other, one in place.items() if one.rank is not None)
        likeliest = [(other, logprob) for _, other, logprob in ranked[:top]]
        converted.append(token_logprob(place[token_id].logprob, likeliest))
    return tuple(converted)


def token_logprob(logprob: float, likeliest: Iterable[tuple[int, float]]) -> TokenLogprob:
    """Return the log probability of a token, and those of the most likely tokens at its position, by token id."""
    top = tuple(TopLogprob(token_id=token_id, logprob=max(value, LOGPROB_MIN)) for token_id, value in likeliest)
    return TokenLogprob(logprob=max(logprob, LOGPROB_MIN), top=top)
