"""KV of prompts that one stand-in keeps for another, with the parameters of vLLM's NixlConnector.

KV is the contents of blocks, which are fetched over HTTP from the port of the server itself. As with NIXL, a known
server is found by the id of its engine, and its blocks are read even if it has freed them. If it has used them again,
the output is wrong, without an error.
"""

import asyncio
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

from tests.harness.openai_server.cache import BlockCache, BlockTable
from tests.harness.openai_server.settings import Counters

FETCH_TIMEOUT_S = 5.0
OK = 200


class FetchFailed(Exception):
    """The KV of a prompt cannot be fetched."""


@dataclass(slots=True)
class _Kept:
    table: BlockTable
    blocks: int
    expiry: asyncio.TimerHandle


class KvKeeper:
    """Keeps the KV of prompts until another server has fetched it or its lease expires, and fetches KV from others.

    Args:
        freed: called when blocks were freed.

    Attributes:
        engine_id: id of this engine, which is different after a restart.
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
        self._peers: dict[str, str] = {}  # URLs by the id of the engine

    def offer(self, request_id: str, table: BlockTable, prompt_tokens: int, cached_tokens: int) -> dict[str, Any]:
        """Keep the blocks of a prompt, and return the parameters with which another server fetches them."""
        kept = BlockTable(table.prefix, [], list(table.blocks))
        for block in kept.blocks:
            block.users += 1
        expiry = asyncio.get_running_loop().call_later(self._lease_s, self._release, request_id)
        self._kept[request_id] = _Kept(kept, len(kept.blocks), expiry)
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

    def read(self, params: dict[str, Any]) -> list[int] | None:
        """Return the contents of blocks, and free them if they are kept; None if these are blocks of another engine."""
        if params.get("remote_engine_id") != self.engine_id:
            return None
        contents = self._cache.contents(params["remote_block_ids"][0])
        self._counters.kv_fetched += contents is not None
        if params.get("remote_request_id") in self._kept:
            self._release(params["remote_request_id"])
        return contents

    async def fetch(self, params: dict[str, Any]) -> list[int]:
        """Return the contents of blocks of another server.

        Raises FetchFailed if the server does not answer, or has another engine.
        """
        engine_id = str(params.get("remote_engine_id"))
        url = self._peers.get(engine_id, f"http://{params.get('remote_host')}:{params.get('remote_port')}/kv")
        try:
            async with httpx.AsyncClient(timeout=FETCH_TIMEOUT_S) as client:
                response = await client.post(url, json=params)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise FetchFailed(str(error)) from error
        if response.status_code != OK:
            raise FetchFailed(response.text)
        self._peers[engine_id] = url
        contents: list[int] = response.json()["contents"]
        return contents

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
