"""What an engine did between two recorded moments, as amounts that each cost something: tokens, pairs, iterations.

Recorded are when each request came, had its first token and its last. Between these moments every running sequence gets
one token an iteration, so how many iterations there were follows from how many tokens each got: found by making the
counts of its moments fit one request after the other (multiplicative algebraic reconstruction: Gordon, Bender, Herman
1970). Prompts are computed first come, first served; a prompt's tokens are spread evenly over the time that it had.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from forebay.engine_model.timing import LinearTiming
from forebay.simulate.profiles.observed import EngineRun, Observed

COSTS = LinearTiming.__struct_fields__
PASSES = 30  # after which the counts hardly move
UNDER_WAY = 0.5  # of a step, when a request comes, is still to be done on average
FULL = 0.95  # of the KV cache
CHANGE_MAX = 2.0  # of a count by one request at once

Vector = NDArray[np.float64]


def amounts(run: EngineRun) -> tuple[list[Observed], Vector]:
    """The requests to compare, and what their times are the sums of: (2, requests, costs), first TTFT and then ITL.

    ITL is an average over the gaps between tokens, so its amounts are those of one gap.
    """
    begun = [one for one in run.requests if one.first_us]
    moments = np.unique([at for one in begun for at in (one.routed_us, one.first_us, _end(one))])
    if len(moments) < 2:
        return [], np.zeros((2, 0, len(COSTS)))
    spans = [tuple(np.searchsorted(moments, (one.routed_us, one.first_us, _end(one)))) for one in begun]
    middles, lasted = (moments[1:] + moments[:-1]) / 2, np.diff(moments)
    sequences, contexts = np.zeros(len(lasted)), np.zeros(len(lasted))
    for one, (_, first, last) in zip(begun, spans, strict=True):
        if last > first:
            sequences[first:last] += 1
            grown = (middles[first:last] - one.first_us) / (_end(one) - one.first_us)
            contexts[first:last] += one.prompt_tokens + grown * one.output_tokens + run.config.block_size / 2
    room = run.config.max_num_seqs, FULL * run.config.kv_blocks_total * run.config.block_size
    waits = (sequences >= room[0]) | (contexts >= room[1])  # whoever comes then is not computed at once
    prefill = _prefill(begun, spans, lasted, sequences > 0, run.config.max_num_batched_tokens)
    fixed = (prefill[:, 2] > 0) & ~waits
    decoded = _iterations(begun, spans, lasted, np.where(fixed, prefill[:, 2], np.nan))
    # Where nothing decodes, an iteration is one that computes prompts.
    iterations = np.where(sequences > 0, decoded, prefill[:, 2])
    done = np.column_stack(
        [iterations, prefill[:, 0], prefill[:, 1], decoded * (sequences > 0), decoded * sequences, decoded * contexts]
    )
    until = np.vstack([np.zeros(len(COSTS)), np.cumsum(done, axis=0)])
    compared = [(one, span) for one, span in zip(begun, spans, strict=True) if not one.left_out]
    ttft = [until[first] - until[came] for _, (came, first, _) in compared]
    itl = [(until[last] - until[first]) / max(1, one.output_tokens - 1) for one, (_, first, last) in compared]
    return [one for one, _ in compared], np.array([ttft, itl]).reshape(2, len(compared), len(COSTS))


def _end(one: Observed) -> int:
    """When it was done with; who never was is there to the end, for a moment."""
    return max(one.first_us, one.last_us or one.stopped_us)


def _iterations(begun: Sequence[Observed], spans: Sequence[tuple[int, ...]], lasted: Vector, fixed: Vector) -> Vector:
    """How many there were between any two moments next to each other; fractions where a moment cuts one.

    What `fixed` has is known; it is nan elsewhere.
    """
    is_free = np.isnan(fixed)
    known = []
    for one, (_, first, last) in zip(begun, spans, strict=True):
        if last > first and one.last_us and one.output_tokens > 1:
            free = first + np.flatnonzero(is_free[first:last])
            gaps = one.output_tokens - 1 - np.nansum(fixed[first:last])
            if len(free) and gaps > 0:
                known.append((free, gaps))
    counts, seen = np.zeros(len(lasted)), np.zeros(len(lasted))
    for free, gaps in known:
        counts[free] += gaps / lasted[free].sum()
        seen[free] += 1
    counts *= lasted / np.maximum(seen, 1)
    for _ in range(PASSES):
        for free, gaps in known:
            counts[free] *= min(max(gaps / counts[free].sum(), 1 / CHANGE_MAX), CHANGE_MAX)
    return np.where(is_free, counts, fixed)


def _prefill(
    begun: Sequence[Observed], spans: Sequence[tuple[int, ...]], lasted: Vector, busy: NDArray[np.bool_], budget: int
) -> Vector:
    """Tokens, pairs and steps of prompts between any two moments next to each other: (moments - 1, 3)."""
    done = np.zeros((len(lasted), 3))
    groups: dict[int, list[int]] = {}  # who got the first token in one step, by when that was
    for number, (_, first, _) in enumerate(spans):
        groups.setdefault(first, []).append(number)
    free = 0  # when the prompts before these were done
    for first, members in sorted(groups.items()):
        tokens = pairs = 0
        for number in members:
            one = begun[number]
            cached = one.cached_tokens or 0
            new = max(1, one.prompt_tokens - cached)
            tokens += new
            pairs += new * cached + new * (new + 1) // 2
        came = min(spans[number][0] for number in members)
        began = min(first - 1, max(free, came))
        span = slice(began, first)
        share = lasted[span] / lasted[span].sum()
        steps = -(-tokens // budget) + (UNDER_WAY if came > free and busy[began] else 0.0)
        done[span] += share[:, None] * (tokens, pairs, steps)
        free = first
    return done
