"""Convert vLLM's `kv_transfer_params` to KV descriptors and back, for KV that one vLLM computes and another fetches.

vLLM keeps the blocks of a prompt for the length of a lease (`kv_lease_duration` of its connector). The decode worker
(reader) renews the lease while it reads. After the end of the lease, other requests may have overwritten the blocks.
The descriptor therefore contains the end of the lease on the clock of the prefill worker (holder), and a reader does
not begin later.
"""

import logging
import time
from collections.abc import Coroutine, Mapping
from typing import Annotated, Any, Literal

import msgspec

from forebay.events.transfer import KvLayout, Prefilled
from forebay.events.work import WorkItem
from forebay.workers.engine import EngineError, one_line
from forebay.workers.engines.kv_descriptor import KeptKv, Unfetchable, decoded, offered
from forebay.workers.engines.vllm.tiers.configuration import CONNECTOR as TIERS
from forebay.workers.engines.vllm.tiers.configuration import children

logger = logging.getLogger(__name__)

CONNECTOR = "vllm-nixl"
VLLM_LEASE_S = 30  # vLLM's default
LEASE_S = 60  # forebay's default, because a busy decode worker may wait half a minute for free blocks
UNREAD_S = 5.0  # in the last seconds of a lease vLLM begins no read
RENEWED_BY = 3  # a lease is renewed six times in its length, and first when the other side is known
EXPIRES = "remote_blocks_expiry_time"
PREFILL: Mapping[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
# The cached tokens of the prefill worker are reported by forebay, not by the decode engine.
WANTED = {"do_remote_prefill": True, "do_remote_decode": False, "remote_prefill_cached_tokens": None}
PREFILL_SAMPLING: Mapping[str, Any] = {"max_tokens": 1, "min_tokens": 0, "logprobs": None, "structured": None}
"""For the token that vLLM generates after a prefill. It is discarded; the decode worker computes the first one."""

Few = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
Text = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
Blocks = Annotated[list[Annotated[int, msgspec.Meta(ge=0)]], msgspec.Meta(max_length=1 << 20)]


class TransferParams(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of vLLM's `kv_transfer_params` that forebay validates. It passes all other fields on unchanged."""

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
    def __init__(self, model: str, kept: KeptKv) -> None:
        self._model = model
        self._worker_id = ""
        self._llm: Any = None
        self._layout: KvLayout | None = None
        self._block_size = 1
        self._lease_s = 0.0
        self._kept = kept

    async def start(self, llm: Any, worker_id: str) -> KvLayout | None:
        """Read the configuration of a started engine, and return its KV layout; None if it has no KV connector.

        Raises EngineError if forebay cannot transfer KV with the configuration of the connector.
        """
        config = llm.vllm_config
        transfers = [extra for name, extra in children(config.kv_transfer_config) if name != TIERS]
        if not transfers:
            return None
        self._llm, self._worker_id = llm, worker_id
        self._block_size = config.cache_config.block_size
        self._lease_s = float(transfers[0].get("kv_lease_duration", VLLM_LEASE_S))
        if self._lease_s <= UNREAD_S:
            raise EngineError(
                f"kv_lease_duration is {self._lease_s:g} s, expected more than {UNREAD_S:g} s: vLLM begins no read in"
                f" the last {UNREAD_S:g} s of a lease"
            )
        try:
            sizes = await llm.collective_rpc("forebay_block_bytes")
        except Exception as error:  # noqa: BLE001 - for example another worker_extension_cls
            logger.warning(
                "cannot read the KV layout of vLLM; it frees unfetched KV only at the end of the lease: %s",
                one_line(error),
            )
            return None
        if not all(guarded for *_, guarded in sizes):
            logger.warning(
                "this vLLM release may read KV after its lease has ended, when the memory may have other content, and"
                " forebay cannot always detect this; use a tested vLLM release (docs/install.md)"
            )
        if not (block_bytes := sum(one for one, *_ in sizes)):
            return None
        dtype = str(config.cache_config.cache_dtype)
        if dtype == "auto":
            dtype = str(config.model_config.dtype).removeprefix("torch.")
        layers = config.model_config.get_total_num_hidden_layers()
        self._layout = KvLayout(connector=CONNECTOR, dtype=dtype, block_bytes=block_bytes, layers=layers)
        return self._layout

    def offer(self, item: WorkItem, transfer_params: Mapping[str, Any], age_s: float) -> Prefilled:
        """Return the descriptor of KV that vLLM computed `age_s` seconds ago and keeps.

        Raises Unfetchable if the parameters are unknown, or too little of the lease is left.
        """
        left_s = self._lease_s - age_s
        # vLLM's core uses this clock too, because it runs on this machine.
        params = {**transfer_params, EXPIRES: time.perf_counter() + left_s}
        try:
            known = msgspec.convert(params, TransferParams)
            packed = msgspec.json.encode(params)
        except (msgspec.ValidationError, TypeError) as error:
            raise Unfetchable(f"unknown kv_transfer_params of vLLM: {error}") from error
        if (readable_s := left_s - UNREAD_S) <= 0:
            raise Unfetchable(f"KV announced {age_s:.0f} s after it was computed; its lease had already expired")
        prefilled = offered(
            item, self._worker_id, self._model, CONNECTOR, packed, tokens=known.remote_num_tokens, lease_s=readable_s
        )
        self._kept.add(item.request_id, left_s, known.remote_request_id)
        if self._layout is None or len(known.remote_block_ids) > 1:
            return prefilled  # groups of layers have blocks of different sizes
        return msgspec.structs.replace(prefilled, bytes=len(known.remote_block_ids[0]) * self._layout.block_bytes)

    def release(self, request_id: str) -> Coroutine[Any, Any, None] | None:
        """Return a coroutine that shortens the lease of the KV kept for a request; None if no KV is kept for it."""
        engine_id = self._kept.pop(request_id)
        return None if engine_id is None else self._release(engine_id)

    async def _release(self, name: str) -> None:
        # The KV is not freed at once, because a reader may still be reading it. In that case it renews the lease.
        try:
            await self._llm.collective_rpc("forebay_release", args=([name], self._lease_s / RENEWED_BY))
        except Exception as error:  # noqa: BLE001 - without it the lease ends as it would have
            logger.warning("vLLM keeps the KV of %s until its lease ends: %s", name, one_line(error))

    async def drop(self, prefilled: Prefilled) -> None:
        """Notify the prefill worker that its KV is not needed. vLLM sends this message as for a rejected request."""
        try:
            _, params = decoded(prefilled, CONNECTOR, self._model, prefilled.tokens, _decode)
            name = f"drop-{params['remote_request_id']}"
            await self._llm.notify_kv_transfer_request_rejected(name, params | WANTED, data_parallel_rank=0)
        except Exception as error:  # noqa: BLE001 - without it the lease ends as it would have
            logger.warning("unneeded KV is kept until its lease ends: %s", one_line(error))

    def fetch_params(self, prefilled: Prefilled | None, prompt_tokens: int) -> tuple[dict[str, Any], float]:
        """Return vLLM's `kv_transfer_params` to fetch the KV of a prompt, and the maximum seconds to the first token.

        Raises Unfetchable if this vLLM has no KV connector, or as `transfer_params` does.
        """
        if self._llm is None:
            raise Unfetchable("vLLM has no KV connector: start this worker with --role decode")
        params = transfer_params(prefilled, self._model, prompt_tokens, self._block_size)
        assert prefilled is not None
        return params, prefilled.lease_us / 1e6 + UNREAD_S


def transfer_params(prefilled: Prefilled | None, model: str, prompt_tokens: int, block_size: int) -> dict[str, Any]:
    """Return vLLM's `kv_transfer_params` with which it fetches the KV of a prompt.

    Raises Unfetchable if the descriptor is missing, invalid, or for another model or prompt.
    """
    known, params = decoded(prefilled, CONNECTOR, model, prompt_tokens, _decode)
    if (tokens := known.remote_num_tokens) != prompt_tokens:
        raise Unfetchable(f"its KV covers {tokens} tokens, the prompt has {prompt_tokens}")
    blocks = -(-tokens // block_size)
    # Layers that do not attend to the whole prompt form groups with fewer blocks.
    if (found := max(map(len, known.remote_block_ids))) != blocks:
        raise Unfetchable(f"its KV has {found} blocks, the prompt has {blocks}")
    return params | WANTED


def _decode(packed: bytes) -> tuple[TransferParams, dict[str, Any]]:
    return msgspec.json.decode(packed, type=TransferParams), msgspec.json.decode(packed)
