"""Placement of adapters by the owner: where they are loaded, what is unloaded for them, and what failures do."""

from typing import Any, cast

import pytest

from forebay.core import worker_commands
from forebay.core.adapter_placement import BLOCKED_US, KEPT_US, LOAD_US, WAITING_MAX
from forebay.core.rederive import Rederivation
from forebay.core.state.commands import PENDING_MAX
from forebay.core.step import advance, claim
from forebay.core.worker_commands import FAILED_US
from forebay.core.world import World
from forebay.events.control import QueueConfig
from forebay.events.decisions import (
    AdapterPlaced,
    CommandEnded,
    CommandSent,
    JournalRecord,
    RequestAborted,
    RequestHeld,
    RequestRejected,
    RequestRouted,
)
from forebay.events.progress import CommandDone, CommandRefused, FirstTokenEmitted
from forebay.events.requests import RoutingHints
from forebay.events.versions import PLACEMENT_SINCE
from tests.core.worlds import PROMPTS, Driver, Recorded, commanded, joined, pool, request

DIGEST = "d" * 64


def catalog(drive: Driver, *names: str) -> None:
    for name in names:
        drive("control", commanded(f"add-{name}", "load_lora", name, lora_path=f"s3://b/{name}", placement="auto"))


def started(workers: str = "ab", slots: int = 2, **router: Any) -> Driver:
    """Return a group whose workers have slots for adapters, with the adapters u to z in its catalog."""
    drive = Driver()
    drive("control", pool(**router))
    for slot, name in enumerate(workers):
        drive("fleet", joined(name, slot, max_loras=slots))
    catalog(drive, *"uvwxyz")
    return drive


def ask(drive: Driver, name: str, lora: str, **changes: Any) -> list[Any]:
    fields = {"lora_name": lora, "timeout_us": 10 * LOAD_US, **changes}
    return drive("requests", request(name, fields.pop("blocks", PROMPTS[0]), **fields))


def end(drive: Driver, placed: AdapterPlaced, error: str = "") -> list[Any]:
    """Let the worker of a placement execute its commands, and return the decisions that follow."""
    worker_id, epoch = placed.target.worker_id, placed.target.worker_epoch
    worker = drive.world.fleet.get(worker_id)
    assert worker is not None
    fields: dict[str, Any] = {"worker_id": worker_id, "worker_epoch": epoch, "owner_epoch": 0}
    loras = worker.spec.loras
    if placed.unloaded:
        assert placed.unloaded not in loras
        drive(
            "progress",
            CommandDone(command_id=f"{placed.command_id}-unload", action="unload_lora", loras=loras, **fields),
        )
    fields = {**fields, "command_id": placed.command_id, "action": "load_lora"}
    if error:
        return drive("progress", CommandRefused(error=error, **fields))
    return drive("progress", CommandDone(loras=(*loras, placed.lora_name), lora_digest=DIGEST, **fields))


def load(drive: Driver, name: str, lora: str, **changes: Any) -> RequestRouted:
    """Submit a request whose adapter must be loaded, and return its routing."""
    held, placed = ask(drive, name, lora, **changes)
    assert (type(held), type(placed), placed.lora_name) == (RequestHeld, AdapterPlaced, lora)
    ended, routed = end(drive, placed)
    assert (type(ended), type(routed)) == (CommandEnded, RequestRouted)
    assert routed.worker_id == placed.target.worker_id
    return cast(RequestRouted, routed)


def test_adapter_is_loaded_for_its_first_request_and_then_used() -> None:
    drive = started()
    first = load(drive, "r1", "x")
    pending = drive.world.commands
    (routed,) = ask(drive, "r2", "x")
    assert (routed.worker_id, len(pending)) == (first.worker_id, 0)
    assert drive.world.counts["adapters_loaded"] == 1


def test_adding_an_adapter_ends_at_once_and_commands_no_worker() -> None:
    drive = started()
    sent, ended = drive("control", commanded("c", "load_lora", "t", lora_path="hf://o/t", placement="auto", nonce=7))
    assert (type(sent), sent.targets, sent.reason) == (CommandSent, (), None)
    assert (type(ended), ended.outcomes, ended.reply_key) == (CommandEnded, (), 7)
    (sent,) = drive("control", commanded("list", "list_loras"))
    for name in "ab":
        fields: dict[str, Any] = {"worker_id": name, "worker_epoch": drive.epoch(name), "owner_epoch": 0}
        made = drive("progress", CommandDone(command_id="list", action="list_loras", **fields))
    assert made[0].placed == (*"uvwxyzt",)
    (other,) = drive("control", commanded("d", "load_lora", "t", lora_path="hf://o/other", placement="auto"))
    assert (other.reason, other.message) == (
        "adapter_exists",
        "the catalog has t from hf://o/t; unload it first, or use another name",
    )


