"""Output tokens of the stand-in, which are those of a mock engine that serves the same model.

Theory of operation. A mock engine's output follows from the prompt, the seed of the request and the position in the
response. A worker that continues a response sends the earlier output as the end of the prompt, and this server gets no
boundary between them. So it searches for one: the shortest prompt whose output would begin with all tokens after it.
A new prompt that ends with the beginning of such an output by chance cannot be distinguished. For a random prompt the
probability is one in the number of words of the vocabulary.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from xxhash import xxh3_64

from forebay.engine_model.sequence import generate_tokens
from forebay.events.base import U32_BYTES, pack_u32
from forebay.events.requests import Sampling, StructuredOutput
from forebay.events.work import WorkItem
from forebay.ingress.model import Model, word_token_ids
from forebay.workers.engines.mock.outputs import REPLY, THINK, OutputScripts, Script, sampler_seed

BATCH = 64
WORDS_MAX = 4_096  # as for a mock engine


class Output(NamedTuple):
    """Output after one prompt.

    Attributes:
        position: number of output tokens that the prompt ends with.
        script: beginning of the output that is not words, without these tokens; None if there is none.
    """

    seed: int
    position: int
    script: Script | None


class TokenSource:
    """Generates the output of one model."""

    def __init__(self, model: Model) -> None:
        self.vocabulary = word_token_ids(model.tokenizer)
        words = [word for one in self.vocabulary[:WORDS_MAX] if (word := model.decode([one]).strip())]
        decode = partial(model.tokenizer.decode, skip_special_tokens=False)
        self._scripts = OutputScripts(model.encode, decode, words or ["word"])
        self._replies = tuple(pack_u32(model.encode(text)) for text in (REPLY, REPLY + THINK))
        self._words = frozenset(self.vocabulary)
        self._end_id = min(model.end_ids, default=None)

    def output(self, prompt: Sequence[int], request_id: str, sampling: Sampling) -> Output:
        """Return the output after a prompt, which may end with output of an earlier attempt."""
        seed = sampler_seed(request_id, sampling)
        packed = pack_u32(prompt)
        hashed = xxh3_64(seed=seed)
        hashed_bytes = 0
        replies = self._reply_ends(packed)
        for length in sorted({*replies, *range(self._words_begin(prompt), len(prompt))}):
            end = length * U32_BYTES
            hashed.update(packed[hashed_bytes:end])
            hashed_bytes = end
            output = Output(hashed.intdigest(), len(prompt) - length, None)
            script = self._script(packed[:end], request_id, sampling) if length in replies else None
            if script is not None:
                given = prompt[length : length + len(script.token_ids)]
                words_begin = length + len(given)
                has_words = words_begin < len(prompt)
                is_start = script.token_ids[: len(given)] == list(given) and not (script.is_whole and has_words)
                if is_start and self._are_words(prompt, words_begin, output.seed, len(given)):
                    return output._replace(script=script._replace(token_ids=script.token_ids[len(given) :]))
            elif self._are_words(prompt, length, output.seed, 0):
                return output
        hashed.update(packed[hashed_bytes:])
        return Output(hashed.intdigest(), 0, self._script(packed, request_id, sampling))

    def tokens(self, output: Output) -> Iterator[int]:
        """Yield output tokens. They end after a script that is the whole output, with the model's end token."""
        seed, position = output.seed, output.position
        if output.script is not None:
            yield from output.script.token_ids
            position += len(output.script.token_ids)
            if output.script.is_whole:
                if self._end_id is not None:
                    yield self._end_id
                return
        while True:
            yield from generate_tokens(seed, position, BATCH, self.vocabulary)
            position += BATCH

    def is_end(self, token_id: int) -> bool:
        return token_id == self._end_id

    def _words_begin(self, prompt: Sequence[int]) -> int:
        """Return where the words at the end of a prompt begin, but not 0."""
        begin = len(prompt)
        while begin > 1 and prompt[begin - 1] in self._words:
            begin -= 1
        return begin

    def _reply_ends(self, packed: bytes) -> set[int]:
        """Return the positions in a prompt at which the reply of a chat begins, except its end."""
        found = set()
        for reply in self._replies:
            at = packed.find(reply)
            while at >= 0:
                end = at + len(reply)
                if at % U32_BYTES == 0 and end < len(packed):
                    found.add(end // U32_BYTES)
                at = packed.find(reply, at + 1)
        return found

    def _are_words(self, prompt: Sequence[int], begin: int, seed: int, position: int) -> bool:
        """Return whether a prompt ends with the output from a position on. Most prompts differ in the first token."""
        if begin == len(prompt):
            return True
        if generate_tokens(seed, position, 1, self.vocabulary)[0] != prompt[begin]:
            return False
        return generate_tokens(seed, position, len(prompt) - begin, self.vocabulary) == list(prompt[begin:])

    def _script(self, packed: bytes, request_id: str, sampling: Sampling) -> Script | None:
        item = WorkItem(
            request_id=request_id,
            attempt=1,
            owner_epoch=0,
            worker_epoch=0,
            rank=0,
            token_ids=packed,
            sequence_hashes=b"",
            reply_slot=0,
            sampling=sampling,
        )
        return self._scripts.script(item)


def structure_of(outputs: Mapping[str, Any]) -> StructuredOutput | None:
    """Return the structure that a completion requests by vLLM's `structured_outputs`."""
    if (schema := outputs.get("json")) is not None:
        return StructuredOutput(kind="json_schema", text=schema if isinstance(schema, str) else json.dumps(schema))
    if outputs.get("json_object"):
        return StructuredOutput(kind="json_object")
    if (choices := outputs.get("choice")) is not None:
        return StructuredOutput(kind="choice", text=json.dumps(choices))
    return None
