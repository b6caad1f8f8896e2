"""Metrics of an ingress. Names and labels match Dynamo's frontend, so its dashboards work unchanged."""

from copy import copy
from typing import Self

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
TOKENS = (1, 16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


class IngressMetrics:
    """Prometheus metrics of one ingress, for one of its models. The label of the model is already set.

    With `model` None, only the metrics without the label of a model can be used, and `of_model`.
    """

    def __init__(self, registry: CollectorRegistry, model: str | None) -> None:
        name = "dynamo_frontend"
        self.requests = Counter(
            f"{name}_requests",
            "completed requests by status",
            ("model", "endpoint", "request_type", "status"),
            registry=registry,
        )
        self.errors = Counter(
            "forebay_ingress_refused",
            "requests that got an error, by error code",
            ("code",),
            registry=registry,
        )
        self.undecodable = Counter(
            "forebay_ingress_undecodable", "records of the log that could not be decoded", registry=registry
        )
        self.foreign = Counter(
            "forebay_ingress_foreign_events",
            "events of responses that neither the owner nor a worker of the request wrote",
            registry=registry,
        )
        self.headers_ignored = Counter(
            "forebay_ingress_routing_headers_ignored",
            "routing headers ignored because the ingress runs without --routing-hints",
            ("header",),
            registry=registry,
        )
        self._rejections = Counter(
            f"{name}_model_rejection",
            "requests rejected because no worker had capacity",
            ("model", "endpoint"),
            registry=registry,
        )
        self._inflight = _gauge(registry, f"{name}_inflight_requests", "requests in flight")
        self.admitted = Gauge(
            "forebay_ingress_requests_in_flight", "admitted requests that have not ended", registry=registry
        )
        self._disconnected = _gauge(
            registry,
            f"{name}_disconnected_clients",
            "clients that disconnected before the response was complete",
        )
        self._ttft = _histogram(
            registry,
            f"{name}_time_to_first_token_seconds",
            "seconds from the request to its first token",
            SECONDS,
        )
        self._itl = _histogram(
            registry,
            f"{name}_inter_token_latency_seconds",
            "mean seconds between output tokens of a request",
            SECONDS,
        )
        self._duration = _histogram(
            registry, f"{name}_request_duration_seconds", "seconds from the request to its last token", SECONDS
        )
        self._input_tokens = _histogram(registry, f"{name}_input_sequence_tokens", "prompt tokens per request", TOKENS)
        self._output_tokens = _histogram(
            registry, f"{name}_output_sequence_tokens", "output tokens per request", TOKENS
        )
        self._cached_tokens = _histogram(
            registry, f"{name}_cached_tokens", "prompt tokens per request that were found in a KV cache", TOKENS
        )
        self._model = ""
        if model is not None:
            self._bind(model)

    def of_model(self, model: str) -> Self:
        other = copy(self)
        other._bind(model)
        return other

    def _bind(self, model: str) -> None:
        self._model = model
        self.inflight = self._inflight.labels(model)
        self.disconnected = self._disconnected.labels(model)
        self.ttft = self._ttft.labels(model)
        self.itl = self._itl.labels(model)
        self.duration = self._duration.labels(model)
        self.input_tokens = self._input_tokens.labels(model)
        self.output_tokens = self._output_tokens.labels(model)
        self.cached_tokens = self._cached_tokens.labels(model)
        self._ended: dict[tuple[str, bool, str], Counter] = {}

    def reject(self, code: str) -> None:
        """Count an error response with this error code."""
        self.errors.labels(code).inc()

    def ended(self, endpoint: str, *, stream: bool, status: str) -> None:
        """Count a request that has ended.

        Args:
            status: `success`, `error` or `cancelled`.
        """
        key = (endpoint, stream, status)
        child = self._ended.get(key)
        if child is None:
            kind = "stream" if stream else "unary"
            child = self._ended[key] = self.requests.labels(self._model, endpoint, kind, status)
        child.inc()

    def rejected(self, endpoint: str) -> None:
        """Count a request of this endpoint that was rejected because no worker had capacity."""
        self._rejections.labels(self._model, endpoint).inc()


def _gauge(registry: CollectorRegistry, name: str, text: str) -> Gauge:
    return Gauge(name, text, ("model",), registry=registry)


def _histogram(registry: CollectorRegistry, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
    return Histogram(name, text, ("model",), buckets=buckets, registry=registry)
