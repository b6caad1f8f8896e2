"""Interface between a worker and its engine. Engines have no access to the log."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import msgspec

from forebay.engine_model.steps import Emitted, EngineLoad, Finished, FirstTokenStep, Removed, StoreChange, Stored
from forebay.events.control import Command
from forebay.events.fleet import WorkerSpec
from forebay.events.media import Encoded
from forebay.events.metrics import TierCosts
from forebay.events.progress import OnboardedTokens
from forebay.events.tokens import ResponseError
from forebay.events.transfer import Prefilled
from forebay.events.work import WorkItem

if TYPE_CHECKING:
    from prometheus_client.registry import Collector


class Failed(msgspec.Struct, frozen=True):
    """Event: a request has failed or was rejected by the engine, so its response is missing or incomplete.

    If `is_rejection`, another worker may take the request, because the attempt has no output and the request is not at
    fault.
    """

    request_id: str
    attempt: int
    error: ResponseError
    is_rejection: bool = False


TEXT_CHARS_MAX = 500


class EngineError(Exception):
    """The engine cannot start, or it has failed. The message tells an operator what is wrong and what to do."""


class PackageMissing(EngineError):
    """A package that the engine needs is not installed. The message tells how to install it."""


class EngineRefused(Exception):
    """The engine does not support a command to its worker, such as loading an adapter, or cannot execute it.

    The message tells an operator why.
    """


class AttemptFailed(Exception):
    """An attempt at a request ends with an error. If `may_move`, it is a rejection as of `Failed`."""

    def __init__(self, status: int, code: str, message: str, *, may_move: bool = False, retry_after_s: int = 0) -> None:
        super().__init__(message)
        self.error = ResponseError(status=status, code=code, message=message, retry_after_s=retry_after_s)
        self.may_move = may_move


def one_line(error: BaseException) -> str:
    """Return the message of an exception as one line of at most `TEXT_CHARS_MAX` characters."""
    return clipped(str(error)) or type(error).__name__


def clipped(text: str) -> str:
    """Return a text as one line of at most `TEXT_CHARS_MAX` characters."""
    return " ".join(text.split())[:TEXT_CHARS_MAX]


class Cleared(msgspec.Struct, frozen=True, gc=False):
    """Change of the cache: it is empty, in every tier of the rank."""


CacheChange = Stored | Removed | Cleared


class Vector(msgspec.Struct, frozen=True):
    """Event: the embedding of a prompt is computed, packed as little-endian float32, and finished."""

    request_id: str
    attempt: int
    packed: bytes


class MediaEncoded(msgspec.Struct, frozen=True):
    """Event: the images and videos of a request are encoded, which ends the encode stage.

    The embeddings of `cached` of them were in a cache.
    """

    request_id: str
    attempt: int
    encoded: Encoded
    cached: int = 0


class PromptPrefilled(msgspec.Struct, frozen=True):
    """Event: the KV of a prompt is computed and kept for another worker, which ends the prefill stage."""

    request_id: str
    attempt: int
    prefilled: Prefilled
    cached_tokens: int = 0
    onboarded: tuple[OnboardedTokens, ...] = ()


class NotFetched(msgspec.Struct, frozen=True):
    """Event: the KV of a request could not be fetched, so the request does not run on this worker."""

    request_id: str
    attempt: int
    error: str


class EngineBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Events of one rank since its previous batch.

    Changes of the cache and of the store are in order. A request has at most one element in `emitted`, with all its new
    output tokens.

    Attributes:
        load: load of the rank after these events.
        cache_changes: blocks that tiers of the rank have stored and removed.
        store_changes: blocks that the rank has added to the shared store of the worker or removed from it.
        tier_costs: durations that the rank has measured so far; None if it has no tiers.
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
    store_changes: Sequence[StoreChange] = ()
    tier_costs: TierCosts | None = None


Publish = Callable[[EngineBatch], None]


class Engine(Protocol):
    """One instance of an engine, with one or more ranks. The worker calls all methods on its event loop."""

    async def start(self, spec: WorkerSpec) -> WorkerSpec:
        """Load the model and run a first prompt. Return when the engine can serve requests.

        The result is `spec` with the actual sizes, tasks and adapters. Raises EngineError if the engine cannot start.
        """

    async def run(self, publish: Publish) -> None:
        """Serve requests until cancelled, and call `publish` whenever there are events.

        An exception means that the engine is broken, and stops the worker. It should be an EngineError with the cause.
        """

    async def stop(self) -> None:
        """Release the resources that `start` acquired."""

    def held(self, rank: int) -> Sequence[int]:
        """Return the sequence hashes of a rank's blocks in device memory; nothing if the engine does not know them.

        The worker announces these blocks when a new worker epoch begins. Later re-announcements are derived from the
        batches, so the batches must contain every change of the cache once, in order.
        """

    def submit(self, item: WorkItem) -> None:
        """Queue a request. The worker ensures that no request with the same id is in flight.

        If the engine rejects the request, a batch contains `Failed` for it. An engine that can order its own queue uses
        `item.priority`.
        """

    def cancel(self, request_id: str) -> None:
        """Cancel a request, if it is in flight, and free its blocks. The next batch may still contain its events."""

    async def command(self, command: Command) -> tuple[str, ...]:
        """Execute a command of an operator, and return the names of the adapters that are loaded after it.

        If the command changes the cache, the changes are reported in batches, as always. Raises EngineRefused if the
        engine does not support the command, or cannot execute it now.
        """

    async def check(self) -> None:
        """Raise EngineError if the engine is broken. The worker calls this every two seconds, so return promptly."""

    def collectors(self) -> "Sequence[Collector]":
        """Return Prometheus collectors of the engine's own metrics. Called for every scrape of the worker."""

    def reset(self) -> None:
        """Drop every request and clear the cache. After this call, publish no events from before the call."""


@runtime_checkable
class KvEngine(Protocol):
    """Engine that computes prompts for other workers, or decodes from KV that other workers computed.

    Its `submit` also accepts items of the stages `prefill` and `decode`. An item of stage `prefill` ends with
    `PromptPrefilled` or `Failed`. An item of stage `decode` first fetches KV, and ends with `NotFetched` if that fails.
    The engine frees kept KV when another worker has fetched it, when it is released, or when its lease ends. `start`
    describes the KV layout in `WorkerSpec.kv_layout`.
    """

    def release(self, request_id: str) -> None:
        """Free the KV that is kept for a request, because no worker will fetch it. `Engine.cancel` frees it too."""

    def drop(self, prefilled: Prefilled) -> None:
        """Notify the prefill worker, if possible, that this worker will not fetch its KV.

        Without the notification, the prefill worker frees the KV when the lease ends.
        """

    def kept(self) -> int:
        """Return the number of requests whose KV this engine keeps for other workers."""


@runtime_checkable
class TierEngine(Protocol):
    """Engine whose ranks have KV in host memory or on disk, which may survive the worker's epoch, or its process."""

    def held_in_tiers(self, rank: int) -> Sequence[CacheChange]:
        """Return the blocks in host memory and on the disk of a rank.

        The worker announces these blocks after those of `Engine.held`, when a new worker epoch begins. Later changes
        are in `EngineBatch.cache_changes`.
        """


@runtime_checkable
class StoreEngine(Protocol):
    """Engine that reads and writes a shared store, whose name `start` sets in `WorkerSpec.kv_store`."""

    def stored(self) -> Sequence[int]:
        """Return the sequence hashes of all blocks that the shared store has, as far as the engine knows.

        The worker announces these blocks when a new worker epoch begins. Later changes are in
        `EngineBatch.store_changes`.
        """
