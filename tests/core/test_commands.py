"""Commands to workers: whom they go to, how each ends once, and what the fleet learns from them."""

from typing import Any

import msgspec
import pytest

from forebay.core.restore import restore
from forebay.core.state.commands import LAST_READY, PENDING_MAX, RESPONSE_OMITTED, TEXT_CHARS_MAX
from forebay.core.state.requests import REMEMBER_US
from forebay.events.control import PoolConfigured, WorkerCommanded
from forebay.events.decisions import CommandEnded, CommandSent, RequestRejected, RequestRouted
from forebay.events.fleet import WorkerDraining, WorkerLost, WorkerSuspect
from forebay.events.snapshots import CommandState
from tests.core.worlds import BLOCK, Driver, commanded, declined, joined, obeyed, request


def sent(drive: Driver, event: WorkerCommanded) -> CommandSent:
    (decided,) = drive("control", event)
    assert isinstance(decided, CommandSent)
    return decided


def targets(decided: CommandSent) -> list[str]:
    return [target.worker_id for target in decided.targets]


def statuses(ended: CommandEnded) -> dict[str, str]:
    return {outcome.worker_id: outcome.status for outcome in ended.outcomes}


def two_pools() -> Driver:
    drive = Driver().fleet("b", "a")
    drive("control", PoolConfigured(pool="other", model="m", block_size=BLOCK))
    drive("control", PoolConfigured(pool="foreign", model="n", block_size=BLOCK))
    drive("fleet", joined("c", 0, pool="other"))
    drive("fleet", joined("z", 0, pool="foreign", model="n"))
    return drive


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ["a", "b", "c"]),
        ({"pool": "default"}, ["a", "b"]),
        ({"pool": "other"}, ["c"]),
        ({"worker_ids": ("c", "a", "c")}, ["a", "c"]),
        ({"pool": "default", "worker_ids": ("b",)}, ["b"]),
        ({"model": "n"}, ["z"]),
    ],
    ids=str,
)
def test_a_command_goes_to_the_addressed_workers(changes: dict[str, Any], expected: list[str]) -> None:
    drive = two_pools()
    decided = sent(drive, commanded("c1", **changes))
    assert (decided.reason, targets(decided)) == (None, expected)
    for target in decided.targets:
        worker = drive.world.fleet.get(target.worker_id)
        assert worker is not None
        assert (target.worker_epoch, target.slot, target.pool) == (worker.worker_epoch, worker.slot, worker.spec.pool)


@pytest.mark.parametrize(
    ("changes", "reason", "text"),
    [
        ({"model": "gpt"}, "unknown_model", "no pool serves the model gpt"),
        ({"pool": "gone"}, "unknown_pool", "the model m has no pool gone"),
        ({"pool": "foreign"}, "unknown_pool", "the model m has no pool foreign"),
        ({"worker_ids": ("a", "nobody")}, "unknown_worker", "unknown worker nobody"),
        ({"worker_ids": ("z",)}, "unknown_worker", "unknown worker z"),
        ({"pool": "other", "worker_ids": ("a",)}, "unknown_worker", "unknown worker a"),
        ({"worker_ids": ("b",)}, "worker_not_ready", "worker b is draining"),
        ({"pool": "other"}, "no_workers", "no worker of the pool other is ready"),
    ],
    ids=str,
)
def test_a_rejected_command_has_a_reason(changes: dict[str, Any], reason: str, text: str) -> None:
    drive = two_pools()
    for worker_id, kind in (("b", WorkerDraining), ("c", WorkerSuspect)):
        drive.fact(kind, worker_id)
    decided = sent(drive, commanded("c1", **changes))
    assert (decided.reason, decided.message, decided.targets) == (reason, text, ())
    assert len(drive.world.commands) == 0
    assert drive("control", commanded("c1", **changes)) == [], "a redelivery is refused once"


def test_a_command_without_workers_is_rejected() -> None:
    drive = Driver()
    assert sent(drive, commanded("c1")).reason == "no_workers"
    drive.fleet()
    assert sent(drive, commanded("c2")).message == "no worker of m is ready"


