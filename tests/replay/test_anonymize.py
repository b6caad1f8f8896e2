"""Anonymised recordings contain no client content, and their decisions are unchanged."""

import asyncio
import random
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from xxhash import xxh3_64_intdigest

from forebay.core.routing.policies import RoutingRequest, RoutingWorld
from forebay.core.state.submitted_request import id_hash
from forebay.core.world import CORE_VERSION
from forebay.events.base import unpack_u64
from forebay.events.codec import DecodeError, decode, encode
from forebay.events.decisions import OwnerClaimed, RequestAborted, RequestRejected, RequestRouted
from forebay.events.fleet import WorkerLost
from forebay.events.requests import RequestSubmitted, RoutingHints
from forebay.events.snapshots import SnapshotChunk
from forebay.events.topics import DECISIONS, INPUTS, REQUESTS, SNAPSHOTS, Topic
from forebay.events.versions import EVENTS_VERSION
from forebay.replay.anonymize.anonymize import Anonymized, AnonymousLog, record_anonymized
from forebay.replay.anonymize.masks import HashMask, NotAnonymizable
from forebay.replay.read_only import SliceLog
from forebay.replay.record.slice import Window, contents_of, slice_of
from forebay.replay.verify.verify import VerifyReport, verify
from forebay.transport.base import Draft, Log, LogError
from forebay.transport.recording.manifest import Extent
from forebay.transport.recording.writer import part_of
from forebay.transport.sqlite.log import LogUnusable, SqliteLog
from tests.core.worlds import PROMPTS, joined, request, said_of
from tests.depth import sampled
from tests.replay.owner_histories import GARBAGE, WrittenDriver, dense_history, log_with, owner_histories, played

KEY = bytes(range(32))
READ_MAX = 100_000
WHOLE = Window()


async def copied(log: Log) -> SqliteLog:
    copy = SqliteLog.open(None)
    for topic in (*INPUTS, SNAPSHOTS, DECISIONS):
        for record in await log.read(topic.name, 0, 0, READ_MAX):
            await copy.append([Draft(topic.name, 0, record.value, record.key, record.headers)])
    return copy


def events(log: SqliteLog, topic: Topic) -> list[Any]:
    found = []
    begin = next((one.first for one in log.recording.extents if one.topic == topic.name), 0) if log.recording else 0
    for record in log.records(topic.name, 0, begin, READ_MAX):
        try:
            found.append(decode(topic, record.value))
        except DecodeError:
            found.append(None)
    return found


async def written(log: SqliteLog, out: Path, window: Window = WHOLE, key: bytes | None = KEY) -> Anonymized:
    slices = [await slice_of(log, "m", 0, window)]
    contents = await contents_of(log, slices, namespace="forebay", source="log", asked={}, anonymized=True)
    return await record_anonymized(log, out, contents, key=key, custom=CUSTOM)


def without_digests(report: VerifyReport) -> VerifyReport:
    """Remove what depends on request IDs: digests of the decision log and of states, and foreign progress."""
    foreign = [msgspec.structs.replace(one, about="") for one in report.foreign_progress]
    return msgspec.structs.replace(report, digest="", state="", unknown_event="", foreign_progress=foreign)


async def assert_same(log: SqliteLog) -> None:
    before = await verify(log, custom=CUSTOM)
    assert before.divergence is None, before
    copy = await copied(await AnonymousLog.open(log, key=KEY, custom=CUSTOM))
    after = await verify(copy, custom=CUSTOM)
    assert after.divergence is None, after
    assert without_digests(before) == without_digests(after)
    routed = [[one for one in events(each, DECISIONS) if isinstance(one, RequestRouted)] for each in (log, copy)]
    assert [[(one.worker_id, one.rank, one.table_digest) for one in each] for each in routed] == [
        [(one.worker_id, one.rank, one.table_digest) for one in routed[0]]
    ] * 2
    log.close()
    copy.close()


@given(owner_histories)
async def test_every_decision_is_derived_again_after_anonymising(history: list[tuple[str, Any]]) -> None:
    await assert_same(await log_with(played(history)))


