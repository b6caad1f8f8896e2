"""What a mock engine makes up beside tokens: probabilities of tokens, and vectors of prompts, out of hashes."""

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


class MockAnswers:
    """Of the requests of one rank that ask for more than tokens; `vocabulary` is what it could have said."""

    def __init__(self, vocabulary: Sequence[int]) -> None:
        self._vocabulary = vocabulary
        self._asked: dict[str, WorkItem] = {}

    def begin(self, item: WorkItem) -> None:
        """A request is under way."""
        if item.task == "embed" or item.sampling.logprobs is not None:
            self._asked[item.request_id] = item

    def end(self, request_id: str) -> None:
        """It is not, any more."""
        self._asked.pop(request_id, None)

    def clear(self) -> None:
        """None is."""
        self._asked.clear()

    def worded(self, batch: EngineBatch) -> EngineBatch:
        """The batch with what was asked for; an embedding takes a prompt's time and says no token."""
        if not self._asked:
            return batch
        vectors = [
            Vector(end.request_id, end.attempt, vector_of(self._asked[end.request_id].token_ids))
            for end in batch.finished
            if self._embeds(end.request_id)
        ]
        worded = msgspec.structs.replace(
            batch,
            emitted=[self._emitted(said) for said in batch.emitted if not self._embeds(said.request_id)],
            first_tokens=[first for first in batch.first_tokens if not self._embeds(first.request_id)],
            finished=[self._finished(end) for end in batch.finished],
            vectors=vectors,
        )
        for end in batch.finished:
            self.end(end.request_id)
        return worded

    def _embeds(self, request_id: str) -> bool:
        item = self._asked.get(request_id)
        return item is not None and item.task == "embed"

    def _finished(self, end: Finished) -> Finished:
        if not self._embeds(end.request_id):
            return end
        return msgspec.structs.replace(end, reason="stop", output_tokens=0)

    def _emitted(self, said: Emitted) -> Emitted:
        item = self._asked.get(said.request_id)
        if item is None or item.sampling.logprobs is None:
            return said
        count = item.sampling.logprobs
        told = tuple(self._told(token_id, count) for token_id in unpack_u32(said.token_ids))
        return msgspec.structs.replace(said, logprobs=told)

    def _told(self, token_id: int, count: int) -> TokenLogprob:
        """The token was the likeliest; behind it come others of the vocabulary, each half as likely."""
        others = (other for other in self._vocabulary if other != token_id)
        likeliest = [token_id, *(other for other, _ in zip(others, range(count - 1), strict=False))][:count]
        top = tuple(TopLogprob(token_id=other, logprob=-0.7 * (at + 1)) for at, other in enumerate(likeliest))
        return TokenLogprob(logprob=-0.7, top=top)


def vector_of(token_ids: bytes) -> bytes:
    """A vector of length 1 that belongs to these tokens alone, packed little-endian f32."""
    seed = xxh3_64_digest(token_ids)
    values = [xxh3_64_intdigest(seed, at) / HALF - 1.0 for at in range(DIMENSIONS)]
    length = sqrt(sum(value * value for value in values))
    return array("f", [value / length for value in values]).tobytes()
