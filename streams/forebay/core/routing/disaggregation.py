"""Decide where the prompt of a decode pool's request is computed: in the prefill pool, or on the decode worker.

This module only reads the world. `forebay.core.dispatch` changes it. Both pools select by their own configuration, with
Dynamo's changes. A prefill worker has no active blocks. A decode worker that fetches KV is selected by load alone,
counts every block as its own, and has nothing to prefill.

Source: Dynamo's disaggregated serving and conditional disaggregation (isl_bounding, prefill_load, isl_or_load; classic:
the rule of its first releases).
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import msgspec

from forebay.core.routing.eligibility import Ineligible
from forebay.core.routing.encoding import shortened
from forebay.core.routing.router import Choice, consider, find, find_again
from forebay.core.state.requests import Request
from forebay.core.state.roster import Roster
from forebay.core.world import World
from forebay.events.control import BusyThresholds, DisaggConfig, PoolConfigured
from forebay.events.decisions import PrefillPlace, PrefillReason
from forebay.events.requests import NO_HINTS, RouterOverride, RoutingHints

# A prefill pool, its candidates, and the request as prefill workers see it.
_Elsewhere = tuple[PoolConfigured, Roster, Request]


@dataclass(frozen=True, slots=True)
class Prefill:
    """Where a prompt is computed, and why.

    Attributes:
        place: decision and reason.
        pool: pool that computes the prompt; the decode pool itself if the decision is local.
        roster: candidates of that pool.
        asked: request as that pool sees it.
    """

    place: PrefillPlace
    pool: PoolConfigured
    roster: Roster
    asked: Request


def place_prefill(world: World, pool: PoolConfigured, request: Request, roster: Roster) -> Prefill:
    """Apply the disaggregation policy to a request that `roster` of the decode pool `pool` may respond to.

    Raises:
        Ineligible: the policy enforces remote prefill, and no prefill worker is eligible.
    """
    config = world.disagg.get(pool.pool, pool.router.disagg)
    if request.begun:
        return _local(pool, roster, request, "begun")
    if config.policy == "never":
        return _local(pool, roster, request, "never")
    if on_its_own(world, pool, request):
        return _local(pool, roster, request, "failed")
    elsewhere = _prefillers(world, pool, request)
    prefill = None if isinstance(elsewhere, Ineligible) else elsewhere
    place = PrefillPlace(remote=True, reason="always")
    if config.policy == "classic":
        place = _by_length_and_queue(world, config, (pool, request, roster), prefill)
    elif config.policy != "always":
        place = _by_length_and_load(world, config, (pool, request, roster), prefill)
    if not place.remote:
        return Prefill(place, pool, roster, request)
    if not isinstance(elsewhere, Ineligible):
        return Prefill(place, *elsewhere)
    if config.enforce:
        raise elsewhere
    return _local(pool, roster, request, "prefill_busy" if elsewhere.reason == "busy" else "no_prefill_worker")


def computed_by(pool: PoolConfigured, roster: Roster, prefill: Prefill | None) -> tuple[PoolConfigured, Roster]:
    """Return the pool that computes the prompt, and its candidates; `roster` of `pool` generates the response."""
    return (pool, roster) if prefill is None else (prefill.pool, prefill.roster)


def not_prefilled(request: Request, cause: str | None) -> str:
    """Return the abort message for a prompt that could not be computed remotely, or not fetched."""
    why = "prefill workers were lost, or nobody came in time" if cause is None else shortened(cause)
    return f"its prompt could not be computed and fetched in {max(request.attempt, request.prefills)} attempts: {why}"


def enforced(world: World, pool: PoolConfigured, request: Request) -> bool:
    """Return whether only the prefill pool may compute the prompt of this request."""
    config = world.disagg.get(pool.pool, pool.router.disagg)
    return pool.role == "decode" and config.enforce and config.policy != "never" and not request.begun


def on_its_own(world: World, pool: PoolConfigured, request: Request) -> bool:
    """Return whether the next worker computes the whole prompt itself, because remote attempts failed too often.

    The last attempt depends on no other worker, unless `enforce` is set.
    """
    if pool.role != "decode" or enforced(world, pool, request):
        return False
    return request.prefills >= pool.attempts_max or 0 < request.attempt >= pool.attempts_max - 1


def as_prefilled(request: Request, pool: str) -> Request:
    """Return the request as prefill workers see it: same prompt, session and adapter, but no choice of worker."""
    hints = request.hints
    if hints is not NO_HINTS:
        override = hints.override
        if override is not None and override.mode == "direct":
            override = msgspec.structs.replace(override, mode=None)
        hints = msgspec.structs.replace(hints, worker_id="", rank=None, allowed_workers=(), override=override)
    return replace(request, pool=pool, hints=hints, attempt=request.prefills, stage="prefill")


def as_decoded(request: Request) -> Request:
    """Return the request as a decode worker sees it that fetches the KV of the whole prompt."""
    return replace(request, hints=_decode_hints(request.hints), stage="decode")


@lru_cache(maxsize=256)
def prefilling(pool: PoolConfigured) -> PoolConfigured:
    """Return a prefill pool with the settings it selects by: its workers have no active blocks."""
    return msgspec.structs.replace(pool, router=msgspec.structs.replace(pool.router, track_active_blocks=False))


def prefillers(
    world: World, pool: PoolConfigured, asked: Request, busy: BusyThresholds | None = None, *, again: bool
) -> Roster:
    """Return the candidates of a prefill pool for a request.

    The worker of the last attempt is a candidate only if there is no other.

    Args:
        world: current state.
        pool: prefill pool.
        asked: request as prefill workers see it.
        busy: busy thresholds to apply instead of those in force; None applies those in force.
        again: whether the request was sent to a worker before. Then busy workers are candidates, too.

    Raises:
        Ineligible: no worker may take the request.
    """
    roster = find_again(world, pool, asked) if again else find(world, pool, asked, busy)
    return _others(roster, asked.prefiller_id)


def decoders(world: World, pool: PoolConfigured, request: Request, busy: BusyThresholds | None = None) -> Roster:
    """Return the ranks that may fetch the KV of a prompt and generate the response.

    On the first attempt these are the ranks a new request could get; if there are none, and on later attempts, every
    eligible rank. The worker of the last attempt is a candidate only if there is no other.

    Args:
        world: current state.
        pool: decode pool.
        request: request whose KV is kept by a prefill worker.
        busy: busy thresholds to apply instead of those in force; None applies those in force.

    Raises:
        Ineligible: no worker may take the request.
    """
    if not request.attempt:
        try:
            return find(world, pool, request, busy)
        except Ineligible:
            pass
    return _others(find_again(world, pool, request), request.decoder_id)


def is_kept(request: Request, now_us: int) -> bool:
    """Return whether a worker still keeps the KV of the prompt, as far as the owner knows."""
    return request.prefilled is not None and now_us < request.prefilled_due_us


def was_sent(request: Request) -> bool:
    """Return whether the request was ever sent to a worker, at any stage."""
    return request.attempt > 0 or request.encodings > 0 or request.prefills > 0


@lru_cache(maxsize=4096)
def _decode_hints(hints: RoutingHints) -> RoutingHints:
    override = msgspec.structs.replace(
        hints.override or RouterOverride(), overlap_score_credit=0.0, assume_kv_reuse=False, track_prefill_tokens=False
    )
    return msgspec.structs.replace(hints, override=override)


def _others(roster: Roster, had_it_last: str) -> Roster:
    """Return `roster` without one worker, or all of it if there is no other worker."""
    if not had_it_last:
        return roster
    others = [at for at, seat in enumerate(roster.seats) if seat.worker.spec.worker_id != had_it_last]
    return roster.only(others or list(range(len(roster.seats))))


def _local(pool: PoolConfigured, roster: Roster, request: Request, reason: PrefillReason) -> Prefill:
    return Prefill(PrefillPlace(remote=False, reason=reason), pool, roster, request)


def _prefillers(world: World, pool: PoolConfigured, request: Request) -> _Elsewhere | Ineligible:
    """Return the prefill pool of a decode pool with its candidates, or the reason why there are none."""
    found = world.prefillers_of(pool)
    if found is None:
        return Ineligible("no_workers", f"no worker that computes prompts for the pool {pool.pool} is ready")
    asked = as_prefilled(request, found.pool)
    try:
        roster = prefillers(world, found, asked, again=was_sent(request))
    except Ineligible as ineligible:
        return ineligible
    return prefilling(found), roster, asked


def _by_length_and_queue(
    world: World,
    config: DisaggConfig,
    decode: tuple[PoolConfigured, Request, Roster],
    prefill: _Elsewhere | None,
) -> PrefillPlace:
    """Apply the policy `classic`."""
    uncached, _ = _uncached(world, *decode)
    loads = [] if prefill is None else prefill[1].loads
    waiting = sum([max(0, load.active_requests - 1) for load in loads])
    reason: PrefillReason = "long_prompt"
    if uncached <= config.max_local_prefill_length:
        reason = "short_prompt"
    elif waiting >= config.max_prefill_queue_size:
        reason = "prefill_busy"
    remote = reason == "long_prompt"
    return PrefillPlace(remote=remote, reason=reason, uncached_tokens=uncached, prefill_waiting=waiting)


def _by_length_and_load(
    world: World,
    config: DisaggConfig,
    decode: tuple[PoolConfigured, Request, Roster],
    prefill: _Elsewhere | None,
) -> PrefillPlace:
    """Apply the policies `isl_bounding`, `prefill_load` and `isl_or_load`, then the busy check of the decode worker."""
    request = decode[1]
    uncached, choice = _uncached(world, *decode)
    busy = None
    reason: PrefillReason = "prefill_idle"
    if config.policy != "prefill_load":
        reason = _of_its_length(config, uncached, request.prompt_tokens)
    if reason != "short_prompt" and config.policy != "isl_bounding" and prefill is not None:
        busy = _prefill_is_busy(world, config, prefill)
        reason = "prefill_busy" if busy else reason
    remote = reason not in ("short_prompt", "prefill_busy")
    decode_busy = None
    if not remote and config.decode_busy_threshold is not None:
        blocks = choice.table.roster.seats[choice.at].worker.spec.kv_blocks_total
        decode_busy = choice.table.decode_blocks[choice.at] > config.decode_busy_threshold * blocks
        if decode_busy:
            remote, reason = True, "decode_busy"
    return PrefillPlace(
        remote=remote, reason=reason, uncached_tokens=uncached, prefill_busy=busy, decode_busy=decode_busy
    )


def _uncached(world: World, pool: PoolConfigured, request: Request, roster: Roster) -> tuple[int, Choice]:
    """Return the prompt tokens that the selected decode worker would have to compute, and that selection."""
    choice = consider(world, pool, request, roster)
    cached = choice.table.overlap(choice.at).device * pool.block_size
    return max(0, request.prompt_tokens - cached), choice


def _of_its_length(config: DisaggConfig, uncached: int, prompt_tokens: int) -> PrefillReason:
    """Classify a prompt: it is short if its uncached part is small in tokens and as a share of the prompt."""
    if uncached >= config.eff_isl_threshold:
        return "long_prompt"
    ratio = uncached / max(1, prompt_tokens)
    return "short_prompt" if ratio < config.eff_isl_ratio_threshold else "uncached_prompt"


def _prefill_is_busy(world: World, config: DisaggConfig, prefill: _Elsewhere) -> bool:
    threshold = config.prefill_busy_threshold
    if threshold is None:
        return False
    pool, roster, asked = prefill
    choice = consider(world, pool, asked, roster)
    seat = choice.table.roster.seats[choice.at]
    return seat.load.prefill_tokens > threshold * seat.worker.spec.max_num_batched_tokens