@pytest.mark.parametrize("seed", sampled(range(24), 6))
async def test_long_histories_verify_after_anonymising(seed: int) -> None:
    drive = played(dense_history(seed))
    assert len(drive.decided) > 40
    await assert_same(await log_with(drive))


@pytest.mark.parametrize("seed", sampled(range(6), 2))
async def test_further_attempts_under_a_temperature_come_out_the_same(seed: int) -> None:
    draw = random.Random(seed)
    drive = WrittenDriver().fleet("a", "b", "c", temperature=1.0)
    for number in range(60):
        drive("requests", request(f"r{number}", PROMPTS[number % 3], nonce=number))
        if number % 4 == 0:
            name = draw.choice("abc")
            drive("fleet", WorkerLost(owner_epoch=0, worker_id=name, worker_epoch=drive.epoch(name)))
            drive("fleet", joined(name))
        if number % 3 == 0 and (one := drive.world.requests.get(f"r{number // 2}")) is not None:
            drive("progress", said_of(one, "finish", 0))
    assert len([one for one in drive.decided if isinstance(one, RequestRouted) and one.attempt > 1]) > 20
    await assert_same(await log_with(drive))


async def test_anonymised_log_is_read_only() -> None:
    log = await log_with(content_history(8))
    anonymous = await AnonymousLog.open(log, key=KEY)
    with pytest.raises(LogError, match="read-only"):
        await anonymous.append([])
    with pytest.raises(LogError, match="read-only"):
        anonymous.append_soon([])
    with pytest.raises(LogError, match="cannot be tailed"):
        anonymous.tail(REQUESTS.name, 0, 0, asyncio.Event())
    with pytest.raises(LogError, match="does not contain topic tokens"):
        await anonymous.read("tokens", 0, 0, 1)
    # Reading the journal in any order gives the same records.
    records = await anonymous.read(DECISIONS.name, 0, 0, READ_MAX)
    assert await anonymous.read(DECISIONS.name, 0, 7, 3) == records[7:10]
    assert await anonymous.read(DECISIONS.name, 0, 3, 2) == records[3:5]
    log.close()


async def test_an_anonymised_slice_ends_where_the_slice_ends() -> None:
    log = await log_with(content_history(9))
    cut = SliceLog(log, [Extent(REQUESTS.name, 0, 5, 9)])
    assert [await cut.begin(REQUESTS.name, 0), await cut.end(REQUESTS.name, 0)] == [5, 9]
    assert [record.offset for record in await cut.read(REQUESTS.name, 0, 6, 100)] == [6, 7, 8]
    assert await cut.read(REQUESTS.name, 0, 9, 100) == []
    assert [await cut.begin(DECISIONS.name, 0), await cut.end(DECISIONS.name, 0)] == [0, 0]
    with pytest.raises(LogError, match="requests/0: the slice begins at offset 5, not 4"):
        await cut.read(REQUESTS.name, 0, 4, 1)
    log.close()


