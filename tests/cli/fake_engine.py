"""Fake engine that reports its sizes when it starts and fails on request."""

import msgspec

from forebay.engine_model.model import EngineConfig
from forebay.events.fleet import WorkerSpec
from forebay.workers.engine import EngineError, Publish
from forebay.workers.engines.mock.engine import MockEngine
from forebay.workers.engines.settings import EngineSettings

CALLS: list[str] = []
VOCABULARY = (100, 101, 102)


class FakeEngine(MockEngine):
    """Fake engine configured by `arguments`: the method that `fails` and the `block_sizes` of successive engines."""

    def __init__(self, settings: EngineSettings) -> None:
        sizes = settings.arguments.get("block_sizes", [16])
        self.settings = settings
        self.config = EngineConfig(vocabulary=VOCABULARY, block_size=sizes[CALLS.count("made") % len(sizes)])
        CALLS.append("made")
        super().__init__(self.config, speedup=1e3)

    async def start(self, spec: WorkerSpec) -> WorkerSpec:
        if self.settings.arguments.get("fails") == "start":
            raise EngineError("the weights are broken")
        config = self.config
        return msgspec.structs.replace(
            spec,
            block_size=config.block_size,
            kv_blocks_total=config.kv_blocks_total,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
        )

    async def run(self, publish: Publish) -> None:
        if self.settings.arguments.get("fails") == "run":
            raise EngineError("the engine died")
        await super().run(publish)

    async def stop(self) -> None:
        CALLS.append("stop")
