"""Decide where the prompt of a decode pool's request is computed: in the prefill pool, or on the decode worker.

This module only reads the world. The policies are those of Dynamo's disaggregated serving and of its conditional
disaggregation (isl_bounding, prefill_load, isl_or_load; classic: the rule of its first releases).
"""

from msgspec.structs import replace

from forebay.core.routing.eligibility import Ineligible
from forebay.core.routing.plan import Plan, StageCandidates
from forebay.core.selection.evaluation import evaluate
from forebay.core.selection.pool_selection import choose_prefill_pool
from forebay.core.selection.stages import find_prefill_candidates
from forebay.core.state.active_request import ActiveRequest
from forebay.core.state.roster import Roster
from forebay.core.world import World
from forebay.events.control import DisaggConfig, PoolConfigured
from forebay.events.decisions import PrefillPlace, PrefillReason


def locate_prompt(world: World, pool: PoolConfigured, request: ActiveRequest, roster: Roster) -> StageCandidates | Plan:
    """Decide whether the prefill pool computes the prompt of a request, and return the ranks that may compute it.

    The result is a plan if the disaggregation policy has already selected one of these ranks. `roster` has the ranks of
    `pool` that may generate the response. Embedding requests have no decode stage, so the worker that responds computes
    their prompt. Raises Ineligible if only the prefill pool may compute the prompt, and no prefill worker may take it.
    """
    local = StageCandidates("aggregated", pool, roster, request.submitted, request.attempt)
    if pool.role != "decode" or request.submitted.task != "generate":
        return local
    config = world.settings.disagg_of(pool)
    if request.begun:
        return _computed_locally(local, "begun")
    if config.policy == "never":
        return _computed_locally(local, "never")
    if must_compute_locally(world, pool, request):
        return _computed_locally(local, "failed")
    remote = _find_remote(world, pool, request)
    prefill = None if isinstance(remote, Ineligible) else remote
    here: StageCandidates | Plan = local
    there: StageCandidates | Plan | None = prefill
    place = PrefillPlace(remote=True, reason="always")
    if config.policy == "classic":
        here = evaluate(world, local)
        place = _apply_classic(config, here, prefill)
    elif config.policy != "always":
        here = evaluate(world, local)
        place, there = _apply_conditional(world, config, here, prefill)
    if not place.remote:
        return replace(here, place=place)
    if there is not None:
        return replace(there, place=place)
    assert isinstance(remote, Ineligible)
    if config.enforce:
        raise remote
    return _computed_locally(here, "prefill_busy" if remote.reason == "busy" else "no_prefill_worker")


def requires_remote_prefill(world: World, pool: PoolConfigured, request: ActiveRequest) -> bool:
    """Return whether only the prefill pool may compute the prompt of this request (`DisaggConfig.enforce`)."""
    config = world.settings.disagg_of(pool)
    return pool.role == "decode" and config.enforce and config.policy != "never" and not request.begun


def must_compute_locally(world: World, pool: PoolConfigured, request: ActiveRequest) -> bool:
    """Return whether the next worker must compute the whole prompt itself, because remote attempts failed too often.

    So the last attempt at a request uses no other worker. This does not apply if only the prefill pool may compute the
    prompt (`requires_remote_prefill`).
    """
    if pool.role != "decode" or requires_remote_prefill(world, pool, request):
        return False
    return request.prefills >= pool.attempts_max or 0 < request.attempt >= pool.attempts_max - 1


def _computed_locally(candidates: StageCandidates | Plan, reason: PrefillReason) -> StageCandidates | Plan:
    return replace(candidates, place=PrefillPlace(remote=False, reason=reason))


def _find_remote(world: World, pool: PoolConfigured, request: ActiveRequest) -> StageCandidates | Ineligible:
    """Return the ranks of the prefill pool that may compute the prompt, or the reason why there are none."""
    found = choose_prefill_pool(world, pool, request)
    if found is None:
        return Ineligible("no_workers", f"no prefill worker for the pool {pool.pool} is ready")
    prefill, choice = found
    try:
        candidates = find_prefill_candidates(world, prefill, request, again=request.was_dispatched)
        return candidates if choice is None else replace(candidates, pools=(choice,))
    except Ineligible as ineligible:
        return ineligible


def _apply_classic(config: DisaggConfig, decode: Plan, prefill: StageCandidates | None) -> PrefillPlace:
    uncached = _count_uncached(decode)
    loads = [] if prefill is None else prefill.roster.loads
    waiting = sum([max(0, load.active_requests - 1) for load in loads])
    reason: PrefillReason = "long_prompt"
    if uncached <= config.max_local_prefill_length:
        reason = "short_prompt"
    elif waiting >= config.max_prefill_queue_size:
        reason = "prefill_busy"
    remote = reason == "long_prompt"
    return PrefillPlace(remote=remote, reason=reason, uncached_tokens=uncached, prefill_waiting=waiting)


def _apply_conditional(
    world: World, config: DisaggConfig, decode: Plan, prefill: StageCandidates | None
) -> tuple[PrefillPlace, StageCandidates | Plan | None]:
    """Apply the policies `isl_bounding`, `prefill_load` and `isl_or_load`, then the busy check of the decode worker.

    Return where the prompt is computed, and `prefill`, or its plan if the load of the prefill workers was needed.
    """
    uncached = _count_uncached(decode)
    there: StageCandidates | Plan | None = prefill
    busy = None
    reason: PrefillReason = "prefill_idle"
    if config.policy != "prefill_load":
        reason = _classify_length(config, uncached, decode.request.prompt_tokens)
    if reason != "short_prompt" and config.policy != "isl_bounding" and prefill is not None:
        busy = False
        if config.prefill_busy_threshold is not None:
            there = plan = evaluate(world, prefill)
            rank = plan.selected
            limit = config.prefill_busy_threshold * rank.worker.spec.max_num_batched_tokens
            busy = rank.load.prefill_tokens > limit
        reason = "prefill_busy" if busy else reason
    remote = reason not in ("short_prompt", "prefill_busy")
    decode_busy = None
    if not remote and config.decode_busy_threshold is not None:
        blocks = decode.selected.worker.spec.kv_blocks_total
        decode_busy = decode.table.terms(decode.at).decode_blocks > config.decode_busy_threshold * blocks
        if decode_busy:
            remote, reason = True, "decode_busy"
    place = PrefillPlace(
        remote=remote, reason=reason, uncached_tokens=uncached, prefill_busy=busy, decode_busy=decode_busy
    )
    return place, there


def _count_uncached(decode: Plan) -> int:
    """Return the prompt tokens that the selected decode worker would have to compute."""
    cached = decode.table.overlap(decode.at).device * decode.pool.block_size
    return max(0, decode.request.prompt_tokens - cached)


def _classify_length(config: DisaggConfig, uncached: int, prompt_tokens: int) -> PrefillReason:
    """Classify a prompt: it is short if its uncached part is small, both in tokens and as a share of the prompt."""
    if uncached >= config.eff_isl_threshold:
        return "long_prompt"
    ratio = uncached / max(1, prompt_tokens)
    return "short_prompt" if ratio < config.eff_isl_ratio_threshold else "uncached_prompt"
