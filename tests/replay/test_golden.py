"""Every capability has a verified recording in `tests/logs`; errors of `check_recording`."""

import asyncio
import sys
from collections.abc import Callable
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
from forebay.events.kv import BlocksRemoved, BlocksStored, CacheCleared
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
from tests.logs.encoding import DIGESTS
from tests.logs.own_policy import CUSTOM, CheapestTwo
from tests.logs.record import FOLDER, SCENARIOS, SUFFIX, record

RECORDINGS = sorted(FOLDER.glob(f"*{SUFFIX}"))
BYTES_MAX = 200_000
READ_MAX = 100_000


class Seen:
    """What a recording holds."""

    def __init__(self, path: Path, report: VerifyReport) -> None:
        self.report = report
        log = SqliteLog.open(path, readonly=True)
        assert log.recording is not None
        self.contents = log.recording
        self.undecodable = 0
        self.events: list[Event] = []
        for topic in (*INPUTS, DECISIONS):
            for extent in self.contents.extents:
                if extent.topic == topic.name:
                    for row in log.records(topic.name, extent.partition, extent.first, READ_MAX):
                        event = decode_or_none(topic, row.value)
                        self.undecodable += event is None
                        self.events += [] if event is None else [event]
        log.close()

    def all(self, kind: type[Any], **fields: Any) -> list[Any]:
        """The events of a kind with these fields."""
        found = [event for event in self.events if isinstance(event, kind)]
        return [event for event in found if all(getattr(event, name) == value for name, value in fields.items())]

    def router(self, **fields: Any) -> bool:
        """Whether a pool was configured so, and decisions were made by it."""
        pools = [pool.router for pool in self.all(PoolConfigured)]
        return any(all(getattr(one, name) == value for name, value in fields.items()) for one in pools)

    def mode(self, mode: str) -> bool:
        """Whether requests were routed by a mode."""
        return len(self.all(RequestRouted, mode=mode)) > 5

    def term(self, wanted: Callable[[CostTerms], object]) -> bool:
        """Whether the terms of a winner are so."""
        return any(wanted(one.terms) for one in self.all(RequestRouted))

    def refused(self, *reasons: str) -> bool:
        """Whether requests were refused for each of these reasons."""
        return {one.reason for one in self.all(RequestRejected)} >= set(reasons)

    def given_up(self, *reasons: str) -> bool:
        """Whether accepted requests were given up for each of these reasons."""
        return {one.reason for one in self.all(RequestAborted)} >= set(reasons)

    def hinted(self, wanted: Callable[[Any], object]) -> bool:
        """Whether a request had such hints."""
        return any(wanted(one.routing) for one in self.all(RequestSubmitted))

    def retried(self) -> bool:
        """Whether requests went to a second worker."""
        return any(one.attempt > 1 for one in self.all(RequestRouted))


def reused_ids(seen: Seen) -> bool:
    ids = [one.request_id for one in seen.all(RequestSubmitted)]
    return len(set(ids)) < len(ids)


def outcomes(seen: Seen) -> set[str]:
    return {one.status for ended in seen.all(CommandEnded) for one in ended.outcomes}


def cached_by_namespace(seen: Seen) -> bool:
    """A prompt in another namespace finds nothing, later ones find what was said there."""
    named = {one.request_id: one.cache_namespace for one in seen.all(RequestSubmitted)}
    overlaps: dict[str, list[int]] = {}
    for one in seen.all(RequestRouted):
        overlaps.setdefault(named[one.request_id], []).append(one.terms.device_overlap)
    return len(overlaps) == 3 and all(found[0] == 0 and found[-1] > 0 for found in overlaps.values())


def waited_and_ordered(seen: Seen) -> bool:
    held = {one.queue_class for one in seen.all(RequestHeld)}
    return held == {"default", "batch", "short"} and any(one.waited_us for one in seen.all(RequestRouted))


def places(seen: Seen) -> set[str]:
    return {one.prefill.reason for one in seen.all(RequestRouted) if one.prefill is not None}


