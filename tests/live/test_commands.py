"""Worker commands of an owner: sent once to each worker, sent again after a takeover, always with an outcome."""

import asyncio
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from forebay.events.codec import encode
from forebay.events.control import Command, WorkerCommanded
from forebay.events.decisions import CommandEnded, CommandRefusal, CommandSent
from forebay.events.fleet import WorkerLost
from forebay.events.progress import CommandDone, CommandRefused
from forebay.events.tokens import CommandResponse
from forebay.events.topics import CONTROL, DEAD_LETTERS, FLEET, PROGRESS, TOKENS, work_topic
from forebay.events.work import WorkerCommand, WorkItem
from forebay.live.owner.effects import encode_effects
from forebay.live.owner.metrics import OwnerMetrics
from forebay.live.owner.owner import Owner
from forebay.transport.base import Draft
from forebay.transport.sqlite.log import SqliteLog
from tests.system import MODEL, SLOT, System, settings, until

WORK = work_topic("default")
PROMPT = list(range(12))


class CommandedSystem(System):
    """A system whose workers receive commands."""

    def command(self, name: str, action: Any = "clear_kv_blocks", **changes: Any) -> None:
        lora = {key: changes.pop(key) for key in ("lora_name", "lora_path") if key in changes}
        fields: dict[str, Any] = {
            "command_id": name,
            "model": MODEL,
            "command": Command(action=action, **lora),
            "reply_slot": SLOT,
            "timeout_us": 60_000_000,
            **changes,
        }
        self.append(CONTROL, WorkerCommanded(**fields))

    def sent(self, slot: int = 0) -> list[WorkerCommand]:
        return self.events(WORK, WorkerCommand, slot)

    def complete(self, sent: WorkerCommand, worker_id: str, *loras: str) -> None:
        done = CommandDone(
            command_id=sent.command_id,
            action=sent.command.action,
            worker_id=worker_id,
            worker_epoch=sent.worker_epoch,
            owner_epoch=sent.owner_epoch,
            loras=loras,
        )
        self.append(PROGRESS, done)

    def responses(self, name: str) -> list[CommandResponse]:
        return [event for event in self.events(TOKENS, CommandResponse, SLOT) if event.command_id == name]


def slot_of(owner: Owner, worker_id: str) -> int:
    worker = owner.world.fleet.get(worker_id)
    assert worker is not None
    return worker.slot


def outcomes(response: CommandResponse) -> dict[str, tuple[str, tuple[str, ...]]]:
    return {one.worker_id: (one.status, one.loras) for one in response.outcomes}


@pytest.mark.parametrize("reason", get_args(CommandRefusal))
def test_every_refusal_is_reported_with_a_status(reason: CommandRefusal) -> None:
    refused = CommandSent(command_id="c", reply_slot=SLOT, action="sleep", reason=reason, message="no")
    (draft,) = encode_effects(MODEL, refused)
    responses = msgspec.msgpack.decode(draft.value)
    assert draft.partition == SLOT
    assert (responses["error"]["message"], 400 <= responses["error"]["status"] < 600) == ("no", True)
    assert encode_effects(MODEL, CommandSent(command_id="c", reply_slot=SLOT, action="sleep")) == []


async def test_a_lora_adapter_is_loaded_used_and_unloaded(log: SqliteLog, tmp_path: Path) -> None:
    system = CommandedSystem(log)
    async with system.started(2), system.owned(fleet=2) as owner:
        await system.serve("early", PROMPT, lora_name="x")
        where = {"lora_name": "x", "lora_path": str(tmp_path)}
        system.command("load", "load_lora", worker_ids=("w1",), **where)
        await until(lambda: system.responses("load"))
        await system.serve("r", PROMPT, lora_name="x")
        system.command("list", "list_loras")
        await until(lambda: system.responses("list"))
        system.command("unload", "unload_lora", lora_name="x")
        await until(lambda: system.responses("unload"))
        slot = slot_of(owner, "w1")
        await system.serve("late", PROMPT, lora_name="x")
    assert outcomes(system.responses("load")[0]) == {"w1": ("done", ("x",))}
    assert outcomes(system.responses("list")[0]) == {"w0": ("done", ()), "w1": ("done", ("x",))}
    assert outcomes(system.responses("unload")[0]) == {"w0": ("refused", ()), "w1": ("done", ())}
    assert [item.request_id for item in system.events(WORK, WorkItem, slot)] == ["r"]
    for name in ("early", "late"):
        error = system.ends()[name][0].error
        assert error is not None
        assert error.code == "no_eligible_worker"


async def test_a_new_owner_resends_pending_commands_and_reports_the_outcome(log: SqliteLog) -> None:
    system = CommandedSystem(log)
    system.join("w0")
    system.join("w1")
    async with system.owned(fleet=2) as owner:
        first_epoch = owner.journal.epoch
        system.command("c", "load_lora", lora_name="x", lora_path="/x", nonce=7)
        slots = slot_of(owner, "w0"), slot_of(owner, "w1")
        await until(lambda: system.sent(0) and system.sent(1))
        system.complete(system.sent(slots[0])[0], "w0", "x")
        await until(lambda: log.next_offset(PROGRESS.name, 0) == owner.world.view.get(PROGRESS.name))
        assert system.responses("c") == []
    async with system.owned() as owner:
        await until(lambda: len(system.sent(slots[1])) == 2)
        assert len(system.sent(slots[0])) == 1, "a worker that has answered receives the command only once"
        first, again = system.sent(slots[1])
        assert (first.owner_epoch, again.owner_epoch) == (first_epoch, owner.journal.epoch)
        assert (again.command_id, again.nonce, again.command) == ("c", 7, first.command)
        assert again.worker_epoch == first.worker_epoch
        assert 0 < again.timeout_us <= first.timeout_us
        worker = owner.world.fleet.get("w0")
        assert worker is not None
        assert worker.spec.loras == ("x",)
        system.complete(again, "w1", "x")
        await until(lambda: system.responses("c"))
    assert outcomes(system.responses("c")[0]) == {"w0": ("done", ("x",)), "w1": ("done", ("x",))}
    assert len(system.decisions(CommandEnded)) == 1


