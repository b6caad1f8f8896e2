"""Options of the commands that use Kafka and Redis. They are separate from the clients, which --help does not load."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from forebay.cli.common.errors import fail
from forebay.cli.common.options import Option
from forebay.events.names import NameInvalid, require_name, unknown_name
from forebay.transport.kafka.settings import KafkaSettings, KafkaUnusable, read_properties

if TYPE_CHECKING:
    from forebay.processes.service import Cluster
    from forebay.transport.kafka.topics import TopicPlan

KafkaOption = Annotated[
    str, Option("--kafka", metavar="HOST:PORT", help="Kafka bootstrap servers, as host:port, separated by commas.")
]
NamespaceOption = Annotated[str, Option("--namespace", help="Prefix of Kafka topics and Redis keys.")]
PropertiesOption = Annotated[
    Path | None, Option("--kafka-config", help="Properties file with librdkafka settings for SASL and TLS.")
]
MetricsPortOption = Annotated[
    int | None, Option("--metrics-port", min=1, max=65535, help="Serve Prometheus metrics on this port.")
]

KAFKA = "127.0.0.1:19092"
REDIS = "redis://127.0.0.1:16379"
NAMESPACE = "forebay"
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class KafkaOptions:
    kafka: KafkaOption = KAFKA
    namespace: NamespaceOption = NAMESPACE
    kafka_config: PropertiesOption = None

    def settings(self) -> KafkaSettings:
        """Return the Kafka settings. Raises KafkaUnusable if an option is invalid."""
        return kafka_settings(self.kafka, self.namespace, self.kafka_config)


@dataclass(frozen=True, slots=True)
class ClusterOptions(KafkaOptions):
    PANEL: ClassVar = "Kafka and Redis"

    redis: Annotated[str, Option("--redis", metavar="URL", help="Redis URL, as redis://host:port.")] = REDIS

    def cluster(self, metrics_host: str, metrics_port: int | None) -> "Cluster":
        """Return the addresses that a process uses. Raises KafkaUnusable if an option is invalid."""
        from forebay.processes.service import Cluster  # noqa: PLC0415 - --help does not wait for clients

        return Cluster(self.settings(), self.redis, metrics_host, metrics_port)


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    metrics_port: MetricsPortOption = None
    metrics_host: Annotated[str, Option("--host", help="Listen address of the metrics port.", has_variable=False)] = (
        LOOPBACK
    )


def kafka_settings(bootstrap: str, namespace: str, properties: Path | None) -> KafkaSettings:
    """Return the Kafka settings from the options of a command. Raises KafkaUnusable if an option is invalid."""
    try:
        require_name("namespace", namespace)
    except NameInvalid as error:
        raise KafkaUnusable(f"--namespace: {error}") from error
    return KafkaSettings(bootstrap, namespace, read_properties(properties) if properties else {})


PARTITIONS_MAX = 100_000  # far more than a broker can serve
PARTITIONS = {"groups": 4, "slots": 16, "replies": 16, "kafka-api": 8}


@dataclass(frozen=True, slots=True)
class TopicPlanOptions:
    """Partition counts and replication of missing topics. Existing topics keep theirs."""

    partitions: Annotated[
        list[str] | None,
        Option(
            metavar="TOPICS=N",
            help="Partitions of missing topics. groups: most models, default 4. slots: workers of all models per pool,"
            " to which routers add more as needed, default 16. replies: topic `tokens`, default 16. kafka-api: requests"
            " and responses, default 8. Repeatable.",
        ),
    ] = None
    replication: Annotated[int, Option(min=1, help="Replicas of every partition. From 3 on, appends need 2.")] = 1

    def plan(self) -> "TopicPlan":
        """Return the partitions of all topics. An invalid number ends the command."""
        from forebay.transport.kafka.topics import TopicPlan  # noqa: PLC0415 - --help does not wait for Kafka's client

        counts = dict(PARTITIONS)
        for text in self.partitions or ():
            name, _, count = text.partition("=")
            if name not in counts:
                fail(f"--partitions {text}: {unknown_name('kind of topics', name, counts)}")
            if not re.fullmatch(r"[0-9]{1,6}", count) or not 1 <= int(count) <= PARTITIONS_MAX:
                fail(f"--partitions {text}: expected TOPICS=N, with N from 1 to {PARTITIONS_MAX}")
            counts[name] = int(count)
        return TopicPlan(
            groups=counts["groups"],
            slots=counts["slots"],
            replies=counts["replies"],
            kafka_api=counts["kafka-api"],
            replication=self.replication,
        )
