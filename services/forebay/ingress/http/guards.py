"""Reject requests without an API key, and requests of web pages of another origin, before they reach a route.

Theory of operation. A page cannot read responses of another origin, but its browser sends the requests,
even to 127.0.0.1. Three checks stop such requests. They do not affect clients other than browsers.

- `Origin` and `Sec-Fetch-Site`, which a page cannot change, name the origin of the page.
- A body must be declared as `application/json`. A browser sends such a body to another origin only after a preflight
  request, which this service permits only for the origins in `--cors-allow-origin`. These pass the first check, too.
- `Host` must be a known name, because a page can let its own name resolve to 127.0.0.1 (DNS rebinding). The page would
  then have the same origin as this service.

The checks apply to every path except the `PROBES`, because supervisors use the address as `Host`.
"""

import ipaddress
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import lru_cache
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forebay import runtime
from forebay.ingress.access_log import PROBES
from forebay.ingress.api_keys import ApiKeys
from forebay.ingress.caller import Caller, set_caller, unusable
from forebay.ingress.errors import ApiError
from forebay.ingress.http.endpoint import is_loopback
from forebay.runtime.errors import ConfigError

ANY = "*"
ORIGIN = re.compile(r"(https?)://([a-z0-9._-]+|\[[0-9a-f:.]+\])(?::([1-9][0-9]{0,4}))?", re.IGNORECASE)
PREFLIGHT_S = 600  # for which a browser keeps the result of a preflight request
METHODS = b"GET, POST, DELETE"


def allowed_origins(given: tuple[str, ...]) -> frozenset[str]:
    """Return origins as browsers send them: in lower case, without default ports. Raises ConfigError if invalid."""
    return frozenset(ANY if value == ANY else _origin(value) for value in given)


def permits(origins: frozenset[str], origin: str) -> bool:
    return origin in origins or ANY in origins


class Cors:
    """ASGI middleware that lets pages of allowed origins read responses, and answers their preflight requests.

    Requests of other origins pass unchanged, because `OriginGuard` rejects them.
    """

    def __init__(self, app: ASGIApp, origins: frozenset[str]) -> None:
        self._app = app
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
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
            headers.append((b"access-control-expose-headers", b"*"))

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
        raise ConfigError(f"--cors-allow-origin {value!r}: {expected}")
    scheme, host, port = (found[1].lower(), found[2].lower(), found[3])
    return f"{scheme}://{host}" if port in (None, str(DEFAULT_PORTS[scheme])) else f"{scheme}://{host}:{port}"


PAGES = frozenset({"/", "/docs", "/openapi.json"})  # any page may link to the documentation
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
READING = ("GET", "HEAD")
JSON = "application/json"
DEFAULT_PORTS = {"http": 80, "https": 443}  # which browsers omit
SHOWN_CHARS_MAX = 256  # length of a header quoted in an error