async def nothing() -> None:
    pass


async def test_an_outcome_that_may_be_unreported_is_reported_again(
    log: SqliteLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = CommandedSystem(log)
    async with system.owned(snapshot_every=1_000_000) as owner:
        system.command("nobody")
        await until(lambda: system.responses("nobody"))
        monkeypatch.setattr(owner, "take_snapshot", nothing)  # the owner ends without a final snapshot
    async with system.owned():
        pass
    first, again = system.responses("nobody")
    assert first.error is not None
    assert first.error.code == "no_workers"
    assert msgspec.structs.replace(again, owner_epoch=first.owner_epoch) == first


async def test_a_command_to_a_worker_that_leaves_has_the_outcome_left(log: SqliteLog) -> None:
    system = CommandedSystem(log)
    system.join("w0")
    async with system.owned(fleet=1):
        system.command("c", "sleep")
        await until(system.sent)
        system.leases.release(MODEL, "w0", "w0-1")
        await until(lambda: system.responses("c"))
        assert system.events(FLEET, WorkerLost)
    (outcome,) = system.responses("c")[0].outcomes
    assert (outcome.worker_id, outcome.status, outcome.message) == (
        "w0",
        "left",
        "the worker was lost before it responded",
    )


async def test_a_command_times_out_without_other_events(log: SqliteLog) -> None:
    system = CommandedSystem(log)
    system.join("w0")
    async with system.owned(fleet=1):
        system.command("c", timeout_us=1_000)
        await until(lambda: system.responses("c"))
    assert outcomes(system.responses("c")[0]) == {"w0": ("timed_out", ())}


async def test_a_command_that_ends_in_the_turn_of_its_dispatch_is_not_sent(log: SqliteLog) -> None:
    """The deadline of the command expires before the turn ends."""
    system = CommandedSystem(log)
    system.join("w0")
    async with system.owned(fleet=1) as owner:
        pass
    owner = Owner(log, system.leases, settings())
    await owner.start()
    system.command("c", timeout_us=1)
    while not system.responses("c"):
        await owner.turn()
        await asyncio.sleep(0)
    await owner.close()
    assert len(system.decisions(CommandSent)) == 1
    assert system.sent() == []


async def test_command_outcomes_are_counted(log: SqliteLog) -> None:
    system = CommandedSystem(log)
    registry = CollectorRegistry()
    system.join("w0")
    async with system.owned() as owner:
        registry.register(OwnerMetrics(owner, MODEL))
        await until(lambda: len(owner.world.fleet) == 1)
        system.command("waits")
        system.command("late", timeout_us=1)
        system.command("nowhere", worker_ids=("w9",))
        await until(lambda: system.responses("late") and system.responses("nowhere"))
        text = generate_latest(registry).decode()
    for line in (
        f'forebay_owner_commands_total{{model="{MODEL}",reason="timed_out"}} 1.0',
        f'forebay_owner_commands_total{{model="{MODEL}",reason="unknown_worker"}} 1.0',
        f'forebay_owner_commands_in_flight{{model="{MODEL}"}} 1.0',
    ):
        assert line in text
    assert 'reason="command_' not in text


async def test_an_unknown_command_is_a_dead_letter(log: SqliteLog) -> None:
    system = CommandedSystem(log)
    event = WorkerCommanded(
        command_id="c", model=MODEL, command=Command(action="sleep"), reply_slot=SLOT, timeout_us=1_000_000
    )
    value = encode(CONTROL, event).replace(b'"sleep"', b'"dream"')
    async with system.owned() as owner:
        log.append_soon([Draft(CONTROL.name, 0, value)])
        await until(lambda: log.records(DEAD_LETTERS.name, 0, 0, 10))
        assert owner.dead_letters == 1
    (letter,) = log.records(DEAD_LETTERS.name, 0, 0, 10)
    assert letter.value == value
    assert "dream" in (letter.headers or {})["reason"]
    assert system.decisions(CommandSent) == []


async def test_commands_of_workers_lost_before_a_takeover_have_the_outcome_left(log: SqliteLog) -> None:
    system = CommandedSystem(log)
    system.join("w0")
    async with system.owned(fleet=1):
        system.command("c")
        await until(system.sent)
    system.leases.release(MODEL, "w0", "w0-1")
    async with system.owned():
        await until(lambda: system.responses("c"))
    assert outcomes(system.responses("c")[0]) == {"w0": ("left", ())}


async def test_an_engine_refusal_does_not_stop_other_commands(log: SqliteLog) -> None:
    system = CommandedSystem(log)
    async with system.started(1), system.owned(fleet=1):
        system.command("load", "load_lora", lora_name="x", lora_path="/there/is/none")
        await until(lambda: system.responses("load"))
        (refused,) = system.events(PROGRESS, CommandRefused)
        assert refused.error == "no such directory: /there/is/none"
        await system.serve("r", PROMPT)
    (outcome,) = system.responses("load")[0].outcomes
    assert (outcome.status, outcome.message) == ("refused", refused.error)
