"""`forebay status`, `forebay index` and `forebay dead-letters`."""

import asyncio
import json
import re
from contextlib import closing
from pathlib import Path
from typing import Any, get_args

import httpx
import msgspec
import pytest

from forebay.core.block_hashes import sequence_hashes
from forebay.core.state.prefix_index import PrefixIndex
from forebay.events.base import pack_u32, pack_u64, unpack_u64
from forebay.events.codec import decode, encode
from forebay.events.control import PolicySet
from forebay.events.kv import AnyKvEvent, BlocksStored, StoreBlocksAdded, Tier
from forebay.events.topics import CONTROL, KV_EVENTS
from forebay.replay import status as form
from forebay.replay.status import GroupStatus
from forebay.transport.base import Draft, Record
from forebay.transport.dead_letters import dead_letter
from forebay.transport.sqlite.log import SqliteLog
from tests.cli.in_process import answering, error_of, forebay, json_of
from tests.cli.up import LONG_PREFIX, PATIENCE_S, running
from tests.harness.local import free_ports
from tests.replay import incident
from tests.system import BLOCK, MODEL, System, submitted, until, until_ended

KEY = "key-of-tests"
PAGE = Path(__file__).parents[2] / "docs" / "status.md"


def status(*arguments: str, code: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json_of("status", *arguments, code=code)
    msgspec.convert(found, GroupStatus)
    return found


@pytest.mark.timeout(180)
def test_a_running_system_is_shown(tmp_path: Path) -> None:
    log = str(tmp_path / "log.db")
    with (
        running("--workers", "2", "--log", log, "--api-key", KEY) as up,
        up.client().with_options(api_key=KEY) as client,
    ):
        client.completions.create(model="forebay-default", prompt=LONG_PREFIX, max_tokens=4)
        of_this = ("--url", up.url, "--api-key", KEY)
        found = status(*of_this)
        assert found["source"] == "owner"
        assert (found["group"], found["ready"], found["problems"]) == ("forebay-default", True, [])
        assert [(worker["worker_id"], worker["state"]) for worker in found["workers"]] == [
            ("mock-0", "ready"),
            ("mock-1", "ready"),
        ]
        assert [pool["routed"] for pool in found["pools"]] == [1]
        assert found["owner"]["alive"] is True
        assert {topic["topic"] for topic in found["topics"]} >= {"requests", "fleet", "progress"}
        served = (
            httpx.get(f"{up.url}/v1/status", headers={"authorization": f"Bearer {KEY}"}, timeout=PATIENCE_S)
            .raise_for_status()
            .json()
        )
        assert served.keys() == found.keys()
        assert "; set FOREBAY_API_KEY or --api-key" in error_of("status", "--url", up.url)
        shown = forebay("status", *of_this)
        assert shown.returncode == 0, shown.stderr
        for text in ("forebay-default, ready", "1 routed", "mock-1/0", "requests/0"):
            assert text in shown.stdout
        derived = status(log)
        assert (derived["source"], derived["owner"]["alive"]) == ("log", None)
        assert derived["workers"] == found["workers"]
        with client.completions.create(model="forebay-default", prompt="a", max_tokens=3_000, stream=True):
            running_requests = status(*of_this)["requests"]
        assert running_requests["in_flight"] == sum(running_requests["by_phase"].values()) == 1


def test_a_recording_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "incident.db"
    asyncio.run(incident.record(path))
    found = status(str(path))
    assert (found["group"], found["ready"], found["owner"]["owner_id"]) == ("model", True, "second")
    assert {worker["worker_id"] for worker in found["workers"]} == {"w0", "w1", "w2"}
    shown = forebay("status", path).stdout
    assert "a log does not show whether it runs" in shown
    assert "0 in flight" in shown


def test_watch_reads_the_status_again_until_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "incident.db"
    asyncio.run(incident.record(path))
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            path.unlink()  # a failed reading is reported, and does not end the command
        if len(pauses) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("forebay.cli.status.time.sleep", pause)
    run = forebay("status", path, "--watch", "--json")
    assert [json.loads(line)["ready"] for line in run.stdout.splitlines()] == [True, True]
    assert (len(pauses), run.stderr.count("\n")) == (3, 1), run.stderr
    assert run.returncode == 130


def test_a_log_without_an_owner_is_not_ready(tmp_path: Path) -> None:
    path = tmp_path / "empty.db"
    SqliteLog.open(path).close()
    assert status(str(path), code=1)["problems"] == ["no router has owned the group yet", "no worker is ready"]
    shown = forebay("status", path)
    assert shown.returncode == 1
    assert "problem    no worker is ready" in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.db"], "nowhere.db: no such log file; check the path"),
        (["a.db", "--kafka", "127.0.0.1:1"], "expected either a log file or --kafka"),
        (["{recording}", "--group", "other"], "unknown group 'other'; groups are: model"),
        (["--url", "http://127.0.0.1:{port}"], "does not respond .*; start a system with `forebay up`"),
        (["--url", "nothing"], "nothing does not respond"),
    ],
)
def test_bad_input_ends_with_code_2(arguments: list[str], message: str) -> None:
    recording = Path(__file__).parents[1] / "logs" / "kv.rec"
    run = forebay("status", *(one.format(recording=recording, port=free_ports(1)) for one in arguments))
    assert (run.returncode, run.stdout) == (2, "")
    assert re.search(message, run.stderr), run.stderr


