"""Settings of the vLLM engines that the tests of this folder start."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from forebay.events.fleet import WorkerSpec
from forebay.workers.engines.settings import EngineSettings

BLOCK = 32
KV_BLOCKS = 40
ARGUMENTS: dict[str, Any] = {"dtype": "float32", "enforce_eager": True, "max_model_len": 1024}
SPEC = WorkerSpec(
    worker_id="w1", model="tiny", block_size=1, kv_blocks_total=1, max_num_seqs=1, max_num_batched_tokens=1
)


def settings(model: Path, **options: Any) -> EngineSettings:
    base = EngineSettings(
        model=model, model_name="tiny", block_size=BLOCK, kv_blocks=KV_BLOCKS, max_num_seqs=8, arguments=ARGUMENTS
    )
    return replace(base, **options)
