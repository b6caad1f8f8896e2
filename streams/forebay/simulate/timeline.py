"""Recorder of a run's load and throughput over time, in bins. If there are too many bins, their width doubles."""

from collections.abc import Iterable, Mapping

from forebay.engine_model.model import EngineLoad
from forebay.simulate.outcome import UtilizationTimeline
from forebay.simulate.rank import EngineRank

BINS_MAX = 400  # the maximum width of a chart; even, so that bins can be merged in pairs
FIRST_BIN_US = 10_000

OF_WORKERS = ("computed", "running", "waiting")
NO_LOAD = EngineLoad(0, 0, 0, 0)  # load of a worker that has not joined yet


class Recorder:
    """Records a `UtilizationTimeline`: counts the events of each bin, and samples the state at the end of each bin.

    The current bin ends at `end_us`. Call `advance` before any event at or after this time.
    """

    def __init__(self) -> None:
        self.end_us = FIRST_BIN_US
        self.arrived = 0
        self._timeline = UtilizationTimeline(bin_us=FIRST_BIN_US)
        self._prompt_tokens = self._cached_tokens = 0
        self._computed: dict[int, int] = {}

    def count_prompt(self, worker: int, prompt_tokens: int, cached_tokens: int) -> None:
        """Count a computed prompt of `prompt_tokens`, of which `cached_tokens` were found in the cache."""
        self._prompt_tokens += prompt_tokens
        self._cached_tokens += cached_tokens
        self._computed[worker] = self._computed.get(worker, 0) + prompt_tokens - cached_tokens

    def advance(self, now_us: int, queued: int, members: int, ranks: Mapping[int, EngineRank]) -> None:
        """Complete all bins that end at `now_us` or earlier, the time of the next event.

        `queued` requests and `members` of the fleet are those since the previous event.
        """
        while now_us >= BINS_MAX * self._timeline.bin_us:
            self._double()
        while self.end_us <= now_us:
            self._close(queued, members, ranks)

    def end(self, queued: int, members: int, ranks: Mapping[int, EngineRank]) -> UtilizationTimeline:
        """Complete the last bin and return the timeline of the whole run."""
        self._close(queued, members, ranks)
        return self._timeline

    def _close(self, queued: int, members: int, ranks: Mapping[int, EngineRank]) -> None:
        timeline = self._timeline
        before = len(timeline.arrived)
        timeline.arrived.append(self.arrived)
        timeline.prompt_tokens.append(self._prompt_tokens)
        timeline.cached_tokens.append(self._cached_tokens)
        timeline.queued.append(queued)
        timeline.workers.append(members)
        for _ in range(len(timeline.computed), max(ranks, default=-1) + 1):
            for name in OF_WORKERS:
                getattr(timeline, name).append([0] * before)
        for number, computed in enumerate(timeline.computed):
            computed.append(self._computed.get(number, 0))
            load = ranks[number].load if number in ranks else NO_LOAD
            timeline.running[number].append(load.running)
            timeline.waiting[number].append(load.waiting)
        self.arrived = self._prompt_tokens = self._cached_tokens = 0
        self._computed.clear()
        self.end_us += timeline.bin_us

    def _double(self) -> None:
        """Merge bins in pairs. An unpaired last bin becomes part of the current bin."""
        timeline = self._timeline
        if len(timeline.arrived) % 2:
            self.arrived += timeline.arrived.pop()
            self._prompt_tokens += timeline.prompt_tokens.pop()
            self._cached_tokens += timeline.cached_tokens.pop()
            for number, computed in enumerate(timeline.computed):
                self._computed[number] = self._computed.get(number, 0) + computed.pop()
            for states in self._states():
                states.pop()
        for counts in (timeline.arrived, timeline.prompt_tokens, timeline.cached_tokens, *timeline.computed):
            counts[:] = map(int.__add__, counts[::2], counts[1::2])
        for states in self._states():
            states[:] = states[1::2]
        timeline.bin_us *= 2
        self.end_us = (len(timeline.arrived) + 1) * timeline.bin_us

    def _states(self) -> Iterable[list[int]]:
        """Return the lists with states at the ends of bins."""
        timeline = self._timeline
        return (timeline.queued, timeline.workers, *timeline.running, *timeline.waiting)
