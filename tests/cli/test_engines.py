"""Engines of workers: options, sizes, tiers, the address for KV, and engines that fail."""

import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from forebay.cli.processes.engine_options import EngineOptions
from forebay.cli.processes.engines import choose_engine, reached_at, tiered
from forebay.cli.processes.tier_options import TierOptions, parsed_tiers
from forebay.engine_model.model import EngineConfig
from forebay.engine_model.timing import LinearTiming
from forebay.events.fleet import WorkerSpec
from forebay.ingress.model import DEFAULT_MODEL
from forebay.processes import engines
from forebay.processes.embedded_group import FAILURES_MAX, HEALTHY_S, PAUSE_S, PAUSE_S_MAX, EngineRestarts
from forebay.processes.engines import EngineChoice, built, with_own_disk
from forebay.runtime.errors import ConfigError, install_command
from forebay.workers.engine import EngineError, KvEngine
from forebay.workers.engines.adapters import ADAPTERS, ENGINES, Adapter
from forebay.workers.engines.encode import EncodeEngine
from forebay.workers.engines.engine_process import EngineProcess
from forebay.workers.engines.mock.engine import MockEngine
from forebay.workers.engines.mock.kv import KvSettings
from forebay.workers.kv_tiers.settings import TierSettings
from forebay.workers.kv_transfer.own_address import address_towards, interface_of, own_address
from tests.cli.fake_engine import FAKE
from tests.cli.in_process import error_of, forebay
from tests.cli.up import PATIENCE_S, Up, children_of, fake_up
from tests.harness.local import free_ports
from tests.harness.processes import still_running

pytestmark = pytest.mark.timeout(240)
ROOT = Path(__file__).parents[2]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace a real engine by the fake one."""
    monkeypatch.setitem(ADAPTERS, "vllm", FAKE)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the packages of real engines seem to be installed."""
    for name, adapter in ADAPTERS.items():
        monkeypatch.setitem(ADAPTERS, name, replace(adapter, packages=()))


def choose(engine: str = "mock", **options: Any) -> EngineChoice:
    model = None if engine == "mock" else str(DEFAULT_MODEL)
    return choose_engine(EngineOptions(**{"engine": engine, "model": model, **options}))


