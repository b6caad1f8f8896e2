"""A world that applies history's events under another configuration: the open loop of a comparison.

The counterfactual world gets every input event of history's world, in the same order and at the same clock readings.
KV events, load reports and fleet events are unchanged. Progress of a request is attributed to the worker that has the
request here. If the request was sent later than in history, its progress is delayed by the same time. Events that
history ignored are ignored here. Up to the first decision that differs, the result is exact. After that decision the
workers would have cached other blocks, which this model does not show.
"""

from array import array
from collections import Counter, deque
from collections.abc import Callable, Set
from heapq import heappop, heappush

import msgspec

from forebay.core.phases import Phase
from forebay.core.restore import restore
from forebay.core.routing.plan import Plan
from forebay.core.selection.counterfactual import Alternative, merge_runtime_settings
from forebay.core.state.active_request import ActiveRequest
from forebay.core.state.prefix_index import NO_OVERLAP
from forebay.core.step import CLOCK, AnyDecision, InputEvent, claim, open_run, replan, step
from forebay.core.world import World
from forebay.events.control import (
    BusyThresholds,
    BusyThresholdsSet,
    DisaggConfig,
    DisaggregationSet,
    PolicySet,
    PoolConfigured,
)
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

Named = Callable[
    [PoolConfigured], Set[str]
]  # router fields of a pool that the alternative names, such as `disagg.policy`
DISAGG = "disagg."
MODE = "mode"
LATE = "late-progress"  # not a real topic: a late event took its offset when history applied it


def names_nothing(_: PoolConfigured) -> Set[str]:
    """Let an operator's change take precedence over every unchanged field."""
    return frozenset()


