"""`forebay planner supervise`: executes the planner's decisions with local processes or with Kubernetes."""

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from forebay.cli.common.cluster import connected, run_service, until_signal
from forebay.cli.common.cluster_options import Cluster, KafkaOptions, ServiceOptions
from forebay.cli.common.errors import explained
from forebay.cli.common.extras import require_extra
from forebay.cli.common.logs import LoggingOptions, announce
from forebay.cli.common.process_metrics import process_registry
from forebay.cli.planner.supervise_file import KubernetesSettings, ProcessSettings, read_supervise_file
from forebay.ingress.errors import Unusable
from forebay.live.planner.actuator import ActuatorService
from forebay.planner.actuators.metrics import SupervisorMetrics
from forebay.planner.actuators.processes import ProcessActuator
from forebay.planner.actuators.worker_directory import DirectoryUnusable, WorkerDirectory
from forebay.transport.kafka.topics import count_topics

if TYPE_CHECKING:  # imports the client of Kubernetes, an extra
    from forebay.planner.actuators.kubernetes import KubernetesActuator

KUBECONFIG = "~/.kube/config"


def run_supervise(*, file: Path, kafka: KafkaOptions, service: ServiceOptions, logs: LoggingOptions) -> None:
    """Run `forebay planner supervise`. command.py documents its options."""
    logs.start()
    with explained():
        settings = read_supervise_file(file)
        if isinstance(settings, KubernetesSettings):
            require_extra("kubernetes", "actuator kubernetes", "kubernetes")
        elif sys.platform != "linux":
            raise Unusable("actuator processes requires Linux, because it identifies processes by /proc")
        cluster = Cluster(kafka.settings(), "", service.metrics_host, service.metrics_port)
    run_service(_supervise(cluster, settings))


async def _supervise(cluster: Cluster, settings: ProcessSettings | KubernetesSettings) -> None:
    """Execute decisions until SIGINT or SIGTERM."""
    if isinstance(settings, KubernetesSettings):
        await _execute(cluster, _kubernetes(settings))
        return
    async with _processes(settings) as processes:
        announce(f"forebay: supervisor found {processes.running} running workers")
        await _execute(cluster, processes)
        announce(f"forebay: supervisor ended; {processes.running} workers continue to run")


async def _execute(cluster: Cluster, actuator: "ProcessActuator | KubernetesActuator") -> None:
    await count_topics(cluster.kafka)  # reports a missing topic, for which the client would wait
    registry = process_registry()
    async with connected(cluster, registry) as log:
        pools = ", ".join(sorted(f"{group}/{pool}" for group, pool in actuator.pools))
        announce(f"forebay: supervisor executes decisions about {pools} with {actuator.name}")
        service = ActuatorService(log, actuator)
        registry.register(SupervisorMetrics(service, actuator if isinstance(actuator, ProcessActuator) else None))
        parts = [actuator.run()] if isinstance(actuator, ProcessActuator) else []
        await until_signal(service.run(), *parts)


@asynccontextmanager
async def _processes(settings: ProcessSettings) -> AsyncIterator[ProcessActuator]:
    try:
        directory = await WorkerDirectory.open(settings.state)
    except DirectoryUnusable as error:
        raise Unusable(str(error)) from error
    try:
        yield ProcessActuator(settings.pools, directory, os.environ)
    except DirectoryUnusable as error:
        raise Unusable(str(error)) from error
    finally:
        directory.close()


def _kubernetes(settings: KubernetesSettings) -> "KubernetesActuator":
    # Imported here, because the client is an extra and takes half a second.
    from forebay.planner.actuators.kubernetes import (  # noqa: PLC0415
        KubernetesActuator,
        KubernetesUnusable,
        PodSet,
        connect,
    )

    in_pod = "KUBERNETES_SERVICE_HOST" in os.environ and "KUBECONFIG" not in os.environ
    path = str(Path(os.environ.get("KUBECONFIG", KUBECONFIG)).expanduser())
    try:
        api = connect(None if in_pod else path)
    except KubernetesUnusable as error:
        raise Unusable(str(error)) from error
    return KubernetesActuator({pool: PodSet(*names) for pool, names in settings.pools.items()}, api)
