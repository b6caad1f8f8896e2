"""Settings common to all engine adapters. Engine-specific ones are passed through as `arguments`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from forebay.events.control import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Settings of an engine. Sizes of None use the engine's own default.

    Attributes:
        model: model directory with weights.
        model_name: name of the model in the API.
        block_size: tokens per KV block.
        kv_blocks: KV blocks per rank.
        max_num_seqs: maximum concurrent sequences.
        max_num_batched_tokens: maximum tokens per engine step.
        kv_transport: transport of KV between the mock engine's prefill and decode workers.
        kv_bytes_per_token: size of the mock engine's KV in bytes per token.
        kv_checksum: whether the mock engine's KV transfers are verified by checksums.
        kv_lease_s: seconds for which the mock engine keeps KV that is not fetched.
        kv_host: configured address at which other workers fetch KV from this one.
        near_host: address used if `kv_host` is None.
        loras: directories of the adapters to load at the start, by name.
        arguments: the engine's own arguments by their own names; they override the other settings.
    """

    model: Path
    model_name: str
    role: Role = "aggregated"
    block_size: int | None = None
    kv_blocks: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    dp_size: int = 1
    dp_start_rank: int = 0
    kv_transport: Literal["nixl", "tcp"] = "nixl"
    kv_bytes_per_token: int = 256
    kv_checksum: bool = False
    kv_lease_s: float = 30.0
    kv_host: str | None = None
    near_host: str = "127.0.0.1"
    loras: Mapping[str, Path] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
