"""Metrics of the Kafka API."""

from prometheus_client import CollectorRegistry, Counter, Gauge


class KafkaApiMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "forebay_kafka_api_requests",
            "completed requests by outcome: answered, error, malformed",
            ("outcome",),
            registry=registry,
        )
        self.malformed = Counter(
            "forebay_kafka_api_malformed",
            "records that are not a valid request, by error code",
            ("reason",),
            registry=registry,
        )
        self.repeated = Counter(
            "forebay_kafka_api_repeated",
            "responses of another ingress that were sent again after a takeover",
            registry=registry,
        )
        self.undeliverable = Counter(
            "forebay_kafka_api_undeliverable",
            "responses that could not be written to their reply-topic",
            registry=registry,
        )
        self.in_flight = Gauge(
            "forebay_kafka_api_in_flight", "submitted requests without a complete response", registry=registry
        )
        self.partitions = Gauge(
            "forebay_kafka_api_partitions", "partitions of openai-requests that this ingress reads", registry=registry
        )
