"""`forebay replay at`: the state of a recorded group at one moment, with a limit on the rows of each table."""

import asyncio
from collections.abc import Iterable
from typing import Any

import msgspec
from rich.console import Console, RenderableType
from rich.table import Table

from forebay.cli.common.errors import explained, fail
from forebay.cli.common.recording import Recording
from forebay.cli.common.tables import ROWS_MAX, plain_table, print_result, results, span, titled_table
from forebay.cli.common.terminal import counted, own_stdout, printable
from forebay.cli.common.times import time_us
from forebay.cli.common.unverified import DIVERGED, tell_unverified
from forebay.cli.policies.allowed import allowed_policies
from forebay.cli.replay.command import AtCommand
from forebay.core.routing.policies import CustomPolicies
from forebay.events.control import QueueConfig
from forebay.events.decisions import JournalRecord, RequestRouted
from forebay.replay.at import JournalDiverged, Position, last_time, seek_record, seek_time
from forebay.replay.moment import LossFacts, Moment, PoolFacts, RankFacts, RequestFacts
from forebay.replay.states import States
from forebay.transport.base import Log
from forebay.transport.sqlite.recording import utc

CLOCK_DIGITS_MAX = 19  # a time in microseconds, as in records
LOST_SHOWN_MAX = 8
SUMMARY_CHARS_MAX = 160
# Fields that add nothing to a summary, or are shown beside it.
_LEFT_OUT = {"owner_epoch", "seq", "consumed", "worker_epoch", "slot", "at_us", "reply_slot", "table_digest"}


def run_at(options: AtCommand) -> None:
    if options.time and options.offset is not None:
        fail("--time and --offset exclude each other; give one of them")
    options.recording.require_one_source()
    with explained():
        custom = allowed_policies(options.allow_policy)
        try:
            with own_stdout():
                position, moment = asyncio.run(_read_moment(options.recording, options.time, options.offset, custom))
        except JournalDiverged as diverged:
            fail(f"{options.recording.name}: {diverged}", DIVERGED)
    print_result(moment, options.json, lambda: show(results(), position, moment))
    tell_unverified(moment.unverified)


async def _read_moment(
    recording: Recording, time: str, offset: int | None, custom: CustomPolicies
) -> tuple[Position, Moment]:
    async with recording.opened(custom) as (log, partition):
        states = States(log, partition, custom)
        if time:
            position = await seek_time(states, await log_time_us("--time", time, log, partition))
        else:
            position = await seek_record(states, offset)
        return position, await position.moment()


def show(console: Console, position: Position, moment: Moment) -> None:
    """Print the state, with a limit on the rows of each table."""
    console.print(facts_table(moment))
    if position.step is not None:
        console.print(f"record     {summary(position.step.record)}", markup=False, highlight=False)
    for line in later_lines(moment):
        console.print(line, markup=False, highlight=False)
    for table in (workers_table(moment), ranks_table(moment)):
        console.print()
        console.print(table)
    for loss in reversed(moment.lost[-LOST_SHOWN_MAX:]):
        console.print()
        console.print(lost_table(loss))
    if len(moment.lost) > LOST_SHOWN_MAX:
        console.print(f"and {len(moment.lost) - LOST_SHOWN_MAX} workers lost earlier", style="dim")
    for table in (queue_table(moment), requests_table(moment)):
        console.print()
        console.print(table)


async def log_time_us(option: str, text: str, log: Log, partition: int) -> int:
    """Return a point in time in microseconds since 1970. An invalid time ends the command.

    `text` is a time, a duration before the end of the log such as `-5m`, or microseconds.
    """
    exactly = text.isdecimal() and len(text) <= CLOCK_DIGITS_MAX
    return int(text) if exactly else time_us(option, text, await last_time(log, partition))


def facts_table(moment: Moment) -> Table:
    """Return a table with journal position, digest and pool configuration at a moment of the recording."""
    waiting = sum(len(kind.waiting) for kind in moment.queues)
    rows = [
        ("journal", f"{moment.offset}, derived from the state at {moment.start}"),
        ("clock", f"{utc(moment.now_us)} ({moment.now_us})" if moment.now_us else "no event applied yet"),
        ("owner", f"{moment.owner_id or 'unknown (claim no longer on the log)'}, epoch {moment.owner_epoch}"),
        ("state digest", moment.digest),
        ("requests", f"{len(moment.requests)} active, {waiting} of them queued; {moment.sessions} sessions"),
        *((f"pool {pool.pool}", _pool(pool)) for pool in moment.pools),
        *((f"shared store {name}", f"{blocks:,} blocks") for name, blocks in moment.stores.items()),
    ]
    return plain_table(("item", "value"), rows, {"item", "value"}, show_header=False)


