"""Engine selection: rejected options, engine settings, and systems that use the sizes reported by an engine."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from forebay.cli.app import app
from forebay.cli.processes import engines
from forebay.cli.processes.engine_options import ADAPTERS, ENGINES, Adapter, EngineOptions
from forebay.cli.processes.engines import EngineChoice, built, playing, ranked_from
from forebay.engine_model.model import EngineConfig
from forebay.engine_model.timing import LinearTiming
from forebay.events.fleet import WorkerSpec
from forebay.ingress.errors import Unusable
from forebay.ingress.model import DEFAULT_MODEL
from forebay.workers.engines.engine_process import EngineProcess
from forebay.workers.engines.mock.engine import MockEngine
from tests.cli.adapters import FAKE
from tests.cli.up import children_of, fake_up, forebay
from tests.harness.local import free_ports

ROOT = Path(__file__).parents[2]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace a real engine by the fake one."""
    monkeypatch.setitem(ADAPTERS, "vllm", FAKE)


def choose(engine: str = "vllm", **options: Any) -> EngineChoice:
    model = None if engine == "mock" else str(DEFAULT_MODEL)
    return EngineOptions(**{"engine": engine, "model": model, **options}).choice()


def test_a_mock_engine_uses_the_sizes_of_the_model_by_default() -> None:
    engine, spec = built(choose("mock", kv_blocks=99, lora=["a=b"]), "mock-0", pool="p", taints=["t"])
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
    choice = choose(engine_args=text, role="prefill", kv_blocks=7, dp_size=2, lora=[f"legal={lora}"], model_name="m")
    engine, spec = built(ranked_from(choice, 4), "w", pool="p", kv_events=False)
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
        (
            {"engine": "llama"},
            f"--engine: unknown engine 'llama'; engines are: {', '.join(ENGINES)}, FILE.py:",
        ),
        ({"role": "boss"}, "--role: unknown role 'boss'; roles are: aggregated, prefill, decode, encode"),
        ({"model": None}, "the vllm engine requires --model, a model directory with weights or ORG/NAME"),
        ({"speedup": 2.0}, "--speedup requires --engine mock"),
        ({"engine_profile": "mocker"}, "--engine-profile requires --engine mock: vllm runs at its own speed"),
        (
            {"engine": "mock", "engine_profile": "h100"},
            "--engine-profile: unknown engine profile 'h100'; use 'mocker'",
        ),
        (
            {"engine": "mock", "engine_args": '{"kv_lease": 1}'},
            "--engine-args: unknown argument 'kv_lease'; did you mean",
        ),
        ({"engine": "mock", "engine_args": '{"kv_lease_s": 0}'}, "--engine-args: kv_lease_s: must be a number"),
        ({"engine": "mock", "speedup": float("nan")}, "--speedup must be a positive number, not nan"),
        ({"engine_args": "/nowhere.yaml"}, "/nowhere.yaml: No such file"),
        ({"engine_args": "{1}"}, "--engine-args: "),
        ({"engine_args": "ARGS.yaml"}, "ARGS.yaml: expected a mapping of argument names to values, got a list"),
        ({"engine_args": "KEYS.yaml"}, "KEYS.yaml: expected a mapping of argument names to values, got a mapping"),
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
    Path("KEYS.yaml").write_text("1: a\n")
    with pytest.raises(Unusable) as raised:
        choose(**options)
    assert str(raised.value).startswith(message)


def test_a_mock_engine_uses_the_timing_and_sizes_of_its_profile_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs: list[EngineConfig] = []
    monkeypatch.setattr(engines, "MockEngine", lambda config, **_: configs.append(config))
    path = tmp_path / "engine.toml"
    sizes = "{ block_size = 32, kv_blocks = 99, max_num_seqs = 4 }"
    path.write_text(f'kind = "linear"\ncosts_us.step = 70\nsizes = {sizes}')
    _, spec = built(choose("mock", engine_profile=str(path), kv_blocks=11), "w", pool="p")
    assert (spec.block_size, spec.kv_blocks_total, spec.max_num_seqs, spec.max_num_batched_tokens) == (32, 11, 4, 8192)
    assert [config.timing for config in configs] == [LinearTiming(step=70.0)]