def test_a_mock_engine_uses_the_sizes_of_the_model_by_default() -> None:
    engine, spec = built(choose(kv_blocks=99, lora=["a=b"]), "mock-0", pool="p", taints=["t"])
    assert isinstance(engine, MockEngine)
    assert spec == WorkerSpec(
        worker_id="mock-0",
        model="forebay-default",
        pool="p",
        block_size=64,
        kv_blocks_total=99,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        taints=("t",),
        loras=("a=b",),
    )


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("form", ["json", "yaml", "inline"])
def test_a_real_engine_gets_its_settings(tmp_path: Path, form: str) -> None:
    arguments = {"enforce_eager": True, "nested": {"a": [1, 2.5]}}
    text = json.dumps(arguments)
    if form != "inline":
        file = tmp_path / f"arguments.{form}"
        file.write_text(text if form == "json" else "enforce_eager: true\nnested:\n  a: [1, 2.5]\n")
        text = str(file)
    lora = tmp_path / "adapter"
    lora.mkdir()
    choice = choose(
        "vllm", engine_args=text, role="prefill", kv_blocks=7, dp_size=2, lora=[f"legal={lora}"], model_name="m"
    )
    engine, spec = built(choice.with_settings(dp_start_rank=4), "w", pool="p", kv_events=False)
    assert isinstance(engine, EngineProcess)
    settings = engine.settings
    assert (settings.arguments, settings.role, settings.model) == (arguments, "prefill", DEFAULT_MODEL)
    assert (settings.block_size, settings.kv_blocks, settings.dp_size, settings.dp_start_rank) == (None, 7, 2, 4)
    assert settings.loras == {"legal": lora}
    assert (spec.engine, spec.role, spec.loras, spec.kv_events) == ("vllm", "prefill", ("legal",), False)
    assert (spec.model, list(spec.ranks)) == ("m", [4, 5])


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "llama"}, f"--engine: unknown engine 'llama'; engines are: {', '.join(ENGINES)}, FILE.py:"),
        ({"role": "boss"}, "--role: unknown role 'boss'; roles are: aggregated, prefill, decode, encode"),
        ({"model": None}, "the vllm engine requires --model, a model directory with weights or ORG/NAME"),
        ({"speedup": 2.0}, "--speedup requires --engine mock"),
        ({"engine_profile": "mocker"}, "--engine-profile requires --engine mock: vllm runs at its own speed"),
        ({"engine": "mock", "engine_profile": "h100"}, "--engine-profile: unknown engine profile 'h100'; use 'mocker'"),
        (
            {"engine": "mock", "engine_args": '{"kv_lease": 1}'},
            "--engine-args: unknown argument 'kv_lease'; did you mean",
        ),
        ({"engine": "mock", "engine_args": '{"kv_lease_s": 0}'}, "--engine-args: kv_lease_s: must be a number"),
        ({"engine_args": "/nowhere.yaml"}, "/nowhere.yaml: No such file"),
        ({"engine_args": "ARGS.yaml"}, "ARGS.yaml: expected a mapping of argument names to values, got a list"),
        ({"lora": ["legal"]}, "--lora legal: expected NAME=DIR"),
        ({"lora": ["legal=/nowhere"]}, "--lora legal=/nowhere: no such directory /nowhere"),
        ({"lora": ["a=.", "a=.."]}, "--lora a=..: the name a appears twice"),
    ],
)
def test_unusable_options_are_rejected(
    options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ARGS.yaml").write_text("- a\n- b\n")
    with pytest.raises(ConfigError) as raised:
        choose(**{"engine": "vllm", **options})
    assert str(raised.value).startswith(message)


ENCODERS = """
class Mine:
    def load(self): pass
    def encode_all(self, media): pass

class Late(Mine):
    async def load(self): pass

class Half:
    def load(self): pass

class Broken(Mine):
    def __init__(self): raise KeyError("WEIGHTS")
"""


@pytest.fixture
def encoders(tmp_path: Path) -> str:
    file = tmp_path / "enc.py"
    file.write_text(ENCODERS)
    return str(file)


def test_an_encoder_of_the_user_is_selected_by_its_class(encoders: str) -> None:
    engine, spec = built(choose(f"{encoders}:Mine", role="encode"), "e", pool="")
    assert isinstance(engine, EncodeEngine)
    assert (spec.engine, spec.role, spec.pool) == ("Mine", "encode", "encode")


@pytest.mark.parametrize(
    ("name", "role", "message"),
    [
        ("Half", "encode", "Half of .*enc.py is not an encoder; expected a class with the methods load"),
        ("Late", "encode", "Late of .*enc.py is not an encoder; .*both without async"),
        ("None", "encode", "enc.py has no class None"),
        ("Broken", "encode", "cannot create Broken: KeyError: 'WEIGHTS'"),
        ("Mine", "aggregated", "Mine of .*enc.py is an encoder, not a service; use forebay worker --role encode"),
        ("Mine", "decode", "Mine of .*enc.py is an encoder, not a service"),
    ],
)
def test_an_unusable_encoder_is_rejected(encoders: str, name: str, role: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        built(choose(f"{encoders}:{name}", role=role), "e", pool="")


@pytest.mark.usefixtures("fake")
def test_an_engine_without_an_encoder_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"the vllm engine has no encoder; use --engine FILE\.py:Class"):
        built(choose("vllm", role="encode"), "e", pool="")


@pytest.mark.usefixtures("installed")
def test_an_encoder_that_runs_vllm_has_a_process_of_its_own() -> None:
    engine, spec = built(choose("vllm", role="encode", engine_args='{"dtype": "float32"}'), "e", pool="")
    assert isinstance(engine, EngineProcess) and type(engine).__name__ == "VllmEncodeEngine"
    assert not isinstance(engine, KvEngine)  # it has no KV that could be released
    assert (engine.settings.arguments, spec.role, spec.pool) == ({"dtype": "float32"}, "encode", "encode")
    with pytest.raises(ConfigError, match="the sglang engine has no encoder"):
        built(choose("sglang", role="encode"), "e", pool="")


def test_a_mock_engine_uses_the_timing_and_sizes_of_its_profile_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs: list[EngineConfig] = []
    monkeypatch.setattr(engines, "MockEngine", lambda config, **_: configs.append(config))
    path = tmp_path / "engine.toml"
    sizes = "{ block_size = 32, kv_blocks = 99, max_num_seqs = 4 }"
    path.write_text(f'kind = "linear"\ncosts_us.step = 70\nsizes = {sizes}')
    _, spec = built(choose(engine_profile=str(path), kv_blocks=11), "w", pool="p")
    assert (spec.block_size, spec.kv_blocks_total, spec.max_num_seqs, spec.max_num_batched_tokens) == (32, 11, 4, 8192)
    assert [config.timing for config in configs] == [LinearTiming(step=70.0)]


def test_inconsistent_sizes_and_a_missing_package_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens \(3\) must be at least max_num_seqs \(256\)"):
        built(choose(max_num_batched_tokens=3), "w", pool="p")
    monkeypatch.setitem(ADAPTERS, "sglang", Adapter("nowhere", "Nothing", ("no_such_package",), ""))
    with pytest.raises(ConfigError) as raised:
        built(choose("sglang"), "w", pool="p")
    expected = f"the sglang engine requires the package no_such_package; install it with: {install_command('sglang')}"
    assert str(raised.value).startswith(expected)


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fails": "start"}, "the weights are broken"),
        ({"fails": "run"}, "the engine died"),
        (
            {"block_sizes": [16, 32]},
            "the workers have KV blocks of 16 and 32 tokens, but all pools of a model need the same block size; "
            "give one --block-size",
        ),
    ],
)
def test_an_engine_failure_ends_the_system_with_one_line(arguments: dict[str, Any], message: str) -> None:
    before = children_of(os.getpid())
    command = ["up", "--port", str(free_ports(1)), "--engine", "vllm", "--model", str(DEFAULT_MODEL), "--workers", "2"]
    result = forebay(*command, "--engine-args", json.dumps(arguments))
    assert result.returncode == (1 if "fails" in arguments else 2)
    assert result.stderr == f"forebay: {message}\n"
    assert children_of(os.getpid()) == before


