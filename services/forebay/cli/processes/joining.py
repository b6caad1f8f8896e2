"""Join of a worker to the group of its model: the topic of its pool, and the partition of the group."""

import asyncio
import contextlib
import logging

from forebay.cli.common.cluster import leases_at
from forebay.cli.common.cluster_options import Cluster
from forebay.cli.common.errors import complain
from forebay.events.fleet import WorkerSpec
from forebay.transport.base import LeaseError, Leases, Log
from forebay.transport.directory import Directory
from forebay.transport.kafka.topics import TopicPlan, count_topics, create_topics
from forebay.workers.runtime.life_cycle import State
from forebay.workers.runtime.metrics import Probes

logger = logging.getLogger(__name__)

ANNOUNCEMENT_TTL_MS = 6_000
CHECK_S = 5.0
CHECKS = 3  # consecutive checks: a takeover takes six seconds, and an owner reads the leases twice per second


async def join_group(cluster: Cluster, log: Log, spec: WorkerSpec) -> int:
    """Create the work topic of a pool if it is missing, and wait until a router has assigned a partition to the group.

    Returns:
        The partition of the control topics.

    Raises:
        LogError: the log failed.
    """
    counts = await count_topics(cluster.kafka)
    if spec.pool not in counts.pools:
        await create_topics(cluster.kafka, TopicPlan(slots=max(counts.pools.values())), [spec.pool])
    directory = Directory(log)
    await directory.start()
    try:
        return await _partition_of(directory, leases_at(cluster.redis_url, cluster.kafka.namespace), spec.model)
    finally:
        directory.close()


async def warn_if_not_admitted(probes: Probes, name: str, *, check_s: float = CHECK_S) -> None:
    """Print a warning if the engine runs, but `CHECKS` checks in a row find that no owner has added the worker."""
    checks = 0
    while checks < CHECKS:
        await asyncio.sleep(check_s)
        is_waiting = probes.worker is None or probes.worker.life.state is State.REGISTERED
        checks = checks + 1 if is_waiting else 0
    why = "either no router is running, or the router rejected the worker and logged the reason"
    complain(f"worker {name} is not admitted and keeps trying: {why}")


async def _partition_of(directory: Directory, leases: Leases, group: str) -> int:
    """Announce the group until a router has assigned a partition to it, and return the partition."""
    is_first_error = True
    while (partition := directory.partition_of(group)) is None:
        try:
            await asyncio.to_thread(leases.announce, group, ANNOUNCEMENT_TTL_MS)
        except LeaseError as error:
            if is_first_error:
                logger.warning("cannot announce the group %s, will retry: %s", group, error)
            is_first_error = False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ANNOUNCEMENT_TTL_MS / 3000):
                await directory.placed(group)
    return partition
