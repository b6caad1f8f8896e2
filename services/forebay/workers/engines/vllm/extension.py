"""Extension of vLLM's worker processes for leases of kept KV, and for KV tiers. forebay calls it by `collective_rpc`.

vLLM has no call that frees KV kept for another engine. It checks the end of a lease only if blocks are transferred in
both directions. The class in this module therefore accesses private attributes of vLLM's NixlConnector (0.32), and
reports whether they exist. The argument `worker_extension_cls` makes it a base of vLLM's worker class.
"""

import time
from typing import Any

EXTENSION = f"{__name__}.KvLeases"


class KvLeases:
    """Methods that vLLM runs in each of its worker processes; forebay gets one result per process."""

    def forebay_clear_tiers(self) -> None:
        """Remove all blocks from the tiers of the rank, except from a shared store."""
        for rank in _tier_ranks():
            rank.tiers.clear()

    def forebay_store_name(self) -> str:
        return next((rank.tiers.store_name for rank in _tier_ranks()), "")

    def forebay_block_bytes(self) -> tuple[int, int, bool]:
        """Make reads check the lease. Return bytes and memory regions (layers) of a block, and whether they do."""
        worker = _connector_worker()
        lengths = getattr(worker, "block_len_per_layer", ())
        guarded = hasattr(worker, "_bidirectional_kv_xfer_enabled") and hasattr(worker, "_is_turn2_read_expired")
        if guarded:
            # In the worker, this flag affects only the check of leases.
            worker._bidirectional_kv_xfer_enabled = True
        return sum(lengths), len(lengths), guarded

    def forebay_release(self, kept: list[str], within_s: float) -> int:
        """Shorten the leases of kept KV, which readers can renew.

        Return the number of requests whose KV is still kept.
        """
        leases = getattr(_connector_worker(), "_reqs_to_send", {})
        found = [one for one in kept if one in leases]
        ends_s = time.perf_counter() + within_s  # the clock of vLLM's leases
        leases.update({one: min(leases[one], ends_s) for one in found})
        return len(found)


def _connector_worker() -> Any:
    workers = [getattr(connector, "connector_worker", None) for connector in _connectors()]
    return next((worker for worker in workers if worker is not None), None)


def _tier_ranks() -> list[Any]:
    ranks = [getattr(connector, "tier_rank", None) for connector in _connectors()]
    return [rank for rank in ranks if rank is not None]


def _connectors() -> list[Any]:
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group  # noqa: PLC0415 - runs inside vLLM

    if not has_kv_transfer_group():
        return []
    connector = get_kv_transfer_group()
    return list(getattr(connector, "sub_connectors", [connector]))
