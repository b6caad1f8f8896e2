"""The seam to engines: what a worker asks of one, and what it gets back. An engine never sees the log."""

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from forebay.core.engine_model import CacheChange, Emitted, Finished, FirstToken, Load
from forebay.events.tokens import AnswerError
from forebay.events.work import WorkItem


class Failed(msgspec.Struct, frozen=True):
    """A request ended without (the rest of) its answer; refused ones end so too."""

    request_id: str
    attempt: int
    error: AnswerError


class EngineBatch(msgspec.Struct, frozen=True, kw_only=True):
    """What happened on one rank since its last batch. Cache changes are in order; a request has one chunk."""

    rank: int
    load: Load
    cache_changes: Sequence[CacheChange] = ()
    emitted: Sequence[Emitted] = ()
    first_tokens: Sequence[FirstToken] = ()
    finished: Sequence[Finished] = ()
    failed: Sequence[Failed] = ()


Publish = Callable[[EngineBatch], None]


class Engine(Protocol):
    """An engine instance with one or more ranks. Everything is called on the event loop of its worker."""

    async def start(self) -> None:
        """Load the model; returns when requests can be served."""

    async def run(self, publish: Publish) -> None:
        """Serve until cancelled, handing over a batch whenever there is something to say.

        An exception from here means that the engine is broken; the worker goes down with it.
        """

    async def stop(self) -> None:
        """Free what `start` took."""

    def held(self, rank: int) -> Sequence[int]:
        """The blocks in a rank's device cache, announced when a new epoch begins; none when it cannot tell.

        What is asked for later is told from the batches: they must have every change, once, in order.
        """

    def submit(self, item: WorkItem) -> None:
        """Queue a request whose id is not under way. Refusals come as `Failed` in a batch.

        `item.priority` is for engines that can order their own queue by it.
        """

    def cancel(self, request_id: str) -> None:
        """Drop a request, if it is under way, and free its blocks. The next batch may still name it."""

    def reset(self) -> None:
        """Drop every request and the cache. Nothing from before is published after this returns."""
