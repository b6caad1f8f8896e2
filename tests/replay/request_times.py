"""Times of requests as they follow from the states of the owner, in the form of spans."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from forebay.core.phases import ON_WORKER, Phase
from forebay.core.routing.policies import ONLY_BUILT_IN, CustomPolicies
from forebay.core.step import AnyDecision, InputEvent
from forebay.events.decisions import RequestRejected, RequestRepeated, RequestRouted
from forebay.events.topics import DECISIONS
from forebay.journal.reader import JournalReader, Past
from forebay.journal.start import oldest
from forebay.transport.base import Log

SHOWN = ("queue", "decision", "attempt")  # spans that show the phases of a request
Times = list[tuple[str, int, int]]


class Observed:
    """Times of requests as they follow from the states of the owner, by request id."""

    def __init__(self, reader: JournalReader) -> None:
        self.found: dict[str, list[Times]] = defaultdict(list)
        self._world = reader.world
        self._taken_up = {one.submitted.request_id for one in self._world.requests.active()}
        self._times: dict[str, Times] = {}
        self._since: dict[str, tuple[tuple[str, int], int]] = {}
        reader.followed.on_applied = self.observe

    def observe(self, _: str, __: InputEvent | None, now_us: int, decided: Sequence[AnyDecision]) -> None:
        active = {one.submitted.request_id: one for one in self._world.requests.active()}
        self._taken_up &= active.keys()
        for name, (kind, begin_us) in [*self._since.items()]:
            if name not in active or kind != _kind(active[name]):
                self._times[name].append((kind[0], begin_us, now_us))
                del self._since[name]
        ended = self._times.keys() - active.keys()
        for name in ended:
            self.found[name].append(sorted([*self._times.pop(name), ("end", now_us, now_us)]))
        for name in active.keys() - self._taken_up:
            self._times.setdefault(name, [])
            if name not in self._since and (kind := _kind(active[name]))[0]:
                self._since[name] = kind, now_us
        for record in decided:
            if isinstance(record, RequestRouted) and record.request_id in self._times:
                self._times[record.request_id].append(("decision", now_us, now_us))
            elif isinstance(record, RequestRejected | RequestRepeated) and record.request_id not in ended:
                self.found[record.request_id].append([("end", now_us, now_us)])

    def times(self) -> dict[str, list[Times]]:
        return {name: sorted(several) for name, several in self.found.items() if several}


def _kind(request: Any) -> tuple[str, int]:
    kind = "attempt" if request.phase in ON_WORKER else "queue" if request.phase is Phase.QUEUED else ""
    return kind, len(request.sent)


async def derived_times(log: Log, custom: CustomPolicies = ONLY_BUILT_IN, partition: int = 0) -> dict[str, Any]:
    start, end = await oldest(log, partition, custom), await log.end(DECISIONS.name, partition)
    reader = JournalReader(log, partition, start, end, Past.OTHER_RULES)
    observed = Observed(reader)
    async for step in reader:
        assert step.divergence is None
    return observed.times()
