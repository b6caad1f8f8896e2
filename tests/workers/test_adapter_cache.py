"""The cache of adapters at URIs: what it accepts, what it keeps, and what is left of downloads that fail."""

import asyncio
import fcntl
import os
import threading
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import fsspec.config
import pytest

from forebay.workers import adapter_cache
from forebay.workers.adapter_cache import AdapterCache, base_names
from forebay.workers.engine import EngineRefused
from tests.harness.local import free_ports
from tests.harness.s3 import FaultyS3, faulty_s3
from tests.harness.s3_process import CREDENTIALS
from tests.harness.stub_servers import hub_stub
from tests.workers.adapter_files import WEIGHTS, files, written


def cached(cache: AdapterCache) -> list[str]:
    return sorted(path.name for path in cache.root.iterdir() if path.is_dir())


@pytest.fixture
def cache(tmp_path: Path) -> AdapterCache:
    return AdapterCache(tmp_path / "cache", bases=base_names("org/base", None), rank_max=64)


def test_digest_is_the_one_of_sha256sum(cache: AdapterCache, tmp_path: Path) -> None:
    content = files()
    adapter = cache.fetch_now(written(tmp_path / "a", content))
    names = ("adapter_config.json", "adapter_model.safetensors")
    lines = "".join(f"{sha256(content[name]).hexdigest()}  {name}\n" for name in names)
    assert adapter.digest == sha256(lines.encode()).hexdigest() == adapter.directory.name
    assert {path.name: path.read_bytes() for path in adapter.directory.iterdir()} == {n: content[n] for n in names}


def test_file_uri_may_have_encoded_characters(cache: AdapterCache, tmp_path: Path) -> None:
    uri = written(tmp_path / "an adapter", files())
    assert "%20" in uri
    assert cache.fetch_now(uri).digest


def test_known_adapter_is_not_read_again(cache: AdapterCache, tmp_path: Path) -> None:
    uri = written(tmp_path / "a", files())
    first = cache.fetch_now(uri)
    (tmp_path / "a" / "adapter_model.safetensors").unlink()
    assert cache.fetch_now(uri, first.digest).directory == first.directory
    with pytest.raises(EngineRefused, match="has no safetensors file"):
        cache.fetch_now(uri)


def test_changed_content_is_refused(cache: AdapterCache, tmp_path: Path) -> None:
    uri = written(tmp_path / "a", files())
    digest = cache.fetch_now(uri).digest
    written(tmp_path / "a", files(b"other"))
    with pytest.raises(EngineRefused, match=r"has changed: its digest is \w{64}, expected 0{64}; add the changed"):
        cache.fetch_now(uri, "0" * 64)
    assert cached(cache) == [digest]


def test_hub_names_a_revision(cache: AdapterCache, monkeypatch: pytest.MonkeyPatch) -> None:
    with hub_stub("org/adapter", files(), free_ports(1)) as hub:
        monkeypatch.setitem(fsspec.config.conf, "hf", {"endpoint": hub.url})  # the environment is read only once
        adapter = cache.fetch_now("hf://org/adapter@main")
        assert adapter.directory.joinpath("adapter_model.safetensors").read_bytes() == WEIGHTS
        with pytest.raises(EngineRefused, match=r"cannot read the adapter hf://org/other: .*org/other"):
            cache.fetch_now("hf://org/other")


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Any:
    with faulty_s3("adapters") as server:
        for name, value in (*CREDENTIALS.items(), ("AWS_ENDPOINT_URL", server.url)):
            monkeypatch.setenv(name, value)
        yield server


def test_bucket(cache: AdapterCache, bucket: FaultyS3, tmp_path: Path) -> None:
    for name, data in files().items():
        bucket.client.put_object(Bucket="adapters", Key=f"team/sql/{name}", Body=data)
    adapter = cache.fetch_now("s3://adapters/team/sql")
    assert adapter.digest == cache.fetch_now(written(tmp_path / "a", files())).digest
    bucket.deny()
    assert cache.fetch_now("s3://adapters/team/sql", adapter.digest).directory == adapter.directory
    with pytest.raises(EngineRefused, match=r"cannot read the adapter s3://adapters/team/sql: .*"):
        cache.fetch_now("s3://adapters/team/sql")


def test_bucket_without_its_package(cache: AdapterCache, monkeypatch: pytest.MonkeyPatch) -> None:
    def get_filesystem_class(_: str) -> None:
        raise ImportError("Install s3fs to access S3")  # fsspec's error

    monkeypatch.setattr("fsspec.core.get_filesystem_class", get_filesystem_class)
    with pytest.raises(EngineRefused, match=r"s3:// needs a package \(.*s3fs.*\): pip install 'PATH\[lora\]'"):
        cache.fetch_now("s3://adapters/sql")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"README.md": b""}, "is not an adapter: it has no adapter_config.json"),
        (files() | {"adapter_model.bin": b""}, None),
        ({"adapter_config.json": b"{}", "adapter_model.bin": b""}, "adapter_model.bin is a pickle, which may run code"),
        (files() | {"adapter_config.json": b"[]"}, "invalid adapter_config.json: Expected `object`"),
        (files() | {f"{at}.json": b"" for at in range(64)}, "has 66 files; the maximum is 64"),
        (files(x="x" * (1 << 20)), "adapter_config.json has 1048"),
        (files(peft_type="IA3"), "peft_type is 'IA3'; only LORA is supported"),
        (files(r=65), "its rank r is 65; the engine accepts 1 to 64"),
        (files(r=0), "its rank r is 0"),
        (files(target_modules=[]), "target_modules is empty"),
        (files(base_model_name_or_path="org/base-70b"), "it is an adapter of org/base-70b, and this worker has base"),
        (files(base_model_name_or_path="/models/Base/"), None),
        (files(base_model_name_or_path=None), None),
    ],
)
def test_rules(cache: AdapterCache, tmp_path: Path, content: dict[str, bytes], reason: str | None) -> None:
    uri = written(tmp_path / "a", content)
    if reason is None:
        assert not (cache.fetch_now(uri).directory / "adapter_model.bin").exists()
        return
    with pytest.raises(EngineRefused) as refused:
        cache.fetch_now(uri)
    assert reason in str(refused.value)
    assert str(refused.value).startswith(uri)
    assert cached(cache) == []


