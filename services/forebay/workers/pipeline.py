"""Operators around the endpoint `generate` of a service. They can change the request and the output tokens.

An operator is a callable that takes a request and the next inner `generate`, and returns output tokens. The first
operator of a pipeline is the innermost. When the response ends, the pipeline closes all generators, innermost first, so
operators need not close the generators that they iterate over.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Protocol

from forebay.workers.engines.service.request import Request

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
