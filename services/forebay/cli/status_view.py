"""The status of a group on a terminal."""

import time
from collections.abc import Iterator

from rich.console import Console, RenderableType

from forebay.cli.common.terminal import printable
from forebay.cli.replay.at_view import span, titled_table
from forebay.replay.status import GroupStatus, OwnerStatus, RankStatus, WorkerStatus
from forebay.transport.recording.manifest import utc

RECENT_US = 2 * 3_600_000_000  # older times are shown without their age


def show(console: Console, status: GroupStatus) -> None:
    for name, text in _facts(status):
        console.print(printable(f"{name:<10} {text}"), markup=False)
    for table in (_workers(status), _topics(status)):
        console.print()
        console.print(table)


def _facts(status: GroupStatus) -> Iterator[tuple[str, str]]:
    yield "group", f"{status.group}, {'ready' if status.ready else 'not ready'}"
    for problem in status.problems:
        yield "problem", problem
    if status.owner.epoch >= 0:
        yield "owner", _owner(status.owner)
    if status.owner.standbys is not None:
        yield "standbys", ", ".join(status.owner.standbys) or "none"
    source = "as its owner sees it" if status.source == "owner" else "derived from the log"
    yield "state", f"{source}, newest event {recent_time(status.at_us)}" if status.at_us else source
    requests = status.requests
    phases = ", ".join(f"{count:,} {phase}" for phase, count in requests.by_phase.items())
    yield "requests", f"{requests.in_flight:,} in flight" + (f": {phases}" if phases else "")
    for pool in status.pools:
        text = f"{pool.pool}: {pool.role}, policy {pool.policy}, {pool.routed:,} routed, {pool.queued:,} queued"
        if pool.canary_of is not None:
            text += f", canary of {pool.canary_of} with {pool.canary_share:.1%} of its requests"
        yield "pool", text + (", drained" if pool.drained else "")


def _owner(owner: OwnerStatus) -> str:
    parts = [owner.owner_id or "unknown, because its claim is no longer on the log", f"epoch {owner.epoch}"]
    if owner.since_us is not None:
        parts.append(f"since {recent_time(owner.since_us)}")
    if owner.heartbeat_age_s is not None:
        parts.append(f"heartbeat {owner.heartbeat_age_s:.1f} s ago")
    elif owner.alive is False:
        parts.append("no heartbeat")
    elif owner.alive is None:
        parts.append("a log does not show whether it runs")
    return ", ".join(parts)


def recent_time(at_us: int) -> str:
    try:
        text = f"{utc(at_us).partition('.')[0]}Z"
    except OverflowError:  # the clock of a damaged record
        return f"{at_us} us"
    age_us = time.time_ns() // 1_000 - at_us
    return f"{text} ({span(age_us)} ago)" if 0 <= age_us < RECENT_US else text


def _workers(status: GroupStatus) -> RenderableType:
    rows = [_row(worker, rank) for worker in status.workers for rank in worker.ranks]
    columns = ("worker", "state", "role", "pool", "active", "run+wait", "prefill", "KV used", "cached")
    return titled_table("workers", columns, rows, {"worker", "state", "role", "pool"}, "none")


def _row(worker: WorkerStatus, rank: RankStatus) -> tuple[str, ...]:
    return (
        f"{worker.worker_id}/{rank.rank}",
        worker.state,
        worker.role,
        worker.pool,
        str(rank.active_requests),
        "" if rank.running is None else f"{rank.running}+{rank.waiting}",
        str(rank.prefill_tokens),
        f"{'?' if rank.kv_blocks_used is None else rank.kv_blocks_used}/{rank.kv_blocks_total}",
        str(rank.cached_blocks),
    )


def _topics(status: GroupStatus) -> RenderableType:
    rows = [
        (f"{topic.topic}/{topic.partition}", str(topic.applied), str(topic.end), str(topic.lag))
        for topic in status.topics
    ]
    return titled_table("topics", ("topic", "applied", "end", "lag"), rows, {"topic"}, "none")
