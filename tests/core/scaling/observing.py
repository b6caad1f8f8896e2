"""Events of a group for tests of the observation, with a clock that the test moves."""

from typing import Any, Self

from forebay.core.scaling.observation import GroupObservation
from forebay.events.base import Event
from forebay.events.control import Role
from forebay.events.decisions import CostTerms, RequestAborted, RequestHeld, RequestRejected, RequestRouted
from forebay.events.fleet import WorkerDraining, WorkerLost, WorkerRecovered, WorkerSuspect
from forebay.events.metrics import LoadReported
from forebay.events.progress import FirstTokenEmitted, ProgressEvent, RequestFinished
from forebay.events.requests import Sampling
from forebay.events.scaling import PoolObserved, PoolScaling
from tests.core.worlds import BLOCK, joined, request

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
        self(
            RequestAborted(
                request_id=name, reply_slot=1, reason="cancelled", message="", attempt=1, pool="default", owner_epoch=0
            )
        )

    def emit(
        self, kind: type[ProgressEvent], name: str, worker_id: str, after_ms: float = 0, attempt: int = 1, **fields: Any
    ) -> None:
        """Apply a progress event of a worker."""
        ids: dict[str, Any] = {
            "worker_id": worker_id,
            "worker_epoch": self.epochs.get(worker_id, 0),
            "owner_epoch": EPOCH,
        }
        self(kind(request_id=name, attempt=attempt, **ids, **fields), after_ms)

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
    terms = CostTerms(
        cost=0, prefill_blocks=0, overlap_credit=0, decode_blocks=0, active_requests=0, device_overlap=overlap
    )
    fields: dict[str, Any] = {
        "request_id": name,
        "attempt": 1,
        "pool": "default",
        "worker_id": worker_id,
        "worker_epoch": 0,
        "slot": 0,
        "rank": 0,
        "mode": "kv",
        "candidates": 1,
        "table_digest": "0" * 16,
        "terms": terms,
        "owner_epoch": EPOCH,
        **changes,
    }
    return RequestRouted(**fields)


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
