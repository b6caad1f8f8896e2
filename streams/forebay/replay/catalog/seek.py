"""Derive moments and explanations of a group, beginning at the nearest checkpoint of its catalog."""

from forebay.core.routing.policies import ONLY_BUILT_IN, CustomPolicies
from forebay.journal.start import Start, StoredState, begins_of
from forebay.replay.at import Position, seek_record, seek_time
from forebay.replay.catalog import checkpoints
from forebay.replay.catalog.mentions import find_mentions
from forebay.replay.catalog.store import Store
from forebay.replay.explain.explain import Known, explain
from forebay.replay.explain.explanation import Explanation
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
        begins, first = await begins_of(self._log, self._partition), checkpoints.span_of(self._connection, offset)
        for known in checkpoints.newest_before(self._connection, offset):
            if not known.is_usable(begins) or known.offset < first:
                break
            start = checkpoints.load(self._connection, known.offset, self._custom)
            if start is not None:
                return start
        return await super().before(offset)

    def by_time(self, time_us: int, /) -> StoredState | None:
        return checkpoints.by_time(self._connection, time_us)


async def catalog_position(
    log: Log,
    partition: int,
    store: Store,
    *,
    time_us: int | None = None,
    offset: int | None = None,
    custom: CustomPolicies = ONLY_BUILT_IN,
) -> Position:
    """Return the position of `seek_time` or `seek_record`, in a short time.

    Unlike a position that begins at a snapshot of the log, it has the load and cache of all workers that were lost
    since the beginning of the catalog. Raises NotDerivable if an owner with other decision rules decided at that
    moment, and NoSuchRecord if the log begins after `time_us` or ends before it, or has no journal record at `offset`.
    """
    states = CatalogStates(store, log, partition, custom)
    if time_us is not None:
        return await seek_time(log, partition, time_us, custom, states)
    return await seek_record(log, partition, offset, custom, states)


async def catalog_explanation(
    log: Log,
    partition: int,
    store: Store,
    request_id: str,
    *,
    journal_offset: int | None = None,
    with_changes: bool = False,
    custom: CustomPolicies = ONLY_BUILT_IN,
) -> Explanation:
    """Return the explanation of a request, in a short time. Raises UnknownRequest if no record is about the request.

    If several requests used the ID, `journal_offset` is that of the newest decision about one; None for the newest one.
    """
    return await explain(
        log,
        partition,
        request_id,
        with_changes=with_changes,
        custom=custom,
        known=Known(CatalogStates(store, log, partition, custom), find_mentions(store, request_id, journal_offset)),
    )
