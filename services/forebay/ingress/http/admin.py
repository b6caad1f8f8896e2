"""Admin API: routes that show or change settings that affect every client, and send commands to workers.

Each route requires the admin token of the ingress. Without a token the ingress serves no admin API. A change responds
with the settings or rules after it, once it is on the log.
"""

import hmac
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeVar, get_args

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import Field

from forebay import runtime
from forebay.events.control import DisaggPolicy, PolicySet
from forebay.events.pools import PoolCanarySet, PoolDrainSet, PoolGrid, PoolRoutingConfigured, PoolRule
from forebay.ingress.errors import ApiError, invalid
from forebay.ingress.group import GroupClient
from forebay.ingress.http.body import read_body
from forebay.ingress.http.control_api import BODY_BYTES_MAX, COMMAND_BODIES, OperatorField, add_commands
from forebay.ingress.http.openapi import SETTINGS, body_of, errors
from forebay.ingress.http.queries import group_of
from forebay.ingress.openai.fields import CheckedBody, parse
from forebay.ingress.openai.nvext import WEIGHT_MAX
from forebay.ingress.openai.requests import adapter_of
from forebay.ingress.served_models import ServedModels
from forebay.runtime.errors import ConfigError
from forebay.simulate.pool_routing_file import pool_routing

GRIDS_MAX = 3  # one per role
TOKENS_MAX = (1 << 63) - 1

PoolName = Annotated[str, Field(min_length=1, max_length=256)]
Tokens = Annotated[int, Field(ge=0, le=TOKENS_MAX)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)]
Weight = Annotated[float, Field(ge=0.0, le=WEIGHT_MAX, allow_inf_nan=False)]


class PoolBody(CheckedBody):
    """Request body that names a model and changes settings of its pools or a rule. Subclasses add these."""

    model: str
    operator: OperatorField = ""

    def changes(self) -> dict[str, Any]:
        """Return the fields that the client sent, without the model and the operator."""
        return {name: getattr(self, name) for name in self.model_fields_set - {"model", "operator"}}

    def origin(self) -> dict[str, Any]:
        return {"model": self.model, "operator": self.operator, "at_us": runtime.wall_us()}


BodyT = TypeVar("BodyT", bound=PoolBody)


class PoolRoutingBody(PoolBody):
    """Body of POST /v1/pools/routing. It replaces all grids of the model."""

    grids: Annotated[
        tuple[dict[str, Any], ...], Field(max_length=GRIDS_MAX, description="At most one grid per role.")
    ] = ()
    retry: Annotated[bool, Field(description="Whether failed requests move to faster pools.")] = False

    def event(self) -> PoolRule:
        try:
            routing = pool_routing({"grids": [*self.grids], "retry": self.retry}, "parameter")
        except ConfigError as error:
            raise invalid(str(error), "grids") from error
        return PoolRoutingConfigured(routing=routing, **self.origin())


class PoolCanaryBody(PoolBody):
    """Body of POST /v1/pools/canary. Without `base` the pool stops being a canary."""

    pool: PoolName
    base: Annotated[str, Field(max_length=256)] = ""
    share: Fraction = 0.0

    def event(self) -> PoolRule:
        if self.base == self.pool:
            raise invalid(f"base is {self.base!r}; a canary gets requests of another pool", "base")
        share = self.share if self.base else 0.0
        return PoolCanarySet(pool=self.pool, base=self.base, share=share, **self.origin())


class PoolDrainBody(PoolBody):
    """Body of POST /v1/pools/drain. If `drained` is true, the pool gets no new requests."""

    pool: PoolName
    drained: bool = True

    def event(self) -> PoolRule:
        return PoolDrainSet(pool=self.pool, drained=self.drained, **self.origin())


class PoolPolicyBody(PoolBody):
    """Body of POST /v1/pools/policy. The policy is valid until the next change, also for an owner that takes over."""

    pool: PoolName
    mode: Annotated[
        str, Field(min_length=1, max_length=256, description="Router mode, or path of a class that the router allows.")
    ]

    def event(self) -> PolicySet:
        return PolicySet(pool=self.pool, mode=self.mode, **self.origin())


class BusyThresholdBody(PoolBody):
    """Body of POST /busy_threshold. A missing field keeps its current value; null disables the threshold."""

    active_decode_blocks_threshold: Fraction | None = None
    active_prefill_tokens_threshold: Tokens | None = None
    active_prefill_tokens_threshold_frac: Weight | None = None


class DisaggregationBody(PoolBody):
    """Body of POST /disaggregation. A missing field keeps its current value; null disables a busy threshold."""

    policy: DisaggPolicy = "always"
    max_local_prefill_length: Tokens = 0
    max_prefill_queue_size: Annotated[int, Field(ge=1, le=TOKENS_MAX)] = 1
    eff_isl_threshold: Tokens = 0
    eff_isl_ratio_threshold: Fraction = 0.0
    prefill_busy_threshold: Weight | None = None
    decode_busy_threshold: Fraction | None = None
    enforce: bool = False


RuleBody = PoolRoutingBody | PoolCanaryBody | PoolDrainBody | PoolPolicyBody
BODIES = (*COMMAND_BODIES, BusyThresholdBody, DisaggregationBody, *get_args(RuleBody))


