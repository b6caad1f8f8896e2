"""Anonymised recordings contain no client content, and their decisions are unchanged."""

import asyncio
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given
from xxhash import xxh3_64_intdigest

from forebay.core.routing.policies import RoutingRequest, RoutingWorld
from forebay.core.state.submitted_request import id_hash
from forebay.core.world import CORE_VERSION
from forebay.events.base import unpack_u64
from forebay.events.codec import DecodeError, decode, encode
from forebay.events.decisions import OwnerClaimed, RequestAborted, RequestRejected, RequestRouted
from forebay.events.requests import RequestSubmitted, RoutingHints
from forebay.events.topics import DECISIONS, REQUESTS, Topic
from forebay.events.versions import EVENTS_VERSION
from forebay.replay.anonymize.anonymize import Anonymized, NotAnonymizable, SliceLog, record_anonymized
from forebay.replay.record.slice import Window, contents_of, slice_of
from forebay.replay.verify.verify import VerifyReport, verify
from forebay.transport.base import Draft, LogError
from forebay.transport.sqlite.log import LogUnusable, SqliteLog
from forebay.transport.sqlite.recording import Extent
from forebay.transport.sqlite.recording_writer import part_of
from tests.core.worlds import PROMPTS, joined, request, said_of
from tests.depth import sampled
from tests.replay.owner_histories import GARBAGE, WrittenDriver, dense_history, log_with, owner_histories, played
from tests.replay.slices import opened

READ_MAX = 100_000
WHOLE = Window()


def events(log: SqliteLog, topic: Topic) -> list[Any]:
    found = []
    begin = next((one.first for one in log.recording.extents if one.topic == topic.name), 0) if log.recording else 0
    for record in log.records(topic.name, 0, begin, READ_MAX):
        try:
            found.append(decode(topic, record.value))
        except DecodeError:
            found.append(None)
    return found


@pytest.fixture
async def log() -> AsyncIterator[SqliteLog]:
    """Return a log with client content, garbage and snapshots."""
    with closing(await log_with(content_history())) as log:
        yield log


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.rec"


async def written(log: SqliteLog, out: Path, window: Window = WHOLE, progress: Any = None) -> Anonymized:
    slices = [await slice_of(log, "m", 0, window)]
    contents = await contents_of(log, slices, namespace="forebay", source="log", asked={}, anonymized=True)
    return await record_anonymized(log, out, contents, progress, custom=CUSTOM)


def without_digests(report: VerifyReport) -> VerifyReport:
    """Remove what depends on request IDs: digests of the decision log and of states, and foreign progress."""
    foreign = [msgspec.structs.replace(one, about="") for one in report.foreign_progress]
    return msgspec.structs.replace(report, digest="", state="", unknown_event="", foreign_progress=foreign)


@asynccontextmanager
async def copied(log: SqliteLog) -> AsyncIterator[SqliteLog]:
    """Open an anonymised recording of a log, and close both."""
    with TemporaryDirectory() as folder, closing(log):
        out = Path(folder) / "out.rec"
        await written(log, out)
        with opened(out) as copy:
            yield copy


async def assert_same(log: SqliteLog) -> None:
    async with copied(log) as copy:
        assert copy.recording is not None
        before = await verify(SliceLog(log, copy.recording.extents), custom=CUSTOM)
        assert before.divergence is None, before
        after = await verify(copy, custom=CUSTOM)
        assert after.divergence is None, after
        assert without_digests(before) == without_digests(after)
        routed = [[one for one in events(each, DECISIONS) if isinstance(one, RequestRouted)] for each in (log, copy)]
    first, second = ([(one.worker_id, one.rank, one.table_digest) for one in each] for each in routed)
    assert first == second


