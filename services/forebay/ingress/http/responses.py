"""Stored responses of the Responses API: read, stream, continue, cancel and delete them, and list their input."""

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response
from starlette.types import Message, Send

from forebay import runtime
from forebay.events.request_ids import parse_public_id
from forebay.ingress.caller import caller_of
from forebay.ingress.errors import ApiError, deadline_exceeded, invalid
from forebay.ingress.finder import FoundRequest, RequestFinder
from forebay.ingress.front import Front
from forebay.ingress.group import GroupClient
from forebay.ingress.http.answers import NUMBER, READS, SHOWN_CHARS_MAX, cancel_request, last_event
from forebay.ingress.http.openapi import JSON, content, errors, streamed
from forebay.ingress.http.response import AttachedResponse, OneResponse
from forebay.ingress.response_fold import CompletionFold, ResponseFold
from forebay.ingress.responses.body import LOGPROBS, RESPONSES_PATH, ResponsesBody, require_included
from forebay.ingress.responses.formatter import ResponsesFormatter, response_of
from forebay.ingress.responses.items import ITEMS, REFERENCE, Item, listed

CANCEL_S = 10.0  # until the owner has cancelled a request; a lost owner is replaced within seconds
ORDERS = ("asc", "desc")
LISTED, LISTED_MAX = 20, 100  # input items per page, by default and at most, as OpenAI
REFERRED_MAX = 64  # stored responses that one request refers to; each takes a few reads of the log

_encode = msgspec.json.encode


class BackgroundResponse(OneResponse):
    """ASGI response that is sent once the request is on the log. The output is rendered afterwards, to be kept."""

    async def _send(self, send: Send) -> str:
        if self._first.idempotency_key:  # the owner may locate an earlier request instead
            try:
                async with asyncio.timeout(self._wait_s):
                    await self._stream.ready()
            except TimeoutError:
                await deadline_exceeded(self._group.settings.timeout_s).send(send)
                return "error"
        if self._stream.located is None:
            encoded = _encode(_formatter(self._fold).plain())
            await send(self._start(JSON.encode(), len(encoded)))
            await send({"type": "http.response.body", "body": encoded})
            send = _discard
        return await super()._send(send)


async def _discard(_: Message) -> None:
    pass


class _Reader(AttachedResponse):
    """Reads a response from the log. The ASGI side of the class is not used."""

    async def read(self, *, to_end: bool) -> dict[str, Any]:
        fold, self._is_silent = self._fold, True  # so that `_next` does not wait
        self._work = asyncio.get_running_loop().create_task(self._run())
        try:
            while not (fold.is_over or (self._has_all and not self._changes and not to_end)):
                if not await self._next():
                    await self._stream.ready()
            if self._failure is not None:
                raise self._failure
        except ApiError as error:
            if error is not fold.error:
                raise
        finally:
            self._close()
        self._count("success")
        if self._recorder is not None:
            await self._keep(self._recorder)
        if fold.error is not None:
            _formatter(fold).fail(fold.error)
        return _formatter(fold).plain()


def _formatter(fold: ResponseFold) -> ResponsesFormatter:
    assert isinstance(fold, CompletionFold)
    assert isinstance(fold.formatter, ResponsesFormatter)
    return fold.formatter


async def read(found: FoundRequest, *, to_end: bool = False) -> dict[str, Any]:
    """Return a response object as it is now, or once it is complete. Raises ApiError if its output cannot be read."""
    return await _Reader(found, runtime.monotonic_s(), stream=True).read(to_end=to_end)


async def snapshot(found: FoundRequest, headers: Sequence[tuple[bytes, bytes]] = ()) -> Response:
    """Return the HTTP response with a response object as it is now."""
    response = _json(await read(found))
    response.raw_headers += headers
    return response


async def stored(finder: RequestFinder, response_id: str, tenant: str) -> FoundRequest:
    """Return a stored response of a tenant. Raises ApiError: 404 if there is none of this id, 410 if it was removed."""
    unknown = ApiError(404, "response_not_found", f"Response with id '{response_id}' not found.")
    if parse_public_id(response_id)[1] is None:
        raise unknown
    try:
        found = await finder.find(response_id, tenant)
    except ApiError as error:
        raise unknown if error.status == 404 else error from None
    if found.rendering.api != "responses" or not found.rendering.input:
        raise unknown
    return found


async def with_history(body: ResponsesBody, finder: RequestFinder, group: GroupClient, tenant: str) -> ResponsesBody:
    """Return a body with the conversation that it continues, and with the items to which it refers.

    Raises ApiError if one of their responses is unknown or of another tenant, has not finished, or has another model.
    """
    previous = body.previous_response_id
    referred = [item.id for _, item in body.placed if item.kind == REFERENCE and item.id]
    wanted = {owner: "input" for owner in map(response_of, referred) if owner is not None}
    if previous is not None:
        wanted[previous] = "previous_response_id"
    if previous is None and not referred:
        return body
    if len(wanted) > REFERRED_MAX:
        raise invalid(f"the items refer to {len(wanted)} responses; the limit is {REFERRED_MAX}", "input")
    reads = [_conversation(finder, response_id, param, group, tenant) for response_id, param in wanted.items()]
    found = dict(zip(wanted, await asyncio.gather(*reads), strict=True))
    items = {item.id: item for one in found.values() for item in one.output if item.id}
    if unknown := [item_id for item_id in referred if item_id not in items]:
        raise _unknown(unknown[0], "input")
    history = [] if previous is None else [*found[previous].input, *found[previous].output]
    return body.continued(history, items, sum(one.size_bytes for one in found.values()))