@pytest.mark.parametrize(
    ("code", "body", "exit_code", "message"),
    [
        (200, "<html>", 2, "is not an ingress"),
        (200, '{"version": 9}', 2, "another version of the status"),
        (401, '{"error": {"message": "bad", "code": "invalid_api_key"}}', 2, "bad; set FOREBAY_API_KEY or --api-key"),
        (503, '{"error": {"message": "no router serves x"}}', 1, "no router serves x"),
        (409, '{"error": {"message": "other version", "code": "other_rules"}}', 3, "other version"),
    ],
)
def test_responses_other_than_a_status(code: int, body: str, exit_code: int, message: str) -> None:
    with answering(code, body) as url:
        run = forebay("status", "--url", url)
    assert (run.returncode, run.stdout) == (exit_code, "")
    assert message in run.stderr


def test_the_page_describes_every_field() -> None:
    text = PAGE.read_text()
    for kind in vars(form).values():
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__module__ == form.__name__:
            missing = [name for name in kind.__struct_fields__ if f"`{name}`" not in text]
            assert missing == [], kind.__name__


PROMPT = list(range(4 * BLOCK))
ON_DISK = list(range(1, 9_001))  # too many for one line
TIERS: tuple[Tier, ...] = get_args(Tier)


async def write(path: Path) -> PrefixIndex:
    """Write a log of two workers with cached blocks. Return its index."""
    log = SqliteLog.open(path)
    async with System(log).started(workers=2) as system:
        async with system.owned() as owner:
            await until(lambda: len(owner.world.fleet) == 2)
            system.send(submitted("a", PROMPT))
            await until_ended(system, "a")
            await until(lambda: not len(owner.world.requests))
            epoch = owner.world.fleet.workers()[0].worker_epoch
            seq = max(event.seq for event in [*system.events(KV_EVENTS), first(epoch)] if event.worker_id == "w0") + 1
            stored = BlocksStored(
                worker_id="w0", worker_epoch=epoch, seq=seq, sequence_hashes=pack_u64(ON_DISK), tier="disk"
            )
            log.append_soon([Draft(KV_EVENTS.name, 0, encode(KV_EVENTS, stored))])
            await until(lambda: owner.world.index.blocks_held("w0", 0, "disk") == len(ON_DISK))
            for store in ("t", "s"):
                shared = StoreBlocksAdded(store=store, worker_id="w0", sequence_hashes=pack_u64(ON_DISK))
                log.append_soon([Draft(KV_EVENTS.name, 0, encode(KV_EVENTS, shared))])
            await until(lambda: len(owner.world.index.stores.names) == 2)
            system.send(submitted("b", PROMPT))  # its decision ends the journal
            await until_ended(system, "b")
            await until(lambda: not len(owner.world.requests))
        index = owner.world.index
    log.close()
    return index


