"""vLLM's KV connector for the tiers of a worker. vLLM imports this module in its engine core, by its path.

vLLM creates two connectors per rank: one for its scheduler, one for its worker. Both must be in one process, because
they share the tiers of the rank, so tensor and pipeline parallelism are not supported.
"""

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig

from forebay import runtime
from forebay.engine_model.steps import StoreChange, Stored
from forebay.events.kv import Tier
from forebay.workers.engine import CacheChange, Cleared
from forebay.workers.engines.vllm.tiers.configuration import (
    CONNECTOR,
    HINTS,
    NO_HINTS,
    RequestHints,
    TierConfig,
    unsupported,
)
from forebay.workers.engines.vllm.tiers.device_memory import DeviceMemory
from forebay.workers.engines.vllm.tiers.rank import VllmRank
from forebay.workers.kv_events.engine_events import OWNER, SHARED, SHARED_STALE
from forebay.workers.kv_tiers.identity import KvIdentity, default_cache, weights_digest
from forebay.workers.kv_tiers.offload_manager import OffloadManager

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request


MEDIA: dict[Tier, str] = {"host": "CPU", "disk": "DISK"}
CHANGES = ("quantization", "hf_overrides", "load_format")
RANKS: dict[str, VllmRank] = {}  # ranks of the engines in this process, by engine id


@dataclass
class TierMetadata(KVConnectorMetadata):  # type: ignore[misc]  # mypy runs without vLLM
    """What the scheduler's connector sends to the worker's with each step: whether the step computes nothing."""

    idle: bool


