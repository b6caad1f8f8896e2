"""Fold a journal into the usage of tenants: what each request that has ended is charged.

Theory of operation. The fold keeps the requests in flight. A request is charged once, when the owner reads its end or
aborts it, to the hour of the owner's clock. A progress event counts if it is from the attempt that the owner routed
last.

What is charged: see `docs/ledger.md`.
"""

from collections import Counter
from dataclasses import dataclass

import msgspec

from forebay.events.decisions import (
    JournalRecord,
    RequestAborted,
    RequestHeld,
    RequestRejected,
    RequestRepeated,
    RequestRouted,
)
from forebay.events.positions import JournalPosition
from forebay.events.progress import FirstTokenEmitted, OutputGrown, ProgressEvent, RequestFailed, RequestFinished
from forebay.events.requests import RequestCancelled, RequestSubmitted
from forebay.events.topics import DECISIONS
from forebay.events.usage import UsageEntry
from forebay.journal.folds import FoldReader, begin_of
from forebay.transport.base import Log

HOUR_US = 3_600_000_000
RESPONSE_STAGES = ("aggregated", "decode")
SUMS = UsageEntry.__struct_fields__[4:]  # after the key

Key = tuple[int, str, str, str]  # hour, tenant, key and model


@dataclass(slots=True)
class _OpenRequest:
    """Request in flight. Times are on the owner's clock, in microseconds; 0 before the event.

    Attributes:
        begin: position before the journal record that counts the submission.
        is_accepted: whether the journal has a decision about it. Otherwise the event may repeat an earlier one.
        is_decoding: whether the current attempt has emitted a token.
        shown_tokens: output tokens that progress events show.
        passed_tokens: output tokens that an ingress has passed to a client; None if no ingress has said so.
        is_complete: whether the client ended the response because it had all of it.
    """

    begin: JournalPosition
    submitted: RequestSubmitted
    submitted_us: int
    is_accepted: bool = False
    stage: str = ""
    place: tuple[int, str, int] = (0, "", -1)  # attempt, worker and epoch
    routed_us: int = 0
    first_us: int = 0
    is_decoding: bool = False
    cached_tokens: int = 0
    shown_tokens: int = 0
    passed_tokens: int | None = None
    is_complete: bool = False