@pytest.mark.slow
def test_a_system_uses_the_block_size_reported_by_its_engine(tmp_path: Path) -> None:
    """The default is one worker, named after its engine. Its blocks match the hashes computed by the ingress."""
    up = fake_up(tmp_path, {"block_sizes": [16]})
    try:
        up.wait_ready()
        with up.client() as client:
            cached = []
            for _ in range(2):
                answer = client.completions.create(model="default_model", prompt=list(range(100, 140)), max_tokens=4)
                assert answer.usage is not None
                assert answer.usage.prompt_tokens_details is not None
                cached.append(answer.usage.prompt_tokens_details.cached_tokens)
                assert answer.model_extra is not None
                assert answer.model_extra["forebay"]["worker"] == "vllm-0"
        assert cached == [0, 32]
    finally:
        up.process.terminate()
        output, _ = up.process.communicate(timeout=60)
    assert up.process.returncode == 0, output
    assert "model default_model, 1 vllm worker, kv router" in output


@pytest.mark.parametrize(("role", "pool"), [("aggregated", "default"), ("prefill", "prefill"), ("decode", "decode")])
def test_disagg_the_default_pool_of_a_worker_is_that_of_its_role(role: Any, pool: str) -> None:
    choice = choose().with_settings(role=role)
    for option, expected in (("", pool), ("mine", "mine")):
        _, spec = built(choice, "w", pool=option)
        assert (spec.role, spec.pool) == (role, expected)


