"""States of a recorded group at which a derivation can begin, and what is known about them."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from forebay.core.routing.policies import ONLY_BUILT_IN, CustomPolicies
from forebay.core.world import CORE_VERSION
from forebay.journal.start import Start, before
from forebay.replay.moment import LossFacts
from forebay.transport.base import Log


@dataclass(frozen=True, slots=True)
class CheckpointStart(Start):
    """A state of which the workers that were lost before it are known. Otherwise, they are read from the log."""

    lost: tuple[LossFacts, ...] = ()


class StateTime(NamedTuple):
    """Where a state is in the journal. `owner_nonce` is None to read it from the log.

    `seq` is the sequence number of the first record after the state; None if it is unknown.
    """

    offset: int
    now_us: int
    owner_epoch: int
    rules: int = CORE_VERSION
    owner_nonce: str | None = None
    seq: int | None = None


class States(Protocol):
    """States of one group, at which a derivation can begin. `LogStates` reads them from the log."""

    async def before(self, offset: int) -> Start:
        """Return the newest usable state from which the journal record at `offset` can be derived.

        Raises OtherRules if the owner of this record had other decision rules, and LogError if there is no such state.
        """
        ...

    def by_time(self, time_us: int) -> StateTime | None:
        """Return the newest known state whose clock is set and at most `time_us`; None if no such state is known."""
        ...


class LogStates:
    def __init__(self, log: Log, partition: int, custom: CustomPolicies = ONLY_BUILT_IN) -> None:
        self._log = log
        self._partition = partition
        self._custom = custom

    async def before(self, offset: int) -> Start:
        """Return the newest snapshot from which the journal record at `offset` can be derived, or the empty state."""
        return await before(self._log, self._partition, offset, self._custom)

    def by_time(self, time_us: int) -> StateTime | None:
        """Return None, because the times of snapshots are not known without a search."""
        return None
