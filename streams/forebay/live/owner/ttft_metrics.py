"""Measure the time to first token of requests with remote prefill or encode, split into parts, as histograms.

All times are readings of the owner's clock when it applied the events. No two clocks are compared, so the parts add up
to the total. All events of a run share one reading. A part may therefore be a few milliseconds too long, and the next
part too short by as much.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import get_args

from forebay.core.phases import Phase
from forebay.core.step import AnyDecision, InputEvent
from forebay.core.ttft_parts import Part, TimeByPart
from forebay.core.world import World
from forebay.events.decisions import RequestAborted, RequestRouted
from forebay.events.fleet import WorkerFact
from forebay.events.progress import FirstTokenEmitted, ProgressEvent

BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
ELSEWHERE = ("encode", "prefill")
BOUNDS_US = [round(bound * 1e6) for bound in BUCKETS_S]


@dataclass(slots=True)
class DurationHistogram:
    """Durations by bucket: above the previous bound of `BUCKETS_S` and up to its own bound, which the last lacks."""

    buckets: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))
    sum_us: int = 0

    def add(self, us: int) -> None:
        self.buckets[bisect_left(BOUNDS_US, us)] += 1
        self.sum_us += us


@dataclass(slots=True)
class _Pending:
    times: TimeByPart
    kept_bytes: int = 0


class TtftRecorder:
    """Measures the time from the owner's first decision to the first token, for remote prefill or encode only.

    A part that a request skipped counts as 0. The bytes of KV, which prefill workers kept and decode workers fetched,
    are counted for requests whose decode worker reports what it fetched.
    """

    def __init__(self) -> None:
        self.since_prefill = DurationHistogram()
        self.parts: dict[Part, DurationHistogram] = {part: DurationHistogram() for part in get_args(Part)}
        self.kept_bytes = 0
        self.fetched_bytes = 0
        self._pending: dict[str, _Pending] = {}

    def __len__(self) -> int:
        """Return the number of measured requests that have no first token yet."""
        return len(self._pending)

    def observe(self, world: World, event: InputEvent | None, decided: Sequence[AnyDecision], now_us: int) -> None:
        for decision in decided:
            if isinstance(decision, RequestRouted):
                self._apply_routed(world, decision, now_us)
            elif isinstance(decision, RequestAborted):
                self._pending.pop(decision.request_id, None)
        if not self._pending:
            return
        if isinstance(event, ProgressEvent):
            if event.request_id in self._pending:
                self._apply_progress(world, event, now_us)
        elif isinstance(event, WorkerFact):
            # If no other worker is ready, the requests of a lost worker become pending without a decision.
            for name in self._pending:
                self._enter_phase(world, name, now_us)

    def _apply_routed(self, world: World, decided: RequestRouted, now_us: int) -> None:
        name = decided.request_id
        # A request with earlier attempts is not measured, because the time of the earlier attempts is unknown.
        is_first = decided.attempt == 1 and not decided.earlier_attempts
        if name not in self._pending and is_first and decided.stage in ELSEWHERE:
            self._pending[name] = _Pending(TimeByPart(now_us - decided.waited_us))
        if name in self._pending:
            self._enter_phase(world, name, now_us)

    def _enter_phase(self, world: World, name: str, now_us: int) -> None:
        request = world.requests.get(name)
        if request is not None:
            pending = self._pending[name]
            pending.times.enter(request.phase, now_us)
            if request.prefilled is not None:
                pending.kept_bytes = request.prefilled.bytes

    def _apply_progress(self, world: World, event: ProgressEvent, now_us: int) -> None:
        request = world.requests.get(event.request_id)
        if request is not None and request.phase is not Phase.DECODE:
            self._enter_phase(world, event.request_id, now_us)
            return
        pending = self._pending.pop(event.request_id)
        if isinstance(event, FirstTokenEmitted) and pending.times.phase is Phase.TRANSFER:
            self._record(pending, event, now_us)

    def _record(self, pending: _Pending, event: FirstTokenEmitted, now_us: int) -> None:
        durations = pending.times.until(now_us, event.transfer_us)
        for part, times in self.parts.items():
            times.add(durations.get(part, 0))
        assert pending.times.prefilled_us is not None, "the transfer follows the prefill"
        self.since_prefill.add(now_us - pending.times.prefilled_us)
        if event.transfer_us or event.transferred_bytes:  # otherwise the engine does not report transfers
            self.kept_bytes += pending.kept_bytes
            self.fetched_bytes += event.transferred_bytes
