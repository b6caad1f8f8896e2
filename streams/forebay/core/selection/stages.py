"""Candidates of each stage of a request, and the changes of request and configuration for that stage.

This module only reads the world. If a group has pools for encode, prefill and decode, workers of different pools encode
the images and videos, compute the prompt, and generate the response. Each pool selects by its own configuration, with
Dynamo's changes:

- An encode worker has no KV cache to route by, so the worker with the fewest requests in flight is selected.
- Requests on a prefill worker do not count as active blocks.
- A decode worker that fetches KV is selected by load alone. All blocks of the request count, even if other requests
  share them, and it has nothing to prefill.

If a stage is repeated, the worker of the last attempt is a candidate only if there is no other.
"""

from array import array
from functools import lru_cache

import msgspec
from msgspec.structs import replace

from forebay.core.routing.eligibility import Ineligible
from forebay.core.routing.plan import StageCandidates
from forebay.core.selection.candidates import find_candidates, find_retry_candidates
from forebay.core.selection.evaluation import apply_override
from forebay.core.state.active_request import ActiveRequest
from forebay.core.state.roster import Roster
from forebay.core.state.submitted_request import SubmittedRequest
from forebay.core.world import World
from forebay.events.control import BusyThresholds, PoolConfigured
from forebay.events.requests import NO_HINTS, RouterOverride, RoutingHints

LEAST_LOADED = RouterOverride(mode="least-loaded")


def find_encode_candidates(world: World, pool: PoolConfigured, request: ActiveRequest) -> StageCandidates | None:
    """Return the encode workers for a request; None if there is nothing to encode, or if no encode worker is ready.

    If it is None, the worker that computes the prompt encodes the images and videos itself.
    """
    submitted = request.submitted
    if not submitted.media_tokens or request.encoded is not None or submitted.is_external:
        return None
    found = world.encoders_of(pool.model)
    if found is None:
        return None
    encode_pool, roster = found
    by_load = msgspec.structs.replace(encode_pool, router=apply_override(encode_pool.router, LEAST_LOADED))
    view = as_encode_request(request.submitted, encode_pool.pool)
    return StageCandidates("encode", by_load, _without_worker(roster, request.encoder_id), view, request.encodings)


def find_prefill_candidates(
    world: World, pool: PoolConfigured, request: ActiveRequest, busy: BusyThresholds | None = None, *, again: bool
) -> StageCandidates:
    """Return the ranks of a prefill pool that may compute the prompt of a request. Raises Ineligible if there are none.

    If the request was sent to a worker before (`again`), ranks of busy workers are candidates, too.
    """
    view = as_prefill_request(request.submitted, pool.pool)
    if again:
        roster = find_retry_candidates(world, pool, view, request.rejected_by)
    else:
        roster = find_candidates(world, pool, view, busy)
    roster = _without_worker(roster, request.prefiller_id)
    return StageCandidates("prefill", _as_prefill_pool(pool), roster, view, request.prefills)


def find_decode_candidates(
    world: World, pool: PoolConfigured, request: ActiveRequest, busy: BusyThresholds | None = None
) -> Roster:
    """Return the ranks of a decode pool that may fetch the kept KV of a prompt and generate the response.

    On the first attempt these are the ranks that could take a new request. If there are none, and on later attempts,
    they are all eligible ranks. Raises Ineligible if no worker may take the request.
    """
    if not request.attempt:
        try:
            return find_candidates(world, pool, request.submitted, busy)
        except Ineligible:
            pass
    roster = find_retry_candidates(world, pool, request.submitted, request.rejected_by)
    return _without_worker(roster, request.decoder_id)


def as_encode_request(request: SubmittedRequest, pool: str) -> SubmittedRequest:
    """Return a copy of the request for routing to the encode pool `pool`.

    The copy has no prompt blocks, no adapter and no routing hints. Its length is the number of placeholder tokens of
    its images and videos.
    """
    return replace(
        request,
        pool=pool,
        prompt_tokens=request.media_tokens,
        blocks=array("Q"),
        packed=b"",
        hints=NO_HINTS,
        lora_name="",
    )


def as_prefill_request(request: SubmittedRequest, pool: str) -> SubmittedRequest:
    """Return a copy of the request for routing to the prefill pool `pool`.

    It has the same prompt, session and adapter, but no hint for a specific worker, because the client's hint means a
    decode worker.
    """
    hints = request.hints
    if hints is not NO_HINTS:
        override = hints.override
        if override is not None and override.mode == "direct":
            override = msgspec.structs.replace(override, mode=None)
        hints = msgspec.structs.replace(hints, worker_id="", rank=None, allowed_workers=(), override=override)
    return replace(request, pool=pool, hints=hints)


def as_decode_request(request: SubmittedRequest) -> SubmittedRequest:
    """Return a copy of the request for routing to a decode worker that fetches the KV of the whole prompt.

    The routing hints of the copy override three router settings, so that the owner selects by load alone.
    """
    return replace(request, hints=_decode_hints(request.hints))


@lru_cache(maxsize=256)
def _as_prefill_pool(pool: PoolConfigured) -> PoolConfigured:
    return msgspec.structs.replace(pool, router=msgspec.structs.replace(pool.router, track_active_blocks=False))


@lru_cache(maxsize=4096)
def _decode_hints(hints: RoutingHints) -> RoutingHints:
    override = msgspec.structs.replace(
        hints.override or RouterOverride(), overlap_score_credit=0.0, assume_kv_reuse=False, track_prefill_tokens=False
    )
    return msgspec.structs.replace(hints, override=override)


def _without_worker(roster: Roster, last_worker_id: str) -> Roster:
    """Return `roster` without one worker, or all of it if there is no other worker."""
    if not last_worker_id:
        return roster
    others = [at for at, candidate in enumerate(roster.ranks) if candidate.worker.spec.worker_id != last_worker_id]
    return roster.only(others or list(range(len(roster.ranks))))
