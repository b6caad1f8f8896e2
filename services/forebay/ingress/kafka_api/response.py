"""Records of a response of the Kafka API.

The records depend only on the request and on events of the reply slot. So a response that another ingress sends again
after a takeover has identical records.
"""

from dataclasses import dataclass

from forebay.core.state.reply_slot import ResponseState
from forebay.events.requests import RequestSubmitted
from forebay.ingress.errors import ApiError
from forebay.ingress.kafka_api.request import ReplyAddress
from forebay.ingress.response_fold import ResponseFold

OK = 200


@dataclass(frozen=True, slots=True)
class ResponseRecord:
    """A record of a response. `index` counts from 0; `last` marks the last record."""

    index: int
    status: int
    last: bool
    value: bytes


@dataclass(slots=True)
class WindowEntry:
    """A record of the partition in the window of incomplete requests.

    Attributes:
        offset: offset in the partition.
        slot_from: offset in the reply slot at which the response can begin.
        is_complete: whether the response is complete and acknowledged.
        diverted: whether the response goes to the default topic because its reply topic failed.
    """

    offset: int
    slot_from: int
    is_complete: bool = False
    diverted: bool = False


class RecordResponse:
    """Response to one record of `openai-requests`.

    Attributes:
        entry: the record in the window.
        where: destination of the response.
        fold: the response.
        requests: requests on the log, one per input.
    """

    __slots__ = ("_sent", "entry", "fold", "requests", "where")

    def __init__(self, entry: WindowEntry, where: ReplyAddress, fold: ResponseFold) -> None:
        self.entry = entry
        self.where = where
        self.fold = fold
        self.requests: list[PendingRequest] = []
        self._sent = 0

    def step(self, request: "PendingRequest") -> list[ResponseRecord]:
        """Return the records that can be sent after the output of one of the requests changed."""
        fold = self.fold
        if fold.is_over:
            return []
        objects = fold.step(request, request.index)
        ends = len(objects) if fold.is_over and fold.error is None else 0
        records = [self._record(value, last=number == ends) for number, value in enumerate(objects, 1)]
        return records if fold.error is None else [*records, self.fail(fold.error)]

    def fail(self, error: ApiError) -> ResponseRecord:
        """End the response, and return the last record: an error in OpenAI's format."""
        self.fold.fail(error)
        return self._record(error.encoded(), last=True, status=error.status)

    def _record(self, value: bytes, *, last: bool, status: int = OK) -> ResponseRecord:
        record = ResponseRecord(self._sent, status, last, value)
        self._sent += 1
        return record


class PendingRequest(ResponseState):
    """A request on the log, and its output so far.

    Attributes:
        request_id: id on the log.
        response: the response that the request belongs to.
        index: position of its input in the response.
        submission: event to submit, None once it was submitted.
    """

    __slots__ = ("index", "request_id", "response", "submission")

    def __init__(
        self, request_id: str, response: RecordResponse, index: int = 0, submission: RequestSubmitted | None = None
    ) -> None:
        super().__init__()
        self.request_id = request_id
        self.response = response
        self.index = index
        self.submission = submission
        response.requests.append(self)
