"""Compare two moments of a group, and list what differs."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Literal

import msgspec

from forebay.replay.moment import ClassFacts, Fact, LossFacts, Moment, PoolFacts, RankFacts, WorkerFacts, flat

ChangeKind = Literal["owner", "worker", "pool", "size", "requests", "queue", "load", "cache"]  # by importance

CHANGES_MAX = 200  # more than a person reads; a fleet of 200 workers may have 400 changed ranks
NOTABLE_SHARE = 0.1  # a load or a cache that changed by less than a tenth is omitted

Difference = tuple[str, str, str]  # subject, value before and value after
Metric = tuple[str, Callable[[RankFacts], float]]  # its name after a number, and its value

LOAD: tuple[Metric, ...] = (
    ("active requests", lambda rank: rank.active_requests),
    ("tokens to prefill", lambda rank: rank.prefill_tokens),
    ("KV blocks of active requests", lambda rank: rank.decode_blocks),
)
CACHE: tuple[Metric, ...] = (
    ("blocks in device memory", lambda rank: rank.blocks.get("device", 0)),
    ("blocks in host memory", lambda rank: rank.blocks.get("host", 0)),
    ("blocks on disk", lambda rank: rank.blocks.get("disk", 0)),
    ("blocks assumed cached", lambda rank: rank.approximate_blocks + rank.predicted_blocks),
)


class MomentSummary(Fact, frozen=True, kw_only=True):
    offset: int
    now_us: int
    owner_id: str
    owner_epoch: int
    workers: int
    ready: int
    active_requests: int
    queued_requests: int
    prefill_tokens: int
    decode_blocks: float
    device_blocks: int


class MomentChange(Fact, frozen=True, kw_only=True):
    """One difference between two moments. `pool` is a change of a pool's configuration, `size` of its worker count.

    `subject` is a worker, `worker/rank`, a setting or number of a pool, or requests.
    """

    kind: ChangeKind
    subject: str
    before: str
    after: str


class MomentComparison(Fact, frozen=True, kw_only=True):
    """Differences between two moments, most important first, with the number of further ones by kind."""

    a: MomentSummary
    b: MomentSummary
    changes: list[MomentChange]
    omitted: dict[ChangeKind, int]


def compare_moments(a: Moment, b: Moment) -> MomentComparison:
    """Return the differences between two moments of one group, most important first.

    The changes lead from the earlier to the later moment, whatever the order of the arguments.
    """
    a, b = sorted((a, b), key=lambda moment: (moment.now_us, moment.offset))
    found: tuple[tuple[ChangeKind, Iterator[Difference]], ...] = (
        ("owner", _owner(a, b)),
        ("worker", _workers(a, b)),
        ("pool", _pools(a, b)),
        ("size", _sizes(a, b)),
        ("requests", _requests(a, b)),
        ("queue", _queues(a, b)),
        ("load", _metrics(LOAD, a, b)),
        ("cache", _metrics(CACHE, a, b)),
    )
    changes = [
        MomentChange(kind=kind, subject=subject, before=before, after=after)
        for kind, differences in found
        for subject, before, after in differences
    ]
    omitted = Counter(change.kind for change in changes[CHANGES_MAX:])
    return MomentComparison(a=_summary(a), b=_summary(b), changes=changes[:CHANGES_MAX], omitted=dict(omitted))


def _summary(moment: Moment) -> MomentSummary:
    return MomentSummary(
        offset=moment.offset,
        now_us=moment.now_us,
        owner_id=moment.owner_id,
        owner_epoch=moment.owner_epoch,
        workers=len(moment.workers),
        ready=sum(worker.phase == "ready" for worker in moment.workers),
        active_requests=len(moment.requests),
        queued_requests=sum(len(waiting.waiting) for waiting in moment.queues),
        prefill_tokens=sum(rank.prefill_tokens for rank in moment.ranks),
        decode_blocks=sum(rank.decode_blocks for rank in moment.ranks),
        device_blocks=sum(rank.blocks.get("device", 0) for rank in moment.ranks),
    )


def _owner(a: Moment, b: Moment) -> Iterator[Difference]:
    if a.owner_epoch != b.owner_epoch:
        before, after = (
            f"{moment.owner_id or 'unknown'}, epoch {moment.owner_epoch}" if moment.owner_epoch >= 0 else ""
            for moment in (a, b)
        )
        yield "owner", before, after


def _workers(a: Moment, b: Moment) -> Iterator[Difference]:
    """Yield workers that were lost or replaced, workers that joined in between, changed workers, and new workers."""
    old, new = ({worker.worker_id: worker for worker in moment.workers} for moment in (a, b))
    losses = {(loss.worker_id, loss.worker_epoch): f"lost{_because(loss)}" for loss in b.lost}
    for worker_id, worker in old.items():
        other = new.get(worker_id)
        if other is None or other.worker_epoch != worker.worker_epoch:
            lost = losses.get((worker_id, worker.worker_epoch), "lost")
            yield worker_id, _state(worker), lost if other is None else f"{lost}, then {_state(other)}"
    seen = {(loss.worker_id, loss.worker_epoch) for loss in a.lost}
    seen |= {(worker.worker_id, worker.worker_epoch) for worker in a.workers}
    for (worker_id, epoch), lost in losses.items():
        if (worker_id, epoch) not in seen:
            yield worker_id, "", f"joined in epoch {epoch}, then {lost}"
    for worker_id, worker in old.items():
        other = new.get(worker_id)
        if other is not None and other.worker_epoch == worker.worker_epoch:
            if worker.phase != other.phase:
                yield worker_id, _state(worker), _state(other)
            if worker.loras != other.loras:
                before, after = (", ".join(one.loras) or "none" for one in (worker, other))
                yield f"LoRA adapters of {worker_id}", before, after
    for worker_id, worker in new.items():
        if worker_id not in old:
            yield worker_id, "", f"{_state(worker)}, in the pool {worker.pool}"


def _state(worker: WorkerFacts) -> str:
    return f"{worker.phase}, epoch {worker.worker_epoch}"


def _because(loss: LossFacts) -> str:
    return f" ({loss.reason})" if loss.reason else ""


def _pools(a: Moment, b: Moment) -> Iterator[Difference]:
    old, new = ({pool.pool: pool for pool in moment.pools} for moment in (a, b))
    for name in sorted({*old, *new}):
        if name not in old or name not in new:
            before, after = ("" if name not in pools else f"model {pools[name].model}" for pools in (old, new))
            yield f"pool {name}", before, after
            continue
        fields, others = _settings(old[name]), _settings(new[name])
        for field in sorted({*fields, *others}):
            before, after = (_value(settings.get(field)) for settings in (fields, others))
            if before != after:
                yield f"pool {name}: {field}", before or "unset", after or "unset"


def _settings(pool: PoolFacts) -> dict[str, Any]:
    """Return the settings of a pool in force, by their dotted names in a router configuration."""
    router = msgspec.structs.replace(pool.router, busy=pool.busy, disagg=pool.disagg or pool.router.disagg)
    own = {"model": pool.model, "block_size": pool.block_size, "attempts_max": pool.attempts_max, "role": pool.role}
    return own | dict(flat(router))


def _value(value: Any) -> str:
    """Return a setting as text; empty for null."""
    if value is None or isinstance(value, str):
        return value or ""
    return msgspec.json.encode(value).decode()


def _sizes(a: Moment, b: Moment) -> Iterator[Difference]:
    old, new = (Counter(worker.pool for worker in moment.workers) for moment in (a, b))
    for pool in sorted({*old, *new}):
        if old[pool] != new[pool]:
            yield f"workers of the pool {pool}", f"{old[pool]:,}", f"{new[pool]:,}"


def _requests(a: Moment, b: Moment) -> Iterator[Difference]:
    old, new = (
        {(request.submitted_offset, request.request_id): request for request in moment.requests} for moment in (a, b)
    )
    routed = {pool.pool: pool.routed for pool in a.pools}
    for pool in b.pools:
        if pool.routed > routed.get(pool.pool, 0):
            yield f"requests routed in the pool {pool.pool}", f"{routed.get(pool.pool, 0):,}", f"{pool.routed:,}"
    both = old.keys() & new.keys()
    if old.keys() != new.keys():
        ended, began = len(old) - len(both), len(new) - len(both)
        yield "active requests", f"{len(old):,}", f"{len(new):,}: {ended:,} ended, {began:,} are new"
    placed = [key for key in both if old[key].worker_id and new[key].worker_id]
    moved = sum((old[key].worker_id, old[key].rank) != (new[key].worker_id, new[key].rank) for key in placed)
    if moved:
        yield "requests that moved to another rank", "0", f"{moved:,}"


def _queues(a: Moment, b: Moment) -> Iterator[Difference]:
    """Yield queue classes whose number of requests changed, the largest change first."""
    old, new = ({_class_name(one): len(one.waiting) for one in moment.queues} for moment in (a, b))
    changed = [key for key in {**old, **new} if old.get(key, 0) != new.get(key, 0)]
    for name in sorted(changed, key=lambda key: -abs(new.get(key, 0) - old.get(key, 0))):
        yield name, f"{old.get(name, 0):,}", f"{new.get(name, 0):,}"


def _class_name(one: ClassFacts) -> str:
    larger = f" (from {one.uncached_tokens_min:,} uncached tokens)" if one.uncached_tokens_min else ""
    return f"requests in the queue class {one.name}{larger} of the pool {one.pool}"


def _metrics(metrics: tuple[Metric, ...], a: Moment, b: Moment) -> Iterator[Difference]:
    """Yield notable changes of load or cache: first of whole pools, then of ranks, the largest of each first."""
    for values in (_pool_values, _rank_values):
        old, new = (values(metrics, moment) for moment in (a, b))
        found: list[tuple[float, Difference]] = []
        nothing = (0.0,) * len(metrics)
        for subject in sorted({*old, *new}):
            pairs = zip(old.get(subject, nothing), new.get(subject, nothing), strict=True)
            parts = [(name, *pair) for (name, _), pair in zip(metrics, pairs, strict=True) if _is_notable(*pair)]
            if parts:
                before = ", ".join(f"{_number(before)} {name}" for name, before, _ in parts)
                after = ", ".join(f"{_number(after)} {name}" for name, _, after in parts)
                found.append((max(abs(after - before) for _, before, after in parts), (subject, before, after)))
        yield from (difference for _, difference in sorted(found, key=lambda one: -one[0]))


def _rank_values(metrics: tuple[Metric, ...], moment: Moment) -> dict[str, tuple[float, ...]]:
    return {f"{rank.worker_id}/{rank.rank}": tuple(value(rank) for _, value in metrics) for rank in moment.ranks}


def _pool_values(metrics: tuple[Metric, ...], moment: Moment) -> dict[str, tuple[float, ...]]:
    pools = {worker.worker_id: worker.pool for worker in moment.workers}
    ranks: dict[str, list[RankFacts]] = {}
    for rank in moment.ranks:
        ranks.setdefault(pools[rank.worker_id], []).append(rank)
    return {f"pool {pool}": tuple(sum(map(value, ranks[pool])) for _, value in metrics) for pool in ranks}


def _is_notable(before: float, after: float) -> bool:
    return abs(after - before) > NOTABLE_SHARE * max(before, after)


def _number(value: float) -> str:
    return f"{value:,.1f}".removesuffix(".0")
