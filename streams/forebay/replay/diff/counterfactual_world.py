"""A world that lives through history's events under another configuration: the open loop of a comparison.

Theory of operation. It gets every input event that history's world got, in the same order at the same clock readings.
KV events, load reports and facts of the fleet are history's own. What workers said of a request is taken as said by
whoever has the request here; where it was sent later than in history, it is said as much later. What history ignored
is ignored here. Until the first decision that differs this is what would have happened; from there on the workers
would have cached other things, and that is not known here.
"""

from array import array
from collections import Counter, deque
from collections.abc import Callable, Set
from heapq import heappop, heappush

import msgspec

from forebay.core.dispatch import drain_queues, reroute
from forebay.core.phases import Phase
from forebay.core.routing.counterfactual import Alternative, merge_runtime_settings
from forebay.core.routing.router import Selection
from forebay.core.state.active_request import ActiveRequest
from forebay.core.state.prefix_index import NO_OVERLAP
from forebay.core.step import CLOCK, AnyDecision, InputEvent, claim, open_run, step
from forebay.core.world import World, restore
from forebay.events.control import BusyThresholds, BusyThresholdsSet, DisaggConfig, DisaggregationSet, PoolConfigured
from forebay.events.decisions import RequestAborted, RequestRejected, RequestRouted, Stage
from forebay.events.progress import (
    FirstTokenEmitted,
    PrefillFailed,
    PrefillFinished,
    ProgressEvent,
    RequestFailed,
    RequestFinished,
    RequestProgress,
    TransferFailed,
)
from forebay.events.transfer import LEASE_US_MAX, Prefilled

Named = Callable[[PoolConfigured], Set[str]]  # what an alternative names of a pool, as `router.disagg.policy`
DISAGG = "router.disagg."
LATE = "late-progress"  # no topic: what comes late took its place in one when history's world got it


def names_nothing(_: PoolConfigured) -> Set[str]:
    """An alternative that names no field."""
    return frozenset()


