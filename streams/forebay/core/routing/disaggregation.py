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
from forebay.core.routing.encoding import shorten_cause
from forebay.core.routing.plan import Selection
from forebay.core.routing.router import evaluate, find_candidates, find_retry_candidates
from forebay.core.state.active_request import ActiveRequest
from forebay.core.state.roster import Roster
from forebay.core.world import World
from forebay.events.control import BusyThresholds, DisaggConfig, PoolConfigured
from forebay.events.decisions import PrefillPlace, PrefillReason
from forebay.events.requests import NO_HINTS, RouterOverride, RoutingHints

# A prefill pool, its candidates, and the request as prefill workers see it.
_RemotePrefill = tuple[PoolConfigured, Roster, ActiveRequest]


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """Where a prompt is computed, and why.

    Attributes:
        place: decision and reason.
        pool: pool that computes the prompt; the decode pool itself if the decision is local.
        roster: candidates of that pool.
        request: request as that pool sees it.
    """

    place: PrefillPlace
    pool: PoolConfigured
    roster: Roster
    request: ActiveRequest


def decide_prefill(world: World, pool: PoolConfigured, request: ActiveRequest, roster: Roster) -> PrefillPlan:
    """Apply the disaggregation policy to a request that `roster` of the decode pool `pool` may respond to.

    Raises:
        Ineligible: the policy enforces remote prefill, and no prefill worker is eligible.
    """
    config = world.disagg.get(pool.pool, pool.router.disagg)
    if request.begun:
        return _plan_local(pool, roster, request, "begun")
    if config.policy == "never":
        return _plan_local(pool, roster, request, "never")
    if must_compute_locally(world, pool, request):
        return _plan_local(pool, roster, request, "failed")
    elsewhere = _find_remote(world, pool, request)
    prefill = None if isinstance(elsewhere, Ineligible) else elsewhere
    place = PrefillPlace(remote=True, reason="always")
    if config.policy == "classic":
        place = _apply_classic(world, config, (pool, request, roster), prefill)
    elif config.policy != "always":
        place = _apply_conditional(world, config, (pool, request, roster), prefill)
    if not place.remote:
        return PrefillPlan(place, pool, roster, request)
    if not isinstance(elsewhere, Ineligible):
        return PrefillPlan(place, *elsewhere)
    if config.enforce:
        raise elsewhere
    return _plan_local(pool, roster, request, "prefill_busy" if elsewhere.reason == "busy" else "no_prefill_worker")


def prefill_candidates(
    pool: PoolConfigured, roster: Roster, prefill: PrefillPlan | None
) -> tuple[PoolConfigured, Roster]:
    """Return the pool that computes the prompt, and its candidates; `roster` of `pool` generates the response."""
    return (pool, roster) if prefill is None else (prefill.pool, prefill.roster)


def prefill_failure_message(request: ActiveRequest, cause: str | None) -> str:
    """Return the abort message for a prompt that could not be computed remotely, or not fetched."""
    why = "prefill workers were lost, or nobody came in time" if cause is None else shorten_cause(cause)
    return f"its prompt could not be computed and fetched in {max(request.attempt, request.prefills)} attempts: {why}"


def requires_remote_prefill(world: World, pool: PoolConfigured, request: ActiveRequest) -> bool:
    """Return whether only the prefill pool may compute the prompt of this request."""
    config = world.disagg.get(pool.pool, pool.router.disagg)
    return pool.role == "decode" and config.enforce and config.policy != "never" and not request.begun


def must_compute_locally(world: World, pool: PoolConfigured, request: ActiveRequest) -> bool:
    """Return whether the next worker computes the whole prompt itself, because remote attempts failed too often.

    The last attempt depends on no other worker, unless `enforce` is set.
    """
    if pool.role != "decode" or requires_remote_prefill(world, pool, request):
        return False
    return request.prefills >= pool.attempts_max or 0 < request.attempt >= pool.attempts_max - 1


def as_prefill_request(request: ActiveRequest, pool: str) -> ActiveRequest:
    """Return the request as prefill workers see it: same prompt, session and adapter, but no selection of worker."""
    hints = request.hints
    if hints is not NO_HINTS:
        override = hints.override
        if override is not None and override.mode == "direct":
            override = msgspec.structs.replace(override, mode=None)
        hints = msgspec.structs.replace(hints, worker_id="", rank=None, allowed_workers=(), override=override)
    return replace(request, pool=pool, hints=hints, attempt=request.prefills, stage="prefill")


def as_decode_request(request: ActiveRequest) -> ActiveRequest:
    """Return the request as a decode worker sees it that fetches the KV of the whole prompt."""
    return replace(request, hints=_decode_hints(request.hints), stage="decode")


@lru_cache(maxsize=256)
def as_prefill_pool(pool: PoolConfigured) -> PoolConfigured:
    """Return a prefill pool with the settings it selects by: its workers have no active blocks."""
    return msgspec.structs.replace(pool, router=msgspec.structs.replace(pool.router, track_active_blocks=False))


def find_prefill_candidates(
    world: World, pool: PoolConfigured, request: ActiveRequest, busy: BusyThresholds | None = None, *, again: bool
) -> Roster:
    """Return the candidates of a prefill pool for a request.

    The worker of the last attempt is a candidate only if there is no other.

    Args:
        world: current state.
        pool: prefill pool.
        request: request as prefill workers see it.
        busy: busy thresholds to apply instead of those in force; None applies those in force.
        again: whether the request was sent to a worker before. Then busy workers are candidates, too.

    Raises:
        Ineligible: no worker may take the request.
    """
    roster = find_retry_candidates(world, pool, request) if again else find_candidates(world, pool, request, busy)
    return _without_worker(roster, request.prefiller_id)


