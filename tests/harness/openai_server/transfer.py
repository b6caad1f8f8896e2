"""KV of prompts that one stand-in keeps for another, with the parameters of vLLM's NixlConnector.

The KV of a prompt is a number that depends on the prompt. It is fetched over HTTP, from the port of the server itself.
The output of a request with the number of another prompt is wrong, as it would be with the wrong KV.
"""

import asyncio
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
from xxhash import xxh3_64_intdigest

from forebay.events.base import pack_u32
from tests.harness.openai_server.cache import BlockCache, BlockTable, Prefix
from tests.harness.openai_server.settings import Counters

FETCH_TIMEOUT_S = 5.0
OK = 200


class FetchFailed(Exception):
    """The KV of a prompt cannot be fetched."""


@dataclass(slots=True)
class _Kept:
    table: BlockTable
    key: int
    blocks: int
    expiry: asyncio.TimerHandle


class KvKeeper:
    """Keeps the KV of prompts until another server has fetched it or its lease expires.

    Args:
        cache: cache with the blocks of the prompts.
        counters: counters to update.
        lease_s: seconds for which KV is kept.
        freed: called when blocks were freed.

    Attributes:
        engine_id: id of this engine, which is different after a restart.
        port: port of the server.
        blocks: number of blocks that are kept.
    """

    def __init__(self, cache: BlockCache, counters: Counters, lease_s: float, freed: Callable[[], None]) -> None:
        self.engine_id = str(uuid.uuid4())
        self.port = 0
        self.blocks = 0
        self._cache = cache
        self._counters = counters
        self._lease_s = lease_s
        self._freed = freed
        self._kept: dict[str, _Kept] = {}

    def offer(
        self, request_id: str, table: BlockTable, key: int, prompt_tokens: int, cached_tokens: int
    ) -> dict[str, Any]:
        """Keep the blocks of a prompt, and return the parameters with which another server fetches them."""
        kept = BlockTable(table.prefix, [], list(table.blocks))
        for block in kept.blocks:
            block.users += 1
        expiry = asyncio.get_running_loop().call_later(self._lease_s, self._release, request_id)
        self._kept[request_id] = _Kept(kept, key, len(kept.blocks), expiry)
        self.blocks += len(kept.blocks)
        self._counters.kv_offered += 1
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[block.number for block in kept.blocks]],
            "remote_engine_id": self.engine_id,
            "remote_request_id": request_id,
            "remote_host": "127.0.0.1",
            "remote_port": self.port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": prompt_tokens,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": cached_tokens,
        }

    def take(self, engine_id: str, request_id: str, block_ids: list[list[int]]) -> int | None:
        """Return the KV of a prompt and free its blocks; None if this engine does not keep it in these blocks."""
        kept = self._kept.get(request_id)
        if engine_id != self.engine_id or kept is None:
            return None
        if block_ids != [[block.number for block in kept.table.blocks]]:
            return None
        self._counters.kv_fetched += 1
        self._release(request_id)
        return kept.key

    def expire(self) -> None:
        """Let the leases of all KV expire now."""
        for request_id in list(self._kept):
            self._release(request_id)

    def _release(self, request_id: str) -> None:
        kept = self._kept.pop(request_id)
        kept.expiry.cancel()
        self.blocks -= kept.blocks
        self._cache.close(kept.table)
        self._freed()


def prompt_key(prompt: list[int], prefix: Prefix) -> int:
    """Return the KV of a prompt."""
    return xxh3_64_intdigest(b"\0".join((prefix.salt.encode(), prefix.lora_name.encode(), pack_u32(prompt))))


async def fetch(params: dict[str, Any], expected: int) -> int:
    """Fetch the KV of a prompt from the server that keeps it.

    Returns:
        0 if it is the KV of the expected prompt; otherwise another value that the output depends on.

    Raises:
        FetchFailed: the other server does not keep the KV, or does not answer.
    """
    url = f"http://{params.get('remote_host')}:{params.get('remote_port')}/kv"
    try:
        async with httpx.AsyncClient(timeout=FETCH_TIMEOUT_S) as client:
            response = await client.post(url, json=params)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise FetchFailed(str(error)) from error
    if response.status_code != OK:
        raise FetchFailed(response.text)
    key: int = response.json()["key"]
    return 0 if key == expected else key
