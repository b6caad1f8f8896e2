"""Measured costs of loading KV from each tier and of computing it, and the choice between the two.

Theory of operation. The costs are lines fitted by least squares to observations, which lose weight with each newer one.
Each observation is weighted such that relative errors count, because the choice depends on ratios: a load that took ten
times as long as usual has little influence, and short loads count as much as long ones. No coefficient is negative.
A tier without enough observations is loaded from, in order to learn. Of the loads that the costs reject, a few are made
anyway, because otherwise a tier that was slow once would never be measured again. An engine may ask many times for one
waiting request, so rejections are counted once per prefill.
"""

from collections.abc import Sequence
from itertools import combinations
from typing import get_args

import msgspec

from forebay.events.kv import LowerTier
from forebay.events.metrics import TierCost, TierCosts
from forebay.kv_tiers.manager import TierRun

KEEP = 1 - 1 / 64  # weight that an observation keeps with each newer one: conditions of minutes ago do not decide
OBSERVED_MIN = 4  # the first load also opens files or connections, so it must not decide alone
PROBE_EVERY = 64  # one of as many rejected loads is made: at most 1.6 % of the prompts pay for it
SINGULAR = 1e-6  # observations that differ less than this, relatively, do not show more than one coefficient


class TransferCost(msgspec.Struct, frozen=True, kw_only=True):
    """Time to load n blocks: `fixed_us` + n * `block_us`."""

    fixed_us: float
    block_us: float


class PrefillCost(msgspec.Struct, frozen=True, kw_only=True):
    """Time to compute prompt tokens. `attended_us` is per pair of a token and a token before it.

    `fixed_us` is per prompt, and needed even if all but one token is cached.
    """

    token_us: float
    attended_us: float = 0.0
    fixed_us: float = 0.0

    def us(self, first: int, end: int) -> float:
        """Return the time for the tokens from index `first` to `end`, without the fixed time."""
        return (end - first) * self.token_us + _pairs(first, end) * self.attended_us


class CostModel:
    """Costs of one rank, fitted to its own loads and prefills."""

    def __init__(self) -> None:
        self._loads: dict[LowerTier, _Fit] = {}
        self._prefills = _Fit(3)
        self._rejected = 0  # prompts computed since the last load that was made in spite of the costs
        self._rejects = False  # whether a load was rejected since the last prefill

    def observe_load(self, tier: LowerTier, blocks: int, us: float) -> None:
        if blocks > 0 and us > 0:
            self._loads.setdefault(tier, _Fit(2)).add((float(blocks), 1.0), us)

    def observe_prefill(self, tokens: int, cached_tokens: int, us: float) -> None:
        if tokens > 0 and us > 0:
            pairs = _pairs(cached_tokens, cached_tokens + tokens)
            self._prefills.add((float(tokens), pairs, 1.0), us)
            self._rejected += self._rejects
            self._rejects = False

    def transfer(self, tier: LowerTier) -> TransferCost | None:
        """Return the cost of loading from a tier; None while too few loads have been observed."""
        fit = self._loads.get(tier)
        if fit is None or fit.observed < OBSERVED_MIN:
            return None
        block_us, fixed_us = fit.solve()
        return TransferCost(fixed_us=fixed_us, block_us=block_us)

    @property
    def prefill(self) -> PrefillCost | None:
        """Cost of computing; None while too few prefills have been observed."""
        if self._prefills.observed < OBSERVED_MIN:
            return None
        token_us, attended_us, fixed_us = self._prefills.solve()
        return PrefillCost(token_us=token_us, attended_us=attended_us, fixed_us=fixed_us)

    def measured(self, block_size: int) -> TierCosts:
        """Return the costs as the event `metrics.tier_costs` has them, for blocks of `block_size` tokens."""
        prefill = self.prefill
        found = ((tier, self.transfer(tier)) for tier in get_args(LowerTier))
        return TierCosts(
            prefill_block_us=0.0 if prefill is None else prefill.us(0, block_size),
            tiers=tuple(
                TierCost(tier=tier, fixed_us=cost.fixed_us, block_us=cost.block_us)
                for tier, cost in found
                if cost is not None
            ),
        )

    def worthwhile(self, cached_tokens: int, runs: Sequence[TierRun], block_size: int) -> int:
        """Return how many leading blocks of `runs` to load, such that loading and then computing the others is fastest.

        The tiers are read at the same time. The tokens after `runs` are computed in either case. The `cached_tokens`
        before these blocks are in device memory.
        """
        blocks = sum(run.blocks for run in runs)
        prefill = self.prefill
        if not blocks or prefill is None:
            return blocks
        best = self._fastest(prefill, cached_tokens, runs, block_size)
        if best < blocks:
            if self._rejected >= PROBE_EVERY - 1:
                self._rejected = 0
                return blocks
            self._rejects = True
        return best

    def _fastest(self, prefill: PrefillCost, cached_tokens: int, runs: Sequence[TierRun], block_size: int) -> int:
        """Compare the ends of the runs. Later blocks of a run save more than earlier ones, so no other end is best."""
        end = cached_tokens + block_size * sum(run.blocks for run in runs)
        best, best_us = 0, prefill.us(cached_tokens, end)
        costs: dict[LowerTier, TransferCost | None] = {run.tier: self.transfer(run.tier) for run in runs}
        loads: dict[LowerTier, int] = {}
        count = 0
        for run in runs:
            count += run.blocks
            loads[run.tier] = loads.get(run.tier, 0) + run.blocks
            load_us = 0.0
            for tier, blocks in loads.items():
                cost = costs[tier]
                load_us = max(load_us, 0.0 if cost is None else cost.fixed_us + blocks * cost.block_us)
            us = load_us + prefill.us(cached_tokens + count * block_size, end)
            if us <= best_us:
                best, best_us = count, us
        return best


