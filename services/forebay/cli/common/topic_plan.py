"""Options that set the partition counts of topics that a command creates."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from forebay.transport.kafka.topics import TopicPlan


@dataclass(frozen=True, slots=True)
class TopicPlanOptions:
    """Partition counts and replication of missing topics. Existing topics keep theirs."""

    groups: Annotated[int, typer.Option(min=1, help="Maximum number of models: partitions of the control topics.")] = 4
    slots: Annotated[
        int,
        typer.Option(min=1, help="Partitions of a work topic. A model can have SLOTS / GROUPS workers per pool."),
    ] = 256
    replies: Annotated[int, typer.Option(min=1, help="Partitions of the topic `tokens`.")] = 16
    kafka_api_partitions: Annotated[
        int, typer.Option(min=1, help="Partitions of each of the topics `openai-requests` and `openai-responses`.")
    ] = 8
    replication: Annotated[int, typer.Option(min=1, help="Replicas of every partition. From 3 on, appends need 2.")] = 1

    def plan(self) -> "TopicPlan":
        from forebay.transport.kafka.topics import TopicPlan  # noqa: PLC0415 - --help does not wait for Kafka's client

        return TopicPlan(
            groups=self.groups,
            slots=self.slots,
            replies=self.replies,
            kafka_api=self.kafka_api_partitions,
            replication=self.replication,
        )