@given(owner_histories)
async def test_every_decision_is_derived_again_after_anonymising(history: list[tuple[str, Any]]) -> None:
    drive = played(history)
    assume(drive.decided)
    await assert_same(await log_with(drive))


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
        drive.ask(f"r{number}", PROMPTS[number % 3], nonce=number)
        if number % 4 == 0:
            name = draw.choice("abc")
            drive.lose(name)
            drive("fleet", joined(name))
        if number % 3 == 0 and (one := drive.world.requests.get(f"r{number // 2}")) is not None:
            drive("progress", said_of(one, "finish", 0))
    assert len([one for one in drive.decided if isinstance(one, RequestRouted) and one.attempt > 1]) > 20
    await assert_same(await log_with(drive))


async def test_a_slice_is_read_only(log: SqliteLog) -> None:
    cut = SliceLog(log, [])
    with pytest.raises(LogError, match="read-only"):
        await cut.append([])
    with pytest.raises(LogError, match="read-only"):
        cut.append_soon([])
    with pytest.raises(LogError, match="cannot be tailed"):
        cut.tail(REQUESTS.name, 0, 0, asyncio.Event())


async def test_a_slice_ends_where_its_extents_end(log: SqliteLog) -> None:
    cut = SliceLog(log, [Extent(REQUESTS.name, 0, 5, 9)])
    assert [await cut.begin(REQUESTS.name, 0), await cut.end(REQUESTS.name, 0)] == [5, 9]
    assert [record.offset for record in await cut.read(REQUESTS.name, 0, 6, 100)] == [6, 7, 8]
    assert await cut.read(REQUESTS.name, 0, 9, 100) == []
    assert [await cut.begin(DECISIONS.name, 0), await cut.end(DECISIONS.name, 0)] == [0, 0]
    with pytest.raises(LogError, match="requests/0: the slice begins at offset 5, not 4"):
        await cut.read(REQUESTS.name, 0, 4, 1)