@pytest.mark.parametrize(("is_installed", "connector"), [(True, "nixl"), (False, "modelled")])
def test_disagg_a_mock_engine_without_nixl_transfers_kv_in_modelled_time(
    is_installed: bool, connector: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "find_spec", lambda _: object() if is_installed else None)
    engine, _ = built(choose(), "w", pool="")
    assert isinstance(engine, MockEngine)
    assert engine.kv_settings.connector == connector


def test_disagg_a_service_does_all_of_a_request(tmp_path: Path) -> None:
    path = tmp_path / "parrot.py"
    path.write_text(
        "import asyncio\nfrom forebay.workers.service import endpoint, service\n\nasyncio.run(asyncio.sleep(0))\n\n\n"
        '@service(namespace="test")\nclass Parrot:\n    @endpoint()\n    async def generate(self, request):\n'
        "        for token in request.token_ids:\n            yield token\n"
    )
    # The file is executed before the event loop of the process runs.
    split = ("--prefill-workers", "1", "--decode-workers", "1")
    assert "only the role aggregated" in error_of("up", "--engine", f"{path}:Parrot", *split)
    choice = choose(f"{path}:Parrot")
    assert built(choice, "w", pool="")[1].pool == "default"
    with pytest.raises(ConfigError, match="Parrot is a service, and services support only"):
        built(choice.with_settings(role="prefill"), "w", pool="")


LOCAL_KAFKA = "127.0.0.1:19092"
NOBODYS = "203.0.113.7"
NOWHERE = "kafka.invalid:9092"


@pytest.fixture(autouse=True)
def no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)


def kv_of(choice: EngineChoice) -> KvSettings:
    engine, _ = built(choice, "w", pool="")
    assert isinstance(engine, MockEngine)
    return engine.kv_settings


