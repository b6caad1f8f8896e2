"""Compare two moments of a group, and describe the differences in sentences."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args

import msgspec

from forebay.replay.moment import ClassFacts, Fact, LossFacts, Moment, PoolFacts, RankFacts, WorkerFacts

ChangeKind = Literal["owner", "worker", "pool", "size", "requests", "queue", "load", "cache"]  # by importance

CHANGES_MAX = 200  # more than a person reads; a fleet of 200 workers may have 400 changed ranks
NOTABLE_SHARE = 0.1  # a load or a cache that changed by less than a tenth is omitted

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
    """Totals of a group at one moment.

    Attributes:
        now_us: the owner's clock, in microseconds since 1970.
        owner_id: ID of the owner; empty if unknown.
        prefill_tokens: uncached prompt tokens of requests that wait for their first token, over all ranks.
        decode_blocks: KV blocks of active requests, over all ranks.
        device_blocks: KV blocks cached in device memory, over all ranks.
    """

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
    """One difference between two moments.

    Attributes:
        kind: what the difference is about. `pool` is a change of a pool's configuration, `size` a change of its number
            of workers.
        subject: the worker, `worker/rank`, pool or owner that changed; the model's name for changes of all pools.
        before: value at the earlier moment, as text; empty if there was none.
        after: value at the later moment, as text; empty if there is none.
    """

    kind: ChangeKind
    subject: str
    text: str
    before: str
    after: str


class MomentComparison(Fact, frozen=True, kw_only=True):
    """Differences between two moments of a group.

    Attributes:
        changes: the most important differences, most important first.
        omitted: number of further differences, by kind.
    """

    a: MomentSummary
    b: MomentSummary
    changes: list[MomentChange]
    omitted: dict[ChangeKind, int]


def compare_moments(a: Moment, b: Moment) -> MomentComparison:
    """Return the differences between two moments of one group, most important first.

    The result does not depend on the order of the arguments: the changes lead from the earlier to the later moment.
    """
    a, b = sorted((a, b), key=lambda moment: (moment.now_us, moment.offset))
    found: dict[ChangeKind, list[MomentChange]] = {kind: [] for kind in get_args(ChangeKind)}
    for changes in (_owner(a, b), _workers(a, b), _pools(a, b), _sizes(a, b), _requests(a, b), _queues(a, b)):
        for change in changes:
            found[change.kind].append(change)
    found["load"] = list(_metrics("load", LOAD, a, b))
    found["cache"] = list(_metrics("cache", CACHE, a, b))
    ordered = [change for changes in found.values() for change in changes]
    return MomentComparison(
        a=_summary(a),
        b=_summary(b),
        changes=ordered[:CHANGES_MAX],
        omitted=dict(Counter(change.kind for change in ordered[CHANGES_MAX:])),
    )


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


def _owner(a: Moment, b: Moment) -> Iterator[MomentChange]:
    if a.owner_epoch == b.owner_epoch:
        return
    names = [moment.owner_id or "an unknown owner" for moment in (a, b)]
    if a.owner_epoch < 0:
        text = f"{names[1]} became the owner"
    elif names[0] == names[1]:
        text = f"{names[0]} became the owner again"
    else:
        text = f"{names[1]} took over from {names[0]}"
    before, after = (
        f"{name}, epoch {moment.owner_epoch}" if moment.owner_epoch >= 0 else ""
        for name, moment in zip(names, (a, b), strict=True)
    )
    yield MomentChange(
        kind="owner", subject=b.owner_id, text=f"{text} in epoch {b.owner_epoch}", before=before, after=after
    )


def _workers(a: Moment, b: Moment) -> Iterator[MomentChange]:
    """Yield lost workers, workers of another epoch, workers in another state and new workers, in this order."""
    old, new = ({worker.worker_id: worker for worker in moment.workers} for moment in (a, b))
    known = {(loss.worker_id, loss.worker_epoch) for loss in a.lost}
    losses = {(loss.worker_id, loss.worker_epoch): loss for loss in b.lost}
    for worker_id, worker in old.items():
        loss = losses.get((worker_id, worker.worker_epoch))
        if worker_id not in new:
            yield _worker(worker_id, f"{worker_id} was lost{_because(loss)}", worker, None)
        elif new[worker_id].worker_epoch != worker.worker_epoch:
            text = f"{worker_id} was lost{_because(loss)} and joined again"
            yield _worker(worker_id, text, worker, new[worker_id])
    for key, loss in losses.items():
        current = [moment.get(loss.worker_id) for moment in (old, new)]
        if key not in known and all(one is None or one.worker_epoch != loss.worker_epoch for one in current):
            text = f"{loss.worker_id} joined in epoch {loss.worker_epoch} and was lost{_because(loss)}"
            yield _worker(loss.worker_id, text, None, None)
    for worker_id, worker in old.items():
        other = new.get(worker_id)
        if other is not None and other.worker_epoch == worker.worker_epoch and other != worker:
            yield from _changed_worker(worker, other)
    for worker_id, worker in new.items():
        if worker_id not in old:
            yield _worker(worker_id, f"{worker_id} joined the pool {worker.pool}", None, worker)


def _changed_worker(worker: WorkerFacts, other: WorkerFacts) -> Iterator[MomentChange]:
    if worker.phase != other.phase:
        text = f"{worker.worker_id} was {worker.phase} and is {other.phase}"
        yield _worker(worker.worker_id, text, worker, other)
    if worker.loras != other.loras:
        before, after = (", ".join(one.loras) for one in (worker, other))
        text = f"{worker.worker_id} has loaded the LoRA adapters {after}" if after else ""
        text = text or f"{worker.worker_id} has no LoRA adapter loaded any more"
        yield MomentChange(kind="worker", subject=worker.worker_id, text=text, before=before, after=after)


def _because(loss: LossFacts | None) -> str:
    return f" ({loss.reason})" if loss is not None and loss.reason else ""


def _worker(worker_id: str, text: str, worker: WorkerFacts | None, other: WorkerFacts | None) -> MomentChange:
    before, after = ("" if one is None else f"{one.phase}, epoch {one.worker_epoch}" for one in (worker, other))
    return MomentChange(kind="worker", subject=worker_id, text=text, before=before, after=after)


def _pools(a: Moment, b: Moment) -> Iterator[MomentChange]:
    old, new = ({pool.pool: pool for pool in moment.pools} for moment in (a, b))
    for name in sorted({*old, *new}):
        if name not in old or name not in new:
            text = f"the pool {name} was {'configured' if name in new else 'removed'}"
            before, after = ("" if name not in pools else f"model {pools[name].model}" for pools in (old, new))
            yield MomentChange(kind="pool", subject=name, text=text, before=before, after=after)
            continue
        fields, others = _settings(old[name]), _settings(new[name])
        for field in sorted({*fields, *others}):
            before, after = (_value(settings.get(field)) for settings in (fields, others))
            if before != after:
                text = f"pool {name}: {field} changed from {before or 'unset'} to {after or 'unset'}"
                yield MomentChange(kind="pool", subject=name, text=text, before=before, after=after)


def _settings(pool: PoolFacts) -> dict[str, Any]:
    """Return the settings of a pool in force, by their dotted names in a router configuration."""
    router = msgspec.structs.replace(pool.router, busy=pool.busy, disagg=pool.disagg or pool.router.disagg)
    own = {"model": pool.model, "block_size": pool.block_size, "attempts_max": pool.attempts_max, "role": pool.role}
    return own | dict(_flat("", router))


def _flat(prefix: str, settings: msgspec.Struct) -> Iterator[tuple[str, Any]]:
    for name in settings.__struct_fields__:
        value = getattr(settings, name)
        if isinstance(value, msgspec.Struct):
            yield from _flat(f"{prefix}{name}.", value)
        else:
            yield prefix + name, value


def _value(value: Any) -> str:
    """Return a setting as text; empty for null."""
    if value is None or isinstance(value, str):
        return value or ""
    return msgspec.json.encode(value).decode()


def _sizes(a: Moment, b: Moment) -> Iterator[MomentChange]:
    old, new = (Counter(worker.pool for worker in moment.workers) for moment in (a, b))
    for pool in sorted({*old, *new}):
        if old[pool] != new[pool]:
            before, after = _counted(old[pool], "worker"), _counted(new[pool], "worker")
            text = f"the pool {pool} has {after} instead of {old[pool]:,}"
            yield MomentChange(kind="size", subject=pool, text=text, before=before, after=after)


def _requests(a: Moment, b: Moment) -> Iterator[MomentChange]:
    model = (b.pools or a.pools)[0].model if b.pools or a.pools else ""
    old, new = (
        {(request.submitted_offset, request.request_id): request for request in moment.requests} for moment in (a, b)
    )
    routed = {pool.pool: pool.routed for pool in a.pools}
    for pool in b.pools:
        count = pool.routed - routed.get(pool.pool, 0)
        if count > 0:
            text = f"{_counted(count, 'request')} {_was(count)} routed in the pool {pool.pool}"
            yield MomentChange(
                kind="requests",
                subject=pool.pool,
                text=text,
                before=f"{routed.get(pool.pool, 0):,} routed",
                after=f"{pool.routed:,} routed",
            )
    both = old.keys() & new.keys()
    placed = [key for key in both if old[key].worker_id and new[key].worker_id]
    moved = sum((old[key].worker_id, old[key].rank) != (new[key].worker_id, new[key].rank) for key in placed)
    ended, began = len(old) - len(both), len(new) - len(both)
    for count, text in (
        (ended, f"ended that {_was(ended)} active"),
        (began, f"{_was(began)} submitted and not ended"),
        (moved, "moved to another rank"),
    ):
        if count:
            yield MomentChange(
                kind="requests",
                subject=model,
                text=f"{_counted(count, 'request')} {text}",
                before=f"{len(old):,} active",
                after=f"{len(new):,} active",
            )


def _queues(a: Moment, b: Moment) -> Iterator[MomentChange]:
    old, new = ({_class_key(one): len(one.waiting) for one in moment.queues} for moment in (a, b))
    changed = [key for key in {**old, **new} if old.get(key, 0) != new.get(key, 0)]
    for pool, name, least in sorted(changed, key=lambda key: -abs(new.get(key, 0) - old.get(key, 0))):
        key = pool, name, least
        larger = f" (from {least:,} uncached tokens)" if least else ""
        before, after = (_counted(counts.get(key, 0), "request") for counts in (old, new))
        text = f"{after} in the queue class {name}{larger} of the pool {pool}, {before} before"
        yield MomentChange(kind="queue", subject=pool, text=text, before=before, after=after)


def _class_key(one: ClassFacts) -> tuple[str, str, int]:
    return one.pool, one.name, one.uncached_tokens_min


def _metrics(kind: ChangeKind, metrics: tuple[Metric, ...], a: Moment, b: Moment) -> Iterator[MomentChange]:
    """Yield notable changes of load or cache: first of whole pools, then of ranks, the largest of each first."""
    for values in (_pool_values, _rank_values):
        old, new = (values(metrics, moment) for moment in (a, b))
        found: list[tuple[float, MomentChange]] = []
        nothing = (0.0,) * len(metrics)
        for subject in sorted({*old, *new}):
            pairs = zip(old.get(subject, nothing), new.get(subject, nothing), strict=True)
            parts = [(name, *pair) for (name, _), pair in zip(metrics, pairs, strict=True) if _is_notable(*pair)]
            if not parts:
                continue
            text = ", ".join(f"{_number(after)} {name} instead of {_number(before)}" for name, before, after in parts)
            change = MomentChange(
                kind=kind,
                subject=subject,
                text=f"{'the pool ' if values is _pool_values else ''}{subject} has {text}",
                before=", ".join(f"{_number(before)} {name}" for name, before, _ in parts),
                after=", ".join(f"{_number(after)} {name}" for name, _, after in parts),
            )
            found.append((max(abs(after - before) for _, before, after in parts), change))
        found.sort(key=lambda one: -one[0])
        yield from (change for _, change in found)


def _rank_values(metrics: tuple[Metric, ...], moment: Moment) -> dict[str, tuple[float, ...]]:
    """Return the value of each metric by `worker/rank`."""
    return {f"{rank.worker_id}/{rank.rank}": tuple(value(rank) for _, value in metrics) for rank in moment.ranks}


def _pool_values(metrics: tuple[Metric, ...], moment: Moment) -> dict[str, tuple[float, ...]]:
    """Return the sum of each metric over the ranks of each pool, by pool."""
    pools = {worker.worker_id: worker.pool for worker in moment.workers}
    ranks: dict[str, list[RankFacts]] = {}
    for rank in moment.ranks:
        ranks.setdefault(pools[rank.worker_id], []).append(rank)
    return {pool: tuple(sum(map(value, ranks[pool])) for _, value in metrics) for pool in ranks}


def _is_notable(before: float, after: float) -> bool:
    return abs(after - before) > NOTABLE_SHARE * max(before, after)


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _was(count: int) -> str:
    return "was" if count == 1 else "were"


def _number(value: float) -> str:
    return f"{value:,.1f}".removesuffix(".0")
