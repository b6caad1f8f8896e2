"""Who sent a request: the tenant and the rights of its API key. The log has this with the request."""

from collections.abc import Iterable, MutableMapping
from hashlib import blake2b
from typing import Any

import msgspec

from forebay.events.base import U64_BYTES
from forebay.events.keys import NO_KEY, KeySet
from forebay.events.names import unknown_name
from forebay.events.requests import RoutingHints
from forebay.events.trace_ids import TRACEPARENT
from forebay.ingress.access_log import add_fields, fields_of
from forebay.ingress.errors import ApiError, invalid

TRACE_HEADER = "traceparent"
OF_TENANT = "tenant/"  # start of the cache namespaces of tenants
_SCOPE_KEY = "forebay.caller"


class Caller(msgspec.Struct, frozen=True):
    """Client of a request, as its API key identifies it.

    Attributes:
        key: event of the API key; `NO_KEY` for an anonymous client or a key without a tenant.
        end_user: as in `RequestSubmitted`; so is `traceparent`.
    """

    key: KeySet = NO_KEY
    end_user: int = 0
    traceparent: str = ""

    @property
    def tenant(self) -> str:
        return self.key.tenant

    def with_details(self, end_user: str, headers: Iterable[tuple[str, str]]) -> "Caller":
        """Return the caller of one request, with the hash of the client's user and the trace context of the headers.

        An invalid trace context, and one of several, is ignored, as W3C requires.
        """
        traces = [value for name, value in headers if name == TRACE_HEADER]
        traceparent = traces[0] if len(traces) == 1 and TRACEPARENT.fullmatch(traces[0]) else ""
        if not end_user and not traceparent:
            return self
        return msgspec.structs.replace(self, end_user=self._hash(end_user), traceparent=traceparent)

    def _hash(self, end_user: str) -> int:
        if not end_user:
            return 0
        digest = blake2b(f"{self.tenant}\0{end_user}".encode(errors="surrogatepass"), digest_size=U64_BYTES).digest()
        return int.from_bytes(digest, "little") or 1  # 0 means no user

    def namespace(self, given: str) -> str:
        """Return the cache namespace of a request for which the client gave this one."""
        if not self.tenant:
            return f"client/{given}" if given.startswith(OF_TENANT) else given  # nobody else has blocks of a tenant
        own = OF_TENANT + (self.key.cache_namespace or self.tenant)
        return f"{own}/{given}" if given else own

    def may_use(self, model: str) -> bool:
        """Return whether the API key permits the model that a client names."""
        return not self.key.models or model in self.key.models

    def require_model(self, model: str) -> None:
        """Raise ApiError (404) if the API key does not permit the model that a client names."""
        if not self.may_use(model):
            text = unknown_name("model", model, self.key.models)
            raise ApiError(404, "model_not_found", f"{text}; the API key permits no others", "model")

    def routing(self, hints: RoutingHints) -> RoutingHints:
        """Return the hints of a request without a priority above that of the key.

        Raises ApiError (400) for a queue class that the key may not use.
        """
        if not self.tenant:
            return hints
        allowed, chosen = self.key.queue_classes, hints.policy_class
        if chosen and allowed and chosen not in allowed:
            text = f"the API key may not use the queue class {chosen!r}; it may use: {', '.join(allowed)}"
            raise invalid(text, "nvext.policy_class", "queue_class_not_allowed")
        if not allowed:
            chosen = ""
        elif not chosen:
            chosen = allowed[0]
        return msgspec.structs.replace(hints, policy_class=chosen, priority=min(hints.priority, 0), strict_priority=0)


ANONYMOUS = Caller()


def unusable(key: KeySet, at_us: int) -> ApiError | None:
    """Return the error for a key of a tenant that is revoked, or has expired before a time."""
    if key.revoked_us:
        return ApiError(401, "api_key_revoked", f"the API key {key.key_id} was revoked; use another one")
    if key.expires_us and at_us >= key.expires_us:
        return ApiError(401, "api_key_expired", f"the API key {key.key_id} has expired; use another one")
    return None


def set_caller(scope: MutableMapping[str, Any], caller: Caller) -> None:
    """Note the caller of an HTTP request, also for the access log."""
    scope[_SCOPE_KEY] = caller
    add_fields(scope, **fields_of(caller.tenant, caller.key.key_id))


def caller_of(scope: MutableMapping[str, Any]) -> Caller:
    """Return the caller of an HTTP request."""
    found: Caller = scope.get(_SCOPE_KEY, ANONYMOUS)
    return found