def test_a_host_name_is_resolved() -> None:
    assert own_address("127.0.0.1") == own_address("2130706433") == "127.0.0.1"
    assert own_address("localhost") in ("127.0.0.1", "::1")


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ("nobody.invalid", "cannot resolve the name"),
        ("0.0.0.0", "0.0.0.0 is a wildcard"),
        ("224.0.0.1", "other machines cannot connect to 224.0.0.1"),
        ("fe80::1", "other machines cannot connect to fe80::1"),
        ("127.255.255.255", "127.255.255.255 is a network address"),
        (NOBODYS, f"{NOBODYS} is not an address of this machine"),
    ],
)
def test_unreachable_addresses_are_rejected(host: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        reached_at(choose(role="decode"), host, LOCAL_KAFKA)
    assert str(raised.value).startswith(f"--kv-host {host}: {message}")


def test_the_default_is_the_local_address_of_the_route_to_kafka() -> None:
    assert reached_at(choose(role="decode"), None, f"{NOWHERE},{LOCAL_KAFKA}").settings.near_host == "127.0.0.1"
    with socket.create_server(("127.0.0.2", 0)) as server, socket.create_connection(server.getsockname()) as connection:
        towards = f"127.0.0.2:{server.getsockname()[1]}"
        assert address_towards([towards]) == connection.getsockname()[0], "as a server sees who connects"
    for bad in (NOWHERE, "127.0.0.1", "127.0.0.1:kafka"):
        with pytest.raises(ConfigError, match=f"--kafka {bad}: {bad}: "):
            reached_at(choose(role="decode"), None, bad)
    assert reached_at(choose(), None, NOWHERE) == choose(), "nobody fetches from it"


def test_nixl_uses_the_interface_of_the_given_address_or_chooses_one(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = choose(role="decode")
    assert kv_of(reached_at(choice, None, LOCAL_KAFKA)).interface == ""
    given = reached_at(choice, "127.0.0.1", LOCAL_KAFKA)
    assert kv_of(given).interface == interface_of("127.0.0.1")
    with pytest.raises(ConfigError, match=r"--kv-host: 127.0.0.3 is not the first IPv4 address of any interface"):
        kv_of(reached_at(choice, "127.0.0.3", LOCAL_KAFKA))
    monkeypatch.setenv("UCX_NET_DEVICES", "mlx5_0:1")
    assert kv_of(given).interface == "", "the UCX setting of the environment applies"


@pytest.mark.parametrize(("role", "engine"), [("aggregated", "mock"), ("encode", "mock"), ("decode", "sglang")])
def test_kv_host_is_rejected_without_kv_transfer(role: str, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ADAPTERS, "sglang", FAKE)
    with pytest.raises(ConfigError, match="--kv-host requires --role prefill or decode and --engine mock or vllm"):
        reached_at(choose(engine, role=role), "127.0.0.1", LOCAL_KAFKA)


def test_a_real_engine_gets_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ADAPTERS, "vllm", FAKE)
    engine: Any = built(reached_at(choose("vllm", role="prefill"), "127.0.0.3", LOCAL_KAFKA), "w", pool="")[0]
    assert engine.settings.kv_host == "127.0.0.3"


BUCKET = "s3://bucket/prefix"


def settings(*tiers: str) -> TierSettings | None:
    return TierOptions(kv_tier=list(tiers)).settings()


def test_each_tier_has_a_size(tmp_path: Path) -> None:
    assert settings("host:size=4GB") == TierSettings(host_bytes=4 * 10**9)
    assert settings(f"disk:path={tmp_path}") == TierSettings(disk=tmp_path)
    assert settings(f"store:path={BUCKET}") == TierSettings(store=BUCKET)
    every = settings(
        "host:size=500MB",
        f"disk:size=10GB,path={tmp_path},filter=off",
        f"store:path={BUCKET},size=2TB,endpoint=http://127.0.0.1:9000,filter=off",
    )
    assert every == TierSettings(
        host_bytes=500 * 10**6,
        disk=tmp_path,
        disk_bytes=10 * 10**9,
        store=BUCKET,
        store_bytes=2 * 10**12,
        store_endpoint="http://127.0.0.1:9000",
        filter=False,
    )


@pytest.mark.parametrize(
    ("tiers", "message"),
    [
        (["disc:path=x"], "--kv-tier disc:path=x: unknown kind of tier 'disc'; did you mean disk?"),
        (["disk:size=1GB"], "--kv-tier disk:size=1GB: the key path is missing"),
        (["host:size=1GB,filter=on"], "--kv-tier host:size=1GB,filter=on: unknown key 'filter'; keys are: size"),
        (["disk:path=a,filter=maybe"], "--kv-tier disk:path=a,filter=maybe: expected one of on, off, got"),
        (["host:size=1GB", "host:size=2GB"], "--kv-tier host:size=2GB: there is another host tier"),
        (["disk:path=a,filter=on", "store:path=b,filter=off"], "--kv-tier: the tiers of a worker have one value of"),
        (["store:path=gs://bucket"], "--kv-tier store:path=gs://bucket: unsupported store; expected a directory or"),
        (["store:path=s3://kv/prod"], "--kv-tier store:path: s3://kv/prod: invalid bucket name 'kv'; expected s3://"),
        (["store:path=FILE"], "--kv-tier store:path=FILE: not a directory"),
        (["disk:path=FILE"], "--kv-tier disk:path=FILE: not a directory"),
        (["store:path=folder,endpoint=http://h"], "--kv-tier store:endpoint=http://h: expected http://HOST:PORT, of a"),
    ],
)
def test_invalid_tiers_are_rejected(
    tiers: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("FILE").write_text("")
    with pytest.raises(ConfigError) as raised:
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
    with pytest.raises(ConfigError) as raised:
        parsed_tiers([f"store:endpoint=http://user:secret@host:9000,{part}"])
    assert "secret" not in str(raised.value)


def test_engines_without_tiers_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ADAPTERS, "tensorrt-llm", FAKE)
    tiers = TierSettings(host_bytes=1 << 30)
    with pytest.raises(ConfigError, match="KV tiers require --engine mock or vllm or sglang, got tensorrt-llm"):
        tiered(choose("tensorrt-llm"), tiers)
    with pytest.raises(ConfigError, match="--role encode: an encode worker has no KV"):
        tiered(choose(role="encode"), tiers)


def test_storage_of_the_engines_own_connector_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ADAPTERS, "vllm", FAKE)
    choice = choose("vllm", kv_store_name="lmcache-1")
    assert choice.settings.kv_store_name == "lmcache-1"
    assert tiered(choice, TierSettings(host_bytes=1 << 30)).settings.kv_store_name == "lmcache-1"
    with pytest.raises(ConfigError, match="--kv-tier store names itself"):
        tiered(choice, TierSettings(store=BUCKET))
    with pytest.raises(ConfigError, match="--kv-store-name requires --engine vllm or sglang, got mock"):
        choose(kv_store_name="a")


