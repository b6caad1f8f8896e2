"""Operators around `generate`: order, closing, and the limit of tokens."""

import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator

import pytest

from forebay.events.requests import Sampling
from forebay.workers.engines.service.request import Refused, Request
from forebay.workers.pipeline import Generate, Pipeline, TokenLimit

REQUEST = Request(request_id="r", token_ids=(1, 2, 3), sampling=Sampling(max_tokens=100))


async def echo(request: Request) -> AsyncGenerator[int]:
    for token in request.token_ids:
        yield token


async def generated(pipeline: Pipeline, request: Request = REQUEST) -> list[int]:
    return [token async for token in pipeline(request)]


def adding(number: int, calls: list[str]) -> "type":
    class Adding:
        """Operator that adds a number to each prompt and output token."""

        async def __call__(self, request: Request, generate: Generate) -> AsyncIterator[int]:
            calls.append(f"in {number}")
            changed = dataclasses.replace(request, token_ids=tuple(token * number for token in request.token_ids))
            async for token in generate(changed):
                yield token + number
            calls.append(f"out {number}")

    return Adding


async def test_the_first_operator_is_the_innermost() -> None:
    calls: list[str] = []
    pipeline = Pipeline(echo) | adding(10, calls)() | adding(2, calls)()
    assert await generated(pipeline) == [(token * 2 * 10) + 10 + 2 for token in (1, 2, 3)]
    assert calls == ["in 2", "in 10", "out 10", "out 2"]


async def test_a_pipeline_is_a_generate_and_never_changes() -> None:
    plain = Pipeline(echo)
    limited = plain | TokenLimit(1)
    assert await generated(limited) == [1]
    assert await generated(plain) == [1, 2, 3]
    assert await generated(Pipeline(limited) | adding(10, [])()) == [20]


async def test_operators_are_closed_with_the_reader() -> None:
    closed: list[str] = []

    def watched(name: str) -> "type":
        class Watched:
            async def __call__(self, request: Request, generate: Generate) -> AsyncIterator[int]:
                try:
                    async for token in generate(request):
                        yield token
                finally:
                    closed.append(name)

        return Watched

    async def endless(_: Request) -> AsyncGenerator[int]:
        try:
            while True:
                yield 1
        finally:
            closed.append("generate")

    stream = (Pipeline(endless) | watched("inner")() | watched("outer")())(REQUEST)
    assert await anext(stream) == 1
    await stream.aclose()
    assert closed == ["generate", "inner", "outer"]
    assert await generated(Pipeline(endless) | TokenLimit(3)) == [1, 1, 1]
    assert closed[3:] == ["generate"]


async def test_errors_pass_through_every_operator() -> None:
    async def broken(_: Request) -> AsyncGenerator[int]:
        yield 1
        raise RuntimeError("the model is gone")

    answer = (Pipeline(broken) | TokenLimit(5) | adding(1, [])())(REQUEST)
    assert await anext(answer) == 2
    with pytest.raises(RuntimeError, match="the model is gone"):
        await anext(answer)


def test_a_limit_without_tokens_is_rejected() -> None:
    with pytest.raises(ValueError, match="tokens_max must be 1 or more, got 0"):
        TokenLimit(0)


async def test_request_shows_its_cancellation() -> None:
    assert not REQUEST.cancelled
    with pytest.raises(Refused, match="this request has no tokenizer"):
        _ = REQUEST.text
    requested = Request(request_id="r", token_ids=(1, 2), sampling=Sampling(max_tokens=1), detokenize=str)
    assert requested.text == "(1, 2)"
    dataclasses.replace(requested, priority=1).stopped.set()
    assert requested.cancelled
    await requested.until_cancelled()