class CounterfactualWorld:
    """The world of an alternative. Its owner may run every custom policy that this process may run.

    `landed` is the share of prompt blocks that were cached on the selected rank when the requests ended. `undone` has
    the fields that `named` returned and that an operator changed during the recording.
    """

    def __init__(self, start: World, alter: Alternative, named: Named = names_nothing) -> None:
        """Begin with a copy of `start`, history's world between two journal records.

        Args:
            start: its later router modes are read when `apply` and `claim` are called.
            alter: returns the changed configuration of a pool.
            named: returns the disaggregation fields that take precedence over an operator's change, even if `alter`
                leaves them unchanged.
        """
        self.world = restore(start.snapshot(), start.custom)
        self.world.owner_policies = tuple(sorted(start.custom))
        self.plans: dict[str, Plan] = {}
        self.counts: Counter[str] = Counter()
        self.landed = PlacementHits()
        self.undone: set[str] = set()
        self._alter = alter
        self._named = named
        self._history = start
        self._recorded = dict(self.world.pools)
        self._sent_us: dict[str, int] = {}
        self._sent_in_history_us: dict[str, int] = {}
        self._unsent: dict[str, deque[tuple[int, RequestProgress]]] = {}  # progress of requests that wait here
        self._late: list[tuple[int, int, RequestProgress]] = []
        self._numbered = 0
        self.world.on_plan = self._on_plan

    def configure(self) -> list[AnyDecision]:
        """Change the configuration, once before any event is applied, and return the resulting decisions."""
        world = self.world
        others = {name: self._alter(pool) for name, pool in sorted(world.pools.items())}
        changed = False
        for name, other in others.items():
            by_hand, disagg = world.settings.busy.get(name), world.settings.disagg.get(name)
            kept = disagg is None or self._disagg(self._recorded[name], disagg) == disagg
            if other == self._recorded[name] and kept:
                continue
            changed = True
            world.set_pools(other)
            if by_hand is not None:
                world.settings.busy[name] = self._thresholds(self._recorded[name], by_hand)
            if disagg is not None:
                world.settings.disagg[name] = self._disagg(self._recorded[name], disagg)
        if not changed:
            return []
        world.replan(world.requests.waiting())
        return self._after(replan(world), world.now_us)

    def claim(self, offset: int) -> None:
        """Apply the claim of a new owner at journal offset `offset`, which history's world has just applied."""
        claim(self.world, offset, self.world.owner_policies, self._history.owner_events)
        # In history the pools whose policies the new owner may not run have returned to their configured policies.
        for name, pool in sorted(self._history.pools.items()):
            if pool.router.mode != self._recorded[name].router.mode:
                self._recorded[name] = recorded = self._recorded[name].with_mode(pool.router.mode)
                mode = self._alter(recorded).router.mode
                self.world.set_pools(PolicySet(model=recorded.model, pool=name, mode=mode))

    def apply(self, topic: str, event: InputEvent | None, now_us: int, *, accepted: bool) -> list[AnyDecision]:
        """Apply an event that history's world has just applied, and return the decisions of this world.

        `accepted` is False for a progress event that history ignored as stale.
        """
        self.plans.clear()
        if topic == CLOCK:
            return self._after(open_run(self.world, now_us), now_us) + self._apply_late(now_us)
        match event:
            case PoolConfigured():
                self._recorded[event.pool] = event
                event = self._alter(event)
            case BusyThresholdsSet():
                event = self._set_busy(event)
            case DisaggregationSet():
                event = self._set_disagg(event)
            case PolicySet():
                event = self._set_policy(event)
            case ProgressEvent():
                return self._progress(topic, event if accepted else None, now_us)
            case _:
                pass
        return self._after(step(self.world, topic, event, now_us), now_us)

    def sent_in_history(self, request_id: str, now_us: int) -> None:
        """Record that history sent a request to a worker. Call this after `apply` of the event that caused it."""
        if self.world.requests.get(request_id) is not None:
            self._sent_in_history_us[request_id] = now_us

    def to_come(self) -> int:
        """Return the number of delayed progress events that are not due yet."""
        return len(self._late) + sum(map(len, self._unsent.values()))

    def _on_plan(self, plan: Plan) -> None:
        self.plans[plan.request.request_id] = plan

    def _progress(self, topic: str, event: RequestProgress | None, now_us: int) -> list[AnyDecision]:
        """Apply a progress event now, later or never; `event` is None if history ignored it.

        The event takes its offset in the topic now in any case.
        """
        request = None if event is None else self.world.requests.get(event.request_id)
        if event is not None and request is None:
            self.counts["gone"] += 1
        elif event is not None and request is not None:
            later_us = self._later_us(request.submitted.request_id)
            here = (request.worker_id, request.worker_epoch) == (event.worker_id, event.worker_epoch)
            if not request.on_worker and not here:  # a lost worker may have finished the request anyway
                self._unsent.setdefault(request.submitted.request_id, deque()).append((now_us, event))
            elif later_us:
                self._delay(now_us + later_us, event)
            else:
                return self._apply_progress(topic, request, event, now_us, "in_place" if here else "moved")
        return self._after(step(self.world, topic, None, now_us), now_us)

    def _apply_late(self, now_us: int) -> list[AnyDecision]:
        decided: list[AnyDecision] = []
        while self._late and self._late[0][0] <= now_us:
            event = heappop(self._late)[2]
            request = self.world.requests.get(event.request_id)
            if request is None:
                self.counts["gone"] += 1
            elif not request.on_worker:
                self._unsent.setdefault(request.submitted.request_id, deque()).append((now_us, event))
            else:
                decided += self._apply_progress(LATE, request, event, now_us, "late")
        return decided

    def _apply_progress(
        self, topic: str, request: ActiveRequest, event: RequestProgress, now_us: int, how: str
    ) -> list[AnyDecision]:
        world = self.world
        decided: list[AnyDecision] = []
        if request.phase is Phase.REMOTE_PREFILL and isinstance(event, FirstTokenEmitted | RequestFinished):
            # History computed this prompt on the decode worker. Here the prefill ends now; its KV is fetched at once.
            sent_us = self._sent_us.get(request.submitted.request_id, now_us)
            decided = self._after(step(world, LATE, _prefilled(world, request), now_us), now_us)
            self._sent_us[request.submitted.request_id] = sent_us
        if isinstance(event, RequestFinished):
            self.landed.observe(world, request.submitted.blocks, request.worker_id, request.rank)
        if isinstance(event, RequestFinished | RequestFailed):
            self._forget(request.submitted.request_id)
        moved_event = msgspec.structs.replace(
            event, attempt=request.stage_attempt, worker_id=request.worker_id, worker_epoch=request.worker_epoch
        )
        outdated, stage = world.counts["stale_progress"], request.stage
        then = step(world, topic, moved_event, now_us)
        if world.counts["stale_progress"] > outdated:
            how = "other_stage" if _stage_of(event) not in (None, stage) else "void"
        self.counts[how] += 1
        return decided + self._after(then, now_us)

    def _later_us(self, request_id: str) -> int:
        """Return how much later than in history a request was sent, at least 0.

        Progress cannot be moved to an earlier time, because later events are not known yet.
        """
        here_us, there_us = self._sent_us.get(request_id), self._sent_in_history_us.get(request_id)
        return 0 if here_us is None or there_us is None else max(0, here_us - there_us)

    def _delay(self, due_us: int, event: RequestProgress) -> None:
        self._numbered += 1
        heappush(self._late, (due_us, self._numbered, event))

    def _after(self, decided: list[AnyDecision], now_us: int) -> list[AnyDecision]:
        self.world.take_consumed()  # this world has no journal
        for decision in decided:
            match decision:
                case RequestRouted(request_id=request_id):
                    self._sent_us[request_id] = now_us
                    later_us = self._later_us(request_id)
                    for recorded_us, event in self._unsent.pop(request_id, ()):
                        self._delay(max(recorded_us + later_us, now_us), event)
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

    def _set_policy(self, event: PolicySet) -> PolicySet:
        """Return an operator's change of a policy as applied here: a policy that the alternative names stays.

        A policy that history's owner was not allowed to run changes nothing here either.
        """
        recorded = self._recorded.get(event.pool)
        if recorded is None or recorded.model != event.model:
            return event
        self._recorded[event.pool] = recorded = recorded.with_mode(self._history.pools[event.pool].router.mode)
        mode = self._alter(recorded).router.mode
        if mode != recorded.router.mode:
            self.undone.add(MODE)
        return msgspec.structs.replace(event, mode=mode)

    def _disagg(self, recorded: PoolConfigured, by_hand: DisaggConfig) -> DisaggConfig:
        """Return an operator's config as applied here: fields that the alternative changes or names keep its values."""
        before, after, named = recorded.router.disagg, self._alter(recorded).router.disagg, self._named(recorded)
        here = merge_runtime_settings(after, before, by_hand)
        wins = {name: getattr(after, name) for name in after.__struct_fields__ if DISAGG + name in named}
        self.undone |= {DISAGG + name for name, value in wins.items() if value != getattr(here, name)}
        return msgspec.structs.replace(here, **wins)

    def _thresholds(self, recorded: PoolConfigured, by_hand: BusyThresholds) -> BusyThresholds:
        return merge_runtime_settings(self._alter(recorded).router.busy, recorded.router.busy, by_hand)


