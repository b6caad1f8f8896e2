"""Settings of engines that all adapters have. Options of one engine are passed to it as `arguments`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forebay.events.control import Role
from forebay.workers.kv_tiers.settings import TierSettings

PROCESSES_MAX = 256  # processes that one command starts
START_S = 600.0  # vLLM waits as long for its engine core


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Settings of an engine. For a size of None the engine uses its own default.

    Attributes:
        role: what the worker computes: `aggregated`, `prefill`, `decode` or `encode`.
        block_size: tokens per KV block.
        max_num_seqs: maximum number of concurrent sequences.
        max_num_batched_tokens: maximum number of tokens per engine step.
        dp_size: number of data-parallel ranks of the worker.
        dp_start_rank: number of the worker's first rank.
        kv_bytes_per_token: size of the mock engine's KV in bytes per token.
        kv_checksum: whether the mock engine's KV transfers are verified by checksums.
        kv_lease_s: seconds for which the mock engine keeps KV that nobody fetches.
        kv_host: configured address at which other workers fetch KV from this worker; None to use `near_host`.
        near_host: address of this machine in the network of the other workers, used without `kv_host`.
        tiers: KV tiers of each rank beyond device memory; None for none.
        kv_store_name: name for the router of storage that the engine's own connector shares with other workers; empty
            if there is none.
        loras: directory of each LoRA adapter to load at the start, by name.
        start_s: maximum seconds until an engine in a process of its own has started.
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
    kv_host: str | None = None
    near_host: str = "127.0.0.1"
    tiers: TierSettings | None = None
    kv_store_name: str = ""
    start_s: float = START_S
    loras: Mapping[str, Path] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
