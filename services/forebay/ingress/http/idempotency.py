"""The header `Idempotency-Key`: requests with the same key get the same response."""

import re
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

from msgspec.structs import replace
from starlette.requests import Request
from xxhash import xxh3_64_intdigest

from forebay.events.base import U64_BYTES
from forebay.events.request_ids import RequestLocation
from forebay.events.requests import RequestSubmitted
from forebay.ingress.caller import caller_of
from forebay.ingress.errors import ApiError, invalid

HEADER = "Idempotency-Key"
KEY = re.compile(r"[ -~]{1,255}")
SECRET_HEADERS = (b"authorization", b"x-api-key")
REPLAYED = [(b"idempotency-replayed", b"true")]


class Idempotency(NamedTuple):
    """Idempotency key of a client's request.

    Attributes:
        secret: API key that the client sent. Clients with different API keys cannot read each other's responses.
        tenant: tenant of the API key, whose keys share responses; then `secret` is empty.
        body_hash: hash of the path and the decoded body.
    """

    key: str
    secret: bytes
    body_hash: int
    tenant: str = ""

    def applied(self, group: str, parts: Sequence[RequestSubmitted]) -> list[RequestSubmitted]:
        """Return the submissions of a request with the key in a group.

        Only the first part has the key. If all had one, a failed first part would free its key, and the parts that had
        finished would keep theirs, so a repetition would run without them. See `after_failure` for other failed parts.
        """
        first, *others = parts
        return [replace(first, idempotency_key=self._hash(group), body_hash=self.body_hash), *others]

    def after_failure(self, location: RequestLocation) -> "Idempotency":
        """Return the key with which every repetition runs, because the request at this location has failed."""
        return self._replace(secret=b"%b\0%d.%d" % (self.secret, *location))

    def require_same_body(self, earlier: RequestSubmitted) -> None:
        """Raise ApiError (409) if the earlier request with this key has another body."""
        if earlier.body_hash != self.body_hash:
            text = f"the {HEADER} {self.key!r} was used for a request with another path or body; use a new key"
            raise ApiError(409, "idempotency_key_reused", text, HEADER)

    def _hash(self, group: str) -> int:
        digest = blake2b(digest_size=U64_BYTES)
        parts = [self.secret, group.encode(), self.key.encode()]
        for part in [*parts, self.tenant.encode()] if self.tenant else parts:
            digest.update(len(part).to_bytes(U64_BYTES, "little") + part)
        return int.from_bytes(digest.digest(), "little") or 1  # 0 means no key


def idempotency_of(request: Request, raw: bytes) -> Idempotency | None:
    """Return the key of a request with this decoded body; None if it has none. Raises ApiError (400) if malformed."""
    given = request.headers.getlist(HEADER)
    if not given:
        return None
    if len(given) > 1 or KEY.fullmatch(given[0]) is None:
        text = f"send one {HEADER} with 1 to 255 printable ASCII characters, such as a UUID"
        raise invalid(text, HEADER, "invalid_idempotency_key")
    tenant = caller_of(request.scope).tenant
    secret = b"" if tenant else b"\0".join(value for name, value in request.headers.raw if name in SECRET_HEADERS)
    body_hash = xxh3_64_intdigest(request.url.path.encode() + b"\0" + raw)
    return Idempotency(given[0], secret, body_hash, tenant)