def prefilled_elsewhere(seen: Seen) -> bool:
    """Every rule had its say, questions were answered by them, and nothing of the KV is left in the recording."""
    kept = [one.prefilled for one in seen.all(PrefillFinished)]
    fetched = [one for one in seen.all(FirstTokenEmitted) if one.transferred_bytes]
    rules = {one.disagg.policy for one in seen.all(DisaggregationSet)}
    return (
        rules == {"classic", "isl_bounding", "prefill_load", "isl_or_load", "never"}
        and places(seen)
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
        and {one.stage for one in seen.all(RouteAnswered)} == {"prefill", "aggregated"}
        and len(kept) == len(seen.all(RequestRouted, stage="decode")) == len(fetched)
        and all(one.descriptor == b"" and one.checksum == hex_digest(0) and one.bytes for one in kept)
        and bool(seen.all(RequestHeld))
    )


def encoded_first(seen: Seen) -> bool:
    """Images go to encoders first, to another one when that fails, and nothing of them is left in the recording."""
    routed = seen.all(RequestRouted, stage="encode")
    media = [one for event in seen.all(RequestSubmitted) for one in event.media]
    lies = [event.encoded for event in seen.all(EncodeFinished)]
    return (
        {one.pool for one in routed} == {"encoders"}
        and {one.attempt for one in routed} == {1, 2, 3}
        and seen.given_up("encode_failed", "cancelled")
        and bool(seen.all(EncodeFailed) and seen.all(TransferFailed) and seen.all(SnapshotTaken))
        and {one.kind for one in media} == {"image", "video"}
        and not any(one.content or one.mime not in ("image/*", "video/*") for one in media)
        and not any(one.descriptor or int(one.checksum, 16) for one in lies)
        and not {one.digest for one in media} & set(DIGESTS)
    )