def test_a_command_ends_when_every_worker_has_an_outcome() -> None:
    drive = Driver().fleet("a", "b", "c")
    sent(drive, commanded("c1", "load_lora", lora_name="x"))
    assert drive("progress", obeyed("c1", "b", drive.epoch("b"), "load_lora", "x")) == []
    assert drive("progress", declined("c1", "a", drive.epoch("a"), "no room")) == []
    (ended,) = drive.lose("c")
    assert isinstance(ended, CommandEnded)
    found = {one.worker_id: (one.status, one.loras, one.message) for one in ended.outcomes}
    assert found == {
        "a": ("refused", (), "no room"),
        "b": ("done", ("x",), ""),
        "c": ("left", (), "the worker was lost before it responded"),
    }
    assert drive.world.commands.get("c1") is None


@pytest.mark.parametrize(
    ("workers", "suspect", "last"),
    [
        (("a",), None, ()),
        (("a",), "b", ("a",)),
        (("a", "b"), None, ("a", "b")),
        (("c",), None, ("c",)),
        (("a", "c"), None, ("c",)),
        ((), None, ("a", "b", "c")),
    ],
    ids=str,
)
def test_a_drain_reports_the_last_ready_workers_of_pools(
    workers: tuple[str, ...], suspect: str | None, last: tuple[str, ...]
) -> None:
    drive = two_pools()
    if suspect is not None:
        drive.fact(WorkerSuspect, suspect)
    drained = targets(sent(drive, commanded("c1", "drain", worker_ids=workers)))
    ended = [drive("progress", obeyed("c1", name, drive.epoch(name), "drain")) for name in drained][-1]
    (found,) = ended
    assert isinstance(found, CommandEnded)
    assert set(statuses(found).values()) == {"done"}
    assert tuple(one.worker_id for one in found.outcomes if one.message == LAST_READY) == last


def test_a_worker_without_response_times_out() -> None:
    drive = Driver().fleet("a", "b")
    sent(drive, commanded("late", timeout_us=500))
    sent(drive, commanded("later", timeout_us=480))
    drive("progress", obeyed("late", "a", drive.epoch("a")))
    assert drive.world.next_due_us() == drive.now_us - 10 + 480
    first, second = drive.wait(10_000)
    assert (first.command_id, statuses(first)) == ("later", {"a": "timed_out", "b": "timed_out"})
    assert (second.command_id, statuses(second)) == ("late", {"a": "done", "b": "timed_out"})
    assert drive.world.next_due_us() is None
    assert drive("progress", obeyed("late", "b", drive.epoch("b"))) == []
    assert drive.world.counts["stale_command_response"] == 1


def test_only_workers_with_a_pending_command_may_respond() -> None:
    drive = Driver().fleet("a", "b")
    epoch = drive.epoch("a")
    sent(drive, commanded("c1", worker_ids=("a",)))
    before = drive.world.commands.digest()
    for answer in (obeyed("c1", "b", drive.epoch("b")), obeyed("c1", "a", epoch + 1), obeyed("c2", "a", epoch)):
        assert drive("progress", answer) == []
    drive.lose("b")
    assert drive.world.commands.digest() == before
    assert drive.world.counts["stale_command_response"] == 3
    (ended,) = drive("progress", obeyed("c1", "a", epoch))
    assert statuses(ended) == {"a": "done"}


def test_an_id_is_used_once_while_it_is_remembered() -> None:
    drive = Driver().fleet("a")
    sent(drive, commanded("c1", nonce=1))
    assert drive("control", commanded("c1", nonce=1)) == []
    assert sent(drive, commanded("c1", nonce=2)).reason == "duplicate_id"
    (ended,) = drive("progress", obeyed("c1", "a", drive.epoch("a")))
    assert statuses(ended) == {"a": "done"}
    assert drive("control", commanded("c1", nonce=1)) == []
    assert sent(drive, commanded("c1", nonce=2)).reason == "duplicate_id"
    assert drive.world.counts["duplicate_command"] == 2
    drive.now_us += REMEMBER_US
    assert sent(drive, commanded("c1", nonce=1)).reason is None


def test_pending_commands_are_bounded() -> None:
    drive = Driver().fleet("a")
    for number in range(PENDING_MAX):
        assert sent(drive, commanded(f"c{number}")).reason is None
    assert sent(drive, commanded("more")).reason == "too_many_commands"
    drive("progress", obeyed("c7", "a", drive.epoch("a")))
    assert sent(drive, commanded("again")).reason is None


