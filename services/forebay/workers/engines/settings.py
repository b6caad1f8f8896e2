"""What every adapter of a real engine is told; what only one of them knows goes through as `arguments`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from forebay.events.control import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Sizes are None where the engine's own default stands.

    Attributes:
        model: the model directory, with weights.
        model_name: its name in the API.
        block_size: tokens a KV block.
        kv_blocks: KV blocks a rank.
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: tokens of one engine step.
        kv_transport: what moves KV between the mock engine's prefill and decode workers; `tcp` is the plain path.
        kv_bytes_per_token: of the mock engine's KV.
        kv_checksum: whether the mock engine's KV is sent with a checksum, and that checked.
        kv_lease_s: how long the mock engine keeps KV for a reader that does not come.
        kv_host: the address of this machine at which others fetch its KV, where one was asked for.
        near_host: the one where none was.
        loras: adapters to load at the start, directories by name.
        arguments: the engine's own, by its own names; they win over the rest.
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
