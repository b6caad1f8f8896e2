"""Every capability has a verified recording in `tests/logs`; errors of `check_recording`."""

import asyncio
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from forebay.core.world import CORE_VERSION
from forebay.events.base import Event
from forebay.events.codec import decode, encode
from forebay.events.control import DisaggregationSet, PoolConfigured, RouterConfig
from forebay.events.decisions import (
    CommandEnded,
    CommandSent,
    KvReleased,
    OwnerClaimed,
    RequestAborted,
    RequestHeld,
    RequestRejected,
    RequestRouted,
    RouteAnswered,
    SnapshotTaken,
)
from forebay.events.fleet import WorkerJoined
from forebay.events.kv import BlocksStored, StoreBlocksRemoved
from forebay.events.progress import EncodeFinished, FirstTokenEmitted, PrefillFinished
from forebay.events.requests import RequestSubmitted
from forebay.events.topics import DECISIONS, INPUTS
from forebay.journal.records import OtherRules, decode_or_none
from forebay.replay.record.slice import copy
from forebay.replay.verify.golden import check_recording
from forebay.replay.verify.verify import VerifyReport
from forebay.transport.base import LogError, Record
from forebay.transport.sqlite.log import SqliteLog
from forebay.transport.sqlite.recording_writer import RecordingWriter
from tests.logs import recordings
from tests.logs.disaggregation import DIGESTS
from tests.logs.own_policy import CUSTOM, CheapestTwo
from tests.logs.record import FOLDER, SCENARIOS, SUFFIX, record

BYTES_MAX = 200_000
READ_MAX = 100_000


def decoded(log: SqliteLog) -> Iterator[tuple[str, Event | None]]:
    """Yield topic and event of each record of a recording, with None for an undecodable record."""
    assert log.recording is not None
    for topic in (*INPUTS, DECISIONS):
        for extent in log.recording.extents:
            if extent.topic == topic.name:
                for row in log.records(topic.name, extent.partition, extent.first, READ_MAX):
                    yield topic.name, decode_or_none(topic, row.value)


def events_of(path: Path) -> list[Event | None]:
    with closing(SqliteLog.open(path, readonly=True)) as log:
        return [event for _, event in decoded(log)]


def traits_of(event: Event) -> Iterator[str]:
    """Yield what an event shows of a recording: its type, and its reason, mode, stage and other settings."""
    yield type(event).__name__
    match event:
        case RequestRouted():
            terms = event.terms
            yield from (f"mode {event.mode}", f"stage {event.stage}", f"attempt {event.attempt}", f"rank {event.rank}")
            yield from (f"overlap {tier}" for tier in TIERS if getattr(terms, f"{tier}_overlap"))
            yield from () if event.prefill is None else [f"place {event.prefill.reason}"]
            yield "waited" if event.waited_us else "routed at once"
            yield "decayed" if 0 < terms.overlap_credit < terms.device_overlap else "full credit"
            yield "prefill" if terms.prefill_blocks else "no prefill"
            yield "taint factor" if terms.taint_factor != 1.0 else "no taint factor"
        case RequestRejected() | RequestAborted() | RouteAnswered() | CommandSent() | KvReleased():
            yield f"{type(event).__name__} {event.reason}"
            if isinstance(event, RouteAnswered):
                yield f"would wait {event.would_wait}"
        case RequestHeld():
            yield f"class {event.queue_class}"
        case CommandEnded():
            yield from (f"outcome {one.status}" for one in event.outcomes)
        case PoolConfigured():
            changed = (
                name for name in DEFAULTS.__struct_fields__ if getattr(event.router, name) != getattr(DEFAULTS, name)
            )
            yield from (f"{name} {getattr(event.router, name)}" for name in changed)
        case DisaggregationSet():
            yield f"rule {event.disagg.policy}"
        case RequestSubmitted():
            yield from (f"hint {name}" for name in msgspec.to_builtins(event.routing))
            yield from (f"media {one.kind}" for one in event.media)
            yield "adapter" if event.lora_name else "base model"
            yield f"weight {event.weight}"
            yield "namespace" if event.cache_namespace else "no namespace"
        case WorkerJoined():
            yield f"store {event.spec.kv_store}"
            yield "adapters of a worker" if event.spec.loras else "no adapters of a worker"
        case StoreBlocksRemoved():
            yield f"stale {event.stale}"
        case FirstTokenEmitted():
            yield "transferred" if event.transferred_bytes else "computed"


