"""Metrics of an ingress. Names and labels match Dynamo's frontend, so its dashboards work unchanged."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
TOKENS = (1, 16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


class IngressMetrics:
    """Prometheus metrics of one ingress, which serves one model. Labels with a constant value are already set."""

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
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
        self.inflight = _gauge(registry, f"{name}_inflight_requests", "requests in flight", model)
        self.admitted = Gauge(
            "forebay_ingress_requests_in_flight", "admitted requests that have not ended", registry=registry
        )
        self.disconnected = _gauge(
            registry,
            f"{name}_disconnected_clients",
            "clients that disconnected before the response was complete",
            model,
        )
        self.ttft = _histogram(
            registry,
            f"{name}_time_to_first_token_seconds",
            "seconds from the request to its first token",
            model,
            SECONDS,
        )
        self.itl = _histogram(
            registry,
            f"{name}_inter_token_latency_seconds",
            "mean seconds between output tokens of a request",
            model,
            SECONDS,
        )
        self.duration = _histogram(
            registry, f"{name}_request_duration_seconds", "seconds from the request to its last token", model, SECONDS
        )
        self.input_tokens = _histogram(
            registry, f"{name}_input_sequence_tokens", "prompt tokens per request", model, TOKENS
        )
        self.output_tokens = _histogram(
            registry, f"{name}_output_sequence_tokens", "output tokens per request", model, TOKENS
        )
        self.cached_tokens = _histogram(
            registry, f"{name}_cached_tokens", "prompt tokens per request that were found in a KV cache", model, TOKENS
        )
        self._model = model
        self._ended: dict[tuple[str, bool, str], Counter] = {}

    def reject(self, code: str) -> None:
        """Count an error response with this error code."""
        self.errors.labels(code).inc()

    def ended(self, endpoint: str, *, stream: bool, status: str) -> None:
        """Count a request that has ended.

        Args:
            endpoint: label of the endpoint.
            stream: whether the response is a stream.
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


def _gauge(registry: CollectorRegistry, name: str, text: str, model: str) -> Gauge:
    return Gauge(name, text, ("model",), registry=registry).labels(model)


def _histogram(registry: CollectorRegistry, name: str, text: str, model: str, buckets: tuple[float, ...]) -> Histogram:
    return Histogram(name, text, ("model",), buckets=buckets, registry=registry).labels(model)
