"""Assign a control partition to each group that has a lease but no partition.

Only the owner of the group in control partition 0 does this, or every router while that group has none. Two such
routers at once do no harm, because readers use the first placement of a group (see `forebay.core.state.groups`).
"""

import logging
from collections.abc import Iterator

from prometheus_client.core import Metric

from forebay import runtime
from forebay.events.codec import encode
from forebay.events.groups import GroupPlaced
from forebay.events.names import NameInvalid, require_name
from forebay.events.topics import GROUPS
from forebay.runtime.metrics import collector, counter, gauge
from forebay.transport.base import Draft, LeaseError, Leases, Log
from forebay.transport.directory import PARTITION, Directory

logger = logging.getLogger(__name__)


class GroupPlacement:
    """Assigns groups to control partitions 0 to `partitions` - 1, one per partition. Logs each refused group once."""

    def __init__(self, log: Log, leases: Leases, directory: Directory, partitions: int) -> None:
        self._log = log
        self._leases = leases
        self._directory = directory
        self._partitions = partitions
        self._reported: set[str] = set()
        self._readable = True
        self.refused = 0

    async def update(self) -> None:
        """Assign a partition to each group that has leases and no partition. Raises LogError."""
        try:
            groups = await runtime.offload(self._leases.groups)
        except LeaseError as error:
            if self._readable:
                logger.warning("the groups of the leases cannot be read, retrying: %s", error)
            self._readable = False
            return
        self._readable = True
        for group in groups:
            if self._directory.partition_of(group) is not None:
                continue
            try:
                # Check the name first, because a placement is permanent.
                require_name("model", group)
            except NameInvalid as error:
                self._refuse(group, f"a lease names an invalid group, which gets no partition: {error}")
                continue
            partition = self._directory.groups.lowest_free(self._partitions)
            if partition is None:
                self._refuse(group, self._directory.groups.refusal(group, self._partitions) or "")
                continue
            placed = GroupPlaced(group=group, partition=partition, at_us=runtime.wall_us())
            draft = Draft(GROUPS.name, PARTITION, encode(GROUPS, placed), group.encode())
            (offset,) = await self._log.append([draft])
            await self._directory.reach(offset + 1)
            logger.info("placed the group %s in partition %s", group, self._directory.partition_of(group))

    def _refuse(self, group: str, reason: str) -> None:
        if group not in self._reported:
            self._reported.add(group)
            self.refused += 1
            logger.error("%s", reason)


@collector
def placement_metrics(placement: GroupPlacement, directory: Directory) -> Iterator[Metric]:
    """Prometheus metrics of group placement, exported by every router."""
    groups = directory.groups
    yield gauge("forebay_groups", "groups with a control partition", len(groups.partitions))
    text = "groups rejected for an invalid name or for lack of a free control partition"
    yield counter("forebay_groups_refused", text, placement.refused)
    ignored = dict(sorted({**groups.ignored, "undecodable": directory.undecodable}.items()))
    text = "records on the topic groups without effect, by reason"
    yield counter("forebay_placements_ignored", text, ignored, "reason")