async def test_equal_values_stay_equal(tmp_path: Path) -> None:
    """Redelivered requests, different requests with the same id, and sessions keep their equality."""
    drive = WrittenDriver().fleet("a", "b", session_ttl_s=10.0)
    for number, name in enumerate(("one", "two", "one", "one")):
        hints = RoutingHints(session_id=f"s{number % 2}")
        drive("requests", request(name, PROMPTS[number % 2], nonce=number // 3, routing=hints))
    log = await log_with(drive)
    anonymous = await copied(await AnonymousLog.open(log, key=KEY))
    before, after = (
        [one for one in events(each, REQUESTS) if isinstance(one, RequestSubmitted)] for each in (log, anonymous)
    )
    for extract in (
        lambda one: one.request_id,
        lambda one: one.sequence_hashes,
        lambda one: one.routing.session_id,
        lambda one: (one.request_id, one.nonce),
    ):
        assert classes(map(extract, before)) == classes(map(extract, after))
    refused = [one for one in events(anonymous, DECISIONS) if isinstance(one, RequestRejected)]
    assert [one.reason for one in refused] == ["duplicate_id"]
    assert refused[0].request_id in refused[0].message
    assert not any("one" in one.message for one in refused)


def classes(values: Iterable[Any]) -> list[int]:
    """Return for each value the index of its first occurrence."""
    listed = list(values)
    return [listed.index(value) for value in listed]


async def test_requests_with_equal_deadlines_expire_in_order(tmp_path: Path) -> None:
    drive = WrittenDriver().fleet("a")
    for number in range(20):
        drive("requests", request(f"r{number * 7 % 20:02}", (), timeout_us=1_000), after_us=0)
    drive.wait(2_000)
    log = await log_with(drive)
    copy = await copied(await AnonymousLog.open(log, key=KEY))
    given_up = [
        [one.request_id for one in events(each, DECISIONS) if isinstance(one, RequestAborted)] for each in (log, copy)
    ]
    sent = [[one.request_id for one in events(each, REQUESTS)] for each in (log, copy)]
    assert [sent[0].index(name) for name in given_up[0]] == [sent[1].index(name) for name in given_up[1]]
    assert len(given_up[1]) == 20
    log.close()
    copy.close()


async def test_a_slice_can_begin_at_a_snapshot(tmp_path: Path) -> None:
    """Active, remembered and session-bound requests of the snapshot have the ids used by later events."""
    drive = WrittenDriver().fleet("a", "b", session_ttl_s=10.0)
    for number in range(12):
        hints = RoutingHints(session_id=f"s{number % 3}")
        drive("requests", request(f"r{number}", PROMPTS[number % 3], nonce=number, routing=hints))
        if number % 2:
            drive("progress", finished(drive, f"r{number}"))
    drive.seal()
    drive.finish_snapshot()
    cut = len(drive.drafts)
    for number in range(12):
        hints = RoutingHints(session_id=f"s{number % 3}")
        drive("requests", request(f"r{number}", PROMPTS[number % 3], nonce=number, routing=hints))
        drive("requests", request(f"r{number}", PROMPTS[number % 3], nonce=99))
        drive("requests", request(f"new{number}", PROMPTS[number % 3], routing=hints))
    log = SqliteLog.open(None)
    await log.append(drive.drafts[:cut])
    await log.append(drive.drafts[cut:])
    from_us = log.records(DECISIONS.name, 0, log.next_offset(DECISIONS.name, 0) - 1, 1)[0].at_us
    made = await written(log, tmp_path / "slice.rec", Window(from_us))
    report = made.verified["m"]
    assert report.start > 0
    assert report.divergence is None
    recording = SqliteLog.open(tmp_path / "slice.rec", readonly=True)
    found = events(recording, DECISIONS)
    assert [one.reason for one in found if isinstance(one, RequestRejected)] == ["duplicate_id"] * 12
    assert len([one for one in found if isinstance(one, RequestRouted)]) == 12
    recording.close()
    log.close()


def finished(drive: WrittenDriver, name: str) -> Any:
    one = drive.world.requests.get(name)
    assert one is not None
    return said_of(one, "finish", 0)


def secrets_of(log: SqliteLog) -> dict[str, bytes]:
    """Return the client content of a log as bytes that are unlikely to occur by chance."""
    found: dict[str, bytes] = {"garbage": GARBAGE, "a key": b"a key", "a header": b"a value"}
    for event in events(log, REQUESTS):
        if event is None:
            continue
        for name, text in (
            ("id", event.request_id),
            ("session", getattr(event, "routing", RoutingHints()).session_id),
            ("adapter", getattr(event, "lora_name", "")),
            ("namespace", getattr(event, "cache_namespace", "")),
            ("reason", getattr(event, "reason", "")),
        ):
            if len(text) > 5:
                found[f"{name} {text}"] = text.encode()
        found[f"hash of {event.request_id}"] = id_hash(event.request_id).to_bytes(8, "little")
        if isinstance(event, RequestSubmitted):
            tokens = event.token_ids[:16]
            found |= {f"tokens {tokens!r}": tokens} if tokens else {}
            for value in unpack_u64(event.sequence_hashes):
                found[f"block {value}"] = value.to_bytes(8, "little")
                found[f"block in hex {value}"] = f"{value:016x}".encode()
    return found


def leaks(path: Path, secrets: dict[str, bytes]) -> list[str]:
    data = b"".join(one.read_bytes() for one in path.parent.glob(f"{path.name}*"))
    assert data
    return [name for name, secret in secrets.items() if secret in data]


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def content_history(seed: int) -> WrittenDriver:
    drive = WrittenDriver()
    drive.fleet("a", "b", session_ttl_s=10.0, temperature=1.0)
    for number in range(40):
        name = f"client-{number}-of-{seed}"
        blocks = [xxh3_64_intdigest(f"{seed} {number % 5} {at}".encode()) for at in range(6)]
        hints = RoutingHints(session_id=f"session-of-{number % 7}")
        made = request(
            name,
            blocks,
            token_ids=b"".join(xxh3_64_intdigest(f"{number} {at}".encode()).to_bytes(8, "little") for at in range(13)),
            tie_seed=number,  # of a random nonce; anonymised recordings keep it
            nonce=xxh3_64_intdigest(f"nonce of {name}".encode()),
            cache_namespace=f"tenant-{number % 3}",
            ingress_id="ingress-of-somebody",
            routing=hints,
        )
        drive("requests", made)
        if number % 3 == 0:
            drive("progress", finished(drive, name))
        if number % 10 == 9:
            drive("requests", None)
            drive.seal()
            drive.finish_snapshot()
    return drive


async def test_the_file_contains_no_client_content(tmp_path: Path) -> None:
    log = await log_with(content_history(1))
    secrets = secrets_of(log)
    assert len(secrets) > 100
    original = tmp_path / "original.db"
    (await log_with(content_history(1), original)).close()
    seen = {name.partition(" ")[0] for name in leaks(original, secrets)}
    assert seen == {"garbage", "a", "id", "session", "namespace", "hash", "tokens", "block"}
    out = tmp_path / "out.rec"
    await written(log, out, key=None)
    assert leaks(out, secrets) == []
    assert names_in(tmp_path) == ["original.db", "original.db.lock", "out.rec"]
    log.close()


KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
from forebay.transport.recording.writer import RecordingWriter
from forebay.transport.sqlite.log import SqliteLog
from tests.replay.test_anonymize import written

RecordingWriter.finish = lambda writer: os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(written(SqliteLog.open(sys.argv[1], readonly=True), Path(sys.argv[2])))
"""


def killed(path: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", KILLED, str(path), str(out)]
    root = Path(__file__).parents[2]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)


async def test_a_killed_run_leaves_no_client_content_and_is_restarted(tmp_path: Path) -> None:
    path, out = tmp_path / "original.db", tmp_path / "out.rec"
    log = await log_with(content_history(2), path)
    secrets = secrets_of(log)
    ended = killed(path, out)
    assert ended.returncode < 0, ended.stderr
    part = part_of(out)
    assert part.stat().st_size > 50_000
    assert leaks(part, secrets) == []
    first = part.read_bytes()
    await written(log, out, key=None)
    assert not part.exists()
    assert leaks(out, secrets) == []
    # The second run uses another key, so no masked value of the first run occurs again.
    again = SqliteLog.open(out, readonly=True)
    assert [one.request_id for one in events(again, REQUESTS) if one and one.request_id.encode() in first] == []
    again.close()
    log.close()


async def test_a_file_that_another_process_is_about_to_rename_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other process seals and renames without a lock. In this test it dies while doing so."""
    log, out = await log_with(content_history(2)), tmp_path / "out.rec"
    kept: list[bytes] = []

    def die(part: Path) -> None:
        kept.append(part.read_bytes())

    monkeypatch.setattr("forebay.transport.recording.manifest.seal", die)
    await written(log, out)
    monkeypatch.undo()
    out.rename(part_of(out))
    with pytest.raises(LogUnusable, match=r"out.rec.part is complete but not renamed: wait for the process"):
        await written(log, out)
    assert [part_of(out).read_bytes()] == kept
    log.close()


async def test_an_anonymised_recording_can_be_anonymised_again(tmp_path: Path) -> None:
    log = await log_with(content_history(3))
    await written(log, tmp_path / "once.rec")
    once = SqliteLog.open(tmp_path / "once.rec", readonly=True)
    made = await written(once, tmp_path / "twice.rec", key=bytes(32))
    assert made.verified["m"].divergence is None
    assert leaks(tmp_path / "twice.rec", secrets_of(once) | secrets_of(log)) == []
    lengths = [[one.prompt_tokens for one in events(each, REQUESTS) if one] for each in (log, once)]
    assert lengths[0] == lengths[1]
    once.close()
    log.close()


class ById:
    """Policy that uses masked fields."""

    def decide(self, world: RoutingWorld, request: RoutingRequest) -> int:
        return int(request.request_id.startswith("vip"))


CUSTOM = {f"{__name__}.ById": ById}


async def test_an_error_of_the_masks_is_found_before_the_file_is_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = await log_with(content_history(7))
    monkeypatch.setattr(HashMask, "packed", lambda self, values: bytes(len(values)))
    with pytest.raises(NotAnonymizable, match="with anonymised events the decision at journal offset"):
        await written(log, tmp_path / "out.rec")
    assert names_in(tmp_path) == []
    log.close()


async def test_decisions_that_depend_on_masked_fields_are_rejected(tmp_path: Path) -> None:
    drive = WrittenDriver(CUSTOM).fleet("a", "b", mode=f"{__name__}.ById")
    drive("requests", request("vip-1", ()))
    log = await log_with(drive)
    with pytest.raises(NotAnonymizable, match="if a policy reads masked fields, record without --anonymize"):
        await written(log, tmp_path / "out.rec")
    assert names_in(tmp_path) == []
    log.close()


async def test_a_diverging_original_is_rejected(tmp_path: Path) -> None:
    drive = WrittenDriver().fleet("a", "b")
    (routed,) = drive("requests", request("one", ()))
    drive.drafts[-1] = Draft(DECISIONS.name, 0, encode(DECISIONS, msgspec.structs.replace(routed, rank=7)))
    log = await log_with(drive)
    with pytest.raises(NotAnonymizable, match="journal offset 1 does not follow from the events: differs in rank"):
        await written(log, tmp_path / "out.rec")
    assert names_in(tmp_path) == []
    log.close()


async def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    log = await log_with(content_history(4))
    (tmp_path / "out.rec").write_text("mine")
    with pytest.raises(LogUnusable, match="exists already"):
        await written(log, tmp_path / "out.rec")
    assert (tmp_path / "out.rec").read_text() == "mine"
    log.close()


async def test_events_of_a_newer_version_stay_unverified(tmp_path: Path) -> None:
    drive = WrittenDriver().fleet("a", "b")
    claimed = OwnerClaimed(owner_id="owner", core_version=CORE_VERSION, events_version=EVENTS_VERSION + 1)
    drive.drafts[0] = Draft(DECISIONS.name, 0, encode(DECISIONS, claimed))
    drive("requests", None)
    drive.drafts[-1] = Draft(REQUESTS.name, 0, msgspec.msgpack.encode({"type": "request.paused", "secret": 1}))
    drive("requests", request("one", ()))
    log = await log_with(drive)
    made = await written(log, tmp_path / "out.rec")
    assert made.verified["m"].unverified == {"unknown-events": 1}
    log.close()


async def test_progress_is_reported_by_step(tmp_path: Path) -> None:
    log = await log_with(content_history(5))
    slices = [await slice_of(log, "m", 0, Window())]
    contents = await contents_of(log, slices, namespace="forebay", source="log", asked={}, anonymized=True)
    steps: list[tuple[str, int, int]] = []
    await record_anonymized(log, tmp_path / "out.rec", contents, lambda *step: steps.append(step))
    names = dict.fromkeys(name for name, _, _ in steps)
    assert "writing records" in names
    assert all(done <= total for _, done, total in steps)
    log.close()


async def test_snapshot_chunks_are_rewritten_in_place(tmp_path: Path) -> None:
    log = await log_with(content_history(6))
    copy = await copied(await AnonymousLog.open(log, key=KEY))
    for before, after in zip(events(log, SNAPSHOTS), events(copy, SNAPSHOTS), strict=True):
        assert isinstance(before, SnapshotChunk)
        assert [type(part) for part in before.parts] == [type(part) for part in after.parts]
    log.close()
    copy.close()
