"""Admin API: routes that show or change settings that affect every client.

Each route requires the admin token of the ingress. Without a token the ingress serves no admin API.
"""

import hmac
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import Field

from forebay.events.control import BusyThresholds, DisaggConfig, DisaggPolicy
from forebay.ingress.errors import ApiError
from forebay.ingress.group import GroupClient
from forebay.ingress.http.body import read_body
from forebay.ingress.http.control_api import BODY_BYTES_MAX, COMMAND_BODIES, add_commands
from forebay.ingress.http.openapi import SETTINGS, body_of, errors
from forebay.ingress.http.operator_name import OperatorField
from forebay.ingress.http.pool_rules import POOL_RULE_BODIES, add_pool_rules
from forebay.ingress.openai.fields import CheckedBody, parse
from forebay.ingress.openai.nvext import WEIGHT_MAX
from forebay.ingress.openai.requests import adapter_of

TOKENS_MAX = (1 << 63) - 1


class PoolSettingsBody(CheckedBody):
    """Request body that names a model and changes settings of its pools. Subclasses add the settings."""

    model: str
    operator: OperatorField = ""

    def changes(self) -> dict[str, Any]:
        """Return the settings that the client sent, by field name. Fields missing in the body are left out."""
        return {name: getattr(self, name) for name in self.model_fields_set - {"model", "operator"}}


BodyT = TypeVar("BodyT", bound=PoolSettingsBody)


class BusyThresholdBody(PoolSettingsBody):
    """Body of POST /busy_threshold. A missing field keeps its current value; null disables the threshold."""

    active_decode_blocks_threshold: Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)] | None = None
    active_prefill_tokens_threshold: Annotated[int, Field(ge=0, le=TOKENS_MAX)] | None = None
    active_prefill_tokens_threshold_frac: Annotated[float, Field(ge=0.0, le=WEIGHT_MAX, allow_inf_nan=False)] | None = (
        None
    )


class DisaggregationBody(PoolSettingsBody):
    """Body of POST /disaggregation. A missing field keeps its current value; null disables a busy threshold."""

    policy: DisaggPolicy = "always"
    max_local_prefill_length: Annotated[int, Field(ge=0, le=TOKENS_MAX)] = 0
    max_prefill_queue_size: Annotated[int, Field(ge=1, le=TOKENS_MAX)] = 1
    eff_isl_threshold: Annotated[int, Field(ge=0, le=TOKENS_MAX)] = 0
    eff_isl_ratio_threshold: Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)] = 0.0
    prefill_busy_threshold: Annotated[float, Field(ge=0.0, le=WEIGHT_MAX, allow_inf_nan=False)] | None = None
    decode_busy_threshold: Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)] | None = None
    enforce: bool = False


BODIES = (*COMMAND_BODIES, BusyThresholdBody, DisaggregationBody, *POOL_RULE_BODIES)


def add_admin(app: FastAPI, ingress: GroupClient) -> None:
    """Add the routes of the admin API to `app`: commands to workers and settings of pools.

    Each route requires the admin token in `ingress.settings.admin_token`.
    """

    async def require_model(request: Request) -> None:
        for name in request.query_params.getlist("model"):  # an ingress of several models has removed the parameter
            adapter_of(name, ingress.settings.model_name, ())

    router = APIRouter(dependencies=[Depends(_token_check(ingress.settings.admin_token)), Depends(require_model)])
    add_commands(router, ingress)
    add_pool_rules(router, ingress)
    pools = ingress.pools

    async def read_settings(request: Request, kind: type[BodyT]) -> BodyT:
        body = parse(kind, await read_body(request, BODY_BYTES_MAX))
        adapter_of(body.model, ingress.settings.model_name, ())
        return body

    @router.get("/busy_threshold", responses=errors(401))
    async def list_thresholds() -> dict[str, Any]:
        """Return the busy thresholds of each pool."""
        found = await pools.busy_thresholds()
        return {"thresholds": [{**_plain(model, busy), "pool": pool} for pool, model, busy in found]}

    @router.post("/busy_threshold", openapi_extra=body_of(BusyThresholdBody), responses=errors(*SETTINGS))
    async def set_thresholds(request: Request) -> dict[str, Any]:
        """Change the busy thresholds of a model, or return them if the body sets none."""
        body = await read_settings(request, BusyThresholdBody)
        changes = body.changes()
        busy = await (
            pools.set_busy_thresholds(body.model, changes, body.operator)
            if changes
            else pools.busy_threshold_of(body.model)
        )
        return _plain(body.model, busy)

    @router.get("/disaggregation", responses=errors(401))
    async def list_disaggregation() -> dict[str, Any]:
        """Return for each decode pool which prompts prefill workers compute."""
        found = await pools.disaggregation_settings()
        return {"disaggregation": [{**_plain(model, disagg), "pool": pool} for pool, model, disagg in found]}

    @router.post("/disaggregation", openapi_extra=body_of(DisaggregationBody), responses=errors(*SETTINGS))
    async def set_disaggregation(request: Request) -> dict[str, Any]:
        """Change which prompts of a model prefill workers compute, or return the settings if the body sets none."""
        body = await read_settings(request, DisaggregationBody)
        changes = body.changes()
        pool, disagg = await (
            pools.set_disaggregation(body.model, changes, body.operator)
            if changes
            else pools.disaggregation(body.model)
        )
        return {**_plain(body.model, disagg), "pool": pool}

    app.routes.extend(router.routes)  # not `include_router`, which hides the methods of each path


def _token_check(token: str) -> Callable[..., Awaitable[None]]:
    """Return a dependency that raises ApiError for a request without this token."""
    expected = token.encode()
    bearer = HTTPBearer(auto_error=False, description="The token in --admin-token-file or FOREBAY_ADMIN_TOKEN.")

    async def require_token(given: Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)]) -> None:
        if given is None:
            text = "the admin API requires a token; send the header 'Authorization: Bearer TOKEN'"
            raise ApiError(401, "admin_token_missing", text)
        if not hmac.compare_digest(given.credentials.encode("latin-1"), expected):
            raise ApiError(
                403, "admin_token_wrong", "the admin token is wrong; send the token that the ingress was started with"
            )

    return require_token


def _plain(model: str, settings: BusyThresholds | DisaggConfig) -> dict[str, Any]:
    return {"model": model, **msgspec.structs.asdict(settings)}
