"""Client for commands to workers: appends a command to the log and waits for the outcomes. It does not use HTTP."""

from collections.abc import Callable

from forebay import runtime
from forebay.events.codec import encode
from forebay.events.control import Command, WorkerCommanded
from forebay.events.tokens import CommandResponse
from forebay.events.topics import CONTROL
from forebay.ingress.errors import ApiError
from forebay.ingress.streams import ReplyReader
from forebay.transport.base import Draft, Log, LogError

GRACE_S = 5.0  # the owner enforces the deadline first; this timeout covers a lost owner
NONCE_BYTES = 7  # JSON parsers of other languages may support only 63 bits


class CommandClient:
    def __init__(
        self, log: Log, replies: ReplyReader, model: str, reply_slot: int, require_partition: Callable[[], int]
    ) -> None:
        self._log = log
        self._replies = replies
        self._model = model
        self._reply_slot = reply_slot
        self._require_partition = require_partition

    async def run(
        self,
        command: Command,
        *,
        timeout_s: float,
        command_id: str = "",
        pool: str = "",
        worker_ids: tuple[str, ...] = (),
        operator: str = "",
    ) -> CommandResponse:
        """Send a command to workers, and return the outcome of each worker.

        Args:
            timeout_s: seconds that each worker has to execute the command.
            command_id: generated if empty.
            pool: pool whose workers execute the command; empty for all pools.
            worker_ids: empty for all workers.

        Raises ApiError if the owner rejected the command, the id is in flight already, or no result arrived.
        """
        partition = self._require_partition()
        command_id = command_id or f"command-{runtime.random_id()}"
        if self._replies.is_called(CommandResponse, command_id):
            raise ApiError(
                409, "duplicate_command_id", f"the command id {command_id} is already in flight; use another id"
            )
        event = WorkerCommanded(
            command_id=command_id,
            model=self._model,
            command=command,
            reply_slot=self._reply_slot,
            timeout_us=max(1, round(timeout_s * 1e6)),
            pool=pool,
            worker_ids=worker_ids,
            nonce=runtime.random_int(NONCE_BYTES),
            at_us=runtime.wall_us(),
            operator=operator,
        )

        async def send() -> None:
            try:
                await self._log.append([Draft(CONTROL.name, partition, encode(CONTROL, event))])
            except LogError as error:
                raise ApiError(503, "log_unavailable", str(error)) from error

        return await self._replies.call(CommandResponse, command_id, event.nonce, send, timeout_s + GRACE_S)
