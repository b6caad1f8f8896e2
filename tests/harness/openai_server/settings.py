"""Settings of the stand-in, its faults, and its counters."""

from pathlib import Path
from typing import Literal

import msgspec

from forebay.ingress.model import DEFAULT_MODEL, DEFAULT_NAME

Flavor = Literal["vllm", "sglang", "plain"]
"""Server to imitate: vLLM 0.32, SGLang 0.5.23, or a server that has only the API of OpenAI, for text prompts."""


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one stand-in.

    Attributes:
        kv_blocks: KV blocks. With vLLM one of them is never used.
        max_model_len: maximum tokens of a prompt and its response; 0 for the maximum of the model.
        kv_transfer: whether prompts can be computed for, and fetched from, other servers.
        is_deterministic: whether SGLang runs with deterministic inference.
        prompt_tokens_details: whether `usage` has the number of cached tokens.
    """

    model: Path = DEFAULT_MODEL
    model_name: str = DEFAULT_NAME
    flavor: Flavor = "vllm"
    block_size: int = 32
    kv_blocks: int = 4096
    max_num_seqs: int = 64
    max_model_len: int = 0
    token_s: float = 0.0
    kv_events: bool = False
    kv_transfer: bool = False
    enable_lora: bool = False
    is_deterministic: bool = False
    prompt_tokens_details: bool = True


class Faults(msgspec.Struct, kw_only=True):
    """Faults, which may be changed at any time, and apply to the requests that arrive from then on.

    Attributes:
        cut_after_tokens: number of output tokens after which the connection of a stream is closed.
        status: status of the response to each completion.
        hang: whether completions are accepted and never answered.
        hang_all: whether no route is answered.
        without_token_ids: whether `return_token_ids` is ignored.
        model_name: name of the served model, instead of that of the settings.
        token_s: seconds per output token, instead of those of the settings; also for running requests.
        lose_kv: whether fetches of KV from this server fail.
    """

    cut_after_tokens: int | None = None
    status: int | None = None
    health_status: int | None = None
    hang: bool = False
    hang_all: bool = False
    without_token_ids: bool = False
    model_name: str | None = None
    token_s: float | None = None
    lose_kv: bool = False


class Counters(msgspec.Struct, kw_only=True):
    """What the server has done since it was started.

    Attributes:
        aborted: prompts that ended because their client closed the connection, or by a fault.
        refused: completions that were answered with an error.
    """

    finished: int = 0
    aborted: int = 0
    refused: int = 0
    cached_tokens: int = 0
    fetched_tokens: int = 0
    generated_tokens: int = 0
    kv_offered: int = 0
    kv_fetched: int = 0
