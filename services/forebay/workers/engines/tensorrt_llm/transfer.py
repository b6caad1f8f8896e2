"""KV descriptors that contain TensorRT-LLM's `DisaggregatedParams`. This module does not import TensorRT-LLM.

All fields are passed on unchanged, except that bytes and log probabilities are converted. The fields include the first
output token: the prefill worker generated it, and the decode worker does not compute it again.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

import msgspec

from forebay.events.codec import MALFORMED
from forebay.events.transfer import Prefilled
from forebay.workers.engines.kv_descriptor import Unfetchable, fetchable

CONNECTOR = "tensorrt-llm"
LEASE_S = 60.0  # TensorRT-LLM's default timeout of a transfer
PREFILL_SAMPLING: Mapping[str, Any] = {"max_tokens": 1}  # other parameters apply: it generates the first output token
LOGPROBS = "first_gen_log_probs"


def descriptor(params: Any) -> bytes:
    """Return the KV descriptor of a computed prompt, as bytes.

    Raises Unfetchable if TensorRT-LLM returned no such object, or it cannot be encoded.
    """
    if not is_dataclass(params) or isinstance(params, type):
        raise Unfetchable("TensorRT-LLM returned no disaggregated_params")
    fields = {name: value for name, value in asdict(params).items() if value is not None}
    if places := fields.get(LOGPROBS):
        fields[LOGPROBS] = [
            [(token_id, one["logprob"], one.get("rank")) for token_id, one in place.items()] for place in places
        ]
    try:
        return msgspec.msgpack.encode(fields)
    except (TypeError, ValueError, OverflowError) as error:
        raise Unfetchable(f"cannot encode the disaggregated_params of TensorRT-LLM: {error}") from error


def transfer_fields(
    prefilled: Prefilled | None, model: str, prompt_tokens: int, logprob: Callable[[float, int | None], Any]
) -> dict[str, Any]:
    """Return the fields of the decode worker's `DisaggregatedParams`.

    Raises Unfetchable if there is no descriptor, it cannot be decoded, or it is for another model or prompt length.
    """
    packed = fetchable(prefilled, CONNECTOR, model, prompt_tokens).descriptor
    try:
        fields = msgspec.msgpack.decode(packed, type=dict[str, Any])
        places = msgspec.convert(fields.get(LOGPROBS, []), list[list[tuple[int, float, int | None]]])
    except MALFORMED as error:
        raise Unfetchable(f"cannot decode the KV descriptor: {error}") from error
    if places:
        fields[LOGPROBS] = [{token_id: logprob(value, rank) for token_id, value, rank in place} for place in places]
    return fields | {"request_type": "generation_only"}
