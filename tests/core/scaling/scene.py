"""Records of the topic `scaling`, a planner and an actuator in a loop, and events of a group for the observation."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Self

import msgspec

from forebay.core.scaling.decide import decide
from forebay.core.scaling.observation import GroupObservation
from forebay.core.scaling.state import RULES_VERSION, Outcome, PlannerState
from forebay.events.base import Event
from forebay.events.control import Role
from forebay.events.decisions import CostTerms, RequestAborted, RequestHeld, RequestRejected, RequestRouted
from forebay.events.fleet import WorkerDraining, WorkerLost, WorkerRecovered, WorkerSuspect
from forebay.events.metrics import LoadReported
from forebay.events.progress import FirstTokenEmitted, ProgressEvent, RequestFinished
from forebay.events.requests import Sampling
from forebay.events.scaling import (
    DecodePoint,
    DemandForecast,
    PlannerClaimed,
    PlannerSettings,
    PoolDecision,
    PoolDemand,
    PoolObserved,
    PoolScaling,
    PoolSizeSet,
    PrefillPoint,
    ReachedSize,
    Reason,
    RefusedPool,
    ScalingApplied,
    ScalingDecided,
    ScalingEvent,
    ScalingObserved,
    ScalingRefused,
    WorkerObserved,
)
from tests.core.worlds import BLOCK, joined, request

GROUP, POOL = "llama", "default"
S = 1_000_000


class Journal:
    """Records of the topic in order, applied to one state."""

    def __init__(self) -> None:
        self.state = PlannerState()
        self.records: list[ScalingEvent] = []

    def add(self, event: ScalingEvent) -> Outcome:
        """Append and apply a record."""
        self.records.append(event)
        return self.state.apply(len(self.records) - 1, event)

    def claim(self, planner_id: str = "p1", **settings: object) -> int:
        self.add(claimed(planner_id, **settings))
        return self.state.epoch


def claimed(planner_id: str = "p1", **settings: object) -> PlannerClaimed:
    options = {"pools": (PoolScaling(group=GROUP, pool=POOL),), **settings}
    return PlannerClaimed(planner_id=planner_id, rules_version=RULES_VERSION, settings=PlannerSettings(**options))  # type: ignore[arg-type]


def observed(epoch: int, ready: int, at_us: int = 0) -> ScalingObserved:
    """Return an observation of the pool with `ready` workers."""
    pool = PoolObserved(group=GROUP, pool=POOL, ready=ready)
    return ScalingObserved(planner_epoch=epoch, at_us=at_us, interval_s=10, pools=(pool,))


def decided(epoch: int, after: int, from_size: int, to_size: int) -> ScalingDecided:
    """Return a decision about the pool."""
    reason: Reason = "scale_up" if to_size > from_size else "scale_down" if to_size < from_size else "hold"
    pool = PoolDecision(group=GROUP, pool=POOL, from_size=from_size, to_size=to_size, proposed=to_size, reason=reason)
    return ScalingDecided(planner_epoch=epoch, after=after, pools=(pool,))


def applied(decision: int, size: int) -> ScalingApplied:
    """Return the reply of an actuator that reached `size` workers."""
    return ScalingApplied(decision=decision, actuator="a", pools=(ReachedSize(group=GROUP, pool=POOL, size=size),))


def refused(decision: int) -> ScalingRefused:
    pools = (RefusedPool(group=GROUP, pool=POOL),)
    return ScalingRefused(decision=decision, actuator="a", pools=pools, reason="failed", message="no node")


# One worker prefills 12,500 tokens per second up to 1,000 tokens, and 8,000 at 4,000 tokens.
PREFILL = (
    PrefillPoint(isl=4_000, ttft_ms=500, tokens_per_s=8_000),
    PrefillPoint(isl=250, ttft_ms=30, tokens_per_s=12_500),
    PrefillPoint(isl=1_000, ttft_ms=80, tokens_per_s=12_500),
)
DECODE = (
    DecodePoint(context=1_000, concurrency=1, itl_ms=10, tokens_per_s=100),
    DecodePoint(context=1_000, concurrency=50, itl_ms=50, tokens_per_s=1_000),
    DecodePoint(context=1_000, concurrency=10, itl_ms=20, tokens_per_s=500),
    DecodePoint(context=3_000, concurrency=1, itl_ms=30, tokens_per_s=33),
    DecodePoint(context=3_000, concurrency=10, itl_ms=40, tokens_per_s=250),
)


def pool(**fields: object) -> PoolScaling:
    return PoolScaling(**{"group": GROUP, "pool": POOL, "prefill": PREFILL, "decode": DECODE, **fields})  # type: ignore[arg-type]


def settings(*pools: PoolScaling, **fields: object) -> PlannerSettings:
    return PlannerSettings(pools=pools, **fields)  # type: ignore[arg-type]


def demand(
    requests_per_s: float, isl: float = 1_000, osl: float = 200, kv_hit_rate: float = 0.0, pool: str = POOL
) -> PoolDemand:
    return PoolDemand(group=GROUP, pool=pool, requests_per_s=requests_per_s, isl=isl, osl=osl, kv_hit_rate=kv_hit_rate)


def observation(ready: int = 2, workers: tuple[WorkerObserved, ...] = (), **fields: Any) -> PoolObserved:
    return PoolObserved(**{"group": GROUP, "pool": POOL, "ready": ready, "workers": workers, **fields})


def worker(prefill_tokens: int = 0, running: int = 1, **fields: Any) -> WorkerObserved:
    fields = {"worker_id": "w", "waiting": 0, "kv_tokens": 0, "kv_tokens_max": 0, **fields}
    return WorkerObserved(prefill_tokens=prefill_tokens, running=running, **fields)


class Loop(Journal):
    """A journal that a planner with these settings has claimed. Each round takes `step_s` seconds."""

    def __init__(self, settings: PlannerSettings, step_s: float = 10.0, start_us: int = 0) -> None:
        super().__init__()
        self.step_us = int(step_s * S)
        self.now_us = start_us
        self.add(PlannerClaimed(planner_id="p", rules_version=RULES_VERSION, settings=settings, at_us=start_us))

    def observe(self, *pools: PoolObserved) -> None:
        """Append an observation, a step later than the last."""
        self.now_us += self.step_us
        observed = ScalingObserved(planner_epoch=self.state.epoch, at_us=self.now_us, interval_s=10, pools=pools)
        assert self.add(observed) == "applied"

    def forecast(self, *pools: PoolDemand) -> None:
        """Append a forecast that knows the newest observation."""
        epoch, observed = self.state.epoch, self.state.observed
        self.add(DemandForecast(planner_epoch=epoch, predictor="constant", observed=observed, pools=pools))

    def decide(self) -> ScalingDecided:
        """Append the planner's decision, and check that it is valid."""
        decision = decide(self.state)
        assert decision is not None
        assert decide(self.state) == decision
        decision = msgspec.structs.replace(decision, at_us=self.now_us)
        assert self.add(decision) == "applied"
        return decision

    def reply(self, reached: Mapping[tuple[str, str], int] | None = None) -> None:
        """Append the replies of an actuator that reached the decided sizes, or other ones for some pools."""
        for decision, changes in self._open().items():
            sizes = [
                ReachedSize(group=key[0], pool=key[1], size=(reached or {}).get(key, size))
                for key, size in changes.items()
            ]
            self.add(ScalingApplied(decision=decision, actuator="processes", pools=tuple(sizes), at_us=self.now_us))

    def refuse(self, message: str = "") -> None:
        """Append the refusals of an actuator that could change nothing."""
        about: dict[str, Any] = {"actuator": "processes", "reason": "failed", "message": message, "at_us": self.now_us}
        for decision, changes in self._open().items():
            pools = tuple(RefusedPool(group=key[0], pool=key[1]) for key in changes)
            self.add(ScalingRefused(decision=decision, pools=pools, **about))

    def _open(self) -> dict[int, dict[tuple[str, str], int]]:
        """Return the decided sizes without reply, by decision."""
        found: dict[int, dict[tuple[str, str], int]] = {}
        for key, change in self.state.open.items():
            found.setdefault(change.decision, {})[key] = change.decided.to_size
        return found

    def set_size(self, pool: PoolScaling, size: int | None) -> None:
        self.add(PoolSizeSet(group=pool.group, pool=pool.pool, size=size))

    def size(self, pool: PoolScaling) -> int:
        size = self.state.size(pool)
        assert size is not None
        return size


