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
Key = tuple[str, str, tuple[int, ...]]  # adapter, salt, and all tokens up to the end of the block


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
    """Cache of full blocks by content, with LRU eviction."""

    def __init__(self, block_size: int, blocks: int) -> None:
        self.block_size = block_size
        self.blocks = blocks
        self.names: OrderedDict[Key, int] = OrderedDict()
        self.numbers = 0

    def key(self, requested: StandinRequest, tokens: Sequence[int], blocks: int) -> Key:
        return (requested.lora, requested.salt, tuple(tokens[: blocks * self.block_size]))

    def cached_tokens(self, requested: StandinRequest) -> int:
        """Return the cached tokens of a prompt; at least one token is always computed."""
        blocks = 0
        while (blocks + 1) * self.block_size < len(requested.prompt) and (
            self.key(requested, requested.prompt, blocks + 1) in self.names
        ):
            blocks += 1
            self.names.move_to_end(self.key(requested, requested.prompt, blocks))
        return blocks * self.block_size

    def store(self, requested: StandinRequest, tokens: Sequence[int]) -> list[CacheEvent]:
        """Cache all full blocks of the tokens, and return the changes."""
        full = len(tokens) // self.block_size
        new = [number for number in range(1, full + 1) if self.key(requested, tokens, number) not in self.names]
        if not new:
            return []
        changes: list[CacheEvent] = []
        while len(self.names) + len(new) > self.blocks:
            _, gone = self.names.popitem(last=False)
            changes.append(BlockRemoved(gone))
        first = new[0]
        parent = self.names[self.key(requested, tokens, first - 1)] if first > 1 else None
        came = []
        for number in new:
            self.numbers += 1
            name = self.numbers * 0x9E3779B97F4A7C15 % (1 << 64)
            self.names[self.key(requested, tokens, number)] = name
            came.append(name)
        token_ids = list(tokens[(first - 1) * self.block_size : full * self.block_size])
        prefix = Prefix(requested.salt, requested.lora, lora_id=1 if requested.lora else 0)
        changes.append(BlocksStored(came, parent, token_ids, prefix))
        return changes
