"""Let web pages of configured origins read responses (CORS, cross-origin resource sharing).

A browser sends a request of a page to another origin only if the response to a preflight request permits it. The page
gets the response only if a header permits that. The permission covers no cookies and passwords of the browser, because
the API uses none. The page sends the API key itself.
"""

import re

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forebay.ingress.errors import Unusable

ANY = "*"
ORIGIN = re.compile(r"(https?)://([a-z0-9._-]+|\[[0-9a-f:.]+\])(?::([1-9][0-9]{0,4}))?", re.IGNORECASE)
DEFAULT_PORTS = {"http": "80", "https": "443"}  # which browsers omit
PREFLIGHT_S = 600  # for which a browser keeps the result of a preflight request
METHODS = b"GET, POST, DELETE"
READABLE = b"x-request-id, x-forebay-worker, retry-after"  # headers of responses, in addition to the usual ones


def allowed_origins(given: tuple[str, ...]) -> frozenset[str]:
    """Return the allowed origins as browsers send them: in lower case, without default ports.

    Raises:
        Unusable: a value is neither `*` nor an origin.
    """
    return frozenset(ANY if value == ANY else _origin(value) for value in given)


def permits(origins: frozenset[str], origin: str) -> bool:
    """Return whether pages of `origin` may read responses."""
    return origin in origins or ANY in origins


class Cors:
    """ASGI middleware that responds to preflight requests of allowed origins, and adds headers to responses for them.

    Requests of other origins pass unchanged, because `OriginGuard` rejects them.

    Args:
        app: the application that serves all other requests.
        origins: result of `allowed_origins`.
    """

    def __init__(self, app: ASGIApp, origins: frozenset[str]) -> None:
        self._app = app
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to a preflight request, or run the application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"])
        origin = given.get(b"origin")
        if origin is None or not permits(self._origins, origin.decode("latin-1")):
            headers = [(b"vary", b"origin")]
        else:
            headers = [(b"vary", b"origin"), (b"access-control-allow-origin", origin)]
            if scope["method"] == "OPTIONS" and b"access-control-request-method" in given:
                await send({"type": "http.response.start", "status": 204, "headers": headers + _preflight(given)})
                await send({"type": "http.response.body"})
                return
            headers.append((b"access-control-expose-headers", READABLE))

        async def send_permitted(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *headers]}
            await send(message)

        await self._app(scope, receive, send_permitted)


def _preflight(given: dict[bytes, bytes]) -> list[tuple[bytes, bytes]]:
    headers = [(b"access-control-allow-methods", METHODS), (b"access-control-max-age", str(PREFLIGHT_S).encode())]
    if b"access-control-request-headers" in given:
        headers.append((b"access-control-allow-headers", given[b"access-control-request-headers"]))
    if b"access-control-request-private-network" in given:  # Chromium asks before a public page reads 127.0.0.1
        headers.append((b"access-control-allow-private-network", b"true"))
    return headers


def _origin(value: str) -> str:
    found = ORIGIN.fullmatch(value)
    if found is None:
        expected = "expected *, or scheme, host and port as https://app.example:8443"
        raise Unusable(f"--cors-allow-origin {value!r}: {expected}")
    scheme, host, port = (found[1].lower(), found[2].lower(), found[3])
    return f"{scheme}://{host}" if port in (None, DEFAULT_PORTS[scheme]) else f"{scheme}://{host}:{port}"
