"""Check requests and fetch their embeddings before the engine gets them.

If a request needs KV transfers, or contains images or videos, and the engine supports none of them, the request fails
with a specific error. If an encode worker has computed the embeddings of its images or videos, they are fetched before
the engine gets the request. If this fetch fails, the owner lets the media be encoded again.

A decode worker ignores images, videos and embeddings, because the KV that its engine fetches already covers them.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from forebay.events.base import U32_BYTES
from forebay.events.transfer import Prefilled
from forebay.events.work import WorkItem
from forebay.workers.engine import AttemptFailed, Engine, EngineError, KvEngine
from forebay.workers.kv_transfer.embeddings import Array, EmbeddingTransfer
from forebay.workers.kv_transfer.nixl_agent import TransferError, agent_name

logger = logging.getLogger(__name__)

MakeReader = Callable[[str], EmbeddingTransfer]
OnFailed = Callable[[WorkItem, AttemptFailed | TransferError], None]


@runtime_checkable
class MediaEngine(Protocol):
    """Engine that accepts images and videos, either as bytes (`Engine.submit`) or as embeddings."""

    def submit_embedded(self, item: WorkItem, embeddings: Array) -> None:
        """Queue a request with embeddings: one row per placeholder token, in the order of `item.media`."""


class MediaFeed:
    """Passes requests to the engine of one worker, after it has fetched the embeddings that they need.

    For a request that does not reach the engine, `on_failed` gets an error for the client, or a TransferError if its
    embeddings could not be fetched.
    """

    def __init__(
        self, engine: Engine, worker_id: str, on_failed: OnFailed, make_reader: MakeReader = EmbeddingTransfer
    ) -> None:
        self._engine = engine
        self._kv = engine if isinstance(engine, KvEngine) else None
        self._worker_id = worker_id
        self._on_failed = on_failed
        self._make_reader = make_reader
        self._reader: EmbeddingTransfer | None = None
        self._fetching: dict[str, asyncio.Task[None]] = {}
        self.fetched = 0
        self.not_fetched = 0

    def submit(self, item: WorkItem) -> None:
        """Pass a request to the engine, after its embeddings were fetched, or report that the engine cannot run it."""
        try:
            self._check(item)
        except AttemptFailed as error:
            self._on_failed(item, error)
            return
        if item.media and item.encoded is not None and item.stage not in ("encode", "decode"):
            self._fetching[item.request_id] = asyncio.get_running_loop().create_task(self._fetch(item))
        else:
            self._engine.submit(item)

    def cancel(self, request_id: str) -> None:
        task = self._fetching.pop(request_id, None)
        if task is None:
            self._engine.cancel(request_id)
        else:
            task.cancel()

    def release(self, request_id: str) -> None:
        if self._kv is not None:
            self._kv.release(request_id)

    def drop(self, prefilled: Prefilled) -> None:
        if self._kv is not None:
            self._kv.drop(prefilled)

    def kept(self) -> int:
        return 0 if self._kv is None else self._kv.kept()

    def reset(self) -> None:
        """Cancel every fetch of embeddings, and drop every request of the engine; see `Engine.reset`."""
        for task in self._fetching.values():
            task.cancel()
        self._fetching.clear()
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        self._engine.reset()

    def _check(self, item: WorkItem) -> None:
        """Raise AttemptFailed for an item that this engine cannot run."""
        name = type(self._engine).__name__
        if item.stage in ("prefill", "decode") and self._kv is None:
            message = f"the engine {name} does not support prefill and decode stages"
            raise AttemptFailed(501, "stage_not_supported", message)
        if not item.media or item.stage == "encode":
            return
        if not isinstance(self._engine, MediaEngine):
            raise AttemptFailed(501, "media_not_supported", f"the engine {name} does not support images or videos")
        end = len(item.token_ids) // U32_BYTES
        for number, one in enumerate(reversed(item.media)):
            if one.first_token + one.tokens > end:
                which = f"{one.kind} {len(item.media) - number}"
                message = f"placeholders of {which} lie outside the prompt or overlap others"
                raise AttemptFailed(400, "invalid_request", message)
            end = one.first_token + bool(one.replaced)  # two images of Gemma 3 may share a token of newlines

    async def _fetch(self, item: WorkItem) -> None:
        assert item.encoded is not None
        assert isinstance(self._engine, MediaEngine)
        if self._reader is None:
            self._reader = self._make_reader(agent_name(f"{self._worker_id}/reader"))
        try:
            embeddings = await self._reader.read(item.encoded)
            if len(embeddings) != (rows := sum(one.tokens for one in item.media)):
                raise TransferError(
                    f"fetched {len(embeddings)} rows of embeddings, expected {rows}, one per placeholder"
                )
            self._engine.submit_embedded(item, embeddings)
        except Exception as error:
            # Nothing awaits this task, so an unreported failure would leave the request without an end.
            self.not_fetched += 1
            known = isinstance(error, TransferError | EngineError)
            logger.warning(
                "%s: cannot fetch embeddings: %s", item.request_id, error, exc_info=not known, extra=item.log_extra
            )
            del self._fetching[item.request_id]
            self._on_failed(item, TransferError(str(error) or type(error).__name__))
            return
        self.fetched += 1
        del self._fetching[item.request_id]
