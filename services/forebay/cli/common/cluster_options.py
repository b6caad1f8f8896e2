"""Options of the commands that use Kafka and Redis. They are separate from the clients, which --help does not load."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from forebay.events.names import NameInvalid, require_name
from forebay.transport.kafka.settings import KafkaSettings, KafkaUnusable, read_properties

if TYPE_CHECKING:
    from forebay.transport.kafka.topics import TopicPlan

KafkaOption = Annotated[
    str,
    typer.Option("--kafka", metavar="HOST:PORT", help="Kafka bootstrap servers, as host:port, separated by commas."),
]
NamespaceOption = Annotated[str, typer.Option("--namespace", help="Prefix of Kafka topics and Redis keys.")]
PropertiesOption = Annotated[
    Path | None,
    typer.Option("--kafka-config", help="Properties file with librdkafka settings for SASL and TLS."),
]
MetricsPortOption = Annotated[
    int | None, typer.Option("--metrics-port", min=1, max=65535, help="Serve Prometheus metrics on this port.")
]

KAFKA = "127.0.0.1:19092"
REDIS = "redis://127.0.0.1:16379"
NAMESPACE = "forebay"
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class KafkaOptions:
    """Options that select Kafka and the topics of a system."""

    kafka: KafkaOption = KAFKA
    namespace: NamespaceOption = NAMESPACE
    kafka_config: PropertiesOption = None

    def settings(self) -> KafkaSettings:
        """Return the Kafka settings. Raises KafkaUnusable if an option is invalid."""
        return kafka_settings(self.kafka, self.namespace, self.kafka_config)


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """Options that select the Kafka and the Redis of a system."""

    PANEL: ClassVar = "Kafka and Redis"

    kafka: KafkaOption = KAFKA
    redis: Annotated[str, typer.Option("--redis", metavar="URL", help="Redis URL, as redis://host:port.")] = REDIS
    namespace: NamespaceOption = NAMESPACE
    kafka_config: PropertiesOption = None

    def cluster(self, metrics_host: str, metrics_port: int | None) -> "Cluster":
        """Return the addresses that a process uses. Raises KafkaUnusable if an option is invalid."""
        settings = kafka_settings(self.kafka, self.namespace, self.kafka_config)
        return Cluster(settings, self.redis, metrics_host, metrics_port)


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    metrics_port: MetricsPortOption = None
    metrics_host: Annotated[str, typer.Option("--metrics-host", help="Listen address of the metrics port.")] = LOOPBACK


@dataclass(frozen=True, slots=True)
class Cluster:
    """Addresses that one process uses: of Kafka, of Redis, and of its own metrics server."""

    kafka: KafkaSettings
    redis_url: str
    metrics_host: str
    metrics_port: int | None


def kafka_settings(bootstrap: str, namespace: str, properties: Path | None) -> KafkaSettings:
    """Return the Kafka settings from the options of a command. Raises KafkaUnusable if an option is invalid."""
    try:
        require_name("namespace", namespace)
    except NameInvalid as error:
        raise KafkaUnusable(f"--namespace: {error}") from error
    return KafkaSettings(bootstrap, namespace, read_properties(properties) if properties else {})


@dataclass(frozen=True, slots=True)
class TopicPlanOptions:
    """Partition counts and replication of missing topics. Existing topics keep theirs."""

    groups: Annotated[int, typer.Option(min=1, help="Maximum number of models: partitions of the control topics.")] = 4
    slots: Annotated[
        int,
        typer.Option(min=1, help="Partitions of a work topic. A model can have SLOTS / GROUPS workers per pool."),
    ] = 256
    replies: Annotated[int, typer.Option(min=1, help="Partitions of the topic `tokens`.")] = 16
    kafka_api_partitions: Annotated[
        int, typer.Option(min=1, help="Partitions of each of the topics `openai-requests` and `openai-responses`.")
    ] = 8
    replication: Annotated[int, typer.Option(min=1, help="Replicas of every partition. From 3 on, appends need 2.")] = 1

    def plan(self) -> "TopicPlan":
        from forebay.transport.kafka.topics import TopicPlan  # noqa: PLC0415 - --help does not wait for Kafka's client

        return TopicPlan(
            groups=self.groups,
            slots=self.slots,
            replies=self.replies,
            kafka_api=self.kafka_api_partitions,
            replication=self.replication,
        )
