"""KV blocks of the stand-in: a pool with a prefix cache that evicts as the imitated engine does.

A prompt needs at least one token to compute, so its last full block may be computed again while it is cached. vLLM
then has two copies of the block and reports each. SGLang keeps one.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from xxhash import xxh3_64_intdigest

from forebay.events.base import U64_BYTES, pack_u32


@dataclass(frozen=True, slots=True)
class Prefix:
    """What a block depends on besides tokens."""

    salt: str = ""
    lora_name: str = ""
    lora_id: int = 0


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Consecutive full blocks are now cached."""

    hashes: list[int]
    parent: int | None
    token_ids: list[int]
    prefix: Prefix


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """A copy of a block is no longer cached."""

    hash: int


@dataclass(frozen=True, slots=True)
class BlocksCleared:
    """No block is cached any more."""


CacheEvent = BlocksStored | BlockRemoved | BlocksCleared


@dataclass(slots=True)
class Block:
    """Block of the pool.

    Attributes:
        content: hash of the tokens that it was computed for, and of all before them. It stays until the block is used
            again.
        is_cached: whether a prompt may reuse the block.
    """

    number: int
    content: int = 0
    is_cached: bool = False
    users: int = 0


@dataclass(slots=True)
class BlockTable:
    prefix: Prefix
    tokens: list[int]
    blocks: list[Block] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)
    cached: int = 0


class BlockCache:
    """Pool of KV blocks.

    Args:
        counts_copies: whether every copy of a block is reported.

    Attributes:
        events: changes that have not been published yet.
    """

    def __init__(self, total: int, block_size: int, *, counts_copies: bool) -> None:
        self.total = total
        self.block_size = block_size
        self.events: list[CacheEvent] = []
        self._counts_copies = counts_copies
        self._blocks = {number: Block(number) for number in range(1, total + 1)}
        self._free = OrderedDict(self._blocks)  # next to evict first
        self._cached: dict[int, dict[int, Block]] = {}

    @property
    def used(self) -> int:
        return self.total - len(self._free)

    def open(self, tokens: list[int], prefix: Prefix) -> BlockTable:
        """Return a table for a prompt with the blocks of it that are cached. At least one token must be computed."""
        table = BlockTable(prefix, list(tokens))
        for at in range((len(tokens) - 1) // self.block_size):
            content = self._content(table, at, len(tokens))
            copies = self._cached.get(content)
            if not copies:
                break
            block = next(iter(copies.values()))
            self._free.pop(block.number, None)
            block.users += 1
            table.blocks.append(block)
            table.hashes.append(content)
        table.cached = len(table.blocks)
        return table

    def compute(self, table: BlockTable, tokens: int) -> None:
        """Compute the first tokens of a sequence. There must be free blocks for them. Full blocks are cached then."""
        while len(table.blocks) * self.block_size < tokens:
            _, block = self._free.popitem(last=False)
            self._forget(block)
            block.users = 1
            table.blocks.append(block)
        first = table.cached
        for at in range(first, len(table.blocks)):
            block = table.blocks[at]
            block.content = self._content(table, at, tokens)
            if (at + 1) * self.block_size <= tokens:
                block.is_cached = True
                self._cached.setdefault(block.content, {})[block.number] = block
                table.hashes.append(block.content)
                table.cached += 1
        if table.cached > first:
            self._report(table, first, table.hashes[first - 1] if first else None)

    def contents(self, numbers: list[int]) -> list[int] | None:
        """Return the present contents of blocks, also of blocks in use; None if a block does not exist."""
        try:
            return [self._blocks[number].content for number in numbers]
        except KeyError:
            return None

    def close(self, table: BlockTable) -> None:
        """Give back the blocks of a sequence. Full blocks stay cached, and the last is evicted first."""
        for block in table.blocks:
            block.users -= 1
        unused = [block for block in reversed(table.blocks) if not block.users]
        for block in unused:
            self._free[block.number] = block
        for block in reversed(unused):
            if not block.is_cached:
                self._free.move_to_end(block.number, last=False)
        table.blocks.clear()

    def clear(self) -> bool:
        """Clear the cache, unless a sequence uses blocks."""
        if self.used:
            return False
        for block in self._free.values():
            block.is_cached = False
        self._cached.clear()
        self.events.append(BlocksCleared())
        return True

    def _report(self, table: BlockTable, first: int, parent: int | None) -> None:
        """Report the cached blocks of a sequence from one on. SGLang does not report those that it had already."""
        if not self._counts_copies:
            while first < table.cached and len(self._cached[table.hashes[first]]) > 1:
                parent = table.hashes[first]
                first += 1
        if first < table.cached:
            tokens = table.tokens[first * self.block_size : table.cached * self.block_size]
            self.events.append(BlocksStored(table.hashes[first : table.cached], parent, tokens, table.prefix))

    def _forget(self, block: Block) -> None:
        if not block.is_cached:
            return
        copies = self._cached[block.content]
        del copies[block.number]
        if self._counts_copies or not copies:
            self.events.append(BlockRemoved(block.content))
        if not copies:
            del self._cached[block.content]
        block.is_cached = False

    def _content(self, table: BlockTable, at: int, tokens: int) -> int:
        """Return the content of a block of a sequence of which the first `tokens` tokens are computed."""
        prefix = table.prefix
        parent = table.hashes[at - 1].to_bytes(U64_BYTES, "little") if at else prefix.salt.encode()
        own = table.tokens[at * self.block_size : min((at + 1) * self.block_size, tokens)]
        return xxh3_64_intdigest(b"\0".join((parent, prefix.lora_name.encode(), pack_u32(own))))
