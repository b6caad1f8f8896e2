"""What the Kafka API counts."""

from prometheus_client import CollectorRegistry, Counter, Gauge


class KafkaApiMetrics:
    """The metrics of one ingress's Kafka API."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "forebay_kafka_api_requests",
            "requests answered by this ingress: answered, error, malformed",
            ("outcome",),
            registry=registry,
        )
        self.malformed = Counter(
            "forebay_kafka_api_malformed",
            "records that are no request, by the code of the error",
            ("reason",),
            registry=registry,
        )
        self.repeated = Counter(
            "forebay_kafka_api_repeated", "answers of another ingress given again after a take-over", registry=registry
        )
        self.undeliverable = Counter(
            "forebay_kafka_api_undeliverable", "answers that their reply-topic did not take", registry=registry
        )
        self.in_flight = Gauge("forebay_kafka_api_in_flight", "requests submitted and not answered", registry=registry)
        self.partitions = Gauge(
            "forebay_kafka_api_partitions", "partitions of openai-requests that this ingress reads", registry=registry
        )
