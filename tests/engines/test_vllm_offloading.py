"""The real classes of vLLM's offloading, with forebay's configuration of them. Their scheduler side needs no GPU."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from forebay.events.base import unpack_u32
from forebay.workers.engines.vllm.offloading import offloading_connector
from forebay.workers.kv_events.engine_events import RemovedBlocks
from forebay.workers.kv_events.zmq_wire import VllmDecoder
from forebay.workers.kv_tiers.settings import TierSettings

pytestmark = pytest.mark.filterwarnings("ignore")  # as in test_vllm_engine

BLOCK, BLOCK_BYTES, BLOCKS = 16, 4096, 4
HASHES = [bytes([block]) * 32 for block in range(BLOCKS + 2)]
TOKENS = list(range(100, 100 + BLOCK * len(HASHES)))


def test_events_of_vllms_tiers_name_host_disk_and_store(tmp_path: Path) -> None:
    # Packages that are only in .venv-engines.
    from vllm.config import KVTransferConfig  # noqa: PLC0415
    from vllm.distributed.kv_events import KVEventBatch  # noqa: PLC0415
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import events as tracking  # noqa: PLC0415
    from vllm.v1.kv_offload import config as parts  # noqa: PLC0415
    from vllm.v1.kv_offload.base import ReqContext, ScheduleEndContext, make_offload_key  # noqa: PLC0415
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory  # noqa: PLC0415

    tiers = TierSettings(host_bytes=BLOCKS * BLOCK_BYTES, disk=tmp_path / "disk", store=str(tmp_path / "store"))
    ones = dict.fromkeys(("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size", "data_parallel_size"), 1)
    spec = OffloadingSpecFactory.create_spec(parts.OffloadingConfig(
        groups=(parts.OffloadingGroupConfig(tokens_per_block=BLOCK, layer_names=("layer",), group_id=0),),
        worker_kv_bytes_per_block=BLOCK_BYTES, enable_kv_cache_events=True, engine_id="forebay-test",
        extra_config=KVTransferConfig(**offloading_connector(tiers)).kv_connector_extra_config,
        model=parts.OffloadingModelConfig(name="tiny", dtype="float32"),
        cache=parts.OffloadingCacheConfig(tokens_per_hash=BLOCK, blocks_per_chunk=1),
        parallel=parts.OffloadingParallelConfig(
            **ones, rank=0, data_parallel_index=0, data_parallel_rank_local=None, is_parallelism_agnostic=True
        ),
    ))  # fmt: skip
    manager, tracker = spec.get_manager(), tracking.OffloadingEventsTracker(spec.kv_events_config)
    group: Any = SimpleNamespace(
        tokens_per_chunk=BLOCK, hashes_per_chunk=1, tokens_per_block=BLOCK, group_idx=0,
        sliding_window_size_in_chunks=None,
        kv_event_group_spec=tracking.OffloadingEventGroupSpec("full_attention", None),
    )  # fmt: skip
    request: Any = SimpleNamespace(block_hashes=HASHES, all_token_ids=TOKENS, lora_request=None)
    context = ReqContext(req_id="r")
    manager.on_new_request(context)

    def offloaded(blocks: range) -> Any:
        """Return the decoded events after all copies of blocks of the prompt."""
        keys = [make_offload_key(HASHES[block], 0) for block in blocks]
        assert manager.prepare_store(keys, context) is not None
        for block, key in zip(blocks, keys, strict=True):
            tracker.record_store(request, group, block, key)
        manager.complete_store(keys, context)
        manager.on_schedule_end(ScheduleEndContext((), ()))
        for tier in manager.secondary_tiers:
            tier.drain_jobs()
        manager.on_schedule_end(ScheduleEndContext((), ()))
        events = list(tracker.take_events(manager.take_events()))
        batch = VllmDecoder(has_store=True)(msgspec.msgpack.encode(KVEventBatch(ts=0.0, events=events)))
        assert not batch.skipped
        return batch.events

    try:
        stored, later = offloaded(range(BLOCKS)), offloaded(range(BLOCKS, BLOCKS + 2))
    finally:
        manager.shutdown()
    assert Counter(event.tier for event in stored) == dict.fromkeys(("host", "disk", "store"), BLOCKS)
    for event in stored:
        block = event.hashes[0] & 0xFF
        assert list(unpack_u32(event.token_ids)) == TOKENS[block * BLOCK : (block + 1) * BLOCK]
        assert (event.parent is None) == (block == 0) and event.block_size == BLOCK
    removed = [event for event in later if isinstance(event, RemovedBlocks)]
    assert [(event.tier, len(event.hashes)) for event in removed] == [("host", 2)], "files are not deleted"