def test_each_worker_of_a_process_has_its_own_disk(tmp_path: Path) -> None:
    choice = tiered(choose(), TierSettings(disk=tmp_path, store=BUCKET))
    found = [with_own_disk(choice.with_settings(role="prefill"), name).settings.tiers for name in ("a", "b")]
    assert found == [TierSettings(disk=tmp_path / name, store=BUCKET) for name in ("a", "b")]
    host = tiered(choose(), TierSettings(host_bytes=1 << 30))
    assert with_own_disk(host, "a") == host


@pytest.mark.parametrize("command", ["worker", "up"])
def test_commands_reject_options_without_effect(command: str) -> None:
    where = ("--kafka", "127.0.0.1:1") if command == "worker" else ()
    assert "the key path is missing" in error_of(command, *where, "--kv-tier", "disk:size=1GB")


def test_a_server_that_already_runs_has_its_own_tiers() -> None:
    assert "options of KV tiers cannot be combined with --upstream" in error_of(
        "worker", "--kafka", "127.0.0.1:1", "--upstream", "http://h:1", "--kv-tier", "host:size=1GB"
    )


TOKENS = 300
PROMPT = list(range(100, 140))


@contextmanager
def running(folder: Path, arguments: dict[str, Any], *options: str) -> Iterator[Up]:
    up = fake_up(folder, arguments, *options)
    try:
        up.wait_ready()
        yield up
    finally:
        up.process.kill()
        up.process.communicate(timeout=PATIENCE_S)


@pytest.mark.slow
@pytest.mark.parametrize("models", [1, 2])
def test_the_ingress_has_the_context_length_of_the_engine_arguments(models: int, tmp_path: Path) -> None:
    other = shutil.copytree(DEFAULT_MODEL, tmp_path / "other")
    with running(tmp_path, {"max_model_len": 64}, *["--model", str(other)][: 2 * (models - 1)]) as up:
        body = {"model": "default_model", "prompt": list(range(100, 164)), "max_tokens": 5}
        response = httpx.post(f"{up.url}/v1/completions", json=body, timeout=PATIENCE_S)
        assert response.status_code == 400
        assert "the prompt has 64 tokens, so the context of 64 has no room" in response.text
        listed = httpx.get(f"{up.url}/v1/models", timeout=PATIENCE_S).json()["data"]
        assert [one["max_model_len"] for one in listed] == [64] * models


