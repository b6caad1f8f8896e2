"""Estimates of the work that an engine did between recorded events: tokens, attention pairs, iterations.

The recording has the arrival, the first token and the last token of each request. Between these events every running
sequence gets one token per iteration. The number of iterations between events therefore follows from the tokens of each
request. It is solved by fitting the counts to one request after another (multiplicative algebraic reconstruction:
Gordon, Bender, Herman 1970). Prompts are assumed to be computed first come, first served. The tokens of a prompt are
spread evenly over its prefill time.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from forebay.engine_model.timing import LinearTiming
from forebay.simulate.profiles.observed import EngineRun, ObservedRequest

COSTS = LinearTiming.__struct_fields__
PASSES = 30  # iterations of the reconstruction; after these the counts hardly change
STEP_REMAINING = 0.5  # mean remaining share of the current step when a request arrives
FULL = 0.95  # share of the KV cache above which it counts as full
CHANGE_MAX = 2.0  # maximum factor by which one request changes a count in one pass

Vector = NDArray[np.float64]


def amounts(run: EngineRun) -> tuple[list[ObservedRequest], Vector]:
    """Return the compared requests, and the amounts of work that explain their TTFT and ITL.

    Returns:
        The requests, and an array of shape (2, requests, costs): for each request and each kind of cost, the amount of
        work during its TTFT (index 0) and during an average gap between its tokens (index 1).
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
    waits = (sequences >= room[0]) | (contexts >= room[1])  # the engine is full, so a new request has to wait
    prefill = _prefill(begun, spans, lasted, sequences > 0, run.config.max_num_batched_tokens)
    fixed = (prefill[:, 2] > 0) & ~waits
    decoded = _iterations(begun, spans, lasted, np.where(fixed, prefill[:, 2], np.nan))
    # Where no sequence decodes, every iteration is a prefill.
    iterations = np.where(sequences > 0, decoded, prefill[:, 2])
    done = np.column_stack(
        [iterations, prefill[:, 0], prefill[:, 1], decoded * (sequences > 0), decoded * sequences, decoded * contexts]
    )
    until = np.vstack([np.zeros(len(COSTS)), np.cumsum(done, axis=0)])
    compared = [(one, span) for one, span in zip(begun, spans, strict=True) if not one.left_out]
    ttft = [until[first] - until[came] for _, (came, first, _) in compared]
    itl = [(until[last] - until[first]) / max(1, one.output_tokens - 1) for one, (_, first, last) in compared]
    return [one for one, _ in compared], np.array([ttft, itl]).reshape(2, len(compared), len(COSTS))


def _end(one: ObservedRequest) -> int:
    """Return when a request left the engine. A request without a recorded end leaves at its first token."""
    return max(one.first_us, one.last_us or one.stopped_us)


def _iterations(
    begun: Sequence[ObservedRequest], spans: Sequence[tuple[int, ...]], lasted: Vector, fixed: Vector
) -> Vector:
    """Return the number of iterations between consecutive events. It is fractional where an event splits an iteration.

    Args:
        begun: requests with a first token.
        spans: indexes of each request's arrival, first token and end among the events.
        lasted: microseconds between consecutive events.
        fixed: counts that are already known; nan elsewhere.
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
    begun: Sequence[ObservedRequest],
    spans: Sequence[tuple[int, ...]],
    lasted: Vector,
    busy: NDArray[np.bool_],
    budget: int,
) -> Vector:
    """Return tokens, pairs and steps of prefill between consecutive events, with shape (events - 1, 3)."""
    done = np.zeros((len(lasted), 3))
    groups: dict[int, list[int]] = {}  # requests whose first tokens came in one step, by the index of that event
    for number, (_, first, _) in enumerate(spans):
        groups.setdefault(first, []).append(number)
    free = 0  # event at which all earlier prefills were done
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
        steps = -(-tokens // budget) + (STEP_REMAINING if came > free and busy[began] else 0.0)
        done[span] += share[:, None] * (tokens, pairs, steps)
        free = first
    return done