class OtherWorld:
    """The world of an alternative, beside history's.

    Attributes:
        world: its state.
        choices: what it chose at the last event, by request.
        counts: what became of progress that history took, as `diff_report.Progress` names it.
        landed: where its requests' prompts were when they ended.
        said: what an operator says here, where the last event was such.
        undone: what is named though it was configured so, and an operator had set it otherwise.
    """

    def __init__(self, start: World, alter: Alternative, named: Named = names_nothing) -> None:
        """Begin as a copy of `start`, which stands between two journal records.

        What is `named` of how prompts are computed wins over an operator, also where the alternative leaves it.
        """
        self.world = restore(start.snapshot())
        self.choices: dict[str, tuple[ActiveRequest, Selection]] = {}
        self.counts: Counter[str] = Counter()
        self.landed = Landed()
        self.said: PoolConfigured | BusyThresholdsSet | DisaggregationSet | None = None
        self.undone: set[str] = set()
        self._alter = alter
        self._named = named
        self._recorded = dict(self.world.pools)
        self._sent_us: dict[str, int] = {}
        self._sent_in_history_us: dict[str, int] = {}
        self._unsent: dict[str, deque[tuple[int, RequestProgress]]] = {}  # said of requests that wait here
        self._late: list[tuple[int, int, RequestProgress]] = []
        self._numbered = 0
        self.world.on_selection = self._on_selection

    def configure(self) -> list[AnyDecision]:
        """Change the configuration at the start; what that leads to. Call it once, before anything is applied."""
        world = self.world
        others = {name: self._alter(pool) for name, pool in sorted(world.pools.items())}
        changed = False
        for name, other in others.items():
            by_hand, disagg = world.busy.get(name), world.disagg.get(name)
            kept = disagg is None or self._disagg(self._recorded[name], disagg) == disagg
            if other == self._recorded[name] and kept:
                continue
            changed = True
            world.configure(other)
            if by_hand is not None:
                world.busy[name] = self._thresholds(self._recorded[name], by_hand)
            if disagg is not None:
                world.disagg[name] = self._disagg(self._recorded[name], disagg)
        return (
            self._after(reroute(world, world.requests.waiting()) + drain_queues(world), world.now_us) if changed else []
        )

    def claim(self, offset: int) -> None:
        """As in history, another owner goes on."""
        claim(self.world, offset)

    def apply(self, topic: str, event: InputEvent | None, now_us: int, *, heard: bool) -> list[AnyDecision]:
        """Apply what history's world has just applied; what is decided here.

        `heard` says whether history took a progress event, or ignored it as outdated.
        """
        self.choices.clear()
        if topic == CLOCK:
            return self._after(open_run(self.world, now_us), now_us) + self._say_late(now_us)
        match event:
            case PoolConfigured():
                self._recorded[event.pool] = event
                self.said = event = self._alter(event)
            case BusyThresholdsSet():
                self.said = event = self._set_busy(event)
            case DisaggregationSet():
                self.said = event = self._set_disagg(event)
            case ProgressEvent():
                return self._progress(topic, event if heard else None, now_us)
            case _:
                pass
        return self._after(step(self.world, topic, event, now_us), now_us)

    def sent_in_history(self, request_id: str, now_us: int) -> None:
        """History sent a request to a worker; call it after `apply` of what led to that."""
        if self.world.requests.get(request_id) is not None:
            self._sent_in_history_us[request_id] = now_us

    def to_come(self) -> int:
        """Progress events that are late and have not come."""
        return len(self._late) + sum(map(len, self._unsent.values()))

    def _on_selection(self, _: PoolConfigured, request: ActiveRequest, choice: Selection) -> None:
        self.choices[request.request_id] = (request, choice)

    def _progress(self, topic: str, event: RequestProgress | None, now_us: int) -> list[AnyDecision]:
        """What a worker said, None if nobody listened: now, later, or never. It takes its place in the topic."""
        request = None if event is None else self.world.requests.get(event.request_id)
        if event is not None and request is None:
            self.counts["gone"] += 1
        elif event is not None and request is not None:
            later_us = self._later_us(request.request_id)
            here = (request.worker_id, request.worker_epoch) == (event.worker_id, event.worker_epoch)
            if not request.on_worker and not here:  # a worker that was lost may have finished all the same
                self._unsent.setdefault(request.request_id, deque()).append((now_us, event))
            elif later_us:
                self._delay(now_us + later_us, event)
            else:
                return self._say(topic, request, event, now_us, "in_place" if here else "moved")
        return self._after(step(self.world, topic, None, now_us), now_us)

    def _say_late(self, now_us: int) -> list[AnyDecision]:
        decided: list[AnyDecision] = []
        while self._late and self._late[0][0] <= now_us:
            event = heappop(self._late)[2]
            request = self.world.requests.get(event.request_id)
            if request is None:
                self.counts["gone"] += 1
            elif not request.on_worker:
                self._unsent.setdefault(request.request_id, deque()).append((now_us, event))
            else:
                decided += self._say(LATE, request, event, now_us, "late")
        return decided

    def _say(
        self, topic: str, request: ActiveRequest, event: RequestProgress, now_us: int, how: str
    ) -> list[AnyDecision]:
        """Let whoever has the request say it."""
        world = self.world
        decided: list[AnyDecision] = []
        if request.phase is Phase.REMOTE_PREFILL and isinstance(event, FirstTokenEmitted | RequestFinished):
            # History computed this prompt where it was answered: here it is computed by then, and fetched at once.
            sent_us = self._sent_us.get(request.request_id, now_us)
            decided = self._after(step(world, LATE, _prefilled(world, request), now_us), now_us)
            self._sent_us[request.request_id] = sent_us
        if isinstance(event, RequestFinished):
            self.landed.look(world, request.blocks, request.worker_id, request.rank)
        if isinstance(event, RequestFinished | RequestFailed):
            self._forget(request.request_id)
        said = msgspec.structs.replace(
            event, attempt=request.stage_attempt, worker_id=request.worker_id, worker_epoch=request.worker_epoch
        )
        outdated, stage = world.counts["outdated_progress"], request.stage
        then = step(world, topic, said, now_us)
        if world.counts["outdated_progress"] > outdated:
            how = "other_stage" if _stage_of(event) not in (None, stage) else "void"
        self.counts[how] += 1
        return decided + self._after(then, now_us)

    def _later_us(self, request_id: str) -> int:
        """How much later than in history a request was sent; never earlier, as nobody knows what is still to come."""
        here_us, there_us = self._sent_us.get(request_id), self._sent_in_history_us.get(request_id)
        return 0 if here_us is None or there_us is None else max(0, here_us - there_us)

    def _delay(self, due_us: int, event: RequestProgress) -> None:
        self._numbered += 1
        heappush(self._late, (due_us, self._numbered, event))

    def _after(self, decided: list[AnyDecision], now_us: int) -> list[AnyDecision]:
        """Note who was sent and who is gone."""
        self.world.take_consumed()  # nobody journals here
        for decision in decided:
            match decision:
                case RequestRouted(request_id=request_id):
                    self._sent_us[request_id] = now_us
                    later_us = self._later_us(request_id)
                    for said_us, event in self._unsent.pop(request_id, ()):
                        self._delay(max(said_us + later_us, now_us), event)
                case RequestAborted() | RequestRejected():
                    if self.world.requests.get(decision.request_id) is None:
                        self._forget(decision.request_id)
                case _:
                    pass
        return decided

    def _forget(self, request_id: str) -> None:
        self._sent_us.pop(request_id, None)
        self._sent_in_history_us.pop(request_id, None)
        self.counts["gone"] += len(self._unsent.pop(request_id, ()))

    def _set_busy(self, event: BusyThresholdsSet) -> BusyThresholdsSet:
        pools = [pool for name, pool in sorted(self._recorded.items()) if pool.model == event.model]
        if not pools:
            return event
        return msgspec.structs.replace(event, thresholds=self._thresholds(pools[0], event.thresholds))

    def _set_disagg(self, event: DisaggregationSet) -> DisaggregationSet:
        named = (pool for _, pool in sorted(self._recorded.items()) if pool.model == event.model)
        pool = next((pool for pool in named if pool.role == "decode"), None)
        return event if pool is None else msgspec.structs.replace(event, disagg=self._disagg(pool, event.disagg))

    def _disagg(self, recorded: PoolConfigured, by_hand: DisaggConfig) -> DisaggConfig:
        """What an operator set by hand is here: what the alternative changes or names is not undone by it."""
        before, after, named = recorded.router.disagg, self._alter(recorded).router.disagg, self._named(recorded)
        here = merge_runtime_settings(after, before, by_hand)
        wins = {name: getattr(after, name) for name in after.__struct_fields__ if DISAGG + name in named}
        self.undone |= {DISAGG + name for name, value in wins.items() if value != getattr(here, name)}
        return msgspec.structs.replace(here, **wins)

    def _thresholds(self, recorded: PoolConfigured, by_hand: BusyThresholds) -> BusyThresholds:
        """What an operator's thresholds are here."""
        return merge_runtime_settings(self._alter(recorded).router.busy, recorded.router.busy, by_hand)


