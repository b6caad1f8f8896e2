"""Fake engine that reports its sizes when it starts and fails on request."""

from pathlib import Path

import msgspec

from forebay import runtime
from forebay.engine_model.model import EngineConfig
from forebay.events.fleet import WorkerSpec
from forebay.workers.engine import EngineError, Publish
from forebay.workers.engines.adapters import Adapter
from forebay.workers.engines.mock.engine import MockEngine
from forebay.workers.engines.settings import EngineSettings

VOCABULARY = (470, 496, 500, 522)  # words
FAKE = Adapter("tests.cli.fake_engine", "FakeEngine", (), "max_model_len")


class FakeEngine(MockEngine):
    """Fake engine configured by `arguments`: the method that `fails` and the `block_sizes` reported by the workers.

    A file with the name `fails_if` makes its start fail.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self.config = EngineConfig(vocabulary=VOCABULARY, block_size=16)
        super().__init__(self.config, speedup=settings.arguments.get("speedup", 1e3))

    async def start(self, spec: WorkerSpec) -> WorkerSpec:
        arguments = self.settings.arguments
        is_broken = await runtime.offload(Path(arguments.get("fails_if", "/nowhere")).exists)
        if is_broken or arguments.get("fails") == "start":
            raise EngineError("the weights are broken")
        config = self.config
        sizes = arguments.get("block_sizes", [16])
        return msgspec.structs.replace(
            spec,
            block_size=sizes[int(spec.worker_id.rpartition("-")[2]) % len(sizes)],
            kv_blocks_total=config.kv_blocks_total,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
        )

    async def run(self, publish: Publish) -> None:
        if self.settings.arguments.get("fails") == "run":
            raise EngineError("the engine died")
        await super().run(publish)
