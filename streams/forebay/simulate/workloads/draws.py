"""Times at which requests come, and lengths, drawn alike on every machine.

Only comparisons, sums, products and square roots of floats decide, which IEEE 754 defines to the last bit, and
`decimal` where a logarithm is needed: libraries of C differ in the last bits of log and exp. Times are whole
microseconds before they are added up.
"""

import random
from collections.abc import Callable, Iterator
from decimal import Decimal
from math import inf, ldexp, sqrt

US_PER_S = 1_000_000
LN2 = 0.6931471805599453
NORMAL_P99 = 2.3263478740408408  # the standard normal distribution's


def exponential(rng: random.Random) -> float:
    """Mean 1, by comparing uniform draws alone.

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
    """Mean 0, deviation 1, by rejection from the exponential distribution.

    Source: Devroye, "Non-Uniform Random Variate Generation" (1986), chapter IV.
    """
    while True:
        size = exponential(rng)
        if 2.0 * exponential(rng) >= (size - 1.0) * (size - 1.0):
            return size if rng.random() < 0.5 else -size


def exp(power: float) -> float:
    """Of a power of e, the value to some 1e-15, from sums and products."""
    halvings = int(power / LN2 + (0.5 if power >= 0 else -0.5))
    rest = power - halvings * LN2
    total = 1.0
    for term in range(16, 0, -1):
        total = 1.0 + rest * total / term
    return ldexp(total, halvings)


class Lengths:
    """A quantity of a given mean: always the same, or lognormal with a given 99th percentile."""

    def __init__(self, mean: float, p99: float | None = None) -> None:
        """ValueError for what no lognormal distribution has."""
        if not 0 <= mean < inf or (p99 is not None and not 0 < mean <= p99 < inf):
            raise ValueError("a mean, and a 99th percentile that is not below it")
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
        """One value."""
        if not self._deviation:
            return self._mean
        return exp(self._log + self._deviation * normal(rng))


def poisson(rng: random.Random, rate: float) -> Iterator[int]:
    """Times in us: exponential gaps."""
    at_us = 0
    while True:
        at_us += round(exponential(rng) / rate * US_PER_S)
        yield at_us


def bursty(rng: random.Random, rate: float, cv: float) -> Iterator[int]:
    """Times in us: gaps of a coefficient of variation of at least 1, hyperexponential with balanced means.

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
    """Times in us: a Poisson process whose rate swings by the share `swing` about its mean, by thinning.

    Source: Lewis and Shedler, "Simulation of nonhomogeneous Poisson processes by thinning" (1979).
    """
    most = 1.0 + swing
    period_us = round(period_s * US_PER_S)
    for at_us in poisson(rng, rate * most):
        if rng.random() * most < 1.0 + swing * wave(at_us % period_us / period_us):
            yield at_us


def wave(phase: float) -> float:
    """From 0 up to 1, down to -1 and back to 0 as the phase goes from 0 to 1: a sine's two halves as parabolas."""
    half = phase % 0.5
    height = 16.0 * half * (0.5 - half)
    return height if phase < 0.5 else -height


Arrivals = Callable[[random.Random], Iterator[int]]
