"""Keep the state of one group, and prove that it equals the state of the owner.

The owner journals a digest of its state every 1,000 decisions and with each snapshot. A replica that derives another
digest or another decision is wrong. It counts and logs the difference, and restores the newest snapshot.
"""

import asyncio
import logging
from collections.abc import Iterator

import msgspec
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from forebay import runtime
from forebay.core.routing.policies import CustomPolicies
from forebay.core.world import CORE_VERSION, World
from forebay.events.decisions import Advanced, JournalRecord, Sealed
from forebay.events.topics import DECISIONS, INPUTS
from forebay.journal.reader import Reading
from forebay.journal.release import rules_text
from forebay.live.indexer.delivered_log import DeliveredLog
from forebay.live.standby import RecoveryDiverged, Standby
from forebay.runtime.metrics import gauge
from forebay.transport.base import Log, LogError

logger = logging.getLogger(__name__)

RETRY_S, RETRY_MAX_S = 1.0, 60.0  # pause before a restoration, doubled until one succeeds
RESTORING = "the newest snapshot and the records after it are being read"


class Position(msgspec.Struct, frozen=True, kw_only=True):
    """Position in the log for which an answer is valid.

    Attributes:
        journal_offset: offset after the newest applied record of the journal, the topic `decisions`.
        lag_records: journal records that are known and not applied yet.
        lag_events: input events that are known, but not yet in the applied part of the journal.
        lag_s: seconds since the newest applied event; 0 if all known records and events are applied.
        staleness_s: seconds since the replica last knew the end of the journal.
        proven_at: newest journal offset at which the digest of this state equaled that of the owner; null before the
            first.
    """

    journal_offset: int
    lag_records: int
    lag_events: int
    lag_s: float
    staleness_s: float
    proven_at: int | None


class Replica:
    """State of a group, derived from the records that Faust delivers. Implements `JournalObserver`.

    Attributes:
        problem: why there is no current state; None if there is one.
    """

    def __init__(self, log: Log, group: str, partition: int, custom: CustomPolicies, metrics: "IndexerMetrics") -> None:
        self.group = group
        self.partition = partition
        self.log = DeliveredLog(log, partition)
        self.problem: str | None = RESTORING
        self._custom = custom
        self._metrics = metrics
        self._proven_at: int | None = None
        self._standby = self._new_standby()
        self._end = 0
        self._checked_s = 0.0
        self._pause_s = RETRY_S

    def on_start(self, _: World) -> None:
        """Note that a snapshot was restored, which had the digest of its owner."""
        self._proven_at = self._standby.position - 1 if self._standby.position else None

    def on_record(self, offset: int, record: JournalRecord) -> None:
        """Count a digest that was derived equally."""
        if isinstance(record, Advanced | Sealed):
            self._metrics.equal.labels(self.group).inc()
            self._proven_at = offset

    @property
    def world(self) -> World:
        """State as of `position`, which must not be changed. It is current while there is no `problem`."""
        return self._standby.world

    def position(self) -> Position:
        standby = self._standby
        lag_records = max(0, self._end - standby.position, self.log.delivered_end(DECISIONS.name) - standby.position)
        lag_events = sum(
            max(0, self.log.delivered_end(topic.name) - standby.world.view.get(topic.name, 0)) for topic in INPUTS
        )
        is_behind = lag_records or lag_events
        return Position(
            journal_offset=standby.position,
            lag_records=lag_records,
            lag_events=lag_events,
            lag_s=max(0.0, runtime.wall_s() - standby.world.now_us / 1e6) if is_behind else 0.0,
            staleness_s=max(0.0, runtime.monotonic_s() - self._checked_s),
            proven_at=self._proven_at,
        )

    async def run(self) -> None:
        """Follow the journal until cancelled. After an error, restore the newest snapshot, with growing pauses."""
        while True:
            try:
                await self.follow()
            except LogError as error:
                self.problem = str(error)
                if isinstance(error, RecoveryDiverged):
                    self._metrics.different.labels(self.group).inc()
                logger.error(  # noqa: TRY400 - the trace says nothing about the log
                    "the replica of %s is restored in %g s: %s", self.group, self._pause_s, error
                )
            await asyncio.sleep(self._pause_s)
            self._pause_s = min(2 * self._pause_s, RETRY_MAX_S)
            self._standby = self._new_standby()

    async def follow(self) -> None:
        """Follow the journal from the state that was restored last, until cancelled. Raises LogError."""
        end = await self.log.end(DECISIONS.name, self.partition)
        while True:
            self._end, self._checked_s = end, runtime.monotonic_s()
            await self._standby.catch_up(end)
            self.problem, self._pause_s = self._foreign_rules(), RETRY_S
            end = await self.log.journal_end(end)

    def _foreign_rules(self) -> str | None:
        """Return why the records of the owner are skipped, None if they are derived."""
        if self._standby.state is Reading.DERIVING:
            return None
        rules = rules_text(self._standby.validity.rules, self._standby.validity.release)
        return f"its owner decides by {rules}, this indexer has version {CORE_VERSION}"

    def _new_standby(self) -> Standby:
        return Standby(self.log, self.partition, self, self._custom, waits_for_seal=True)


class IndexerMetrics(Collector):
    """Metrics of the replicas of an indexer, by partition. The counters stay when a replica goes to another process."""

    def __init__(self, replicas: dict[int, Replica], registry: CollectorRegistry) -> None:
        self._replicas = replicas

        def counter(name: str, text: str) -> Counter:
            return Counter(f"forebay_indexer_{name}", text, ["group"], registry=registry)

        self.equal = counter("digests_equal", "digests of the owner that equaled that of the replica")
        self.different = counter("digest_differences", "times that a replica differed from the owner and was restored")
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        found = {replica.group: (replica.problem is None, replica.position()) for replica in self._replicas.values()}
        following = {group: is_current for group, (is_current, _) in found.items()}
        offsets = {group: at.journal_offset for group, (_, at) in found.items()}
        lags = {group: at.lag_records for group, (_, at) in found.items()}
        proven = {group: -1 if at.proven_at is None else at.proven_at for group, (_, at) in found.items()}
        for name, text, values in (
            ("following", "1 for a group with a current state, 0 for one that is being restored", following),
            ("journal_offset", "offset after the newest applied journal record", offsets),
            ("lag_records", "journal records that are known and not applied yet", lags),
            ("proven_offset", "newest journal offset with a digest equal to that of the owner; -1 for none", proven),
        ):
            yield gauge(f"forebay_indexer_{name}", text, values, "group")
