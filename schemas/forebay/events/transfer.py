"""KV blocks of a prompt that a prefill worker keeps for another worker. The bytes are never on a topic."""

from typing import Annotated

import msgspec

from forebay.events.base import Count, Digest, Name, Part
from forebay.events.privacy import CHECKSUM, DROPPED, KEPT

DESCRIPTOR_BYTES_MAX = 256 << 10  # about 30,000 block numbers, as JSON
LEASE_US_MAX = 3_600_000_000  # one hour; no reader comes later


class KvLayout(Part, frozen=True, kw_only=True):
    """Memory layout of a worker's KV blocks. A transfer requires equal layouts.

    Attributes:
        connector: transport: `nixl` and `tcp` are forebay's own, others are an engine's.
        dtype: element type.
        block_bytes: bytes of one block over all layers and all tensor-parallel parts.
        layers: number of layers; 0 if the engine does not report it.
    """

    connector: Name
    dtype: Name
    block_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
    layers: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)] = 0


class Prefilled(Part, frozen=True, kw_only=True):
    """KV of a prompt in the memory of one epoch of a prefill worker, kept for one reader.

    Attributes:
        worker_id: worker that keeps the KV.
        worker_epoch: epoch of that worker.
        model: model that computed the prompt.
        connector: transport to fetch the blocks.
        descriptor: location of the blocks, readable by `connector` alone.
        tokens: leading prompt tokens whose KV is kept.
        lease_us: microseconds that the KV is kept, from the owner's clock when it applies this event.
        bytes: size of the KV; 0 if the engine does not report it.
        cached_tokens: prompt tokens that the rank had cached, as reported to the client.
        checksum: XXH3-64 of the blocks' own XXH3-64 values, so that parts can be checked; null if not requested.
        rank: rank that computed the prompt.
    """

    worker_id: Annotated[Name, KEPT]
    worker_epoch: Count
    model: Annotated[Name, KEPT]
    connector: Annotated[Name, KEPT]
    descriptor: Annotated[bytes, msgspec.Meta(max_length=DESCRIPTOR_BYTES_MAX), DROPPED]
    tokens: Count
    lease_us: Annotated[int, msgspec.Meta(ge=1, le=LEASE_US_MAX)]
    bytes: Count = 0
    cached_tokens: Count = 0
    checksum: Annotated[Digest | None, CHECKSUM] = None
    rank: Count = 0

    @property
    def lease_s(self) -> float:
        """Seconds that the KV is kept."""
        return self.lease_us / 1e6
