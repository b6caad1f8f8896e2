"""Publisher of KV events like SGLang's: on its own sockets, with a buffer for replays."""

import asyncio
import time
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from forebay.workers.kv_events.zmq_feed import END_OF_REPLAY
from tests.workers.standins.little import Change, signed


class Publisher:
    """The PUB and ROUTER sockets of a rank."""

    def __init__(self, config: dict[str, Any], rank: int) -> None:
        self.context = zmq.asyncio.Context()
        self.pub = self.context.socket(zmq.PUB)
        self.router = self.context.socket(zmq.ROUTER)
        self.pub.bind(offset(config["endpoint"], rank))
        self.router.bind(offset(config["replay_endpoint"], rank))
        self.buffer: list[bytes] = []
        self.serving = asyncio.create_task(self._serve())

    async def publish(self, events: list[dict[str, Any]]) -> None:
        data = msgspec.msgpack.encode([time.time(), events, 0])
        self.buffer.append(data)
        await self.pub.send_multipart([b"", (len(self.buffer) - 1).to_bytes(8, "big"), data])

    async def _serve(self) -> None:
        while True:
            identity, _, start = await self.router.recv_multipart()
            for seq in range(int.from_bytes(start, "big"), len(self.buffer)):
                await self.router.send_multipart([identity, b"", b"", seq.to_bytes(8, "big"), self.buffer[seq]])
            await self.router.send_multipart([identity, b"", b"", END_OF_REPLAY, b""])

    def close(self) -> None:
        self.serving.cancel()
        self.context.destroy(linger=0)


def offset(endpoint: str, rank: int) -> str:
    if not rank:
        return endpoint
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + rank}"


def wire(change: Change, block_size: int) -> dict[str, Any]:
    if change.went:
        return {"type": "BlockRemoved", "block_hashes": [signed(one) for one in change.went], "medium": "GPU"}
    return {
        "type": "BlockStored",
        "block_hashes": [signed(one) for one in change.came],
        "parent_block_hash": None if change.parent is None else signed(change.parent),
        "token_ids": list(change.token_ids),
        "block_size": block_size,
        "lora_id": None,
        "medium": "GPU",
        "cache_salt": change.salt or None,
        "lora_name": change.lora or None,
    }
