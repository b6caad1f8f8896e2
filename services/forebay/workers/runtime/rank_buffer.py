"""What one rank did since its last batch, gathered from its engine's answers, KV events and statistics."""

from collections.abc import Sequence

from forebay.engine_model.model import Emitted, EngineLoad, Finished, FirstTokenStep
from forebay.events.base import pack_u32
from forebay.events.tokens import ResponseError, TokenLogprob
from forebay.events.transfer import Prefilled
from forebay.events.work import WorkItem
from forebay.workers.engine import CacheChange, Cleared, EngineBatch, Failed, NotFetched, PromptPrefilled, Vector


class _Chunk:
    """A request's tokens since the last batch."""

    def __init__(self, first_index: int) -> None:
        self.first_index = first_index
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []


class RankBuffer:
    """One rank between two batches. `kv_blocks_total` is without what the engine keeps to itself."""

    def __init__(self, rank: int, kv_blocks_total: int) -> None:
        self.rank = rank
        self.load = self._idle = EngineLoad(0, 0, 0, kv_blocks_total)
        self.clears = 0  # how often the engine said that its cache is empty
        self._told: EngineLoad | None = None
        self._muted = False  # until the engine says that its cache is empty, which the index knows by then
        self._forget()

    def _forget(self) -> None:
        self._changes: list[CacheChange] = []
        self._chunks: dict[tuple[str, int], _Chunk] = {}
        self._first_tokens: list[FirstTokenStep] = []
        self._finished: list[Finished] = []
        self._failed: list[Failed] = []
        self._vectors: list[Vector] = []
        self._prefilled: list[PromptPrefilled] = []
        self._not_fetched: list[NotFetched] = []

    @property
    def muted(self) -> bool:
        """Whether the engine's word on its cache is not worth telling."""
        return self._muted

    def reset(self, *, clears: bool = True) -> None:
        """Drop all that was not told; of a cache that the engine `clears` nothing is told until it is empty."""
        self._forget()
        self._told = None
        self._muted = clears
        self.idle()

    def idle(self) -> None:
        """No request is under way; the engine says so only with its next step."""
        self.load = self._idle

    def report(self, running: int, waiting: int, usage: float) -> None:
        """The statistics of a step; `usage` is the share of KV blocks in use."""
        total = self._idle.kv_blocks_total
        self.load = EngineLoad(running, waiting, round(usage * total), total)

    def changed(self, changes: Sequence[CacheChange]) -> None:
        """Changes of the cache, in order."""
        for change in changes:
            if isinstance(change, Cleared):
                self.clears += 1
                if self._muted:
                    self._muted = False
                    continue
            if not self._muted:
                self._changes.append(change)

    def cleared(self, clears_before: int) -> None:
        """The engine's cache was emptied on our order, given when `clears` stood at `clears_before`.

        The engine says so only with its next step. The index is told at once, and nothing from before after that.
        """
        if self.clears == clears_before and not self._muted:
            self._changes.append(Cleared())
            self._muted = True

    def held_told(self) -> None:
        """What the rank holds was told as a whole."""
        self._changes.clear()

    def said(
        self, item: WorkItem, first_index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] = ()
    ) -> None:
        """New output tokens; `first_index` counts the request's output tokens from 0."""
        chunk = self._chunks.setdefault((item.request_id, item.attempt), _Chunk(first_index))
        chunk.token_ids += token_ids
        chunk.logprobs += logprobs

    def began(self, item: WorkItem, cached_tokens: int) -> None:
        """The prompt was computed."""
        self._first_tokens.append(FirstTokenStep(item.request_id, item.attempt, cached_tokens))

    def embedded(self, item: WorkItem, packed: bytes) -> None:
        """The prompt's vector, packed f32."""
        self._vectors.append(Vector(item.request_id, item.attempt, packed))

    def finished(self, end: Finished) -> None:
        """A request got its last token."""
        self._finished.append(end)

    def failed(self, item: WorkItem, error: ResponseError) -> None:
        """A request has no, or no whole, answer."""
        self._failed.append(Failed(item.request_id, item.attempt, error))

    def prefilled(self, item: WorkItem, prefilled: Prefilled, cached_tokens: int) -> None:
        """The prompt is computed, and its KV kept for another worker."""
        self._prefilled.append(PromptPrefilled(item.request_id, item.attempt, prefilled, cached_tokens))

    def not_fetched(self, item: WorkItem, error: str) -> None:
        """The KV of the prompt could not be had from where it is kept."""
        self._not_fetched.append(NotFetched(item.request_id, item.attempt, error))

    def take(self) -> EngineBatch | None:
        """All of it, once; None when there is nothing to say."""
        said = (self._changes, self._chunks, self._vectors, self._first_tokens, self._finished, self._failed)
        if not any((*said, self._prefilled, self._not_fetched)) and self.load == self._told:
            return None
        self._told = self.load
        batch = EngineBatch(
            rank=self.rank,
            load=self.load,
            cache_changes=self._changes,
            emitted=[
                Emitted(request_id, attempt, chunk.first_index, pack_u32(chunk.token_ids), tuple(chunk.logprobs))
                for (request_id, attempt), chunk in self._chunks.items()
            ],
            vectors=self._vectors,
            first_tokens=self._first_tokens,
            finished=self._finished,
            failed=self._failed,
            prefilled=self._prefilled,
            not_fetched=self._not_fetched,
        )
        self._forget()
        return batch