def later_lines(moment: Moment) -> Iterable[str]:
    """Yield lines that say which events after the journal record are part of the state, and which are not."""
    later = moment.later
    if later.applied:
        yield f"then       {_counts(later.applied)}, which the owner had applied by the requested time"
    if later.unrecorded:
        yield (
            f"then       {_counts(later.unrecorded)} from the log, in the order of their append; no journal "
            "record shows that the owner had applied them"
        )
    if later.not_applied:
        count = _counts(later.not_applied)
        if later.requested_us is None:
            yield f"not shown  {count} on the log after this record; --time shows the state with later events"
        else:
            reason = "the first one leads to a decision that the journal does not have"
            yield f"not shown  {count} on the log by the requested time; {reason}"
    if later.requested_us is not None and moment.now_us < later.requested_us:
        yield f"age        {span(later.requested_us - moment.now_us)} at the requested time, {utc(later.requested_us)}"


def _counts(by_topic: dict[str, int]) -> str:
    total = sum(by_topic.values())
    each = ", ".join(f"{count} {topic}" for topic, count in sorted(by_topic.items()))
    return f"{counted(total, 'event')} ({each})"


def workers_table(moment: Moment) -> RenderableType:
    rows = [
        (
            worker.worker_id,
            str(worker.worker_epoch),
            worker.phase,
            worker.pool,
            worker.role,
            str(worker.slot),
            _numbers(worker.ranks),
            ", ".join(worker.taints),
            ", ".join(worker.loras),
        )
        for worker in moment.workers
    ]
    columns = ("worker", "epoch", "phase", "pool", "role", "slot", "ranks", "taints", "LoRAs")
    texts = {"worker", "phase", "pool", "role", "ranks", "taints", "LoRAs"}
    return titled_table("fleet", columns, rows, texts, "no workers")


def ranks_table(moment: Moment) -> RenderableType:
    return _ranks_table("load and cache, by rank", moment.ranks)


def lost_table(loss: LossFacts) -> RenderableType:
    """Return a table with load and cache of a lost worker's ranks right before it was declared lost."""
    when = utc(loss.lost_us if loss.lost_us is not None else loss.at_us)
    name = f"lost: {loss.worker_id}, epoch {loss.worker_epoch}, at {when}: {loss.reason or 'no reason recorded'}"
    if loss.ranks is None:
        text = "lost before the state from which this moment is derived; use `--time` right before to see its load"
        return titled_table(name, (), [], set(), text)
    requests = loss.requests or []
    shown = ", ".join(requests[:ROWS_MAX]) + (f" and {len(requests) - ROWS_MAX} more" * (len(requests) > ROWS_MAX))
    return _ranks_table(f"{name}; active requests: {shown or 'none'}", loss.ranks)


def queue_table(moment: Moment) -> RenderableType:
    """Return a table of the requests in the router's queue, by queue class, first to last."""
    rows = [
        (
            kind.pool,
            f"{kind.name} >={kind.uncached_tokens_min}" if kind.uncached_tokens_min else kind.name,
            str(at),
            held.request_id,
            span(held.waited_us),
            str(held.uncached_tokens),
            str(held.priority),
            str(held.strict_priority),
        )
        for kind in moment.queues
        for at, held in enumerate(kind.waiting)
    ]
    columns = ("pool", "class", "ahead", "request", "waited", "uncached", "priority", "strict")
    return titled_table("queue", columns, rows, {"pool", "class", "request"}, "empty")


def _worker(request: RequestFacts) -> str:
    places = [f"{request.worker_id}/{request.rank}"] if request.worker_id else []
    places += [f"KV at {request.kept_by}"] if request.kept_by else []
    return ", ".join(places)


def requests_table(moment: Moment) -> RenderableType:
    rows = [
        (
            request.request_id,
            request.phase,
            _worker(request),
            str(request.attempt),
            "?" if request.age_us is None else span(request.age_us),
            span(request.due_in_us),
            str(request.prompt_tokens),
        )
        for request in moment.requests
    ]
    columns = ("request", "phase", "worker", "attempt", "age", "due in", "prompt")
    return titled_table("requests", columns, rows, {"request", "phase", "worker"}, "none active")