class _Conversation(NamedTuple):
    input: list[Item]
    output: list[Item]
    size_bytes: int


async def _conversation(
    finder: RequestFinder, response_id: str, param: str, group: GroupClient, tenant: str
) -> _Conversation:
    try:
        found = await stored(finder, response_id, tenant)
        if found.loaded.group is not group:
            models = f"{found.loaded.group.settings.model_name}, not of {group.settings.model_name}"
            raise invalid(f"{param}: the response {response_id} is of the model {models}")
        response = await read(found)
    except ApiError as error:
        if error.status == 404:
            raise _unknown(response_id, param) from None
        raise ApiError(error.status, error.code, error.message, param, retry_after_s=error.retry_after_s) from None
    if response["status"] in ("queued", "in_progress"):
        raise invalid(f"{param}: the response {response_id} has not finished", param, "response_not_finished")
    given, output = found.rendering.input, _encode(response["output"])
    return _Conversation(ITEMS.validate_json(given), ITEMS.validate_json(output), len(given) + len(output))


def _unknown(given: str, param: str) -> ApiError:
    """Return the error of OpenAI for an unknown response or item to which a request refers."""
    if param == "input":
        return ApiError(404, "item_not_found", f"Item with id '{given}' not found.", param)
    return ApiError(400, "previous_response_not_found", f"Previous response with id '{given}' not found.", param)


def add_responses(app: FastAPI, front: Front, finder: RequestFinder) -> None:
    path = f"{RESPONSES_PATH}/{{response_id}}"
    whole = {**content(JSON, "object", "The response."), **errors(*READS)}

    @app.get(path, responses={**streamed(), **errors(*READS)})
    async def retrieve(request: Request, response_id: str) -> Response:
        """Return a response as it is now, or with `stream=true` its events, after `starting_after` if given."""
        query, included = request.query_params, _included(request)
        is_stream, after = query.get("stream") == "true", last_event(query, "starting_after", NUMBER)
        if after is not None and not is_stream:
            raise invalid("starting_after is only allowed with stream=true", "starting_after")
        began_s = runtime.monotonic_s()
        found = await stored(finder, response_id, caller_of(request.scope).tenant)
        if LOGPROBS in included and found.first.sampling.logprobs is None:
            raise invalid(f"include: the response was created without {LOGPROBS}", "include")
        if is_stream:
            return AttachedResponse(found, began_s, stream=True, after=after)
        return await snapshot(found)

    @app.post(f"{path}/cancel", responses=whole)
    async def cancel(request: Request, response_id: str) -> Response:
        """Cancel a response that was created with `background`, and return it. A finished one stays as it is."""
        found = await stored(finder, response_id, caller_of(request.scope).tenant)
        if not msgspec.json.decode(found.rendering.options)["background"]:
            raise invalid("Cannot cancel a synchronous response.", code="not_in_background")
        cancel_request(found)
        try:
            async with asyncio.timeout(CANCEL_S):
                return _json(await read(found, to_end=True))
        except TimeoutError:
            text = f"the router has not cancelled the response within {CANCEL_S:g} s; it does so once there is one"
            raise ApiError(504, "deadline_exceeded", text) from None

    @app.delete(path, responses=whole)
    async def delete(request: Request, response_id: str) -> Response:
        """Delete a response. One that has not finished is cancelled, too."""
        found = await stored(finder, response_id, caller_of(request.scope).tenant)
        cancel_request(found)
        await front.answers.delete(found.request_id, found.location)
        return _json({"id": response_id, "object": "response", "deleted": True})

    @app.get(f"{path}/input_items", responses=whole)
    async def input_items(request: Request, response_id: str) -> Response:
        """Return a page of the items of the conversation before the output of a response."""
        query, _ = request.query_params, _included(request)
        order, after, limit = query.get("order", "desc"), query.get("after"), query.get("limit", str(LISTED))
        if order not in ORDERS:
            raise invalid(f"order is {order[:SHOWN_CHARS_MAX]!r}; it must be asc or desc", "order")
        if not NUMBER.fullmatch(limit) or not 1 <= int(limit) <= LISTED_MAX:
            raise invalid(f"limit is {limit[:SHOWN_CHARS_MAX]!r}; it must be 1 to {LISTED_MAX}", "limit")
        found = await stored(finder, response_id, caller_of(request.scope).tenant)
        items = listed(ITEMS.validate_json(found.rendering.input), response_id)
        items = items if order == "asc" else items[::-1]
        ids = [item["id"] for item in items]
        if after is not None and after not in ids:
            raise invalid(f"after: the input has no item {after[:SHOWN_CHARS_MAX]!r}", "after")
        begin = 0 if after is None else ids.index(after) + 1
        page, more = items[begin : begin + int(limit)], len(items) > begin + int(limit)
        first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
        return _json({"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": more})


def _included(request: Request) -> list[str]:
    """Return the values of `include`. Raises ApiError (400) for one that is not supported."""
    query = request.query_params
    names = [*query.getlist("include"), *query.getlist("include[]")]
    require_included(names)
    return names


def _json(value: Any) -> Response:
    return Response(_encode(value), media_type=JSON)