def reversals(sizes: list[int]) -> int:
    """Count the changes of direction."""
    moves = [later > now for now, later in pairwise(sizes) if later != now]
    return sum(now != later for now, later in pairwise(moves))


# Events of a group, for the observation


MS = 1_000
EPOCH = 0
FACTS = {"suspect": WorkerSuspect, "recover": WorkerRecovered, "drain": WorkerDraining, "lose": WorkerLost}


def scaled(pool: str = "default", role: Role = "aggregated") -> PoolScaling:
    return PoolScaling(group="m", pool=pool, role=role)


DISAGGREGATED = (scaled("decoders", "decode"), scaled("prefillers", "prefill"))
DISAGGREGATED_DEFAULT = (scaled(role="decode"), scaled("prefillers", "prefill"))
POOLS = (scaled(), scaled("prefillers", "prefill"), scaled("encoders", "encode"))
LONG = Sampling(max_tokens=10_000)


class Group:
    """A group whose events a test writes. Its first interval has begun."""

    def __init__(self, *pools: PoolScaling) -> None:
        self.observation = GroupObservation(pools or (scaled(),))
        self.now_us = 1_000 * MS
        self.offset = 0
        self.epochs: dict[str, int] = {}
        self.observation.begin(self.now_us)

    def __call__(self, event: Event, after_ms: float = 0) -> None:
        """Apply an event `after_ms` later than the last one."""
        self.now_us += round(after_ms * MS)
        self.observation.apply(event, self.offset, self.now_us)
        self.offset += 1

    def join(self, worker_id: str, pool: str = "default", role: Role = "aggregated", **changes: Any) -> Self:
        self.epochs[worker_id] = self.offset
        self(joined(worker_id, pool=pool, role=role, **changes))
        return self

    def fact(self, kind: str, worker_id: str) -> None:
        self(FACTS[kind](owner_epoch=EPOCH, worker_id=worker_id, worker_epoch=self.epochs[worker_id]))

    def submit(self, name: str, blocks: int = 2, after_ms: float = 0, **changes: Any) -> None:
        """Submit a request whose prompt has these full blocks and two more tokens."""
        self(request(name, range(blocks), **changes), after_ms)

    def route(self, name: str, worker_id: str, after_ms: float = 0, overlap: int = 0, **changes: Any) -> None:
        self(routed(name, worker_id, overlap, **{"worker_epoch": self.epochs.get(worker_id, 0), **changes}), after_ms)

    def send(self, name: str, worker_id: str, blocks: int = 2, **changes: Any) -> None:
        """Submit a request, and route it to a worker."""
        self.submit(name, blocks, **changes)
        self.route(name, worker_id)

    def hold(self, name: str, pool: str = "default") -> None:
        self(RequestHeld(request_id=name, pool=pool, queue_class="default", uncached_tokens=1, ahead=0, owner_epoch=0))

    def reject(self, name: str, reason: Any, **changes: Any) -> None:
        self(RequestRejected(request_id=name, reply_slot=1, reason=reason, message="", owner_epoch=0, **changes))

    def abort(self, name: str) -> None:
        fields: dict[str, Any] = {"reason": "cancelled", "message": "", "attempt": 1, "pool": "default"}
        self(RequestAborted(request_id=name, reply_slot=1, owner_epoch=0, **fields))

    def emit(
        self, kind: type[ProgressEvent], name: str, worker_id: str, after_ms: float = 0, attempt: int = 1, **fields: Any
    ) -> None:
        """Apply a progress event of a worker."""
        ids: dict[str, Any] = {"worker_id": worker_id, "worker_epoch": self.epochs.get(worker_id, 0)}
        self(kind(request_id=name, attempt=attempt, owner_epoch=EPOCH, **ids, **fields), after_ms)

    def report(self, worker_id: str, running: int = 0, waiting: int = 0, blocks: int = 0, **changes: Any) -> None:
        load: dict[str, Any] = {"running": running, "waiting": waiting, "kv_blocks_used": blocks, "kv_blocks_total": 64}
        self(LoadReported(**{"worker_id": worker_id, "worker_epoch": self.epochs.get(worker_id, 0), **load, **changes}))

    def observe(self, after_ms: float = 0) -> dict[str, PoolObserved]:
        """Return the observations by pool, `after_ms` later than the last event."""
        self.now_us += round(after_ms * MS)
        return {one.pool: one for one in self.observation.observe(self.now_us)}

    def pool(self, after_ms: float = 0) -> PoolObserved:
        """Return the observation of the pool `default`."""
        return self.observe(after_ms)["default"]