class UsageReader(FoldReader):
    """Reads a journal, and keeps the usage of the requests that ended, and the requests in flight.

    Attributes:
        totals: usage since the last `take`, from journal offset `charges_from` on.
    """

    def __init__(self, log: Log, partition: int, begin: JournalPosition, charges_from: int) -> None:
        """Begin at a position at which no request was in flight that ends at journal offset `charges_from` or later."""
        super().__init__(log, partition, begin)
        self.totals: dict[Key, Counter[str]] = {}
        self._charges_from = charges_from
        self._open: dict[str, _OpenRequest] = {}
        self._undecided: list[str] = []
        self._is_charged = False

    def take(self) -> tuple[UsageEntry, ...]:
        """Return the usage since the last call, in the order of the keys."""
        taken = tuple(
            UsageEntry(hour_us=hour_us, tenant=tenant, key_id=key_id, model=model, **totals)
            for (hour_us, tenant, key_id, model), totals in sorted(self.totals.items())
        )
        self.totals = {}
        return taken

    def oldest(self) -> JournalPosition | None:
        return next((request.begin for request in self._open.values()), None)

    def begin_record(self, offset: int, *, has_events: bool) -> None:
        self._is_charged = offset >= self._charges_from
        if has_events:
            for request_id in self._undecided:
                if (request := self._open.get(request_id)) is not None and not request.is_accepted:
                    del self._open[request_id]  # the owner knew the id, or the submission had no effect
            self._undecided.clear()

    def apply_event(self, event: object, offset: int, begin: JournalPosition) -> None:
        match event:
            case RequestSubmitted() if event.request_id not in self._open:
                small = msgspec.structs.replace(event, token_ids=b"", withheld_tokens=event.prompt_tokens)
                self._open[event.request_id] = _OpenRequest(begin, small, self.now_us)
                self._undecided.append(event.request_id)
            case RequestCancelled() if (request := self._open.get(event.request_id)) is not None:
                request.is_complete = request.is_complete or event.is_complete
                passed = event.output_tokens
                if passed is None and not (event.is_complete or event.ingress_incarnation):
                    passed = request.shown_tokens  # a client cancelled it by its id, and may have read its output
                if passed is not None:
                    request.passed_tokens = max(request.passed_tokens or 0, passed)
            case ProgressEvent() if (request := self._open.get(event.request_id)) is not None:
                if request.place == (event.attempt, event.worker_id, event.worker_epoch):
                    self._progress(request, event)

    def _progress(self, request: _OpenRequest, event: ProgressEvent) -> None:
        match event:
            case FirstTokenEmitted() if request.stage in RESPONSE_STAGES:
                if not request.first_us:
                    request.first_us, request.cached_tokens = self.now_us, event.cached_tokens
                request.is_decoding, request.shown_tokens = True, max(request.shown_tokens, 1)
            case OutputGrown() if request.is_decoding:
                request.shown_tokens = max(request.shown_tokens, event.output_tokens)
            case RequestFinished() if request.stage in RESPONSE_STAGES:
                self._charge(request, event)
            case RequestFailed() if request.stage != "prefill":
                self._charge(request)

    def apply_record(self, record: JournalRecord) -> None:
        match record:
            case RequestRouted() | RequestHeld() if (request := self._open.get(record.request_id)) is not None:
                request.is_accepted = True
                if isinstance(record, RequestRouted):
                    request.stage, request.is_decoding = record.stage, False
                    request.place = record.attempt, record.worker_id, record.worker_epoch
                    request.routed_us = request.routed_us or self.now_us
            case RequestRejected() if record.reason != "duplicate_id":
                self._open.pop(record.request_id, None)
            case RequestRepeated():
                self._open.pop(record.request_id, None)
            case RequestAborted() if (request := self._open.get(record.request_id)) is not None:
                self._charge(request)

    def _charge(self, request: _OpenRequest, finished: RequestFinished | None = None) -> None:
        """Charge a request that has ended, completely if `finished` is its end."""
        submitted = request.submitted
        del self._open[submitted.request_id]
        if not self._is_charged:
            return
        key = self.now_us // HOUR_US * HOUR_US, submitted.tenant, submitted.key_id, submitted.model
        totals = self.totals.setdefault(key, Counter())
        routed_us = request.routed_us or self.now_us
        first_us = request.first_us or self.now_us
        cached_tokens, output_tokens = request.cached_tokens, request.passed_tokens
        if finished is not None:
            cached_tokens, output_tokens = finished.cached_tokens, finished.output_tokens
        elif output_tokens is None:
            # Without a stream, a client gets nothing of a response that is not complete.
            output_tokens = request.shown_tokens if submitted.rendering is None or submitted.rendering.stream else 0
        is_charged = finished is not None or output_tokens > 0
        prompt_tokens = submitted.prompt_tokens if is_charged and not submitted.shares_prompt else 0
        totals.update(
            requests=1,
            incomplete=int(finished is None and not request.is_complete),
            prompt_tokens=prompt_tokens,
            cached_tokens=min(cached_tokens, prompt_tokens),
            output_tokens=output_tokens,
            queue_us=routed_us - request.submitted_us,
            prefill_us=max(0, first_us - routed_us),
            decode_us=self.now_us - first_us,
        )


async def derive(log: Log, partition: int) -> tuple[UsageEntry, ...]:
    """Return the usage of all requests whose end the log has. Raises LogError."""
    begin = await begin_of(log, partition)
    reader = UsageReader(log, partition, begin, begin.journal_offset)
    await reader.read(await log.end(DECISIONS.name, partition))
    return reader.take()
