"""Parts of events for KV transfer: where a prefill worker keeps the KV of a prompt.

The KV itself is never on a topic.
"""

from typing import Annotated

import msgspec

from forebay.events.base import Count, Digest, Part
from forebay.events.privacy import CHECKSUM, DROPPED, SystemName

DESCRIPTOR_BYTES_MAX = 256 << 10  # about 30,000 block numbers, as JSON
LEASE_US_MAX = 3_600_000_000  # one hour; no decode worker fetches KV later


class KvLayout(Part, frozen=True, kw_only=True):
    """Memory layout of a worker's KV blocks. Workers can transfer KV only if their layouts are equal.

    Attributes:
        connector: transport: `nixl` or `tcp` of forebay, or the name of an engine's own connector.
        block_bytes: bytes of one block over all layers and all tensor-parallel parts.
        layers: number of layers; 0 if the engine does not report it.
    """

    connector: SystemName
    dtype: SystemName
    block_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
    layers: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)] = 0


class Prefilled(Part, frozen=True, kw_only=True):
    """KV of a prompt that a prefill worker keeps in its memory for one reader, the decode worker.

    Attributes:
        worker_id: worker that keeps the KV.
        model: model that computed the prompt.
        connector: transport to fetch the blocks, as in `KvLayout`.
        descriptor: location of the blocks, in a format that only the connector reads.
        tokens: number of leading prompt tokens whose KV is kept.
        lease_us: microseconds for which the KV is kept, counted from the moment when the owner applies this event, on
            the owner's clock.
        bytes: size of the KV; 0 if the engine does not report it.
        cached_tokens: prompt tokens that the rank had cached, as reported to the client.
        checksum: XXH3-64 over the XXH3-64 values of the blocks, so that a reader can check single blocks; null if not
            requested.
        rank: rank that computed the prompt.
    """

    worker_id: SystemName
    worker_epoch: Count
    model: SystemName
    connector: SystemName
    descriptor: Annotated[bytes, msgspec.Meta(max_length=DESCRIPTOR_BYTES_MAX), DROPPED]
    tokens: Count
    lease_us: Annotated[int, msgspec.Meta(ge=1, le=LEASE_US_MAX)]
    bytes: Count = 0
    cached_tokens: Count = 0
    checksum: Annotated[Digest | None, CHECKSUM] = None
    rank: Count = 0

    @property
    def lease_s(self) -> float:
        """Seconds for which the KV is kept."""
        return self.lease_us / 1e6
