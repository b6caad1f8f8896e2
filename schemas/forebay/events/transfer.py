"""KV blocks of a prompt, as the worker that computed them keeps them for another. The bytes never come on a topic."""

from typing import Annotated

import msgspec

from forebay.events.base import Count, Digest, Name, Part

DESCRIPTOR_BYTES_MAX = 256 << 10  # some 30,000 blocks by number, as JSON
LEASE_US_MAX = 3_600_000_000  # an hour: who holds blocks for longer holds them for nobody


class KvLayout(Part, frozen=True, kw_only=True):
    """How the KV blocks of a worker lie in its memory, as far as who reads them must know: equal, or no transfer.

    `connector` is what moves them: `nixl` and `tcp` are forebay's own, others are an engine's. `block_bytes` are those
    of one block over all layers and all tensor-parallel parts; `layers` is 0 where the engine does not say.
    """

    connector: Name
    dtype: Name
    block_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
    layers: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)] = 0


class Prefilled(Part, frozen=True, kw_only=True):
    """The KV of a prompt in the memory of one epoch of a prefill worker, kept for one reader for `lease_us`.

    The lease counts from the owner's clock when it applies the event that says so. `descriptor` says where the blocks
    lie, to `connector` alone. The first `tokens` of the prompt are there, in `bytes` (0 where the engine does not say);
    `cached_tokens` of them the `rank` that computed it had in its cache, which is what a client is told.
    `checksum`, where one is asked for, is the XXH3-64 of the blocks' own XXH3-64s, so that parts can be checked.
    """

    worker_id: Name
    worker_epoch: Count
    model: Name
    connector: Name
    descriptor: Annotated[bytes, msgspec.Meta(max_length=DESCRIPTOR_BYTES_MAX)]
    tokens: Count
    lease_us: Annotated[int, msgspec.Meta(ge=1, le=LEASE_US_MAX)]
    bytes: Count = 0
    cached_tokens: Count = 0
    checksum: Digest | None = None
    rank: Count = 0
