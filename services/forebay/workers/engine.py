"""Interface between a worker and its engine. Engines never see the log."""

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
    """Failed request: it ended without a response or with a partial one. Also reported for rejected requests."""

    request_id: str
    attempt: int
    error: ResponseError


class EngineError(Exception):
    """The engine cannot start, or it broke. The message tells an operator what is wrong and what to do."""


class EngineRefused(Exception):
    """The engine does not support or cannot run a command. The message tells an operator why."""


class Cleared(msgspec.Struct, frozen=True, gc=False):
    """Cache change: every tier of the rank is empty."""


CacheChange = Stored | Removed | Cleared


class Vector(msgspec.Struct, frozen=True):
    """Embedding of a whole prompt, as packed little-endian f32. Its request is `Finished` in the same batch."""

    request_id: str
    attempt: int
    packed: bytes


class MediaEncoded(msgspec.Struct, frozen=True):
    """Encode stage done: the images and videos of a request are encoded."""

    request_id: str
    attempt: int
    encoded: Encoded


class PromptPrefilled(msgspec.Struct, frozen=True):
    """Prefill stage done: the prompt's KV is computed and kept for another worker."""

    request_id: str
    attempt: int
    prefilled: Prefilled
    cached_tokens: int = 0


class NotFetched(msgspec.Struct, frozen=True):
    """Failed KV fetch: the request does not run on this worker. `error` is a message for the log."""

    request_id: str
    attempt: int
    error: str


class EngineBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Events of one rank since its previous batch.

    Cache changes are in order. Each request has at most one chunk of output tokens.
    """

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
    """Engine instance with one or more ranks. All methods are called on the event loop of its worker."""

    async def start(self, spec: WorkerSpec) -> WorkerSpec:
        """Load the model and warm up. Return once requests can be served.

        Returns:
            `spec` with the engine's actual sizes, tasks and adapters.

        Raises:
            EngineError: the engine cannot start.
        """

    async def run(self, publish: Publish) -> None:
        """Serve until cancelled. Call `publish` whenever there are events.

        Any exception, preferably an EngineError with the cause, means that the engine is broken. It stops the worker.
        """

    async def stop(self) -> None:
        """Release the resources that `start` acquired."""

    def held(self, rank: int) -> Sequence[int]:
        """Return the blocks in a rank's device cache, or nothing if the engine does not know.

        The worker announces them when a new epoch begins. Later re-announcements are derived from batches, which must
        therefore contain every cache change once, in order.
        """

    def submit(self, item: WorkItem) -> None:
        """Queue a request whose id is not in flight. Rejections are reported as `Failed` in a batch.

        Engines that can order their own queue use `item.priority`.
        """

    def cancel(self, request_id: str) -> None:
        """Drop a request, if it is in flight, and free its blocks. The next batch may still contain it."""

    async def command(self, command: Command) -> tuple[str, ...]:
        """Run an operator's command and return the names of the adapters loaded afterwards. Raises EngineRefused.

        Changes of the cache are reported in batches, like all others.
        """

    async def check(self) -> None:
        """Return promptly if the engine is alive; called every two seconds. Raises EngineError if it is not."""

    def collectors(self) -> Sequence[Collector]:
        """Return the collectors of the engine's own Prometheus metrics. Called for every scrape of the worker."""

    def reset(self) -> None:
        """Drop every request and the cache. Publish no earlier event after this returns."""


@runtime_checkable
class KvEngine(Protocol):
    """Engine that computes prompts for other workers, or decodes from KV that other workers computed.

    Its `submit` also accepts items of two more stages. `prefill` ends with `PromptPrefilled` or `Failed`. `decode`
    first fetches the KV, and ends with `NotFetched` if that fails. KV kept for other workers is freed when it is
    fetched or released, or when its lease ends. `start` describes the block layout in `WorkerSpec.kv_layout`.
    """

    def release(self, request_id: str) -> None:
        """Free the KV kept for this request, if any, because no worker will fetch it. `Engine.cancel` does the same."""

    def drop(self, prefilled: Prefilled) -> None:
        """Notify the holder of `prefilled` that this worker will not fetch it, if possible.

        Otherwise its lease ends.
        """

    def kept(self) -> int:
        """Return the number of requests whose KV is kept for other workers."""


@runtime_checkable
class KvMover(Protocol):
    """Engine that moves KV through forebay's own transport and counts the transfers."""

    def kv_stats(self) -> Stats:
        """Return the transfer statistics since the start, over all epochs."""
