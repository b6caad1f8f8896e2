"""Select the encode worker for the images and videos of a request, before the request goes to its pool.

This module only reads the world. `forebay.core.dispatch` changes it. An encode worker has no KV cache to route by, so
the one with the fewest requests in flight is selected, regardless of the pool's mode.
"""

from array import array
from dataclasses import replace

import msgspec

from forebay.core.routing.plan import Selection
from forebay.core.routing.router import apply_override, select
from forebay.core.state.active_request import ActiveRequest
from forebay.core.state.roster import Roster
from forebay.core.world import World
from forebay.events.control import PoolConfigured
from forebay.events.requests import NO_HINTS, RouterOverride

LEAST_LOADED = RouterOverride(mode="least-loaded")
CAUSE_CHARS_MAX = 500  # of a worker's error text in a journal record


def find_encode_candidates(
    world: World, pool: PoolConfigured, request: ActiveRequest
) -> tuple[PoolConfigured, Roster] | None:
    """Return the encode pool for a request and its candidates, or None if the serving worker encodes the media itself.

    The worker of the last attempt is a candidate only if there is no other.
    """
    if not request.media_tokens or request.encoded is not None:
        return None
    found = world.encoders_of(pool.model)
    if found is None:
        return None
    encode_pool, roster = found
    others = [at for at, candidate in enumerate(roster.ranks) if candidate.worker.spec.worker_id != request.encoder_id]
    return encode_pool, roster.only(others or list(range(len(roster.ranks))))


def select_encoder(world: World, pool: PoolConfigured, request: ActiveRequest, roster: Roster) -> Selection:
    """Select one of the ranks of an encode pool, at least one, and report it to `on_selection`. Raises Ineligible."""
    by_load = msgspec.structs.replace(pool, router=apply_override(pool.router, LEAST_LOADED))
    return select(world, by_load, as_encode_request(request, pool.pool), roster)


def as_encode_request(request: ActiveRequest, pool: str) -> ActiveRequest:
    """Return the request as an encode worker sees it: its media alone, without blocks or routing hints."""
    return replace(
        request,
        pool=pool,
        prompt_tokens=request.media_tokens,
        blocks=array("Q"),
        packed=b"",
        hints=NO_HINTS,
        lora_name="",
        attempt=request.encodings,
        stage="encode",
    )


def encode_failure_message(request: ActiveRequest, cause: str | None) -> str:
    """Return the abort message for media that could not be encoded or fetched."""
    attempts = max(request.attempt, request.encodings)
    why = "encode workers were lost" if cause is None else shorten_cause(cause)
    return f"its images or videos could not be encoded and fetched in {attempts} attempts: {why}"


def shorten_cause(cause: str) -> str:
    """Return a worker's error text, shortened for a journal record."""
    return cause[:CAUSE_CHARS_MAX] or "no reason is told"
