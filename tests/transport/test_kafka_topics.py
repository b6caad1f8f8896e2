"""The plan of topics on Kafka has a partition count for each topic."""

from forebay.events.topics import FIXED_TOPICS
from forebay.transport.kafka.topics import TopicPlan, planned


def test_every_topic_is_planned_with_partitions() -> None:
    counts = {topic.name: partitions for topic, partitions, _ in planned(TopicPlan(), ["default"])}
    assert set(counts) == {topic.name for topic in FIXED_TOPICS} | {"work.default"}
    assert all(counts.values())
