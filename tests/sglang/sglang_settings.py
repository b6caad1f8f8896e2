"""Settings of the SGLang engines that the tests of this folder start, in the process that `forebay worker` uses."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from forebay.events.fleet import WorkerSpec
from forebay.workers.engines.adapters import ADAPTERS
from forebay.workers.engines.engine_process import EngineProcess, engine_process
from forebay.workers.engines.settings import EngineSettings

ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1"}
BLOCK = 16
KV_BLOCKS = 96
ARGUMENTS: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_overlap_schedule": True,
    "disable_cuda_graph": True,
    "context_length": 1024,
    "dtype": "float32",
    "mem_fraction_static": 0.1,
}
SPEC = WorkerSpec(
    worker_id="w1", model="tiny", block_size=1, kv_blocks_total=1, max_num_seqs=1, max_num_batched_tokens=1
)


def settings(model: Path, **options: Any) -> EngineSettings:
    base = EngineSettings(
        model=model, model_name="tiny", block_size=BLOCK, kv_blocks=KV_BLOCKS, max_num_seqs=8, arguments=ARGUMENTS
    )
    return replace(base, **options)


def sglang_engine(model: Path, **options: Any) -> EngineProcess:
    adapter = ADAPTERS["sglang"]
    return engine_process(adapter.module, adapter.name, settings(model, **options))
