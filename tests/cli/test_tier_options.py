"""Options of KV tiers: `--kv-host-size`, `--kv-disk`, `--kv-store` and those that change them."""

from pathlib import Path
from typing import Any

import pytest
import typer

from forebay.cli.processes.engine_options import ADAPTERS, EngineOptions
from forebay.cli.processes.engines import EngineChoice, playing, tiered, with_own_disk
from forebay.cli.processes.tier_options import TierOptions
from forebay.ingress.errors import Unusable
from forebay.ingress.model import DEFAULT_MODEL
from forebay.workers.kv_tiers.settings import DISK_BYTES, STORE_BYTES, TierSettings
from tests.cli.adapters import FAKE
from tests.cli.in_process import forebay
from tests.cli.up import forebay as forebay_process

BUCKET = "s3://bucket/prefix"


def choose(engine: str = "mock", **options: Any) -> EngineChoice:
    model = None if engine == "mock" else str(DEFAULT_MODEL)
    return EngineOptions(engine=engine, model=model, **options).choice()


def test_no_tier_is_the_default() -> None:
    assert TierOptions().settings() is None
    choice = choose()
    assert tiered(choice, None) == choice
    assert choice.settings.tiers is None


def test_each_tier_has_a_size(tmp_path: Path) -> None:
    host = TierOptions(kv_host_size="4GB").settings()
    assert host == TierSettings(host_bytes=4 * 10**9)
    disk = TierOptions(kv_disk=tmp_path).settings()
    assert disk == TierSettings(disk=tmp_path, disk_bytes=DISK_BYTES)
    store = TierOptions(kv_store=BUCKET).settings()
    assert store == TierSettings(store=BUCKET, store_bytes=STORE_BYTES)
    every = TierOptions(
        kv_host_size="500MB",
        kv_disk=tmp_path,
        kv_disk_size="10GB",
        kv_store=BUCKET,
        kv_store_size="2TB",
        kv_store_endpoint="http://127.0.0.1:9000",
        kv_tier_write="eviction",
        kv_tier_filter=False,
        kv_tier_io="plain",
    ).settings()
    assert every == TierSettings(
        host_bytes=500 * 10**6,
        disk=tmp_path,
        disk_bytes=10 * 10**9,
        store=BUCKET,
        store_bytes=2 * 10**12,
        store_endpoint="http://127.0.0.1:9000",
        write="eviction",
        filter=False,
        io="plain",
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_disk_size": "1GB"}, "--kv-disk-size requires --kv-disk"),
        ({"kv_store_size": "1GB"}, "--kv-store-size requires --kv-store"),
        ({"kv_store_endpoint": "http://h"}, "--kv-store-endpoint requires --kv-store"),
        ({"kv_tier_write": "through"}, "--kv-tier-write requires --kv-host-size or --kv-disk or --kv-store"),
        ({"kv_host_size": "1GB", "kv_tier_filter": True}, "--kv-tier-filter requires --kv-disk or --kv-store"),
        ({"kv_host_size": "1GB", "kv_tier_io": "nixl"}, "--kv-tier-io requires --kv-disk or --kv-store"),
        ({"kv_store": "gs://bucket"}, "--kv-store gs://bucket: unsupported store; expected a directory or s3://BUCKET"),
        ({"kv_store": "s3:///prefix"}, "--kv-store s3:///prefix: unsupported store"),
        ({"kv_store": ""}, "--kv-store : not a directory"),
        ({"kv_store": "FILE"}, "--kv-store FILE: not a directory"),
        ({"kv_disk": Path("FILE")}, "--kv-disk FILE: not a directory"),
        (
            {"kv_store": "folder", "kv_store_endpoint": "http://h"},
            "--kv-store-endpoint requires --kv-store s3://BUCKET/PREFIX, got folder",
        ),
        ({"kv_store": BUCKET, "kv_store_endpoint": "h:9000"}, "--kv-store-endpoint h:9000: expected http://HOST:PORT"),
    ],
)
def test_options_without_effect_are_rejected(
    options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("FILE").write_text("")
    with pytest.raises(Unusable) as raised:
        TierOptions(**options).settings()
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    ("text", "message"), [("4", "--kv-host-size 4: not a size"), ("1kB", "--kv-host-size 1kB: too small")]
)
def test_invalid_sizes_are_usage_errors(text: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit):
        TierOptions(kv_host_size=text).settings()
    assert message in capsys.readouterr().err


def test_engines_without_tiers_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ADAPTERS, "sglang", FAKE)
    tiers = TierSettings(host_bytes=1 << 30)
    with pytest.raises(Unusable, match="KV tiers require --engine mock or vllm, got sglang"):
        tiered(choose("sglang"), tiers)
    with pytest.raises(Unusable, match="--role encode: an encode worker has no KV"):
        tiered(choose(role="encode"), tiers)


def test_a_real_engine_gets_its_tiers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ADAPTERS, "vllm", FAKE)
    tiers = TierSettings(host_bytes=1 << 30)
    assert tiered(choose("vllm"), tiers).settings.tiers == tiers


def test_storage_of_the_engines_own_connector_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ADAPTERS, "vllm", FAKE)
    choice = choose("vllm", kv_store_name="lmcache-1")
    assert choice.settings.kv_store_name == "lmcache-1"
    assert tiered(choice, TierSettings(host_bytes=1 << 30)).settings.kv_store_name == "lmcache-1"
    with pytest.raises(Unusable, match="--kv-store names itself"):
        tiered(choice, TierSettings(store=BUCKET))
    with pytest.raises(Unusable, match="--kv-store-name requires --engine vllm or sglang, got mock"):
        choose(kv_store_name="a")


def test_each_worker_of_a_process_has_its_own_disk(tmp_path: Path) -> None:
    choice = tiered(choose(), TierSettings(disk=tmp_path, store=BUCKET))
    found = [with_own_disk(playing(choice, "prefill"), name).settings.tiers for name in ("a", "b")]
    assert found == [TierSettings(disk=tmp_path / name, store=BUCKET) for name in ("a", "b")]
    host = tiered(choose(), TierSettings(host_bytes=1 << 30))
    assert with_own_disk(host, "a") == host


@pytest.mark.parametrize("command", ["worker", "up"])
def test_commands_reject_options_without_effect(command: str) -> None:
    where = ("--kafka", "127.0.0.1:1") if command == "worker" else ()
    run = forebay_process(command, *where, "--kv-disk-size", "1GB")
    assert run.returncode == 2
    assert "--kv-disk-size requires --kv-disk" in run.stderr


def test_a_server_that_already_runs_has_its_own_tiers() -> None:
    run = forebay_process("worker", "--kafka", "127.0.0.1:1", "--upstream", "http://h:1", "--kv-host-size", "1GB")
    assert run.returncode == 2
    assert "options of KV tiers cannot be combined with --upstream" in run.stderr


def test_a_configuration_file_selects_tiers(tmp_path: Path) -> None:
    file = tmp_path / "forebay.toml"
    file.write_text('kv-host-size = "1GB"\n[worker]\nkv-disk-size = "10GB"\n')
    run = forebay_process("worker", "--kafka", "127.0.0.1:1", "--config", str(file))
    assert run.returncode == 2
    assert "--kv-disk-size requires --kv-disk" in run.stderr
    file.write_text('kv-store = "s3://bucket"\nkv-tier-filter = false\n')
    run = forebay("config", "--json", "worker", "--config", str(file))
    assert run.returncode == 0, run.stderr
    assert '"s3://bucket"' in run.stdout
