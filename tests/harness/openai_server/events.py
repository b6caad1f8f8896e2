"""KV events of the stand-in on ZeroMQ sockets, in the wire formats of vLLM 0.32 and SGLang 0.5.23."""

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, assert_never

import msgspec
import zmq
import zmq.asyncio

from forebay.events.base import U64_BYTES
from tests.harness.openai_server.cache import BlockRemoved, BlocksCleared, BlocksStored, CacheEvent
from tests.harness.openai_server.settings import Flavor

REPLAY_BATCHES = 10_000
REQUEST_FRAMES = 3
END_OF_REPLAY = (-1).to_bytes(U64_BYTES, "big", signed=True)
BIND_RETRY_S = 0.01  # a closed socket occupies its port for a moment
SIGN = 1 << 63


class EventPublisher:
    """Publishes numbered batches of KV events, and replays the last 10,000 of them."""

    def __init__(self, flavor: Flavor, block_size: int) -> None:
        self._flavor = flavor
        self._block_size = block_size
        self._context = zmq.asyncio.Context()
        self._pub_context = zmq.Context()  # a PUB socket never blocks, so it needs no event loop
        self._pub = self._pub_context.socket(zmq.PUB)
        self._router = self._context.socket(zmq.ROUTER)
        self._replay: deque[tuple[bytes, bytes]] = deque(maxlen=REPLAY_BATCHES)
        self._serving: asyncio.Task[None] | None = None
        self._batches = 0

    async def open(self, endpoint: str, replay_endpoint: str) -> None:
        await _bind(self._pub, endpoint)
        await _bind(self._router, replay_endpoint)
        self._serving = asyncio.create_task(self._serve())

    async def close(self) -> None:
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)
        self._context.destroy(linger=0)
        self._pub_context.destroy(linger=0)

    def publish(self, events: Sequence[CacheEvent]) -> None:
        encode = _vllm_event if self._flavor == "vllm" else _sglang_event
        payload = msgspec.msgpack.encode([time.time(), [encode(event, self._block_size) for event in events], 0])
        seq = self._batches.to_bytes(U64_BYTES, "big")
        self._batches += 1
        self._replay.append((seq, payload))
        self._pub.send_multipart([b"", seq, payload])

    async def _serve(self) -> None:
        while True:
            frames = await self._router.recv_multipart()
            if len(frames) != REQUEST_FRAMES:
                continue
            client, _, start = frames
            for seq, payload in itertools.dropwhile(lambda one: one[0] < start, list(self._replay)):  # noqa: B023
                await self._router.send_multipart([client, b"", b"", seq, payload])
            await self._router.send_multipart([client, b"", b"", END_OF_REPLAY, b""])


async def _bind(socket: "zmq.Socket[Any]", endpoint: str) -> None:
    while True:
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE:
                raise
            await asyncio.sleep(BIND_RETRY_S)
        else:
            return


def _vllm_event(event: CacheEvent, block_size: int) -> dict[str, Any]:
    match event:
        case BlocksStored(hashes, parent, token_ids, prefix):
            lora = (prefix.lora_name,) if prefix.lora_name else ()
            keys = [
                (*lora, prefix.salt) if prefix.salt and parent is None and not at else lora for at in range(len(hashes))
            ]
            return {
                "type": "BlockStored",
                "block_hashes": hashes,
                "parent_block_hash": parent,
                "token_ids": token_ids,
                "block_size": block_size,
                "lora_id": prefix.lora_id or None,
                "medium": "GPU",
                "lora_name": prefix.lora_name or None,
                "extra_keys": [key or None for key in keys],
                "group_idx": 0,
                "kv_cache_spec_kind": "full_attention",
            }
        case BlockRemoved(removed):
            return {"type": "BlockRemoved", "block_hashes": [removed], "medium": "GPU", "group_idx": 0}
        case BlocksCleared():
            return {"type": "AllBlocksCleared"}
        case _:
            assert_never(event)


def _sglang_event(event: CacheEvent, block_size: int) -> dict[str, Any]:
    match event:
        case BlocksStored(hashes, parent, token_ids, prefix):
            return {
                "type": "BlockStored",
                "block_hashes": [_signed(one) for one in hashes],
                "parent_block_hash": None if parent is None else _signed(parent),
                "token_ids": token_ids,
                "block_size": block_size,
                "lora_id": prefix.lora_id or None,
                "medium": "GPU",
                **({"cache_salt": prefix.salt} if prefix.salt else {}),
                **({"lora_name": prefix.lora_name} if prefix.lora_name else {}),
            }
        case BlockRemoved(removed):
            return {"type": "BlockRemoved", "block_hashes": [_signed(removed)], "medium": "GPU"}
        case BlocksCleared():
            return {"type": "AllBlocksCleared"}
        case _:
            assert_never(event)


def _signed(value: int) -> int:
    return value - 2 * SIGN if value >= SIGN else value