def summary(record: JournalRecord) -> str:
    tag = str(type(record).__struct_config__.tag)
    text = _routed(record) if isinstance(record, RequestRouted) else " ".join(_fields(record))
    if at_us := getattr(record, "at_us", 0):
        tag += f" at {utc(at_us)}"
    line = printable(f"{tag} {text}")
    return line if len(line) <= SUMMARY_CHARS_MAX else f"{line[:SUMMARY_CHARS_MAX].rpartition(' ')[0]} …"


def _routed(event: RequestRouted) -> str:
    terms = event.terms
    line = f"{event.request_id} to {event.worker_id}/{event.rank}: attempt {event.attempt}, cost {terms.cost:g}"
    line += f", {terms.device_overlap} blocks cached, {event.candidates} candidates"
    if event.ties > 1:
        line += f", {event.ties} ties"
    if event.runner_up is not None:
        other = event.runner_up
        line += f"; runner-up {other.worker_id}/{other.rank} {other.terms.cost:g}"
    return line


def _fields(event: msgspec.Struct) -> Iterable[str]:
    for info in msgspec.structs.fields(event):
        value = getattr(event, info.name)
        if info.name in _LEFT_OUT or value == info.default:
            continue
        yield f"{info.name}={_short(value)}"


def _short(value: Any) -> str:
    if isinstance(value, msgspec.Struct):
        return "(" + " ".join(_fields(value)) + ")"
    return str(value)


def _pool(pool: PoolFacts) -> str:
    router = pool.router
    changed = " ".join(
        f"{name}={getattr(router, name)}"
        for name, default in ((info.name, info.default) for info in msgspec.structs.fields(router))
        if name not in {"mode", "busy", "queue", "disagg"} and getattr(router, name) != default
    )
    role = "" if pool.role == "aggregated" else f", for {pool.role}"
    parts = [f"{pool.model}{role}, blocks of {pool.block_size} tokens, {pool.routed} routed by {router.mode}"]
    parts += [changed] if changed else []
    parts += [f"busy above {' '.join(_fields(pool.busy))}"] if list(_fields(pool.busy)) else []
    if pool.disagg is not None:
        parts.append(f"prompts computed remotely: {' '.join([pool.disagg.policy, *_fields(pool.disagg)])}")
    if router.queue.threshold is not None:
        parts.append(f"queues above {_queue(router.queue)}")
    if router.queue.run_ahead is not None:
        parts.append(f"queue run-ahead {router.queue.run_ahead:g} of max_num_seqs per rank")
    return "; ".join(parts)


def _queue(queue: QueueConfig) -> str:
    return f"{queue.threshold:g} steps of prefill, {queue.policy}, {len(queue.classes)} classes"


def _ranks_table(name: str, ranks: list[RankFacts]) -> RenderableType:
    tiers = [
        tier for tier in (ranks[0].blocks if ranks else ()) if tier == "device" or any(r.blocks[tier] for r in ranks)
    ]
    guesses = [
        (title, attribute)
        for title, attribute in (("approx.", "approximate_blocks"), ("predicted", "predicted_blocks"))
        if any(getattr(rank, attribute) for rank in ranks)
    ]
    rows: list[tuple[str, ...]] = []
    for rank in ranks:
        report = rank.reported
        rows.append(
            (
                f"{rank.worker_id}/{rank.rank}",
                str(rank.prefill_tokens),
                f"{rank.decode_blocks:.6g}",
                str(rank.active_requests),
                "" if report is None else f"{report.running}+{report.waiting}",
                "" if report is None else f"{report.kv_blocks_used}/{report.kv_blocks_total}",
                str(rank.computed_tokens),
                *(str(rank.blocks[tier]) for tier in tiers),
                *(str(getattr(rank, attribute)) for _, attribute in guesses),
                f"{rank.last_seq}{' resync' * rank.resync}",
            )
        )
    columns = ("rank", "prefill", "decode", "active", "run+wait", "kv used", "computed")
    titles = (*columns, *tiers, *(title for title, _ in guesses), "seq")
    return titled_table(name, titles, rows, {"rank"}, "no ranks")


def _numbers(ranks: list[int]) -> str:
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"
