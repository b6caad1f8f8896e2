"""Settings of engines that all adapters have. Options of one engine are passed to it as `arguments`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forebay.events.control import Role
from forebay.workers.kv_tiers.settings import TierSettings

DEFAULT_POOL = "default"
EMBEDDING_CACHE_BYTES = 10**9  # 200 images of 576 x 4096 float16
LORA_SLOTS = 8  # adapters that a mock engine has at a time
START_S = 600.0  # vLLM waits as long for its engine core
TokenizerProbe = tuple[str, bool, tuple[int, ...]]
"""A text, whether special tokens are added as around a prompt, and its token ids by the tokenizer of the ingress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Settings of an engine. For a size of None the engine uses its own default.

    `kv_bytes_per_token`, `kv_checksum`, `kv_lease_s` (for KV that nobody fetches), `max_loras` and `lora_load_s` are
    for the mock engine only.

    Attributes:
        kv_host: configured address at which other workers fetch KV from this worker; None to use `near_host`.
        near_host: address of this machine in the network of the other workers, used without `kv_host`.
        kv_store_name: name for the router of storage that the engine's own connector shares with other workers; empty
            if there is none.
        tokenizer_probes: texts for which the engine's own tokenizer must have the same token ids.
        allow_tokenizer_mismatch: whether other token ids are only logged.
        loras: directory of each LoRA adapter to load at the start, by name.
        embedding_cache_bytes: maximum size of the embeddings that an encode worker keeps for further requests.
        arguments: the engine's own options, by the engine's names. They override the other settings.
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
    kv_bytes_per_token: int = 256
    kv_checksum: bool = False
    kv_lease_s: float = 30.0
    max_loras: int = LORA_SLOTS
    lora_load_s: float = 0.0
    kv_host: str | None = None
    near_host: str = "127.0.0.1"
    tiers: TierSettings | None = None
    kv_store_name: str = ""
    start_s: float = START_S
    tokenizer_probes: tuple[TokenizerProbe, ...] = ()
    allow_tokenizer_mismatch: bool = False
    embedding_cache_bytes: int = EMBEDDING_CACHE_BYTES
    loras: Mapping[str, Path] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)


def pool_of(role: Role) -> str:
    """Return the name of the default pool of a role. Workers of different roles never share a pool."""
    return DEFAULT_POOL if role == "aggregated" else role
