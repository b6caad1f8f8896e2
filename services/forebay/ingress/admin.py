"""What operators ask of an ingress: where a request would go, why one went there, what pools go by."""

from typing import Annotated, Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import Field, model_validator

from forebay.events.control import BusyThresholds, DisaggConfig, DisaggPolicy
from forebay.ingress.control_api import BODY_BYTES_MAX, add_commands
from forebay.ingress.errors import invalid
from forebay.ingress.explainer import Explainer
from forebay.ingress.fields import NONE_NEUTRAL, Body, parse, refuse_extra
from forebay.ingress.http_body import read_body, request_id_of
from forebay.ingress.ingress import Ingress
from forebay.ingress.nvext import WEIGHT_MAX
from forebay.ingress.openai import ChatBody, TextBody, adapter_of
from forebay.ingress.render import route_of
from forebay.ingress.thresholds import FIELDS

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
        refuse_extra(self, "", NONE_NEUTRAL)
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
        refuse_extra(self, "", NONE_NEUTRAL)
        return self

    def changes(self) -> dict[str, Any]:
        """What the body names."""
        return {name: getattr(self, name) for name in DisaggConfig.__struct_fields__ if name in self.model_fields_set}


class _Kind(msgspec.Struct):
    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    prompt: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def add_admin(app: FastAPI, ingress: Ingress, explainer: Explainer) -> None:
    """Add the routes for operators."""
    add_commands(app, ingress)
    thresholds = ingress.thresholds

    @app.post("/v1/route")
    async def route(request: Request) -> Response:
        """Where a chat or a completion would go. The body is theirs; nothing is generated."""
        ingress.require_owner()
        with ingress.bodies.one() as held:
            raw = await held.read(request)
            return await answer_route(request, ingress, parse(kind_of(raw), raw))

    @app.get("/v1/requests/{request_id:path}/explain", response_class=Response)
    async def explain(request_id: str) -> Response:
        """Why a request went where it did, and what became of it. Its id is that of its answer, or `x-request-id`."""
        status = "error"
        try:
            told = await explainer.explain(request_id, ingress.require_place())
            status = "success"
        finally:
            ingress.metrics.ended("explain", stream=False, status=status)
        return Response(told, media_type="application/json")

    @app.get("/busy_threshold")
    async def list_thresholds() -> dict[str, Any]:
        """When the workers of each pool are busy."""
        pools = await thresholds.pools()
        return {"thresholds": [{**_plain(model, busy), "pool": pool} for pool, model, busy in pools]}

    @app.post("/busy_threshold")
    async def set_thresholds(request: Request) -> dict[str, Any]:
        """Change when the workers of a model are busy, or only say when they are."""
        body = parse(BusyThresholdBody, await read_body(request, BODY_BYTES_MAX))
        adapter_of(body.model, ingress.settings.model_name, ())
        changes = body.changes()
        busy = await (thresholds.change(body.model, changes) if changes else thresholds.of(body.model))
        return _plain(body.model, busy)

    @app.get("/disaggregation")
    async def list_disaggregation() -> dict[str, Any]:
        """Which prompts of each decode pool are computed by prefill workers."""
        pools = await thresholds.decode_pools()
        return {"disaggregation": [{**_plain(model, disagg), "pool": pool} for pool, model, disagg in pools]}

    @app.post("/disaggregation")
    async def set_disaggregation(request: Request) -> dict[str, Any]:
        """Change which prompts of a model are computed by prefill workers, or only say which."""
        body = parse(DisaggregationBody, await read_body(request, BODY_BYTES_MAX))
        adapter_of(body.model, ingress.settings.model_name, ())
        changes = body.changes()
        pool, disagg = await (
            thresholds.disaggregate(body.model, changes) if changes else thresholds.disaggregation(body.model)
        )
        return {**_plain(body.model, disagg), "pool": pool}


async def answer_route(request: Request, ingress: Ingress, body: ChatBody | TextBody) -> Response:
    """Where a request would go, as JSON. Raises ApiError."""
    if not ingress.settings.admin_api:
        raise invalid("routes are not queried at this ingress", "nvext.annotations", "unsupported_parameter")
    request_id = request_id_of(request, "route-")
    status = "error"
    try:
        prepared = await ingress.prepare(body, request.headers.items())
        told = await ingress.query(request_id, prepared)
        status = "success"
    finally:
        ingress.metrics.ended("route", stream=False, status=status)
    content = msgspec.json.encode(route_of(told, body.model, prepared.prompt.tokens))
    return Response(content, headers={"x-request-id": request_id}, media_type="application/json")


def kind_of(raw: bytes) -> type[ChatBody] | type[TextBody]:
    """What a body is. Raises ApiError for one with neither messages nor a prompt."""
    try:
        found = msgspec.json.decode(raw, type=_Kind)
    except (msgspec.MsgspecError, RecursionError):
        return ChatBody  # whose decoder says what is wrong
    if found.messages is not msgspec.UNSET:
        return ChatBody
    if found.prompt is msgspec.UNSET:
        raise invalid("the body has neither messages nor a prompt", "messages")
    return TextBody


def _plain(model: str, settings: BusyThresholds | DisaggConfig) -> dict[str, Any]:
    return {"model": model, **msgspec.structs.asdict(settings)}
