"""Measure loading against computing for one set of tiers, by prefix length: an engine in this process.

Arguments: model directory, tiers as JSON, repetitions, and milliseconds by which each read of a block from the shared
store is delayed. The last line of stdout is the result as JSON: per length, the median time to first token in ms when
the prefix is always loaded, never loaded, or loaded by the rule. `fastest` are the minima, which other load on the
machine changes least.
"""

import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast
from unittest import mock

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

from forebay.workers.engines.vllm.tiers import connector as connector_module
from forebay.workers.engines.vllm.tiers.configuration import TierConfig, connector
from forebay.workers.kv_tiers import offload_manager
from forebay.workers.kv_tiers.block_store import BlockStore
from forebay.workers.kv_tiers.identity import BlockName
from forebay.workers.kv_tiers.offload_manager import open_store
from tests.benchmarks.bench_vllm_tiers import ARGUMENTS, BLOCK, LENGTHS
from tests.harness.models.make_tiny_model import VOCABULARY

KV_BLOCKS = 160
SETTLE_S = 20.0
TAIL = BLOCK // 2  # tokens after the prefix, which are computed in every case
WAYS = ("load", "compute", "rule")


class SlowStore:
    """A store whose reads take longer, as those of a remote one."""

    def __init__(self, store: BlockStore, delay_s: float) -> None:
        self._store, self._delay_s = store, delay_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def read(self, names: Sequence[BlockName], into: Sequence[memoryview], deadline_s: float) -> list[str]:
        """Read blocks, and wait."""
        results = self._store.read(names, into, deadline_s)
        time.sleep(self._delay_s * len(names))
        return results


def open_slowly(delay_s: float, tier: Literal["disk", "store"], *arguments: Any) -> BlockStore:
    """Open a store. Reads of a shared store take `delay_s` seconds longer per block."""
    store = open_store(tier, *arguments)
    return cast("BlockStore", SlowStore(store, delay_s)) if tier == "store" and delay_s else store


class Engine:
    """One engine with tiers, of which a measurement decides whether it loads."""

    def __init__(self, model: Path, config: TierConfig, delay_ms: float) -> None:
        transfer = KVTransferConfig(**connector(config), kv_load_failure_policy="recompute")
        with mock.patch.object(offload_manager, "open_store", partial(open_slowly, delay_ms / 1e3)):
            self._llm = LLM(
                str(model),
                block_size=BLOCK,
                num_gpu_blocks_override=KV_BLOCKS,
                kv_transfer_config=transfer,
                **ARGUMENTS,
            )
        (self._rank,) = connector_module.RANKS.values()
        self._costs: Any = self._rank.tiers.costs
        self._rule = self._costs.worthwhile

    def ttft_s(self, prompt: list[int]) -> float:
        """Run a request for one token, and return its duration."""
        sampling = SamplingParams(temperature=0, max_tokens=1)
        began = time.perf_counter()
        self._llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        return time.perf_counter() - began

    def forget(self) -> None:
        """Empty device memory, after the tiers have what they were offered."""
        ends = time.monotonic() + SETTLE_S
        while self._rank.busy and time.monotonic() < ends:
            self._rank.poll(idle=True)
        self._rank.take_changes()
        assert self._llm.reset_prefix_cache()

    def choose(self, way: str) -> None:
        """Load always, never, or by the rule."""
        always = lambda _cached, runs, _size: sum(run.blocks for run in runs)  # noqa: E731
        rules: dict[str, Any] = {"load": always, "compute": lambda *_: 0, "rule": self._rule}
        self._costs.worthwhile = rules[way]


def over_best(times: dict[str, float]) -> float:
    """Return the ratio of the time by the rule to the better one of the other two."""
    return round(times["rule"] / min(times["load"], times["compute"]), 3)


def main() -> None:
    """Print the measurements."""
    model, config, repeats = Path(sys.argv[1]), TierConfig.decode(json.loads(sys.argv[2])), int(sys.argv[3])
    engine = Engine(model, config, float(sys.argv[4]))
    draw = random.Random(7)

    def prompt(length: int) -> list[int]:
        return [draw.randrange(3, VOCABULARY) for _ in range(length + TAIL)]

    engine.choose("rule")
    for length in (*LENGTHS, *LENGTHS):  # so that the rule has measurements
        warm = prompt(length)
        for _ in range(2):
            engine.ttft_s(warm)
            engine.forget()
    found: dict[str, dict[str, Any]] = {}
    for length in LENGTHS:
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        asked = prompt(length)
        engine.choose("compute")
        engine.ttft_s(asked)
        engine.forget()
        for at in range(repeats):
            for way in WAYS[at % len(WAYS) :] + WAYS[: at % len(WAYS)]:
                engine.choose(way)
                times[way].append(engine.ttft_s(asked))
                engine.forget()
        medians = {way: statistics.median(values) * 1e3 for way, values in times.items()}
        fastest = {way: min(values) * 1e3 for way, values in times.items()}
        found[str(length)] = {way: round(value, 2) for way, value in medians.items()} | {
            "rule_over_best": over_best(medians),
            "fastest": {way: round(value, 2) for way, value in fastest.items()},
            "fastest_rule_over_best": over_best(fastest),
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
