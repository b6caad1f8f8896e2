"""What stands between the log and an engine for requests that it may not be able to take, or not yet.

An engine that takes no images or videos, or whose KV cannot be had by others, refuses such requests by name, and never
answers as if nothing were asked. Where an encode worker made the embeddings they are fetched first; the engine gets the
request once they are here. What cannot be fetched goes back to the owner, which has it encoded anew. KV is the engine's
to fetch, and comes with what the media were: neither they nor their embeddings are looked at then.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from forebay.events.base import U32_BYTES
from forebay.events.tokens import ResponseError
from forebay.events.transfer import Prefilled
from forebay.events.work import WorkItem
from forebay.workers.engine import Engine, EngineError, KvEngine
from forebay.workers.kv_transfer.embeddings import Reader
from forebay.workers.kv_transfer.nixl_agent import TransferError, agent_name

if TYPE_CHECKING:
    from forebay.workers.kv_transfer.embeddings import Array

logger = logging.getLogger(__name__)

MakeReader = Callable[[str], Reader]
OnFailed = Callable[[WorkItem, ResponseError | TransferError], None]


@runtime_checkable
class MediaEngine(Protocol):
    """An engine that takes images and videos: their bytes by `Engine.submit`, or their embeddings."""

    def submit_embedded(self, item: WorkItem, embeddings: "Array") -> None:
        """As `submit`, with the embeddings of all of `item.media`, one row a placeholder, in their order."""


class MediaFeed:
    """Gives requests to the engine of one worker, those with media when they are whole.

    `on_failed` is told of those that the engine never gets: for good, or because embeddings cannot be fetched.
    """

    def __init__(self, engine: Engine, worker_id: str, on_failed: OnFailed, make_reader: MakeReader = Reader) -> None:
        self._engine = engine
        self._kv = engine if isinstance(engine, KvEngine) else None
        self._worker_id = worker_id
        self._on_failed = on_failed
        self._make_reader = make_reader
        self._reader: Reader | None = None
        self._fetching: dict[str, asyncio.Task[None]] = {}
        self.fetched = 0
        self.not_fetched = 0

    def submit(self, item: WorkItem) -> None:
        """As of an engine."""
        if item.stage in ("prefill", "decode") and self._kv is None:
            name = type(self._engine).__name__
            message = f"this worker's engine ({name}) neither computes prompts for others nor fetches their KV"
            self._on_failed(item, ResponseError(status=501, code="stage_not_supported", message=message))
        elif not item.media or item.stage == "encode":
            self._engine.submit(item)
        elif (problem := _problem(self._engine, item)) is not None:
            self._on_failed(item, problem)
        elif item.encoded is None or item.stage == "decode":
            self._engine.submit(item)
        else:
            task = asyncio.get_running_loop().create_task(self._fetch(item))
            self._fetching[item.request_id] = task

    def cancel(self, request_id: str) -> None:
        """As of an engine."""
        task = self._fetching.pop(request_id, None)
        if task is None:
            self._engine.cancel(request_id)
        else:
            task.cancel()

    def release(self, request_id: str) -> None:
        """As of an engine, if it is one that keeps KV for others."""
        if self._kv is not None:
            self._kv.release(request_id)

    def drop(self, prefilled: Prefilled) -> None:
        """As of an engine, if it is one that fetches KV of others."""
        if self._kv is not None:
            self._kv.drop(prefilled)

    def kept(self) -> int:
        """As of an engine: none, if it keeps none."""
        return 0 if self._kv is None else self._kv.kept()

    def reset(self) -> None:
        """As of an engine: nothing from before is fetched any more."""
        for task in self._fetching.values():
            task.cancel()
        self._fetching.clear()
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        self._engine.reset()

    async def _fetch(self, item: WorkItem) -> None:
        assert item.encoded is not None
        assert isinstance(self._engine, MediaEngine)
        if self._reader is None:
            self._reader = self._make_reader(agent_name(f"{self._worker_id}/reader", item.worker_epoch))
        try:
            embeddings = await self._reader.read(item.encoded)
            if len(embeddings) != (rows := sum(one.tokens for one in item.media)):
                raise TransferError(f"{len(embeddings)} rows of embeddings came for {rows} placeholders")
            self._engine.submit_embedded(item, embeddings)
        except Exception as error:
            # Whatever it is: nobody awaits this task, so a request whose end it does not tell would never end.
            self.not_fetched += 1
            known = isinstance(error, TransferError | EngineError)
            logger.warning("%s: the engine does not get embeddings: %s", item.request_id, error, exc_info=not known)
            del self._fetching[item.request_id]
            self._on_failed(item, TransferError(str(error) or type(error).__name__))
            return
        self.fetched += 1
        del self._fetching[item.request_id]


def _problem(engine: Engine, item: WorkItem) -> ResponseError | None:
    """Why this engine cannot take an item with media."""
    if not isinstance(engine, MediaEngine):
        name = type(engine).__name__
        message = f"this worker's engine ({name}) takes no images or videos"
        return ResponseError(status=501, code="media_not_supported", message=message)
    end = len(item.token_ids) // U32_BYTES
    for number, one in enumerate(reversed(item.media)):
        if one.first_token + one.tokens > end:
            message = f"placeholders of {one.kind} {len(item.media) - number} do not lie in the prompt, or overlap"
            return ResponseError(status=400, code="invalid_request", message=message)
        end = one.first_token
    return None
