"""Stand-in for `AIOKafkaAdminClient`, as far as services use it."""

from collections.abc import Sequence

from aiokafka.errors import KafkaConnectionError
from aiokafka.structs import OffsetAndMetadata, TopicPartition

from tests.faults.kafka.client import FakeClient

NO_OFFSET = OffsetAndMetadata(-1, "")


class FakeAdmin(FakeClient):
    """Admin client of one simulated process."""

    async def start(self) -> None:
        """Connect. Raises KafkaConnectionError."""
        self.count_call()
        await self.bootstrap()

    async def close(self) -> None:
        """Disconnect."""
        self.closed = True

    async def list_topics(self) -> list[str]:
        """Return the full names of all topics. Raises KafkaConnectionError."""
        self.count_call()
        await self.round_trip()
        return self.host.kafka.topics()

    async def list_consumer_group_offsets(
        self, group: str, partitions: Sequence[TopicPartition]
    ) -> dict[TopicPartition, OffsetAndMetadata]:
        """Return the committed positions, with offset -1 without a commit, or nothing after an error."""
        self.count_call()
        try:
            await self.round_trip()
        except KafkaConnectionError:
            return {}
        offsets = self.host.kafka.group(group).offsets
        return {place: offsets.get(place, NO_OFFSET) for place in partitions}
