"""Operators around the endpoint `generate` of a service. They can change the request and the output tokens.

An operator is a callable that takes a request and the next inner `generate`, and returns output tokens. The first
operator of a pipeline is the innermost. When the response ends, the pipeline closes all generators, innermost first, so
operators need not close the generators that they iterate over.
"""

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Protocol

from forebay import runtime
from forebay.workers.engines.service.request import Refused, Request

Tokens = AsyncIterator[int]
Generate = Callable[[Request], Tokens]


class Operator(Protocol):
    """One stage of a pipeline: calls the next inner stage, and may change the request and the tokens."""

    def __call__(self, request: Request, generate: Generate, /) -> Tokens:
        """Return the output tokens for a request.

        Args:
            request: the request.
            generate: the next inner stage. The operator may call it any number of times, also with a changed request.
        """


class Pipeline:
    """`generate` with operators around it: `Pipeline(generate) | inner_operator | outer_operator`.

    A pipeline can be called like `generate`. It is immutable: `|` returns a new pipeline.
    """

    def __init__(self, generate: Generate, operators: Sequence[Operator] = ()) -> None:
        self._generate = generate
        self._operators = tuple(operators)

    def __or__(self, operator: Operator) -> "Pipeline":
        """Return a pipeline with `operator` as the new outermost stage."""
        return Pipeline(self._generate, (*self._operators, operator))

    async def __call__(self, request: Request) -> AsyncGenerator[int]:
        """Yield the output tokens of the outermost operator, and close all generators at the end."""
        async with AsyncExitStack() as opened:
            stage = _kept(self._generate, opened)
            for operator in self._operators:
                stage = _kept(_bound(operator, stage), opened)
            async for token in stage(request):
                yield token


def _bound(operator: Operator, inner: Generate) -> Generate:
    return lambda request: operator(request, inner)


def _kept(generate: Generate, opened: AsyncExitStack) -> Generate:
    def call(request: Request) -> Tokens:
        tokens = generate(request)
        if isinstance(tokens, AsyncGenerator):
            opened.push_async_callback(tokens.aclose)
        return tokens

    return call


class TokenLimit:
    """Operator that ends the response after `tokens_max` tokens, even if the request allows more."""

    def __init__(self, tokens_max: int) -> None:
        if tokens_max < 1:
            raise ValueError(f"tokens_max must be 1 or more, got {tokens_max}")
        self._tokens_max = tokens_max

    async def __call__(self, request: Request, generate: Generate) -> AsyncGenerator[int]:
        """Yield the tokens of the inner stage, at most `tokens_max`."""
        left = self._tokens_max
        async for token in generate(request):
            yield token
            left -= 1
            if not left:
                return


class StopSequences:
    """Operator that ends the response when one of the given token sequences occurs, without emitting the sequence.

    It delays tokens that may be the beginning of such a sequence.
    """

    def __init__(self, *sequences: Sequence[int]) -> None:
        self._sequences = tuple(tuple(sequence) for sequence in sequences)
        if not self._sequences or not all(self._sequences):
            raise ValueError("expected at least one stop sequence with at least one token each")

    async def __call__(self, request: Request, generate: Generate) -> AsyncGenerator[int]:
        """Yield the tokens of the inner stage that precede the first stop sequence."""
        held: list[int] = []
        async for token in generate(request):
            held.append(token)
            whole = [sequence for sequence in self._sequences if tuple(held[-len(sequence) :]) == sequence]
            if whole:
                for before in held[: len(held) - max(map(len, whole))]:
                    yield before
                return
            keep = max(self._begun(held, sequence) for sequence in self._sequences)
            for before in held[: len(held) - keep]:
                yield before
            del held[: len(held) - keep]
        for token in held:
            yield token

    @staticmethod
    def _begun(held: list[int], sequence: tuple[int, ...]) -> int:
        """Return how many of the last tokens are an incomplete prefix of the sequence."""
        most = min(len(held), len(sequence) - 1)
        return next((n for n in range(most, 0, -1) if tuple(held[-n:]) == sequence[:n]), 0)


class Retry:
    """Operator that calls the inner stage again if it fails before its first token. Later failures are raised."""

    def __init__(self, attempts: int) -> None:
        if attempts < 1:
            raise ValueError(f"attempts must be 1 or more, got {attempts}")
        self._attempts = attempts

    async def __call__(self, request: Request, generate: Generate) -> AsyncGenerator[int]:
        """Yield the tokens of the first attempt that yields a token or ends without an error."""
        for attempt in range(1, self._attempts + 1):
            emitted = False
            try:
                async for token in generate(request):
                    emitted = True
                    yield token
            except Refused:
                raise
            except Exception:
                if emitted or attempt == self._attempts:
                    raise
            else:
                return


class ResponseLog:
    """Operator that logs each response at level INFO: request id, number of tokens, seconds, and how it ended."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    async def __call__(self, request: Request, generate: Generate) -> AsyncGenerator[int]:
        """Yield the tokens of the inner stage unchanged."""
        tokens, began_s, end = 0, runtime.monotonic_s(), "closed"
        try:
            async for token in generate(request):
                tokens += 1
                yield token
            end = "ended"
        except Exception:
            end = "failed"
            raise
        finally:
            took_s = runtime.monotonic_s() - began_s
            self._logger.info("%s %s: %d tokens in %.3f s", request.request_id, end, tokens, took_s)
