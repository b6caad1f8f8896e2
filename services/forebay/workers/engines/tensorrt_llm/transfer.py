"""TensorRT-LLM's `DisaggregatedParams` as a descriptor, and back. Pure: TensorRT-LLM is not imported here.

They are passed on as they are, whatever their fields: only bytes and probabilities need a form of their own. The token
that the prefill worker said is in them; it is the first of the answer, and is not computed again.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

import msgspec

from forebay.events.codec import MALFORMED
from forebay.events.transfer import Prefilled
from forebay.workers.engines.kv_descriptor import Unfetchable, fetchable

CONNECTOR = "tensorrt-llm"
LEASE_S = 60.0  # TensorRT-LLM's own time for a transfer, by default
PREFILL_SAMPLING: Mapping[str, Any] = {"max_tokens": 1}  # the rest stands: the first token of the answer is said there
LOGPROBS = "first_gen_log_probs"


def descriptor(params: Any) -> bytes:
    """Those of a prompt that was computed, as msgpack. Raises Unfetchable."""
    if not is_dataclass(params) or isinstance(params, type):
        raise Unfetchable("TensorRT-LLM does not say where the KV lies")
    fields = {name: value for name, value in asdict(params).items() if value is not None}
    if places := fields.get(LOGPROBS):
        fields[LOGPROBS] = [
            [(token_id, one["logprob"], one.get("rank")) for token_id, one in place.items()] for place in places
        ]
    try:
        return msgspec.msgpack.encode(fields)
    except (TypeError, ValueError, OverflowError) as error:
        raise Unfetchable(f"what TensorRT-LLM says of its KV cannot be passed on: {error}") from error


def transfer_fields(
    prefilled: Prefilled | None, model: str, prompt_tokens: int, logprob: Callable[[float, int | None], Any]
) -> dict[str, Any]:
    """The fields of the `DisaggregatedParams` of who goes on; `logprob` makes a `Logprob`. Raises Unfetchable."""
    packed = fetchable(prefilled, CONNECTOR, model, prompt_tokens).descriptor
    try:
        fields = msgspec.msgpack.decode(packed, type=dict[str, Any])
        places = msgspec.convert(fields.get(LOGPROBS, []), list[list[tuple[int, float, int | None]]])
    except MALFORMED as error:
        raise Unfetchable(f"the descriptor of its KV is broken: {error}") from error
    if places:
        fields[LOGPROBS] = [{token_id: logprob(value, rank) for token_id, value, rank in place} for place in places]
    return fields | {"request_type": "generation_only"}
