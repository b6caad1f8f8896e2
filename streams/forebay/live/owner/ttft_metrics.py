"""How long first tokens took of prompts that were computed elsewhere, as an owner counts it: by parts, in buckets.

All times are the owner's clock when it applied what was said, so no two clocks are compared and the parts add up. A
run has one reading: a part may be a few milliseconds too long, and its neighbour so much too short.
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
class Times:
    """Lengths of time: how many up to each of `BUCKETS_S` and above, and their sum in microseconds."""

    buckets: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))
    sum_us: int = 0

    def add(self, us: int) -> None:
        """Count one."""
        self.buckets[bisect_left(BOUNDS_US, us)] += 1
        self.sum_us += us


@dataclass(slots=True)
class _UnderWay:
    times: TimeByPart
    kept_bytes: int = 0


class FirstTokens:
    """Follows requests from their first decision by this owner to their first token; at most those under way.

    Attributes:
        since_prefill: from the end of prefill to the first token.
        parts: of the whole time to it, by part; every part of every request, none taken is 0.
        kept_bytes: of KV, that prefill workers kept for those of which decode workers say what they fetched.
        fetched_bytes: of these, that they fetched: the rest they had in their caches.
    """

    def __init__(self) -> None:
        self.since_prefill = Times()
        self.parts: dict[Part, Times] = {part: Times() for part in get_args(Part)}
        self.kept_bytes = 0
        self.fetched_bytes = 0
        self._under_way: dict[str, _UnderWay] = {}

    def __len__(self) -> int:
        """Requests that are followed now."""
        return len(self._under_way)

    def take(self, world: World, event: InputEvent | None, decided: Sequence[AnyDecision], now_us: int) -> None:
        """The world has just applied `event`, or the time, and decided this."""
        for one in decided:
            if isinstance(one, RequestRouted):
                self._routed(world, one, now_us)
            elif isinstance(one, RequestAborted):
                self._under_way.pop(one.request_id, None)
        if not self._under_way:
            return
        if isinstance(event, ProgressEvent):
            if event.request_id in self._under_way:
                self._heard(world, event, now_us)
        elif isinstance(event, WorkerFact):
            # Requests whose worker is lost wait, without a decision, while there is no other.
            for name in self._under_way:
                self._look(world, name, now_us)

    def _routed(self, world: World, decided: RequestRouted, now_us: int) -> None:
        name = decided.request_id
        # Another worker may have had it before its prompt went elsewhere: how long is not known any more.
        is_first = decided.attempt == 1 and not decided.earlier_attempts
        if name not in self._under_way and is_first and decided.stage in ELSEWHERE:
            self._under_way[name] = _UnderWay(TimeByPart(now_us - decided.waited_us))
        if name in self._under_way:
            self._look(world, name, now_us)

    def _look(self, world: World, name: str, now_us: int) -> None:
        request = world.requests.get(name)
        if request is not None:
            one = self._under_way[name]
            one.times.enter(request.phase, now_us)
            if request.prefilled is not None:
                one.kept_bytes = request.prefilled.bytes

    def _heard(self, world: World, event: ProgressEvent, now_us: int) -> None:
        request = world.requests.get(event.request_id)
        if request is not None and request.phase is not Phase.DECODE:
            self._look(world, event.request_id, now_us)
            return
        one = self._under_way.pop(event.request_id)
        if isinstance(event, FirstTokenEmitted) and one.times.phase is Phase.TRANSFER:
            self._count(one, event, now_us)

    def _count(self, one: _UnderWay, event: FirstTokenEmitted, now_us: int) -> None:
        spent = one.times.until(now_us, event.transfer_us)
        for part, times in self.parts.items():
            times.add(spent.get(part, 0))
        assert one.times.prefilled_us is not None, "what is fetched was computed"
        self.since_prefill.add(now_us - one.times.prefilled_us)
        if event.transfer_us or event.transferred_bytes:  # else its engine does not say what it fetches
            self.kept_bytes += one.kept_bytes
            self.fetched_bytes += event.transferred_bytes