@pytest.mark.parametrize(
    ("uri", "reason"),
    [
        ("gs://bucket/a", "unknown scheme 'gs'; schemes are: file, hf, s3"),
        ("file:///there/is/none", "cannot read the adapter file:///there/is/none: "),
        ("s3://127.0.0.1", "cannot read the adapter"),
    ],
)
def test_unusable_uri(cache: AdapterCache, uri: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (*CREDENTIALS.items(), ("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_ports(1)}")):
        monkeypatch.setenv(name, value)
    with pytest.raises(EngineRefused) as refused:
        cache.fetch_now(uri)
    assert reason in str(refused.value)


def test_base_names_of_a_model_in_the_cache_of_the_hub() -> None:
    snapshot = Path("/cache/models--Qwen--Qwen3-8B/snapshots/abc")
    assert base_names("mine", snapshot) == {"mine", "abc", "qwen3-8b"}


def test_too_large_adapter_is_not_read(cache: AdapterCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_cache, "ADAPTER_BYTES_MAX", len(WEIGHTS))
    with pytest.raises(EngineRefused, match=f"bytes; the maximum of an adapter is {len(WEIGHTS)}"):
        cache.fetch_now(written(tmp_path / "a", files()))


def test_least_recently_used_adapter_makes_room(tmp_path: Path) -> None:
    uris = [written(tmp_path / name, files(name.encode() * 1_000)) for name in "abc"]
    cache = AdapterCache(tmp_path / "cache", bytes_max=2_500)
    held = [cache.fetch_now(uri) for uri in uris[:2]]
    with pytest.raises(EngineRefused, match=r"has no room for the \d+ bytes of .*: adapters in use have \d+ of 2500"):
        cache.fetch_now(uris[2])
    assert cached(cache) == sorted(one.digest for one in held)
    for one in held:
        one.close()
    os.utime(held[0].directory, (1, 1))
    os.utime(held[1].directory, (2, 2))
    cache.fetch_now(uris[0], held[0].digest).close()
    third = cache.fetch_now(uris[2])
    assert cached(cache) == sorted((held[0].digest, third.digest))


def test_crashed_download_is_removed_and_a_running_one_stays(cache: AdapterCache, tmp_path: Path) -> None:
    for name in ("partial-crashed", "partial-running"):
        written(cache.root / name, {"adapter_model.safetensors": b""})
    running = os.open(cache.root / "partial-running", os.O_RDONLY)
    fcntl.flock(running, fcntl.LOCK_EX)
    adapter = cache.fetch_now(written(tmp_path / "a", files()))
    assert cached(cache) == sorted((adapter.digest, "partial-running"))
    os.close(running)


async def test_workers_of_a_host_share_the_cache(cache: AdapterCache, tmp_path: Path) -> None:
    uri = written(tmp_path / "a", files())
    caches = [AdapterCache(cache.root) for _ in range(8)]
    found = await asyncio.gather(*(one.fetch(uri) for one in caches))
    assert len({(one.directory, one.digest) for one in found}) == 1
    assert cached(cache) == [found[0].digest]


class Source:
    """File whose content is not what was listed."""

    def __init__(self, *chunks: bytes, on_read: Callable[[], object] = lambda: None) -> None:
        self._chunks = [*chunks]
        self._on_read = on_read

    def __enter__(self) -> "Source":
        return self

    def __exit__(self, *_: object) -> None: ...

    def read(self, _: int) -> bytes:
        self._on_read()
        return self._chunks.pop(0) if self._chunks else b""


@pytest.mark.parametrize("chunks", [[WEIGHTS[:-1]], [WEIGHTS, b"x"], []])
def test_file_of_another_size_is_refused(
    cache: AdapterCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunks: list[bytes]
) -> None:
    uri = written(tmp_path / "a", files())
    monkeypatch.setattr(
        "fsspec.implementations.local.LocalFileSystem.open",
        lambda _, path, __: Source(Path(path).read_bytes() if path.endswith("json") else b"".join(chunks)),
    )
    with pytest.raises(EngineRefused, match=r"has not the 7000 bytes that were listed; retry the command"):
        cache.fetch_now(uri)
    assert cached(cache) == []


async def test_cancelled_download_leaves_nothing(
    cache: AdapterCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = written(tmp_path / "a", files())
    loop, reading, cancelled = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    def wait() -> None:
        loop.call_soon_threadsafe(reading.set)
        cancelled.wait()

    monkeypatch.setattr(
        "fsspec.implementations.local.LocalFileSystem.open",
        lambda _, path, __: Source(Path(path).read_bytes(), on_read=wait),
    )
    fetching = asyncio.create_task(cache.fetch(uri))
    await reading.wait()
    fetching.cancel()
    await asyncio.wait([fetching])
    assert len(cached(cache)) == 1
    cancelled.set()
    await loop.shutdown_default_executor()
    assert cached(cache) == []
