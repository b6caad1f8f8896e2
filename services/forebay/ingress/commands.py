"""Client for commands to workers: appends a command to the log and waits for the outcomes. Independent of HTTP."""

import asyncio
import os
import time
import uuid
from collections.abc import Callable

from forebay.events.codec import encode
from forebay.events.control import Command, WorkerCommanded
from forebay.events.tokens import CommandResponse
from forebay.events.topics import CONTROL
from forebay.ingress.errors import ApiError
from forebay.ingress.streams import ReplyReader
from forebay.transport.base import Draft, Log, LogError

GRACE_S = 5.0  # the owner's deadline comes first; this one catches an owner that is gone
NONCE_BYTES = 7  # JSON readers of other languages have no more than 63 bits


class CommandClient:
    """Gives the commands of one ingress, which reads its answers on `reply_slot`; `place` is as for `Ingress`."""

    def __init__(
        self, log: Log, replies: ReplyReader, model: str, reply_slot: int, require_place: Callable[[], int]
    ) -> None:
        self._log = log
        self._replies = replies
        self._model = model
        self._reply_slot = reply_slot
        self._require_place = require_place

    async def run(
        self,
        command: Command,
        *,
        timeout_s: float,
        command_id: str = "",
        pool: str = "",
        worker_ids: tuple[str, ...] = (),
    ) -> CommandResponse:
        """Command workers, by default all of the model, and wait for every outcome. Raises ApiError for none."""
        partition = self._require_place()
        command_id = command_id or f"command-{uuid.uuid4().hex}"
        if self._replies.awaits_command(command_id):
            raise ApiError(409, "duplicate_command_id", f"the command {command_id} is under way")
        event = WorkerCommanded(
            command_id=command_id,
            model=self._model,
            command=command,
            reply_slot=self._reply_slot,
            timeout_us=max(1, round(timeout_s * 1e6)),
            pool=pool,
            worker_ids=worker_ids,
            nonce=int.from_bytes(os.urandom(NONCE_BYTES), "little"),
            at_us=time.time_ns() // 1000,
        )
        answer = self._replies.open_command(command_id)
        try:
            async with asyncio.timeout(timeout_s + GRACE_S):
                await self._log.append([Draft(CONTROL.name, partition, encode(CONTROL, event))])
                told = await answer
        except TimeoutError as error:
            raise ApiError(504, "deadline_exceeded", f"no router answered within {timeout_s + GRACE_S:g} s") from error
        except LogError as error:
            raise ApiError(503, "log_unavailable", str(error)) from error
        finally:
            self._replies.close_command(command_id)
        if isinstance(told, str):
            raise ApiError(503, "log_unavailable", told)
        if told.error is not None:
            raise ApiError(told.error.status, told.error.code, told.error.message)
        return told
