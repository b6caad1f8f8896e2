"""HTTP API of an indexer. Every route only reads the state of a group, and responds with its position in the log."""

from typing import Any, Literal

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse

from forebay.core.dispatch import query
from forebay.core.routing.policies import PolicyMissing
from forebay.core.world import Stamp
from forebay.events.base import array_u64
from forebay.events.names import unknown_name
from forebay.events.requests import RouteQueried
from forebay.indexer.prompts import PromptBody, Tokenizers
from forebay.ingress.errors import ApiError
from forebay.ingress.http.body import read_body
from forebay.ingress.http.error_handlers import add_errors
from forebay.ingress.http.guards import OriginGuard
from forebay.ingress.http.health import add_health
from forebay.ingress.http.openapi import BODY_ERRORS, JSON, body_of, content, describe, errors, json_of
from forebay.ingress.openai.fields import parse
from forebay.ingress.render import route_of
from forebay.live.heartbeats import card_of
from forebay.live.indexer.dump import stored_events
from forebay.live.indexer.indexer import Indexer
from forebay.live.indexer.replica import Position, Replica
from forebay.replay.moment import RankFacts, ranks_of

BODY_BYTES_MAX = 8 << 20  # about a million token ids
POSITION = "x-forebay-position"
LINES = "application/x-ndjson"


class GroupEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A group of the system.

    Attributes:
        state: `following` with a current state. `restoring` while this process has none. `elsewhere` if another process
            has the group.
        problem: why there is no current state; null if there is one.
        address: URL of the process that has the group; empty for this process, and if it is unknown.
        position: position of the state in the log; null without a current state.
    """

    model: str
    state: Literal["following", "restoring", "elsewhere"]
    problem: str | None = None
    address: str = ""
    position: Position | None = None


class Groups(msgspec.Struct, frozen=True):
    """All groups of the system, sorted by model."""

    groups: list[GroupEntry]


class RankOverlap(msgspec.Struct, frozen=True):
    """Leading blocks of a prompt that a worker rank has cached. Each tier continues the tiers before it."""

    worker_id: str
    rank: int
    device: int
    host: int
    disk: int
    store: int


class Overlaps(msgspec.Struct, frozen=True):
    """Cached blocks of a prompt by worker rank. Ranks without any are left out.

    Attributes:
        blocks: full blocks of the prompt.
        block_size: tokens per block.
    """

    position: Position
    blocks: int
    block_size: int
    ranks: list[RankOverlap]


class Loads(msgspec.Struct, frozen=True):
    """Load and cache of each worker rank, and the number of queued requests by pool."""

    position: Position
    ranks: list[RankFacts]
    queued: dict[str, int]


def build_indexer_app(indexer: Indexer, tokenizers: Tokenizers, hosts: frozenset[str] | None) -> FastAPI:
    """Return the application of an indexer that accepts these values of the header `Host`; None accepts all."""
    app = FastAPI(title="forebay indexer", summary="Prefix index and load", docs_url=None, redoc_url=None)
    app.add_middleware(OriginGuard, hosts=hosts, origins=frozenset(), on_rejected=lambda _: None)
    add_errors(app)
    add_health(app, indexer.registry, indexer.why_not_ready)
    _add_reads(app, indexer)
    _add_queries(app, indexer, tokenizers)
    describe(app, (PromptBody,), (Groups, Overlaps, Loads))
    return app


def _add_reads(app: FastAPI, indexer: Indexer) -> None:
    failures = errors(404, 421)

    @app.get("/groups", responses={**json_of(Groups), **errors()})
    async def groups() -> Response:
        """Return the groups of the system, with the position of each group that this process has."""
        return _json(Groups([_entry(indexer, *one) for one in indexer.groups().items()]))

    @app.get("/groups/{model:path}/load", responses={**json_of(Loads), **failures})
    async def load(model: str) -> Response:
        """Return the load of each worker rank."""
        replica = _replica(indexer, model)
        queued = {pool: replica.world.queues.waiting(pool) for pool in sorted(replica.world.pools)}
        return _json(Loads(replica.position(), ranks_of(replica.world), queued))

    @app.get(
        "/groups/{model:path}/index",
        response_class=Response,
        responses={**content(LINES, "string", "KV events, one per line."), **failures},
    )
    async def index(model: str, worker: str = "") -> Response:
        """Return the index as KV events, of one worker or all. Applied to an empty index, they restore it."""
        replica = _replica(indexer, model)
        events = list(stored_events(replica.world.index, worker))  # the index changes while they are sent
        lines = (msgspec.json.encode(event) + b"\n" for event in events)
        headers = {POSITION: msgspec.json.encode(replica.position()).decode()}
        return StreamingResponse(lines, media_type=LINES, headers=headers)


def _add_queries(app: FastAPI, indexer: Indexer, tokenizers: Tokenizers) -> None:
    failures = errors(*BODY_ERRORS, 404, 421, 422)

    @app.post(
        "/groups/{model:path}/overlaps", openapi_extra=body_of(PromptBody), responses={**json_of(Overlaps), **failures}
    )
    async def overlaps(request: Request, model: str) -> Response:
        """Return how many leading blocks of a prompt each worker rank has cached, by tier."""
        replica, asked, block_size = await _asked(request, model)
        hashes = array_u64(asked.sequence_hashes)
        found = sorted(replica.world.index.overlaps(hashes).items())
        ranks = [RankOverlap(*key, *overlap) for key, overlap in found]
        return _json(Overlaps(replica.position(), len(hashes), block_size, ranks))

    @app.post(
        "/groups/{model:path}/select",
        openapi_extra=body_of(PromptBody),
        responses={
            **content(JSON, "object", "The object of `POST /v1/route`, with `position` and `reason`."),
            **failures,
        },
    )
    async def select(request: Request, model: str) -> Response:
        """Return the worker rank that the router would select now, with all candidates. Nothing is booked."""
        replica, asked, _ = await _asked(request, model)
        world = replica.world
        stamp: Stamp = {"owner_epoch": world.owner_epoch, "seq": world.seq, "consumed": (), "owner_nonce": ""}
        try:
            selected = query(world, asked, stamp)
        except PolicyMissing as missing:
            raise ApiError(503, "policy_missing", f"no selection for {model}: {missing}") from missing
        reason = {"reason": selected.reason, "message": selected.message}
        return _json({"position": replica.position(), **route_of(selected, model, asked.prompt_tokens), **reason})

    async def _asked(request: Request, model: str) -> tuple[Replica, RouteQueried, int]:
        """Return the replica of a model, the prompt in the body, and its block size. Raises ApiError."""
        body = parse(PromptBody, await read_body(request, BODY_BYTES_MAX))
        token_ids = await tokenizers.encode(card_of(_replica(indexer, model).world), body)
        replica = _replica(indexer, model)  # only now, because the group may have left this process meanwhile
        pool = replica.world.pool_of(model)
        if pool is None:
            raise ApiError(503, "no_pool", f"{model} has no pool yet; start a worker for it")
        return replica, body.query(model, token_ids, pool.block_size), pool.block_size


def _json(answer: Any) -> Response:
    return Response(msgspec.json.encode(answer), media_type=JSON)


def _entry(indexer: Indexer, model: str, address: str) -> GroupEntry:
    replica = indexer.find(model)
    if replica is None:
        return GroupEntry(model=model, state="elsewhere", address=address)
    if replica.problem is not None:
        return GroupEntry(model=model, state="restoring", problem=replica.problem)
    return GroupEntry(model=model, state="following", position=replica.position())


def _replica(indexer: Indexer, model: str) -> Replica:
    """Return the replica of a model with a current state.

    Raises ApiError: 404 for an unknown model, 421 if another process has its group, 503 without a current state.
    """
    replica, known = indexer.find(model), indexer.groups()
    if replica is not None and replica.problem is None:
        return replica
    if replica is not None:
        raise ApiError(503, "restoring", f"the state of {model} is not available: {replica.problem}")
    if model not in known:
        raise ApiError(404, "model_not_found", unknown_name("model", model, known), "model")
    if not known[model]:
        raise ApiError(503, "not_assigned", f"no known instance of the indexer has {model} yet; try again soon")
    raise ApiError(421, "other_instance", f"another instance of the indexer has {model}: {known[model]}", "model")
