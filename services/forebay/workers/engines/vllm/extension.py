"""What is asked of vLLM's own workers, by `collective_rpc`, about KV blocks on their way to another vLLM.

vLLM has no call that gives back what it keeps for others, and looks at the end of a lease only where blocks go both
ways. So this reaches into its NixlConnector (0.32), and says whether what it looks for was there. It becomes a base of
vLLM's worker class, by the argument `worker_extension_cls`.
"""

import time
from typing import Any

EXTENSION = f"{__name__}.KvLeases"


class KvLeases:
    """Each call is for all workers of an engine, and answered by each."""

    def forebay_block_bytes(self) -> tuple[int, int, bool]:
        """The bytes of one KV block in this worker, its regions, and whether reads begin only while a lease lasts."""
        worker = _connector_worker()
        lengths = getattr(worker, "block_len_per_layer", ())
        guarded = hasattr(worker, "_bidirectional_kv_xfer_enabled") and hasattr(worker, "_is_turn2_read_expired")
        if guarded:
            # Of the worker's side alone, where it is for nothing but this.
            worker._bidirectional_kv_xfer_enabled = True
        return sum(lengths), len(lengths), guarded

    def forebay_release(self, kept: list[str], within_s: float) -> int:
        """Let the lease of what is kept under these ids end so soon, if nobody renews it; how many there were."""
        leases = getattr(_connector_worker(), "_reqs_to_send", {})
        found = [one for one in kept if one in leases]
        ends_s = time.perf_counter() + within_s  # vLLM's clock for them
        leases.update({one: min(leases[one], ends_s) for one in found})
        return len(found)


def _connector_worker() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group  # noqa: PLC0415 - vLLM's

    return getattr(get_kv_transfer_group(), "connector_worker", None) if has_kv_transfer_group() else None
