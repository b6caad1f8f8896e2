"""KV blocks that one vLLM computes and another fetches: vLLM's `kv_transfer_params` as a descriptor, and back.

vLLM keeps a prompt's blocks for a lease (`kv_lease_duration` of its connector), which a reader renews. One that began
after it would read what others have written there since: so the descriptor says when the lease ends, unless somebody
renews it, by the clock of its holder, and the reader does not begin later.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Coroutine, Mapping
from typing import Annotated, Any, Literal

import msgspec

from forebay.events.codec import MALFORMED
from forebay.events.transfer import KvLayout, Prefilled
from forebay.events.work import WorkItem
from forebay.workers.engine import EngineError
from forebay.workers.engines.kv_descriptor import Unfetchable, fetchable, offered
from forebay.workers.engines.model_directory import one_line

logger = logging.getLogger(__name__)

CONNECTOR = "vllm-nixl"
VLLM_LEASE_S = 30  # what it has where it is told nothing
LEASE_S = 60  # a busy decode worker may take half a minute to have room
UNREAD_S = 5.0  # before the end of a lease in which vLLM begins no read
RENEWED_BY = 3  # a lease is renewed six times in its length, and first when the other side is known
EXPIRES = "remote_blocks_expiry_time"
PREFILL: Mapping[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
# How many of its tokens the prefill worker had cached is not what the answer is to say.
WANTED = {"do_remote_prefill": True, "do_remote_decode": False, "remote_prefill_cached_tokens": None}
PREFILL_SAMPLING: Mapping[str, Any] = {"max_tokens": 1, "min_tokens": 0, "logprobs": None, "structured": None}
"""Of the token that vLLM wants to say there; the one that is said is computed where the blocks go."""

Few = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
Text = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
Blocks = Annotated[list[Annotated[int, msgspec.Meta(ge=0)]], msgspec.Meta(max_length=1 << 20)]


class TransferParams(msgspec.Struct, frozen=True, kw_only=True):
    """vLLM's `kv_transfer_params`, as far as they are looked at here; what else there is goes along as it is."""

    remote_engine_id: Text
    remote_request_id: Text
    remote_host: Text
    remote_port: Annotated[int, msgspec.Meta(ge=1, le=65_535)]
    remote_block_ids: Annotated[list[Blocks], msgspec.Meta(min_length=1, max_length=64)]
    remote_num_tokens: Annotated[int, msgspec.Meta(ge=1)]
    remote_blocks_expiry_time: float
    tp_size: Few
    dcp_size: Few = 1
    pp_size: Few = 1
    transfer_mode: Literal["pull"] = "pull"


