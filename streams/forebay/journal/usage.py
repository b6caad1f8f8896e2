"""Fold a journal into the usage of tenants: what each request that has ended is charged.

Theory of operation. A journal record names the events that the owner applied before it, so records and events have one
order, whatever program reads them. The fold derives no decision, so it reads the records of owners with any decision
rules and any policy. It keeps the requests in flight. A request is charged once, when the owner reads its end or aborts
it, to the hour of the owner's clock. A progress event counts if it is from the attempt that the owner routed last.

What is charged: see `docs/ledger.md`.
"""

from collections import Counter
from dataclasses import dataclass

import msgspec

from forebay.events.decisions import (
    JournalRecord,
    OwnerClaimed,
    RequestAborted,
    RequestHeld,
    RequestRejected,
    RequestRepeated,
    RequestRouted,
)
from forebay.events.progress import FirstTokenEmitted, OutputGrown, ProgressEvent, RequestFailed, RequestFinished
from forebay.events.requests import RequestCancelled, RequestSubmitted
from forebay.events.topics import DECISIONS, PROGRESS, REQUESTS
from forebay.events.usage import LedgerPosition, UsageEntry
from forebay.journal.claims import validity_at
from forebay.journal.reader import Step
from forebay.journal.records import JournalBroken, RecordedOrder, Validity, journal_records, unreadable
from forebay.journal.start import continued_view, oldest_state
from forebay.transport.base import Log

HOUR_US = 3_600_000_000
CHARGED = (REQUESTS.name, PROGRESS.name)  # topics from which usage follows, apart from the journal
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

    begin: LedgerPosition
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


class UsageFold:
    """Usage of the requests that ended, and the requests in flight. Performs no I/O.

    Attributes:
        totals: usage since the last `take`, from journal offset `charges_from` on.
        now_us: newest clock reading of the owner.
        submitted: offset after the newest submission. An owner that continued from a snapshot applies earlier ones
            again, which were charged if they are not in flight.
    """

    def __init__(self, charges_from: int, submitted: int = 0, now_us: int = 0) -> None:
        self.totals: dict[Key, Counter[str]] = {}
        self.now_us = now_us
        self.submitted = submitted
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

    def oldest(self) -> LedgerPosition | None:
        """Return the position before the oldest submission of a request in flight, or None if there is none."""
        return next((request.begin for request in self._open.values()), None)

    def begin_record(self, offset: int, *, has_events: bool) -> None:
        """Begin the journal record at `offset`. The caller then applies its events, and at last the record."""
        self._is_charged = offset >= self._charges_from
        if has_events:
            for request_id in self._undecided:
                if (request := self._open.get(request_id)) is not None and not request.is_accepted:
                    del self._open[request_id]  # the owner knew the id, or the submission had no effect
            self._undecided.clear()

    def apply_event(self, event: object, offset: int, begin: LedgerPosition) -> None:
        """Apply an event of `requests` or `progress` at its `offset`, after `now_us` was set."""
        match event:
            case RequestSubmitted():
                is_repeated, self.submitted = offset < self.submitted, max(self.submitted, offset + 1)
                if not is_repeated and event.request_id not in self._open:
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
        """Apply a decision, after the events before it."""
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


