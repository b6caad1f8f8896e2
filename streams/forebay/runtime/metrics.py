"""Metrics for collectors of Prometheus, each with all of its values."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial, wraps
from typing import Any, ParamSpec

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

P = ParamSpec("P")

Values = float | Mapping[Any, float]  # a mapping is by the value of the label, or by a tuple of the labels


def counter(name: str, text: str, values: Values, *labels: str) -> Metric:
    return _filled(CounterMetricFamily(name, text, labels=labels), values)


def gauge(name: str, text: str, values: Values, *labels: str) -> Metric:
    return _filled(GaugeMetricFamily(name, text, labels=labels), values)


def _filled(family: CounterMetricFamily | GaugeMetricFamily, values: Values) -> Metric:
    for row, value in (values if isinstance(values, Mapping) else {(): values}).items():
        family.add_metric((row,) if isinstance(row, str) else row, value)
    return family


class _Collector(Collector):
    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        return self._read()


def collector(function: Callable[P, Iterable[Metric]]) -> Callable[P, Collector]:
    """Turn a function that yields metrics into one that returns a collector of them."""

    @wraps(function)
    def made(*args: P.args, **kwargs: P.kwargs) -> Collector:
        return _Collector(partial(function, *args, **kwargs))

    return made
