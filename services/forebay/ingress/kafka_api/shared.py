"""State and metrics that all partitions of `openai-requests` which one ingress serves share."""

import asyncio

from prometheus_client import CollectorRegistry, Counter, Gauge

from forebay import runtime
from forebay.events.topics import OPENAI_REQUESTS
from forebay.ingress.errors import ApiError
from forebay.ingress.kafka_api.request import ReplyTopics
from forebay.ingress.served_models import RequestedModel, ServedModels
from forebay.transport.base import LogError
from forebay.transport.kafka.group import KafkaGroup
from forebay.transport.kafka.log import KafkaLog
from forebay.transport.kafka.replies import KafkaReplies


class KafkaApiMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "forebay_kafka_api_requests",
            "completed requests by outcome: answered, error, malformed",
            ("outcome",),
            registry=registry,
        )
        self.malformed = Counter(
            "forebay_kafka_api_malformed",
            "records that are not a valid request, by error code",
            ("reason",),
            registry=registry,
        )
        self.repeated = Counter(
            "forebay_kafka_api_repeated",
            "responses of another ingress that were sent again after a takeover",
            registry=registry,
        )
        self.undeliverable = Counter(
            "forebay_kafka_api_undeliverable",
            "responses that could not be written to their reply-topic",
            registry=registry,
        )
        self.in_flight = Gauge(
            "forebay_kafka_api_in_flight", "submitted requests without a complete response", registry=registry
        )
        self.partitions = Gauge(
            "forebay_kafka_api_partitions", "partitions of openai-requests that this ingress reads", registry=registry
        )


IN_FLIGHT_MAX = 1_024  # per ingress: enough to keep many engines busy, few enough to hold in memory
PLACE_S = 0.1  # poll interval while the model has no control partition or no owner
OWNER_S = 30.0  # the records behind one that waits for its model wait, too


class SharedState:
    def __init__(
        self,
        log: KafkaLog,
        models: ServedModels,
        group: KafkaGroup,
        replies: KafkaReplies,
        metrics: KafkaApiMetrics,
        reply_slots: int,
    ) -> None:
        self.log = log
        self.models = models
        self.front = models.front
        self.group = group
        self.replies = replies
        self.metrics = metrics
        self.reply_slots = reply_slots
        self.topic = f"{log.settings.namespace}.{OPENAI_REQUESTS.name}"
        self.reply_topics = ReplyTopics(log.settings.namespace, models.front.settings.reply_topics)
        self.ids: set[str] = set()
        self.commit_soon = asyncio.Event()
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._in_flight = 0
        # By unusable model, the first and last time of its outage. Only names of the log get 503, so there are few.
        self._unusable: dict[str, tuple[float, float]] = {}
        self._capacity = asyncio.Event()
        self._capacity.set()

    async def wait_for_capacity(self) -> None:
        """Wait until fewer than `IN_FLIGHT_MAX` requests are in flight and, for only one model, it has an owner."""
        while self._in_flight >= IN_FLIGHT_MAX:
            await self._capacity.wait()
        while not self.models.has_owner():  # noqa: ASYNC110 - nothing sets an event
            await asyncio.sleep(PLACE_S)

    async def find(self, model: str, request_id: str) -> RequestedModel:
        """Return the model of a request. Wait while it has no owner or worker, for example in a failover.

        The wait ends `OWNER_S` after the outage was noticed, so later records of the same outage are rejected at once.

        Raises ApiError: 404 for an unknown model, 503 if the model cannot be served.
        """
        while True:
            try:
                return await self.models.find(model, request_id)
            except ApiError as error:
                if error.status != 503 or not self._may_wait(model):
                    raise
            await asyncio.sleep(PLACE_S)

    def _may_wait(self, model: str) -> bool:
        """Note that a model is unusable, and return whether it has not been for `OWNER_S` yet."""
        now_s = runtime.monotonic_s()
        since_s, last_s = self._unusable.get(model, (now_s, now_s))
        if now_s - last_s > OWNER_S:
            since_s = now_s  # nobody used it meanwhile, so this may be another outage
        self._unusable[model] = since_s, now_s
        return now_s - since_s < OWNER_S

    def count(self, change: int) -> None:
        self._in_flight += change
        self.metrics.in_flight.set(self._in_flight)
        if self._in_flight < IN_FLIGHT_MAX:
            self._capacity.set()
        else:
            self._capacity.clear()

    def fail(self, error: LogError) -> None:
        """Make `KafkaApi.run` raise this error, because the broker does not accept responses."""
        if not self.failure.done():
            self.failure.set_exception(error)