def routed(name: str, worker_id: str, overlap: int = 0, **changes: Any) -> RequestRouted:
    ids: dict[str, Any] = {"request_id": name, "worker_id": worker_id, "worker_epoch": 0, "owner_epoch": EPOCH}
    place: dict[str, Any] = {"attempt": 1, "pool": "default", "slot": 0, "rank": 0}
    chosen: dict[str, Any] = {"mode": "kv", "candidates": 1, "table_digest": "0" * 16, "terms": terms(overlap)}
    return RequestRouted(**{**ids, **place, **chosen, **changes})


def terms(device: int, host: int = 0) -> CostTerms:
    zeros = dict.fromkeys(("cost", "prefill_blocks", "overlap_credit", "decode_blocks", "active_requests"), 0)
    return CostTerms(**zeros, device_overlap=device, host_overlap=host)


def prompt_tokens(blocks: int) -> int:
    """Return the length of a prompt with these full blocks, see `Group.submit`."""
    return blocks * BLOCK + 2


def finish(group: Group, name: str, worker_id: str, after_ms: float = 0, output_tokens: int = 11, **more: Any) -> None:
    """End a request with its whole output."""
    group.emit(RequestFinished, name, worker_id, after_ms, finish_reason="stop", output_tokens=output_tokens, **more)


def serve(group: Group, name: str, worker_id: str, ttft_ms: float = 30, itl_ms: float = 5, blocks: int = 2) -> None:
    """Serve a request with eleven output tokens."""
    group.send(name, worker_id, blocks, sampling=LONG)
    group.emit(FirstTokenEmitted, name, worker_id, ttft_ms)
    finish(group, name, worker_id, 10 * itl_ms)