def test_owner_of_an_older_version_sends_the_command_to_workers() -> None:
    drive = Driver()
    claim(drive.world, 0, (), PLACEMENT_SINCE - 1)
    drive.fleet("a")
    (sent,) = drive("control", commanded("c", "load_lora", "x", lora_path="/x", placement="auto"))
    assert [one.worker_id for one in sent.targets] == ["a"]
    assert not len(drive.world.adapters)


def test_free_slots_come_first_and_then_the_lowest_cost() -> None:
    drive = started("abc", slots=1)
    load(drive, "r1", "u")
    drive.stored("c", PROMPTS[1])
    _, placed = ask(drive, "r2", "v", blocks=PROMPTS[1])
    assert (placed.target.worker_id, placed.candidates) == ("c", 2)
    assert placed.terms.device_overlap == len(PROMPTS[1]), "blocks of an earlier load, hashed for the adapter"


def test_least_recently_used_adapter_without_requests_is_unloaded() -> None:
    drive = started("a", slots=3)
    for lora in "uvw":
        routed = load(drive, f"r-{lora}", lora)
        if lora != "u":
            drive.finish(routed)
    drive.finish(ask(drive, "again", "v")[0])
    (held,) = ask(drive, "early", "x")
    assert isinstance(held, RequestHeld), "adapters that were just loaded stay"
    (placed,) = drive.wait(KEPT_US)
    assert (placed.unloaded, placed.reason, placed.waiting) == ("w", "missing", 1), "u has a request, v was used later"
    (elsewhere,) = ask(drive, "late", "w")
    assert isinstance(elsewhere, RequestHeld), "no request may go to a worker that unloads its adapter"
    assert end(drive, placed)[1].request_id == "early"


def test_adapters_of_operators_stay_loaded() -> None:
    drive = started("", slots=1)
    drive("fleet", joined("a", 0, max_loras=1, loras=("mine",)))
    (held,) = ask(drive, "r", "x")
    assert isinstance(held, RequestHeld)
    assert drive.wait(KEPT_US) == []
    drive("fleet", joined("b", 1, max_loras=1))
    (placed,) = drive.wait(BLOCKED_US)
    assert placed.target.worker_id == "b"


def test_worker_without_known_slots_gets_no_adapter() -> None:
    drive = started("a", slots=0)
    (rejected,) = ask(drive, "r", "x")
    assert (type(rejected), rejected.reason) == (RequestRejected, "no_eligible_worker")


def test_refused_load_is_tried_elsewhere_and_then_the_requests_are_aborted() -> None:
    drive = started()
    _, first = ask(drive, "r1", "x")
    (held,) = ask(drive, "r2", "x")
    assert isinstance(held, RequestHeld)
    _, second = end(drive, first, "its rank r is 99")
    assert {first.target.worker_id, second.target.worker_id} == {"a", "b"}
    _, *aborted = end(drive, second, "its rank r is 99")
    assert [(type(one), one.request_id, one.reason) for one in aborted] == [
        (RequestAborted, "r1", "adapter_failed"),
        (RequestAborted, "r2", "adapter_failed"),
    ]
    who = first.target.worker_id
    assert aborted[0].message == f"no worker could load the adapter x; {who}: its rank r is 99"
    (rejected,) = ask(drive, "r3", "x")
    assert (rejected.reason, rejected.message) == ("no_eligible_worker", aborted[0].message)
    drive.wait(FAILED_US)
    load(drive, "r4", "x")


def test_lost_worker_is_replaced_and_not_at_fault() -> None:
    drive = started()
    _, placed = ask(drive, "r1", "x")
    made = drive.lose(placed.target.worker_id)
    other = next(one for one in made if isinstance(one, AdapterPlaced))
    assert other.target.worker_id != placed.target.worker_id
    drive("fleet", joined(placed.target.worker_id, 0, max_loras=2))
    _, again = end(drive, other, "broken")
    assert again.target.worker_id == placed.target.worker_id


