"""Rules for a response whose stream is cut: what its rest may be, and whether it can continue at all."""

import msgspec

from forebay.events.requests import Sampling
from forebay.events.tokens import ResponseError


def limited(sampling: Sampling, room: int) -> Sampling:
    """Return the sampling parameters for an output of at most `room` tokens, because vLLM rejects larger limits."""
    most = min(sampling.max_tokens, room)
    return msgspec.structs.replace(sampling, max_tokens=most, min_tokens=min(sampling.min_tokens, most))


def remaining(sampling: Sampling, done: int) -> Sampling:
    """Return the sampling parameters for the output after the first `done` tokens."""
    if not done:
        return sampling
    left = max(1, sampling.max_tokens - done)
    return msgspec.structs.replace(sampling, max_tokens=left, min_tokens=max(0, sampling.min_tokens - done))


def why_not_continued(sampling: Sampling) -> str:
    """Return why a response with some output cannot continue as part of a prompt; empty if it can."""
    if sampling.structured is not None:
        return "a structured response cannot go on"
    if sampling.presence_penalty or sampling.frequency_penalty:
        return "penalties count output tokens only, and the server would count the earlier output as prompt"
    return ""


def interrupted(tokens: int, reason: str) -> ResponseError:
    """Return the error of a response that cannot continue after `tokens` output tokens."""
    message = f"the response was interrupted after {tokens} output tokens: {reason}"
    return ResponseError(status=502, code="response_interrupted", message=message)
