"""Operators' commands to workers, from the event on `control` to the last outcome.

A command is pending at each of its workers until the worker responds, is lost, or the command times out. Later
responses have no effect. The command ends when it is pending at no worker. Its id is remembered for a while, so a
redelivered event does not run the command twice.

    pending --done, refused--> (outcome)     pending --worker lost--> left     pending --deadline--> timed_out
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, assert_never

import msgspec

from forebay.core.state.recent_ids import RecentIds
from forebay.core.state.requests import REMEMBER_US
from forebay.core.state.submitted_request import id_hash
from forebay.core.state_machine import IllegalTransition, digest_of, plain
from forebay.events.base import U64_MASK
from forebay.events.control import Command
from forebay.events.decisions import CommandOutcome
from forebay.events.progress import CommandDone, CommandRefused
from forebay.events.snapshots import CommandState, Remembered

PENDING_MAX = 64  # pending commands per group: operators send few, and each event may scan all of them
TEXT_CHARS_MAX = 256 << 10  # maximum of all outcomes of one command, because one journal record contains them
WORKER_LOST = "the worker was lost before it responded"
TIMED_OUT = "the worker did not respond in time"
LAST_READY = "it was the last ready worker of its pool; new requests need another worker"
RESPONSE_OMITTED = "the response is omitted, because the responses to this command are too long"


@dataclass(slots=True)
class PendingCommand:
    """Operator's command that is pending at one or more workers.

    Attributes:
        nonce: distinguishes commands with the same id.
        offset: offset of its `WorkerCommanded` on the control topic.
        reply_slot: partition of the topic `tokens` that gets the outcomes.
        due_us: deadline on the owner's clock, in microseconds.
        term: contribution to the digest of the fields that never change.
    """

    command_id: str
    nonce: int
    offset: int
    command: Command
    reply_slot: int
    due_us: int
    outcomes: dict[str, CommandOutcome]
    open: int = 0
    chars: int = 0
    term: int = 0

    def __post_init__(self) -> None:
        self.open = sum(one.status == "pending" for one in self.outcomes.values())
        self.chars = sum(map(_chars, self.outcomes.values()))
        fixed = self.command_id, self.nonce, self.offset, self.reply_slot, self.due_us
        self.term = digest_of(*fixed, plain(self.command))

    def digest(self) -> int:
        return self.term + sum(self.term_of(one) for one in self.outcomes.values())

    def term_of(self, outcome: CommandOutcome) -> int:
        return digest_of(plain(outcome), seed=self.term)


class PendingCommands:
    """Pending commands by id, and hashes of the ids of recently ended commands.

    Attributes:
        closed: commands that are pending at no worker any more. Not part of the state: after a method has added to it,
            the caller must end them before the next event.
    """

    def __init__(self) -> None:
        self.closed: list[PendingCommand] = []
        self._pending: dict[str, PendingCommand] = {}
        self._remembered = RecentIds()
        self._sum = 0

    def __len__(self) -> int:
        return len(self._pending)

    def get(self, command_id: str) -> PendingCommand | None:
        return self._pending.get(command_id)

    def pending(self) -> list[PendingCommand]:
        return sorted(self._pending.values(), key=lambda one: one.offset)

    def known_nonce(self, command_id: str) -> int | None:
        """Return the nonce of the pending or recently ended command with this id, or None if the id is new."""
        pending = self._pending.get(command_id)
        return self._remembered.get(id_hash(command_id)) if pending is None else pending.nonce

    def add(self, pending: PendingCommand) -> None:
        """Add a command that is pending at one or more workers. Its id must be new."""
        assert self.known_nonce(pending.command_id) is None
        assert pending.open
        self._pending[pending.command_id] = pending
        self._sum += pending.digest()

    def remember(self, command_id: str, nonce: int, now_us: int) -> None:
        """Remember the id of a command that ended without being pending, for `REMEMBER_US` after `now_us`."""
        self._remembered.add(id_hash(command_id), nonce, now_us + REMEMBER_US)

    def apply_response(self, event: CommandDone | CommandRefused) -> None:
        """Apply a worker's response to its command.

        Raises IllegalTransition if the command is not pending at this worker in this epoch.
        """
        pending = self._pending.get(event.command_id)
        outcome = None if pending is None else pending.outcomes.get(event.worker_id)
        if pending is None or outcome is None or outcome.worker_epoch != event.worker_epoch:
            raise IllegalTransition(f"{event.command_id} is not in flight at {event.worker_id}")
        if outcome.status != "pending":
            raise IllegalTransition(f"{event.command_id} is {outcome.status} at {event.worker_id}, not pending")
        match event:
            case CommandDone():
                self._settle(pending, msgspec.structs.replace(outcome, status="done", loras=event.loras))
            case CommandRefused():
                self._settle(pending, msgspec.structs.replace(outcome, status="refused", message=event.error))
            case _:
                assert_never(event)

    def drop_worker(self, worker_id: str, worker_epoch: int) -> None:
        """Set the outcome of commands pending at a lost worker to `left`."""
        for pending in self.pending():
            outcome = pending.outcomes.get(worker_id)
            if outcome is not None and outcome.worker_epoch == worker_epoch and outcome.status == "pending":
                self._set_failed(pending, outcome, "left", WORKER_LOST)

    def time_out(self, now_us: int) -> None:
        """Set pending outcomes past their deadline to `timed_out`."""
        for pending in sorted((one for one in self._pending.values() if one.due_us <= now_us), key=_deadline):
            for outcome in list(pending.outcomes.values()):
                if outcome.status == "pending":
                    self._set_failed(pending, outcome, "timed_out", TIMED_OUT)

    def end(self, pending: PendingCommand, now_us: int) -> None:
        """Remove a command that is pending at no worker, and remember its id for `REMEMBER_US` after `now_us`."""
        assert not pending.open
        del self._pending[pending.command_id]
        self._sum -= pending.digest()
        self.remember(pending.command_id, pending.nonce, now_us)

    def next_due_us(self) -> int | None:
        """Return the earliest deadline of a pending command, in microseconds, or None if no command is pending."""
        return min([one.due_us for one in self._pending.values()]) if self._pending else None

    def expire(self, now_us: int) -> None:
        self._remembered.forget(now_us)

    def digest(self) -> int:
        """Return a 64-bit digest over pending commands and remembered ids."""
        return (self._sum + self._remembered.digest()) & U64_MASK

    def snapshot(self) -> Iterator[CommandState | Remembered]:
        for one in self.pending():
            yield CommandState(
                command_id=one.command_id,
                nonce=one.nonce,
                offset=one.offset,
                command=one.command,
                reply_slot=one.reply_slot,
                due_us=one.due_us,
                outcomes=tuple(one.outcomes.values()),
            )
        for chunk in self._remembered.snapshot():
            yield msgspec.structs.replace(chunk, commands=True)

    def restore(self, chunk: CommandState | Remembered) -> None:
        match chunk:
            case CommandState():
                self.add(
                    PendingCommand(
                        command_id=chunk.command_id,
                        nonce=chunk.nonce,
                        offset=chunk.offset,
                        command=chunk.command,
                        reply_slot=chunk.reply_slot,
                        due_us=chunk.due_us,
                        outcomes={one.worker_id: one for one in chunk.outcomes},
                    )
                )
            case Remembered():
                self._remembered.restore(chunk)
            case _:
                assert_never(chunk)

    def _set_failed(
        self, pending: PendingCommand, outcome: CommandOutcome, status: Literal["left", "timed_out"], message: str
    ) -> None:
        self._settle(pending, msgspec.structs.replace(outcome, status=status, message=message))

    def _settle(self, pending: PendingCommand, outcome: CommandOutcome) -> None:
        if pending.chars + _chars(outcome) > TEXT_CHARS_MAX:
            outcome = msgspec.structs.replace(outcome, loras=(), message=RESPONSE_OMITTED)
        before = pending.outcomes[outcome.worker_id]
        self._sum += pending.term_of(outcome) - pending.term_of(before)
        pending.outcomes[outcome.worker_id] = outcome
        pending.chars += _chars(outcome)
        pending.open -= 1
        if not pending.open:
            self.closed.append(pending)


def _chars(outcome: CommandOutcome) -> int:
    return len(outcome.message) + sum(map(len, outcome.loras))


def _deadline(pending: PendingCommand) -> tuple[int, int]:
    return pending.due_us, pending.offset