def test_request_that_lost_its_worker_gets_its_adapter_elsewhere() -> None:
    drive = started()
    routed = load(drive, "r1", "x")
    drive.emit(FirstTokenEmitted, routed)
    made = drive.lose(routed.worker_id)
    (placed,) = [one for one in made if isinstance(one, AdapterPlaced)]
    copy = drive.copy()
    for world in (drive, copy):
        assert end(world, placed)[1].attempt == 2


def test_load_that_takes_too_long_is_tried_elsewhere() -> None:
    drive = started()
    _, first = ask(drive, "r1", "x")
    ended, second = drive.wait(LOAD_US)
    assert [one.status for one in ended.outcomes] == ["timed_out"]
    assert second.target.worker_id != first.target.worker_id


def test_later_loads_require_the_digest_of_the_first() -> None:
    drive = started()
    routed = load(drive, "r1", "x")
    drive.lose(routed.worker_id)
    (pending,) = drive.world.commands.pending()
    assert (pending.command.lora_name, pending.command.lora_digest) == ("x", DIGEST)


def test_worker_loads_one_adapter_at_a_time() -> None:
    drive = started("a")
    _, first = ask(drive, "r1", "x")
    (held,) = ask(drive, "r2", "y")
    assert isinstance(held, RequestHeld)
    end(drive, first)
    (second,) = drive.wait(BLOCKED_US)
    assert second.lora_name == "y"


def test_commands_in_flight_are_bounded() -> None:
    drive = started("a")
    for number in range(PENDING_MAX - 1):
        drive("control", commanded(f"c{number}", nonce=number))
    (held,) = ask(drive, "r", "x")
    assert isinstance(held, RequestHeld)
    assert isinstance(drive.wait(LOAD_US)[-1], AdapterPlaced)


def test_operator_may_have_used_the_id_of_a_command() -> None:
    drive = started("a")
    name = f"adapter-{drive.world.seq + 2}"
    drive("control", commanded(name))
    _, placed = ask(drive, "r", "x")
    assert placed.command_id == f"{name}-"


def test_waiting_requests_get_an_adapter_that_enters_the_catalog() -> None:
    drive = Driver()
    drive("control", pool())
    drive("fleet", joined("a", 0, max_loras=1, loras=("x",)))
    (routed,) = ask(drive, "r", "x")
    drive.lose("a")
    drive("fleet", joined("b", 1, max_loras=1))
    catalog(drive, "x")
    assert [one.lora_name for one in drive.decided if isinstance(one, AdapterPlaced)] == ["x"]
    assert routed.worker_id == "a"


def test_waiting_requests_of_a_snapshot_get_their_adapter() -> None:
    drive = started(slots=1)
    lost = load(drive, "r", "x").worker_id
    drive.finish(load(drive, "other", "y"))
    drive.lose(lost)
    for restored in (drive.copy(), drive):
        (placed,) = restored.wait(KEPT_US)
        assert (placed.lora_name, placed.unloaded) == ("x", "y")


def test_digest_covers_the_slots_of_a_worker() -> None:
    digests = set()
    for slots in (0, 1, 2):
        drive = Driver()
        drive("fleet", joined("a", 0, max_loras=slots))
        digests.add(drive.world.digest())
    assert len(digests) == 3


def test_popular_adapter_gets_another_worker() -> None:
    drive = started("abc", queue=QueueConfig(run_ahead=0.0))
    seqs = drive.world.fleet.workers()[0].spec.max_num_seqs
    load(drive, "r", "x")
    for number in range(1, seqs):
        assert isinstance(ask(drive, f"r{number}", "x")[0], RequestRouted)
    for number in range(WAITING_MAX):
        assert [type(one) for one in ask(drive, f"q{number}", "x")] == [RequestHeld]
    _, placed = ask(drive, "more", "x")
    assert (placed.reason, placed.waiting) == ("waiting", WAITING_MAX + 1)
    _, *routed = end(drive, placed)
    assert {one.worker_id for one in routed} == {placed.target.worker_id}


