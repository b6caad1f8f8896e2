"""The seam to engines: what a worker asks of one, and what it gets back. An engine never sees the log."""

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import msgspec
from prometheus_client.registry import Collector

from forebay.engine_model.model import Emitted, EngineLoad, Finished, FirstTokenStep, Removed, Stored
from forebay.events.control import Command
from forebay.events.fleet import WorkerSpec
from forebay.events.media import Encoded
from forebay.events.tokens import ResponseError
from forebay.events.transfer import Prefilled
from forebay.events.work import WorkItem
from forebay.workers.kv_transfer.api import Stats


class Failed(msgspec.Struct, frozen=True):
    """A request ended without (the rest of) its answer; refused ones end so too."""

    request_id: str
    attempt: int
    error: ResponseError


class EngineError(Exception):
    """The engine cannot start, or is broken. The text says what is wrong and what to do, fit for an operator."""


class EngineRefused(Exception):
    """The engine does not do what a command asks; the text says why, fit for an operator."""


class Cleared(msgspec.Struct, frozen=True, gc=False):
    """Every tier of the rank is empty."""


CacheChange = Stored | Removed | Cleared


class Vector(msgspec.Struct, frozen=True):
    """The embedding of a whole prompt, packed little-endian f32; its request is `Finished` in the same batch."""

    request_id: str
    attempt: int
    packed: bytes


class MediaEncoded(msgspec.Struct, frozen=True):
    """The images and videos of a request are encoded: its part here is done."""

    request_id: str
    attempt: int
    encoded: Encoded


class PromptPrefilled(msgspec.Struct, frozen=True):
    """The prompt of a request is computed and its KV kept for another worker: its part here is done."""

    request_id: str
    attempt: int
    prefilled: Prefilled
    cached_tokens: int = 0


class NotFetched(msgspec.Struct, frozen=True):
    """The KV of a request's prompt could not be fetched; nothing of it runs here. `error` is fit for the log."""

    request_id: str
    attempt: int
    error: str


class EngineBatch(msgspec.Struct, frozen=True, kw_only=True):
    """What happened on one rank since its last batch. Cache changes are in order; a request has one chunk."""

    rank: int
    load: EngineLoad
    cache_changes: Sequence[CacheChange] = ()
    emitted: Sequence[Emitted] = ()
    vectors: Sequence[Vector] = ()
    first_tokens: Sequence[FirstTokenStep] = ()
    finished: Sequence[Finished] = ()
    failed: Sequence[Failed] = ()
    encoded: Sequence[MediaEncoded] = ()
    prefilled: Sequence[PromptPrefilled] = ()
    not_fetched: Sequence[NotFetched] = ()


Publish = Callable[[EngineBatch], None]


class Engine(Protocol):
    """An engine instance with one or more ranks. Everything is called on the event loop of its worker."""

    async def start(self, spec: WorkerSpec) -> WorkerSpec:
        """Load the model and warm up; returns when requests can be served.

        What comes back is `spec` as it turned out: sizes, tasks and adapters are the engine's to say.
        Raises EngineError.
        """

    async def run(self, publish: Publish) -> None:
        """Serve until cancelled, handing over a batch whenever there is something to say.

        An exception from here (EngineError, if it knows why) means that the engine is broken; the worker goes down
        with it.
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

    async def command(self, command: Command) -> tuple[str, ...]:
        """Do what an operator asks; the names of the adapters that are loaded then. Raises EngineRefused.

        What changes in the cache comes as batches, like every other change.
        """

    async def check(self) -> None:
        """Return soon if the engine is alive; asked every two seconds. Raises EngineError if it is not."""

    def collectors(self) -> Sequence[Collector]:
        """The engine's own Prometheus metrics, shown beside the worker's; asked for at any time, each time anew."""

    def reset(self) -> None:
        """Drop every request and the cache. Nothing from before is published after this returns."""


@runtime_checkable
class KvEngine(Protocol):
    """An engine that computes prompts for others, or answers with what others computed.

    Its `submit` also takes items of the stages `prefill`, answered by `PromptPrefilled` or `Failed`, and `decode`,
    whose KV it fetches first: `NotFetched` when that cannot be had. What it keeps for others it keeps until that is
    fetched, released, or its lease has ended. `start` says how its blocks lie in `WorkerSpec.kv_layout`.
    """

    def release(self, request_id: str) -> None:
        """Nobody will fetch what is kept for this request; nothing may be. `Engine.cancel` does this, too."""

    def drop(self, prefilled: Prefilled) -> None:
        """Nobody here will fetch what another keeps: tell it, if that can be told; else its lease will end."""

    def kept(self) -> int:
        """Requests whose KV is kept for others."""


@runtime_checkable
class KvMover(Protocol):
    """An engine that moves KV by the project's own transport, and counts what came of it."""

    def kv_stats(self) -> Stats:
        """Of all KV that travelled since the start, over every epoch."""
