"""Access log: one record of the logger `forebay.access` per request of a client, at level INFO.

A record has the message `METHOD PATH STATUS` and an attribute `fields` with everything else. It never contains a body,
a header other than the request id, or a query string, so neither prompts nor keys are logged. While the logger is
disabled for INFO, a request costs one check of the level.
"""

import logging
from typing import Any

import msgspec
from starlette.types import Message, Scope

from forebay import runtime
from forebay.events.names import printable

LOGGER = "forebay.access"
PROBES = frozenset({"/live", "/ready", "/health", "/metrics"})  # polled by supervisors and Prometheus; not logged
PATH_CHARS_MAX = 256
KAFKA_REQUESTS = "openai-requests"
CLIENT_CLOSED = 499  # as nginx logs a client that disconnected before the response
DISCONNECTED = "client_disconnected"
INCOMPLETE = "response_incomplete"  # error of a response that the server could not complete
_SCOPE_KEY = "forebay.access"

logger = logging.getLogger(LOGGER)


class AccessEntry:
    """What the access log knows about one HTTP request."""

    __slots__ = ("_began_s", "_error", "_is_complete", "_method", "_path", "_status", "fields")

    def __init__(self, method: str, path: str) -> None:
        self.fields: dict[str, Any] = {}
        self._method = method
        self._path = path
        self._began_s = runtime.monotonic_s()
        self._status = 0
        self._error = ""
        self._is_complete = False

    def observe(self, message: Message) -> None:
        """Note the status, the worker and the error of a response from an ASGI message that was sent."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            worker = next((value for name, value in message["headers"] if name == b"x-forebay-worker"), b"")
            if worker:
                self.fields["worker"] = worker.decode()
        elif not message.get("more_body"):
            self._is_complete = True
            if self._status >= 400:
                self._error = _code_of(message.get("body", b""))

    def write(self, *, has_failed: bool = False) -> None:
        """Write the record. A response without an end has `has_failed`, or its client has disconnected."""
        method, path, status = self._method, printable(self._path[:PATH_CHARS_MAX]), self._status
        if not self._is_complete:
            status = status if has_failed else CLIENT_CLOSED
            self._error = INCOMPLETE if has_failed else DISCONNECTED
        fields: dict[str, Any] = {"method": method, "path": path, "status": status}
        if self._error:
            fields["error"] = self._error
        fields |= self.fields
        fields["duration_s"] = round(runtime.monotonic_s() - self._began_s, 4)
        write_access(f"{method} {path} {status}", fields)


def open_entry(scope: Scope) -> AccessEntry | None:
    """Return the entry of a request, to be written at its end; None for `PROBES` paths and a disabled log."""
    if not logger.isEnabledFor(logging.INFO) or scope["path"] in PROBES:
        return None
    entry = scope[_SCOPE_KEY] = AccessEntry(scope["method"], scope["path"])
    return entry


def add_fields(scope: Scope, **fields: Any) -> None:
    """Add fields to the access record of a request. Does nothing while the access log is disabled."""
    entry: AccessEntry | None = scope.get(_SCOPE_KEY)
    if entry is not None:
        entry.fields |= fields


def fields_of(tenant: str, key_id: str) -> dict[str, str]:
    """Return the fields about an API key of a tenant, without any for a request without such a key."""
    return {"tenant": tenant, "key_id": key_id} if tenant else {}


def write_access(message: str, fields: dict[str, Any]) -> None:
    # Unlike `logger.info`, this call does not search the stack for its caller, which takes a third of the time.
    logger.handle(logger.makeRecord(LOGGER, logging.INFO, "", 0, message, (), None, extra={"fields": fields}))


def write_record(partition: int, offset: int, status: int, **fields: Any) -> None:
    """Log a request of the Kafka API, once its response is complete. Empty values of `fields` are left out."""
    if logger.isEnabledFor(logging.INFO):
        place = {"topic": KAFKA_REQUESTS, "partition": partition, "offset": offset, "status": status}
        given = {name: value for name, value in fields.items() if value != ""}
        write_access(f"{KAFKA_REQUESTS}/{partition}@{offset} {status}", {**place, **given})


def _code_of(body: bytes) -> str:
    try:
        error = msgspec.json.decode(body)["error"]
        return str(error["details"]["error_code"] if "details" in error else error["code"])
    except (msgspec.DecodeError, UnicodeDecodeError, LookupError, TypeError):
        return ""
