"""The ledger on Kafka equals what clients counted, although writers, the owner and a worker are killed."""

import pytest

from tests.harness.demo_ledger import outcome
from tests.integration.conftest import MakeCluster


@pytest.mark.timeout(400)
async def test_the_bill_equals_what_clients_counted(make_cluster: MakeCluster) -> None:
    async with make_cluster("ledger") as cluster:
        result = await outcome(cluster, requests=300, kills=3)
        assert result.problems == []
        assert result.line().endswith(": ok")
