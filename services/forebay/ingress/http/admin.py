"""The admin API: routes that change something for every client, and those that show what can be changed.

Each demands the token of the ingress. Without a token there is no admin API.
"""

import hmac
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import msgspec
from fastapi import Depends, FastAPI, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import Field, model_validator

from forebay.events.control import BusyThresholds, DisaggConfig, DisaggPolicy
from forebay.ingress.errors import ApiError
from forebay.ingress.http.body import read_body
from forebay.ingress.http.control_api import BODY_BYTES_MAX, COMMAND_BODIES, add_commands
from forebay.ingress.http.openapi import SETTINGS, body_of, errors
from forebay.ingress.http.pool_settings import FIELDS
from forebay.ingress.ingress import Ingress
from forebay.ingress.openai.fields import Body, parse, refuse_extra
from forebay.ingress.openai.nvext import WEIGHT_MAX
from forebay.ingress.openai.requests import adapter_of

TOKENS_MAX = (1 << 63) - 1


class BusyThresholdBody(Body):
    """POST /busy_threshold. What is left out stays, null is off."""

    model: str
    active_decode_blocks_threshold: Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)] | None = None
    active_prefill_tokens_threshold: Annotated[int, Field(ge=0, le=TOKENS_MAX)] | None = None
    active_prefill_tokens_threshold_frac: Annotated[float, Field(ge=0.0, le=WEIGHT_MAX, allow_inf_nan=False)] | None = (
        None
    )

    @model_validator(mode="after")
    def _check(self) -> "BusyThresholdBody":
        refuse_extra(self, "")
        return self

    def changes(self) -> dict[str, float | None]:
        """What the body names."""
        return {name: getattr(self, name) for name in FIELDS if name in self.model_fields_set}


class DisaggregationBody(Body):
    """POST /disaggregation. What is left out stays; a threshold of null is never reached."""

    model: str
    policy: DisaggPolicy = "always"
    max_local_prefill_length: Annotated[int, Field(ge=0, le=TOKENS_MAX)] = 0
    max_prefill_queue_size: Annotated[int, Field(ge=1, le=TOKENS_MAX)] = 1
    eff_isl_threshold: Annotated[int, Field(ge=0, le=TOKENS_MAX)] = 0
    eff_isl_ratio_threshold: Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)] = 0.0
    prefill_busy_threshold: Annotated[float, Field(ge=0.0, le=WEIGHT_MAX, allow_inf_nan=False)] | None = None
    decode_busy_threshold: Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)] | None = None
    enforce: bool = False

    @model_validator(mode="after")
    def _check(self) -> "DisaggregationBody":
        refuse_extra(self, "")
        return self

    def changes(self) -> dict[str, Any]:
        """What the body names."""
        return {name: getattr(self, name) for name in DisaggConfig.__struct_fields__ if name in self.model_fields_set}


BODIES = (*COMMAND_BODIES, BusyThresholdBody, DisaggregationBody)


def add_admin(app: FastAPI, ingress: Ingress) -> None:
    """Add the routes for operators."""
    demand = [Depends(_demanded(ingress.settings.admin_token))]
    add_commands(app, ingress, demand)
    thresholds = ingress.thresholds

    @app.get("/busy_threshold", dependencies=demand, responses=errors(401))
    async def list_thresholds() -> dict[str, Any]:
        """When the workers of each pool are busy."""
        pools = await thresholds.pools()
        return {"thresholds": [{**_plain(model, busy), "pool": pool} for pool, model, busy in pools]}

    @app.post(
        "/busy_threshold", dependencies=demand, openapi_extra=body_of(BusyThresholdBody), responses=errors(*SETTINGS)
    )
    async def set_thresholds(request: Request) -> dict[str, Any]:
        """Change when the workers of a model are busy, or only say when they are."""
        body = parse(BusyThresholdBody, await read_body(request, BODY_BYTES_MAX))
        adapter_of(body.model, ingress.settings.model_name, ())
        changes = body.changes()
        busy = await (thresholds.change(body.model, changes) if changes else thresholds.of(body.model))
        return _plain(body.model, busy)

    @app.get("/disaggregation", dependencies=demand, responses=errors(401))
    async def list_disaggregation() -> dict[str, Any]:
        """Which prompts of each decode pool are computed by prefill workers."""
        pools = await thresholds.decode_pools()
        return {"disaggregation": [{**_plain(model, disagg), "pool": pool} for pool, model, disagg in pools]}

    @app.post(
        "/disaggregation", dependencies=demand, openapi_extra=body_of(DisaggregationBody), responses=errors(*SETTINGS)
    )
    async def set_disaggregation(request: Request) -> dict[str, Any]:
        """Change which prompts of a model are computed by prefill workers, or only say which."""
        body = parse(DisaggregationBody, await read_body(request, BODY_BYTES_MAX))
        adapter_of(body.model, ingress.settings.model_name, ())
        changes = body.changes()
        pool, disagg = await (
            thresholds.disaggregate(body.model, changes) if changes else thresholds.disaggregation(body.model)
        )
        return {**_plain(body.model, disagg), "pool": pool}


def _demanded(token: str) -> Callable[..., Awaitable[None]]:
    """Return a dependency that raises ApiError for a request without this token."""
    expected = token.encode()
    bearer = HTTPBearer(auto_error=False, description="The token of --admin-token-file or FOREBAY_ADMIN_TOKEN.")

    async def demand(given: Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)]) -> None:
        if given is None:
            text = "the admin API needs a token: send the header 'Authorization: Bearer TOKEN'"
            raise ApiError(401, "admin_token_missing", text)
        if not hmac.compare_digest(given.credentials.encode("latin-1"), expected):
            raise ApiError(403, "admin_token_wrong", "the token of the admin API is another one")

    return demand


def _plain(model: str, settings: BusyThresholds | DisaggConfig) -> dict[str, Any]:
    return {"model": model, **msgspec.structs.asdict(settings)}