def traits(found: Sequence[Event | None], report: VerifyReport) -> set[str]:
    events = [event for event in found if event is not None]
    names = {trait for event in events for trait in traits_of(event)}
    names |= {f"{report.claims} owners", f"{report.void} stale", f"{len(found) - len(events)} undecodable"}
    names |= {*report.unverified, "from a snapshot" if report.start else "from the beginning"}
    names.add(f"{len({event.tenant for event in events if isinstance(event, RequestSubmitted)})} tenants")
    submitted = [event.request_id for event in events if isinstance(event, RequestSubmitted)]
    cached = {one.worker_id for one in events if isinstance(one, RequestRouted) and one.terms.device_overlap}
    reported = {one.worker_id for one in events if isinstance(one, BlocksStored)}
    names |= {"reused IDs"} if len(set(submitted)) < len(submitted) else set()
    return names | ({"overlap without KV events"} if cached - reported else set())


DEFAULTS = RouterConfig()
TIERS = ("device", "host", "disk", "store")
REJECTED, ABORTED, ANSWERED = "RequestRejected", "RequestAborted", "RouteAnswered"
CAPABILITIES: dict[str, tuple[str, ...]] = {
    "kv": ("mode kv", "overlap device"),
    "round-robin": ("mode round-robin",),
    "random-choice": ("mode random",),
    "power-of-two": ("mode power-of-two",),
    "least-loaded": ("mode least-loaded",),
    "direct": ("mode direct", f"{REJECTED} unknown_worker"),
    "own-policy": ("mode tests.logs.own_policy.CheapestTwo",),
    "temperature": ("mode kv", "temperature 0.7"),
    "lmetric": ("mode kv", "selection_policy lmetric"),
    "overlap-decay": ("decayed",),
    "active-request-weight": ("mode kv", "decode_active_request_weight 2.0"),
    "untracked-prefill": ("no prefill",),
    "no-reuse": ("mode kv", "assume_kv_reuse False"),
    "overrides": ("mode kv", "mode round-robin", "mode least-loaded", "hint override"),
    "tiers": ("overlap host", "overlap disk"),
    "shared-store": ("overlap store", "TierCostsMeasured", "stale True", "store ", "store store-1", "store store-2"),
    "taints": ("taint factor", f"{REJECTED} no_eligible_worker", "hint required_taints"),
    "pinned": (
        *(f"{REJECTED} {reason}" for reason in ("unknown_worker", "contradictory_routing", "no_eligible_worker")),
        *("hint rank", "hint allowed_workers"),
    ),
    "lora": (f"{REJECTED} no_eligible_worker", "adapter", "base model", "adapters of a worker"),
    "cache-namespaces": ("namespace", "no namespace", "overlap device"),
    "dp-ranks": ("rank 0", "rank 1", "rank 2", "rank 4", "rank 5"),
    "sessions-hard": ("session_ttl_s 30.0", "hint session_id"),
    "sessions-soft": ("session_mode soft", "session_ttl_s 30.0", "hint session_id"),
    "queue": (
        *("class default", "class batch", "class short", "waited"),
        *(f"{REJECTED} queue_full", f"{ABORTED} queue_deadline"),
    ),
    "tenants": ("waited", "3 tenants", "weight 3", f"{REJECTED} queue_full", f"{ABORTED} queue_timeout"),
    "busy-thresholds": ("BusyThresholdsSet", f"{REJECTED} busy"),
    "resync": ("CacheResyncRequested", "CacheCleared"),
    "approximate": ("use_kv_events False", "approximate_blocks_max 40", "overlap device"),
    "silent-workers": ("overlap without KV events",),
    "predicted": ("predicted_ttl_s 2.0", "overlap device"),
    "queries": (
        *(f"{ANSWERED} {reason}" for reason in (None, "no_workers", "no_eligible_worker")),
        *("would wait False", "would wait True"),
    ),
    "cancels": (f"{ABORTED} cancelled", "RequestCancelled"),
    "deadlines": (f"{ABORTED} deadline",),
    "redeliveries": (f"{REJECTED} duplicate_id", "reused IDs"),
    "lost-workers": ("WorkerLost", "attempt 2", f"{ABORTED} attempts_exhausted", f"{REJECTED} no_workers"),
    "waiting-for-a-worker": ("WorkerLost", "attempt 2"),
    "suspect-and-draining": ("WorkerSuspect", "WorkerRecovered", "WorkerDraining", "WorkerLost"),
    "take-over": ("2 owners", "1 stale"),
    "snapshots": ("SnapshotTaken", "from the beginning"),
    "from-snapshot": ("SnapshotTaken", "from a snapshot"),
    "output-blocks": ("OutputGrown", "hint expected_output_tokens"),
    "overload": (f"{REJECTED} queue_full", f"{ABORTED} queue_deadline", "BlocksRemoved"),
    "commands": (
        *(f"outcome {status}" for status in ("done", "refused", "left", "timed_out")),
        *(f"CommandSent {reason}" for reason in (None, "unknown_worker", "unknown_pool", "duplicate_id")),
        *(f"{REJECTED} no_eligible_worker", "2 owners"),
    ),
    "undecodable": ("3 undecodable",),
    "encode-stage": (
        *("stage encode", "attempt 3", f"{ABORTED} encode_failed", f"{ABORTED} cancelled", "EncodeFailed"),
        *("TransferFailed", "SnapshotTaken", "media image", "media video"),
    ),
    "disaggregation": (
        *(f"rule {policy}" for policy in ("classic", "isl_bounding", "prefill_load", "isl_or_load", "never")),
        *(f"place {where}" for where in ("always", "never", "long_prompt", "short_prompt", "uncached_prompt")),
        *(f"place {where}" for where in ("prefill_idle", "prefill_busy", "decode_busy")),
        *("stage prefill", "stage decode", "stage aggregated", "RequestHeld", "transferred", "RouteAnswered None"),
    ),
    "disaggregation-failures": (
        *(f"{ABORTED} {reason}" for reason in ("prefill_failed", "prefill_refused", "cancelled")),
        *(f"place {where}" for where in ("failed", "no_prefill_worker", "begun", "always")),
        *(f"KvReleased {reason}" for reason in ("not_fetched", "worker_lost", "lease_over")),
        *("TransferFailed", "attempt 2", "stage encode", "stage prefill", "stage decode", "WorkerLost"),
    ),
    "foreign-records": ("foreign-records",),
}