def metric(up: Up, name: str) -> dict[str, float]:
    text = httpx.get(f"{up.url}/metrics", timeout=PATIENCE_S).text
    return {
        sample.labels["worker_id"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    }


def until(reached: Callable[[], bool]) -> None:
    ends_s = time.monotonic() + PATIENCE_S
    while not reached():
        assert time.monotonic() < ends_s
        time.sleep(0.05)


def streamed(up: Up, on_piece: Callable[[str, int], None] = lambda *_: None) -> tuple[str, int]:
    """Return the text and the number of attempts of a streamed response.

    `on_piece` gets the worker that began the response, and the number of pieces so far.
    """
    body = {"model": "default_model", "prompt": PROMPT, "max_tokens": TOKENS, "stream": True, "temperature": 0}
    pieces: list[str] = []
    attempts = 0
    with httpx.stream("POST", f"{up.url}/v1/completions", json=body, timeout=PATIENCE_S) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            assert "error" not in chunk, chunk
            pieces += [choice["text"] for choice in chunk["choices"]]
            attempts = chunk.get("forebay", {}).get("attempts", attempts)
            on_piece(response.headers["x-forebay-worker"], len(pieces))
    return "".join(pieces), attempts


def test_a_killed_engine_is_replaced_while_its_response_continues(tmp_path: Path) -> None:
    """No process is left when the system is killed."""
    with running(tmp_path, {"speedup": 4.0}, "--workers", "2") as up:
        expected, _ = streamed(up)
        engines = children_of(up.process.pid)  # in the order of the workers
        killed: list[int] = []

        def kill(worker: str, pieces: int) -> None:
            if pieces > 3 and not killed:
                killed.append(engines[int(worker.removeprefix("vllm-"))])
                os.kill(killed[0], signal.SIGKILL)

        assert streamed(up, kill) == (expected, 2)
        until(lambda: metric(up, "forebay_worker_member") == {"vllm-0": 1.0, "vllm-1": 1.0})
        assert sorted(metric(up, "forebay_worker_engine_failures_total").values()) == [0.0, 1.0]
        replaced = children_of(up.process.pid)
        assert len(replaced) == 2
        assert killed[0] not in replaced
        up.process.send_signal(signal.SIGKILL)
        until(lambda: not still_running(replaced))


@pytest.mark.slow
def test_the_only_engine_comes_back(tmp_path: Path) -> None:
    """Meanwhile its start fails once."""
    broken = tmp_path / "broken"
    with running(tmp_path, {"speedup": 4.0, "fails_if": str(broken)}) as up:
        broken.touch()
        os.kill(children_of(up.process.pid)[0], signal.SIGKILL)
        until(lambda: metric(up, "forebay_worker_engine_failures_total")["vllm-0"] >= 2)
        assert httpx.get(f"{up.url}/ready", timeout=PATIENCE_S).status_code == httpx.codes.SERVICE_UNAVAILABLE
        broken.unlink()
        until(lambda: httpx.get(f"{up.url}/ready", timeout=PATIENCE_S).status_code == httpx.codes.OK)
        assert len(streamed(up)[0]) > 0


ERROR = EngineError("the engine died")


def restarts(*names: str) -> EngineRestarts:
    made = EngineRestarts()
    for name in names:
        made.add(name)
    made.is_serving = True
    return made


def test_pauses_double_up_to_a_maximum_until_an_engine_was_healthy() -> None:
    made = restarts("a", "b")
    pauses = [made.pause_s("a", HEALTHY_S / 2, 1, ERROR) for _ in range(2_000)]
    assert pauses[:7] == [PAUSE_S * 2**at for at in range(6)] + [PAUSE_S_MAX]
    assert set(pauses[7:]) == {PAUSE_S_MAX}
    assert [made.pause_s("a", healthy_s, 1, ERROR) for healthy_s in (HEALTHY_S, 0.0)] == [PAUSE_S, 2 * PAUSE_S]
    assert made.failures == {"a": 2_002, "b": 0}


def test_the_system_ends_once_every_engine_has_failed_in_a_row() -> None:
    made = restarts("a", "b", "drained")
    for _ in range(FAILURES_MAX + 1):
        made.pause_s("a", 0.0, 0, ERROR)
    for _ in range(FAILURES_MAX):
        made.pause_s("b", 0.0, 0, ERROR)
    made.remove("drained")
    made.pause_s("a", 0.0, 1, ERROR)  # the other engine serves just now
    with pytest.raises(EngineError, match=f"every engine has failed {FAILURES_MAX} times in a row: the engine died"):
        made.pause_s("a", 0.0, 0, ERROR)


def test_an_engine_that_fails_before_the_system_serves_ends_it() -> None:
    made = restarts("a", "b")
    made.is_serving = False
    with pytest.raises(EngineError, match=r"^the engine died$"):
        made.pause_s("a", 0.0, 1, ERROR)
