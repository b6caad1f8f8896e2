"""KV descriptors of attached vLLM servers: `kv_transfer_params` of a response, for a request to another server.

A server keeps the blocks of a prompt until another server has read them, or until vLLM's own timeout. forebay cannot
change that timeout over HTTP. After it other requests may have overwritten the blocks, and vLLM would read them without
an error. So the owner gets one half of the timeout to send the prompt to a decode worker, and the decode server gets
the other half until its first token.
"""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from forebay.events.base import U32_BYTES
from forebay.events.transfer import KvLayout, Prefilled
from forebay.events.work import WorkItem
from forebay.workers.engines.kv_descriptor import Unfetchable, decoded, offered
from forebay.workers.engines.vllm.transfer import PREFILL, UNREAD_S, VLLM_LEASE_S, WANTED

CONNECTOR = "vllm-http"
LAYOUT = KvLayout(connector=CONNECTOR, dtype="unknown", block_bytes=1)
"""Layout of all attached servers. Servers do not publish theirs; vLLM's connector itself compares them."""
HALF_LEASE_S = (VLLM_LEASE_S - UNREAD_S) / 2
NOTHING_REMOTE = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
PREFILL_PARAMS: Mapping[str, Any] = {**PREFILL, **NOTHING_REMOTE}

Text = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]


class _TransferParams(msgspec.Struct):
    """The fields that forebay checks. All fields are passed on unchanged."""

    remote_engine_id: Text
    remote_host: Text
    remote_port: Annotated[int, msgspec.Meta(ge=1, le=65_535)]
    remote_block_ids: Annotated[list[Any], msgspec.Meta(min_length=1)]
    remote_num_tokens: int | None = None


def offer(item: WorkItem, worker_id: str, model: str, params: Mapping[str, Any]) -> Prefilled:
    """Return the descriptor of KV that a server keeps. Raises Unfetchable if the parameters are unknown."""
    try:
        msgspec.convert(params, _TransferParams)
    except msgspec.ValidationError as error:
        raise Unfetchable(f"unknown kv_transfer_params of the server: {error}") from error
    tokens = len(item.token_ids) // U32_BYTES
    return offered(item, worker_id, model, CONNECTOR, msgspec.json.encode(params), tokens=tokens, lease_s=HALF_LEASE_S)


def fetch_params(prefilled: Prefilled | None, model: str, prompt_tokens: int) -> dict[str, Any]:
    """Return the `kv_transfer_params` with which a server fetches the KV of a prompt.

    Raises Unfetchable if the descriptor is missing, invalid, or for another connector, model or prompt.
    """
    found = decoded(prefilled, CONNECTOR, model, prompt_tokens, msgspec.json.Decoder(_TransferParams).decode)
    params = decoded(prefilled, CONNECTOR, model, prompt_tokens, msgspec.json.Decoder(dict[str, Any]).decode)
    if found.remote_num_tokens not in (None, prompt_tokens):
        raise Unfetchable(f"its KV covers {found.remote_num_tokens} tokens, the prompt has {prompt_tokens}")
    return params | WANTED
