"""The request that the endpoints of a service receive, and the exception with which they reject it."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from forebay.engine_model.model import Removed, Stored
from forebay.events.base import U64_MASK
from forebay.events.requests import Sampling
from forebay.workers.engine import CacheChange, Cleared


class Refused(Exception):
    """An endpoint of a service rejects a request or a command.

    The client gets the message: with status 400 for a request, as the outcome of the worker for a command.
    """


def _unknown(_: Sequence[int]) -> str:
    raise Refused("this request has no tokenizer: there is no tokenizer.json in the model directory")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One attempt at a request, as an endpoint of a service receives it.

    Attributes:
        token_ids: token ids of the prompt. If this attempt continues the response of a lost worker, the output so far
            follows.
        sampling: sampling parameters. The engine cuts the output at `max_tokens` and before `stop_token_ids`.
        sequence_hashes: hash of each full KV block of the prompt. It also depends on `lora_name` and `cache_namespace`.
        lora_name: name of the LoRA adapter to use; empty for the base model.
        cache_namespace: requests may share cached blocks only if they have the same namespace.
        priority: priority of the request; requests with higher values should run sooner.
        detokenize: returns the text of token ids. Raises Refused for a service without a tokenizer.
        stopped: set when the request is cancelled.
    """

    request_id: str
    token_ids: tuple[int, ...]
    sampling: Sampling
    sequence_hashes: tuple[int, ...] = ()
    lora_name: str = ""
    cache_namespace: str = ""
    priority: int = 0
    detokenize: Callable[[Sequence[int]], str] = field(default=_unknown, repr=False, compare=False)
    stopped: asyncio.Event = field(default_factory=asyncio.Event, repr=False, compare=False)

    @property
    def text(self) -> str:
        """The prompt as text. Raises Refused for a service without a tokenizer."""
        return self.detokenize(self.token_ids)

    @property
    def cancelled(self) -> bool:
        """Whether the request was cancelled. May be read on any thread."""
        return self.stopped.is_set()

    async def until_cancelled(self) -> None:
        await self.stopped.wait()


class Cache:
    """Receives the reports of a service about its KV cache. The engine sets it as `self.cache` of the service.

    Blocks are identified by their sequence hashes, see `Request.sequence_hashes`. Call the methods on the event loop
    only. Reports made while the worker is not a member of the fleet are part of what it announces when it joins.
    """

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self._held: dict[int, None] = {}
        self._changes: list[CacheChange] = []
        self._hits: dict[str, int] = {}

    def stored(self, hashes: Iterable[int], parent: int | None = None) -> None:
        """Report that consecutive blocks of a prompt have entered the cache.

        Args:
            parent: sequence hash of the block before the first of them; None if they begin the prompt.
        """
        blocks = _checked(hashes)
        if blocks:
            self._held.update(dict.fromkeys(blocks))
            self._changed(Stored(parent, blocks))

    def removed(self, hashes: Iterable[int]) -> None:
        """Report that the blocks with these sequence hashes have left the cache."""
        blocks = _checked(hashes)
        if blocks:
            for block in blocks:
                self._held.pop(block, None)
            self._changed(Removed(blocks))

    def cleared(self) -> None:
        """Report that all blocks have left the cache."""
        self._held.clear()
        self._changed(Cleared())

    def hit(self, request: Request, tokens: int) -> None:
        """Report how many prompt tokens of a request were found in the cache.

        A service must call this method before it yields the first token.
        """
        self._hits[request.request_id] = max(0, min(tokens, len(request.token_ids)))

    def held(self) -> tuple[int, ...]:
        """Return the sequence hashes of the blocks in the cache."""
        return tuple(self._held)

    def take_changes(self) -> list[CacheChange]:
        """Return the changes that were reported since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes

    def take_hit(self, request_id: str) -> int:
        """Return and forget how many prompt tokens of a request were cached; 0 if the service did not report it."""
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
