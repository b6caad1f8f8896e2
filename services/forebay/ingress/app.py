"""The HTTP routes of an ingress."""

import time
import uuid
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from forebay.ingress.answer import Answer, Asked
from forebay.ingress.errors import ApiError, invalid
from forebay.ingress.ingress import Ingress
from forebay.ingress.openai import REQUEST_ID, BodyT, ChatBody, CompletionBody, TextBody, parse, require_model
from forebay.ingress.render import Shape
from forebay.ingress.text import TextAssembler

LENGTH_DIGITS_MAX = 19  # of a 64-bit content-length


def build_app(ingress: Ingress, registry: CollectorRegistry) -> FastAPI:
    """The application of one ingress; `registry` is what /metrics shows."""
    app = FastAPI(title="forebay", summary="OpenAI-compatible ingress", docs_url="/docs", redoc_url=None)
    _add_errors(app, ingress)
    _add_completions(app, ingress)
    _add_models(app, ingress)
    _add_health(app, ingress, registry)
    return app


def _add_completions(app: FastAPI, ingress: Ingress) -> None:
    @app.post("/v1/chat/completions", openapi_extra=_body_schema(ChatBody))
    async def chat_completions(request: Request) -> Response:
        """Answer a chat."""
        began_s = time.perf_counter()
        body = await _body(request, ChatBody, ingress)
        text = ingress.model.render(body.chat())
        token_ids = await ingress.tokenise(text)
        return await _answer(request, ingress, body, token_ids, began_s)

    @app.post("/v1/completions", openapi_extra=_body_schema(TextBody))
    async def completions(request: Request) -> Response:
        """Continue a text or a list of token ids."""
        began_s = time.perf_counter()
        body = await _body(request, TextBody, ingress)
        prompt = body.prompt
        token_ids = await ingress.tokenise(prompt) if isinstance(prompt, str) else prompt
        return await _answer(request, ingress, body, token_ids, began_s)


async def _answer(
    request: Request, ingress: Ingress, body: CompletionBody, token_ids: list[int], began_s: float
) -> Response:
    chat = isinstance(body, ChatBody)
    request_id = _request_id(request, "chatcmpl-" if chat else "cmpl-")
    prompt = ingress.prompt(token_ids)
    sampling = ingress.sampling(body, prompt)
    asked = Asked(
        endpoint="chat_completions" if chat else "completions",
        request_id=request_id,
        prompt_tokens=prompt.tokens,
        stream=bool(body.stream),
        usage_chunk=body.includes_usage,
        began_s=began_s,
    )
    text = TextAssembler(ingress.model.decoder(), body.stop_strings)
    shape = Shape(chat=chat, response_id=request_id, model=body.model, created=int(time.time()))
    return Answer(ingress, asked, await ingress.submit(request_id, prompt, sampling), shape, text)


def _add_models(app: FastAPI, ingress: Ingress) -> None:
    card = {
        "id": ingress.settings.model_name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "forebay",
        "max_model_len": ingress.model.context_tokens,
    }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The model that is served."""
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """One model."""
        require_model(name, ingress.settings.model_name)
        return card


def _add_health(app: FastAPI, ingress: Ingress, registry: CollectorRegistry) -> None:
    @app.get("/live")
    async def live() -> dict[str, str]:
        """Whether the process answers."""
        return {"status": "live"}

    @app.get("/health")
    @app.get("/ready")
    async def ready() -> dict[str, str]:
        """Whether requests would be served."""
        if not ingress.ready():
            raise ApiError(503, "not_ready", "no worker is ready")
        return {"status": "ready"}

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Prometheus metrics."""
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


def _add_errors(app: FastAPI, ingress: Ingress) -> None:
    def respond(error: ApiError) -> Response:
        ingress.metrics.refused.labels(error.code).inc()
        headers = {"retry-after": "1"} if error.status == 503 else None
        return Response(error.encoded(), error.status, headers, "application/json")

    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> Response:
        return respond(error)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        path = request.url.path
        if error.status_code == 404:
            return respond(ApiError(404, "not_found", f"there is no {path}"))
        if error.status_code == 405:
            return respond(ApiError(405, "method_not_allowed", f"{path} does not take {request.method}"))
        return respond(ApiError(error.status_code, "http_error", str(error.detail)))

    @app.exception_handler(ClientDisconnect)
    async def disconnected(_: Request, __: ClientDisconnect) -> Response:
        return respond(ApiError(499, "client_disconnected", "the client left before its request was whole"))

    @app.exception_handler(Exception)
    async def internal_error(_: Request, __: Exception) -> Response:
        return respond(ApiError(500, "internal_error", "an internal error; the server's log has the details"))


async def _body(request: Request, kind: type[BodyT], ingress: Ingress) -> BodyT:
    limit = ingress.settings.body_bytes_max
    too_large = ApiError(413, "body_too_large", f"the body is larger than {limit} bytes")
    declared = request.headers.get("content-length", "")
    # Python converts no more than 4,300 digits, hence the length.
    if declared.isdecimal() and (len(declared) > LENGTH_DIGITS_MAX or int(declared) > limit):
        raise too_large
    raw = bytearray()
    async for part in request.stream():
        raw += part
        if len(raw) > limit:
            raise too_large
    body = parse(kind, bytes(raw))
    require_model(body.model, ingress.settings.model_name)
    return body


def _request_id(request: Request, prefix: str) -> str:
    given = request.headers.get("x-request-id")
    if given is None:
        return prefix + uuid.uuid4().hex
    if not REQUEST_ID.fullmatch(given):
        raise invalid("x-request-id takes 1 to 128 letters, digits, dots, dashes and underscores", "x-request-id")
    return given


def _body_schema(kind: type[CompletionBody]) -> dict[str, Any]:
    schema = kind.model_json_schema(ref_template=f"#/components/schemas/{kind.__name__}/$defs/{{model}}")
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