def first(epoch: int) -> BlocksStored:
    return BlocksStored(worker_id="w0", worker_epoch=epoch, seq=0, sequence_hashes=b"")


def applied(lines: str, like: PrefixIndex) -> PrefixIndex:
    """Return an index with the workers of `like` and the events of `lines`."""
    index = PrefixIndex()
    events = [msgspec.json.decode(line, type=AnyKvEvent) for line in lines.splitlines()]
    epochs = {(event.worker_id, event.rank): event.worker_epoch for event in events if isinstance(event, BlocksStored)}
    for worker_id, rank in like.holders():
        index.add_holder(worker_id, rank, epochs.get((worker_id, rank), 0))
        index.use_store(worker_id, "t" if worker_id == "w0" else "")
    for event in events:
        read = decode(KV_EVENTS, encode(KV_EVENTS, event))
        (index.apply_store if isinstance(read, StoreBlocksAdded) else index.apply)(read)
    assert not {"gap", "duplicate", "unknown_worker", "unknown_parent"} & set(index.counts)
    return index


def held(index: PrefixIndex) -> list[int]:
    return [index.blocks_held(worker_id, rank, tier) for worker_id, rank in index.holders() for tier in TIERS]


def test_the_printed_events_give_the_same_index(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    index = asyncio.run(write(path))
    run = forebay("index", path)
    assert run.returncode == 0, run.stderr
    copy = applied(run.stdout, index)
    assert held(copy) == held(index)
    assert copy.stores.sizes() == index.stores.sizes() == {"s": len(ON_DISK), "t": len(ON_DISK)}
    for query in (unpack_u64(sequence_hashes(pack_u32(PROMPT), BLOCK)), ON_DISK, ON_DISK[8_000:]):
        assert copy.overlaps(query) == index.overlaps(query) != {}


def test_one_worker_can_be_selected_and_an_unknown_one_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    index = asyncio.run(write(path))
    run = forebay("index", path, "--worker", "w0")
    events = [msgspec.json.decode(line, type=AnyKvEvent) for line in run.stdout.splitlines()]
    assert {event.worker_id for event in events} == {"w0"}
    blocks = sum(len(event.sequence_hashes) // 8 for event in events if isinstance(event, BlocksStored))
    assert blocks == sum(index.blocks_held("w0", 0, tier) for tier in TIERS)
    assert "unknown worker 'nobody'; workers are: w0, w1" in error_of("index", path, "--worker", "nobody")


POLICY = PolicySet(model=MODEL, pool="default", mode="random")
UNDECODABLE = b"\x1b[31m no JSON"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Return the log of a system that is stopped, with four dead letters."""
    path = tmp_path / "log.db"

    async def write() -> None:
        with closing(SqliteLog.open(path)) as log:
            async with System(log).started(1) as system, system.owned() as owner:
                await until(lambda: len(owner.world.fleet) == 1)
                for topic, value, reason in (
                    ("kv-events", UNDECODABLE, "not JSON"),
                    ("control", UNDECODABLE, "not JSON"),
                    ("control", encode(CONTROL, POLICY), "unknown tag \x1b[31m"),
                    ("control", encode(CONTROL, POLICY), "unknown tag" * 40),
                ):
                    await log.append([dead_letter(Record(topic, 0, 9, 0, value), 0, reason)])

    asyncio.run(write())
    return path


def lines(*arguments: object) -> list[str]:
    run = forebay("dead-letters", *map(str, arguments))
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


def listed(*arguments: object) -> list[int]:
    return [json.loads(line)["offset"] for line in lines("list", *arguments, "--json")]


def test_filters_select_letters(log: Path) -> None:
    assert listed(log) == [3, 2, 1, 0]
    assert listed(log, "--topic", "control") == [3, 2, 1]
    assert listed(log, "--topic", "control", "--limit", 2) == [3, 2]
    assert listed(log, "--from", "-1h") == [3, 2, 1, 0]
    assert listed(log, "--to", "-1h") == []
    assert lines("list", log, "--to", "-1h") == ["no dead letters"]
    assert (
        error_of("dead-letters", "list", log, "--topic", "controls")
        == "--topic: unknown topic 'controls'; did you mean control?"
    )


def test_the_table_is_safe_and_states_that_it_is_cut_off(log: Path) -> None:
    table = lines("list", log, "--limit", 3)
    assert [word for line in table if "/" in (word := line.split()[0])] == ["0/3", "0/2", "0/1"]
    assert "only the newest 3 letters are shown" in table[-1]
    assert "\x1b" not in "".join(table)
    assert "\\x1b" in "".join(table)


def test_one_letter_is_shown_with_decoded_record_and_whether_it_can_be_retried(log: Path) -> None:
    shown = "\n".join(lines("list", log, "--letter", "0/2"))
    assert '"type": "control.policy_set"' in shown
    assert "retry    possible: applies now, and so overrides newer changes" in shown
    found = json.loads(*lines("list", log, "--letter", 1, "--json"))
    assert (found["topic"], found["source_offset"], found["record"]) == ("control", 9, {"value": "\x1b[31m no JSON"})
    assert found["retry"].startswith("no: the record does not decode in this version either")
    assert "\x1b" not in "".join(lines("list", log, "--letter", 1))


def test_an_owner_applies_a_retried_setting(log: Path) -> None:
    text = lines("retry", log, "0/2")
    (place,) = [one.removesuffix(")") for one in " ".join(text).split() if one.startswith("control/0/")]
    assert text[0].startswith("letter 0/2 decodes as control.policy_set; appended as control/0/")
    assert (
        error_of("dead-letters", "retry", log, "0/2", code=1)
        == f"letter 0/2 was not retried: it was retried before, as {place}"
    )
    retried = {json.loads(line)["offset"]: json.loads(line)["retried_as"] for line in lines("list", log, "--json")}
    assert retried == {3: "", 2: place, 1: "", 0: ""}

    async def mode() -> str:
        with closing(SqliteLog.open(log)) as opened:
            async with System(opened).owned() as owner:
                return owner.world.pools["default"].router.mode

    assert asyncio.run(mode()) == "random"


def test_letters_that_cannot_be_retried_are_refused(log: Path) -> None:
    assert "a record of kv-events is stale" in error_of("dead-letters", "retry", log, "0/0", code=1)
    assert "does not decode in this version either" in error_of("dead-letters", "retry", log, "0/1", code=1)
    assert "has no offset 9; letters are at offsets 0 to 3" in error_of("dead-letters", "retry", log, "0/9")
    assert (
        error_of("dead-letters", "list", log, "--letter", "x")
        == "--letter x: expected PARTITION/OFFSET, for example 0/12"
    )
    assert error_of("dead-letters", "retry", log, "x") == "LETTER x: expected PARTITION/OFFSET, for example 0/12"
    assert "no such log file" in error_of("dead-letters", "retry", log.with_name("other.db"), "0/2")
    assert not log.with_name("other.db").exists()


def test_a_log_in_use_is_not_written(log: Path) -> None:
    with closing(SqliteLog.open(log)):
        assert listed(log) == [3, 2, 1, 0], "reading works beside the writer"
        assert "another process (pid" in error_of("dead-letters", "retry", log, "0/2")
