"""Compute the expected responses of mock engines from the log alone, and compare them with the recorded ones.

A mock engine's tokens follow from its prompt and the seed of the request. A later attempt continues as with a longer
prompt, which includes the tokens of the earlier attempts.
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
from forebay.workers.engines.mock.outputs import sampler_seed

Begins = dict[str, dict[int, int]]  # position of the first emitted token, by request and attempt


class Words:
    """Expected tokens of mock engines that serve the default model."""

    def __init__(self) -> None:
        self._tokenizer = Model(DEFAULT_MODEL).tokenizer
        self._vocabulary = word_token_ids(self._tokenizer)

    def tokens(self, prompt: list[int], count: int, begins: dict[int, int], seed: int = 0) -> list[int]:
        """Return the first `count` tokens after a prompt.

        Args:
            prompt: tokens of the prompt.
            count: number of tokens to return.
            begins: first position of each attempt.
            seed: seed of the request; 0 is that of requests at temperature 0.
        """
        tokens: list[int] = []
        for _, first in sorted({1: 0, **begins}.items()):
            del tokens[first:]
            token_seed = xxh3_64_intdigest(pack_u32(prompt + tokens), seed)
            tokens += generate_tokens(token_seed, 0, count - len(tokens), self._vocabulary)
        return tokens

    def text(self, prompt: list[int], count: int, begins: dict[int, int]) -> str:
        """Return the expected tokens of a request at temperature 0 as text."""
        text: str = self._tokenizer.decode(self.tokens(prompt, count, begins))
        return text

    def wrong(self, submissions: Sequence[Any], replies: Sequence[Any]) -> list[str]:
        """Return a line for each request whose recorded response is not the expected one.

        Args:
            submissions: events of the topic `requests`; each for a fixed number of tokens.
            replies: events of the reply slots.
        """
        requests = {one.request_id: one for one in submissions if isinstance(one, RequestSubmitted)}
        begins, states = begins_of(replies), {request_id: ResponseState() for request_id in requests}
        for group in {one.model for one in requests.values()}:
            for event in replies:
                apply(states, event, group)
        found = []
        for request_id, one in requests.items():
            reply, count = states[request_id], one.sampling.max_tokens
            seed = sampler_seed(request_id, one.sampling)
            expected = self.tokens(unpack_u32(one.token_ids), count, begins.get(request_id, {}), seed)
            if reply.ended is None or reply.ended.error is not None or reply.tokens != expected:
                found.append(f"{request_id}: {reply.tokens}, not {expected}, ended {reply.ended}")
        return found


def begins_of(replies: Sequence[Any]) -> Begins:
    """Return the position of the first token of each attempt, by request."""
    found: Begins = {}
    for event in replies:
        for chunk in event.chunks if isinstance(event, TokensEmitted) else ():
            began = found.setdefault(chunk.request_id, {})
            began[chunk.attempt] = min(began.get(chunk.attempt, chunk.first_index), chunk.first_index)
    return found
