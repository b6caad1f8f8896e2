"""Buckets with KV blocks, on a real HTTP server: sharing, bad objects, quotas, and buckets that fail."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from forebay import runtime
from forebay.runtime.system import SystemRuntime
from forebay.workers.engine import EngineError
from forebay.workers.kv_tiers.block_file import (
    FORMAT_VERSION,
    HEAD_BYTES,
    PAYLOAD_OFFSET,
    HeadFormat,
    file_bytes,
    file_name,
)
from forebay.workers.kv_tiers.block_stores import BlockStore, IoKind
from forebay.workers.kv_tiers.object_io import THREADS
from forebay.workers.kv_tiers.s3_bucket import Bucket, Credentials
from forebay.workers.kv_tiers.stores import open_store
from tests.workers.kv_tiers.buckets import BUCKET, KEYS, SILENT, FaultyServer, client, moto
from tests.workers.kv_tiers.store_cases import (
    BLOCK_BYTES,
    QUOTA,
    check_read,
    content,
    identity,
    inventory,
    name_of,
    names,
    read,
    write,
)

URL = f"s3://{BUCKET}/some/prefix"
FILE = file_bytes(BLOCK_BYTES)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with moto() as endpoint:
        yield endpoint


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in KEYS.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture
def endpoint(server: str) -> str:
    """Return the server, with an empty bucket."""
    bucket = client(server)
    for page in bucket.get_paginator("list_objects_v2").paginate(Bucket=BUCKET):
        for one in page.get("Contents", ()):
            bucket.delete_object(Bucket=BUCKET, Key=one["Key"])
    return server


@pytest.fixture(params=["plain", "nixl"])
def io(request: pytest.FixtureRequest) -> IoKind:
    if request.param == "nixl":
        pytest.importorskip("nixl_cu12")
    kind: IoKind = request.param
    return kind


def opened(endpoint: str, io: IoKind = "plain", quota: int = QUOTA, **changes: Any) -> BlockStore:
    return open_store(URL, changes.get("who") or identity(), quota_bytes=quota, shared=True, io=io, endpoint=endpoint)


def key_of(number: int) -> str:
    file = file_name(name_of(number))
    return f"some/prefix/{identity().short_digest}/{file[:2]}/{file}"


def keys_in(endpoint: str) -> set[str]:
    return {one["Key"] for one in client(endpoint).list_objects_v2(Bucket=BUCKET)["Contents"]}


def put(endpoint: str, number: int, data: bytes) -> None:
    client(endpoint).put_object(Bucket=BUCKET, Key=key_of(number), Body=data)


def get(endpoint: str, number: int) -> bytes:
    return bytes(client(endpoint).get_object(Bucket=BUCKET, Key=key_of(number))["Body"].read())


def test_two_workers_share_a_bucket(endpoint: str, io: IoKind) -> None:
    one, two = opened(endpoint, io), opened(endpoint, io)
    assert one.name == two.name
    assert write(one, range(30)) == [""] * 30
    check_read(two, range(30))
    assert read(two, [5, 99])[0] == ["", "missing"]
    assert inventory(two) == set(names(30))
    assert (two.stats.blocks, two.stats.read_blocks) == (30, 31)
    assert opened(endpoint, who=identity("other")).name != one.name
    one.close()
    two.close()


def test_known_blocks_are_not_written_again(endpoint: str) -> None:
    store = opened(endpoint)
    write(store, [1])
    assert write(store, [1, 2]) == ["", ""]
    assert (store.stats.write_blocks, store.stats.write_skipped) == (2, 1)
    client(endpoint).delete_object(Bucket=BUCKET, Key=key_of(1))
    assert read(store, [1])[0] == ["missing"]
    assert write(store, [1]) == [""]
    check_read(store, [1])


def test_removed_blocks_are_missing(endpoint: str) -> None:
    store = opened(endpoint)
    write(store, range(3))
    store.remove([name_of(1), name_of(9)])
    assert read(store, [0, 1])[0] == ["", "missing"]
    assert write(store, [1]) == [""]
    check_read(store, [0, 1, 2])


def newer() -> bytes:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("forebay.workers.kv_tiers.block_file.FORMAT_VERSION", FORMAT_VERSION + 1)
        head = HeadFormat(identity().digest, BLOCK_BYTES).encode(name_of(1), bytes(16))
    return head.ljust(PAYLOAD_OFFSET, b"\0") + content(1)


@pytest.mark.parametrize("reason", ["truncated", "short", "corrupt", "foreign", "newer"])
def test_a_bad_object_is_a_miss(endpoint: str, io: IoKind, reason: str) -> None:
    store = opened(endpoint, io)
    write(store, range(3))
    good = get(endpoint, 1)
    bad = {
        "truncated": good[:-1],
        "short": good[: HEAD_BYTES - 1],
        "corrupt": good[:-1] + bytes([good[-1] ^ 1]),
        "foreign": get(endpoint, 2),
        "newer": newer(),
    }[reason]
    put(endpoint, 1, bad)
    reason = "truncated" if reason == "short" else reason
    results, found = read(store, range(3))
    assert results == ["", reason, ""]
    assert (found[0], found[2]) == (content(0), content(2))
    assert f"some/prefix/{identity().short_digest}/quarantine/{reason}-{file_name(name_of(1))}" in keys_in(endpoint)
    assert key_of(1) not in keys_in(endpoint)
    assert (store.stats.quarantined, store.stats.read_misses) == (1, {reason: 1})
    assert inventory(store) == {name_of(0), name_of(2)}
    assert write(store, [1]) == [""]
    check_read(store, range(3))


def test_the_oldest_objects_leave_first(endpoint: str) -> None:
    store = opened(endpoint, quota=10 * FILE)
    assert write(store, range(10)) == [""] * 10
    assert store.take_evicted() == []
    assert write(store, range(10, 14)) == [""] * 4
    evicted = set(store.take_evicted())
    left = inventory(store)
    assert left | evicted == set(names(14))
    assert len(left) == 9  # 95 % of the quota
    assert store.stats.evicted == 5
    assert read(store, [int(name.sequence_hash) - 1 for name in evicted])[0] == ["missing"] * 5


@pytest.mark.slow
def test_several_writers_keep_one_quota(endpoint: str) -> None:
    stores = [opened(endpoint, quota=16 * FILE) for _ in range(3)]

    def fill(number: int) -> None:
        for place in range(20):
            assert write(stores[number], [100 * number + place]) == [""]

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(fill, range(3)))
    stores[0].inventory()
    left = inventory(stores[0])
    assert 10 <= len(left) <= 16 + 3 * 2
    check_read(stores[1], [number for number in range(300) if name_of(number) in left])


# --- Buckets that fail


@pytest.fixture
def proxy(endpoint: str) -> Iterator[FaultyServer]:
    server = FaultyServer(endpoint)
    yield server
    server.close()


class Later(SystemRuntime):
    """Runtime whose monotonic clock is ahead by an hour."""

    def monotonic_ns(self) -> int:
        return super().monotonic_ns() + 3600 * 10**9


@pytest.mark.parametrize(("status", "reason"), [(403, "denied"), (500, "failed")])
def test_a_failing_bucket_pauses_and_recovers(proxy: FaultyServer, io: IoKind, status: int, reason: str) -> None:
    store = opened(proxy.endpoint, io)
    write(store, [1])
    proxy.fault = status
    assert read(store, [1])[0] == [reason]
    proxy.requests.clear()
    assert read(store, [1, 2])[0] == ["failed"] * 2
    assert write(store, [2, 3]) == ["failed"] * 2
    assert proxy.requests == []
    assert store.stats.read_misses == {reason: 1, "failed": 2} if reason != "failed" else {"failed": 3}
    proxy.fault = 0
    with runtime.use(Later()):
        check_read(store, [1])
        assert write(store, [2]) == [""]
    check_read(store, [2])
    store.close()


@pytest.mark.parametrize(("status", "reason"), [(403, "denied"), (507, "full"), (500, "failed")])
def test_failed_writes_are_reported(proxy: FaultyServer, io: IoKind, status: int, reason: str) -> None:
    store = opened(proxy.endpoint, io)
    proxy.fault = status
    assert write(store, [2]) == [reason]
    assert store.stats.write_failures == {reason: 1}
    assert (store.stats.write_blocks, store.stats.write_bytes) == (0, 0)
    store.close()


def test_a_silent_bucket_costs_at_most_the_deadline(proxy: FaultyServer, io: IoKind) -> None:
    store = opened(proxy.endpoint, io)
    write(store, [1])
    proxy.fault = SILENT
    memory = bytearray(BLOCK_BYTES)
    assert store.read([name_of(1)], [memoryview(memory)], 0.3) == ["deadline"]
    with runtime.use(Later()):
        assert store.write([(name_of(2), memoryview(memory))], 0.3) == ["deadline"]
    assert memory == bytes(BLOCK_BYTES)
    store.close()  # does not wait for the requests


def test_requests_that_were_given_up_are_bounded(proxy: FaultyServer) -> None:
    store = opened(proxy.endpoint)
    proxy.fault = SILENT
    proxy.requests.clear()
    memory = [memoryview(bytearray(BLOCK_BYTES)) for _ in range(50)]
    assert store.read(names(50), memory, 0.5) == ["deadline"] * 50
    with runtime.use(Later()):
        assert store.read(names(50), memory, 0.3) == ["deadline"] * 50
    assert len(proxy.requests) <= THREADS
    store.close()


def test_a_bucket_that_disappears_fails(endpoint: str, proxy: FaultyServer, io: IoKind) -> None:
    store = opened(proxy.endpoint, io)
    write(store, [1])
    for key in keys_in(endpoint):
        client(endpoint).delete_object(Bucket=BUCKET, Key=key)
    client(endpoint).delete_bucket(Bucket=BUCKET)
    try:
        assert read(store, [1])[0] == ["failed"]
        assert inventory(store) == set()
        store.remove([name_of(1)])
        with pytest.raises(EngineError, match="NoSuchBucket"):
            opened(endpoint, io)
    finally:
        client(endpoint).create_bucket(Bucket=BUCKET)
    proxy.close()
    with pytest.raises(EngineError, match=r"cannot use s3://kv-blocks/some/prefix for KV blocks: .*127\.0\.0\.1"):
        opened(proxy.endpoint, io)


# --- Opening


@pytest.mark.parametrize("url", ["s3://", "s3:///prefix", "s3://a", "s3://bucket name/x"])
def test_an_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(EngineError, match="expected s3://BUCKET or s3://BUCKET/PREFIX"):
        open_store(url, identity(), quota_bytes=QUOTA, shared=True)


def test_missing_credentials_are_reported(
    endpoint: str, io: IoKind, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in KEYS:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(EngineError, match="credentials"):
        opened(endpoint, io)


def test_stores_of_newer_versions_and_other_identities_are_refused(endpoint: str) -> None:
    opened(endpoint).close()
    bucket = client(endpoint)
    folder = f"some/prefix/{identity().short_digest}"
    bucket.put_object(Bucket=BUCKET, Key=f"{folder}/identity.json", Body=msgspec.json.encode(identity("other")))
    with pytest.raises(EngineError, match="has KV of another identity"):
        opened(endpoint)
    bucket.put_object(Bucket=BUCKET, Key="some/prefix/store.json", Body=b'{"format_version":99,"store_id":"x"}')
    with pytest.raises(EngineError, match="format 99, and this version of forebay reads formats up to 1"):
        opened(endpoint)


def test_credentials_that_change_are_used(endpoint: str, proxy: FaultyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Temporary credentials expire. boto3 renews them, and the agent of NIXL must follow."""
    pytest.importorskip("nixl_cu12")
    store = opened(proxy.endpoint, "nixl")
    write(store, [1])
    current = Credentials("other", "other-secret", "")
    monkeypatch.setattr(Bucket, "credentials", lambda _self: current)
    check_read(store, [1])
    assert "Credential=other/" in proxy.authorizations[-1]
    store.close()