def test_inconsistent_sizes_and_a_missing_package_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unusable, match=r"max_num_batched_tokens \(3\) must be at least max_num_seqs \(256\)"):
        built(choose("mock", max_num_batched_tokens=3), "w", pool="p")
    monkeypatch.setitem(ADAPTERS, "sglang", Adapter("nowhere", "Nothing", ("no_such_package",)))
    with pytest.raises(Unusable) as raised:
        built(choose("sglang"), "w", pool="p")
    expected = "the sglang engine requires the package no_such_package; install it with: pip install 'forebay[sglang]'"
    assert str(raised.value).startswith(expected)


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fails": "start"}, "the weights are broken"),
        ({"fails": "run"}, "the engine died"),
        (
            {"block_sizes": [16, 32]},
            "the workers have KV blocks of 16 and 32 tokens, but pools of a model share one size; use one --block-size",
        ),
    ],
)
def test_an_engine_failure_ends_the_system_with_one_line(arguments: dict[str, Any], message: str) -> None:
    before = children_of(os.getpid())
    command = ["up", "--port", str(free_ports(1)), "--engine", "vllm", "--model", str(DEFAULT_MODEL), "--workers", "2"]
    result = CliRunner().invoke(app, [*command, "--engine-args", json.dumps(arguments)])
    assert result.exit_code == (1 if "fails" in arguments else 2)
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


def test_a_missing_package_ends_the_command_with_one_line() -> None:
    """The test environment has no engine installed."""
    run = forebay("worker", "--engine", "tensorrt-llm", "--model", ".")
    assert run.returncode == 2
    assert run.stderr == (
        "forebay: the tensorrt-llm engine requires the package tensorrt_llm; "
        "install it with: pip install 'forebay[tensorrt-llm]' "
        "(docs/install.md lists tested versions and requirements)\n"
    )


@pytest.mark.parametrize(("role", "pool"), [("aggregated", "default"), ("prefill", "prefill"), ("decode", "decode")])
def test_disagg_the_default_pool_of_a_worker_is_that_of_its_role(role: Any, pool: str) -> None:
    choice = playing(choose("mock"), role)
    for option, expected in (("", pool), ("mine", "mine")):
        _, spec = built(choice, "w", pool=option)
        assert (spec.role, spec.pool) == (role, expected)


def test_disagg_a_mock_engine_gets_the_kv_transfer_settings() -> None:
    settings = choose("mock", kv_bytes_per_token=32, engine_args='{"kv_checksum": true, "kv_lease_s": 5}').settings
    assert (settings.kv_bytes_per_token, settings.kv_checksum, settings.kv_lease_s) == (32, True, 5.0)
    assert settings.arguments == {}


@pytest.mark.parametrize(("is_installed", "connector"), [(True, "nixl"), (False, "modelled")])
def test_disagg_a_mock_engine_without_nixl_transfers_kv_in_modelled_time(
    is_installed: bool, connector: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "find_spec", lambda _: object() if is_installed else None)
    engine, _ = built(choose("mock"), "w", pool="")
    assert isinstance(engine, MockEngine)
    assert engine.kv_settings.connector == connector


@pytest.mark.usefixtures("fake")
def test_disagg_a_real_engine_uses_its_own_kv_transfer() -> None:
    with pytest.raises(Unusable, match="--kv-bytes-per-token requires --engine mock: vllm configures KV transfer in"):
        choose("vllm", kv_bytes_per_token=32)


def test_disagg_a_service_does_all_of_a_request(tmp_path: Path) -> None:
    path = tmp_path / "parrot.py"
    path.write_text(
        "from forebay.workers.service import endpoint, service\n\n\n"
        '@service(namespace="test")\nclass Parrot:\n    @endpoint()\n    async def generate(self, request):\n'
        "        for token in request.token_ids:\n            yield token\n"
    )
    choice = choose(f"{path}:Parrot")
    assert built(choice, "w", pool="")[1].pool == "default"
    with pytest.raises(Unusable, match="Parrot is a service, and services support only"):
        built(playing(choice, "prefill"), "w", pool="")
    run = forebay("up", "--engine", f"{path}:Parrot", "--prefill-workers", "1", "--decode-workers", "1")
    assert (run.returncode, "only the role aggregated" in run.stderr) == (2, True), run.stderr
