"""Seeded workloads whose sessions share prefixes and need more cache than one worker has."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Literal

from forebay.simulate.workloads.rows import BLOCK_TOKENS, MooncakeRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressure:
    """Workload of growing sessions, and the fleet that serves it. Lengths are in ids of 512 tokens.

    Attributes:
        shared: length of a system prompt.
        popularity: how often a session has each system prompt.
        growth: smallest and largest number of new ids per turn.
        order: order of the turns. `rolling` keeps six sessions active, and begins a new one when one of them ends.
        gap_ms: mean time between requests, in milliseconds.
        arrivals: arrival process; a burst has five requests.
        warm: number of unrelated prompts before the sessions, which fill the caches.
        kv_blocks: KV blocks per worker, of 64 tokens.
    """

    sessions: int = 8
    turns: int = 56
    shared: int = 4
    tenants: int = 1
    popularity: Literal["equal", "zipf"] = "equal"
    growth: tuple[int, int] = (1, 1)
    order: Literal["cyclic", "shuffled", "random", "rolling"] = "cyclic"
    gap_ms: float = 6_000.0
    arrivals: Literal["fixed", "poisson", "bursts"] = "fixed"
    warm: int = 0
    workers: int = 8
    kv_blocks: int = 2_200
    output_tokens: int = field(default=32, repr=False)

    def rows(self, seed: int) -> list[MooncakeRow]:
        """Return the requests in the order of their arrival."""
        numbers, ids = random.Random(seed), count()
        systems = [[next(ids) for _ in range(self.shared)] for _ in range(self.tenants)]
        weights = [1 / (place + 1) if self.popularity == "zipf" else 1.0 for place in range(self.tenants)]
        prompts = [list(numbers.choices(systems, weights)[0]) for _ in range(self.sessions)]
        at_ms, rows = 0.0, []
        for _ in range(self.warm):
            unrelated = [next(ids) for _ in range(numbers.randint(6, 24))]
            rows.append(self._row(at_ms, unrelated))
            at_ms += 300.0
        for number, session in enumerate(self._turns(numbers)):
            prompts[session] += [next(ids) for _ in range(numbers.randint(*self.growth))]
            rows.append(self._row(at_ms, list(prompts[session])))
            match self.arrivals:
                case "fixed":
                    at_ms += self.gap_ms
                case "poisson":
                    at_ms += numbers.expovariate(1 / self.gap_ms)
                case "bursts":
                    at_ms += 0.0 if number % 5 < 4 else 5 * self.gap_ms
        return rows

    def _row(self, at_ms: float, ids: list[int]) -> MooncakeRow:
        return MooncakeRow(float(int(at_ms)), len(ids) * BLOCK_TOKENS, self.output_tokens, ids)

    def _turns(self, numbers: random.Random) -> Iterator[int]:
        sessions = list(range(self.sessions))
        if self.order in ("cyclic", "shuffled"):
            for _ in range(self.turns):
                if self.order == "shuffled":
                    numbers.shuffle(sessions)
                yield from sessions
            return
        active = sessions[: 6 if self.order == "rolling" else None]
        later = iter(sessions[len(active) :])
        left = [self.turns] * self.sessions
        while active:
            session = numbers.choice(active)
            yield session
            left[session] -= 1
            if not left[session]:
                active.remove(session)
                active += [following for following in (next(later, None),) if following is not None]


PRESSURES: dict[str, Pressure] = {
    "8 sessions in turn, every 6 s": Pressure(),
    "8 sessions in turn, every 1 s": Pressure(gap_ms=1_000),
    "16 sessions in turn": Pressure(sessions=16, turns=30),
    "the first, after other prompts have filled all caches": Pressure(gap_ms=1_000, warm=200),
    "12 sessions, Poisson": Pressure(
        sessions=12, turns=36, order="random", arrivals="poisson", gap_ms=1_500, kv_blocks=1_800
    ),
    "12 sessions after other prompts": Pressure(sessions=12, turns=36, order="shuffled", gap_ms=1_000, warm=200),
    "6 sessions, 8,192 shared tokens": Pressure(
        sessions=6, turns=40, shared=16, order="shuffled", gap_ms=2_000, workers=4, kv_blocks=1_500
    ),
    "20 sessions in bursts": Pressure(
        sessions=20, turns=20, order="shuffled", arrivals="bursts", gap_ms=800, kv_blocks=1_500
    ),
    "40 sessions, more than all caches": Pressure(
        sessions=40, turns=12, growth=(4, 4), order="random", arrivals="poisson", gap_ms=500, workers=4, kv_blocks=2_000
    ),
    "5 sessions, 3 workers, every 300 ms": Pressure(sessions=5, turns=60, gap_ms=300, workers=3, kv_blocks=1_400),
    "24 sessions, 6 at a time": Pressure(
        sessions=24, turns=20, growth=(1, 4), order="rolling", gap_ms=1_000, kv_blocks=1_500
    ),
    "24 sessions, 8 system prompts, zipf": Pressure(
        sessions=24,
        turns=20,
        shared=12,
        tenants=8,
        popularity="zipf",
        order="random",
        arrivals="poisson",
        gap_ms=700,
        workers=6,
        kv_blocks=1_600,
    ),
    "64 prompts of 4,096 tokens, zipf": Pressure(
        sessions=600,
        turns=1,
        shared=10,
        tenants=64,
        popularity="zipf",
        arrivals="poisson",
        gap_ms=500,
        workers=4,
        kv_blocks=1_200,
    ),
}
