"""What `forebay up` is told, apart from the code that does it: other commands start without an HTTP server."""

from dataclasses import dataclass
from pathlib import Path

from forebay.events.control import RouterConfig


def worker_ids(workers: int) -> list[str]:
    """The names of the workers in one process."""
    return [f"mock-{number}" for number in range(workers)]


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
        dp_size: ranks a worker.
        taints: the labels of each worker.
        loras: adapters that every worker has and the ingress serves.
        kv_events: whether workers tell what they have cached.
        routing_hints: whether clients may say where their requests go.
        admin_api: whether thresholds can be set, routes queried and requests explained.
        lease_ttl_s: a worker silent for this long is lost.
        timeout_s: for a whole request.
        snapshot_every: journal records between snapshots.
        snapshot_age_s: between snapshots, when fewer records come.
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
    dp_size: int
    taints: dict[str, tuple[str, ...]]
    loras: tuple[str, ...]
    kv_events: bool
    routing_hints: bool
    admin_api: bool
    lease_ttl_s: float
    timeout_s: float
    snapshot_every: int
    snapshot_age_s: float
