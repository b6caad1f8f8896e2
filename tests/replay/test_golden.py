"""Every capability has a verified recording in `tests/logs`; errors of `check_recording`."""

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from forebay.core.world import CORE_VERSION
from forebay.events.base import Event, hex_digest
from forebay.events.codec import decode, encode
from forebay.events.control import BusyThresholdsSet, DisaggregationSet, PoolConfigured
from forebay.events.decisions import (
    CacheResyncRequested,
    CommandEnded,
    CommandSent,
    CostTerms,
    KvReleased,
    OwnerClaimed,
    RequestAborted,
    RequestHeld,
    RequestRejected,
    RequestRouted,
    RouteAnswered,
    SnapshotTaken,
)
from forebay.events.fleet import WorkerDraining, WorkerJoined, WorkerLost, WorkerRecovered, WorkerSuspect
from forebay.events.kv import BlocksRemoved, BlocksStored, CacheCleared, StoreBlocksRemoved
from forebay.events.metrics import TierCostsMeasured
from forebay.events.progress import (
    EncodeFailed,
    EncodeFinished,
    FirstTokenEmitted,
    OutputGrown,
    PrefillFinished,
    TransferFailed,
)
from forebay.events.requests import RequestCancelled, RequestSubmitted
from forebay.events.topics import DECISIONS, INPUTS
from forebay.replay.record.slice import copy
from forebay.replay.verify.golden import check_recording
from forebay.replay.verify.verify import VerifyReport
from forebay.transport.base import LogError, Record
from forebay.transport.history.reader import OtherRules, decode_or_none
from forebay.transport.recording.writer import RecordingWriter
from forebay.transport.sqlite.log import SqliteLog
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


class RecordingContent:
    """Content of a recording."""

    def __init__(self, path: Path, report: VerifyReport) -> None:
        self.report = report
        log = SqliteLog.open(path, readonly=True)
        assert log.recording is not None
        self.contents = log.recording
        found = [event for _, event in decoded(log)]
        self.events = [event for event in found if event is not None]
        self.undecodable = len(found) - len(self.events)
        log.close()

    def all(self, kind: type[Any], **fields: Any) -> list[Any]:
        """Return the events of a kind with these fields."""
        found = [event for event in self.events if isinstance(event, kind)]
        return [event for event in found if all(getattr(event, name) == value for name, value in fields.items())]

    def router(self, **fields: Any) -> bool:
        """Return whether decisions were made with these router settings."""
        pools = [pool.router for pool in self.all(PoolConfigured)]
        return any(all(getattr(one, name) == value for name, value in fields.items()) for one in pools)

    def mode(self, mode: str) -> bool:
        """Return whether requests were routed by `mode`."""
        return len(self.all(RequestRouted, mode=mode)) > 5

    def term(self, wanted: Callable[[CostTerms], object]) -> bool:
        """Return whether the cost terms of a selected worker match."""
        return any(wanted(one.terms) for one in self.all(RequestRouted))

    def rejected(self, *reasons: str) -> bool:
        """Return whether requests were rejected for each of these reasons."""
        return {one.reason for one in self.all(RequestRejected)} >= set(reasons)

    def aborted(self, *reasons: str) -> bool:
        """Return whether accepted requests were aborted for each of these reasons."""
        return {one.reason for one in self.all(RequestAborted)} >= set(reasons)

    def hinted(self, wanted: Callable[[Any], object]) -> bool:
        """Return whether the hints of a request match."""
        return any(wanted(one.routing) for one in self.all(RequestSubmitted))

    def retried(self) -> bool:
        """Return whether requests were dispatched to a second worker."""
        return any(one.attempt > 1 for one in self.all(RequestRouted))


def reused_ids(content: RecordingContent) -> bool:
    ids = [one.request_id for one in content.all(RequestSubmitted)]
    return len(set(ids)) < len(ids)


def outcomes(content: RecordingContent) -> set[str]:
    return {one.status for ended in content.all(CommandEnded) for one in ended.outcomes}


def cached_by_namespace(content: RecordingContent) -> bool:
    """Return whether prompts match only blocks of their own cache namespace."""
    named = {one.request_id: one.cache_namespace for one in content.all(RequestSubmitted)}
    overlaps: dict[str, list[int]] = {}
    for one in content.all(RequestRouted):
        overlaps.setdefault(named[one.request_id], []).append(one.terms.device_overlap)
    return len(overlaps) == 3 and all(found[0] == 0 and found[-1] > 0 for found in overlaps.values())


def queued_by_priority(content: RecordingContent) -> bool:
    held = {one.queue_class for one in content.all(RequestHeld)}
    return held == {"default", "batch", "short"} and any(one.waited_us for one in content.all(RequestRouted))


def places(content: RecordingContent) -> set[str]:
    return {one.prefill.reason for one in content.all(RequestRouted) if one.prefill is not None}