def find_decode_candidates(
    world: World, pool: PoolConfigured, request: ActiveRequest, busy: BusyThresholds | None = None
) -> Roster:
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
            return find_candidates(world, pool, request, busy)
        except Ineligible:
            pass
    return _without_worker(find_retry_candidates(world, pool, request), request.decoder_id)


def has_kept_kv(request: ActiveRequest, now_us: int) -> bool:
    """Return whether a worker still keeps the KV of the prompt, as far as the owner knows."""
    return request.prefilled is not None and now_us < request.prefilled_due_us


def was_dispatched(request: ActiveRequest) -> bool:
    """Return whether the request was ever sent to a worker, at any stage."""
    return request.attempt > 0 or request.encodings > 0 or request.prefills > 0


@lru_cache(maxsize=4096)
def _decode_hints(hints: RoutingHints) -> RoutingHints:
    override = msgspec.structs.replace(
        hints.override or RouterOverride(), overlap_score_credit=0.0, assume_kv_reuse=False, track_prefill_tokens=False
    )
    return msgspec.structs.replace(hints, override=override)


def _without_worker(roster: Roster, had_it_last: str) -> Roster:
    """Return `roster` without one worker, or all of it if there is no other worker."""
    if not had_it_last:
        return roster
    others = [at for at, candidate in enumerate(roster.ranks) if candidate.worker.spec.worker_id != had_it_last]
    return roster.only(others or list(range(len(roster.ranks))))


def _plan_local(pool: PoolConfigured, roster: Roster, request: ActiveRequest, reason: PrefillReason) -> PrefillPlan:
    return PrefillPlan(PrefillPlace(remote=False, reason=reason), pool, roster, request)


def _find_remote(world: World, pool: PoolConfigured, request: ActiveRequest) -> _RemotePrefill | Ineligible:
    """Return the prefill pool of a decode pool with its candidates, or the reason why there are none."""
    found = world.prefillers_of(pool)
    if found is None:
        return Ineligible("no_workers", f"no worker that computes prompts for the pool {pool.pool} is ready")
    request = as_prefill_request(request, found.pool)
    try:
        roster = find_prefill_candidates(world, found, request, again=was_dispatched(request))
    except Ineligible as ineligible:
        return ineligible
    return as_prefill_pool(found), roster, request


def _apply_classic(
    world: World,
    config: DisaggConfig,
    decode: tuple[PoolConfigured, ActiveRequest, Roster],
    prefill: _RemotePrefill | None,
) -> PrefillPlace:
    """Apply the policy `classic`."""
    uncached, _ = _count_uncached(world, *decode)
    loads = [] if prefill is None else prefill[1].loads
    waiting = sum([max(0, load.active_requests - 1) for load in loads])
    reason: PrefillReason = "long_prompt"
    if uncached <= config.max_local_prefill_length:
        reason = "short_prompt"
    elif waiting >= config.max_prefill_queue_size:
        reason = "prefill_busy"
    remote = reason == "long_prompt"
    return PrefillPlace(remote=remote, reason=reason, uncached_tokens=uncached, prefill_waiting=waiting)


def _apply_conditional(
    world: World,
    config: DisaggConfig,
    decode: tuple[PoolConfigured, ActiveRequest, Roster],
    prefill: _RemotePrefill | None,
) -> PrefillPlace:
    """Apply the policies `isl_bounding`, `prefill_load` and `isl_or_load`, then the busy check of the decode worker."""
    request = decode[1]
    uncached, selection = _count_uncached(world, *decode)
    busy = None
    reason: PrefillReason = "prefill_idle"
    if config.policy != "prefill_load":
        reason = _classify_length(config, uncached, request.prompt_tokens)
    if reason != "short_prompt" and config.policy != "isl_bounding" and prefill is not None:
        busy = _prefill_is_busy(world, config, prefill)
        reason = "prefill_busy" if busy else reason
    remote = reason not in ("short_prompt", "prefill_busy")
    decode_busy = None
    if not remote and config.decode_busy_threshold is not None:
        blocks = selection.table.roster.ranks[selection.at].worker.spec.kv_blocks_total
        decode_busy = selection.table.decode_blocks[selection.at] > config.decode_busy_threshold * blocks
        if decode_busy:
            remote, reason = True, "decode_busy"
    return PrefillPlace(
        remote=remote, reason=reason, uncached_tokens=uncached, prefill_busy=busy, decode_busy=decode_busy
    )


def _count_uncached(
    world: World, pool: PoolConfigured, request: ActiveRequest, roster: Roster
) -> tuple[int, Selection]:
    """Return the prompt tokens that the selected decode worker would have to compute, and that selection."""
    selection = evaluate(world, pool, request, roster)
    cached = selection.table.overlap(selection.at).device * pool.block_size
    return max(0, request.prompt_tokens - cached), selection


def _classify_length(config: DisaggConfig, uncached: int, prompt_tokens: int) -> PrefillReason:
    """Classify a prompt: it is short if its uncached part is small in tokens and as a share of the prompt."""
    if uncached >= config.eff_isl_threshold:
        return "long_prompt"
    ratio = uncached / max(1, prompt_tokens)
    return "short_prompt" if ratio < config.eff_isl_ratio_threshold else "uncached_prompt"


def _prefill_is_busy(world: World, config: DisaggConfig, prefill: _RemotePrefill) -> bool:
    threshold = config.prefill_busy_threshold
    if threshold is None:
        return False
    pool, roster, request = prefill
    selection = evaluate(world, pool, request, roster)
    candidate = selection.table.roster.ranks[selection.at]
    return candidate.load.prefill_tokens > threshold * candidate.worker.spec.max_num_batched_tokens
