"""Every error of Kafka has a deliberate verdict, and a query is repeated after each transient one."""

import asyncio
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
from aiokafka import errors
from aiokafka.errors import BrokerResponseError, KafkaError, KafkaTimeoutError

from forebay.transport import patience
from forebay.transport.base import LogError, LogUnavailable
from forebay.transport.kafka.errors import CLIENT_ERRORS, PERMANENT_CODES, error_of, is_transient, log_error
from forebay.transport.kafka.group import query_with_retry

# What `Errors.values()` of Kafka 4.1 marks as RetriableException.
RETRIABLE = {
    *(2, 3, 5, 6, 7, 9, 13, 14, 15, 16, 19, 20, 41, 51, 56, 70, 71, 72, 74, 75, 78, 80, 83, 84, 88, 89, 100, 103, 106),
    *(122, 123, 133),
}
CODES = range(-1, 134)  # of Kafka 4.1
# Also what a broker returns while it starts, stops or is overloaded, and to a member that has to join again.
TRANSIENT = {
    *(-1, 2, 3, 5, 6, 7, 8, 9, 11, 13, 14, 15, 16, 19, 20, 22, 25, 27, 41, 51, 52, 56, 60, 70, 71, 72, 74),
    *(75, 77, 78, 79, 80, 81, 83, 84, 88, 89, 100, 102, 103, 106, 107, 108, 110, 113, 116, 122, 123, 124),
    *(129, 131, 133),
}
NEWER_CODE = 30_000
DENIED = {29, 30, 31, 53, 58}
PATIENCE_S = 20.0


def client_errors() -> Iterator[type[KafkaError]]:
    """Yield each error class of aiokafka that does not stand for a code of the protocol."""
    for _, kind in inspect.getmembers(errors, inspect.isclass):
        if issubclass(kind, KafkaError) and not issubclass(kind, BrokerResponseError):
            yield kind


def test_codes_that_a_retry_may_help_are_not_permanent() -> None:
    assert PERMANENT_CODES.keys() == set(CODES) - TRANSIENT
    assert TRANSIENT >= RETRIABLE
    assert PERMANENT_CODES.keys() >= DENIED


@pytest.mark.parametrize("kind", list(client_errors()), ids=lambda kind: kind.__name__)
def test_every_error_class_of_the_client_has_a_verdict(kind: type[KafkaError]) -> None:
    assert kind in CLIENT_ERRORS, f"decide in forebay.transport.kafka.errors whether {kind.__name__} is transient"
    assert CLIENT_ERRORS[kind] or not kind.retriable, "aiokafka repeats the request itself"


def test_every_broker_error_class_of_the_client_stands_for_a_code() -> None:
    kinds: list[tuple[str, Any]] = inspect.getmembers(errors, inspect.isclass)
    for name, kind in kinds:
        if issubclass(kind, BrokerResponseError) and kind is not BrokerResponseError:
            assert kind.errno in CODES, name
            assert not (kind.retriable and kind.errno in PERMANENT_CODES), name


@pytest.mark.parametrize("code", [code for code in CODES if code])
def test_an_error_keeps_its_code(code: int) -> None:
    error = error_of(code, "requests/0")
    assert error.errno == code
    assert "requests/0" in str(error)
    assert is_transient(error) == (code not in PERMANENT_CODES)


def test_a_code_of_a_newer_broker_is_transient() -> None:
    assert is_transient(error_of(NEWER_CODE))
    assert str(NEWER_CODE) in str(error_of(NEWER_CODE))


@pytest.mark.parametrize("error", [OSError("x"), TimeoutError("x"), ConnectionResetError("x"), KafkaTimeoutError("x")])
def test_a_broken_connection_is_transient(error: Exception) -> None:
    assert type(log_error(error, "text")) is LogUnavailable


@pytest.mark.parametrize("error", [ValueError("x"), errors.IllegalOperation("x"), errors.ConsumerStoppedError("x")])
def test_an_error_of_a_program_is_permanent(error: Exception) -> None:
    assert not is_transient(error)


@pytest.mark.parametrize(
    "error",
    [*(error_of(code) for code in CODES if code), *(kind("x") for kind in client_errors()), OSError("x")],
    ids=lambda error: f"{type(error).__name__}-{getattr(error, 'errno', '')}",
)
async def test_a_query_is_repeated_until_it_succeeds_or_fails_for_good(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "RETRY_S", 0.0)
    raised = [error, error]

    async def query() -> str:
        if raised:
            raise raised.pop()
        return "found"

    async with asyncio.timeout(PATIENCE_S):
        if is_transient(error):
            assert await query_with_retry(query, "x cannot be read") == "found"
        else:
            with pytest.raises(LogError, match="x cannot be read"):
                await query_with_retry(query, "x cannot be read")
            assert len(raised) == 1
