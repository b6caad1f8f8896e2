"""Seeds, log probabilities and embeddings of a mock engine, derived from hashes."""

from array import array
from collections.abc import Collection, Sequence
from math import sqrt
from typing import NamedTuple

import msgspec
from xxhash import xxh3_64_digest, xxh3_64_intdigest

from forebay.engine_model.model import Emitted, EngineStep, Finished
from forebay.events.base import U32_BYTES, U64_MASK, unpack_u32
from forebay.events.requests import Sampling, Task
from forebay.events.tokens import TokenLogprob, TopLogprob
from forebay.events.work import WorkItem
from forebay.workers.engine import EngineBatch, Vector

TASKS: tuple[Task, ...] = ("generate", "embed")
DIMENSIONS = 64
HALF = 1 << 63


class _Extra(NamedTuple):
    item: WorkItem
    is_ended: bool
    is_empty: bool


class ExtraOutputs:
    """Adds log probabilities, embeddings and finish reasons to the batches of one rank of a mock engine.

    Args:
        vocabulary: token ids that may be reported as alternatives.
    """

    def __init__(self, vocabulary: Sequence[int]) -> None:
        self._vocabulary = vocabulary
        self._extras: dict[str, _Extra] = {}

    def begin(self, item: WorkItem, *, is_ended: bool, is_empty: bool) -> None:
        """Register a request, if it requests log probabilities or an embedding, or its output ends by itself.

        Args:
            is_ended: whether the output ends by itself, and not because of `max_tokens`.
            is_empty: whether there is no output. The token that the model generates is then removed.
        """
        if item.sampling.logprobs is not None or is_ended or is_empty:
            self._extras[item.request_id] = _Extra(item, is_ended or is_empty, is_empty)

    @property
    def request_ids(self) -> Collection[str]:
        return self._extras.keys()

    def end(self, request_id: str) -> None:
        self._extras.pop(request_id, None)

    def clear(self) -> None:
        self._extras.clear()

    def extend(self, batch: EngineBatch) -> EngineBatch:
        """Return a batch with the requested log probabilities and embeddings, and the finish reason of whole scripts.

        A request without output takes as long as its prompt.
        """
        if not self._extras:
            return batch
        empty = {request_id for request_id, extra in self._extras.items() if extra.is_empty}
        vectors = [
            Vector(end.request_id, end.attempt, vector_of(prompt_of(extra.item)))
            for end in batch.finished
            if (extra := self._extras.get(end.request_id)) is not None and extra.item.task == "embed"
        ]
        extended = msgspec.structs.replace(
            batch,
            emitted=[self._emitted(chunk) for chunk in batch.emitted if chunk.request_id not in empty],
            first_tokens=[first for first in batch.first_tokens if first.request_id not in empty],
            finished=[self._finished(end) for end in batch.finished],
            vectors=vectors,
        )
        for end in batch.finished:
            self.end(end.request_id)
        return extended

    def _finished(self, end: Finished) -> Finished:
        extra = self._extras.get(end.request_id)
        if extra is None or not extra.is_ended:
            return end
        output_tokens = 0 if extra.is_empty else end.output_tokens
        return msgspec.structs.replace(end, reason="stop", output_tokens=output_tokens)

    def _emitted(self, chunk: Emitted) -> Emitted:
        extra = self._extras.get(chunk.request_id)
        if extra is None or (count := extra.item.sampling.logprobs) is None:
            return chunk
        logprobs = tuple(self._logprob(token_id, count) for token_id in unpack_u32(chunk.token_ids))
        return msgspec.structs.replace(chunk, logprobs=logprobs)

    def _logprob(self, token_id: int, count: int) -> TokenLogprob:
        """Return the logprob of a token and of `count` most likely tokens: the token itself, then others, halving."""
        others = (other for other in self._vocabulary if other != token_id)
        likeliest = [token_id, *(other for other, _ in zip(others, range(count - 1), strict=False))][:count]
        top = tuple(TopLogprob(token_id=other, logprob=-0.7 * (at + 1)) for at, other in enumerate(likeliest))
        return TokenLogprob(logprob=-0.7, top=top)


def sampler_seed(request_id: str, sampling: Sampling) -> int:
    """Return the 64-bit seed of the output of a request: 0 at temperature 0, otherwise the seed of the client.

    Without either, the seed is a hash of the request id. So the choices of a request differ, and equal requests too, as
    on a real engine. Every attempt and stage of a request has the same seed.
    """
    if sampling.temperature == 0:
        return 0
    return xxh3_64_intdigest(request_id.encode()) if sampling.seed is None else sampling.seed & U64_MASK


def prompt_of(item: WorkItem) -> bytes:
    """Return the prompt tokens of a request, without the output of earlier attempts, as packed u32."""
    return item.token_ids[: len(item.token_ids) - item.output_tokens * U32_BYTES]


def vector_of(token_ids: bytes) -> bytes:
    """Return a vector of length 1 that is derived from the tokens of a prompt, packed as little-endian float32."""
    seed = xxh3_64_digest(token_ids)
    values = [xxh3_64_intdigest(seed, at) / HALF - 1.0 for at in range(DIMENSIONS)]
    length = sqrt(sum(value * value for value in values))
    return array("f", [value / length for value in values]).tobytes()


def token_seed(item: WorkItem, seen: int) -> int:
    """Return the seed of the output tokens, which is equal for every attempt and stage of a request.

    Args:
        seen: hash of its images and videos; another number if its KV has a wrong byte.
    """
    return xxh3_64_intdigest(prompt_of(item), (sampler_seed(item.request_id, item.sampling) + seen) & U64_MASK)


def merged(steps: list[EngineStep]) -> list[Emitted]:
    """Return one chunk per request, ordered by their first token."""
    chunks: dict[str, list[Emitted]] = {}
    for step in steps:
        for chunk in step.emitted:
            chunks.setdefault(chunk.request_id, []).append(chunk)
    return [
        Emitted(
            parts[0].request_id,
            parts[0].attempt,
            parts[0].first_index,
            b"".join([part.token_ids for part in parts]),
        )
        for parts in chunks.values()
    ]