CAPABILITIES: dict[str, Callable[[Seen], object]] = {
    "kv": lambda seen: seen.mode("kv") and seen.term(lambda one: one.device_overlap),
    "round-robin": lambda seen: seen.mode("round-robin"),
    "random-choice": lambda seen: seen.mode("random"),
    "power-of-two": lambda seen: seen.mode("power-of-two"),
    "least-loaded": lambda seen: seen.mode("least-loaded"),
    "direct": lambda seen: seen.mode("direct") and seen.refused("unknown_worker"),
    "own-policy": lambda seen: seen.mode("tests.logs.own_policy.CheapestTwo"),
    "temperature": lambda seen: seen.router(temperature=0.7) and seen.mode("kv"),
    "lmetric": lambda seen: seen.router(selection_policy="lmetric") and seen.mode("kv"),
    "overlap-decay": lambda seen: seen.term(lambda one: 0 < one.overlap_credit < one.device_overlap),
    "active-request-weight": lambda seen: seen.router(decode_active_request_weight=2.0) and seen.mode("kv"),
    "untracked-prefill": lambda seen: seen.term(lambda one: not one.prefill_blocks),
    "no-reuse": lambda seen: seen.router(assume_kv_reuse=False) and seen.mode("kv"),
    "overrides": lambda seen: (
        {"kv", "round-robin", "least-loaded"} == {one.mode for one in seen.all(RequestRouted)}
        and seen.hinted(lambda hints: hints.override and hints.override.temperature)
    ),
    "tiers": lambda seen: seen.term(lambda one: one.host_overlap) and seen.term(lambda one: one.disk_overlap),
    "taints": lambda seen: (
        seen.term(lambda one: one.taint_factor != 1.0)
        and seen.refused("no_eligible_worker")
        and seen.hinted(lambda hints: hints.required_taints)
    ),
    "pinned": lambda seen: (
        seen.refused("unknown_worker", "contradictory_routing", "no_eligible_worker")
        and seen.hinted(lambda hints: hints.rank == 1)
        and seen.hinted(lambda hints: len(hints.allowed_workers) > 1)
    ),
    "lora": lambda seen: (
        seen.refused("no_eligible_worker")
        and len({one.lora_name for one in seen.all(RequestSubmitted)}) == 4
        and any(one.spec.loras for one in seen.all(WorkerJoined))
    ),
    "cache-namespaces": cached_by_namespace,
    "dp-ranks": lambda seen: {one.rank for one in seen.all(RequestRouted)} >= {0, 1, 2, 4, 5},
    "sessions-hard": lambda seen: (
        seen.router(session_mode="hard", session_ttl_s=30.0) and seen.hinted(lambda hints: hints.session_id)
    ),
    "sessions-soft": lambda seen: (
        seen.router(session_mode="soft", session_ttl_s=30.0) and seen.hinted(lambda hints: hints.session_id)
    ),
    "queue": lambda seen: waited_and_ordered(seen) and seen.refused("queue_full") and seen.given_up("queue_deadline"),
    "busy-thresholds": lambda seen: seen.all(BusyThresholdsSet) and seen.refused("busy"),
    "resync": lambda seen: seen.all(CacheResyncRequested) and seen.all(CacheCleared),
    "approximate": lambda seen: (
        seen.router(use_kv_events=False, approximate_blocks_max=40) and seen.term(lambda one: one.device_overlap)
    ),
    "silent-workers": lambda seen: (
        any(one.terms.device_overlap for one in seen.all(RequestRouted) if one.worker_id in ("w2", "w3"))
        and not any(one.worker_id in ("w2", "w3") for one in seen.all(BlocksStored))
    ),
    "predicted": lambda seen: seen.router(predicted_ttl_s=2.0) and seen.term(lambda one: one.device_overlap),
    "queries": lambda seen: (
        {None, "no_workers", "no_eligible_worker"} == {one.reason for one in seen.all(RouteAnswered)}
        and {False, True} == {one.would_wait for one in seen.all(RouteAnswered)}
    ),
    "cancels": lambda seen: seen.given_up("cancelled") and seen.all(RequestCancelled),
    "deadlines": lambda seen: len(seen.all(RequestAborted, reason="deadline")) == 8,
    "redeliveries": lambda seen: seen.refused("duplicate_id") and reused_ids(seen),
    "lost-workers": lambda seen: (
        seen.all(WorkerLost) and seen.retried() and seen.given_up("attempts_exhausted") and seen.refused("no_workers")
    ),
    "waiting-for-a-worker": lambda seen: seen.all(WorkerLost) and seen.retried(),
    "suspect-and-draining": lambda seen: (
        seen.all(WorkerSuspect) and seen.all(WorkerRecovered) and seen.all(WorkerDraining) and seen.all(WorkerLost)
    ),
    "take-over": lambda seen: len(seen.all(OwnerClaimed)) == 2 and seen.report.void == 1,
    "snapshots": lambda seen: len(seen.all(SnapshotTaken)) == 3 and seen.report.start == 0,
    "from-snapshot": lambda seen: seen.report.start > 0 and len(seen.all(SnapshotTaken)) == 3,
    "output-blocks": lambda seen: seen.all(OutputGrown) and seen.hinted(lambda hints: hints.expected_output_tokens),
    "overload": lambda seen: seen.refused("queue_full") and seen.given_up("queue_deadline") and seen.all(BlocksRemoved),
    "commands": lambda seen: (
        {"done", "refused", "left", "timed_out"} == outcomes(seen)
        and {None, "unknown_worker", "unknown_pool", "duplicate_id"} == {one.reason for one in seen.all(CommandSent)}
        and {one.worker_id for one in seen.all(RequestRouted)} >= {"w0", "w1", "w2"}
        and seen.refused("no_eligible_worker")
        and len(seen.all(OwnerClaimed)) == 2
    ),
    "undecodable": lambda seen: seen.undecodable == 3,
    "encode-stage": encoded_first,
    "disaggregation": prefilled_elsewhere,
    "disaggregation-failures": lambda seen: (
        seen.given_up("prefill_failed", "prefill_refused", "cancelled")
        and {"failed", "no_prefill_worker", "begun", "always"} == places(seen)
        and seen.all(TransferFailed)
        and {one.stage for one in seen.all(RequestRouted) if one.attempt > 1} == {"prefill", "decode", "aggregated"}
        and {one.stage for one in seen.all(RequestRouted)} >= {"encode"}
        and len(seen.all(WorkerLost)) > 5
        and {one.reason for one in seen.all(KvReleased)} >= {"not_fetched", "worker_lost", "lease_over"}
    ),
    "foreign-records": lambda seen: seen.report.unverified == {"foreign-records": 1},
}


