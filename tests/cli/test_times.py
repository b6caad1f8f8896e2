"""Parsing of times and durations."""

import time
from collections.abc import Iterator
from datetime import datetime, timedelta

import click
import pytest

from forebay.cli.common.times import span_us, time_us

S = 1_000_000
NOON_US = 1_767_268_800 * S  # 2026-01-01T12:00:00Z


@pytest.fixture(autouse=True)
def zone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set the local time zone to UTC+2."""
    monkeypatch.setenv("TZ", "UTC-2")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(
    ("text", "span"),
    [("90s", 90 * S), ("5m", 300 * S), ("2h", 7_200 * S), ("1d", 86_400 * S), ("0.5s", S // 2), ("1.5h", 5_400 * S)],
)
def test_durations_are_parsed(text: str, span: int) -> None:
    assert span_us("--last", text) == span


@pytest.mark.parametrize("text", ["", "5", "m", "-5m", "5 m", "5w", "0s", "0.0000001s", "1e3s", "5m3s", "nans", "٣s٣"])
def test_invalid_durations_are_rejected(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(click.exceptions.Exit) as ended:
        span_us("--last", text)
    assert ended.value.exit_code == 2
    assert capsys.readouterr().err.startswith(f"forebay: --last {text}: not a duration; expected ")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2026-01-01T12:00:00Z", 0),
        ("2026-01-01T12:00:00.25+00:00", 0.25),
        ("2026-01-01T13:00+01:00", 0),
        ("2026-01-01T14:00:00", 0),
        ("2026-01-01 14:01", 60),
        ("2026-01-01", -14 * 3_600),
        ("14:00", 0),
        ("13:59:30", -30),
        ("14:00:00.5", 0.5),
        ("00:00", -14 * 3_600),
        ("-5m", -300),
        ("-0.5s", -0.5),
    ],
)
def test_times_are_parsed(text: str, seconds: float) -> None:
    assert time_us("--from", text, NOON_US) == NOON_US + round(seconds * S)


def test_microseconds_are_exact() -> None:
    moment = datetime.fromisoformat("2026-03-01T10:20:30.123457+00:00")
    assert time_us("--from", moment.isoformat(), NOON_US) == round(moment.timestamp() * S)
    later = moment + timedelta(microseconds=1)
    assert time_us("--from", later.isoformat(), NOON_US) == time_us("--from", moment.isoformat(), NOON_US) + 1


@pytest.mark.parametrize(
    "text", ["", "yesterday", "25:00", "12:61", "2026-13-01", "--5m", "-5", "1767268800", "9999999"]
)
def test_invalid_times_are_rejected(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(click.exceptions.Exit) as ended:
        time_us("--from", text, NOON_US)
    assert ended.value.exit_code == 2
    assert "forebay: --" in capsys.readouterr().err