class TierStats(KVConnectorStats):  # type: ignore[misc]  # mypy runs without vLLM
    """Statistics of the tiers since the last step: `data` contains an encoded `TierReport`."""

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Return the newer statistics, because the reports of a rank are not added up."""
        return other

    def reset(self) -> None:
        self.data.clear()

    def reduce(self) -> dict[str, int | float]:
        return {}

    def is_empty(self) -> bool:
        return not self.data


class NoPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]  # mypy runs without vLLM
    """Metrics that vLLM exports itself: none, because the worker exports those of the reports."""

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None: ...


class ForebayTiers(KVConnectorBase_V1):  # type: ignore[misc]  # mypy runs without vLLM
    """Connector of one rank, for its scheduler or for its worker. Raises ValueError for an unsupported engine."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._config = TierConfig.decode(self._kv_transfer_config.kv_connector_extra_config)
        self._engine_id = str(self._kv_transfer_config.engine_id)
        self._fails = self._kv_transfer_config.kv_load_failure_policy == "fail"  # requests, if a load fails
        self._adapters: dict[tuple[int, str], str] = {}
        with self._reported():
            if reason := unsupported(vllm_config):
                raise ValueError(reason)
            check_groups(kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            self.tier_rank = RANKS[self._engine_id]

    @property
    def requires_kv_delivery(self) -> bool:
        """Whether a lost offload would be an error. A tier is a cache."""
        return False

    # Worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Open the tiers for the KV cache in these tensors, by name of the layer."""
        wake = threading.Event()
        with self._reported():
            memory = DeviceMemory(kv_caches, self._kv_cache_config.num_blocks)
            identity = identity_of(self._vllm_config, self._config, self._kv_cache_config, memory)
            tiers = OffloadManager(
                self._config.of_rank(self._vllm_config.parallel_config.data_parallel_index),
                identity,
                wake=wake.set,
                owner=self._config.worker_id,
            )
            tiers.open()
        self.tier_rank = RANKS[self._engine_id] = VllmRank(
            tiers, memory, identity, wake, runtime.executor(1, "forebay-tiers")
        )

    @contextmanager
    def _reported(self) -> Iterator[None]:
        """Write the message of an error to the file for it, because the worker sees only that vLLM has died."""
        try:
            yield
        except Exception as error:
            if self._config.errors is not None:
                self._config.errors.write_text(str(error))
            raise

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        """Do nothing, because loads begin when vLLM has allocated their blocks."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing, because a request is computed only after its load."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing, because blocks are copied after the step."""

    def wait_for_save(self) -> None:
        """Offer the blocks that the step has completed. Does not wait for copies."""
        self.tier_rank.step_launched()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the ids of the requests whose loads have ended, as the second element."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, TierMetadata)
        self.tier_rank.poll(idle=metadata.idle)
        return None, self.tier_rank.take_received()

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.tier_rank.take_failed()

    def shutdown(self) -> None:
        if (rank := RANKS.pop(self._engine_id, None)) is not None:
            rank.close()

    # Scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: "BlockPool") -> None:
        """Set the pool in which blocks are referenced while they are copied."""
        self.tier_rank.pool = gpu_block_pool

    def on_new_request(self, request: "Request") -> None:
        """Add a request. Requests whose tokens are not known have no keys and use no tiers."""
        known = request.prompt_embeds is None and request.prompt_is_token_ids is None and not request.resumable
        if known:
            self.tier_rank.add(request, _hints(request), self._adapter(request))

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return the number of tokens to load for a request, and whether the load is asynchronous."""
        if request.skip_reading_prefix_cache:
            return 0, False
        tokens = self.tier_rank.match(request.request_id, num_computed_tokens)
        if tokens is None:
            return None, False
        if self._fails and tokens:
            # vLLM uses one connector per request, and the KV that a request can fetch is complete. A request that
            # fetches nothing would fail with the load, and no other worker would compute its prompt.
            fetches = (request.kv_transfer_params or {}).get("do_remote_prefill")
            if not fetches or not self.tier_rank.has_all(request.request_id, num_computed_tokens, tokens):
                tokens = 0
        return tokens, tokens > 0

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        """Begin to load `num_external_tokens` tokens into the blocks of a request."""
        self.tier_rank.allocated(request.request_id, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        state = scheduler_output.kv_connector_block_state
        assert state is not None
        scheduled = scheduler_output.num_scheduled_tokens
        self.tier_rank.schedule(scheduled, lambda request_id: state.resolve_block_ids(request_id)[0])
        return TierMetadata(idle=not scheduled)

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request. Its blocks can be freed, because blocks that are being copied have another reference."""
        self.tier_rank.finish(request.request_id)
        return False, None

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Return the changes of the tiers since the last call as KV events of vLLM. Called at the end of each step."""
        self.tier_rank.step_ended()
        return cache_events(*self.tier_rank.take_changes(), block_size=self._vllm_config.cache_config.block_size)

    def has_pending_block_frees(self) -> bool:
        """Return whether the end of copies will free blocks, so that vLLM need not preempt a request."""
        return self.tier_rank.frees_blocks

    def has_pending_push_work(self) -> bool:
        """Return whether vLLM should continue to step without requests, because copies run."""
        return self.tier_rank.busy

    def reset_cache(self) -> bool:
        """Report the content of the tiers again: after a reset of device memory, forebay takes all tiers for empty."""
        self.tier_rank.announce()
        return True

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return the report of the rank, from the scheduler's connector only."""
        if self.role != KVConnectorRole.SCHEDULER or (report := self.tier_rank.report()) is None:
            return None
        return TierStats({"report": report.encode()})

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """Return empty statistics, so that vLLM logs nothing; the worker reads the reports."""
        return TierStats()

    @classmethod
    def build_prom_metrics(cls, *arguments: Any) -> KVConnectorPromMetrics:
        return NoPromMetrics(*arguments)

    def _adapter(self, request: "Request") -> str:
        if (lora := request.lora_request) is None:
            return ""
        known = (lora.lora_int_id, lora.lora_path)
        if known not in self._adapters:
            self._adapters[known] = weights_digest(Path(lora.lora_path))
        return self._adapters[known]


def cache_events(
    changes: Sequence[CacheChange], store_changes: Sequence[StoreChange], *, block_size: int
) -> Iterator[KVCacheEvent]:
    """Yield changes of the rank's own tiers and of the shared store as KV events of vLLM, in order.

    The events name blocks by forebay's sequence hashes and contain no tokens.
    """
    for change in changes:
        assert not isinstance(change, Cleared)
        medium = MEDIA[change.tier]
        if isinstance(change, Stored):
            yield _stored(change.parent, change.hashes, medium, block_size, "LOCAL")
        else:
            yield _removed(change.hashes, medium, "LOCAL")
    for one in store_changes:
        for hashes, medium in ((one.removed, SHARED), (one.stale, SHARED_STALE)):
            if hashes:
                yield _removed(hashes, medium, "REMOTE")
        if one.stored:
            yield _stored(None, one.stored, SHARED, block_size, "REMOTE")


def _stored(parent: int | None, hashes: Sequence[int], medium: str, block_size: int, locality: str) -> KVCacheEvent:
    return BlockStored(
        block_hashes=list(hashes),
        parent_block_hash=parent,
        token_ids=[],
        block_size=block_size,
        lora_id=None,
        medium=medium,
        lora_name=None,
        locality=locality,
        ownership=OWNER,
    )


def _removed(hashes: Sequence[int], medium: str, locality: str) -> KVCacheEvent:
    return BlockRemoved(block_hashes=list(hashes), medium=medium, locality=locality, ownership=OWNER)


def _hints(request: "Request") -> RequestHints:
    sampling = request.sampling_params
    given = None if sampling is None else (sampling.extra_args or {}).get(HINTS)
    return NO_HINTS if given is None else msgspec.convert(given, RequestHints)


def check_groups(config: KVCacheConfig) -> None:
    """Raise ValueError unless all layers attend to the whole prompt, so that each block has the KV of all layers."""
    kinds = [type(group.kv_cache_spec).__name__ for group in config.kv_cache_groups]
    if kinds not in (["FullAttentionSpec"], ["MLAAttentionSpec"]):
        raise ValueError(
            f"KV tiers need a model in which all layers attend to the whole prompt; this model has the groups {kinds}"
        )


def identity_of(
    vllm_config: VllmConfig, config: TierConfig, kv_cache_config: KVCacheConfig, memory: DeviceMemory
) -> KvIdentity:
    import vllm  # noqa: PLC0415

    model = vllm_config.model_config
    layers = vllm_config.compilation_config.static_forward_context
    names = kv_cache_config.kv_cache_groups[0].layer_names
    attention = {f"{layers[name].get_attn_backend().get_name()}/{getattr(layers[name], 'isa', '')}" for name in names}
    # Arguments that change what the files of a model mean.
    changes = "".join(f" {name}={value}" for name in CHANGES if (value := getattr(model, name, None)))
    dtype = str(vllm_config.cache_config.cache_dtype)
    if dtype == "auto":
        dtype = str(model.dtype).removeprefix("torch.")
    return KvIdentity(
        weights=config.weights or weights_digest(Path(model.model), default_cache()),
        tp_rank=0,
        tp_size=1,
        layout=f"vllm {vllm.__version__} {','.join(sorted(attention))} {memory.layout}{changes}",
        dtype=dtype,
        block_size=vllm_config.cache_config.block_size,
        block_bytes=memory.block_bytes,
        model=str(model.served_model_name),
    )


if CONNECTOR not in KVConnectorFactory._registry:  # vLLM's MultiConnector finds statistics by this name
    KVConnectorFactory.register_connector(CONNECTOR, __name__, CONNECTOR)
