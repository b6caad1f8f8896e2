"""Topic `answers`: finished responses that are kept for longer than their requests and tokens.

Partition 0 is the index. It has one `AnswerStored` or `AnswerDeleted` per response, whose key is the location of the
request. Partition 1 has the content of responses in pieces. Offsets stay valid after compaction, so a reader finds each
piece by the offset in `AnswerStored`. An answer consists of the events from which an ingress renders the response, not
of rendered text. Replays do not use this topic.
"""

from typing import Annotated

from forebay.events.base import Count, Event, Name, Part
from forebay.events.privacy import DROPPED, KEPT, REQUEST_ID, TENANT
from forebay.events.requests import RequestSubmitted
from forebay.events.tokens import AttemptStarted, Embedded, ResponseEnded, TokensEmitted

RETENTION_S = 7 * 86_400  # as long as requests are kept

OutputEvent = TokensEmitted | Embedded | AttemptStarted | ResponseEnded


class IndexEvent(Event, frozen=True, kw_only=True):
    """Base class of the events of the index."""

    request_id: Annotated[Name, REQUEST_ID]
    partition: Count
    offset: Count
    at_us: int = 0

    @property
    def key(self) -> bytes:
        """Key of the record."""
        return f"{self.partition:x}.{self.offset:x}".encode()


class AnswerStored(IndexEvent, tag="answer.stored", frozen=True, kw_only=True):
    """The content of a finished response is on this topic.

    Attributes:
        request_id: id of the whole request of the client.
        partition: partition of the first request of the response on the topic `requests`.
        offset: offset of this request.
        upload: id of the upload, because several ingresses may store a response at the same time.
        offsets: offsets of the pieces of the content in partition 1, in order.
        size: bytes of the uncompressed content.
        expires_us: wall-clock time in microseconds from which on the response is not served any more.
        tenant: tenant that owns the response; empty for none.
    """

    upload: Annotated[Name, KEPT]
    offsets: tuple[Count, ...]
    size: Count
    expires_us: int
    tenant: Annotated[str, TENANT] = ""


class AnswerDeleted(IndexEvent, tag="answer.deleted", frozen=True, kw_only=True):
    """A client deleted a response. No ingress serves it any more, although other topics still have its events.

    Attributes:
        request_id: id of the whole request of the client.
        partition: partition of the first request of the response on the topic `requests`.
        offset: offset of this request.
    """


class AnswerChunk(Event, tag="answer.chunk", frozen=True, kw_only=True):
    """One piece of the content of a response: an `AnswerContent` in MessagePack, compressed with zlib as a whole.

    Attributes:
        upload: id of the upload.
        index: number of the piece, from 0.
        data: the piece.
    """

    upload: Annotated[Name, KEPT]
    index: Count
    data: Annotated[bytes, DROPPED]

    @property
    def key(self) -> bytes:
        """Key of the record."""
        return chunk_key(self.upload, self.index)


def chunk_key(upload: str, index: int) -> bytes:
    """Return the key of the record with one piece of an upload."""
    return f"{upload}/{index}".encode()


class AnswerContent(Part, frozen=True, kw_only=True):
    """What an ingress needs to render a response: its first request, and the output of all of its requests.

    Attributes:
        submission: the first request, without block hashes and media.
        events: valid output of the requests, in the order of the reply slot.
        has_failed: whether the response ends with an error.
    """

    submission: RequestSubmitted
    events: tuple[OutputEvent, ...]
    has_failed: bool = False


AnswerEvent = AnswerStored | AnswerDeleted | AnswerChunk
