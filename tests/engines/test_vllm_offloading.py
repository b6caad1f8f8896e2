"""The real classes of vLLM's offloading, with forebay's configuration of them. Their scheduler side needs no GPU."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from forebay.events.base import unpack_u32
from forebay.workers.engines.vllm.core import device_type
from forebay.workers.engines.vllm.offloading import offloading_connector, offloads_itself
from forebay.workers.kv_events.engine_events import RemovedBlocks, StoredBlocks
from forebay.workers.kv_events.zmq_wire import VllmDecoder
from forebay.workers.kv_tiers.settings import TierSettings

pytestmark = pytest.mark.filterwarnings("ignore")  # as in test_vllm_engine

BLOCK, BLOCK_BYTES, BLOCKS = 16, 4096, 4
HASHES = [bytes([block]) * 32 for block in range(BLOCKS + 2)]
TOKENS = list(range(100, 100 + BLOCK * len(HASHES)))


def offloading_config(extra: dict[str, Any]) -> Any:
    from vllm.v1.kv_offload import config as parts  # noqa: PLC0415 - only in .venv-engines

    one = dict.fromkeys(("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size", "data_parallel_size"), 1)
    parallel = parts.OffloadingParallelConfig(
        **one, rank=0, data_parallel_index=0, data_parallel_rank_local=None, is_parallelism_agnostic=True
    )
    return parts.OffloadingConfig(
        groups=(parts.OffloadingGroupConfig(tokens_per_block=BLOCK, layer_names=("layer",), group_id=0),),
        worker_kv_bytes_per_block=BLOCK_BYTES,
        enable_kv_cache_events=True,
        extra_config=extra,
        engine_id="forebay-test",
        model=parts.OffloadingModelConfig(name="tiny", dtype="float32"),
        cache=parts.OffloadingCacheConfig(tokens_per_hash=BLOCK, blocks_per_chunk=1),
        parallel=parallel,
    )


@pytest.fixture
def offloaded(tmp_path: Path) -> Iterator[Any]:
    """A function that stores blocks of a prompt, and the decoded events of vLLM's manager after all copies."""
    from vllm.config import KVTransferConfig  # noqa: PLC0415 - only in .venv-engines
    from vllm.distributed.kv_events import KVEventBatch  # noqa: PLC0415
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import events as tracking  # noqa: PLC0415
    from vllm.v1.kv_offload.base import ReqContext, ScheduleEndContext, make_offload_key  # noqa: PLC0415
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory  # noqa: PLC0415

    tiers = TierSettings(host_bytes=BLOCKS * BLOCK_BYTES, disk=tmp_path / "disk", store=str(tmp_path / "store"))
    extra = KVTransferConfig(**offloading_connector(tiers)).kv_connector_extra_config
    spec = OffloadingSpecFactory.create_spec(offloading_config(extra))
    spec.build_metric_definitions(extra)
    manager, tracker = spec.get_manager(), tracking.OffloadingEventsTracker(spec.kv_events_config)
    group = SimpleNamespace(
        tokens_per_chunk=BLOCK, hashes_per_chunk=1, tokens_per_block=BLOCK, group_idx=0,
        sliding_window_size_in_chunks=None,
        kv_event_group_spec=tracking.OffloadingEventGroupSpec("full_attention", None),
    )  # fmt: skip
    request: Any = SimpleNamespace(block_hashes=HASHES, all_token_ids=TOKENS, lora_request=None)
    decode = VllmDecoder(has_store=True)

    def store(blocks: range) -> tuple[list[Any], Counter[str]]:
        context = ReqContext(req_id=f"r{blocks}")
        manager.on_new_request(context)
        keys = [make_offload_key(HASHES[block], 0) for block in blocks]
        assert manager.prepare_store(keys, context) is not None
        for block, key in zip(blocks, keys, strict=True):
            tracker.record_store(request, group, block, key)
        manager.complete_store(keys, context)
        manager.on_request_finished(context)
        manager.on_schedule_end(ScheduleEndContext((), ()))
        for tier in manager.secondary_tiers:
            tier.drain_jobs()
        manager.on_schedule_end(ScheduleEndContext((), ()))
        batch = decode(
            msgspec.msgpack.encode(KVEventBatch(ts=0.0, events=list(tracker.take_events(manager.take_events()))))
        )
        return list(batch.events), batch.skipped

    yield store
    manager.shutdown()


def test_events_of_vllms_tiers_name_host_disk_and_store(offloaded: Any, tmp_path: Path) -> None:
    events, skipped = offloaded(range(BLOCKS))
    assert not skipped and all(isinstance(event, StoredBlocks) for event in events)
    assert Counter(event.tier for event in events) == dict.fromkeys(("host", "disk", "store"), BLOCKS)
    for event in events:
        block = event.hashes[0] & 0xFF
        assert list(unpack_u32(event.token_ids)) == TOKENS[block * BLOCK : (block + 1) * BLOCK]
        assert (event.parent is None) == (block == 0) and event.block_size == BLOCK
    for folder in ("disk", "store"):
        assert len(list((tmp_path / folder).rglob("*.bin"))) == BLOCKS


def test_only_host_memory_reports_that_blocks_have_left(offloaded: Any) -> None:
    offloaded(range(BLOCKS))
    events, skipped = offloaded(range(BLOCKS, BLOCKS + 2))
    removed = [event for event in events if isinstance(event, RemovedBlocks)]
    assert not skipped and {event.tier for event in removed} == {"host"}
    assert sum(len(event.hashes) for event in removed) == 2


def test_vllm_says_on_which_device_it_runs() -> None:
    assert device_type() == "cpu" and not offloads_itself(device_type())