def test_every_capability_has_a_recording() -> None:
    assert set(CAPABILITIES) == set(SCENARIOS) == {path.stem for path in RECORDINGS}


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_recorded_decisions(path: Path) -> None:
    allowed = {"foreign-records"} & {path.stem}
    (report,) = check_recording(path, allowed, CUSTOM).values()
    assert report.verified == report.decisions > 0
    seen = Seen(path, report)
    assert seen.contents.anonymized
    assert CAPABILITIES[path.stem](seen), f"{path}: does not hold what it is named for; run `make golden`"
    assert path.stat().st_size < BYTES_MAX


@pytest.mark.parametrize("name", ["temperature", "queue", "take-over"])
def test_a_scenario_played_again_decides_the_same(tmp_path: Path, name: str) -> None:
    out = tmp_path / f"{name}{SUFFIX}"
    asyncio.run(record(name, out))
    assert decided(out) == decided(FOLDER / out.name)


def decided(path: Path) -> list[tuple[str, int, str]]:
    (report,) = check_recording(path).values()
    return [(one.worker_id, one.rank, one.table_digest) for one in Seen(path, report).all(RequestRouted)]


def rewritten(tmp_path: Path, name: str, change: Callable[[Any], Any]) -> Path:
    """A golden recording whose journal was changed, and sealed again: nothing but its decisions can tell."""

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
    def dearer(record: Any) -> Any:
        if not isinstance(record, RequestRouted) or record.seq != 9:
            return record
        return msgspec.structs.replace(record, terms=msgspec.structs.replace(record.terms, cost=77.5))

    path = rewritten(tmp_path, "kv", dearer)
    with pytest.raises(AssertionError) as failed:
        check_recording(path)
    text = str(failed.value)
    assert f"{path}: divergence at journal offset" in text
    assert "terms.cost: recorded 77.5, derived " in text
    assert "    derived  w" in text
    assert "    recorded w" in text
    assert "applied before: requests" in text


def test_other_rules_fail_with_a_remedy(tmp_path: Path) -> None:
    def newer(record: Any) -> Any:
        if isinstance(record, OwnerClaimed | SnapshotTaken):
            return msgspec.structs.replace(record, core_version=CORE_VERSION + 1)
        return record

    path = rewritten(tmp_path, "kv", newer)
    expected = rf"OtherRules: .*version {CORE_VERSION + 1} .*Record it again, or verify it with the program"
    with pytest.raises(AssertionError, match=expected) as failed:
        check_recording(path)
    assert isinstance(failed.value.__cause__, OtherRules)


def test_what_cannot_be_verified_fails_unless_it_is_allowed() -> None:
    path = FOLDER / f"foreign-records{SUFFIX}"
    with pytest.raises(AssertionError, match="not verified: 1 foreign-records; if this is expected"):
        check_recording(path)
    check_recording(path, {"foreign-records"})


def test_a_policy_that_is_not_allowed_is_named_and_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, CheapestTwo.__module__)
    with pytest.raises(AssertionError, match=r"pass --allow-policy tests\.logs\.own_policy\.CheapestTwo, or its class"):
        check_recording(FOLDER / f"own-policy{SUFFIX}")
    assert CheapestTwo.__module__ not in sys.modules


def test_a_changed_byte_is_no_failed_decision(tmp_path: Path) -> None:
    path = tmp_path / "damaged.rec"
    data = bytearray((FOLDER / f"kv{SUFFIX}").read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(LogError):
        check_recording(path)
