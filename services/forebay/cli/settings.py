"""What `forebay up` is told, apart from the code that does it: other commands start without an HTTP server."""

from dataclasses import dataclass
from pathlib import Path

from forebay.events.control import RouterConfig


@dataclass(frozen=True, slots=True)
class Embedded:
    """The settings of a system in one process.

    Attributes:
        log: its file, None for memory.
        model: a model directory, None for the default one.
        model_name: its name in the API; empty for the directory's.
        speedup: how much faster the mock engines run than the modelled GPU.
        block_size: tokens a KV block.
        kv_blocks: KV blocks a worker.
        max_num_seqs: sequences a worker runs at once.
        max_num_batched_tokens: tokens of one engine step.
        lease_ttl_s: a worker silent for this long is lost.
        timeout_s: for a whole request.
        snapshot_every: journal records between snapshots.
    """

    log: Path | None
    model: Path | None
    model_name: str
    workers: int
    router: RouterConfig
    speedup: float
    block_size: int
    kv_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    lease_ttl_s: float
    timeout_s: float
    snapshot_every: int
