"""KV blocks of the sequences of an engine model: allocation, hashes of full blocks, and the resulting cache changes."""

from forebay.engine_model.chain_pool import ChainPool, PrefixMatch
from forebay.engine_model.loading import OutputBlockNamed
from forebay.engine_model.requests import EngineConfig
from forebay.engine_model.sequence import EngineSequence
from forebay.engine_model.steps import CacheChange, Removed, Stored

NO_MATCH = PrefixMatch(0, [])


class BlockAllocator:
    """Gives blocks of a pool to sequences. No step has reported the `changes` of the cache yet."""

    def __init__(self, config: EngineConfig, named: OutputBlockNamed | None) -> None:
        self.pool = ChainPool(config.kv_blocks_total)
        self.changes: list[CacheChange] = []
        self._block_size = config.block_size
        self._no_tokens = config.vocabulary is None
        self._named = named

    def take_changes(self) -> list[CacheChange]:
        changes, self.changes = self.changes, []
        return changes

    def needed(self, tokens: int) -> int:
        return -(-tokens // self._block_size)

    def reusable(self, sequence: EngineSequence) -> int:
        """Return how many leading blocks of a sequence need not be computed if the cache has them.

        The last token is always computed, because the next token is sampled from it.
        """
        return (sequence.prompt_tokens + sequence.generated - 1) // self._block_size

    def find(self, sequence: EngineSequence) -> PrefixMatch:
        return self.pool.find(sequence.hashes, self.reusable(sequence))

    def take(self, sequence: EngineSequence, blocks: int) -> bool:
        """Allocate anonymous blocks for a running sequence; return False if there is no room."""
        evicted = self.pool.take(NO_MATCH, blocks)
        if evicted is None:
            return False
        if evicted:
            self.changes.append(Removed(evicted))
        sequence.blocks += blocks
        return True

    def reserve(self, sequence: EngineSequence, found: PrefixMatch, blocks: int) -> bool:
        """Allocate blocks for a sequence without blocks, reusing those found; return False if there is no room."""
        evicted = self.pool.take(found, blocks - found.blocks)
        if evicted is None:
            return False
        if evicted:
            self.changes.append(Removed(evicted))
        sequence.blocks, sequence.held = blocks, found.blocks
        return True

    def fill(self, sequence: EngineSequence, computed: int) -> None:
        """Give identities to the blocks that `computed` tokens fill, and report new content in chains."""
        full = computed // self._block_size
        hashes = sequence.hashes
        if len(hashes) < full:
            sequence.name_block(self._block_size, self._named, no_tokens=self._no_tokens)
        begin = sequence.held
        if begin == full:
            return
        new, sequence.tail = self.pool.fill(hashes, begin, full, sequence.tail)
        for first, end in new:
            self.changes.append(Stored(hashes[first - 1] if first else None, hashes[first:end]))
        sequence.held = full

    def release(self, sequence: EngineSequence) -> None:
        """Take all blocks of a sequence. Full blocks stay in the cache until their room is needed."""
        self.pool.release(sequence.hashes, sequence.held, sequence.blocks - sequence.held)
        sequence.blocks = sequence.held = sequence.computed = 0
        sequence.tail = None
