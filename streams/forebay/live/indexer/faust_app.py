"""Faust app of an indexer, which assigns control partitions to indexers and delivers the topics that owners read."""

from typing import Any

from aiokafka import ConsumerRecord

from forebay.events.topics import DECISIONS
from forebay.live.indexer.delivered_log import TOPICS
from forebay.live.indexer.faust_batches import POLL_INTERVAL_MS, BatchedApp
from forebay.live.indexer.indexer import Indexer
from forebay.transport.kafka.settings import KafkaSettings
from forebay.transport.kafka.tail import record_of


class IndexerApp(BatchedApp):
    """Faust app that delivers records to `indexer`. `url` is the address at which it serves."""

    def __init__(
        self, kafka: KafkaSettings, indexer: Indexer, url: str, poll_interval_ms: int = POLL_INTERVAL_MS
    ) -> None:
        super().__init__(kafka, TOPICS, self._deliver, url, poll_interval_ms)
        self._indexer = indexer
        self.on_partitions_assigned.connect(self._assigned)

    def _deliver(self, topic: str, batch: list[ConsumerRecord]) -> None:
        self._indexer.deliver(batch[0].partition, [record_of(topic, record) for record in batch])

    async def _assigned(self, _app: Any, assigned: set[Any], **_: Any) -> None:
        # All topics are assigned together, so one topic is enough.
        topic = self.kafka.topic(DECISIONS.name)
        everywhere = self.assignor.external_topics_metadata().items()
        addresses = {partition: url for url, places in everywhere for partition in places.get(topic, ())}
        self._indexer.assign({place.partition for place in assigned if place.topic == topic}, addresses)
