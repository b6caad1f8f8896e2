"""Metrics of an ingress. Names and labels match Dynamo's frontend, so its dashboards work unchanged."""

from copy import copy
from typing import Self

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
TOKENS = (1, 16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


class IngressMetrics:
    """Prometheus metrics of one ingress, for one of its models. The label of the model is already set.

    If `model` is None, only metrics without this label and `of_model` can be used.
    """

    inflight: Gauge
    disconnected: Gauge
    ttft: Histogram
    itl: Histogram
    duration: Histogram
    input_tokens: Histogram
    output_tokens: Histogram
    cached_tokens: Histogram

    def __init__(self, registry: CollectorRegistry, model: str | None) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"dynamo_frontend_{name}", text, ("model",), registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"dynamo_frontend_{name}", text, ("model",), buckets=buckets, registry=registry)

        self.requests = counter(
            "dynamo_frontend_requests", "completed requests by status", "model", "endpoint", "request_type", "status"
        )
        self._rejections = counter(
            "dynamo_frontend_model_rejection", "requests rejected because no worker had capacity", "model", "endpoint"
        )
        self.errors = counter("forebay_ingress_refused", "requests that got an error, by error code", "code")
        self.undecodable = counter("forebay_ingress_undecodable", "records of the log that could not be decoded")
        self.foreign = counter(
            "forebay_ingress_foreign_events",
            "events of responses that neither the owner nor a worker of the request wrote",
        )
        self.key_file_unusable = counter(
            "forebay_ingress_key_file_unusable",
            "readings of --api-key-file that failed, so the previous keys were kept",
        )
        self.certificate_unusable = counter(
            "forebay_ingress_certificate_unusable",
            "changes of the files of --ssl-certfile that could not be used, so the previous certificate was kept",
        )
        self.limits_degraded = Gauge(
            "forebay_ingress_limits_degraded",
            "1 while limits of API keys are counted by this ingress alone, because Redis fails",
            registry=registry,
        )
        self.headers_ignored = counter(
            "forebay_ingress_routing_headers_ignored",
            "routing headers ignored because the ingress runs without --routing-hints",
            "header",
        )
        self.admitted = Gauge(
            "forebay_ingress_requests_in_flight", "admitted requests that have not ended", registry=registry
        )
        self._by_model: dict[str, Gauge | Histogram] = {
            "inflight": gauge("inflight_requests", "requests in flight"),
            "disconnected": gauge("disconnected_clients", "clients that disconnected before the response was complete"),
            "ttft": histogram("time_to_first_token_seconds", "seconds from the request to its first token", SECONDS),
            "itl": histogram("inter_token_latency_seconds", "mean seconds between output tokens of a request", SECONDS),
            "duration": histogram("request_duration_seconds", "seconds from the request to its last token", SECONDS),
            "input_tokens": histogram("input_sequence_tokens", "prompt tokens per request", TOKENS),
            "output_tokens": histogram("output_sequence_tokens", "output tokens per request", TOKENS),
            "cached_tokens": histogram(
                "cached_tokens", "prompt tokens per request that were found in a KV cache", TOKENS
            ),
        }
        self._model = ""
        if model is not None:
            self._bind(model)

    def of_model(self, model: str) -> Self:
        other = copy(self)
        other._bind(model)
        return other

    def _bind(self, model: str) -> None:
        self._model = model
        for name, metric in self._by_model.items():
            setattr(self, name, metric.labels(model))
        self._ended: dict[tuple[str, bool, str], Counter] = {}

    def reject(self, code: str) -> None:
        self.errors.labels(code).inc()

    def ended(self, endpoint: str, *, stream: bool, status: str) -> None:
        """Count a request that has ended with the status `success`, `error` or `cancelled`."""
        key = (endpoint, stream, status)
        child = self._ended.get(key)
        if child is None:
            kind = "stream" if stream else "unary"
            child = self._ended[key] = self.requests.labels(self._model, endpoint, kind, status)
        child.inc()

    def rejected(self, endpoint: str) -> None:
        """Count a request that was rejected because no worker had capacity."""
        self._rejections.labels(self._model, endpoint).inc()
