"""Buckets with KV blocks that fail, on a real HTTP server."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.runtime.errors import ConfigError
from forebay.workers.engine import EngineError
from forebay.workers.kv_tiers.block_store import BlockStore
from forebay.workers.kv_tiers.object_store import THREADS
from forebay.workers.kv_tiers.offload_manager import open_store
from forebay.workers.kv_tiers.settings import TierSettings
from tests.workers.kv_tiers.buckets import BUCKET, KEYS, SILENT, FaultyServer, clear_bucket, client
from tests.workers.kv_tiers.cases import (
    BLOCK_BYTES,
    QUOTA,
    URL,
    check_read,
    identity,
    inventory,
    name_of,
    names,
    read,
    write,
)


def opened(endpoint: str) -> BlockStore:
    return open_store("store", TierSettings(store=URL, store_bytes=QUOTA, store_endpoint=endpoint), identity())


@pytest.fixture
def proxy(endpoint: str) -> Iterator[FaultyServer]:
    server = FaultyServer(endpoint)
    yield server
    server.close()


@pytest.mark.parametrize(("status", "reason"), [(403, "denied"), (507, "full"), (500, "failed")])
def test_a_bucket_that_fails_recovers(proxy: FaultyServer, status: int, reason: str) -> None:
    store = opened(proxy.endpoint)
    write(store, [1])
    proxy.fault = status
    assert write(store, [2]) == [reason]
    if reason != "full":
        assert read(store, [1, 2])[0] == [reason] * 2
    proxy.fault = 0
    check_read(store, [1])
    assert read(store, [2])[0] == ["missing"]
    assert write(store, [2]) == [""]
    check_read(store, [2])
    store.close()


def test_a_silent_bucket_costs_at_most_the_deadline(proxy: FaultyServer) -> None:
    store = opened(proxy.endpoint)
    write(store, [1])
    proxy.fault = SILENT
    memory = bytearray(BLOCK_BYTES)
    assert store.read([name_of(1)], [memoryview(memory)], 0.3) == ["deadline"]
    assert store.write([(name_of(2), memoryview(memory))], 0.3) == ["deadline"]
    assert memory == bytes(BLOCK_BYTES)
    store.close()  # does not wait for the requests


def test_requests_that_were_given_up_are_bounded(proxy: FaultyServer) -> None:
    store = opened(proxy.endpoint)
    proxy.fault = SILENT
    proxy.requests.clear()
    memory = [memoryview(bytearray(BLOCK_BYTES)) for _ in range(50)]
    assert store.read(names(50), memory, 0.5) == ["deadline"] * 50
    assert store.read(names(50), memory, 0.3) == ["deadline"] * 50
    assert len(proxy.requests) <= THREADS
    store.close()


def test_a_bucket_that_disappears_fails(endpoint: str, proxy: FaultyServer) -> None:
    store = opened(proxy.endpoint)
    write(store, [1])
    clear_bucket(endpoint)
    client(endpoint).delete_bucket(Bucket=BUCKET)
    try:
        assert read(store, [1])[0] == ["failed"]
        assert inventory(store) == set()
        store.remove([name_of(1)])
        with pytest.raises(EngineError, match="NoSuchBucket"):
            opened(endpoint)
    finally:
        client(endpoint).create_bucket(Bucket=BUCKET)
    proxy.close()
    with pytest.raises(EngineError, match=r"cannot use s3://kv-stores/some/prefix for KV blocks: .*127\.0\.0\.1"):
        opened(proxy.endpoint)


@pytest.mark.parametrize("url", ["s3://", "s3:///prefix", "s3://kv", "s3://bucket name/x", "s3://Kv-1", "s3://a..b"])
def test_an_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="expected s3://BUCKET/PREFIX, where BUCKET has 3 to 63 characters"):
        open_store("store", TierSettings(store=url), identity())


def test_missing_credentials_are_reported(endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in KEYS:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(EngineError, match="credentials"):
        opened(endpoint)
