"""Names of stored KV blocks: SHA-256 over everything that the content of a block depends on.

Theory of operation. The routing hash of a block has 64 bits and is not collision-resistant, so a client could construct
two prompts with the same hash. Therefore only the block key decides whose KV is served. The key of a block is the
SHA-256 of the key of the block before it, the tokens of the block, and the images in the block. The first block has the
SHA-256 of the identity, the salt and the adapter as parent. So equal keys mean equal KV, up to the rounding of kernels.

Keys are stored in files. A change of this module that changes a key must increase `KEY_VERSION`.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from typing import NamedTuple

import msgspec

from forebay.events.base import U32_BYTES

KEY_VERSION = 1
KEY_BYTES = 32  # of SHA-256
SHORT_HEX = 16  # digits of an identity digest in names of folders and stores
NO_MEDIA: Mapping[int, Sequence[str]] = {}


class BlockName(NamedTuple):
    """Name of a stored block.

    Attributes:
        key: block key, 32 bytes.
        sequence_hash: sequence hash of the block for routing, from `forebay.core.block_hashes`.
    """

    key: bytes
    sequence_hash: int


class KvIdentity(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """What the KV of every block of a worker rank depends on, except the prompt and the adapter.

    Attributes:
        weights: SHA-256 of the weight files, in hex.
        tp_size: number of tensor-parallel ranks.
        layout: order of layers, keys, values, heads and tokens in the bytes of a block, as the engine names it.
        dtype: data type of keys and values, as the engine names it.
        block_size: tokens per block.
        block_bytes: bytes per block.
        model: name of the model, for operators. It is not part of the digest.
    """

    weights: str
    tp_rank: int
    tp_size: int
    layout: str
    dtype: str
    block_size: int
    block_bytes: int
    model: str = ""

    @functools.cached_property
    def digest(self) -> bytes:
        """Return the SHA-256 of all attributes except `model`."""
        numbers = (self.tp_rank, self.tp_size, self.block_size, self.block_bytes)
        return _digest("forebay.kv.identity", self.weights, self.layout, self.dtype, *map(str, numbers))

    @property
    def short_digest(self) -> str:
        """Return the first 16 hex digits of the digest, which name the identity in stores."""
        return self.digest.hex()[:SHORT_HEX]


class KeyChain:
    """Computes the block keys of prompts with the same identity, salt and adapter.

    Args:
        salt: cache salt or tenant of the request. Requests with different salts share no blocks.
        adapter: digest of the LoRA adapter; empty without an adapter.
    """

    def __init__(self, identity: KvIdentity, *, salt: str = "", adapter: str = "") -> None:
        self._width = identity.block_size * U32_BYTES
        self._root = _digest("forebay.kv.prompt", identity.digest.hex(), salt, adapter)

    def extend(
        self, parent: bytes | None, token_ids: bytes, media: Mapping[int, Sequence[str]] = NO_MEDIA
    ) -> list[bytes]:
        """Return the key of each full block of consecutive tokens.

        Args:
            parent: key of the block before the tokens; None if the tokens start a prompt.
            token_ids: tokens as packed u32. Tokens after the last full block are ignored.
            media: images and videos in each block, from `media_by_block`. Index 0 is the first block of `token_ids`.
        """
        key = self._root if parent is None else parent
        width = self._width
        keys: list[bytes] = []
        for block in range(len(token_ids) // width):
            state = sha256(key)
            state.update(token_ids[block * width : (block + 1) * width])
            if media and (objects := media.get(block)):
                state.update(_framed(*objects))
            key = state.digest()
            keys.append(key)
        return keys


def block_keys(
    identity: KvIdentity,
    token_ids: bytes,
    *,
    salt: str = "",
    adapter: str = "",
    media: Mapping[int, Sequence[str]] = NO_MEDIA,
) -> list[bytes]:
    """Return the block key of each full block of a prompt.

    Args:
        token_ids: prompt tokens, as packed u32.
        salt: cache salt or tenant of the request.
        adapter: digest of the LoRA adapter; empty without an adapter.
        media: images and videos in each block, from `media_by_block`.
    """
    return KeyChain(identity, salt=salt, adapter=adapter).extend(None, token_ids, media)


def media_by_block(objects: Iterable[tuple[str, int, int]], block_size: int) -> dict[int, list[str]]:
    """Return the argument `media` of block keys: for each block, the objects in it and their positions.

    The position matters. Placeholder tokens are equal for all images, so tokens alone do not show where an image ends.

    Args:
        objects: digest, first token and number of tokens of each image or video of the prompt, in any order.
        block_size: tokens per block.
    """
    found: dict[int, list[str]] = {}
    for digest, first, tokens in sorted(objects, key=lambda one: one[1]):
        for block in range(first // block_size, (first + tokens - 1) // block_size + 1):
            found.setdefault(block, []).append(f"{digest}@{first - block * block_size}+{tokens}")
    return found


def _digest(*parts: str) -> bytes:
    return sha256(KEY_VERSION.to_bytes(4, "little") + _framed(*parts)).digest()


def _framed(*parts: str) -> bytes:
    """Encode texts with their lengths, so that different lists never have the same bytes."""
    encoded = [part.encode() for part in parts]
    return b"".join(len(part).to_bytes(4, "little") + part for part in encoded)
