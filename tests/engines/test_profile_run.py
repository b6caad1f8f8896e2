"""`forebay profile run` measures a real vLLM."""

import json
import signal
from pathlib import Path

import msgspec

from forebay.events.scaling import DecodePoint, PrefillPoint
from tests.cli.in_process import forebay
from tests.cli.up import FOREBAY, Up
from tests.engines.vllm_settings import ARGUMENTS, BLOCK

STARTED_WITHIN_S = 240.0  # on two busy cores
KV_BLOCKS = 128
GRID = ("--isl", "64,128,2048", "--context", "128", "--concurrency", "1,2", "--output-tokens", "16", "--repeats", "1")


def test_vllm_is_profiled(model: Path, tmp_path: Path) -> None:
    arguments = tmp_path / "arguments.json"
    arguments.write_text(json.dumps(ARGUMENTS))
    options = ["--engine", "vllm", "--model", str(model), "--model-name", "tiny", "--engine-args", str(arguments)]
    sizes = ["--block-size", str(BLOCK), "--kv-blocks", str(KV_BLOCKS), "--max-num-seqs", "8"]
    up = Up(*options, *sizes, program=[FOREBAY])
    try:
        up.wait_ready(STARTED_WITHIN_S)
        run = forebay("profile", "run", "--url", up.url, "--out", str(tmp_path / "p.json"), *GRID)
        assert run.returncode == 0, run.stderr
        assert up.end(signal.SIGTERM) == 0
    finally:
        up.process.kill()
        up.process.wait()
    found = json.loads((tmp_path / "p.json").read_text())
    assert [one.isl for one in msgspec.convert(found["prefill"], list[PrefillPoint])] == [64, 128]
    assert [one.concurrency for one in msgspec.convert(found["decode"], list[DecodePoint])] == [1, 2]
    assert [one["point"]["tokens"] for one in found["left_out"]] == [2048], "the context has 1,024 tokens"
