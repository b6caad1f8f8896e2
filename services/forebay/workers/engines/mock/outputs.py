"""Seeds, log probabilities and embeddings of a mock engine, derived from hashes."""

from array import array
from collections.abc import Sequence
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


class Extra(NamedTuple):
    """What the output of a request has besides tokens of the model.

    Attributes:
        is_ended: whether the output ends by itself, and not because of `max_tokens`.
        is_empty: whether there is no output. The token that the model generates is then removed.
    """

    item: WorkItem
    is_ended: bool
    is_empty: bool

    def finished(self, end: Finished) -> Finished:
        if not (self.is_ended or self.is_empty):
            return end
        return msgspec.structs.replace(end, reason="stop", output_tokens=0 if self.is_empty else end.output_tokens)

    def emitted(self, chunk: Emitted, vocabulary: Sequence[int]) -> Emitted:
        """Return a chunk with the log probabilities of its tokens and of as many most likely ones as requested.

        The most likely token is the token itself, then others of the vocabulary follow.
        """
        if (count := self.item.sampling.logprobs) is None:
            return chunk
        logprobs = []
        for token_id in unpack_u32(chunk.token_ids):
            likeliest = [token_id, *(other for other in vocabulary[:count] if other != token_id)][:count]
            top = tuple(TopLogprob(token_id=other, logprob=-0.7 * (at + 1)) for at, other in enumerate(likeliest))
            logprobs.append(TokenLogprob(logprob=-0.7, top=top))
        return msgspec.structs.replace(chunk, logprobs=tuple(logprobs))


def extend(batch: EngineBatch, extras: dict[str, Extra], vocabulary: Sequence[int]) -> EngineBatch:
    """Return a batch with the requested log probabilities and embeddings, and the finish reason of whole scripts.

    A request without output takes as long as its prompt. The extras of finished requests are removed. The vocabulary
    has the tokens that may be reported as alternatives.
    """
    if not extras:
        return batch
    empty = {request_id for request_id, extra in extras.items() if extra.is_empty}
    ended = [(end, extras.get(end.request_id)) for end in batch.finished]
    extended = msgspec.structs.replace(
        batch,
        emitted=[
            extras[chunk.request_id].emitted(chunk, vocabulary) if chunk.request_id in extras else chunk
            for chunk in batch.emitted
            if chunk.request_id not in empty
        ],
        first_tokens=[first for first in batch.first_tokens if first.request_id not in empty],
        finished=[end if extra is None else extra.finished(end) for end, extra in ended],
        vectors=[
            Vector(end.request_id, end.attempt, vector_of(prompt_of(extra.item)))
            for end, extra in ended
            if extra is not None and extra.item.task == "embed"
        ],
    )
    for end in batch.finished:
        extras.pop(end.request_id, None)
    return extended


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

    `seen` is the hash of its images and videos; another number if its KV has a wrong byte.
    """
    return xxh3_64_intdigest(prompt_of(item), (sampler_seed(item.request_id, item.sampling) + seen) & U64_MASK)


def merged(steps: Sequence[EngineStep]) -> list[Emitted]:
    """Return one chunk per request, ordered by their first token."""
    chunks: dict[str, list[Emitted]] = {}
    for step in steps:
        for chunk in step.emitted:
            chunks.setdefault(chunk.request_id, []).append(chunk)
    return [
        msgspec.structs.replace(parts[0], token_ids=b"".join([part.token_ids for part in parts]))
        for parts in chunks.values()
    ]
