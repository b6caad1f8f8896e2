"""Metrics for collectors of Prometheus, each with all of its values."""

from collections.abc import Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

Values = float | Mapping[Any, float]  # a mapping is by the value of the label, or by a tuple of the labels


def counter(name: str, text: str, values: Values, *labels: str) -> Metric:
    return _filled(CounterMetricFamily(name, text, labels=labels), values)


def gauge(name: str, text: str, values: Values, *labels: str) -> Metric:
    return _filled(GaugeMetricFamily(name, text, labels=labels), values)


def _filled(family: CounterMetricFamily | GaugeMetricFamily, values: Values) -> Metric:
    for row, value in (values if isinstance(values, Mapping) else {(): values}).items():
        family.add_metric((row,) if isinstance(row, str) else row, value)
    return family
