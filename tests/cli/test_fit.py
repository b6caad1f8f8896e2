"""The `forebay fit` command."""

import asyncio
from importlib.util import find_spec
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from forebay.cli.app import app
from forebay.cli.common import extras
from forebay.engine_model.timing import LinearTiming
from forebay.events.control import RouterConfig
from forebay.simulate.profiles.profile import EngineSizes, load_profile
from forebay.simulate.workloads.rows import MooncakeRow
from tests.replay.recorded import write
from tests.replay.simulated import BLOCK, played
from tests.simulate.traces import conversations

TRUTH = LinearTiming(step=1500.0, prefill_token=8.0, decode_step=2000.0, decode_sequence=300.0, context_token=0.1)


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["fit", *map(str, arguments)])


def recording(path: Path, rows: list[MooncakeRow]) -> Path:
    asyncio.run(write(played(rows, RouterConfig(), 2, timing=TRUTH).log, path))
    return path


def test_a_recording_becomes_a_profile(tmp_path: Path) -> None:
    log = recording(tmp_path / "run.db", conversations(12, 12, every_ms=90))
    out = tmp_path / "engine.toml"
    result = invoke(log, "-o", out)
    assert result.exit_code == 0, result.output
    profile = load_profile(str(out))
    assert isinstance(profile.timing, LinearTiming)
    assert profile.timing.prefill_token == pytest.approx(TRUTH.prefill_token, rel=0.1)
    assert profile.timing.step + profile.timing.decode_step == pytest.approx(3500, rel=0.1)
    assert profile.sizes == EngineSizes(
        block_size=BLOCK, kv_blocks=16_384, max_num_seqs=256, max_num_batched_tokens=8192
    )
    assert (profile.name, profile.source) == ("mock, fitted", "fitted to run.db")
    for text in ("TTFT of requests outside", "ITL of requests outside", "on 2 ranks of mock", "(prefill_token)"):
        assert text in result.stderr
        assert text in out.read_text()


def test_a_profile_on_stdout_can_be_loaded(tmp_path: Path) -> None:
    log = recording(tmp_path / "run.db", conversations(5, 8))
    result = invoke(log)
    assert result.exit_code == 0, result.output
    path = tmp_path / "other.toml"
    path.write_text(result.stdout)
    assert load_profile(str(path)).sizes.block_size == BLOCK


def test_too_few_requests_are_rejected(tmp_path: Path) -> None:
    result = invoke(recording(tmp_path / "run.db", conversations(2, 3)))
    assert result.exit_code == 2
    assert "forebay: only 6 requests can be compared; at least 20 are needed" in result.stderr


def test_an_unwritable_output_is_rejected(tmp_path: Path) -> None:
    log = recording(tmp_path / "run.db", conversations(5, 8))
    result = invoke(log, "-o", tmp_path / "none" / "engine.toml")
    assert result.exit_code == 2
    assert "engine.toml: No such file or directory" in result.stderr


def test_the_output_cannot_overwrite_the_recording(tmp_path: Path) -> None:
    log = recording(tmp_path / "run.db", conversations(5, 8))
    before = log.read_bytes()
    (tmp_path / "same.db").symlink_to(log)
    for out in (log, tmp_path / "same.db"):
        result = invoke(log, "-o", out)
        assert (result.exit_code, log.read_bytes() == before) == (2, True)
        assert f"{out}: --out names the recording itself" in result.stderr


def test_a_missing_recording_is_rejected(tmp_path: Path) -> None:
    result = invoke(tmp_path / "none.db")
    assert result.exit_code == 2
    assert "none.db" in result.stderr


def test_missing_extra_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "scipy" else find_spec(name))
    result = invoke(tmp_path / "run.db")
    assert result.exit_code == 2
    assert "forebay fit requires the package scipy; install it with: pip install 'forebay[fit]'" in result.stderr
