"""Tiers of a rank with a bucket as shared store, behind a server that fails."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay import runtime
from forebay.workers.kv_tiers.settings import TierSettings
from tests.workers.kv_tiers.buckets import BUCKET, KEYS, SILENT, FaultyServer, moto
from tests.workers.kv_tiers.rank_cases import ShiftedClock, rank, settings
from tests.workers.kv_tiers.store_cases import BLOCK_BYTES

PROMPT = range(6)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    for name, text in KEYS.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with moto() as endpoint:
        server = FaultyServer(endpoint)
        yield server
        server.close()


def in_bucket(server: FaultyServer, tmp_path: Path, wait_s: float = 50.0) -> TierSettings:
    own = settings(tmp_path, host=16, read_s=wait_s, write_s=wait_s)
    fields = {name: getattr(own, name) for name in own.__slots__}
    return TierSettings(**fields | {"store": f"s3://{BUCKET}/tiers", "store_endpoint": server.endpoint})


def test_a_rank_onboards_what_another_rank_computed(bucket: FaultyServer, tmp_path: Path) -> None:
    given = in_bucket(bucket, tmp_path)
    with rank(given) as one, rank(given) as two:
        one.offload(PROMPT)
        result = two.load(PROMPT, hinted=6)
        assert (result.by_tier, result.bytes) == ({"store": 6}, 6 * BLOCK_BYTES)
        assert two.tiers.counters().onboarded_bytes["store"] == 6 * BLOCK_BYTES
    with rank(given) as three:
        assert three.held["store"] == {*PROMPT}, "the inventory lists them"


@pytest.mark.slow
@pytest.mark.parametrize("fault", [403, 500, SILENT])
def test_a_failing_bucket_costs_one_wait_and_no_block_is_lost(fault: int, bucket: FaultyServer, tmp_path: Path) -> None:
    clock = ShiftedClock()
    with runtime.use(clock), rank(in_bucket(bucket, tmp_path, wait_s=5.0 if fault == SILENT else 50.0)) as one:
        one.offload(PROMPT)
        one.tiers.clear()
        bucket.fault = fault
        while one.match(PROMPT):
            assert one.load(PROMPT).blocks == 0
        requests = len(bucket.requests)
        for _ in range(20):
            assert one.match(PROMPT) == []
        assert len(bucket.requests) == requests
        one.offload(range(100, 104))
        assert one.load(range(100, 104)).by_tier == {"host": 4}
        bucket.fault = 0
        clock.ahead_s += 120
        assert one.load(PROMPT).by_tier == {"store": 6}