def prefilled_remotely(content: RecordingContent) -> bool:
    """Return whether every disaggregation rule decided, route queries applied it, and all KV was released."""
    kept = [one.prefilled for one in content.all(PrefillFinished)]
    fetched = [one for one in content.all(FirstTokenEmitted) if one.transferred_bytes]
    rules = {one.disagg.policy for one in content.all(DisaggregationSet)}
    return (
        rules == {"classic", "isl_bounding", "prefill_load", "isl_or_load", "never"}
        and places(content)
        >= {
            "always",
            "never",
            "long_prompt",
            "short_prompt",
            "uncached_prompt",
            "prefill_idle",
            "prefill_busy",
            "decode_busy",
        }
        and {one.stage for one in content.all(RouteAnswered)} == {"prefill", "aggregated"}
        and len(kept) == len(content.all(RequestRouted, stage="decode")) == len(fetched)
        and all(one.descriptor == b"" and one.checksum == hex_digest(0) and one.bytes for one in kept)
        and bool(content.all(RequestHeld))
    )


def encoded_first(content: RecordingContent) -> bool:
    """Return whether images were encoded first, encodes were retried, and all embeddings were released."""
    routed = content.all(RequestRouted, stage="encode")
    media = [one for event in content.all(RequestSubmitted) for one in event.media]
    lies = [event.encoded for event in content.all(EncodeFinished)]
    return (
        {one.pool for one in routed} == {"encoders"}
        and {one.attempt for one in routed} == {1, 2, 3}
        and content.aborted("encode_failed", "cancelled")
        and bool(content.all(EncodeFailed) and content.all(TransferFailed) and content.all(SnapshotTaken))
        and {one.kind for one in media} == {"image", "video"}
        and not any(one.content or one.mime not in ("image/*", "video/*") for one in media)
        and not any(one.descriptor or int(one.checksum, 16) for one in lies)
        and not {one.digest for one in media} & set(DIGESTS)
    )


