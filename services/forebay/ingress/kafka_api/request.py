"""A record of `openai-requests`: who asks, where the answer goes, and what is asked. No I/O here."""

from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from forebay.ingress.errors import ApiError, invalid
from forebay.ingress.http.body_limits import BodyLimits
from forebay.ingress.kafka_api.topics import ReplyTopics
from forebay.ingress.openai.embeddings import EmbeddingBody
from forebay.ingress.openai.fields import parse
from forebay.ingress.openai.requests import REQUEST_ID, ChatBody, TextBody
from forebay.transport.base import Record

CHAT_PATH = "/v1/chat/completions"
TEXT_PATH = "/v1/completions"
EMBEDDING_PATH = "/v1/embeddings"
KINDS: dict[str, type[ChatBody | TextBody | EmbeddingBody]] = {
    CHAT_PATH: ChatBody,
    TEXT_PATH: TextBody,
    EMBEDDING_PATH: EmbeddingBody,
}


@dataclass(frozen=True, slots=True)
class ReplyAddress:
    """Where an answer goes, even one that says what is wrong with the record.

    Attributes:
        request_id: the header's, or derived from the record's place.
        reply_topic: a full topic name, empty for forebay's own.
        problem: of the headers; the request is refused with it.
    """

    request_id: str
    reply_topic: str
    problem: ApiError | None = None


def address(record: Record, allowed: ReplyTopics) -> ReplyAddress:
    """Where the answer to a record goes. A header that is of no use is left out and told."""
    headers = record.headers or {}
    request_id = headers.get("request-id")
    reply_topic = headers.get("reply-topic", "")
    problem = None
    if request_id is None or not REQUEST_ID.fullmatch(request_id):
        if request_id is not None:
            text = "request-id takes 1 to 128 letters, digits, dots, dashes and underscores"
            problem = invalid(text, "request-id", "invalid_request_id")
        request_id = f"kafka-api-{record.partition}-{record.offset}"
    if reply_topic == allowed.default:
        reply_topic = ""
    elif reply_topic and reply_topic not in allowed:
        text = f"responses may not go to {reply_topic!r}, only to topics that match: {allowed}"
        problem = problem or invalid(text, "reply-topic", "invalid_reply_topic")
        reply_topic = ""
    return ReplyAddress(request_id, reply_topic, problem)


def body_of(record: Record, limits: BodyLimits) -> ChatBody | TextBody | EmbeddingBody:
    """What a record asks for. Raises ApiError with the first thing that is wrong."""
    if record.fault is not None:
        raise invalid(f"the record cannot be read: {record.fault}", code="unreadable_record")
    path = (record.headers or {}).get("path") or CHAT_PATH
    kind = KINDS.get(path)
    if kind is None:
        raise ApiError(404, "not_found", f"there is no {path}")
    limits.require(record.value)
    body = parse(kind, record.value)
    if body.queries_route:
        # An answer that is given again after a take-over must be the same, and where a request would go changes.
        text = "routes are not queried through a topic; ask POST /v1/route of an ingress"
        raise invalid(text, "nvext.annotations", "unsupported_parameter")
    return body


def nonce_of(record: Record) -> int:
    """The same for every delivery of a record, and for no other record."""
    return xxh3_64_intdigest(f"{record.partition}/{record.offset}".encode())


def slot_of(partition: int, reply_slots: int) -> int:
    """The reply slot of a partition of `openai-requests`, whoever reads it."""
    return xxh3_64_intdigest(b"kafka-api-%d" % partition) % reply_slots
