"""Achieved against requested pace of a trace, and whether its client or the server was saturated."""

import asyncio
import statistics
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from forebay.simulate.outcome import percentiles

SAMPLE_S = 0.25
BUSY_CPU = 0.9  # share of one CPU; the client has one thread
BUSY_LAG_S = 0.1  # delay of the event loop
BUSY_S_MIN = 0.5  # shorter stalls are not worth a warning
SATURATED_SHARE = 0.1  # of the duration
QUARTER = 4
QUEUE_REQUESTS_MIN = 20  # fewer requests have no reliable trend
QUEUE_GROWTH_MS = 500.0
LATE_MS = 100.0


@dataclass(slots=True)
class Pace:
    """When the requests of a trace were due and sent, and how busy the client was."""

    # Due time of each sent request with a fixed time, in seconds from the start.
    due_s: "array[float]" = field(default_factory=lambda: array("d"))
    # Time at which each of these requests was sent, in seconds from the start.
    sent_s: "array[float]" = field(default_factory=lambda: array("d"))
    # Delay of each sent request after its due time, dependent requests included.
    late_ms: "array[float]" = field(default_factory=lambda: array("d"))
    # Time to first token of each completed request, by the order of sending; None if it failed.
    first_token_ms: list[float | None] = field(default_factory=list)
    delayed: int = 0  # number of requests that waited because too many requests were in flight
    lasted_s: float = 0.0  # seconds until the last response, or until the trace was interrupted
    busy_s: float = 0.0  # seconds in which the client was saturated
    lag_max_s: float = 0.0  # longest delay of the client's event loop
    # CPUs used by each server process on average, by URL; only of servers that export it.
    server_cpus: dict[str, float] = field(default_factory=dict)

    async def watch_client(self) -> None:
        """Sample CPU time and event loop delay of this process until cancelled."""
        began_s, cpu_s = time.monotonic(), time.process_time()
        while True:
            await asyncio.sleep(SAMPLE_S)
            now_s, now_cpu_s = time.monotonic(), time.process_time()
            self.add_sample(now_s - began_s, now_cpu_s - cpu_s)
            began_s, cpu_s = now_s, now_cpu_s

    def add_sample(self, elapsed_s: float, cpu_s: float) -> None:
        """Add a sample of the client that should have taken `SAMPLE_S`, and took `elapsed_s` and `cpu_s` of CPU."""
        lag_s = elapsed_s - SAMPLE_S
        self.lag_max_s = max(self.lag_max_s, lag_s)
        if lag_s >= BUSY_LAG_S or cpu_s >= BUSY_CPU * elapsed_s:
            self.busy_s += elapsed_s

    def summary(self) -> dict[str, Any]:
        """Return the pace as `--json` prints it. The rates are those of the requests with a fixed time."""
        late = {**percentiles(self.late_ms), "max": max(self.late_ms)} if self.late_ms else {}
        return {
            "requested_s": max(self.due_s, default=0.0),
            "achieved_s": max(self.sent_s, default=0.0),
            "requested_per_s": _rate(self.due_s),
            "achieved_per_s": _rate(self.sent_s),
            "lasted_s": self.lasted_s,
            "late_ms": late,
            "client_busy_s": self.busy_s,
            "client_lag_max_s": self.lag_max_s,
            "server_cpus": self.server_cpus,
        }

    def warnings(self, concurrency_max: int) -> Iterator[str]:
        """Yield a text for each sign that the client or the server was saturated."""
        late_ms = max(self.late_ms, default=0.0)
        sent_late = f"; requests were sent up to {late_ms:.0f} ms late" if late_ms >= LATE_MS else ""
        if self.busy_s >= max(BUSY_S_MIN, SATURATED_SHARE * self.lasted_s):
            yield (
                f"the client was saturated for {self.busy_s:.1f} of {self.lasted_s:.1f} s (event loop delayed by up to "
                f"{self.lag_max_s * 1e3:.0f} ms), so latencies include delays of the client{sent_late}; lower --speed, "
                "or split the workload over several machines"
            )
        elif sent_late and not self.delayed:
            yield f"the client fell behind the workload{sent_late}"
        if self.delayed:
            yield (
                f"the server was saturated: {self.delayed} requests were sent late because {concurrency_max} requests "
                f"were in flight (--max-concurrency){sent_late}"
            )
        if growth := self._queue_growth_ms():
            yield (
                f"the server was saturated: the median time to first token rose from {growth[0]:.0f} ms in the first "
                f"quarter of the requests to {growth[1]:.0f} ms in the last quarter, so requests waited in its queue"
            )
        for url, cpus in self.server_cpus.items():
            if cpus >= BUSY_CPU:
                yield f"the server was saturated: the process at {url} used {cpus:.2f} CPUs on average"

    def _queue_growth_ms(self) -> tuple[float, float] | None:
        """Return the median time to first token of the first and of the last quarter; None if it hardly grew."""
        quarter = len(self.first_token_ms) // QUARTER
        if len(self.first_token_ms) < QUEUE_REQUESTS_MIN:
            return None
        first = [one for one in self.first_token_ms[:quarter] if one is not None]
        last = [one for one in self.first_token_ms[-quarter:] if one is not None]
        if not first or not last:
            return None
        before, after = statistics.median(first), statistics.median(last)
        return (before, after) if after - before >= max(QUEUE_GROWTH_MS, before) else None


def _rate(times_s: Sequence[float]) -> float | None:
    """Return the mean rate from the first to the last of these times; None if all are equal."""
    lasted_s = max(times_s, default=0.0) - min(times_s, default=0.0)
    return (len(times_s) - 1) / lasted_s if lasted_s else None
