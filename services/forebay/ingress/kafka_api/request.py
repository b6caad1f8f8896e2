"""Parse a record of `openai-requests`: request id, reply topic and body. Performs no I/O."""

from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from forebay.events.names import unknown_name
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
    """Request id and topic of a response, from the headers of the request record. An error response uses them too.

    Attributes:
        request_id: value of the header `request-id`, or derived from partition and offset if it is missing or invalid.
        reply_topic: full name of the topic of the response; empty for the default topic.
        problem: error with which the request is rejected because a header is invalid; None for valid headers.
    """

    request_id: str
    reply_topic: str
    problem: ApiError | None = None


def address(record: Record, allowed: ReplyTopics) -> ReplyAddress:
    """Return the request id and the reply topic of a request record.

    An invalid header is replaced by its default and reported as `problem`.

    Args:
        record: record of `openai-requests`.
        allowed: topics that a client may name.
    """
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


def body_of(
    record: Record, limits: BodyLimits, *, ignores_unknown: bool = False
) -> ChatBody | TextBody | EmbeddingBody:
    """Return the parsed body of a request record. Its header `path` determines the kind of the body.

    Args:
        record: record of `openai-requests`.
        ignores_unknown: whether unknown fields have no effect. If false, they are rejected.

    Raises:
        ApiError: the record is unreadable, the path is unknown, or the body is too large, invalid or a route query.
    """
    if record.fault is not None:
        raise invalid(f"the record cannot be read: {record.fault}", code="unreadable_record")
    path = (record.headers or {}).get("path") or CHAT_PATH
    kind = KINDS.get(path)
    if kind is None:
        raise ApiError(404, "not_found", unknown_name("path", path, KINDS))
    limits.require(record.value)
    body = parse(kind, record.value, ignores_unknown=ignores_unknown)
    if body.queries_route:
        # A response that is sent again after a takeover must be identical, but the result of a route query changes.
        text = "route queries are not supported by the Kafka API; use POST /v1/route of an ingress"
        raise invalid(text, "nvext.annotations", "unsupported_parameter")
    return body


def nonce_of(record: Record) -> int:
    """Return a nonce for the submission of a record. It depends only on partition and offset of the record.

    So the owner recognises a record that two ingresses submit.
    """
    return xxh3_64_intdigest(f"{record.partition}/{record.offset}".encode())


def slot_of(partition: int, reply_slots: int) -> int:
    """Return the reply slot (partition of `tokens`) for the requests of a partition of `openai-requests`.

    All ingresses use the same one, so that another ingress can continue.

    Args:
        partition: partition of `openai-requests`.
        reply_slots: number of partitions of `tokens`.
    """
    return xxh3_64_intdigest(b"kafka-api-%d" % partition) % reply_slots