class KvTransfers:
    """What one vLLM keeps for others, and fetches from them."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._worker_id = ""
        self._llm: Any = None
        self._layout: KvLayout | None = None
        self._block_size = 1
        self._lease_s = 0.0
        self._kept: OrderedDict[str, tuple[str, float]] = OrderedDict()  # vLLM's name of a request, and until when

    async def start(self, llm: Any, worker_id: str) -> KvLayout | None:
        """How the KV of an `AsyncLLM` lies for others; None when it has no KV connector. Raises EngineError."""
        config = llm.vllm_config
        if config.kv_transfer_config is None:
            return None
        self._llm, self._worker_id = llm, worker_id
        self._block_size = config.cache_config.block_size
        self._lease_s = float(config.kv_transfer_config.get_from_extra_config("kv_lease_duration", VLLM_LEASE_S))
        if self._lease_s <= UNREAD_S:
            raise EngineError(f"kv_lease_duration must be over {UNREAD_S:g} s: vLLM begins to read nothing at its end")
        try:
            told = await llm.collective_rpc("forebay_block_bytes")
        except Exception as error:  # noqa: BLE001 - another class was given as worker_extension_cls, say
            logger.warning("vLLM does not say how its KV lies, and frees what nobody fetches late: %s", one_line(error))
            return None
        if not all(guarded for *_, guarded in told):
            logger.warning("this vLLM does not look at the end of a lease before it reads: keep its clock steady")
        if not (block_bytes := sum(one for one, *_ in told)):
            return None
        dtype = str(config.cache_config.cache_dtype)
        if dtype == "auto":
            dtype = str(config.model_config.dtype).removeprefix("torch.")
        layers = config.model_config.get_total_num_hidden_layers()
        self._layout = KvLayout(connector=CONNECTOR, dtype=dtype, block_bytes=block_bytes, layers=layers)
        return self._layout

    def kept(self) -> int:
        """Requests whose KV may be kept for others: that it was fetched, vLLM does not say."""
        now_s = time.monotonic()
        return sum(until_s > now_s for _, until_s in self._kept.values())

    @property
    def kept_s(self) -> float:
        """How long some of it may be kept yet, if nobody renews its lease."""
        return max((until_s for _, until_s in self._kept.values()), default=0.0) - time.monotonic()

    def forget(self) -> None:
        """Nothing is kept any more."""
        self._kept.clear()

    def kept_for(self, item: WorkItem, told: Mapping[str, Any], age_s: float) -> Prefilled:
        """What vLLM keeps of a prompt since `age_s`. Raises Unfetchable for what nobody could be told."""
        left_s = self._lease_s - age_s
        # vLLM's clock for it is that of its core, which is this machine's.
        params = {**told, EXPIRES: time.perf_counter() + left_s}
        try:
            known = msgspec.convert(params, TransferParams)
            packed = msgspec.json.encode(params)
        except (msgspec.ValidationError, TypeError) as error:
            raise Unfetchable(f"vLLM offers KV in a way that is not known here: {error}") from error
        if (readable_s := left_s - UNREAD_S) <= 0:
            raise Unfetchable(f"its KV was told of {age_s:.0f} s after it was computed, when its lease was over")
        told_of = offered(
            item, self._worker_id, self._model, CONNECTOR, packed, tokens=known.remote_num_tokens, lease_s=readable_s
        )
        self._keep(item.request_id, known.remote_request_id, time.monotonic() + left_s)
        if self._layout is None or len(known.remote_block_ids) > 1:
            return told_of  # groups of layers have blocks of other sizes
        return msgspec.structs.replace(told_of, bytes=len(known.remote_block_ids[0]) * self._layout.block_bytes)

    def _keep(self, request_id: str, name: str, until_s: float) -> None:
        while self._kept and next(iter(self._kept.values()))[1] < time.monotonic():
            self._kept.popitem(last=False)
        self._kept[request_id] = name, until_s

    def release(self, request_id: str) -> Coroutine[Any, Any, None] | None:
        """Await it, to let the lease of what is kept for a request end soon; None when nothing is known to be."""
        kept = self._kept.pop(request_id, None)
        return None if kept is None else self._release(kept[0])

    async def _release(self, name: str) -> None:
        # Not at once: who was to fetch it may be told later than this, and reads meanwhile. It would say that it does.
        try:
            await self._llm.collective_rpc("forebay_release", args=([name], self._lease_s / RENEWED_BY))
        except Exception as error:  # noqa: BLE001 - without it the lease ends as it would have
            logger.warning("vLLM keeps the KV of %s until its lease is over: %s", name, one_line(error))

    async def drop(self, prefilled: Prefilled) -> None:
        """Tell who keeps it that nobody will come, by a request that is at its end when vLLM gets it."""
        try:
            params = _read(fetchable(prefilled, CONNECTOR, self._model, prefilled.tokens))[1]
            name = f"drop-{params['remote_request_id']}"
            await self._llm.notify_kv_transfer_request_rejected(name, params | WANTED, data_parallel_rank=0)
        except Exception as error:  # noqa: BLE001 - without it the lease ends as it would have
            logger.warning("KV that is not wanted is kept until its lease is over: %s", one_line(error))

    def lease_s(self, prefilled: Prefilled | None) -> float | None:
        """How long an answer may take to begin that goes on from there; None without end."""
        return None if prefilled is None else prefilled.lease_us / 1e6 + UNREAD_S

    def wanted(self, prefilled: Prefilled | None, prompt_tokens: int) -> dict[str, Any]:
        """`kv_transfer_params` to fetch the KV of a whole prompt. Raises Unfetchable."""
        if self._llm is None:
            raise Unfetchable("vLLM fetches no KV here: that takes the role decode")
        return transfer_params(prefilled, self._model, prompt_tokens, self._block_size)


def transfer_params(prefilled: Prefilled | None, model: str, prompt_tokens: int, block_size: int) -> dict[str, Any]:
    """`kv_transfer_params` for who fetches a whole prompt. Raises Unfetchable."""
    told, params = _read(fetchable(prefilled, CONNECTOR, model, prompt_tokens))
    if (tokens := told.remote_num_tokens) != prompt_tokens:
        raise Unfetchable(f"its KV is of {tokens} tokens, the prompt has {prompt_tokens}")
    blocks = -(-tokens // block_size)
    # Layers that do not attend to the whole prompt have a group of their own, with fewer blocks.
    if (lie := max(map(len, told.remote_block_ids))) != blocks:
        raise Unfetchable(f"its KV is in {lie} blocks, the prompt has {blocks}")
    return params | WANTED


def _read(prefilled: Prefilled) -> tuple[TransferParams, dict[str, Any]]:
    try:
        told = msgspec.json.decode(prefilled.descriptor, type=TransferParams)
        return told, msgspec.json.decode(prefilled.descriptor)
    except MALFORMED as error:
        raise Unfetchable(f"the descriptor of its KV is broken: {error}") from error
