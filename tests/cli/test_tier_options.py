"""Option `--kv-tier`: the tiers for the KV of each worker rank."""

from pathlib import Path
from typing import Any

import click
import pytest

from forebay.cli.processes.engine_options import ADAPTERS, EngineOptions
from forebay.cli.processes.engines import EngineChoice, playing, tiered, with_own_disk
from forebay.cli.processes.tier_options import TierOptions, parsed_tiers
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


def settings(*tiers: str) -> TierSettings | None:
    return TierOptions(kv_tier=list(tiers)).settings()


def test_no_tier_is_the_default() -> None:
    assert TierOptions().settings() is None
    choice = choose()
    assert tiered(choice, None) == choice
    assert choice.settings.tiers is None


def test_each_tier_has_a_size(tmp_path: Path) -> None:
    assert settings("host:size=4GB") == TierSettings(host_bytes=4 * 10**9)
    assert settings(f"disk:path={tmp_path}") == TierSettings(disk=tmp_path, disk_bytes=DISK_BYTES)
    assert settings(f"store:path={BUCKET}") == TierSettings(store=BUCKET, store_bytes=STORE_BYTES)
    every = settings(
        "host:size=500MB,write=eviction",
        f"disk:size=10GB,path={tmp_path},filter=off,io=plain",
        f"store:path={BUCKET},size=2TB,endpoint=http://127.0.0.1:9000,filter=off",
    )
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
    ("tiers", "message"),
    [
        (["disc:path=x"], "--kv-tier disc:path=x: unknown kind of tier 'disc'; did you mean disk?"),
        (["disk:size=1GB"], "--kv-tier disk:size=1GB: the key path is missing"),
        (["host"], "--kv-tier host: expected KEY=VALUE, got ''"),
        (["host:size=1GB,filter=on"], "--kv-tier host:size=1GB,filter=on: unknown key 'filter'; keys are: size, write"),
        (["host:size=1GB,write=later"], "--kv-tier host:size=1GB,write=later: expected one of through, eviction, got"),
        (["host:size=1GB", "host:size=2GB"], "--kv-tier host:size=2GB: there is another host tier"),
        (["disk:path=a,io=nixl", "store:path=b,io=plain"], "--kv-tier: the tiers of a worker have one value of io"),
        (["store:path=gs://bucket"], "--kv-tier store:path=gs://bucket: unsupported store; expected a directory or"),
        (["store:path=s3:///prefix"], "--kv-tier store:path=s3:///prefix: unsupported store"),
        (["store:path="], "--kv-tier store:path=: expected KEY=VALUE, got 'path='"),
        (["store:path=FILE"], "--kv-tier store:path=FILE: not a directory"),
        (["disk:path=FILE"], "--kv-tier disk:path=FILE: not a directory"),
        (["store:path=folder,endpoint=http://h"], "--kv-tier store:endpoint=http://h: expected http://HOST:PORT, of a"),
        ([f"store:path={BUCKET},endpoint=h:9000"], "--kv-tier store:endpoint=h:9000: expected http://HOST:PORT"),
    ],
)
def test_invalid_tiers_are_rejected(
    tiers: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("FILE").write_text("")
    with pytest.raises(Unusable) as raised:
        settings(*tiers)
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    ("text", "message"), [("4", "--kv-tier host:size 4: not a size"), ("1kB", "--kv-tier host:size 1kB: too small")]
)
def test_invalid_sizes_are_usage_errors(text: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(click.exceptions.Exit):
        settings(f"host:size={text}")
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("part", ["filters=off", "filter=of", "size=1GB"])
def test_errors_show_no_password(part: str) -> None:
    with pytest.raises(Unusable) as raised:
        parsed_tiers([f"store:endpoint=http://user:secret@host:9000,{part}"])
    assert "secret" not in str(raised.value)


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
    with pytest.raises(Unusable, match="--kv-tier store names itself"):
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
    run = forebay_process(command, *where, "--kv-tier", "disk:size=1GB")
    assert run.returncode == 2
    assert "the key path is missing" in run.stderr


def test_a_server_that_already_runs_has_its_own_tiers() -> None:
    run = forebay_process("worker", "--kafka", "127.0.0.1:1", "--upstream", "http://h:1", "--kv-tier", "host:size=1GB")
    assert run.returncode == 2
    assert "options of KV tiers cannot be combined with --upstream" in run.stderr


def test_a_configuration_file_selects_tiers(tmp_path: Path) -> None:
    file = tmp_path / "forebay.toml"
    file.write_text('[worker]\nkv-tier = ["host:size=1GB", "disk:size=10GB"]\n')
    run = forebay_process("worker", "--kafka", "127.0.0.1:1", "--config", str(file))
    assert run.returncode == 2
    assert "the key path is missing" in run.stderr
    file.write_text('kv-tier = "store:path=s3://bucket,filter=off"\n')
    run = forebay("config", "--json", "worker", "--config", str(file))
    assert run.returncode == 0, run.stderr
    assert '"store:path=s3://bucket,filter=off"' in run.stdout
