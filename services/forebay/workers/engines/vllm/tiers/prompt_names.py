"""Name the blocks of a request of vLLM: block keys for the stores, sequence hashes for the router."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from forebay.core.block_hashes import block_hashes, extend_chain, hash_seed, mm_hash
from forebay.events.base import pack_u32
from forebay.workers.kv_tiers.identity import BlockName, KeyChain, KvIdentity, media_by_block


class PlaceholderSpan(Protocol):
    """Placeholder tokens of an image, video or sound: vLLM's `PlaceholderRange`."""

    offset: int
    length: int


class Feature(Protocol):
    """An image, video or sound of a request: vLLM's `MultiModalFeatureSpec`."""

    identifier: str
    mm_position: PlaceholderSpan


class PromptNames:
    """Names of the blocks of one request, extended while the request generates tokens.

    Args:
        adapter: digest of the LoRA adapter, on which the block keys depend; empty without an adapter.

    Attributes:
        names: names of the full blocks so far, from the first block of the prompt.
    """

    def __init__(
        self,
        identity: KvIdentity,
        *,
        salt: str = "",
        lora_name: str = "",
        adapter: str = "",
        features: Sequence[Feature] = (),
    ) -> None:
        self.names: list[BlockName] = []
        self._block_size = identity.block_size
        self._chain = KeyChain(identity, salt=salt, adapter=adapter)
        self._seed = hash_seed(lora_name, salt)
        objects = [(one.identifier, one.mm_position.offset, one.mm_position.length) for one in features]
        self._media: Mapping[int, Sequence[str]] = media_by_block(objects, self._block_size)
        self._mm_hashes: dict[int, list[int]] = {}
        for identifier, first, tokens in objects:
            for block in range(first // self._block_size, (first + tokens - 1) // self._block_size + 1):
                self._mm_hashes.setdefault(block, []).append(mm_hash(identifier))

    def extend(self, token_ids: Sequence[int]) -> list[BlockName]:
        """Return the names of all full blocks.

        Args:
            token_ids: all tokens of the request so far: those of earlier calls, and further ones.
        """
        first, full = len(self.names), len(token_ids) // self._block_size
        if full > first:
            packed = pack_u32(token_ids[first * self._block_size : full * self._block_size])
            parent = self.names[-1] if self.names else None
            media = {block - first: found for block, found in self._media.items() if block >= first}
            hashes = {block - first: found for block, found in self._mm_hashes.items() if block >= first}
            keys = self._chain.extend(parent and parent.key, packed, media)
            blocks = block_hashes(packed, self._block_size, self._seed, hashes)
            chain = extend_chain(None if parent is None else parent.sequence_hash, blocks)
            self.names += map(BlockName, keys, chain)
        return self.names
