"""Cache of a vLLM by its replay socket, read without forebay's adapter, as canonical hashes.

Source: vLLM 0.32 `ZmqEventPublisher`: a DEALER asks `["", first sequence number]` and gets `["", topic, sequence
number, batch]` for each batch that is kept, then one with sequence number -1. A batch is `[timestamp, events, rank]`.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from forebay.core.block_hashes import block_hashes, extend_chain, hash_seed
from forebay.core.state.prefix_index import PrefixIndex
from forebay.events.base import pack_u32, pack_u64
from forebay.events.kv import BlocksStored

END = b"\xff" * 8
PATIENCE_S = 30.0
EPOCH = 1  # of a private index


async def replayed(port: int) -> list[Any]:
    """Every event since the engine started, in order. Raises TimeoutError."""
    events: list[Any] = []
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(f"tcp://127.0.0.1:{port}")
        await socket.send_multipart([b"", bytes(8)])
        while True:
            if not await socket.poll(PATIENCE_S * 1000):
                raise TimeoutError(f"no replay from port {port}")
            _, *frames = await socket.recv_multipart()
            number, payload = frames[-2:]
            if number == END:
                return events
            _, reported, _ = msgspec.msgpack.decode(payload)
            events += reported


def canonical(events: Sequence[Any]) -> set[int]:
    """Sequence hashes of the blocks that are there after these events, by the tokens that the engine names."""
    held: dict[int, int] = {}  # by the engine's own hash
    for event in events:
        match event["type"]:
            case "BlockStored":
                seed = hash_seed(event.get("lora_name") or "")
                blocks = block_hashes(pack_u32(event["token_ids"]), event["block_size"], seed)
                parent = event["parent_block_hash"]
                chain = extend_chain(None if parent is None else held[parent], blocks)
                held.update(zip(event["block_hashes"], chain, strict=True))
            case "BlockRemoved":
                for engine_hash in event["block_hashes"]:
                    del held[engine_hash]
            case "AllBlocksCleared":
                held.clear()
            case other:
                raise AssertionError(f"what is a {other}?")
    return set(held.values())


def digest_of(blocks: set[int]) -> int:
    """Return the digest of an index in which one worker holds these blocks."""
    index = PrefixIndex()
    index.add_holder("worker", 0, EPOCH)
    packed = pack_u64(sorted(blocks))
    index.apply(BlocksStored(worker_id="worker", worker_epoch=EPOCH, seq=1, sequence_hashes=packed))
    return index.digest()
