"""Events of one rank, collected between two batches from responses, KV events and statistics."""

from collections.abc import Sequence

from forebay.engine_model.model import Emitted, EngineLoad, Finished, FirstTokenStep
from forebay.events.base import pack_u32
from forebay.events.tokens import ResponseError, TokenLogprob
from forebay.events.transfer import Prefilled
from forebay.events.work import WorkItem
from forebay.workers.engine import CacheChange, Cleared, EngineBatch, Failed, NotFetched, PromptPrefilled, Vector


class _Chunk:
    """Output tokens of a request since the last batch."""

    def __init__(self, first_index: int) -> None:
        self.first_index = first_index
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []


class RankBuffer:
    """Events of one rank between two batches. `kv_blocks_total` excludes blocks that the engine reserves for itself."""

    def __init__(self, rank: int, kv_blocks_total: int) -> None:
        self.rank = rank
        self.load = self._idle = EngineLoad(0, 0, 0, kv_blocks_total)
        self.clears = 0  # number of times the engine reported an empty cache
        self._published_load: EngineLoad | None = None
        self._muted = False  # until the engine reports an empty cache; the index already knows that it is empty
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
        """Whether cache changes from the engine are currently ignored."""
        return self._muted

    def reset(self, *, clears: bool = True) -> None:
        """Drop all unpublished events. If `clears`, ignore cache changes until the engine reports an empty cache."""
        self._forget()
        self._published_load = None
        self._muted = clears
        self.idle()

    def idle(self) -> None:
        """Report an idle rank at once, because the engine reports it only with its next step."""
        self.load = self._idle

    def report(self, running: int, waiting: int, usage: float) -> None:
        """Set the load after a step. `usage` is the share of KV blocks in use, from 0 to 1."""
        total = self._idle.kv_blocks_total
        self.load = EngineLoad(running, waiting, round(usage * total), total)

    def changed(self, changes: Sequence[CacheChange]) -> None:
        """Add changes of the cache, in order."""
        for change in changes:
            if isinstance(change, Cleared):
                self.clears += 1
                if self._muted:
                    self._muted = False
                    continue
            if not self._muted:
                self._changes.append(change)

    def cleared(self, clears_before: int) -> None:
        """Report a cache that was cleared by command as empty, and ignore the changes before that.

        The engine reports it only with its next step.

        Args:
            clears_before: value of `clears` when the command was sent.
        """
        if self.clears == clears_before and not self._muted:
            self._changes.append(Cleared())
            self._muted = True

    def discard_changes(self) -> None:
        """Drop pending cache changes, because the whole cache content was just announced."""
        self._changes.clear()

    def add_tokens(
        self, item: WorkItem, first_index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] = ()
    ) -> None:
        """Add output tokens; `first_index` is the index of the first one in the request's output."""
        chunk = self._chunks.setdefault((item.request_id, item.attempt), _Chunk(first_index))
        chunk.token_ids += token_ids
        chunk.logprobs += logprobs

    def began(self, item: WorkItem, cached_tokens: int) -> None:
        """Report that the prompt was computed."""
        self._first_tokens.append(FirstTokenStep(item.request_id, item.attempt, cached_tokens))

    def embedded(self, item: WorkItem, packed: bytes) -> None:
        """Add the prompt's embedding, as packed f32."""
        self._vectors.append(Vector(item.request_id, item.attempt, packed))

    def finished(self, end: Finished) -> None:
        """Report the end of a response."""
        self._finished.append(end)

    def failed(self, item: WorkItem, error: ResponseError) -> None:
        """Report a failed request."""
        self._failed.append(Failed(item.request_id, item.attempt, error))

    def prefilled(self, item: WorkItem, prefilled: Prefilled, cached_tokens: int) -> None:
        """Report a prompt whose KV is computed and kept for another worker."""
        self._prefilled.append(PromptPrefilled(item.request_id, item.attempt, prefilled, cached_tokens))

    def not_fetched(self, item: WorkItem, error: str) -> None:
        """Report that the prompt's KV could not be fetched."""
        self._not_fetched.append(NotFetched(item.request_id, item.attempt, error))

    def take(self) -> EngineBatch | None:
        """Return the events since the last call as one batch; None if there are none."""
        events = (self._changes, self._chunks, self._vectors, self._first_tokens, self._finished, self._failed)
        if not any((*events, self._prefilled, self._not_fetched)) and self.load == self._published_load:
            return None
        self._published_load = self.load
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
