"""States of a recorded group at which a derivation can begin."""

from dataclasses import dataclass

from forebay.core.routing.policies import ONLY_BUILT_IN, CustomPolicies
from forebay.journal.start import Start, StoredState, before
from forebay.replay.moment import LossFacts
from forebay.transport.base import Log


@dataclass(frozen=True, slots=True)
class CheckpointStart(Start):
    """A state for which the workers that were lost before it are known. For another one, they are read from the log."""

    lost: tuple[LossFacts, ...] = ()


class States:
    """The snapshots on the log of one group. A subclass may know more states."""

    def __init__(self, log: Log, partition: int, custom: CustomPolicies = ONLY_BUILT_IN) -> None:
        self.log = log
        self.partition = partition
        self.custom = custom

    async def before(self, offset: int) -> Start:
        """Return the newest usable state from which the journal record at `offset` can be derived.

        Raises OtherRules if the owner of this record had other decision rules, and LogError if there is no such state.
        """
        return await before(self.log, self.partition, offset, self.custom)

    def by_time(self, _time_us: int, /) -> StoredState | None:
        """Return the newest known state whose clock is set and at most this time; None if no such state is known.

        The times of snapshots are not known without a search.
        """
        return None
