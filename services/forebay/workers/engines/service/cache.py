"""KV cache reports of a service, collected for the next batch."""

from collections.abc import Callable, Iterable

from forebay.engine_model.model import Removed, Stored
from forebay.events.base import U64_MASK
from forebay.workers.engine import CacheChange, Cleared
from forebay.workers.engines.service.request import Request


class Cache:
    """Reporter of the cache, set as `self.cache` of a service. Blocks are identified by sequence hash.

    Use it on the event loop only. Reports made while the worker is not a member are kept for its next epoch.
    """

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self._held: dict[int, None] = {}
        self._changes: list[CacheChange] = []
        self._hits: dict[str, int] = {}

    def stored(self, hashes: Iterable[int], parent: int | None = None) -> None:
        """Report that consecutive blocks entered the cache, after `parent` or at the start of a sequence."""
        blocks = _checked(hashes)
        if blocks:
            self._held.update(dict.fromkeys(blocks))
            self._changed(Stored(parent, blocks))

    def removed(self, hashes: Iterable[int]) -> None:
        """Report that blocks left the cache."""
        blocks = _checked(hashes)
        if blocks:
            for block in blocks:
                self._held.pop(block, None)
            self._changed(Removed(blocks))

    def cleared(self) -> None:
        """Report that the cache is empty."""
        self._held.clear()
        self._changed(Cleared())

    def hit(self, request: Request, tokens: int) -> None:
        """Report the number of prompt tokens found in the cache. Call it before the first token is yielded."""
        self._hits[request.request_id] = max(0, min(tokens, len(request.token_ids)))

    def held(self) -> tuple[int, ...]:
        """Return the blocks in the cache."""
        return tuple(self._held)

    def take_changes(self) -> list[CacheChange]:
        """Return the changes since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes

    def take_hit(self, request_id: str) -> int:
        """Return and remove the cached tokens of a request, 0 if none were reported."""
        return self._hits.pop(request_id, 0)

    def _changed(self, change: CacheChange) -> None:
        self._changes.append(change)
        self._on_change()


def _checked(hashes: Iterable[int]) -> tuple[int, ...]:
    blocks = tuple(hashes)
    for block in blocks:
        if not isinstance(block, int) or not 0 <= block <= U64_MASK:
            raise ValueError(f"a block hash must be an unsigned 64-bit integer, got {block!r}")
    return blocks