def test_removed_adapter_is_unloaded_from_its_workers_only() -> None:
    drive = started()
    routed = load(drive, "r", "x")
    (sent,) = drive("control", commanded("c", "unload_lora", "x"))
    assert [one.worker_id for one in sent.targets] == [routed.worker_id]
    sent, ended = drive("control", commanded("d", "unload_lora", "y"))
    assert (sent.targets, ended.outcomes) == ((), ())
    (rejected,) = ask(drive, "r2", "y")
    assert isinstance(rejected, RequestRejected)


def test_decisions_follow_from_the_events_and_from_a_snapshot() -> None:
    drive = started(slots=1)
    records: list[JournalRecord] = []
    for number, lora in enumerate("uvwxyxwvu"):
        made = ask(drive, f"r{number}", lora)
        for placed in [one for one in (*made, *drive.wait(KEPT_US)) if isinstance(one, AdapterPlaced)]:
            for routed in end(drive, placed):
                if isinstance(routed, RequestRouted):
                    drive.finish(routed)
        records += drive.decided
        records.append(advance(drive.world))
        drive.decided.clear()
        assert drive.copy().world.adapters.names() == drive.world.adapters.names()
    assert sum(isinstance(one, AdapterPlaced) for one in records) >= 6
    world = World()
    claim(world, 0, (), drive.world.owner_events)
    derived, recorded = Rederivation(world), Recorded(drive.applied)
    for offset, record in enumerate(records):
        assert derived.apply(offset, record, recorded.events_of(record)) is None
    assert derived.world.digest() == drive.world.digest()


def test_blocked_placement_is_tried_again_only_while_a_request_waits() -> None:
    drive = started("a", slots=1)
    load(drive, "r1", "u")
    ask(drive, "r2", "v")
    assert drive.world.next_due_us() == drive.now_us + BLOCKED_US
    drive.cancel("r2")
    drive.wait(BLOCKED_US)
    due_us = drive.world.next_due_us()
    assert due_us is not None and due_us > drive.now_us + BLOCKED_US


@pytest.mark.parametrize("mode", ["round-robin", "least-loaded", "random"])
def test_other_modes_place_adapters_too(mode: str) -> None:
    drive = started(mode=mode)
    load(drive, "r", "x")


@pytest.mark.parametrize("error", ["", "its rank r is 99"])
def test_adapter_that_is_removed_while_it_loads_stays_removed(error: str) -> None:
    drive = started()
    _, placed = ask(drive, "r", "x")
    drive("control", commanded("c", "unload_lora", "x"))
    end(drive, placed, error)
    assert drive.world.adapters.get("x") is None


def test_adding_an_adapter_again_changes_nothing() -> None:
    drive = started()
    load(drive, "r", "x")
    before = drive.world.adapters.get("x")
    drive("control", commanded("again", "load_lora", "x", lora_path="s3://b/x", placement="auto"))
    assert drive.world.adapters.get("x") == before


def test_catalog_has_only_adapters_of_known_models(monkeypatch: pytest.MonkeyPatch) -> None:
    drive = started()
    add: dict[str, Any] = {"lora_path": "s3://b/t", "placement": "auto"}
    (other,) = drive("control", commanded("c", "load_lora", "t", model="other", **add))
    assert (other.reason, other.message) == ("unknown_model", "no pool serves the model other")
    monkeypatch.setattr(worker_commands, "ADAPTERS_MAX", len(drive.world.adapters))
    (full,) = drive("control", commanded("d", "load_lora", "t", **add))
    assert (full.reason, full.message) == ("too_many_adapters", "the catalog has 6 adapters, the maximum")


def test_request_that_no_worker_may_take_loads_no_adapter() -> None:
    drive = started()
    (rejected,) = ask(drive, "r", "x", routing=RoutingHints(required_taints=("gpu",)))
    assert (type(rejected), rejected.reason) == (RequestRejected, "no_eligible_worker")
    assert not drive.world.counts["adapters_loaded"]


def test_policy_that_fails_loads_no_adapter() -> None:
    class Broken:
        def decide(self, world: Any, request: Any) -> int:
            raise KeyError

    drive = Driver(custom={"mine.Broken": Broken})
    drive("control", pool(mode="mine.Broken"))
    drive("fleet", joined("a", 0, max_loras=2))
    catalog(drive, "x")
    (held,) = ask(drive, "r", "x")
    assert isinstance(held, RequestHeld)
    assert not drive.world.counts["adapters_loaded"]
