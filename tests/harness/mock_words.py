"""What mock engines must have said, computed from the log alone: whether every answer is the one that it has to be.

A mock engine's tokens follow from its prompt. An attempt that takes over goes on as with a longer prompt: the tokens
before it are part of that.
"""

from collections.abc import Sequence
from typing import Any

from xxhash import xxh3_64_intdigest

from forebay.core.state.reply_slot import ResponseState, apply
from forebay.engine_model.sequence import generate_tokens
from forebay.events.base import pack_u32, unpack_u32
from forebay.events.requests import RequestSubmitted
from forebay.events.tokens import TokensEmitted
from forebay.ingress.model import DEFAULT_MODEL, Model, word_token_ids

Begins = dict[str, dict[int, int]]  # by request and attempt, the position of the first token that it said


class Words:
    """Those of the default model."""

    def __init__(self) -> None:
        self._tokenizer = Model(DEFAULT_MODEL).tokenizer
        self._vocabulary = word_token_ids(self._tokenizer)

    def tokens(self, prompt: list[int], count: int, begins: dict[int, int]) -> list[int]:
        """So many tokens after a prompt, attempt after attempt."""
        said: list[int] = []
        for _, first in sorted({1: 0, **begins}.items()):
            del said[first:]
            seed = xxh3_64_intdigest(pack_u32(prompt + said), 0)
            said += generate_tokens(seed, 0, count - len(said), self._vocabulary)
        return said

    def text(self, prompt: list[int], count: int, begins: dict[int, int]) -> str:
        """The same as a client reads it."""
        text: str = self._tokenizer.decode(self.tokens(prompt, count, begins))
        return text

    def wrong(self, asked: Sequence[Any], said: Sequence[Any]) -> list[str]:
        """Requests of the topic `requests` whose answers, as the reply slots have them, are not what they must be.

        All must have asked one model for a fixed number of tokens, and none for a seed.
        """
        requests = {one.request_id: one for one in asked if isinstance(one, RequestSubmitted)}
        begins, replies = begins_of(said), {request_id: ResponseState() for request_id in requests}
        for group in {one.model for one in requests.values()}:
            for event in said:
                apply(replies, event, group)
        found = []
        for request_id, one in requests.items():
            reply, count = replies[request_id], one.sampling.max_tokens
            expected = self.tokens(unpack_u32(one.token_ids), count, begins.get(request_id, {}))
            if reply.ended is None or reply.ended.error is not None or reply.tokens != expected:
                found.append(f"{request_id}: {reply.tokens}, not {expected}, ended {reply.ended}")
        return found


def begins_of(said: Sequence[Any]) -> Begins:
    """Where the attempts at each request began to speak."""
    found: Begins = {}
    for event in said:
        for chunk in event.chunks if isinstance(event, TokensEmitted) else ():
            began = found.setdefault(chunk.request_id, {})
            began[chunk.attempt] = min(began.get(chunk.attempt, chunk.first_index), chunk.first_index)
    return found
