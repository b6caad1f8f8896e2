"""Outputs of a mock engine besides tokens: logprobs and embeddings, derived from hashes."""

from array import array
from collections.abc import Sequence
from math import sqrt

import msgspec
from xxhash import xxh3_64_digest, xxh3_64_intdigest

from forebay.engine_model.model import Emitted, Finished
from forebay.events.base import unpack_u32
from forebay.events.requests import Task
from forebay.events.tokens import TokenLogprob, TopLogprob
from forebay.events.work import WorkItem
from forebay.workers.engine import EngineBatch, Vector

TASKS: tuple[Task, ...] = ("generate", "embed")
DIMENSIONS = 64
HALF = 1 << 63


class ExtraOutputs:
    """Extra outputs of the requests of one rank; `vocabulary` has the possible tokens."""

    def __init__(self, vocabulary: Sequence[int]) -> None:
        self._vocabulary = vocabulary
        self._items: dict[str, WorkItem] = {}

    def begin(self, item: WorkItem) -> None:
        """Add a request."""
        if item.task == "embed" or item.sampling.logprobs is not None:
            self._items[item.request_id] = item

    def end(self, request_id: str) -> None:
        """Remove a request."""
        self._items.pop(request_id, None)

    def clear(self) -> None:
        """Remove all requests."""
        self._items.clear()

    def extend(self, batch: EngineBatch) -> EngineBatch:
        """Return the batch with the requested outputs. An embedding takes a prompt's time and emits no token."""
        if not self._items:
            return batch
        vectors = [
            Vector(end.request_id, end.attempt, vector_of(self._items[end.request_id].token_ids))
            for end in batch.finished
            if self._embeds(end.request_id)
        ]
        extended = msgspec.structs.replace(
            batch,
            emitted=[self._emitted(chunk) for chunk in batch.emitted if not self._embeds(chunk.request_id)],
            first_tokens=[first for first in batch.first_tokens if not self._embeds(first.request_id)],
            finished=[self._finished(end) for end in batch.finished],
            vectors=vectors,
        )
        for end in batch.finished:
            self.end(end.request_id)
        return extended

    def _embeds(self, request_id: str) -> bool:
        item = self._items.get(request_id)
        return item is not None and item.task == "embed"

    def _finished(self, end: Finished) -> Finished:
        if not self._embeds(end.request_id):
            return end
        return msgspec.structs.replace(end, reason="stop", output_tokens=0)

    def _emitted(self, chunk: Emitted) -> Emitted:
        item = self._items.get(chunk.request_id)
        if item is None or item.sampling.logprobs is None:
            return chunk
        count = item.sampling.logprobs
        logprobs = tuple(self._logprob(token_id, count) for token_id in unpack_u32(chunk.token_ids))
        return msgspec.structs.replace(chunk, logprobs=logprobs)

    def _logprob(self, token_id: int, count: int) -> TokenLogprob:
        """Return the logprob of a token as the most likely one, followed by others, each half as likely."""
        others = (other for other in self._vocabulary if other != token_id)
        likeliest = [token_id, *(other for other, _ in zip(others, range(count - 1), strict=False))][:count]
        top = tuple(TopLogprob(token_id=other, logprob=-0.7 * (at + 1)) for at, other in enumerate(likeliest))
        return TokenLogprob(logprob=-0.7, top=top)


def vector_of(token_ids: bytes) -> bytes:
    """Return a vector of length 1 derived from the tokens, as packed little-endian f32."""
    seed = xxh3_64_digest(token_ids)
    values = [xxh3_64_intdigest(seed, at) / HALF - 1.0 for at in range(DIMENSIONS)]
    length = sqrt(sum(value * value for value in values))
    return array("f", [value / length for value in values]).tobytes()
