"""Prometheus metrics of an embedded log: its size, its first offsets, and the records that retention removed."""

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from forebay.live.owner.retention import Retention
from forebay.transport.sqlite.log import SqliteLog


class RetentionMetrics(Collector):
    def __init__(self, log: SqliteLog, *retentions: Retention) -> None:
        self._log = log
        self._retentions = retentions

    def collect(self) -> Iterator[Metric]:
        used, file = self._log.bytes_used()
        limit = self._retentions[0].limits.size_bytes
        yield GaugeMetricFamily("forebay_log_bytes", "bytes of records in the log", value=used)
        yield GaugeMetricFamily("forebay_log_file_bytes", "bytes of the log file, including free pages", value=file)
        text = "maximum bytes of records in the log, from --log-max-size"
        yield GaugeMetricFamily("forebay_log_limit_bytes", text, value=limit)
        text = "offset of the oldest record in each partition"
        first = GaugeMetricFamily("forebay_log_first_offset", text, labels=["topic", "partition"])
        for (topic, partition), offset in sorted(self._log.starts().items()):
            first.add_metric([topic, str(partition)], offset)
        yield first
        trimmed = CounterMetricFamily("forebay_log_trimmed_records", "records removed by retention", labels=["topic"])
        counts = sum((retention.trimmed for retention in self._retentions), Counter[str]())
        for topic, count in sorted(counts.items()):
            trimmed.add_metric([topic], count)
        yield trimmed
        text = "snapshots that retention found damaged or incomplete, and therefore kept all records for"
        refused = sum(retention.refused for retention in self._retentions)
        yield CounterMetricFamily("forebay_log_snapshots_refused", text, value=refused)
