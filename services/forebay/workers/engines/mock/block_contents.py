"""Names and bytes of the KV blocks of a mock engine's rank, as its tiers contain them.

Theory of operation. A block consists of one 8-byte word, repeated: the sequence hash of the block, xor the hash of the
embeddings of all images and videos that begin before the end of the block. Everything that the word depends on is in
the block key, so blocks with equal keys have equal bytes. A decode worker does not know the embeddings. It learns their
hashes from the KV that it fetches.

The model of the engine has no bytes. So a block is written when it is offered to a tier, and read when it is loaded
from one. `KvCheck` collects what a request has read; the output tokens of the request depend on its result.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec
from xxhash import xxh3_64, xxh3_64_intdigest

from forebay.events.base import U64_BYTES, pack_u64
from forebay.events.media import Media
from forebay.workers.kv_tiers.identity import BlockName, KeyChain

if TYPE_CHECKING:
    from forebay.workers.kv_transfer.api import Array

NO_MEDIA = (0,)  # hashes of the embeddings of a prompt without images and videos


class KnownBlock(msgspec.Struct):
    """Block of which the name is known.

    Attributes:
        word: the word that fills the block; None while its embeddings are unknown.
        uses: number of requests in flight with the block, and of device memories that contain it.
    """

    name: BlockName
    word: int | None
    uses: int = 0


class BlockContents:
    """Blocks that requests in flight have, or that device memory contains, by their sequence hash.

    Args:
        block_bytes: bytes per block.
        chain: computes the keys of output blocks.
    """

    def __init__(self, block_bytes: int, chain: KeyChain) -> None:
        self._words = block_bytes // U64_BYTES
        self._chain = chain
        self._blocks: dict[int, KnownBlock] = {}
        self._device: set[int] = set()
        self._new: set[int] = set()  # output blocks that have got a hash, and may not be in device memory yet

    def __len__(self) -> int:
        return len(self._blocks)

    def get(self, block: int) -> KnownBlock | None:
        """Return a block by its sequence hash; None if it is unknown."""
        return self._blocks.get(block)

    def begin(self, names: Sequence[BlockName], words: Sequence[int | None]) -> None:
        """Add the blocks of a prompt. The caller removes them with `end`."""
        for name, word in zip(names, words, strict=True):
            known = self._blocks.get(name.sequence_hash)
            if known is None:
                known = self._blocks[name.sequence_hash] = KnownBlock(name, word)
            known.uses += 1
        self.learn(names, words)

    def learn(self, names: Sequence[BlockName], words: Sequence[int | None]) -> None:
        """Set the words of blocks of a prompt that were unknown before."""
        for name, word in zip(names, words, strict=True):
            known = self._blocks[name.sequence_hash]
            known.word = word if known.word is None else known.word

    def end(self, names: Iterable[BlockName]) -> None:
        """Remove the blocks of a prompt, except those of other prompts and of device memory."""
        for name in names:
            self._drop(name.sequence_hash)

    def name_output(self, parent: int, block: int, token_ids: bytes) -> None:
        """Name an output block that follows a known block, as `OutputBlockNamed` of the engine model."""
        before = self._blocks.get(parent)
        if before is None or block in self._blocks:
            return
        (key,) = self._chain.extend(before.name.key, token_ids)
        # The word contains the hash of the same embeddings as the word of the block before.
        word = None if before.word is None else before.word ^ before.name.sequence_hash ^ block
        self._blocks[block] = KnownBlock(BlockName(key, block), word, 1)
        self._new.add(block)

    def stored(self, blocks: Iterable[int]) -> list[KnownBlock]:
        """Record that device memory contains blocks. Return the leading ones whose bytes are known."""
        found: list[KnownBlock] = []
        is_known = True
        for block in blocks:
            known = self._blocks.get(block)
            if known is not None and block not in self._device:
                self._device.add(block)
                known.uses += 1
            is_known = is_known and known is not None and known.word is not None
            if known is not None and is_known:
                found.append(known)
        return found

    def on_device(self, blocks: Iterable[int]) -> list[KnownBlock]:
        """Return the leading blocks that device memory contains and whose bytes are known."""
        found: list[KnownBlock] = []
        for block in blocks:
            known = self._blocks.get(block)
            if known is None or known.word is None or block not in self._device:
                break
            found.append(known)
        return found

    def removed(self, blocks: Iterable[int]) -> list[KnownBlock]:
        """Record that device memory does not contain blocks any more. Return those whose bytes are known."""
        found: list[KnownBlock] = []
        for block in blocks:
            if block in self._device:
                self._device.discard(block)
                known = self._blocks[block]
                if known.word is not None:
                    found.append(known)
                self._drop(block)
        return found

    def settle(self) -> None:
        """Forget the new output blocks that are not in device memory. Call this after each batch of changes."""
        for block in self._new:
            self._drop(block)
        self._new.clear()

    def clear(self, *, requests: bool) -> None:
        """Forget the content of device memory, and with `requests` also every block of a request."""
        if requests:
            self._blocks.clear()
            self._device.clear()
            self._new.clear()
        else:
            self.removed(list(self._device))

    def bytes_of(self, block: KnownBlock) -> "Array":
        """Return the bytes of a block with a known word."""
        import numpy  # noqa: PLC0415 - an extra

        assert block.word is not None
        written: Array = numpy.full(self._words, block.word, dtype="<u8").view(numpy.uint8)
        return written

    def _drop(self, block: int) -> None:
        known = self._blocks[block]
        known.uses -= 1
        if not known.uses:
            del self._blocks[block]


class KvCheck:
    """Blocks that one request has loaded, and whether their bytes are those that this worker would have computed.

    Args:
        media: images and videos of the prompt.
        block_size: tokens per block.
        hashes: hashes of the embeddings of the first images and videos, by their number, as far as they are known.
    """

    def __init__(self, media: Sequence[Media], blocks: int, block_size: int, hashes: Sequence[int]) -> None:
        self._objects = len(media)
        self._begun = _begun_by_block(media, blocks, block_size)
        self._hashes = dict(enumerate(hashes))
        self._found: list[tuple[int, int]] = []

    @property
    def media_hash(self) -> int:
        """Hash of the embeddings of all images and videos of the prompt; 0 while it is unknown."""
        return self._hashes.get(self._objects, 0)

    def word(self, at: int, sequence_hash: int) -> int | None:
        """Return the word of a block of the prompt; None if the hash of its embeddings is unknown."""
        known = self._hashes.get(self._begun[at])
        return None if known is None else sequence_hash ^ known

    def read(self, at: int, block: "Array", sequence_hash: int) -> None:
        """Add a block that was loaded: block `at` of the request, or an output block after the prompt."""
        begun = self._begun[at] if at < len(self._begun) else self._objects
        words = block.view("<u8")
        uniform = bool((words == words[0]).all())
        found = int(words[0]) ^ sequence_hash if uniform else xxh3_64_intdigest(block.tobytes(), sequence_hash)
        self._found.append((begun, found))

    def learn(self, media_hash: int) -> None:
        """Set the hash of the embeddings of all images and videos of the prompt."""
        self._hashes[self._objects] = media_hash

    def wrong(self) -> int:
        """Return 0 if all bytes of the blocks are as expected, otherwise a number that depends on every byte.

        If the hash of some embeddings is unknown, all blocks that depend on them must agree.
        """
        expected = dict(self._hashes)
        for begun, found in self._found:
            if expected.setdefault(begun, found) != found:
                return xxh3_64_intdigest(pack_u64([one for _, one in self._found]))
        return 0


def media_hashes(media: Sequence[Media], embeddings: "Array") -> tuple[int, ...]:
    """Return the hash of the embeddings of the first images and videos, by their number from 0 on.

    Args:
        media: images and videos of a prompt, in order.
        embeddings: one row per placeholder token, in the same order.
    """
    hashes, row = [*NO_MEDIA], 0
    state = xxh3_64()
    for one in media:
        state.update(embeddings[row : row + one.tokens].tobytes())
        row += one.tokens
        hashes.append(state.intdigest())
    return tuple(hashes)


def _begun_by_block(media: Sequence[Media], blocks: int, block_size: int) -> list[int]:
    """Return for each block of a prompt how many images and videos begin before the end of the block."""
    begin = Counter(one.first_token // block_size for one in media)
    found, count = [], 0
    for block in range(blocks):
        count += begin[block]
        found.append(count)
    return found
