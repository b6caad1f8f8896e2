"""Prometheus metrics of a shadow, read from its statistics at each scrape."""

from collections.abc import Iterator
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from forebay.live.shadow.shadow import Shadow
from forebay.live.shadow.statistics import REGRET_BUCKETS

# Name of the metric, attribute of `PoolStatistics`, and help text.
COUNTERS = (
    ("forebay_shadow_decisions", "decisions", "recorded decisions that the shadow evaluated"),
    ("forebay_shadow_agreements", "agreements", "decisions for which the shadow selected the same rank"),
    ("forebay_shadow_held", "held", "decisions for which the shadow would have queued the request"),
    ("forebay_shadow_incomparable", "incomparable", "decisions whose recorded rank was not a candidate of the shadow"),
    (
        "forebay_shadow_excess_blocks",
        "excess_blocks",
        "cost of the shadow's selections above the recorded ones, by the shadow's cost function, in blocks",
    ),
    (
        "forebay_shadow_overlap_blocks_won",
        "overlap_blocks_won",
        "blocks of overlap of the shadow's selections above the recorded ones",
    ),
    (
        "forebay_shadow_overlap_blocks_lost",
        "overlap_blocks_lost",
        "blocks of overlap of the recorded selections above the shadow's",
    ),
)


class ShadowMetrics(Collector):
    """Prometheus metrics of one shadow by pool, counted since the start of this process."""

    def __init__(self, shadow: Shadow) -> None:
        self._shadow = shadow

    def collect(self) -> Iterator[Metric]:
        shadow = self._shadow
        lag = max(0, shadow.end - shadow.position)
        yield self._gauge("forebay_shadow_lag_records", "journal records that the shadow has not followed yet", lag)
        text = "journal offset up to which the shadow has followed"
        yield self._gauge("forebay_shadow_journal_offset", text, shadow.position)
        yield from self._counted()
        yield from self._compared()

    def _counted(self) -> Iterator[Metric]:
        name = self._shadow.settings.name
        for series, attribute, text in COUNTERS:
            family = CounterMetricFamily(series, text, labels=["shadow", "pool"])
            for pool, statistics in sorted(self._shadow.statistics.pools.items()):
                family.add_metric([name, pool], getattr(statistics, attribute))
            yield family

    def _compared(self) -> Iterator[Metric]:
        name = self._shadow.settings.name
        failures = CounterMetricFamily(
            "forebay_shadow_failures",
            "decisions for which the shadow selected no rank, by reason",
            labels=["shadow", "pool", "reason"],
        )
        text = "cost of the recorded selection above the shadow's, by the shadow's cost function, in blocks"
        regret = HistogramMetricFamily("forebay_shadow_regret_blocks", text, labels=["shadow", "pool"])
        limits = [*map(str, REGRET_BUCKETS), "+Inf"]
        for pool, statistics in sorted(self._shadow.statistics.pools.items()):
            for reason, count in sorted(statistics.failures.items()):
                failures.add_metric([name, pool, reason], count)
            buckets = list(zip(limits, accumulate(statistics.buckets), strict=True))
            regret.add_metric([name, pool], buckets, statistics.regret_blocks)
        yield from (failures, regret)

    def _gauge(self, series: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(series, text, labels=["shadow"])
        family.add_metric([self._shadow.settings.name], value)
        return family
