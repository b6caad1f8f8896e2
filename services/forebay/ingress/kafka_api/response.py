"""Build the records of a response of the Kafka API.

The records depend only on the request and on events of the reply slot, so they are identical after a takeover.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from forebay import runtime
from forebay.core.state.reply_slot import ResponseState
from forebay.events.requests import RequestSubmitted
from forebay.ingress.access_log import write_record
from forebay.ingress.errors import RETRY_AFTER_S, ApiError
from forebay.ingress.group import GroupClient
from forebay.ingress.kafka_api.request import ReplyAddress
from forebay.ingress.limits import Reservation
from forebay.ingress.response_fold import ResponseFold

OK = 200


@dataclass(frozen=True, slots=True)
class ResponseRecord:
    """One record of a response; `index` is its position in the response, from 0."""

    index: int
    status: int
    last: bool
    value: bytes
    retry_after_s: int = RETRY_AFTER_S


@dataclass(slots=True)
class WindowEntry:
    """State of one request record, from its acceptance until all earlier records are complete too.

    Attributes:
        slot_from: offset in the reply slot at which the response can begin.
        is_complete: whether the broker has acknowledged the complete response.
        diverted: whether the response is sent to the default topic because its reply topic failed.
    """

    offset: int
    slot_from: int
    is_complete: bool = False
    diverted: bool = False


class RecordResponse:
    """Response to one record of `openai-requests`, which becomes one request on the log per choice or input.

    Attributes:
        caller: fields of the access log.
        admission: counts the request for the limits of its key; None afterwards.
    """

    def __init__(self, entry: WindowEntry, where: ReplyAddress, fold: ResponseFold, group: GroupClient) -> None:
        self.group = group
        self.entry = entry
        self.where = where
        self.caller: dict[str, str] = {}
        self.admission: Callable[[], Awaitable[Reservation]] | None = None
        self.fold = fold
        self.requests: list[PendingRequest] = []
        self._reservation = Reservation()
        self._sent = 0
        self._events = fold.begin(fold.request_id)
        self._began_s = runtime.monotonic_s()

    async def admit(self) -> None:
        """Count the request for the limits of its key, once. Raises ApiError if a limit is reached.

        A request that another ingress submitted is admitted if it has output, because that ingress counted it.
        """
        admission, self.admission = self.admission, None
        if admission is not None and not self.fold.is_over and not self._has_run:
            self._reservation = await admission()
            if self.fold.is_over:  # meanwhile
                self.settle()

    def settle(self) -> None:
        """Count what the request has used, or all that it may use if it has begun and another ingress takes it over."""
        if self._has_run:
            self._reservation.end(self.fold.prompt_tokens + self.fold.output_tokens if self.fold.is_over else None)
        else:
            self._reservation.release()

    @property
    def _has_run(self) -> bool:
        return any(one.worker_id for one in self.requests)

    def write_access(self, partition: int) -> None:
        fold, error = self.fold, self.fold.error
        write_record(
            partition,
            self.entry.offset,
            200 if error is None else error.status,
            error="" if error is None else error.code,
            request_id=fold.request_id,
            **self.caller,
            worker=next((one.worker_id for one in self.requests if one.worker_id), ""),
            prompt_tokens=fold.prompt_tokens,
            cached_tokens=fold.cached_tokens,
            output_tokens=sum(one.next_index for one in self.requests),
            duration_s=round(runtime.monotonic_s() - self._began_s, 4),
        )

    def step(self, request: "PendingRequest") -> list[ResponseRecord]:
        fold = self.fold
        if fold.is_over:
            return []
        events, self._events = self._events + fold.step(request, request.index), []
        ends = len(events) if fold.is_over and fold.error is None else 0
        records = [self._record(event.data, last=number == ends) for number, event in enumerate(events, 1)]
        return records if fold.error is None else [*records, self.fail(fold.error)]

    def fail(self, error: ApiError) -> ResponseRecord:
        """End the response with an error, and return its last record."""
        self.fold.fail(error)
        return self._record(self.fold.error_body(error), last=True, status=error.status, after_s=error.retry_after_s)

    def _record(self, value: bytes, *, last: bool, status: int = OK, after_s: int = RETRY_AFTER_S) -> ResponseRecord:
        record = ResponseRecord(self._sent, status, last, value, after_s)
        self._sent += 1
        return record


class PendingRequest(ResponseState):
    """A request on the log, and its output so far.

    Attributes:
        index: position of the request's choice or input in the response, from 0.
        submission: event that submits the request; None once it was appended to the log.
    """

    __slots__ = ("index", "request_id", "response", "submission")

    def __init__(
        self, request_id: str, response: RecordResponse, index: int = 0, submission: RequestSubmitted | None = None
    ) -> None:
        super().__init__(0 if submission is None else submission.reply_key)
        self.request_id = request_id
        self.response = response
        self.index = index
        self.submission = submission
        response.requests.append(self)
