"""Block cache of the stand-ins, and the changes of it that they publish."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field


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
Key = tuple[Prefix | int, tuple[int, ...]]  # hash of the previous block, if any, and the tokens of the block


@dataclass
class StandinRequest:
    name: str
    prompt: list[int]
    max_tokens: int
    lora: str = ""
    salt: str = ""
    rank: int = 0
    generated: list[int] = field(default_factory=list)
    cached: int = 0


class LittleCache:
    """Cache of full blocks by content, with LRU eviction. A block is evicted after the blocks that follow it."""

    def __init__(self, block_size: int, blocks: int) -> None:
        self.block_size = block_size
        self.blocks = blocks
        self.names: OrderedDict[Key, int] = OrderedDict()  # the least recently used first
        self.numbers = 0

    def cached_tokens(self, requested: StandinRequest) -> int:
        """Return the cached tokens of a prompt; at least one token is always computed."""
        cached = self._cached(requested, requested.prompt[:-1])
        self._use(cached)
        return len(cached) * self.block_size

    def store(self, requested: StandinRequest, tokens: Sequence[int]) -> list[CacheEvent]:
        """Cache all full blocks of the tokens, and return the changes."""
        size = self.block_size
        cached = self._cached(requested, tokens)
        begin, end = len(cached) * size, len(tokens) // size * size
        if begin == end:
            return []
        parent = self.names[cached[-1]] if cached else None
        stored: dict[Key, int] = {}
        previous = _prefix(requested) if parent is None else parent
        for at in range(begin, end, size):
            self.numbers += 1
            name = self.numbers * 0x9E3779B97F4A7C15 % (1 << 64)
            stored[previous, tuple(tokens[at : at + size])] = name
            previous = name
        self.names.update(stored)
        self._use([*cached, *stored])
        changes: list[CacheEvent] = []
        while len(self.names) > self.blocks:
            _, gone = self.names.popitem(last=False)
            changes.append(BlockRemoved(gone))
        changes.append(BlocksStored([*stored.values()], parent, list(tokens[begin:end]), _prefix(requested)))
        return changes

    def _cached(self, requested: StandinRequest, tokens: Sequence[int]) -> list[Key]:
        """Return the keys of the cached blocks at the beginning of the tokens."""
        size = self.block_size
        keys: list[Key] = []
        previous: Prefix | int = _prefix(requested)
        for at in range(0, len(tokens) - size + 1, size):
            key = previous, tuple(tokens[at : at + size])
            if key not in self.names:
                break
            keys.append(key)
            previous = self.names[key]
        return keys

    def _use(self, keys: Sequence[Key]) -> None:
        for key in reversed(keys):
            self.names.move_to_end(key)


def _prefix(requested: StandinRequest) -> Prefix:
    return Prefix(requested.salt, requested.lora, lora_id=1 if requested.lora else 0)
