"""Routes of a console that change the system. Each change is an event that contains the name of the operator.

The console executes nothing itself. It sends commands and changes to the admin API of an ingress, which checks the
admin token. The console neither keeps nor logs the token.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Annotated, Any
from urllib.parse import urlsplit

import httpx
import msgspec
from fastapi import FastAPI, Header, Request
from fastapi.responses import Response

from forebay.events.names import NAME_CHARS_MAX, unknown_name
from forebay.ingress.errors import ApiError, invalid
from forebay.ingress.http.body import read_body
from forebay.ingress.http.endpoint import is_loopback

ACTIONS_MAX = 16  # in flight: operators send few, and each may keep a connection open for its whole timeout
BODY_BYTES_MAX = 1 << 20
TIMEOUT_S = 60.0
TIMEOUT_S_MAX = 3_600.0
PATIENCE_S = 10.0  # added to the timeout of an action: longer than every timeout of the ingress itself
TOKEN_CHARS_MAX = 4_096  # as of the admin token of an ingress

AdminToken = Annotated[
    str, Header(alias="x-forebay-admin-token", description="Admin token of the ingress, which checks it.")
]


@dataclass(frozen=True, slots=True)
class AdminRoute:
    path: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    has_model: bool = True


ROUTES: Mapping[str, AdminRoute] = {
    "drain-worker": AdminRoute("/v1/commands", {"action": "drain"}, has_model=False),
    "policy": AdminRoute("/v1/pools/policy"),
    "busy-threshold": AdminRoute("/busy_threshold"),
    "drain-pool": AdminRoute("/v1/pools/drain"),
}


def add_actions(app: FastAPI, ingress_url: str, model: str) -> None:
    """Add the routes of the actions to `app`. No action is possible without an `ingress_url`."""
    actions = Actions(ingress_url.rstrip("/"), model)

    @app.post("/v1/console/actions/{action}")
    async def act(action: str, request: Request, admin_token: AdminToken = "") -> Response:
        """Execute an action, and return the response of the ingress."""
        return await actions.execute(action, await read_body(request, BODY_BYTES_MAX), admin_token)


class Actions:
    def __init__(self, ingress_url: str, model: str) -> None:
        self._ingress_url = ingress_url
        self._mounts = _without_proxy(ingress_url)
        self._model = model
        self._in_flight = 0

    async def execute(self, action: str, raw: bytes, admin_token: str) -> Response:
        """Return the response of the ingress with its status. Raises ApiError."""
        if action not in ROUTES:
            raise ApiError(404, "unknown_action", unknown_name("action", action, ROUTES))
        if not self._ingress_url:
            text = "this console cannot change the system; start it with --url and the URL of an ingress"
            raise ApiError(501, "no_ingress", text)
        _require_token(admin_token)
        async with self._counted():
            route = ROUTES[action]
            fields = {"model": self._model, **_fields(raw)} if route.has_model else _fields(raw)
            _require_operator(fields.get("operator"))
            body = {**fields, **route.fields}
            response = await self._send(route.path, body, _timeout_s(fields), admin_token)
            return Response(response.content, response.status_code, media_type="application/json")

    @asynccontextmanager
    async def _counted(self) -> AsyncIterator[None]:
        if self._in_flight >= ACTIONS_MAX:
            text = f"{self._in_flight} actions are in flight, the maximum; try again when one has ended"
            raise ApiError(429, "too_many_actions", text)
        self._in_flight += 1
        try:
            yield
        finally:
            self._in_flight -= 1

    async def _send(self, path: str, body: Mapping[str, Any], timeout_s: float, admin_token: str) -> httpx.Response:
        """Send a request to the admin API."""
        url = f"{self._ingress_url}{path}"
        headers = {"authorization": f"Bearer {admin_token}"}
        try:
            async with httpx.AsyncClient(timeout=timeout_s + PATIENCE_S, mounts=self._mounts) as client:
                response = await client.post(url, params={"model": self._model}, json=body, headers=headers)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            text = f"the ingress {self._ingress_url} does not respond ({type(error).__name__}); check --url"
            raise ApiError(502, "ingress_unreachable", text) from error
        code = _error_code(response)
        if code is None and response.status_code != HTTPStatus.OK:
            text = f"{self._ingress_url} is not an ingress (HTTP {response.status_code}); check --url"
            raise ApiError(502, "no_ingress", text)
        if response.status_code == HTTPStatus.NOT_FOUND and code == "not_found":
            text = f"{self._ingress_url} has no admin API; start the ingress with --admin-api, or use its --admin-port"
            raise ApiError(501, "admin_api_disabled", text)
        return response


def _without_proxy(url: str) -> dict[str, None]:
    """Return mounts that bypass the proxy of the environment, because it cannot reach loopback addresses here."""
    try:
        host = urlsplit(url).hostname or ""
        is_local = host.rstrip(".") == "localhost" or is_loopback(host)
    except ValueError:  # another name, or an invalid URL, which is reported when it is used
        return {}
    return {f"all://[{host}]" if ":" in host else f"all://{host}": None} if is_local else {}


def _require_token(token: str) -> None:
    if not token:
        text = "actions require the admin token of the ingress; send the header 'x-forebay-admin-token'"
        raise ApiError(401, "admin_token_missing", text)
    if len(token) > TOKEN_CHARS_MAX or not all("!" <= character <= "~" for character in token):
        text = f"the admin token is invalid; it has 1 to {TOKEN_CHARS_MAX} visible ASCII characters without spaces"
        raise ApiError(403, "admin_token_wrong", text)


def _require_operator(operator: object) -> None:
    if not isinstance(operator, str) or not operator.strip():
        raise invalid("operator is missing; give the name of the operator, which is written to the log", "operator")
    if len(operator) > NAME_CHARS_MAX or not operator.isprintable():
        raise invalid(f"operator: expected at most {NAME_CHARS_MAX} printable characters", "operator")


def _fields(raw: bytes) -> dict[str, Any]:
    """Return the fields of a body, which the ingress validates. Raises ApiError if it is not a JSON object."""
    try:
        fields = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise invalid("the body must be a JSON object", code="invalid_json")
    return fields


def _timeout_s(fields: Mapping[str, Any]) -> float:
    """Return the timeout that an action sends to the ingress, or the default of the ingress if it is missing."""
    given = fields.get("timeout_s", TIMEOUT_S)
    return float(min(max(given, 0), TIMEOUT_S_MAX)) if isinstance(given, int | float) else TIMEOUT_S


def _error_code(response: httpx.Response) -> str | None:
    try:
        error = msgspec.json.decode(response.content)["error"]
        return str(error["code"])
    except (msgspec.MsgspecError, RecursionError, KeyError, TypeError):
        return None