def test_outcome_texts_beyond_the_limit_are_omitted() -> None:
    drive = Driver().fleet("a", "b", "c")
    sent(drive, commanded("c1"))
    half = ["n" * (TEXT_CHARS_MAX // 2)]
    drive("progress", obeyed("c1", "a", drive.epoch("a"), "list_loras", *half))
    drive("progress", obeyed("c1", "b", drive.epoch("b"), "list_loras", *half, "more"))
    (ended,) = drive("progress", obeyed("c1", "c", drive.epoch("c"), "list_loras", "x"))
    assert [(one.status, len(one.loras), one.message) for one in ended.outcomes] == [
        ("done", 1, ""),
        ("done", 0, RESPONSE_OMITTED),
        ("done", 1, ""),
    ]


def routed(drive: Driver, name: str, **changes: Any) -> Any:
    (decided,) = drive("requests", request(name, lora_name="x", **changes))
    return decided


def test_adapters_that_are_loaded_or_unloaded_are_routed_by() -> None:
    drive = Driver().fleet("a", "b")
    assert isinstance(routed(drive, "r1"), RequestRejected)
    drive("progress", obeyed("nobody's", "b", drive.epoch("b"), "list_loras", "x"))
    assert isinstance(routed(drive, "r2"), RequestRejected), "only what was loaded or unloaded changes anything"
    # Its command is over, or was another owner's: it is loaded all the same.
    drive("progress", obeyed("nobody's", "b", drive.epoch("b"), "load_lora", "x"))
    assert routed(drive, "r3").worker_id == "b"
    drive("progress", obeyed("nobody's", "a", drive.epoch("a") + 99, "load_lora", "x"))
    drive("progress", obeyed("nobody's", "gone", 0, "load_lora", "x"))
    assert drive.world.counts["foreign_adapters"] == 2
    drive("progress", obeyed("nobody's", "b", drive.epoch("b"), "unload_lora"))
    assert isinstance(routed(drive, "r4"), RequestRejected)


def test_loading_an_adapter_resumes_waiting_requests() -> None:
    drive = Driver().fleet("a", "b")
    epoch = drive.epoch("a")
    drive("progress", obeyed("c", "a", epoch, "load_lora", "x"))
    assert routed(drive, "r1").worker_id == "a"
    assert drive("fleet", WorkerLost(owner_epoch=0, worker_id="a", worker_epoch=epoch)) == []
    sent(drive, commanded("c1", "load_lora", lora_name="x"))
    ended, again = drive("progress", obeyed("c1", "b", drive.epoch("b"), "load_lora", "x"))
    assert isinstance(ended, CommandEnded)
    assert isinstance(again, RequestRouted)
    assert (again.request_id, again.worker_id, again.attempt) == ("r1", "b", 2)


# Any history


def test_nothing_is_left_of_commands_that_are_forgotten() -> None:
    drive = Driver().fleet("a")
    sent(drive, commanded("c1"))
    drive("progress", obeyed("c1", "a", drive.epoch("a")))
    assert drive.world.commands.digest()
    drive.now_us += REMEMBER_US
    drive("requests", None)
    assert drive.world.commands.digest() == 0


def test_the_digest_covers_every_outcome() -> None:
    drive = Driver().fleet("a", "b")
    sent(drive, commanded("c1"))
    drive("progress", obeyed("c1", "a", drive.epoch("a"), "list_loras", "x"))
    drive.world.take_consumed()
    chunks: list[Any] = list(drive.world.snapshot())
    (at,) = (at for at, part in enumerate(chunks) if isinstance(part, CommandState))
    first, second = chunks[at].outcomes
    changes: list[dict[str, Any]] = [
        {"status": "left"},
        {"loras": ("y",)},
        {"message": "m"},
        {"worker_epoch": 77},
        {"pool": "q"},
    ]
    digests = {drive.world.digest()}
    for change in changes:
        state = msgspec.structs.replace(chunks[at], outcomes=(msgspec.structs.replace(first, **change), second))
        digests.add(restore([*chunks[:at], state, *chunks[at + 1 :]]).digest())
    assert len(digests) == 1 + len(changes)


def test_a_second_response_is_ignored() -> None:
    drive = Driver().fleet("a", "b")
    sent(drive, commanded("c1"))
    drive("progress", obeyed("c1", "a", drive.epoch("a")))
    assert drive("progress", declined("c1", "a", drive.epoch("a"))) == []
    (ended,) = drive.lose("b")
    assert statuses(ended) == {"a": "done", "b": "left"}
