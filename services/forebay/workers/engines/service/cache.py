"""What a service tells of its KV cache, collected for the next batch."""

from collections.abc import Callable, Iterable

from forebay.engine_model.model import Removed, Stored
from forebay.events.base import U64_MASK
from forebay.workers.engine import CacheChange, Cleared
from forebay.workers.engines.service.request import Request


class Cache:
    """Given to a service as `self.cache`. Blocks are named by their sequence hashes, as in `Request`.

    Used on the event loop alone. What is told after a worker left the fleet is kept for when it joins again.
    """

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self._held: dict[int, None] = {}
        self._changes: list[CacheChange] = []
        self._hits: dict[str, int] = {}

    def stored(self, hashes: Iterable[int], parent: int | None = None) -> None:
        """Blocks that follow one another entered the cache, after `parent` or as the first of a sequence."""
        blocks = _checked(hashes)
        if blocks:
            self._held.update(dict.fromkeys(blocks))
            self._changed(Stored(parent, blocks))

    def removed(self, hashes: Iterable[int]) -> None:
        """Blocks left the cache."""
        blocks = _checked(hashes)
        if blocks:
            for block in blocks:
                self._held.pop(block, None)
            self._changed(Removed(blocks))

    def cleared(self) -> None:
        """The cache is empty."""
        self._held.clear()
        self._changed(Cleared())

    def hit(self, request: Request, tokens: int) -> None:
        """So many tokens of the prompt were found in the cache; told before the first token is yielded."""
        self._hits[request.request_id] = max(0, min(tokens, len(request.token_ids)))

    def held(self) -> tuple[int, ...]:
        """The blocks that are in the cache."""
        return tuple(self._held)

    def take_changes(self) -> list[CacheChange]:
        """What changed since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes

    def take_hit(self, request_id: str) -> int:
        """The cached tokens of a request, 0 when nothing was said of it."""
        return self._hits.pop(request_id, 0)

    def _changed(self, change: CacheChange) -> None:
        self._changes.append(change)
        self._on_change()


def _checked(hashes: Iterable[int]) -> tuple[int, ...]:
    blocks = tuple(hashes)
    for block in blocks:
        if not isinstance(block, int) or not 0 <= block <= U64_MASK:
            raise ValueError(f"a block's hash is an unsigned 64-bit integer, not {block!r}")
    return blocks
