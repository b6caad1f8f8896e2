"""Every recorded decision derived again from the recorded events, and held against the record.

The log may hold crashes, restarts and take-overs: the journal's order bridges them. What cannot be read or
derived is never skipped: it ends the verification and is reported.
"""

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from xxhash import xxh3_64

from forebay.core.rederive import Divergence, Rederivation
from forebay.core.world import World
from forebay.events.base import hex_digest
from forebay.events.codec import encode
from forebay.events.decisions import (
    JournalRecord,
    OwnerClaimed,
    RequestAborted,
    RequestRejected,
    RequestRouted,
    SnapshotTaken,
)
from forebay.events.topics import DECISIONS
from forebay.transport.base import Log
from forebay.transport.recorded import RecordedOrder, journal, load_snapshot

PROGRESS_EVERY = 1_000  # journal records between two reports of progress


class Report(msgspec.Struct, kw_only=True):
    """What a verification found.

    Attributes:
        decisions: routed, rejected and aborted requests in the journal up to where verification ended.
        verified: how many of them were derived again, equal in every field.
        records: all valid journal records, `events` the input events applied on the way.
        claims: owners, one for each start or take-over.
        snapshots: snapshots whose chunks give the state sealed in the journal.
        digest: 64 bits over every verified journal record in order.
        state: digest of the world at the end.
        divergence: the first record that the events do not lead to; None when there is none.
    """

    decisions: int = 0
    verified: int = 0
    records: int = 0
    events: int = 0
    claims: int = 0
    snapshots: int = 0
    digest: str = ""
    state: str = ""
    divergence: dict[str, Any] | None = None


async def verify(log: Log, partition: int = 0, progress: Callable[[int, int], None] | None = None) -> Report:
    """Derive the journal of one group again, from its first record on.

    `progress` is called now and then with the records done and their total. Raises LogError when the log
    is damaged or misses a part that the journal says was applied.
    """
    end = await log.end(DECISIONS.name, partition)
    report = Report()
    hasher = xxh3_64()
    followed = Rederivation(World())
    order = RecordedOrder(log, partition, {})
    async for offset, record in journal(log, partition, 0, end, -1):
        is_decision = isinstance(record, RequestRouted | RequestRejected | RequestAborted)
        report.decisions += is_decision
        report.events += sum(run.count for run in record.consumed)
        divergence = followed.apply(offset, record, await order.events_of(record.consumed))
        if divergence is not None:
            report.divergence = describe(divergence)
            break
        if isinstance(record, SnapshotTaken):
            await load_snapshot(log, partition, record)
            report.snapshots += 1
        report.claims += isinstance(record, OwnerClaimed)
        report.verified += is_decision
        report.records += 1
        hasher.update(encode(DECISIONS, record))
        if progress is not None and report.records % PROGRESS_EVERY == 0:
            progress(offset + 1, end)
    report.digest = hex_digest(hasher.intdigest())
    report.state = hex_digest(followed.world.digest())
    return report


def describe(divergence: Divergence) -> dict[str, Any]:
    """A divergence as plain data: where, why, both records and the fields in which they differ."""
    recorded, derived = _plain(divergence.recorded), _plain(divergence.derived)
    return {
        "offset": divergence.offset,
        "reason": divergence.reason,
        "differs": dict(_differences(recorded, derived)),
        "recorded": recorded,
        "derived": derived,
    }


def _plain(record: JournalRecord | None) -> dict[str, Any] | None:
    return None if record is None else msgspec.to_builtins(record)


def _differences(
    recorded: dict[str, Any] | None, derived: dict[str, Any] | None, path: str = ""
) -> Iterator[tuple[str, Any]]:
    for name in sorted({*(recorded or {}), *(derived or {})}):
        left, right = (recorded or {}).get(name), (derived or {}).get(name)
        if isinstance(left, dict) and isinstance(right, dict):
            yield from _differences(left, right, f"{path}{name}.")
        elif left != right:
            yield f"{path}{name}", {"recorded": left, "derived": right}
