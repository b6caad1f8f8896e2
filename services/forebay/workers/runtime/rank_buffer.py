"""Collect the events of one rank of an engine (output, changes of the cache, load) and publish them as batches."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from forebay.engine_model.steps import Emitted, EngineLoad, Finished, FirstTokenStep, StoreChange
from forebay.events.base import pack_u32
from forebay.events.metrics import TierCosts
from forebay.events.progress import OnboardedTokens
from forebay.events.tokens import ResponseError, TokenLogprob
from forebay.events.transfer import Prefilled
from forebay.events.work import WorkItem
from forebay.workers.engine import CacheChange, Cleared, EngineBatch, Failed, NotFetched, PromptPrefilled, Vector


class _Chunk:
    """Output tokens of one request since the last batch."""

    def __init__(self, first_index: int) -> None:
        self.first_index = first_index
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.objects: list[str] = []


class RankBuffer:
    """Collects the events of one rank until `take` returns them as a batch.

    `kv_blocks_total` excludes blocks that the engine reserves for itself. If `text_only`, the engine returns text, from
    which the tokens are computed. `tier_costs` is None if the rank has no tiers. While `muted`, which ends when the
    engine reports an empty cache, changes of the cache are ignored, because the index already knows that it is empty.
    """

    def __init__(self, rank: int, kv_blocks_total: int, *, text_only: bool = False) -> None:
        self._text_only = text_only
        self.rank = rank
        self.load = self._idle = EngineLoad(0, 0, 0, kv_blocks_total)
        self.clears = 0  # number of times the engine reported an empty cache
        self.tier_costs: TierCosts | None = None
        self._store_changes: list[StoreChange] = []
        self._published_load: EngineLoad | None = None
        self.muted = False
        self._forget()

    def _forget(self) -> None:
        self._chunks: dict[tuple[str, int], _Chunk] = {}
        self._events: defaultdict[str, list[Any]] = defaultdict(list)  # by field of EngineBatch

    def reset(self, *, clears: bool = True) -> None:
        """Drop all events that were not returned yet, and report an idle rank. Changes of the shared store are kept.

        If the engine's cache is being cleared, changes of the cache are ignored until the engine reports an empty
        cache.
        """
        self._forget()
        self._published_load = None
        self.muted = clears
        self.idle()

    def idle(self) -> None:
        """Set the load to idle. An engine reports its load with each step, and an idle engine makes no step."""
        self.load = self._idle

    def report(self, running: int, waiting: int, usage: float) -> None:
        """Set the load of the rank after a step; `usage` is the share of KV blocks in use, from 0 to 1."""
        total = self._idle.kv_blocks_total
        self.load = EngineLoad(running, waiting, round(usage * total), total)

    def changed(self, changes: Sequence[CacheChange]) -> None:
        for change in changes:
            if isinstance(change, Cleared):
                self.clears += 1
                if self.muted:
                    self.muted = False
                    continue
            if not self.muted:
                self._events["cache_changes"].append(change)

    def cleared(self, clears_before: int) -> None:
        """Report the cache as empty after a command has cleared it.

        `clears_before` is `clears` when the command was sent. The engine itself would report the empty cache only with
        its next step. Until that report, its changes are ignored, because they precede the clearing. Does nothing if
        the engine has already reported the empty cache.
        """
        if self.clears == clears_before and not self.muted:
            self._events["cache_changes"].append(Cleared())
            self.muted = True

    def store_changed(self, change: StoreChange) -> None:
        self._store_changes.append(change)

    def discard_changes(self) -> None:
        """Drop collected changes of the cache, because the worker has just announced the whole cache."""
        self._events.pop("cache_changes", None)

    def add_tokens(
        self, item: WorkItem, first_index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] = ()
    ) -> None:
        """Add output tokens of a request, from position `first_index` of its output on, from 0.

        There is one log probability per token, or none if none were requested.
        """
        chunk = self._chunks.setdefault((item.request_id, item.attempt), _Chunk(first_index))
        chunk.token_ids += token_ids
        chunk.logprobs += logprobs

    def add_object(self, item: WorkItem, index: int, text: str) -> None:
        """Add the JSON value at a position of the output of a call, from 0. It counts as a token."""
        self.add_tokens(item, index, [0])
        self._chunks[item.request_id, item.attempt].objects.append(text)

    def began(self, item: WorkItem, cached_tokens: int, onboarded: tuple[OnboardedTokens, ...] = ()) -> None:
        first = FirstTokenStep(item.request_id, item.attempt, cached_tokens, onboarded=onboarded)
        self._events["first_tokens"].append(first)

    def embedded(self, item: WorkItem, packed: bytes) -> None:
        self._events["vectors"].append(Vector(item.request_id, item.attempt, packed))

    def finished(self, end: Finished) -> None:
        self._events["finished"].append(end)

    def failed(self, item: WorkItem, error: ResponseError, *, is_rejection: bool = False) -> None:
        self._events["failed"].append(Failed(item.request_id, item.attempt, error, is_rejection))

    def prefilled(
        self, item: WorkItem, prefilled: Prefilled, cached_tokens: int, onboarded: tuple[OnboardedTokens, ...] = ()
    ) -> None:
        kept = PromptPrefilled(item.request_id, item.attempt, prefilled, cached_tokens, onboarded)
        self._events["prefilled"].append(kept)

    def not_fetched(self, item: WorkItem, error: str) -> None:
        self._events["not_fetched"].append(NotFetched(item.request_id, item.attempt, error))

    def take(self) -> EngineBatch | None:
        """Return the events since the last call as one batch; None if there are none and the load is unchanged."""
        if not (self._events or self._chunks or self._store_changes) and self.load == self._published_load:
            return None
        self._published_load = self.load
        emitted = [
            Emitted(
                *request,
                chunk.first_index,
                pack_u32(chunk.token_ids),
                tuple(chunk.logprobs),
                self._text_only,
                tuple(chunk.objects),
            )
            for request, chunk in self._chunks.items()
        ]
        batch = EngineBatch(
            rank=self.rank,
            load=self.load,
            emitted=emitted,
            store_changes=self._store_changes,
            tier_costs=self.tier_costs,
            **self._events,
        )
        self._store_changes = []
        self._forget()
        return batch