def _stage_of(event: RequestProgress) -> Stage | None:
    """The stage that only such a word is of; None where it may be of several."""
    match event:
        case PrefillFinished() | PrefillFailed():
            return "prefill"
        case TransferFailed():
            return "decode"
        case _:
            return None


def _prefilled(world: World, request: ActiveRequest) -> PrefillFinished:
    """What the prefill worker of a request says when it has computed its prompt."""
    kept = Prefilled(
        worker_id=request.worker_id,
        worker_epoch=request.worker_epoch,
        model=world.pools[request.pool].model,
        connector="none",
        descriptor=b"",
        tokens=request.prompt_tokens,
        lease_us=LEASE_US_MAX,
    )
    return PrefillFinished(
        request_id=request.request_id,
        attempt=request.stage_attempt,
        worker_id=request.worker_id,
        worker_epoch=request.worker_epoch,
        owner_epoch=max(0, world.owner_epoch),
        prefilled=kept,
    )


class Landed:
    """How much of the prompts the index held where they had been sent, when their requests ended."""

    def __init__(self) -> None:
        self.blocks = 0
        self.found = 0

    def look(self, world: World, blocks: "array[int]", worker_id: str, rank: int) -> None:
        """A request ends well on this rank, if that is still there and says what it caches."""
        worker = world.fleet.get(worker_id)
        if worker is not None and worker.spec.kv_events:
            self.blocks += len(blocks)
            self.found += sum(world.index.overlaps(blocks).get((worker_id, rank), NO_OVERLAP))

    @property
    def share(self) -> float | None:
        """Between 0 and 1; None when no full block was sent anywhere."""
        return self.found / self.blocks if self.blocks else None
