"""What an embedded log shows to Prometheus: how large it is, where it begins, and what retention removed."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from forebay.live.owner.retention import Retention
from forebay.transport.sqlite.log import SqliteLog


class RetentionMetrics(Collector):
    """The metrics of one log."""

    def __init__(self, log: SqliteLog, retention: Retention) -> None:
        self._log = log
        self._retention = retention

    def collect(self) -> Iterator[Metric]:
        """Return the metrics as they are now."""
        used, file = self._log.bytes_used()
        limit = self._retention.limits.size_bytes
        yield GaugeMetricFamily("forebay_log_bytes", "bytes that the records of the log take", value=used)
        yield GaugeMetricFamily("forebay_log_file_bytes", "bytes of the log's file, free pages included", value=file)
        yield GaugeMetricFamily("forebay_log_limit_bytes", "bytes that records may take: --log-max-size", value=limit)
        first = GaugeMetricFamily(
            "forebay_log_first_offset", "offset of the oldest record", labels=["topic", "partition"]
        )
        for (topic, partition), offset in sorted(self._log.starts().items()):
            first.add_metric([topic, str(partition)], offset)
        yield first
        trimmed = CounterMetricFamily("forebay_log_trimmed_records", "records removed by retention", labels=["topic"])
        for topic, count in sorted(self._retention.trimmed.items()):
            trimmed.add_metric([topic], count)
        yield trimmed
        text = "snapshots that were damaged or incomplete when retention read them back"
        yield CounterMetricFamily("forebay_log_snapshots_refused", text, value=self._retention.refused)
