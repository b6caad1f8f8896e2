"""Parse a record of `openai-requests`: request id, allowed reply topic, signature and body. Performs no I/O."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from xxhash import xxh3_64_intdigest

from forebay.events import signing
from forebay.events.keys import KEY_ID_DIGITS
from forebay.events.names import unknown_name
from forebay.events.topics import OPENAI_RESPONSES, topic_named
from forebay.ingress.api_keys import ApiKeys
from forebay.ingress.bodies import KINDS, AnyBody
from forebay.ingress.body_limits import BOM, BodyLimits
from forebay.ingress.caller import ANONYMOUS, Caller, unusable
from forebay.ingress.errors import ApiError, invalid
from forebay.ingress.openai.fields import parse
from forebay.ingress.openai.requests import CHAT_PATH, REQUEST_ID
from forebay.ingress.responses.body import ResponsesBody
from forebay.transport.base import Record

TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}")  # valid names in Kafka
KEY_ID = re.compile(f"[0-9a-f]{{{KEY_ID_DIGITS}}}")
TIME = re.compile(r"[0-9]{1,15}")  # Unix time in milliseconds
# The owner remembers the id of a request for two minutes after its end. Within this time a replayed record is appended
# at most two minutes after the first one, even if the clock of the producer is ahead.
SIGNATURE_MS = 60_000
SECRET_HEADERS = ("authorization", "x-api-key")  # of HTTP
EXPOSED = (
    "everyone who may read the topic can read an API key in a header, so revoke it; sign the record with a key of "
    "`forebay keys create --signing`"
)


class ReplyTopics:
    """Container of the full names of topics to which a client may direct responses, without forebay's own topics.

    Attributes:
        default: full name of the topic for responses to requests without the header `reply-topic`.
    """

    def __init__(self, namespace: str, patterns: Sequence[str] = ()) -> None:
        self.default = f"{namespace}.{OPENAI_RESPONSES.name}"
        self._patterns = tuple(patterns) or (f"{namespace}.replies.*",)

    def __contains__(self, topic: str) -> bool:
        if not TOPIC.fullmatch(topic) or topic.startswith("__") or _is_forebay_topic(topic):
            return False
        return any(fnmatchcase(topic, pattern) for pattern in self._patterns)

    def __str__(self) -> str:
        return ", ".join((self.default, *self._patterns))


def _is_forebay_topic(topic: str) -> bool:
    parts = topic.split(".")
    for first in range(1, len(parts)):
        try:
            topic_named(".".join(parts[first:]))
        except KeyError:
            continue
        return True
    return False


@dataclass(frozen=True, slots=True)
class ReplyAddress:
    """Request id and topic of a response, also of an error response, from the headers of the request record.

    Attributes:
        request_id: header `request-id`, or derived from partition and offset if it is missing or invalid.
        reply_topic: full name of the topic of the response; empty for the default topic.
        problem: error with which the request is rejected; None if the headers are valid.
    """

    request_id: str
    reply_topic: str
    problem: ApiError | None = None


def address(record: Record, allowed: ReplyTopics) -> ReplyAddress:
    """Return the address of a response. An invalid header is replaced by its default and reported as `problem`."""
    headers = record.headers or {}
    request_id = headers.get("request-id")
    reply_topic = headers.get("reply-topic", "")
    problem = None
    if request_id is None or not REQUEST_ID.fullmatch(request_id):
        if request_id is not None:
            text = "invalid request-id; it must be 1 to 128 letters, digits, dots, dashes and underscores"
            problem = invalid(text, "request-id", "invalid_request_id")
        request_id = f"kafka-api-{record.partition}-{record.offset}"
    if reply_topic == allowed.default:
        reply_topic = ""
    elif reply_topic and reply_topic not in allowed:
        text = f"reply-topic {reply_topic!r} is not allowed; topics must match: {allowed}"
        problem = problem or invalid(text, "reply-topic", "invalid_reply_topic")
        reply_topic = ""
    return ReplyAddress(request_id, reply_topic, problem)


def signer(record: Record, topic: str, keys: ApiKeys, *, is_required: bool) -> Caller:
    """Return the tenant that signed a record of the topic with this full name, `ANONYMOUS` without a signature.

    Raises ApiError (401) for an API key in a header, for an invalid or old signature, and for a missing one if it
    `is_required`.
    """
    headers = record.headers or {}
    for name in headers:
        if name.lower() in SECRET_HEADERS:
            raise ApiError(401, "api_key_in_header", f"the record has the header {name.lower()}; {EXPOSED}")
    if record.fault is not None:
        return ANONYMOUS  # `body_of` rejects it
    needed = signing.KEY, signing.TIME, signing.SIGNATURE, "request-id"
    if not is_required and not headers.keys() & set(needed[:3]):
        return ANONYMOUS
    if missing := [name for name in needed if name not in headers]:
        text = f"a signed record needs the header {missing[0]}"
        raise _invalid(f"this ingress accepts only signed records; {text}" if is_required else text, missing[0])
    key_id, sent_ms, at_ms = headers[signing.KEY], headers[signing.TIME], record.at_us // 1000
    if not KEY_ID.fullmatch(key_id):
        text = f"{signing.KEY} must be the id of a key, {KEY_ID_DIGITS} hex digits; {EXPOSED}"
        raise ApiError(401, "api_key_in_header", text, signing.KEY)
    key = keys.find_id(key_id)
    if key is None or not key.public_key:
        text = f"{key_id} is {'unknown' if key is None else 'not a key that signs'}; `forebay keys list` shows the keys"
        raise _invalid(text, signing.KEY)
    if not signing.is_signed_by(bytes.fromhex(key.public_key), topic, headers, record.value):
        text = f"the signature is not that of the key {key_id} for these headers and this value on {topic}"
        raise _invalid(text, signing.SIGNATURE)
    if (problem := unusable(key, record.at_us)) is not None:
        raise problem
    if not record.is_stamped:
        text = f"the age of a signature is unknown; set message.timestamp.type of {topic} to LogAppendTime"
        raise ApiError(501, "untrusted_timestamps", text)
    if not TIME.fullmatch(sent_ms) or abs(int(sent_ms) - at_ms) > SIGNATURE_MS:
        text = f"{signing.TIME} is {sent_ms[:15]!r}, but must be within {SIGNATURE_MS:,} ms of the time of the broker, "
        text += f"{at_ms}; check the clock, and sign a record again before you repeat it"
        raise ApiError(401, "signature_expired", text, signing.TIME)
    return Caller(key)


def _invalid(text: str, param: str) -> ApiError:
    return ApiError(401, "invalid_signature", text, param)


def body_of(record: Record, limits: BodyLimits, *, ignores_unknown: bool = False) -> AnyBody:
    """Return the parsed body of a request record. Its header `path` determines the kind of the body.

    Raises ApiError for an unreadable record, an unknown path, a body that is too large or invalid, or a route query.
    """
    if record.fault is not None:
        raise invalid(f"the record cannot be read: {record.fault}", code="unreadable_record")
    path = (record.headers or {}).get("path") or CHAT_PATH
    kind = KINDS.get(path)
    if kind is None:
        raise ApiError(404, "not_found", unknown_name("path", path, KINDS))
    raw = record.value.removeprefix(BOM)
    limits.require(raw)
    body = parse(kind, raw, ignores_unknown=ignores_unknown)
    if isinstance(body, ResponsesBody):
        body = body.unstored()
    if body.queries_route:
        # A response that is sent again after a takeover must be identical, but the result of a route query changes.
        text = "route queries are not supported by the Kafka API; use POST /v1/route of an ingress"
        raise invalid(text, "nvext.annotations", "unsupported_parameter")
    return body


def nonce_of(record: Record) -> int:
    """Return a nonce from partition and offset, so that the owner recognises a record that two ingresses submit."""
    return xxh3_64_intdigest(f"{record.partition}/{record.offset}".encode())


def slot_of(partition: int, reply_slots: int) -> int:
    """Return the reply slot of a partition, the same for all ingresses, so that another ingress can continue."""
    return xxh3_64_intdigest(b"kafka-api-%d" % partition) % reply_slots
