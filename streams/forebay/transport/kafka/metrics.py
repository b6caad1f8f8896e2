"""Prometheus metrics of a process's Kafka log: consumer lag, and the time from append to arrival."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from forebay.transport.kafka.log import KafkaLog

HOP_BUCKETS_S = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class KafkaMetrics(Collector):
    """Prometheus metrics of one Kafka log. The constructor registers them in `registry` and sets `log.on_hop`."""

    def __init__(self, log: KafkaLog, registry: CollectorRegistry) -> None:
        self._log = log
        self._hops = Histogram(
            "forebay_hop_seconds",
            "seconds from the append of a record to its arrival in this process; the newest record of each fetch",
            ["topic"],
            buckets=HOP_BUCKETS_S,
            registry=registry,
        )
        self._skewed = Counter(
            "forebay_hop_negative",
            "records whose append time is later than their arrival, because the clocks of two machines differ",
            ["topic"],
            registry=registry,
        )
        log.on_hop = self._on_hop
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        lag = GaugeMetricFamily(
            "forebay_kafka_consumer_lag", "records not fetched yet, by partition", labels=["topic", "partition"]
        )
        for (topic, partition), records in sorted(self._log.lags().items()):
            lag.add_metric([topic, str(partition)], records)
        yield lag
        text = "records dropped because their partition does not exist"
        refused = CounterMetricFamily("forebay_kafka_refused_records", text)
        refused.add_metric([], self._log.refused)
        yield refused

    def _on_hop(self, topic: str, seconds: float) -> None:
        # Kafka's timestamps are whole milliseconds, rounded down.
        if seconds < -0.001:
            self._skewed.labels(topic).inc()
        self._hops.labels(topic).observe(max(0.0, seconds))