PREFIX = "/v1/"
PATHS = frozenset({"/tokenize", "/detokenize"})
ADMIN_PATHS = frozenset({"/v1/commands", "/v1/loras", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/pools"})
ADMIN_PREFIXES = ("/v1/loras/", "/v1/pools/")
BEARER = b"bearer"
API_KEY_HEADER = b"x-api-key"  # of Anthropic's clients
ADDRESSES_MAX = 16  # cached; clients use few names, and a name has at most 64 KiB

HostAddress = tuple[str, str, int | None]  # scheme, host, port


def allowed_hosts(host: str, address: str, names: Sequence[str]) -> frozenset[str] | None:
    """Return the accepted values of the header `Host`.

    None, which accepts every value, is returned if the `address` of the listening socket is not a loopback address and
    `names` is empty. Raises ConfigError if a name (`--allow-host`) has a scheme, a port or a path.
    """
    extra = [_plain(name) for name in names]
    for name, plain in zip(names, extra, strict=True):
        if not plain or set(plain) & set("/@?#*, ") or (":" in plain and not _is_ip(plain)):
            raise ConfigError(f"--allow-host {name!r}: give a host name or an IP address without scheme and port")
    if not extra and not is_loopback(address):
        return None
    return frozenset((*LOOPBACK_NAMES, _plain(host), _plain(address), *extra))


class Guard(ABC):
    """ASGI middleware that rejects some requests, and calls `on_rejected` with the error code of each."""

    def __init__(self, app: ASGIApp, on_rejected: Callable[[str], None]) -> None:
        self._app = app
        self._on_rejected = on_rejected

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._rejection(scope)
        if error is None:
            await self._app(scope, receive, send)
        else:
            self._on_rejected(error.code)
            await error.send(send, body=error.encoded(scope["path"]))

    @abstractmethod
    def _rejection(self, scope: Scope) -> ApiError | None:
        """Return the error of a request, None if it is allowed."""


def requires_api_key(path: str) -> bool:
    if not path.startswith(PREFIX):
        return path in PATHS
    return path not in ADMIN_PATHS and not path.startswith(ADMIN_PREFIXES)


class ApiKeyGuard(Guard):
    """ASGI middleware that rejects requests without a valid API key, and sets the caller of those with a tenant's key.

    An API key never opens the admin API. If no key is required, requests without a key pass.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys, on_rejected: Callable[[str], None]) -> None:
        super().__init__(app, on_rejected)
        self._keys = keys

    def _rejection(self, scope: Scope) -> ApiError | None:
        known = self._keys
        if not known.in_use or not requires_api_key(scope["path"]):
            return None
        bearers = [value for name, value in scope["headers"] if name == b"authorization"]
        keys = [value for name, value in scope["headers"] if name == API_KEY_HEADER]
        if not bearers and not keys:
            text = "this server requires an API key; send the header 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
            return _invalid_key(text) if known.is_required else None
        text = "the API key is wrong; send a key of this server as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
        if len(bearers) > 1 or len(keys) > 1:
            return _invalid_key(text)
        schemes = (value.partition(b" ") for value in bearers)
        keys += [key for scheme, _, key in schemes if scheme.lower() == BEARER]
        if not keys and not known.is_required:
            return None
        problem: ApiError | None = None
        for key in map(bytes.strip, keys):
            event = known.find(key)
            if event is None or event.public_key:  # the public key is no secret
                continue
            problem = unusable(event, runtime.wall_us())
            if problem is None:
                set_caller(scope, Caller(event))
                return None
        return problem or _invalid_key(text)


def _invalid_key(message: str) -> ApiError:
    return ApiError(401, "invalid_api_key", message)


class OriginGuard(Guard):
    """Rejects requests that a browser sends for a page of another origin. `hosts` of None accepts every `Host`."""

    def __init__(
        self, app: ASGIApp, hosts: frozenset[str] | None, origins: frozenset[str], on_rejected: Callable[[str], None]
    ) -> None:
        super().__init__(app, on_rejected)
        self._hosts = hosts
        self._origins = origins

    def _rejection(self, scope: Scope) -> ApiError | None:
        if scope["path"] in PROBES:
            return None
        headers: dict[bytes, list[str]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name, []).append(value.decode("latin-1"))
        hosts = headers.get(b"host", [""])
        if self._hosts is not None and (error := _foreign_host(hosts, self._hosts)) is not None:
            return error
        reads = scope["method"] in READING
        if reads and scope["path"] in PAGES:
            return None
        if self._is_permitted(headers):
            return None if reads else _not_json(headers)
        origins = headers.get(b"origin", ())
        own = {_address(scope.get("scheme", "http"), host) for host in hosts} if origins else set()
        for origin in origins:
            scheme, _, host = origin.partition("://")
            address = _address(scheme, host)
            if address is None or own != {address}:
                return _foreign(f"the origin {origin[:SHOWN_CHARS_MAX]!r}")
        if any(site in {"cross-site", "same-site"} for site in headers.get(b"sec-fetch-site", ())):
            return _foreign("a page of another site")
        return None if reads else _not_json(headers)

    def _is_permitted(self, headers: dict[bytes, list[str]]) -> bool:
        origins = headers.get(b"origin")
        return ANY in self._origins or (origins is not None and all(origin in self._origins for origin in origins))


def _foreign_host(hosts: list[str], allowed: frozenset[str]) -> ApiError | None:
    for host in hosts:
        address = _address("http", host)
        if address is None or address[1] not in allowed:
            shown = host[:SHOWN_CHARS_MAX]
            text = f"the Host {shown!r} is not allowed; allowed names are: "
            return ApiError(
                403, "host_not_allowed", f"{text}{', '.join(sorted(allowed))}; add a name with --allow-host"
            )
    return None


def _foreign(origin: str) -> ApiError:
    text = f"{origin} is not allowed; use a page with the scheme, host and port of this service, or --cors-allow-origin"
    return ApiError(403, "foreign_origin", text)


def _not_json(headers: dict[bytes, list[str]]) -> ApiError | None:
    kinds = headers.get(b"content-type", [])
    has_body = b"transfer-encoding" in headers or any(length != "0" for length in headers.get(b"content-length", ()))
    if not kinds and not has_body:
        return None
    found = {kind.partition(";")[0].strip().lower() for kind in kinds}
    if found == {JSON}:
        return None
    shown = ", ".join(kinds)[:SHOWN_CHARS_MAX] or "nothing"
    text = f"the body must be declared as {JSON}, got {shown}; send the header 'Content-Type: {JSON}'"
    return ApiError(415, "unsupported_media_type", text)


@lru_cache(ADDRESSES_MAX)
def _address(scheme: str, host: str) -> HostAddress | None:
    """Return scheme, host and port of an origin or a `Host`, None if it is invalid."""
    try:
        parts = urlsplit(f"//{host}")
        port = parts.port
    except ValueError:
        return None
    if not parts.hostname or parts.netloc != host or parts.username is not None:
        return None
    return scheme.lower(), _plain(parts.hostname), DEFAULT_PORTS.get(scheme.lower()) if port is None else port


def _plain(host: str) -> str:
    """Return a name in the form that `_address` returns: lower case, IPv6 addresses without brackets."""
    return host.lower().removesuffix(".").removeprefix("[").removesuffix("]")


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
