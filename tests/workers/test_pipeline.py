"""Operators around `generate`: order, closing, and the built-in operators."""

import dataclasses
import logging
from collections.abc import AsyncGenerator, AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.events.requests import Sampling
from forebay.workers.engines.service.request import Refused, Request
from forebay.workers.pipeline import Generate, Pipeline, ResponseLog, Retry, StopSequences, TokenLimit

REQUEST = Request(request_id="r", token_ids=(1, 2, 3), sampling=Sampling(max_tokens=100))


async def echo(request: Request) -> AsyncGenerator[int]:
    for token in request.token_ids:
        yield token


def generating(*tokens: int) -> Generate:
    async def generate(_: Request) -> AsyncGenerator[int]:
        for token in tokens:
            yield token

    return generate


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


@given(
    st.lists(st.integers(0, 2), max_size=12),
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3), min_size=1, max_size=3),
)
async def test_response_ends_before_a_stop_sequence(answer: list[int], stops: list[list[int]]) -> None:
    # The stop sequence that completes first wins; of several, the longest.
    ends = [
        (at + len(stop), -len(stop))
        for stop in stops
        for at in range(len(answer))
        if answer[at : at + len(stop)] == stop
    ]
    expected = answer
    if ends:
        end, length = min(ends)
        expected = answer[: end + length]
    assert await generated(Pipeline(generating(*answer)) | StopSequences(*stops)) == expected


async def test_only_a_prefix_of_a_stop_sequence_is_withheld() -> None:
    requested: list[int] = []

    async def counted(_: Request) -> AsyncGenerator[int]:
        for token in (1, 2, 3, 4):
            requested.append(token)
            yield token

    stream = (Pipeline(counted) | StopSequences([3, 9]))(REQUEST)
    assert [await anext(stream), await anext(stream)] == [1, 2]
    assert requested == [1, 2]
    assert await anext(stream) == 3
    assert requested == [1, 2, 3, 4]
    await stream.aclose()


@pytest.mark.parametrize(("attempts", "failures", "works"), [(1, 0, True), (3, 2, True), (3, 3, False)])
async def test_retry_repeats_until_the_first_token(attempts: int, failures: int, works: bool) -> None:
    requested = 0

    async def flaky(_: Request) -> AsyncGenerator[int]:
        nonlocal requested
        requested += 1
        if requested <= failures:
            raise ConnectionError("no answer")
        yield 7

    pipeline = Pipeline(flaky) | Retry(attempts)
    if works:
        assert await generated(pipeline) == [7]
    else:
        with pytest.raises(ConnectionError):
            await generated(pipeline)
    assert requested == min(failures + 1, attempts)


@pytest.mark.parametrize(("error", "tokens"), [(ConnectionError(), 1), (Refused("no"), 0)])
async def test_retry_stops_after_output_or_rejection(error: Exception, tokens: int) -> None:
    requested = 0

    async def broken(_: Request) -> AsyncGenerator[int]:
        nonlocal requested
        requested += 1
        for token in range(tokens):
            yield token
        raise error

    with pytest.raises(type(error)):
        await generated(Pipeline(broken) | Retry(5))
    assert requested == 1


async def test_log_has_one_line_per_response(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(_: Request) -> AsyncGenerator[int]:
        yield 1
        raise RuntimeError

    log = ResponseLog(logging.getLogger("answers"))
    with caplog.at_level(logging.INFO, logger="answers"):
        await generated(Pipeline(echo) | log)
        with pytest.raises(RuntimeError):
            await generated(Pipeline(broken) | log)
        await generated(Pipeline(echo) | log | TokenLimit(1))
    lines = [record.message.rpartition(" in ")[0] for record in caplog.records]
    assert lines == ["r ended: 3 tokens", "r failed: 1 tokens", "r closed: 1 tokens"]


def test_operators_without_effect_are_rejected() -> None:
    for make, text in (
        (lambda: TokenLimit(0), "tokens_max must be 1 or more, got 0"),
        (lambda: Retry(0), "attempts must be 1 or more, got 0"),
        (StopSequences, "at least one stop sequence"),
        (lambda: StopSequences([1], []), "at least one token"),
    ):
        with pytest.raises(ValueError, match=text):
            make()


async def test_request_shows_its_cancellation() -> None:
    assert not REQUEST.cancelled
    with pytest.raises(Refused, match="this request has no tokenizer"):
        _ = REQUEST.text
    requested = Request(request_id="r", token_ids=(1, 2), sampling=Sampling(max_tokens=1), detokenize=str)
    assert requested.text == "(1, 2)"
    dataclasses.replace(requested, priority=1).stopped.set()
    assert requested.cancelled
    await requested.until_cancelled()
