"""Profiles from AIConfigurator, with a stub of known costs and with the package if it is installed."""

import importlib
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
from click.testing import CliRunner

from forebay.cli.app import app
from forebay.engine_model.timing import LinearTiming, StepWork
from forebay.simulate.profiles.profile import EngineSizes, load_profile

COSTS = LinearTiming(
    step=900.0, prefill_token=20.0, attended_pair=0.001, decode_step=700.0, decode_sequence=12.0, context_token=0.04
)
HERE = find_spec("aiconfigurator_core") is not None


class KnownEngine:
    """Stub of the package's estimator. Returns milliseconds."""

    compiled: ClassVar[list[tuple[Any, ...]]] = []
    scale = 1e-3

    @classmethod
    def compile(cls, model: str, system: str, backend: str, *, tp_size: int) -> "KnownEngine":
        if model == "nobody/knows":
            raise KeyError(model)
        cls.compiled.append((model, system, backend, tp_size))
        return cls()

    def predict_prefill_latency(self, sequences: int, tokens: int, cached: int) -> float:
        new = tokens - cached
        pairs = new * cached + new * (new + 1) // 2
        return self.scale * (COSTS.step + COSTS.prefill_token * new + COSTS.attended_pair * pairs) * sequences

    def predict_decode_latency(self, sequences: int, context: int) -> float:
        more = COSTS.decode_sequence * sequences + COSTS.context_token * sequences * context
        return self.scale * (COSTS.step + COSTS.decode_step + more)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install the stub in place of the package."""
    names = ("aiconfigurator_core", "aiconfigurator_core.sdk", "aiconfigurator_core.sdk.engine")
    for name in names:
        module = ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    setattr(sys.modules[names[-1]], "EngineHandle", KnownEngine)  # noqa: B010 - mypy knows no such attribute
    monkeypatch.delitem(sys.modules, "forebay.simulate.profiles.aiconfigurator", raising=False)
    KnownEngine.compiled.clear()
    yield
    sys.modules.pop("forebay.simulate.profiles.aiconfigurator", None)


def invoke(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, ["profile", "aiconfigurator", *map(str, arguments)])


@pytest.mark.usefixtures("known")
def test_the_costs_of_a_linear_engine_are_recovered(tmp_path: Path) -> None:
    out = tmp_path / "engine.toml"
    result = invoke("some/model", "--system", "h200_sxm", "--tensor-parallel", "2", "-o", out)
    assert result.exit_code == 0, result.output
    assert KnownEngine.compiled == [("some/model", "h200_sxm", "vllm", 2)]
    profile = load_profile(str(out))
    for name in COSTS.__struct_fields__:
        assert getattr(profile.timing, name) == pytest.approx(getattr(COSTS, name), rel=0.01), name
    assert (profile.sizes, profile.name) == (EngineSizes(gpus=2.0), "some/model on 2 h200_sxm, vllm")
    assert "against the estimates, p50 / p90: prefill 0.0% / 0." in result.stderr


@pytest.mark.usefixtures("known")
def test_profile_is_printed_without_output_file(tmp_path: Path) -> None:
    result = invoke("some/model")
    path = tmp_path / "other.toml"
    path.write_text(result.stdout)
    assert load_profile(str(path)).sizes == EngineSizes(gpus=1.0)
    refused = invoke("some/model", "-o", tmp_path / "none" / "engine.toml")
    assert (refused.exit_code, "No such file or directory" in refused.stderr) == (2, True)


@pytest.mark.usefixtures("known")
def test_unknown_combination_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    result = invoke("nobody/knows")
    assert result.exit_code == 2
    assert "AIConfigurator cannot estimate nobody/knows on h100_sxm with vllm" in result.stderr
    monkeypatch.setattr(KnownEngine, "scale", 0.0)
    result = invoke("some/model")
    assert (result.exit_code, "it contains a step time of 0; choose another" in result.stderr) == (2, True)


@pytest.mark.skipif(HERE, reason="aiconfigurator-core is here")
def test_missing_extra_is_reported() -> None:
    result = invoke("some/model")
    assert result.exit_code == 2
    assert "pip install 'forebay[aiconfigurator]'" in result.stderr


@pytest.mark.skipif(not HERE, reason="needs aiconfigurator-core: pip install 'forebay[aiconfigurator]'")
@pytest.mark.filterwarnings("ignore")
def test_llama_8b_on_one_h100() -> None:
    """A decode step takes at least as long as reading 15 GB at 3.35 TB/s, and less than twice as long."""
    from forebay.simulate.profiles.aiconfigurator import fit_estimates  # noqa: PLC0415 - imports the extra

    found = fit_estimates("meta-llama/Meta-Llama-3.1-8B", "h100_sxm", "vllm", 1)
    one = found.timing.step_us(StepWork(0, 0, decode_sequences=1, decode_tokens=1024, cache_tokens=1 << 20))
    assert 4_480 < one < 9_000
    assert found.decode[0] < 0.1
