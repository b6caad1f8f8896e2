"""Two routers that are idle for longer than the maximum poll interval of a consumer.

Their processes start first and are checked last, so they run in parallel with the other tests.
"""

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

from forebay.transport.kafka.settings import KafkaSettings
from forebay.transport.kafka.topics import create_topics
from infra.kafka.kafka import HOST
from tests.harness.cluster import FOREBAY, PLAN, POOL
from tests.harness.local import free_ports
from tests.harness.processes import Processes

IDLE_S = 360.0  # aiokafka's members leave after 300 s without a poll, some seconds after they joined
MARK = "idle_standby"  # the tests that need these processes; conftest.py runs them last


@dataclass(slots=True)
class IdleCluster:
    """The processes, their Kafka, Redis and namespace, and the monotonic start time of the routers."""

    processes: Processes
    settings: KafkaSettings
    url: str
    began_s: float

    def where(self) -> list[str]:
        """Return the options for Kafka and the namespace."""
        return ["--kafka", self.settings.bootstrap, "--namespace", self.settings.namespace]


def start(kafka: str, redis_url: str, namespace: str, folder: Path) -> IdleCluster:
    """Start two routers, a worker and an ingress."""
    settings = KafkaSettings(kafka, namespace)
    asyncio.run(create_topics(settings, PLAN, [POOL]))
    processes = Processes(folder)
    port = free_ports(1)
    cluster = IdleCluster(processes, settings, f"http://{HOST}:{port}", time.monotonic())
    where = [*cluster.where(), "--redis", redis_url]
    for name in ("r1", "r2"):
        processes.start(name, [FOREBAY, "router", *where, "--id", name, "--verbose"])
    processes.start("w1", [FOREBAY, "worker", *where, "--id", "w1"])
    processes.start("i1", [FOREBAY, "ingress", *where, "--id", "i1", "--port", str(port)])
    return cluster
