"""Compute the expected responses of mock engines from the log alone, and compare them with the recorded ones.

A mock engine's tokens follow from its prompt and the seed of the request. The number of attempts does not change them.
"""

from collections.abc import Sequence
from typing import Any

from xxhash import xxh3_64_intdigest

from forebay.core.state.reply_slot import ResponseState, apply
from forebay.engine_model.sequence import generate_tokens
from forebay.events.base import pack_u32, unpack_u32
from forebay.events.requests import RequestSubmitted
from forebay.ingress.model import DEFAULT_MODEL, Model, word_token_ids
from forebay.workers.engines.mock.outputs import sampler_seed


class Words:
    """Expected tokens of mock engines that serve the default model."""

    def __init__(self) -> None:
        self._tokenizer = Model(DEFAULT_MODEL).tokenizer
        self._vocabulary = word_token_ids(self._tokenizer)

    def tokens(self, prompt: list[int], count: int, seed: int = 0) -> list[int]:
        """Return the first `count` tokens after a prompt.

        Args:
            prompt: tokens of the prompt.
            count: number of tokens to return.
            seed: seed of the request; 0 is that of requests at temperature 0.
        """
        return generate_tokens(xxh3_64_intdigest(pack_u32(prompt), seed), 0, count, self._vocabulary)

    def text(self, prompt: list[int], count: int) -> str:
        """Return the expected tokens of a request at temperature 0 as text."""
        text: str = self._tokenizer.decode(self.tokens(prompt, count))
        return text

    def wrong(self, submissions: Sequence[Any], replies: Sequence[Any]) -> list[str]:
        """Return a line for each request whose recorded response is not the expected one.

        Args:
            submissions: events of the topic `requests`; each for a fixed number of tokens.
            replies: events of the reply slots.
        """
        requests = {one.request_id: one for one in submissions if isinstance(one, RequestSubmitted)}
        states = {request_id: ResponseState(one.reply_key) for request_id, one in requests.items()}
        for group in {one.model for one in requests.values()}:
            for event in replies:
                apply(states, event, group)
        found = []
        for request_id, one in requests.items():
            reply, count = states[request_id], one.sampling.max_tokens
            seed = sampler_seed(request_id, one.sampling)
            expected = self.tokens(unpack_u32(one.token_ids), count, seed)
            if reply.ended is None or reply.ended.error is not None or reply.tokens != expected:
                found.append(f"{request_id}: {reply.tokens}, not {expected}, ended {reply.ended}")
        return found
