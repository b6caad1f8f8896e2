"""Predictors in plain Python."""

from collections.abc import Sequence

AVERAGED = 5  # values of a moving average


def last_value(series: Sequence[float]) -> float:
    return series[-1]


def moving_average(series: Sequence[float]) -> float:
    """Return the mean of the last values."""
    newest = series[-AVERAGED:]
    return sum(newest) / len(newest)
