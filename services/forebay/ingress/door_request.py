"""A record of `openai-requests`: who asks, where the answer goes, and what is asked. No I/O here."""

import re
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from forebay.events.topics import OPENAI_RESPONSES, topic_named
from forebay.ingress.embeddings import EmbeddingBody
from forebay.ingress.errors import ApiError, invalid
from forebay.ingress.fields import parse
from forebay.ingress.openai import REQUEST_ID, ChatBody, TextBody
from forebay.transport.base import Record

CHAT_PATH = "/v1/chat/completions"
TEXT_PATH = "/v1/completions"
EMBEDDING_PATH = "/v1/embeddings"
KINDS: dict[str, type[ChatBody | TextBody | EmbeddingBody]] = {
    CHAT_PATH: ChatBody,
    TEXT_PATH: TextBody,
    EMBEDDING_PATH: EmbeddingBody,
}
TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}")  # what Kafka takes


@dataclass(frozen=True, slots=True)
class Address:
    """Where an answer goes, even one that says what is wrong with the record.

    Attributes:
        request_id: the header's, or derived from the record's place.
        reply_topic: a full topic name, empty for forebay's own.
        problem: of the headers; the request is refused with it.
    """

    request_id: str
    reply_topic: str
    problem: ApiError | None = None


def address(record: Record, namespace: str) -> Address:
    """Where the answer to a record goes. A header that is of no use is left out and told."""
    headers = record.headers or {}
    request_id = headers.get("request-id")
    reply_topic = headers.get("reply-topic", "")
    problem = None
    if request_id is None or not REQUEST_ID.fullmatch(request_id):
        if request_id is not None:
            text = "request-id takes 1 to 128 letters, digits, dots, dashes and underscores"
            problem = invalid(text, "request-id", "invalid_request_id")
        request_id = f"door-{record.partition}-{record.offset}"
    if reply_topic == f"{namespace}.{OPENAI_RESPONSES.name}":
        reply_topic = ""
    elif reply_topic and not _may_answer_to(reply_topic, namespace):
        problem = problem or invalid(f"answers cannot go to {reply_topic!r}", "reply-topic", "invalid_reply_topic")
        reply_topic = ""
    return Address(request_id, reply_topic, problem)


def body_of(record: Record, body_bytes_max: int) -> ChatBody | TextBody | EmbeddingBody:
    """What a record asks for. Raises ApiError with the first thing that is wrong."""
    path = (record.headers or {}).get("path", CHAT_PATH)
    kind = KINDS.get(path)
    if kind is None:
        raise ApiError(404, "not_found", f"there is no {path}")
    if len(record.value) > body_bytes_max:
        raise ApiError(413, "body_too_large", f"the body is larger than {body_bytes_max} bytes")
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
    """The reply slot of a partition of the door, whoever reads it."""
    return xxh3_64_intdigest(b"door-%d" % partition) % reply_slots


def _may_answer_to(topic: str, namespace: str) -> bool:
    """Whether a topic can be somebody's for answers: no topic of forebay's and none of Kafka's own."""
    if not TOPIC.fullmatch(topic) or topic.startswith("__"):
        return False
    name = topic.removeprefix(f"{namespace}.")
    if name == topic:
        return True
    try:
        topic_named(name)
    except KeyError:
        return True
    return False
