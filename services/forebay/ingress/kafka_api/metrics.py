"""What a topic door counts."""

from prometheus_client import CollectorRegistry, Counter, Gauge


class DoorMetrics:
    """The metrics of one ingress's door."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "forebay_door_requests",
            "requests answered by this door: answered, error, malformed",
            ("outcome",),
            registry=registry,
        )
        self.malformed = Counter(
            "forebay_door_malformed",
            "records that are no request, by the code of the error",
            ("reason",),
            registry=registry,
        )
        self.repeated = Counter(
            "forebay_door_repeated", "answers of another ingress given again after a take-over", registry=registry
        )
        self.undeliverable = Counter(
            "forebay_door_undeliverable", "answers that their reply-topic did not take", registry=registry
        )
        self.in_flight = Gauge("forebay_door_in_flight", "requests submitted and not answered", registry=registry)
        self.partitions = Gauge("forebay_door_partitions", "partitions of the door read here", registry=registry)
