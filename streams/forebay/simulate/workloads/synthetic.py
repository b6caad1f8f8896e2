"""Synthetic workload: `synthetic:arrivals=bursty,cv=4,rate=8,requests=100000,prompt=800/6000,groups=20,turns=5`.

Theory of operation. Sessions begin at random times. The prompts of a session begin with a path through a tree of shared
prefixes: one of `groups` roots, then one of `branches` children at each further level. Each node stands for a text of
its own with a random length. After that prefix, each turn appends new text to the previous prompt and response. A turn
arrives one think time after the previous response. Sessions are generated one after another, so finished sessions take
no memory. Draws are identical on every machine: floats are only compared, added, multiplied and square-rooted, which
IEEE 754 defines to the last bit. Logarithms use `decimal`, because C libraries differ in the last bits of log and exp.
Gaps are rounded to whole microseconds before they are added.
"""

import random
from bisect import bisect_right
from collections.abc import Callable, Iterator
from decimal import Decimal
from functools import cache, partial
from itertools import accumulate
from math import inf, ldexp, sqrt
from typing import Annotated, Literal, get_args, get_origin, get_type_hints

import msgspec
from xxhash import xxh3_64_intdigest

from forebay.events.names import unknown_name
from forebay.runtime.errors import ConfigError
from forebay.simulate.workload import Turn
from forebay.simulate.workloads.source import OUTPUT_TOKENS_MAX, PROMPT_TOKENS_MAX, TIME_MS_MAX, US_PER_MS, RowErrors

ID_BITS_CUT = 11  # leaves 53 bits, because other JSON readers round larger integers

LENGTH_MAX = 1e12  # maximum mean, so that draws are finite

Positive = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
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


class SyntheticSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of a synthetic workload. A length is MEAN, or MEAN/P99 for a lognormal distribution."""

    arrivals: Literal["poisson", "bursty", "diurnal"] = "poisson"
    requests: Annotated[int, msgspec.Meta(ge=1, le=1_000_000_000)] = 1_000
    rate: Positive = 1.0  # mean number of sessions that begin per second
    # Coefficient of variation of the gaps between bursty arrivals.
    cv: Annotated[float, msgspec.Meta(ge=1, le=1e3)] = 3.0
    period_s: Annotated[float, msgspec.Meta(ge=1e-3, le=1e9)] = 86_400.0  # period of a diurnal rate, in seconds
    swing: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.8  # amplitude of a diurnal rate, as a share of the mean rate
    prompt: str = "1000"  # tokens of new text per turn
    output: str = "200"  # tokens per response
    # Number of roots of the tree of shared prefixes; 0 for no shared prefixes.
    groups: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)] = 0
    depth: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    branches: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = 2  # number of children of each node above the last level
    prefix: str = "2048"  # tokens per node of the tree, rounded to whole blocks
    # Probabilities of the roots, and of the children of a node. With `zipf`, the k-th is chosen 1/k as often as the
    # first.
    popularity: Literal["uniform", "zipf"] = "uniform"
    turns: str = "1"  # number of requests per session
    think_s: str = "0"  # seconds between a response and the next request of the session
    # Maximum tokens of prompt plus response. A session ends before a request would exceed it.
    context: Annotated[int, msgspec.Meta(ge=2, le=PROMPT_TOKENS_MAX)] = 131_072
    block_tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = 64  # tokens per block id


class Synthetic:
    """Workload source that generates requests from parameters and a seed."""

    def __init__(self, text: str, seed: int) -> None:
        """Parse the parameters, which are `setting=value`, separated by commas."""
        self.name = f"synthetic:{text}"
        self._recipe = recipe = _recipe(text)
        self._seed = seed
        self.block_tokens = recipe.block_tokens
        self.notes: list[str] = []
        self._prompt = self._lengths("prompt")
        self._output = self._lengths("output")
        self._prefix = self._lengths("prefix")
        self._turns = self._lengths("turns")
        self._think_s = self._lengths("think_s")

    def turns(self, errors: RowErrors) -> Iterator[Turn]:
        """Yield the requests of one session after another."""
        errors.file, errors.unit = self.name, "request"
        recipe = self._recipe
        # Arrivals, choices and lengths have separate random streams, so longer responses do not change arrivals.
        times = self._arrivals()(self._stream("arrivals"))
        choices, lengths = self._stream("choices"), self._stream("lengths")
        number = session = 0
        while number < recipe.requests:
            at_us = next(times)
            if at_us > TIME_MS_MAX * 1_000:
                text = f"{self.name}: request {number} would arrive after more than 100 years"
                raise ConfigError(f"{text}; use a higher rate or fewer requests")
            for turn in self._session(session, at_us, number, choices, lengths):
                if number == recipe.requests:
                    break
                errors.row = number
                yield turn
                number += 1
            session += 1

    def _session(
        self, session: int, at_us: int, number: int, choices: random.Random, lengths: random.Random
    ) -> Iterator[Turn]:
        recipe, size = self._recipe, self.block_tokens
        shared = self._path(choices)
        own = _id(f"{self._seed} session {session}")
        tokens = len(shared) * size
        for turn in range(max(1, round(self._turns.draw(lengths)))):
            tokens += max(1, round(self._prompt.draw(lengths)))
            output_tokens = min(OUTPUT_TOKENS_MAX, max(1, round(self._output.draw(lengths))))
            think_us = min(round(self._think_s.draw(lengths) * US_PER_S), TIME_MS_MAX * US_PER_MS)
            if tokens + output_tokens > recipe.context:
                if turn:
                    return
                # Cut the first turn to the context limit, because a session has at least one turn.
                output_tokens = min(output_tokens, recipe.context - 1)
                tokens = min(tokens, recipe.context - output_tokens)
            blocks = -(-tokens // size)
            yield Turn(
                number=number + turn,
                prompt_tokens=tokens,
                output_tokens=output_tokens,
                block_ids=(*shared, *range(own, own + blocks - len(shared)))[:blocks],
                at_us=0 if turn else at_us,
                after=(number + turn - 1,) if turn else (),
                delay_us=think_us if turn else 0,
                session_id=f"s{session}",
            )
            tokens += output_tokens

    def _path(self, choices: random.Random) -> tuple[int, ...]:
        """Return the block ids of a random shared prefix, root first."""
        recipe = self._recipe
        ids: list[int] = []
        if recipe.groups:
            room = recipe.context // self.block_tokens + 1  # blocks beyond the context limit are cut
            name = f"{self._seed} group"
            for level in range(recipe.depth):
                name += f" {self._chosen(choices, recipe.branches if level else recipe.groups)}"
                node = _id(name)
                # The length is derived from the node's name, so it is the same whenever the node is chosen.
                blocks = round(self._prefix.draw(random.Random(node)) / self.block_tokens)
                ids += range(node, node + min(blocks, room - len(ids)))
        return tuple(ids)

    def _chosen(self, choices: random.Random, count: int) -> int:
        draw = choices.random()
        if self._recipe.popularity == "uniform":
            return int(draw * count)
        weights = _zipf(count)
        return bisect_right(weights, draw * weights[-1], 0, count - 1)

    def _stream(self, name: str) -> random.Random:
        return random.Random(f"{self._seed} {name}")

    def _arrivals(self) -> Arrivals:
        recipe = self._recipe
        match recipe.arrivals:
            case "bursty":
                return partial(bursty, rate=recipe.rate, cv=recipe.cv)
            case "diurnal":
                return partial(diurnal, rate=recipe.rate, period_s=recipe.period_s, swing=recipe.swing)
            case _:
                return partial(poisson, rate=recipe.rate)

    def _lengths(self, setting: str) -> Lengths:
        text: str = getattr(self._recipe, setting)
        mean, slash, p99 = text.partition("/")
        try:
            if float(mean) > LENGTH_MAX:
                raise ValueError(f"beyond {LENGTH_MAX:g}")
            return Lengths(float(mean), float(p99) if slash else None)
        except ValueError as error:
            raise ConfigError(f"{self.name}: {setting}={text}: {error}; expected MEAN or MEAN/P99") from None


def _recipe(text: str) -> SyntheticSettings:
    settings = {}
    for one in filter(None, text.split(",")):
        setting, equals, value = one.partition("=")
        if setting not in SyntheticSettings.__struct_fields__:
            reason = unknown_name("setting", setting, SyntheticSettings.__struct_fields__)
            raise ConfigError(f"synthetic:{text}: {reason}")
        if not equals or setting in settings:
            reason = "duplicate setting" if equals else "expected setting=value, got"
            raise ConfigError(f"synthetic:{text}: {reason} {one!r}")
        settings[setting] = value
    try:
        return msgspec.convert(settings, SyntheticSettings, strict=False)
    except msgspec.ValidationError as error:
        reason, _, setting = str(error).rstrip("`").partition(" - at `$.")
        kind = get_type_hints(SyntheticSettings)[setting]
        if get_origin(kind) is Literal:
            reason = f"expected one of {', '.join(get_args(kind))}"
        raise ConfigError(f"synthetic:{text}: {setting}={settings[setting]}: {reason}") from None


def _id(name: str) -> int:
    return xxh3_64_intdigest(name.encode()) >> ID_BITS_CUT


@cache
def _zipf(count: int) -> list[float]:
    """Return the running sums of 1/k."""
    return list(accumulate(1.0 / (at + 1) for at in range(count)))
