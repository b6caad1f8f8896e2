"""Commands sent to an ingress, and their outcomes."""

import asyncio
from collections.abc import Awaitable
from typing import Any

import httpx

from forebay.events.codec import decode
from forebay.events.control import WorkerCommanded
from forebay.events.decisions import CommandOutcome
from forebay.events.tokens import CommandResponse
from forebay.events.topics import CONTROL
from forebay.transport.sqlite.log import SqliteLog
from tests.ingress.conftest import Scene
from tests.system import until

LORA = {"lora_name": "sql", "lora_path": "/adapters/sql"}


def given(log: SqliteLog) -> list[WorkerCommanded]:
    found = [decode(CONTROL, record.value) for record in log.records(CONTROL.name, 0, 0, 1000)]
    return [event for event in found if isinstance(event, WorkerCommanded)]


def outcome(worker_id: str = "w1", **changes: Any) -> CommandOutcome:
    return CommandOutcome(**{"worker_id": worker_id, "worker_epoch": 1, "pool": "default", "status": "done", **changes})


async def next_command(scene: Scene, count: int = 1) -> WorkerCommanded:
    await until(lambda: len(given(scene.log)) >= count)
    return given(scene.log)[count - 1]


async def answered(
    scene: Scene, call: Awaitable[httpx.Response], *outcomes: CommandOutcome, count: int = 1, error: Any = None
) -> tuple[httpx.Response, WorkerCommanded]:
    """Send a command, and respond as the router."""
    pending = asyncio.ensure_future(call)
    command = await next_command(scene, count)
    scene.send(CommandResponse(command_id=command.command_id, owner_epoch=1, outcomes=outcomes, error=error))
    return await pending, command
