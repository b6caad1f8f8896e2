"""States of a group at which a derivation can begin: the checkpoints of its catalog."""

from forebay.core.routing.policies import ONLY_BUILT_IN, CustomPolicies
from forebay.journal.start import Start, StoredState, begins_of
from forebay.replay.catalog import checkpoints
from forebay.replay.catalog.store import Store
from forebay.replay.states import States
from forebay.transport.base import Log


class CatalogStates(States):
    """The checkpoints of a catalog, and the snapshots on the log where the catalog has no usable one."""

    def __init__(self, store: Store, log: Log, partition: int, custom: CustomPolicies = ONLY_BUILT_IN) -> None:
        super().__init__(log, partition, custom)
        self._connection = store.connection

    async def before(self, offset: int) -> Start:
        if checkpoints.is_of_other_rules(self._connection, offset):
            return await super().before(offset)
        begins, first = await begins_of(self.log, self.partition), checkpoints.span_of(self._connection, offset)
        for known in checkpoints.newest_before(self._connection, offset):
            if not known.is_usable(begins) or known.offset < first:
                break
            start = checkpoints.load(self._connection, known.offset, self.custom)
            if start is not None:
                return start
        return await super().before(offset)

    def by_time(self, time_us: int, /) -> StoredState | None:
        return checkpoints.by_time(self._connection, time_us)
