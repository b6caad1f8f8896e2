"""Routes that generate nothing: route queries, explanations, the status of the group, and the tokenizer."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import model_validator

from forebay import runtime
from forebay.events.request_ids import client_id_of, public_id
from forebay.ingress.caller import caller_of
from forebay.ingress.errors import MESSAGES_PATH, ApiError, invalid
from forebay.ingress.explainer import Explainer
from forebay.ingress.finder import RequestFinder
from forebay.ingress.group import GroupClient
from forebay.ingress.http.body import BodyReader, request_id_of
from forebay.ingress.http.openapi import BODY_ERRORS, QUERIES, body_of, errors, json_of
from forebay.ingress.messages.body import CountTokensBody
from forebay.ingress.openai.fields import CheckedBody
from forebay.ingress.openai.requests import ChatBody, TextBody
from forebay.ingress.openai.sampling import TokenIds
from forebay.ingress.render import route_of
from forebay.ingress.served_models import RequestedModel, ServedModels
from forebay.replay.status import GroupStatus, with_heartbeats


def add_route_query(app: FastAPI, models: ServedModels) -> None:
    front = models.front

    @app.post("/v1/route", openapi_extra=body_of(ChatBody, TextBody), responses=errors(*QUERIES))
    async def route(request: Request) -> Response:
        """Return the worker that the router would select for a chat or text completion. Nothing is generated."""
        models.require_any()
        with BodyReader(front.bodies) as reader:
            raw = await reader.read(request)
            body = front.parse(kind_of(raw), raw)
            return await respond_to_query(request, models, body)


def group_of(request: Request, models: ServedModels) -> GroupClient:
    """Return the group that the query parameter `model` names; it is optional if there is one. Raises ApiError."""
    return models.group(request.query_params.get("model", ""))


def add_explain(app: FastAPI, models: ServedModels, explainer: Explainer, finder: RequestFinder) -> None:
    @app.get("/v1/requests/{request_id:path}/explain", responses=errors(404, 409, 501, 504))
    async def explain(request: Request, request_id: str) -> Response:
        """Explain the routing and outcome of a request.

        The path names the `id` of its response, or the id that the client chose. If several requests have the same id,
        the explanation is about the last routed one. The key of a tenant finds only requests of this tenant. Without
        `model`, requests for all models are searched.
        """
        if tenant := caller_of(request.scope).tenant:
            found = await finder.find(request_id, tenant)
            request_id = public_id(found.request_id, found.location)
        is_named = "model" in request.query_params
        group, status = group_of(request, models) if is_named or len(models.names) == 1 else None, "error"
        try:
            partition = None if group is None else group.require_partition()
            try:
                explanation = await explainer.explain(request_id, partition)
            except ApiError as error:  # only now, because other models may have long journals
                if is_named or partition is None or error.code != "request_not_found":
                    raise
                explanation = await explainer.explain(request_id, None)
            status = "success"
        finally:
            if group is not None:
                group.metrics.ended("explain", stream=False, status=status)
        return Response(explanation, media_type="application/json")


async def respond_to_query(request: Request, models: ServedModels, body: ChatBody | TextBody) -> Response:
    """Return the HTTP response with the worker that the owner would select for a request now.

    Raises ApiError if the body is invalid, or the owner does not respond.
    """
    if isinstance(body, TextBody) and len(body.prompts) > 1:
        raise invalid("a route query has one prompt; send one query per prompt", "prompt", "unsupported_parameter")
    caller = caller_of(request.scope)
    caller.require_model(body.model)
    request_id = request_id_of(request, "route-")
    model, name = await models.find(body.model, request_id)
    status = "error"
    try:
        prepared, *_ = await model.prepare(body, request.headers.items(), name, caller)
        result = await model.group.query(request_id, prepared)
        status = "success"
    finally:
        model.group.metrics.ended("route", stream=False, status=status)
    content = msgspec.json.encode(route_of(result, body.model, prepared.prompt_tokens))
    return Response(content, headers={"x-request-id": client_id_of(request_id)}, media_type="application/json")


def kind_of(raw: bytes) -> type[ChatBody] | type[TextBody]:
    """Return the class of a completion body. Raises ApiError (400) if it has neither `messages` nor `prompt`."""
    try:
        found = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, RecursionError):
        return ChatBody  # parsing it raises the error
    if "messages" in found:
        return ChatBody
    if "prompt" not in found:
        raise invalid("the body has neither messages nor a prompt; give one of them", "messages")
    return TextBody


SHARED_S = 1.0  # a derivation takes about a second of CPU time, so scripts that poll cost at most about half a core

StatusReader = Callable[[], Awaitable[GroupStatus]]  # may raise ApiError or LogError
StatusOf = Callable[[str], Awaitable[GroupStatus]]  # the same for the model of this name


class SharedReader:
    """Reads a status that is expensive to derive, never concurrently and at most once per `SHARED_S`.

    Concurrent calls share one derivation. Its error is raised to all of them, and the next call derives again.
    """

    def __init__(self, derive: StatusReader) -> None:
        self._derive = derive
        self._derivation: asyncio.Task[GroupStatus] | None = None
        self._shared_until_s = 0.0

    async def read(self) -> GroupStatus:
        derivation = self._derivation
        if derivation is None or (derivation.done() and runtime.monotonic_s() >= self._shared_until_s):
            derivation = self._derivation = asyncio.create_task(self._run(), name="status")
        return await asyncio.shield(derivation)  # a client that disconnects must not end the other calls

    async def _run(self) -> GroupStatus:
        status = await self._derive()
        self._shared_until_s = runtime.monotonic_s() + SHARED_S
        return status


def add_status(
    app: FastAPI, models: ServedModels, explainer: Explainer, status_of: StatusOf | None, *, all_tenants: bool = False
) -> None:
    """Add `GET /v1/status`. If `status_of` is None, the status is derived from the log."""
    readers: dict[str, SharedReader] = {}  # by model; the log has few models

    async def derived(group: GroupClient) -> GroupStatus:
        name = group.settings.model_name
        reader = readers.get(name)
        if reader is None:
            reader = readers[name] = SharedReader(lambda: explainer.status(name, group.require_partition()))
        return with_heartbeats(await reader.read(), group.ready.presence)

    @app.get("/v1/status", responses={**json_of(GroupStatus), **errors(409, 501, 504)})
    async def status(request: Request) -> Response:
        """Return the status of the model: owner, workers, requests and topics. Of tenants, only that of the API key."""
        group = group_of(request, models)
        found = await (derived(group) if status_of is None else status_of(group.settings.model_name))
        tenant = caller_of(request.scope).tenant
        own = tuple(one for one in found.requests.tenants if all_tenants or one.tenant == tenant)
        found = msgspec.structs.replace(found, requests=msgspec.structs.replace(found.requests, tenants=own))
        if "model" not in request.query_params:
            found = msgspec.structs.replace(found, others=tuple(name for name in models.names if name != found.group))
        return Response(msgspec.json.encode(found), media_type="application/json")


CHARS_PER_TOKEN = 4  # decoding a token takes about as long as encoding this much text


class TokenizeChatBody(ChatBody):
    """Body of POST /tokenize with `messages`. Other fields of a chat are accepted; `model` is optional."""

    model: str = ""
    return_token_strs: bool | None = None


class TokenizeTextBody(TextBody):
    """Body of POST /tokenize with a `prompt`. Other fields of a completion are accepted; `model` is optional."""

    model: str = ""
    return_token_strs: bool | None = None

    @classmethod
    def describe(cls, schema: dict[str, Any]) -> None:
        super().describe(schema)
        kinds = schema["properties"]["prompt"]["anyOf"]
        one_prompt = [kind for kind in kinds if kind.get("items", {}).get("type") not in ("string", "array")]
        schema["properties"]["prompt"] = {
            "anyOf": [{key: kind[key] for key in kind if key not in ("minLength", "minItems")} for kind in one_prompt]
        }

    @model_validator(mode="after")
    def _check_prompt(self) -> "TokenizeTextBody":
        if isinstance(self.prompt, list) and self.prompt and not isinstance(self.prompt[0], int):
            raise invalid("prompt is a list of prompts; send one request per prompt", "prompt")
        return self


class DetokenizeBody(CheckedBody):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: TokenIds


BODIES = (TokenizeChatBody, TokenizeTextBody, DetokenizeBody, CountTokensBody)


async def _model_of(request: Request, models: ServedModels, given: str) -> RequestedModel:
    """Return the model that a body names; it is optional if there is one. Raises ApiError."""
    found = await models.only(given)
    caller_of(request.scope).require_model(given or found.name)
    return found


def add_tokenization(app: FastAPI, models: ServedModels) -> None:
    front = models.front
    responses = errors(*BODY_ERRORS, 404)

    @app.post("/tokenize", openapi_extra=body_of(TokenizeChatBody, TokenizeTextBody), responses=responses)
    async def tokenize(request: Request) -> dict[str, Any]:
        """Return the tokens of a text, or of a chat after the chat template."""
        with BodyReader(front.bodies) as reader:
            raw = await reader.read(request)
            await front.admission.turn(len(raw))
            body: TokenizeChatBody | TokenizeTextBody
            if kind_of(raw) is ChatBody:
                body = front.parse(TokenizeChatBody, raw)
            else:
                body = front.parse(TokenizeTextBody, raw)
            loaded, name = await _model_of(request, models, body.model)
            model = loaded.model
            token_ids = await loaded.tokenize(body, name)
        names = [model.tokenizer.id_to_token(one) for one in token_ids] if body.return_token_strs else None
        return {
            "count": len(token_ids),
            "max_model_len": model.context_tokens,
            "tokens": token_ids,
            "token_strs": names,
        }

    @app.post(f"{MESSAGES_PATH}/count_tokens", openapi_extra=body_of(CountTokensBody), responses=responses)
    async def count_tokens(request: Request) -> dict[str, int]:
        """Return the number of tokens of the prompt that a body of /v1/messages becomes."""
        with BodyReader(front.bodies) as reader:
            raw = await reader.read(request)
            await front.admission.turn(len(raw))
            body = front.parse(CountTokensBody, raw)
            loaded, name = await _model_of(request, models, body.model)
            try:
                return {"input_tokens": len(await loaded.tokenize(body.completion, name))}
            except ApiError as error:
                raise body.renamed(error) from None

    @app.post("/detokenize", openapi_extra=body_of(DetokenizeBody), responses=responses)
    async def detokenize(request: Request) -> dict[str, str]:
        """Return the text of tokens, including special tokens."""
        with BodyReader(front.bodies) as reader:
            raw = await reader.read(request)
            await front.admission.turn(len(raw))
            body = front.parse(DetokenizeBody, raw)
            loaded, name = await _model_of(request, models, body.model or "")
            await loaded.group.adapters.resolve(name)
            model = loaded.model
            if body.tokens and (highest := max(body.tokens)) >= model.vocabulary_size:
                text = f"token id {highest} is not in the vocabulary; ids must be below {model.vocabulary_size}"
                raise invalid(text, "tokens")
            decode = partial(model.tokenizer.decode, body.tokens, skip_special_tokens=False)
            return {"prompt": await front.tokenizer_pool.run(decode, CHARS_PER_TOKEN * len(body.tokens))}