CAPABILITIES: dict[str, Callable[[RecordingContent], object]] = {
    "kv": lambda content: content.mode("kv") and content.term(lambda one: one.device_overlap),
    "round-robin": lambda content: content.mode("round-robin"),
    "random-choice": lambda content: content.mode("random"),
    "power-of-two": lambda content: content.mode("power-of-two"),
    "least-loaded": lambda content: content.mode("least-loaded"),
    "direct": lambda content: content.mode("direct") and content.rejected("unknown_worker"),
    "own-policy": lambda content: content.mode("tests.logs.own_policy.CheapestTwo"),
    "temperature": lambda content: content.router(temperature=0.7) and content.mode("kv"),
    "lmetric": lambda content: content.router(selection_policy="lmetric") and content.mode("kv"),
    "overlap-decay": lambda content: content.term(lambda one: 0 < one.overlap_credit < one.device_overlap),
    "active-request-weight": lambda content: content.router(decode_active_request_weight=2.0) and content.mode("kv"),
    "untracked-prefill": lambda content: content.term(lambda one: not one.prefill_blocks),
    "no-reuse": lambda content: content.router(assume_kv_reuse=False) and content.mode("kv"),
    "overrides": lambda content: (
        {"kv", "round-robin", "least-loaded"} == {one.mode for one in content.all(RequestRouted)}
        and content.hinted(lambda hints: hints.override and hints.override.temperature)
    ),
    "tiers": lambda content: content.term(lambda one: one.host_overlap) and content.term(lambda one: one.disk_overlap),
    "shared-store": lambda content: (
        content.term(lambda one: one.store_overlap)
        and content.all(TierCostsMeasured)
        and any(one.stale for one in content.all(StoreBlocksRemoved))
        and {one.spec.kv_store for one in content.all(WorkerJoined)} == {"", "store-1", "store-2"}
    ),
    "taints": lambda content: (
        content.term(lambda one: one.taint_factor != 1.0)
        and content.rejected("no_eligible_worker")
        and content.hinted(lambda hints: hints.required_taints)
    ),
    "pinned": lambda content: (
        content.rejected("unknown_worker", "contradictory_routing", "no_eligible_worker")
        and content.hinted(lambda hints: hints.rank == 1)
        and content.hinted(lambda hints: len(hints.allowed_workers) > 1)
    ),
    "lora": lambda content: (
        content.rejected("no_eligible_worker")
        and len({one.lora_name for one in content.all(RequestSubmitted)}) == 4
        and any(one.spec.loras for one in content.all(WorkerJoined))
    ),
    "cache-namespaces": cached_by_namespace,
    "dp-ranks": lambda content: {one.rank for one in content.all(RequestRouted)} >= {0, 1, 2, 4, 5},
    "sessions-hard": lambda content: (
        content.router(session_mode="hard", session_ttl_s=30.0) and content.hinted(lambda hints: hints.session_id)
    ),
    "sessions-soft": lambda content: (
        content.router(session_mode="soft", session_ttl_s=30.0) and content.hinted(lambda hints: hints.session_id)
    ),
    "queue": lambda content: (
        queued_by_priority(content) and content.rejected("queue_full") and content.aborted("queue_deadline")
    ),
    "busy-thresholds": lambda content: content.all(BusyThresholdsSet) and content.rejected("busy"),
    "resync": lambda content: content.all(CacheResyncRequested) and content.all(CacheCleared),
    "approximate": lambda content: (
        content.router(use_kv_events=False, approximate_blocks_max=40) and content.term(lambda one: one.device_overlap)
    ),
    "silent-workers": lambda content: (
        any(one.terms.device_overlap for one in content.all(RequestRouted) if one.worker_id in ("w2", "w3"))
        and not any(one.worker_id in ("w2", "w3") for one in content.all(BlocksStored))
    ),
    "predicted": lambda content: content.router(predicted_ttl_s=2.0) and content.term(lambda one: one.device_overlap),
    "queries": lambda content: (
        {None, "no_workers", "no_eligible_worker"} == {one.reason for one in content.all(RouteAnswered)}
        and {False, True} == {one.would_wait for one in content.all(RouteAnswered)}
    ),
    "cancels": lambda content: content.aborted("cancelled") and content.all(RequestCancelled),
    "deadlines": lambda content: len(content.all(RequestAborted, reason="deadline")) == 8,
    "redeliveries": lambda content: content.rejected("duplicate_id") and reused_ids(content),
    "lost-workers": lambda content: (
        content.all(WorkerLost)
        and content.retried()
        and content.aborted("attempts_exhausted")
        and content.rejected("no_workers")
    ),
    "waiting-for-a-worker": lambda content: content.all(WorkerLost) and content.retried(),
    "suspect-and-draining": lambda content: (
        content.all(WorkerSuspect)
        and content.all(WorkerRecovered)
        and content.all(WorkerDraining)
        and content.all(WorkerLost)
    ),
    "take-over": lambda content: len(content.all(OwnerClaimed)) == 2 and content.report.void == 1,
    "snapshots": lambda content: len(content.all(SnapshotTaken)) == 2 and content.report.start == 0,
    "from-snapshot": lambda content: content.report.start > 0 and len(content.all(SnapshotTaken)) == 2,
    "output-blocks": lambda content: (
        content.all(OutputGrown) and content.hinted(lambda hints: hints.expected_output_tokens)
    ),
    "overload": lambda content: (
        content.rejected("queue_full") and content.aborted("queue_deadline") and content.all(BlocksRemoved)
    ),
    "commands": lambda content: (
        {"done", "refused", "left", "timed_out"} == outcomes(content)
        and {None, "unknown_worker", "unknown_pool", "duplicate_id"} == {one.reason for one in content.all(CommandSent)}
        and {one.worker_id for one in content.all(RequestRouted)} >= {"w0", "w1", "w2"}
        and content.rejected("no_eligible_worker")
        and len(content.all(OwnerClaimed)) == 2
    ),
    "undecodable": lambda content: content.undecodable == 3,
    "encode-stage": encoded_first,
    "disaggregation": prefilled_remotely,
    "disaggregation-failures": lambda content: (
        content.aborted("prefill_failed", "prefill_refused", "cancelled")
        and {"failed", "no_prefill_worker", "begun", "always"} == places(content)
        and content.all(TransferFailed)
        and {one.stage for one in content.all(RequestRouted) if one.attempt > 1} == {"prefill", "decode", "aggregated"}
        and {one.stage for one in content.all(RequestRouted)} >= {"encode"}
        and len(content.all(WorkerLost)) > 5
        and {one.reason for one in content.all(KvReleased)} >= {"not_fetched", "worker_lost", "lease_over"}
    ),
    "foreign-records": lambda content: content.report.unverified == {"foreign-records": 1},
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
def test_recorded_decisions(path: Path) -> None:
    allowed = {"foreign-records"} & {path.stem}
    (report,) = check_recording(path, allowed, CUSTOM).values()
    assert report.verified == report.decisions > 0
    content = RecordingContent(path, report)
    assert content.contents.anonymized
    assert CAPABILITIES[path.stem](content), f"{path}: does not hold what it is named for; run `make golden`"
    assert path.stat().st_size < BYTES_MAX


@pytest.mark.parametrize("name", ["temperature", "queue", "take-over"])
def test_a_replayed_scenario_makes_the_same_decisions(tmp_path: Path, name: str) -> None:
    out = tmp_path / f"{name}{SUFFIX}"
    asyncio.run(record(name, out))
    assert decided(out) == decided(FOLDER / out.name)


def decided(path: Path) -> list[tuple[str, int, str]]:
    (report,) = check_recording(path).values()
    return [(one.worker_id, one.rank, one.table_digest) for one in RecordingContent(path, report).all(RequestRouted)]


def rewritten(tmp_path: Path, name: str, change: Callable[[Any], Any]) -> Path:
    """Return a golden recording with an edited journal, sealed again. Only its decisions reveal the edit."""

    def rewrite(record: Record) -> Record:
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
            return msgspec.structs.replace(record, core_version=CORE_VERSION + 1)
        return record

    path = rewritten(tmp_path, "kv", raise_version)
    expected = rf"OtherRules: .*version {CORE_VERSION + 1} .*Record it again, or verify it with the program"
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
