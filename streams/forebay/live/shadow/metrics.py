"""What a shadow shows to Prometheus, read from its figures when asked."""

from collections.abc import Iterator
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from forebay.live.shadow.shadow import Shadow
from forebay.live.shadow.statistics import REGRET_BUCKETS

# The name of a series, the figure that it shows, and what that is.
COUNTERS = (
    ("forebay_shadow_decisions", "decisions", "recorded decisions that the shadow spoke of"),
    ("forebay_shadow_agreements", "agreements", "decisions in which it chose the same rank"),
    ("forebay_shadow_held", "held", "decisions in which it would have let the request wait"),
    ("forebay_shadow_incomparable", "incomparable", "decisions whose recorded rank was none of its candidates"),
    (
        "forebay_shadow_excess_blocks",
        "excess_blocks",
        "what its own choices cost more than the recorded ones, by its costs, in blocks",
    ),
    ("forebay_shadow_overlap_blocks_won", "overlap_blocks_won", "cached blocks that it would have found more"),
    ("forebay_shadow_overlap_blocks_lost", "overlap_blocks_lost", "cached blocks that it would have found less"),
)


class ShadowMetrics(Collector):
    """Counts since the start of this process, by pool."""

    def __init__(self, shadow: Shadow) -> None:
        self._shadow = shadow

    def collect(self) -> Iterator[Metric]:
        """The metrics as they are now."""
        shadow = self._shadow
        lag = max(0, shadow.end - shadow.position)
        yield self._gauge("forebay_shadow_lag_records", "journal records that it has not followed yet", lag)
        text = "the journal offset up to which it has followed"
        yield self._gauge("forebay_shadow_journal_offset", text, shadow.position)
        yield from self._counted()
        yield from self._compared()

    def _counted(self) -> Iterator[Metric]:
        name = self._shadow.settings.name
        for series, figure, text in COUNTERS:
            family = CounterMetricFamily(series, text, labels=["shadow", "pool"])
            for pool, figures in sorted(self._shadow.figures.pools.items()):
                family.add_metric([name, pool], getattr(figures, figure))
            yield family

    def _compared(self) -> Iterator[Metric]:
        name = self._shadow.settings.name
        failures = CounterMetricFamily(
            "forebay_shadow_failures", "decisions without a choice of the shadow", labels=["shadow", "pool", "reason"]
        )
        text = "what the recorded choice costs more than the shadow's, by the shadow's costs, in blocks"
        regret = HistogramMetricFamily("forebay_shadow_regret_blocks", text, labels=["shadow", "pool"])
        limits = [*map(str, REGRET_BUCKETS), "+Inf"]
        for pool, figures in sorted(self._shadow.figures.pools.items()):
            for reason, count in sorted(figures.failures.items()):
                failures.add_metric([name, pool, reason], count)
            buckets = list(zip(limits, accumulate(figures.buckets), strict=True))
            regret.add_metric([name, pool], buckets, figures.regret_blocks)
        yield from (failures, regret)

    def _gauge(self, series: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(series, text, labels=["shadow"])
        family.add_metric([self._shadow.settings.name], value)
        return family