def _stage_of(event: RequestProgress) -> Stage | None:
    """Return the stage to which a progress event of this type belongs, or None if there may be several."""
    match event:
        case PrefillFinished() | PrefillFailed():
            return "prefill"
        case TransferFailed():
            return "decode"
        case _:
            return None


def _prefilled(world: World, request: ActiveRequest) -> PrefillFinished:
    kept = Prefilled(
        worker_id=request.worker_id,
        worker_epoch=request.worker_epoch,
        model=world.pools[request.submitted.pool].model,
        connector="none",
        descriptor=b"",
        tokens=request.submitted.prompt_tokens,
        lease_us=LEASE_US_MAX,
    )
    return PrefillFinished(
        request_id=request.submitted.request_id,
        attempt=request.stage_attempt,
        worker_id=request.worker_id,
        worker_epoch=request.worker_epoch,
        owner_epoch=max(0, world.owner_epoch),
        prefilled=kept,
    )


class PlacementHits:
    """Share of prompt blocks that the selected rank had cached when the request ended, by the prefix index."""

    def __init__(self) -> None:
        self.blocks = 0
        self.found = 0

    def observe(self, world: World, blocks: "array[int]", worker_id: str, rank: int) -> None:
        """Count a request that finished on this rank, if the worker still exists and reports KV events."""
        worker = world.fleet.get(worker_id)
        if worker is not None and worker.spec.kv_events:
            self.blocks += len(blocks)
            self.found += sum(world.index.overlaps(blocks).get((worker_id, rank), NO_OVERLAP))

    @property
    def share(self) -> float | None:
        return self.found / self.blocks if self.blocks else None
