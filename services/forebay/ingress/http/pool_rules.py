"""Routes that show and change the rules by which the owner chooses the pool of a request, and the policies of pools.

Each change responds with the rules after the change, once it is on the log.
"""

from abc import ABC, abstractmethod
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Request
from pydantic import Field

from forebay import runtime
from forebay.core.state.pool_registry import PoolEvent
from forebay.events.control import PolicySet
from forebay.events.pools import PoolCanarySet, PoolDrainSet, PoolGrid, PoolRoutingConfigured
from forebay.ingress.errors import invalid
from forebay.ingress.group import GroupClient
from forebay.ingress.http.body import read_body
from forebay.ingress.http.openapi import SETTINGS, body_of, errors
from forebay.ingress.http.operator_name import OperatorField
from forebay.ingress.openai.fields import CheckedBody, parse
from forebay.ingress.openai.requests import adapter_of
from forebay.simulate.pool_routing_file import PoolRoutingUnusable, pool_routing

BODY_BYTES_MAX = 1 << 20
GRIDS_MAX = 3  # one per role

PoolName = Annotated[str, Field(min_length=1, max_length=256)]


class PoolRuleBody(CheckedBody, ABC):
    """Request body that names a model and changes a rule for its pools. Subclasses add the rule."""

    model: str
    operator: OperatorField = ""

    @abstractmethod
    def event(self) -> PoolEvent | PolicySet:
        """Return the event that changes the rule. Raises ApiError (400) if the rule is invalid."""


class PoolRoutingBody(PoolRuleBody):
    """Body of POST /v1/pools/routing. It replaces all grids of the model."""

    grids: Annotated[
        tuple[dict[str, Any], ...], Field(max_length=GRIDS_MAX, description="At most one grid per role.")
    ] = ()
    retry: Annotated[bool, Field(description="Whether failed requests move to faster pools.")] = False

    def event(self) -> PoolEvent:
        try:
            routing = pool_routing({"grids": [*self.grids], "retry": self.retry}, "parameter")
        except PoolRoutingUnusable as error:
            raise invalid(str(error), "grids") from error
        return PoolRoutingConfigured(model=self.model, routing=routing, at_us=runtime.wall_us(), operator=self.operator)


class PoolCanaryBody(PoolRuleBody):
    """Body of POST /v1/pools/canary. Without `base` the pool stops being a canary."""

    pool: PoolName
    base: Annotated[str, Field(max_length=256)] = ""
    share: Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)] = 0.0

    def event(self) -> PoolEvent:
        """Return the event that starts, changes or ends the canary."""
        if self.base == self.pool:
            raise invalid(f"base is {self.base!r}; a canary gets requests of another pool", "base")
        share = self.share if self.base else 0.0
        return PoolCanarySet(
            model=self.model,
            pool=self.pool,
            base=self.base,
            share=share,
            at_us=runtime.wall_us(),
            operator=self.operator,
        )


class PoolDrainBody(PoolRuleBody):
    """Body of POST /v1/pools/drain. If `drained` is true, the pool gets no new requests."""

    pool: PoolName
    drained: bool = True

    def event(self) -> PoolEvent:
        return PoolDrainSet(
            model=self.model, pool=self.pool, drained=self.drained, at_us=runtime.wall_us(), operator=self.operator
        )


class PoolPolicyBody(PoolRuleBody):
    """Body of POST /v1/pools/policy. The policy is valid until the next change, also for an owner that takes over."""

    pool: PoolName
    mode: Annotated[
        str, Field(min_length=1, max_length=256, description="Router mode, or path of a class that the router allows.")
    ]

    def event(self) -> PolicySet:
        return PolicySet(
            model=self.model, pool=self.pool, mode=self.mode, at_us=runtime.wall_us(), operator=self.operator
        )


POOL_RULE_BODIES = (PoolRoutingBody, PoolCanaryBody, PoolDrainBody, PoolPolicyBody)


def add_pool_rules(router: APIRouter, ingress: GroupClient) -> None:
    """Add the routes that show and change the rules for the pools of the model.

    Args:
        ingress: the ingress whose `pools` read and change the rules.
    """

    async def rules() -> dict[str, Any]:
        model = ingress.settings.model_name
        routing, pools = await ingress.pools.rules(model)
        listed = [
            {
                "pool": name,
                "role": pool.role,
                "block_size": pool.block_size,
                "policy": pool.policy,
                "drained": pool.is_drained,
                "canary": None if pool.canary is None else {"base": pool.canary.base, "share": pool.canary.share},
            }
            for name, pool in pools.items()
        ]
        grids = [_plain(grid) for grid in routing.grids]
        return {"model": model, "retry": routing.retry, "grids": grids, "pools": listed}

    @router.get("/v1/pools", responses=errors(401))
    async def list_rules() -> dict[str, Any]:
        """Return the pools of the model, and the rules by which requests are routed to them."""
        return await rules()

    def add(path: str, kind: type[PoolRuleBody], text: str) -> None:
        @router.post(path, description=text, openapi_extra=body_of(kind), responses=errors(*SETTINGS))
        async def route(request: Request) -> dict[str, Any]:
            body = parse(kind, await read_body(request, BODY_BYTES_MAX))
            adapter_of(body.model, ingress.settings.model_name, ())
            await ingress.pools.set_rule(body.event())
            return await rules()

    add("/v1/pools/routing", PoolRoutingBody, "Replace the grids by which requests are routed to pools.")
    add("/v1/pools/canary", PoolCanaryBody, "Route a share of the requests of one pool to another pool, or end this.")
    add("/v1/pools/policy", PoolPolicyBody, "Change the policy that selects the workers of a pool's requests.")
    add("/v1/pools/drain", PoolDrainBody, "Route no new requests to a pool, or end this.")


def _plain(grid: PoolGrid) -> dict[str, Any]:
    """Return all fields of a grid, including those with default values."""
    asdict = msgspec.structs.asdict
    return {**asdict(grid), "pools": [*map(asdict, grid.pools)], "overrides": [*map(asdict, grid.overrides)]}