class UsageReader:
    """Reads a journal from a position on, and folds it into usage.

    `read` may be called again with a higher end, but not after a LogError.

    Attributes:
        fold: usage and requests in flight as of `position`.
        position: journal offset of the next record to read.
    """

    def __init__(self, log: Log, partition: int, begin: LedgerPosition, charges_from: int) -> None:
        """Begin at a position at which no request was in flight that ends at journal offset `charges_from` or later."""
        self.fold = UsageFold(charges_from, begin.submitted, begin.now_us)
        self.position = begin.journal_offset
        self._log = log
        self._partition = partition
        self._begin = begin
        view = dict(zip(CHARGED, (begin.requests_offset, begin.progress_offset), strict=True))
        self._order = RecordedOrder(log, partition, view)
        self._validity: Validity | None = None

    async def read(self, end: int, entries_max: int | None = None) -> None:
        """Read the journal up to offset `end`, or until there are `entries_max` entries. Raises LogError."""
        if self._validity is None:
            state, rules = self._begin, self._begin.core_version
            self._validity = await validity_at(self._log, self._partition, state.journal_offset, state, rules)
        validity = self._validity
        async for stored in journal_records(self._log, self._partition, self.position, end):
            begin, offset, expected = self.here(), stored.offset, validity.seq
            record = validity.read(stored)
            if validity.last == offset:
                if record is None:
                    raise unreadable(stored)
                if isinstance(record, OwnerClaimed):
                    if record.snapshot >= 0:
                        view = await continued_view(self._log, self._partition, record)
                        self._order = RecordedOrder(self._log, self._partition, view)
                elif expected is not None and record.seq > expected:
                    raise JournalBroken(f"the log lost {record.seq - expected} journal records before offset {offset}")
                await self._apply(offset, record, begin)
            self.position = offset + 1
            if entries_max is not None and len(self.fold.totals) >= entries_max:
                return

    async def _apply(self, offset: int, record: JournalRecord, begin: LedgerPosition) -> None:
        runs = tuple(run for run in record.consumed if run.topic in CHARGED)
        events = await self._order.events_of(runs)
        begins = {topic: self._order.offset(topic) - len(found) for topic, found in events.items()}
        fold = self.fold
        fold.begin_record(offset, has_events=bool(record.consumed))
        for run, found in Step(offset, record, events, None, begins).runs():
            fold.now_us = max(fold.now_us, run.now_us)
            for at, event in found:
                fold.apply_event(event, at, begin)
        fold.apply_record(record)

    def here(self) -> LedgerPosition:
        """Return the position after the records read so far."""
        validity = self._validity
        assert validity is not None, "call read first"
        return LedgerPosition(
            journal_offset=self.position,
            requests_offset=self._order.offset(REQUESTS.name),
            progress_offset=self._order.offset(PROGRESS.name),
            submitted=self.fold.submitted,
            now_us=self.fold.now_us,
            owner_epoch=validity.epoch,
            owner_nonce=validity.nonce,
            seq=validity.seq,
            core_version=validity.rules,
        )

    def next_begin(self) -> LedgerPosition:
        """Return where a reader must begin that charges the records from `position` on."""
        return self.fold.oldest() or self.here()


async def begin_of(log: Log, partition: int) -> LedgerPosition:
    """Return the oldest position from which the log can be read. Raises LogError."""
    state = await oldest_state(log, partition)
    return LedgerPosition(
        journal_offset=state.offset,
        requests_offset=state.view.get(REQUESTS.name, 0),
        progress_offset=state.view.get(PROGRESS.name, 0),
        submitted=state.view.get(REQUESTS.name, 0),
        now_us=state.now_us,
        owner_epoch=state.owner_epoch,
        owner_nonce=state.owner_nonce,
        seq=state.seq,
        core_version=state.core_version,
    )


async def is_readable(log: Log, partition: int, begin: LedgerPosition) -> bool:
    """Return whether the log still has every record after a position. Raises LogError."""
    wanted = {DECISIONS: begin.journal_offset, REQUESTS: begin.requests_offset, PROGRESS: begin.progress_offset}
    return all([await log.begin(topic.name, partition) <= offset for topic, offset in wanted.items()])


async def derive(log: Log, partition: int) -> tuple[UsageEntry, ...]:
    """Return the usage of all requests whose end the log has. Raises LogError."""
    begin = await begin_of(log, partition)
    reader = UsageReader(log, partition, begin, begin.journal_offset)
    await reader.read(await log.end(DECISIONS.name, partition))
    return reader.fold.take()
