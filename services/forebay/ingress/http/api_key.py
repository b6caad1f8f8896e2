"""Require an API key for requests that use the model.

Theory of operation. A client sends a key as `Authorization: Bearer KEY`. The guard hashes it with a random secret of
this process, and looks the digest up in a set. A client cannot predict digests. So the time of the lookup does not tell
how much of a key the client has guessed. It does not depend on the number of keys either.

The routes of the admin API have their own token, so they are exempt here, and an API key never opens them.
"""

import hashlib
from collections.abc import Callable, Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from forebay import runtime
from forebay.ingress.errors import ApiError

SECRET_BYTES = 32
PREFIX = "/v1/"
PATHS = frozenset({"/tokenize", "/detokenize"})
ADMIN_PATHS = frozenset({"/v1/commands", "/v1/loras", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
ADMIN_PREFIX = "/v1/loras/"
BEARER = b"bearer"


def requires_api_key(path: str) -> bool:
    """Return whether requests for `path` require an API key, if the ingress has one."""
    if not path.startswith(PREFIX):
        return path in PATHS
    return path not in ADMIN_PATHS and not path.startswith(ADMIN_PREFIX)


class ApiKeyGuard:
    """ASGI middleware that rejects requests without a valid API key.

    Args:
        app: the application that serves the accepted requests.
        on_rejected: called with the error code of each rejected request.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], on_rejected: Callable[[str], None]) -> None:
        self._app = app
        self._on_rejected = on_rejected
        self._secret = runtime.random_bytes(SECRET_BYTES)
        self._digests = frozenset(self._digest(key.encode()) for key in keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application, or send an error if the request requires a key and has no valid one."""
        error = self._rejection(scope) if scope["type"] == "http" and requires_api_key(scope["path"]) else None
        if error is None:
            await self._app(scope, receive, send)
        else:
            self._on_rejected(error.code)
            await error.send(send)

    def _rejection(self, scope: Scope) -> ApiError | None:
        """Return the error of a request, None if it has a valid key."""
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if not given:
            return _invalid("this server requires an API key; send the header 'Authorization: Bearer KEY'")
        scheme, _, key = given[0].partition(b" ")
        if len(given) == 1 and scheme.lower() == BEARER and self._digest(key.strip()) in self._digests:
            return None
        return _invalid("the API key is wrong; send a key of this server as 'Authorization: Bearer KEY'")

    def _digest(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, key=self._secret).digest()


def _invalid(message: str) -> ApiError:
    return ApiError(401, "invalid_api_key", message)
