"""Operators around `generate`: each sees the request on its way in and the tokens on their way out.

An operator is any callable that takes a request and the next `Generate` inwards, and returns the tokens. The first
one after `generate` is the innermost. Whatever was opened is closed when the answer ends, innermost first, so that an
operator need not close what it iterates over.
"""

import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Protocol

from forebay.workers.engines.service.request import Refused, Request

Tokens = AsyncIterator[int]
Generate = Callable[[Request], Tokens]


class Operator(Protocol):
    """One stage of a pipeline."""

    def __call__(self, request: Request, generate: Generate, /) -> Tokens:
        """The tokens of an answer, usually those of `generate(request)`, which may be asked again or not at all."""


class Pipeline:
    """`Pipeline(generate) | operator | operator`: a `Generate` itself. Immutable: `|` makes a new one."""

    def __init__(self, generate: Generate, operators: Sequence[Operator] = ()) -> None:
        self._generate = generate
        self._operators = tuple(operators)

    def __or__(self, operator: Operator) -> "Pipeline":
        """Put an operator around all that is there."""
        return Pipeline(self._generate, (*self._operators, operator))

    async def __call__(self, request: Request) -> AsyncGenerator[int]:
        """The tokens of an answer as the outermost operator gives them."""
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
    """At most so many tokens, whatever the request asks for."""

    def __init__(self, tokens_max: int) -> None:
        if tokens_max < 1:
            raise ValueError(f"a limit is at least 1 token, not {tokens_max}")
        self._tokens_max = tokens_max

    async def __call__(self, request: Request, generate: Generate) -> AsyncGenerator[int]:
        """Pass tokens on until the limit."""
        left = self._tokens_max
        async for token in generate(request):
            yield token
            left -= 1
            if not left:
                return


class StopSequences:
    """The answer ends before any of these sequences of tokens; what may be the begin of one is held back."""

    def __init__(self, *sequences: Sequence[int]) -> None:
        self._sequences = tuple(tuple(sequence) for sequence in sequences)
        if not self._sequences or not all(self._sequences):
            raise ValueError("a stop sequence has at least one token, and there is at least one sequence")

    async def __call__(self, request: Request, generate: Generate) -> AsyncGenerator[int]:
        """Pass on what is certain to stand before any stop sequence."""
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
        """How many of the last tokens are the begin of a sequence that is not whole."""
        most = min(len(held), len(sequence) - 1)
        return next((n for n in range(most, 0, -1) if tuple(held[-n:]) == sequence[:n]), 0)


class Retry:
    """Ask again when an answer fails before its first token; after that it fails: what was said stays said."""

    def __init__(self, attempts: int) -> None:
        if attempts < 1:
            raise ValueError(f"there is at least 1 attempt, not {attempts}")
        self._attempts = attempts

    async def __call__(self, request: Request, generate: Generate) -> AsyncGenerator[int]:
        """Pass on the tokens of the first attempt that has any, or ends well."""
        for attempt in range(1, self._attempts + 1):
            said = False
            try:
                async for token in generate(request):
                    said = True
                    yield token
            except Refused:
                raise
            except Exception:
                if said or attempt == self._attempts:
                    raise
            else:
                return


class Log:
    """A line at INFO for each answer: its request, tokens and seconds, and how it ended."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    async def __call__(self, request: Request, generate: Generate) -> AsyncGenerator[int]:
        """Pass on the tokens."""
        tokens, began_s, end = 0, time.monotonic(), "closed"
        try:
            async for token in generate(request):
                tokens += 1
                yield token
            end = "ended"
        except Exception:
            end = "failed"
            raise
        finally:
            took_s = time.monotonic() - began_s
            self._logger.info("%s %s: %d tokens in %.3f s", request.request_id, end, tokens, took_s)