def test_every_capability_has_a_recording() -> None:
    assert set(CAPABILITIES) == set(SCENARIOS) == {path.stem for path in recordings.ALL}


def kinds_of(path: Path) -> set[tuple[str, type | None]]:
    with closing(SqliteLog.open(path, readonly=True)) as log:
        return {(topic, None if event is None else type(event)) for topic, event in decoded(log)}


def test_representative_recordings_contain_every_type_of_event() -> None:
    representative = [path for path in recordings.ALL if path.stem in recordings.REPRESENTATIVE]
    assert len(representative) == len(recordings.REPRESENTATIVE)
    missing = set().union(*map(kinds_of, recordings.ALL)) - set().union(*map(kinds_of, representative))
    assert not missing


@pytest.mark.parametrize("path", recordings.ALL, ids=lambda path: path.stem)
def test_decisions_of_golden_logs_are_derived_again(path: Path) -> None:
    allowed = {"foreign-records"} & {path.stem}
    (report,) = check_recording(path, allowed, CUSTOM).values()
    assert report.verified == report.decisions > 0
    found = events_of(path)
    missing = {*CAPABILITIES[path.stem]} - traits(found, report)
    assert not missing, f"{path}: does not hold what it is named for; run `make golden`"
    assert path.stat().st_size < BYTES_MAX
    with closing(SqliteLog.open(path, readonly=True)) as log:
        assert log.recording is not None
        assert log.recording.anonymized
    media = [one for event in found if isinstance(event, RequestSubmitted) for one in event.media]
    assert not [one for one in media if one.content or one.mime not in ("image/*", "video/*") or one.digest in DIGESTS]
    kept: list[Any] = [event.prefilled for event in found if isinstance(event, PrefillFinished)]
    kept += [event.encoded for event in found if isinstance(event, EncodeFinished)]
    assert not [one for one in kept if one.descriptor or int(one.checksum, 16)]


