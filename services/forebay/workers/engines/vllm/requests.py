"""Work items in vLLM's terms, and its answers in ours. Pure: vLLM is not imported here.

What an item says is handed over as it is; what vLLM does not take it refuses itself, in its own words.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from forebay.events.requests import Sampling, StructuredOutput
from forebay.events.tokens import TokenLogprob, TopLogprob

LOGPROB_MIN = -9999.0  # what vLLM's own server says for minus infinity, which JSON does not have

_AS_IS = (
    "max_tokens",
    "temperature",
    "top_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "logprobs",
    "ignore_eos",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
)


class Logprob(Protocol):
    """vLLM's `Logprob`: of one token in one place; `rank` counts from 1, the likeliest."""

    logprob: float
    rank: int | None


def prompt_of(token_ids: list[int], cache_namespace: str = "") -> dict[str, Any]:
    """A prompt that needs no tokenizer: vLLM's `TokensInput`."""
    prompt: dict[str, Any] = {"type": "token", "prompt_token_ids": token_ids}
    if cache_namespace:
        prompt["cache_salt"] = cache_namespace
    return prompt


def sampling_arguments(sampling: Sampling) -> dict[str, Any]:
    """The keyword arguments of `SamplingParams`, without `structured_outputs`; text stays with the ingress."""
    arguments: dict[str, Any] = {name: getattr(sampling, name) for name in _AS_IS}
    arguments["detokenize"] = False
    if sampling.stop_token_ids:
        arguments["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.logit_bias:
        arguments["logit_bias"] = {one.token_id: one.bias for one in sampling.logit_bias}
    return arguments


def structured_arguments(structured: StructuredOutput) -> dict[str, Any]:
    """The keyword arguments of `StructuredOutputsParams`; raises ValueError for choices that are no list of texts."""
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
    """An item's priority for vLLM, where lower is sooner; without the policy `priority` it takes none but 0."""
    return -priority if scheduling_policy == "priority" else 0


def token_logprobs(
    token_ids: Sequence[int], places: Sequence[Mapping[int, Logprob]], top: int
) -> tuple[TokenLogprob, ...]:
    """What vLLM says of each token's place, with the `top` likeliest, the likeliest first."""
    told = []
    for token_id, place in zip(token_ids, places, strict=True):
        ranked = sorted((one.rank, other, one.logprob) for other, one in place.items() if one.rank is not None)
        likeliest = tuple(
            TopLogprob(token_id=other, logprob=max(logprob, LOGPROB_MIN)) for _, other, logprob in ranked[:top]
        )
        told.append(TokenLogprob(logprob=max(place[token_id].logprob, LOGPROB_MIN), top=likeliest))
    return tuple(told)