async def test_equal_values_stay_equal() -> None:
    """Redelivered requests, different requests with the same id, and sessions keep their equality."""
    drive = WrittenDriver().fleet("a", "b", session_ttl_s=10.0)
    for number, name in enumerate(("one", "two", "one", "one")):
        hints = RoutingHints(session_id=f"s{number % 2}")
        drive("requests", request(name, PROMPTS[number % 2], nonce=number // 3, routing=hints))
    log = await log_with(drive)
    async with copied(log) as anonymous:
        before, after = (
            [one for one in events(each, REQUESTS) if isinstance(one, RequestSubmitted)] for each in (log, anonymous)
        )
        (refused,) = [one for one in events(anonymous, DECISIONS) if isinstance(one, RequestRejected)]
    for extract in (
        lambda one: one.request_id,
        lambda one: one.sequence_hashes,
        lambda one: one.routing.session_id,
        lambda one: (one.request_id, one.nonce),
    ):
        assert classes(map(extract, before)) == classes(map(extract, after))
    assert (refused.reason, refused.request_id in refused.message) == ("duplicate_id", True)
    assert "one" not in refused.message


def classes(values: Iterable[Any]) -> list[int]:
    """Return for each value the index of its first occurrence."""
    listed = list(values)
    return [listed.index(value) for value in listed]


@pytest.mark.parametrize("unwritten", [0, 19])  # an owner may have written only the first of the aborts
async def test_requests_with_equal_deadlines_expire_in_order(unwritten: int) -> None:
    drive = WrittenDriver().fleet("a")
    for number in range(20):
        drive("requests", request(f"r{number * 7 % 20:02}", (), timeout_us=1_000), after_us=0)
    drive.wait(2_000)
    del drive.drafts[len(drive.drafts) - unwritten :]
    log = await log_with(drive)
    async with copied(log) as copy:
        expired = [
            [one.request_id for one in events(each, DECISIONS) if isinstance(one, RequestAborted)]
            for each in (log, copy)
        ]
        sent = [[one.request_id for one in events(each, REQUESTS)] for each in (log, copy)]
    assert [sent[0].index(name) for name in expired[0]] == [sent[1].index(name) for name in expired[1]]
    assert len(expired[1]) == 20 - unwritten


async def test_a_slice_can_begin_at_a_snapshot(out: Path) -> None:
    """Active, remembered and session-bound requests of the snapshot have the ids used by later events."""
    drive = WrittenDriver().fleet("a", "b", session_ttl_s=10.0)

    def ask(name: str, number: int, **changes: Any) -> None:
        hints = RoutingHints(session_id=f"s{number % 3}")
        drive("requests", request(name, PROMPTS[number % 3], routing=hints, **changes))

    for number in range(12):
        ask(f"r{number}", number, nonce=number)
        if number % 2:
            drive("progress", finished(drive, f"r{number}"))
    drive.seal()
    drive.finish_snapshot()
    cut = len(drive.drafts)
    for number in range(12):
        ask(f"r{number}", number, nonce=number)
        ask(f"r{number}", number, nonce=99)
        ask(f"new{number}", number)
    log = SqliteLog.open(None)
    await log.append(drive.drafts[:cut])
    await log.append(drive.drafts[cut:])
    from_us = log.records(DECISIONS.name, 0, log.next_offset(DECISIONS.name, 0) - 1, 1)[0].at_us
    report = (await written(log, out, Window(from_us))).verified["m"]
    log.close()
    assert (report.start > 0, report.divergence) == (True, None)
    with opened(out) as recording:
        found = events(recording, DECISIONS)
    assert [one.reason for one in found if isinstance(one, RequestRejected)] == ["duplicate_id"] * 12
    assert len([one for one in found if isinstance(one, RequestRouted)]) == 12


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
            ("tenant", getattr(event, "tenant", "")),
            ("key", getattr(event, "key_id", "")),
            ("trace", getattr(event, "traceparent", "")),
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


def names_beside(path: Path) -> list[str]:
    return sorted(one.name for one in path.parent.iterdir())


def content_history() -> WrittenDriver:
    drive = WrittenDriver()
    drive.fleet("a", "b", session_ttl_s=10.0, temperature=1.0)
    for number in range(40):
        name = f"client-{number}-of-somebody"
        tokens = [xxh3_64_intdigest(f"{number} {at}".encode()).to_bytes(8, "little") for at in range(13)]
        drive.ask(
            name,
            [xxh3_64_intdigest(f"block {number % 5} {at}".encode()) for at in range(6)],
            token_ids=b"".join(tokens),
            tie_seed=number,  # of a random nonce; anonymised recordings keep it
            nonce=xxh3_64_intdigest(f"nonce of {name}".encode()),
            cache_namespace=f"salt-of-{number % 3}",
            ingress_id="ingress-of-somebody",
            tenant=f"customer-{number % 4}",
            key_id=f"abcdef01234{number % 4}",
            traceparent=f"00-{number % 4 + 1:032}-{2:016}-01",
            session_id=f"session-of-{number % 7}",
        )
        if number % 3 == 0:
            drive("progress", finished(drive, name))
        if number % 10 == 9:
            drive("requests", None)
            drive.seal()
            drive.finish_snapshot()
    return drive


async def test_the_file_contains_no_client_content(log: SqliteLog, out: Path) -> None:
    secrets = secrets_of(log)
    assert len(secrets) > 100
    original = out.with_name("original.db")
    (await log_with(content_history(), original)).close()
    seen = {name.partition(" ")[0] for name in leaks(original, secrets)}
    assert seen == {"garbage", "a", "id", "session", "namespace", "hash", "tokens", "block", "tenant", "key", "trace"}
    await written(log, out)
    assert leaks(out, secrets) == []
    assert names_beside(out) == ["original.db", "original.db.lock", "out.rec"]


KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
from forebay.transport.sqlite.recording_writer import RecordingWriter
from forebay.transport.sqlite.log import SqliteLog
from tests.replay.test_anonymize import written

RecordingWriter.finish = lambda writer: os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(written(SqliteLog.open(sys.argv[1], readonly=True), Path(sys.argv[2])))
"""


def record_and_die(path: Path, out: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(path), str(out)]
    ended = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert ended.returncode < 0, ended.stderr


async def test_a_killed_run_leaves_no_client_content(out: Path) -> None:
    path = out.with_name("original.db")
    log = await log_with(content_history(), path)
    secrets = secrets_of(log)
    await asyncio.to_thread(record_and_die, path, out)
    part = part_of(out)
    assert part.stat().st_size > 50_000
    assert leaks(part, secrets) == []
    await written(log, out)
    log.close()


async def test_an_anonymised_recording_can_be_anonymised_again(log: SqliteLog, out: Path) -> None:
    await written(log, out)
    twice = out.with_name("twice.rec")
    with opened(out) as once:
        made = await written(once, twice)
        assert made.verified["m"].divergence is None
        assert leaks(twice, secrets_of(once) | secrets_of(log)) == []
        lengths = [[one.prompt_tokens for one in events(each, REQUESTS) if one] for each in (log, once)]
    assert lengths[0] == lengths[1]


class ById:
    """Policy that uses masked fields."""

    def decide(self, world: RoutingWorld, request: RoutingRequest) -> int:
        return int(request.request_id.startswith("vip"))


CUSTOM = {f"{__name__}.ById": ById}


async def require_rejected(log: SqliteLog, out: Path, text: str) -> None:
    """Require that a log cannot be anonymised, and leaves no file."""
    with pytest.raises(NotAnonymizable, match=text):
        await written(log, out)
    assert names_beside(out) == []


async def test_an_error_of_the_masks_is_found_before_the_file_is_renamed(
    log: SqliteLog, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.replay.anonymize.events.pack_u64", lambda values: bytes(8 * len(list(values))))
    await require_rejected(log, out, "with anonymised events the decision at journal offset")


async def test_decisions_that_depend_on_masked_fields_are_rejected(out: Path) -> None:
    drive = WrittenDriver(CUSTOM).fleet("a", "b", mode=f"{__name__}.ById")
    drive.ask("vip-1", ())
    with closing(await log_with(drive)) as log:
        await require_rejected(log, out, "if a policy reads masked fields, record without --anonymize")


async def test_a_diverging_original_is_rejected(out: Path) -> None:
    drive = WrittenDriver().fleet("a", "b")
    routed = drive.ask("one", ())
    drive.drafts[-1] = Draft(DECISIONS.name, 0, encode(DECISIONS, msgspec.structs.replace(routed, rank=7)))
    with closing(await log_with(drive)) as log:
        await require_rejected(log, out, "journal offset 1 does not follow from the events: differs in rank")


async def test_an_existing_file_is_not_overwritten(log: SqliteLog, tmp_path: Path) -> None:
    (tmp_path / "out.rec").write_text("mine")
    with pytest.raises(LogUnusable, match="exists already"):
        await written(log, tmp_path / "out.rec")
    assert (tmp_path / "out.rec").read_text() == "mine"


async def test_events_of_a_newer_version_stay_unverified(out: Path) -> None:
    drive = WrittenDriver().fleet("a", "b")
    claimed = OwnerClaimed(owner_id="owner", core_version=CORE_VERSION, events_version=EVENTS_VERSION + 1)
    drive.drafts[0] = Draft(DECISIONS.name, 0, encode(DECISIONS, claimed))
    drive("requests", None)
    drive.drafts[-1] = Draft(REQUESTS.name, 0, msgspec.msgpack.encode({"type": "request.paused", "secret": 1}))
    drive.ask("one", ())
    with closing(await log_with(drive)) as log:
        made = await written(log, out)
    assert made.verified["m"].unverified == {"unknown-events": 1}


async def test_progress_is_reported_by_step(log: SqliteLog, out: Path) -> None:
    steps: list[tuple[str, int, int]] = []
    await written(log, out, progress=lambda *step: steps.append(step))
    assert "writing records" in {name for name, _, _ in steps}
    assert all(done <= total for _, done, total in steps)