@pytest.mark.parametrize("name", ["temperature", "queue", "take-over"])
def test_a_replayed_scenario_makes_the_same_decisions(tmp_path: Path, name: str) -> None:
    out = tmp_path / f"{name}{SUFFIX}"
    asyncio.run(record(name, out))
    assert decided(out) == decided(FOLDER / out.name)


def decided(path: Path) -> list[tuple[str, int, str]]:
    check_recording(path)
    routed = (event for event in events_of(path) if isinstance(event, RequestRouted))
    return [(one.worker_id, one.rank, one.table_digest) for one in routed]


def rewritten(tmp_path: Path, name: str, change: Callable[[Any], Any]) -> Path:
    """Return a golden recording with an edited journal, sealed again. Only its decisions reveal the edit."""

    async def rewrite(record: Record) -> Record:
        if record.topic != DECISIONS.name:
            return record
        return msgspec.structs.replace(record, value=encode(DECISIONS, change(decode(DECISIONS, record.value))))

    async def write() -> None:
        log = SqliteLog.open(FOLDER / f"{name}{SUFFIX}", readonly=True)
        assert log.recording is not None
        writer = RecordingWriter.create(out, msgspec.structs.replace(log.recording, content=""))
        await copy(log, writer, rewrite=rewrite)
        writer.finish()
        log.close()

    out = tmp_path / f"{name}{SUFFIX}"
    asyncio.run(write())
    return out


def test_divergence_message_has_differences_and_both_tables(tmp_path: Path) -> None:
    def raise_cost(record: Any) -> Any:
        if not isinstance(record, RequestRouted) or record.seq != 9:
            return record
        return msgspec.structs.replace(record, terms=msgspec.structs.replace(record.terms, cost=77.5))

    path = rewritten(tmp_path, "kv", raise_cost)
    with pytest.raises(AssertionError) as failed:
        check_recording(path)
    text = str(failed.value)
    assert f"{path}: divergence at journal offset" in text
    assert "terms.cost: recorded 77.5, derived " in text
    assert "applied before: requests" in text


def test_another_core_version_fails_with_a_remedy(tmp_path: Path) -> None:
    def raise_version(record: Any) -> Any:
        if isinstance(record, OwnerClaimed | SnapshotTaken):
            record = msgspec.structs.replace(record, core_version=CORE_VERSION + 1)
        return msgspec.structs.replace(record, release="9.8") if isinstance(record, OwnerClaimed) else record

    path = rewritten(tmp_path, "kv", raise_version)
    expected = rf"OtherRules: .* {CORE_VERSION + 1} .*forebay 9\.8.*Record it again, or verify it with the program"
    with pytest.raises(AssertionError, match=expected) as failed:
        check_recording(path)
    assert isinstance(failed.value.__cause__, OtherRules)


def test_unverified_items_fail_unless_allowed() -> None:
    path = FOLDER / f"foreign-records{SUFFIX}"
    with pytest.raises(AssertionError, match="not verified: 1 foreign-records; if this is expected"):
        check_recording(path)
    check_recording(path, {"foreign-records"})


def test_a_policy_that_is_not_allowed_is_named_and_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, CheapestTwo.__module__)
    with pytest.raises(AssertionError, match=r"pass --allow-policy tests\.logs\.own_policy\.CheapestTwo, or its class"):
        check_recording(FOLDER / f"own-policy{SUFFIX}")
    assert CheapestTwo.__module__ not in sys.modules


def test_a_changed_byte_is_reported_as_damage(tmp_path: Path) -> None:
    path = tmp_path / "damaged.rec"
    data = bytearray((FOLDER / f"kv{SUFFIX}").read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(LogError):
        check_recording(path)