class _Fit:
    """Weighted least squares with coefficients from 0 on, over observations that lose weight."""

    def __init__(self, size: int) -> None:
        self.observed = 0
        self._size = size
        self._matrix = [[0.0] * size for _ in range(size)]
        self._vector = [0.0] * size
        self._solution: list[float] | None = None

    def add(self, inputs: tuple[float, ...], result: float) -> None:
        self.observed += 1
        scaled = [value / result for value in inputs]  # so that errors are relative to the result
        for row, at, value in zip(self._matrix, range(self._size), scaled, strict=True):
            for other in range(self._size):
                row[other] = KEEP * row[other] + value * scaled[other]
            self._vector[at] = KEEP * self._vector[at] + value
        self._solution = None

    def solve(self) -> list[float]:
        if self._solution is None:
            best_error = 0.0  # error of all coefficients 0, less a constant
            self._solution = [0.0] * self._size
            for count in range(1, self._size + 1):
                for chosen in combinations(range(self._size), count):
                    found = self._solve(chosen)
                    # More coefficients must be clearly better, otherwise rounding would decide between equal inputs.
                    if found and min(found) >= 0 and (error := self._error(chosen, found)) < best_error - 1e-9:
                        best_error = error
                        self._solution = [0.0] * self._size
                        for at, value in zip(chosen, found, strict=True):
                            self._solution[at] = value
        return self._solution

    def _solve(self, chosen: tuple[int, ...]) -> list[float] | None:
        """Solve for the chosen coefficients by elimination; None if the observations do not show them."""
        rows = [[self._matrix[i][j] for j in chosen] + [self._vector[i]] for i in chosen]
        size = len(rows)
        for at, row in enumerate(rows):
            if row[at] <= SINGULAR * self._matrix[chosen[at]][chosen[at]]:
                return None
            for other in rows[at + 1 :]:
                share = other[at] / row[at]
                for column in range(at, size + 1):
                    other[column] -= share * row[column]
        found = [0.0] * size
        for at in reversed(range(size)):
            known = sum(rows[at][column] * found[column] for column in range(at + 1, size))
            found[at] = (rows[at][size] - known) / rows[at][at]
        return found

    def _error(self, chosen: tuple[int, ...], found: Sequence[float]) -> float:
        """Return the sum of squared errors, less a constant."""
        error = 0.0
        for i, a in zip(chosen, found, strict=True):
            error -= 2 * a * self._vector[i]
            for j, b in zip(chosen, found, strict=True):
                error += a * b * self._matrix[i][j]
        return error


def _pairs(first: int, end: int) -> float:
    return (end - first) * (first + end - 1) / 2
