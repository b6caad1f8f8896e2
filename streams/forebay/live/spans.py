"""Export spans: follow the journal of every control partition, and pass the traces of its requests to a receiver.

An exporter has no state of its own. The topic `spans` has the position up to which each receiver has accepted the
traces. After a restart, later traces are exported again, with the same ids and content.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import ClassVar

import msgspec

from forebay import runtime
from forebay.core.state.requests import ACTIVE_REQUESTS_MAX
from forebay.events.codec import DecodeError, encode
from forebay.events.spans import SpansExported
from forebay.events.topics import DECISIONS, SPANS
from forebay.journal.folds import begin_after
from forebay.journal.traces import Trace, TraceReader
from forebay.live.partitions import PartitionFollower
from forebay.transport.base import Draft, Log, event_of, reversed_records

logger = logging.getLogger(__name__)

COMMIT_S = 5.0  # traces of this time are exported again after a crash
IDLE_COMMIT_S = 60.0  # without traces, the position only has to stay within the retention of the journal
RANDOM_BITS = 56  # at the end of a trace id, by which samplers of OpenTelemetry decide, too

Export = Callable[[Sequence[Trace]], Awaitable[None]]


class SpanSettings(msgspec.Struct, frozen=True):
    """Receiver, and which complete traces it gets: a share of all, and all that failed, were slow, or of some tenants.

    Attributes:
        url: address of the receiver, for traces.
        rate: share from 0 to 1. All exporters take the same traces, because the hash of a trace decides.
        console_url: address of the console, to which the spans of requests link; empty for none.
        slow_s: duration in seconds from which all traces are exported; None for no such duration.
    """

    url: str
    rate: float = 1.0
    slow_s: float | None = None
    tenants: frozenset[str] = frozenset()
    console_url: str = ""

    def takes(self, trace: Trace) -> bool:
        root = trace.spans[0]
        if root.error or trace.tenant in self.tenants:
            return True
        if self.slow_s is not None and root.end_us - root.begin_us >= self.slow_s * 1e6:
            return True
        return int(trace.trace_id, 16) % (1 << RANDOM_BITS) >= (1 - self.rate) * (1 << RANDOM_BITS)


class SpanExporter(PartitionFollower):
    """Exports the traces of one control partition. Call `advance` again and again.

    Attributes:
        unknown: as in `TraceReader`, of the current reader, like `overflowed`.
    """

    GAUGES: ClassVar = {
        "unknown": "routings of requests without a trace: the log lacks their beginning",
        "overflowed": "requests without a trace: too many others were in flight",
    }

    def __init__(self, log: Log, partition: int, settings: SpanSettings, export: Export) -> None:
        self.unknown = self.overflowed = 0
        self._log = log
        self._partition = partition
        self._settings = settings
        self._export = export
        self._reader: TraceReader | None = None
        self._committed = 0
        self._committed_s = runtime.monotonic_s()
        self._is_due = False  # whether traces were exported since the last commit

    async def advance(self, *, is_last: bool) -> bool:
        """Read what is new, and return whether there is more after the receiver has accepted it. Raises LogError."""
        reader, self._reader = self._reader or await self._begin(), None  # after an error, a new reader begins
        end = await self._log.end(DECISIONS.name, self._partition)
        self.behind = end - reader.position
        await reader.read(end)
        if traces := [trace for trace in reader.take() if self._settings.takes(trace)]:
            await self._export(traces)
            self._is_due = True
        waited_s = runtime.monotonic_s() - self._committed_s
        if reader.position > self._committed and (is_last or waited_s >= (COMMIT_S if self._is_due else IDLE_COMMIT_S)):
            await self._commit(reader)
        self.behind, self._reader = end - reader.position, reader
        if reader.overflowed and not self.overflowed:
            text = "requests of control partition %d get no trace, because %d others are in flight"
            logger.error(text, self._partition, ACTIVE_REQUESTS_MAX)
        self.unknown, self.overflowed = reader.unknown, reader.overflowed
        return reader.position < end

    async def _begin(self) -> TraceReader:
        committed = await self._newest()
        begin, self._committed = (None, 0) if committed is None else (committed.begin, committed.until_offset)
        begin = await begin_after(self._log, self._partition, begin, self._committed, "the exported spans")
        return TraceReader(self._log, self._partition, begin, self._committed)

    async def _newest(self) -> SpansExported | None:
        end = await self._log.end(SPANS.name, self._partition)
        async for record in reversed_records(self._log, SPANS, self._partition, end):
            try:
                exported: SpansExported = event_of(SPANS, record)
            except DecodeError:
                continue
            if exported.receiver == self._settings.url:
                return exported
        return None

    async def _commit(self, reader: TraceReader) -> None:
        exported = SpansExported(receiver=self._settings.url, begin=reader.next_begin(), until_offset=reader.position)
        value = encode(SPANS, exported)
        await self._log.append([Draft(SPANS.name, self._partition, value, self._settings.url.encode())])
        self._committed, self._committed_s, self._is_due = reader.position, runtime.monotonic_s(), False
