"""Settings of the vLLM engines that the tests of this folder start."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from forebay.events.fleet import WorkerSpec
from forebay.workers.engines.settings import EngineSettings

# Read when torch and vLLM are imported. With it, vLLM needs neither a network nor a GPU.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CACHE_ROOT": str(Path(sys.prefix) / "cache" / "vllm"),  # finding out about a model class takes 10 s
}
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
