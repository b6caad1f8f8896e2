"""Pause, kill and restart brokers with their data, and place the leaders of partitions on one broker."""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import KafkaError, for_code

from forebay.transport.kafka.settings import KafkaSettings
from forebay.transport.kafka.topics import TopicPlan, planned
from infra.kafka.kafka import Broker, BrokerError, pid_of, start, stop

RESTARTS_MAX = 3
POLL_S = 0.05


class StoppableBroker:
    """Broker that can be paused, killed and restarted with its data."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self._restarted: list[subprocess.Popen[bytes]] = []

    def pid(self) -> int:
        pid = pid_of(self.broker.data)
        assert pid is not None, f"no broker runs in {self.broker.data}"
        return pid

    @property
    def runs(self) -> bool:
        return pid_of(self.broker.data) is not None

    def pause(self) -> None:
        """Pause the broker: connections stay open without responses. Return when all its threads have stopped."""
        pid = self.pid()
        os.kill(pid, signal.SIGSTOP)
        while not _is_stopped(pid):  # a thread on another core may still respond for a moment
            os.sched_yield()

    def resume(self) -> None:
        os.kill(self.pid(), signal.SIGCONT)

    def kill(self) -> None:
        """Kill the broker: connections are refused."""
        os.kill(self.pid(), signal.SIGKILL)

    def stop(self) -> None:
        """Stop the broker in order: in a cluster, others become leaders first. Blocks until it has ended."""
        stop(self.broker.data)

    def end(self) -> None:
        for process in self._restarted:
            process.kill()
            process.wait()

    async def restart(self) -> None:
        """Restart the broker on its data, once the killed process has ended. Raises BrokerError."""
        while pid_of(self.broker.data) is not None:  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(POLL_S)
        for tries_left in reversed(range(RESTARTS_MAX)):
            try:
                self._restarted.append(await asyncio.to_thread(start, self.broker))
            except BrokerError:  # not ready in time on a busy machine
                if not tries_left:
                    raise
            else:
                return


async def create_topics_on(settings: KafkaSettings, plan: TopicPlan, pools: Sequence[str], nodes: list[int]) -> None:
    """Create all topics with replicas on the brokers `nodes`, of which the first leads every partition."""
    admin = AIOKafkaAdminClient(**settings.client_options())
    await admin.start()
    try:
        topics = [
            NewTopic(
                settings.topic(topic.name),
                num_partitions=-1,
                replication_factor=-1,
                replica_assignments=dict.fromkeys(range(partitions), nodes),
                topic_configs=config,
            )
            for topic, partitions, config in planned(plan, pools)
        ]
        response = await admin.create_topics(topics)
        for name, code, *_ in response.topic_errors:
            assert code == 0, f"{name}: {for_code(code).__name__}"
    finally:
        await admin.close()


async def replicas_of(settings: KafkaSettings) -> dict[tuple[str, int], tuple[int, set[int]]]:
    """Return the leader and the in-sync replicas of each partition of the namespace. The leader -1 means none.

    Retries while brokers do not respond.
    """
    while True:
        admin = AIOKafkaAdminClient(**settings.client_options())
        try:
            await admin.start()
            topics = await admin.describe_topics()
        except KafkaError:
            await asyncio.sleep(POLL_S)
        else:
            break
        finally:
            await admin.close()
    return {
        (topic["topic"].removeprefix(settings.topic("")), one["partition"]): (one["leader"], set(one["isr"]))
        for topic in topics
        if topic["topic"].startswith(settings.topic(""))
        for one in topic["partitions"]
    }


async def all_in_sync(settings: KafkaSettings, nodes: int) -> bool:
    """Return whether each partition has `nodes` in-sync replicas."""
    replicas = await replicas_of(settings)
    return bool(replicas) and all(len(isr) == nodes for _, isr in replicas.values())


def _is_stopped(pid: int) -> bool:
    """Return whether all threads of a process are stopped, or the process has ended."""
    for thread in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if thread.read_text().rpartition(")")[2].split()[0] not in "TtZX":
                return False
    return True
