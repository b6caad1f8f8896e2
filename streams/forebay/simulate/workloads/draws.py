"""Random arrival times and lengths that are identical on every machine.

Floats are only compared, added, multiplied and square-rooted, which IEEE 754 defines to the last bit. Logarithms use
`decimal`, because C libraries differ in the last bits of log and exp. Gaps are rounded to whole microseconds before
they are added.
"""

import random
from collections.abc import Callable, Iterator
from decimal import Decimal
from math import inf, ldexp, sqrt

US_PER_S = 1_000_000
LN2 = 0.6931471805599453
NORMAL_P99 = 2.3263478740408408  # 99th percentile of the standard normal distribution


def exponential(rng: random.Random) -> float:
    """Return a draw from the exponential distribution of mean 1, using only comparisons of uniform draws.

    Source: von Neumann, "Various techniques used in connection with random digits" (1951).
    """
    draw = rng.random
    whole = 0
    while True:
        first = last = draw()
        odd = True
        while (one := draw()) < last:
            last = one
            odd = not odd
        if odd:
            return whole + first
        whole += 1


def normal(rng: random.Random) -> float:
    """Return a draw from the standard normal distribution, by rejection from the exponential distribution.

    Source: Devroye, "Non-Uniform Random Variate Generation" (1986), chapter IV.
    """
    while True:
        size = exponential(rng)
        if 2.0 * exponential(rng) >= (size - 1.0) * (size - 1.0):
            return size if rng.random() < 0.5 else -size


def exp(power: float) -> float:
    """Return e raised to `power`, with a relative error of about 1e-15. Uses only sums and products."""
    halvings = int(power / LN2 + (0.5 if power >= 0 else -0.5))
    rest = power - halvings * LN2
    total = 1.0
    for term in range(16, 0, -1):
        total = 1.0 + rest * total / term
    return ldexp(total, halvings)


class Lengths:
    """Distribution of random lengths: lognormal with a given mean and 99th percentile, or a constant."""

    def __init__(self, mean: float, p99: float | None = None) -> None:
        """Create a distribution. Raises ValueError if no lognormal distribution has this mean and 99th percentile."""
        if not 0 <= mean < inf or (p99 is not None and not 0 < mean <= p99 < inf):
            raise ValueError("expected a finite mean, and a 99th percentile at or above it")
        self._mean = mean
        self._deviation = 0.0
        if p99 is not None and p99 != mean:
            # mean = exp(mu + s**2 / 2) and p99 = exp(mu + z * s)
            room = NORMAL_P99 * NORMAL_P99 - 2.0 * float((Decimal(p99) / Decimal(mean)).ln())
            if room < 0:
                raise ValueError("no lognormal distribution has a 99th percentile of more than 14.9 times its mean")
            self._deviation = NORMAL_P99 - sqrt(room)
            self._log = float(Decimal(mean).ln()) - self._deviation * self._deviation / 2.0

    def draw(self, rng: random.Random) -> float:
        if not self._deviation:
            return self._mean
        return exp(self._log + self._deviation * normal(rng))


def poisson(rng: random.Random, rate: float) -> Iterator[int]:
    """Yield arrival times of a Poisson process with `rate` arrivals per second, in microseconds."""
    at_us = 0
    while True:
        at_us += round(exponential(rng) / rate * US_PER_S)
        yield at_us


def bursty(rng: random.Random, rate: float, cv: float) -> Iterator[int]:
    """Yield arrival times with hyperexponential gaps and `rate` arrivals per second, in microseconds.

    `cv` is the coefficient of variation of the gaps, at least 1. The two exponential phases have balanced means.
    Source: Whitt, "Approximating a point process by a renewal process, I" (1982).
    """
    square = cv * cv
    short = (1.0 + sqrt((square - 1.0) / (square + 1.0))) / 2.0
    at_us = 0
    while True:
        phase = short if rng.random() < short else 1.0 - short
        at_us += round(exponential(rng) / (2.0 * phase * rate) * US_PER_S)
        yield at_us


def diurnal(rng: random.Random, rate: float, period_s: float, swing: float) -> Iterator[int]:
    """Yield arrival times of a Poisson process with a periodic rate, in microseconds.

    The rate rises and falls with a period of `period_s` around its mean `rate`, by at most `swing` times the mean.
    Method: thinning. Source: Lewis and Shedler, "Simulation of nonhomogeneous Poisson processes by thinning" (1979).
    """
    most = 1.0 + swing
    period_us = round(period_s * US_PER_S)
    for at_us in poisson(rng, rate * most):
        if rng.random() * most < 1.0 + swing * wave(at_us % period_us / period_us):
            yield at_us


def wave(phase: float) -> float:
    """Return the value of an approximate sine wave, made of two parabolas, at a phase from 0 to 1 of its period."""
    half = phase % 0.5
    height = 16.0 * half * (0.5 - half)
    return height if phase < 0.5 else -height


Arrivals = Callable[[random.Random], Iterator[int]]