def add_admin(app: FastAPI, models: ServedModels) -> None:
    async def require_model(request: Request) -> None:
        group = group_of(request, models)
        for name in request.query_params.getlist("model"):
            adapter_of(name, group.settings.model_name, ())

    token = models.front.settings.admin_token
    router = APIRouter(dependencies=[Depends(token_check(token)), Depends(require_model)])
    add_commands(router, models)
    _add_rules(router, models)
    _add_settings(router, models)
    app.routes.extend(router.routes)  # not `include_router`, which hides the methods of each path


async def _read(request: Request, kind: type[BodyT], group: GroupClient) -> BodyT:
    body = parse(kind, await read_body(request, BODY_BYTES_MAX))
    adapter_of(body.model, group.settings.model_name, ())
    return body


def _add_rules(router: APIRouter, models: ServedModels) -> None:
    async def rules(group: GroupClient) -> dict[str, Any]:
        model = group.settings.model_name
        routing, pools = await group.pools.rules(model)
        listed = [
            {
                "pool": name,
                "role": found.pool.role,
                "block_size": found.pool.block_size,
                "policy": found.pool.router.mode,
                "drained": found.is_drained,
                "canary": None if found.canary is None else {"base": found.canary.base, "share": found.canary.share},
            }
            for name, found in pools.items()
        ]
        return {"model": model, "retry": routing.retry, "grids": [*map(_plain, routing.grids)], "pools": listed}

    @router.get("/v1/pools", responses=errors(401))
    async def list_rules(request: Request) -> dict[str, Any]:
        """Return the pools of the model, and the rules by which requests are routed to them."""
        return await rules(group_of(request, models))

    def add(path: str, kind: type[RuleBody], text: str) -> None:
        @router.post(path, description=text, openapi_extra=body_of(kind), responses=errors(*SETTINGS))
        async def route(request: Request) -> dict[str, Any]:
            group = group_of(request, models)
            body = await _read(request, kind, group)
            await group.pools.set_rule(body.event())
            return await rules(group)

    add("/v1/pools/routing", PoolRoutingBody, "Replace the grids by which requests are routed to pools.")
    add("/v1/pools/canary", PoolCanaryBody, "Route a share of the requests of one pool to another pool, or end this.")
    add("/v1/pools/policy", PoolPolicyBody, "Change the policy that selects the workers of a pool's requests.")
    add("/v1/pools/drain", PoolDrainBody, "Route no new requests to a pool, or end this.")


def _add_settings(router: APIRouter, models: ServedModels) -> None:
    @router.get("/busy_threshold", responses=errors(401))
    async def list_thresholds(request: Request) -> dict[str, Any]:
        """Return the busy thresholds of each pool."""
        found = (await group_of(request, models).pools.configured()).values()
        return {"thresholds": [{"model": one.model, **_plain(one.router.busy), "pool": one.pool} for one in found]}

    @router.post("/busy_threshold", openapi_extra=body_of(BusyThresholdBody), responses=errors(*SETTINGS))
    async def set_thresholds(request: Request) -> dict[str, Any]:
        """Change the busy thresholds of a model, or return them if the body sets none."""
        group = group_of(request, models)
        body, pools = await _read(request, BusyThresholdBody, group), group.pools
        if changes := body.changes():
            await pools.set_busy_thresholds(body.model, changes, body.operator)
        return {"model": body.model, **_plain(await pools.busy_thresholds(body.model))}

    @router.get("/disaggregation", responses=errors(401))
    async def list_disaggregation(request: Request) -> dict[str, Any]:
        """Return for each decode pool which prompts prefill workers compute."""
        found = (await group_of(request, models).pools.configured()).values()
        decode = [one for one in found if one.role == "decode"]
        settings = [{"model": one.model, **_plain(one.router.disagg), "pool": one.pool} for one in decode]
        return {"disaggregation": settings}

    @router.post("/disaggregation", openapi_extra=body_of(DisaggregationBody), responses=errors(*SETTINGS))
    async def set_disaggregation(request: Request) -> dict[str, Any]:
        """Set which prompts of a model go to prefill workers. A body without settings only returns them."""
        group = group_of(request, models)
        body, pools = await _read(request, DisaggregationBody, group), group.pools
        if changes := body.changes():
            await pools.set_disaggregation(body.model, changes, body.operator)
        pool = await pools.disaggregation(body.model)
        return {"model": body.model, **_plain(pool.router.disagg), "pool": pool.pool}


def token_check(token: str) -> Callable[..., Awaitable[None]]:
    expected = token.encode()
    bearer = HTTPBearer(auto_error=False, description="The token in --token-file or FOREBAY_ADMIN_TOKEN.")

    async def require_token(given: Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)]) -> None:
        if given is None:
            text = "the admin API requires a token; send the header 'Authorization: Bearer TOKEN'"
            raise ApiError(401, "admin_token_missing", text)
        if not hmac.compare_digest(given.credentials.encode("latin-1"), expected):
            text = "the admin token is wrong; send the token that the ingress was started with"
            raise ApiError(403, "admin_token_wrong", text)

    return require_token


def _plain(settings: msgspec.Struct) -> dict[str, Any]:
    plain = msgspec.structs.asdict(settings)
    if isinstance(settings, PoolGrid):
        for name in ("pools", "overrides"):
            plain[name] = [*map(_plain, plain[name])]
    return plain
