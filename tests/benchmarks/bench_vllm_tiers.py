"""Measure the KV tiers of real vLLM on a CPU, with a random model. Runs in `.venv-engines`.

The prompts need four times the KV memory, and run with different tiers. Every answer is compared with that of the same
engine without tiers and without prefix caching. The bucket is a moto server.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from forebay.workers.engines.settings import EngineSettings
from forebay.workers.engines.vllm.engine import VllmEngine
from forebay.workers.kv_tiers.settings import TierSettings
from tests.engines.driven import Driven, driven
from tests.engines.vllm_settings import ENVIRONMENT, SPEC
from tests.harness.models.make_tiny_model import VOCABULARY
from tests.harness.s3_process import s3_server, use_credentials

BLOCK = 32
KV_BLOCKS = 140  # 4,480 tokens
PROMPT_TOKENS, OUTPUT_TOKENS = 2_000, 8
PROMPTS = 9  # 18,072 tokens with their answers: four times the KV memory
SETTLE_S = 0.5  # a tier that reports no change for so long has what it was offered
ARGUMENTS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 4_352,
    "max_num_batched_tokens": 8_192,
}
BUCKET = "kv-blocks"


def prompts() -> list[list[int]]:
    """Return prompts of random tokens."""
    draw = random.Random(1)
    return [[draw.randrange(3, VOCABULARY) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)]


def engine(model: Path, tiers: TierSettings | None, **arguments: Any) -> VllmEngine:
    settings = EngineSettings(
        model=model,
        model_name="slow",
        block_size=BLOCK,
        kv_blocks=KV_BLOCKS,
        max_num_seqs=8,
        arguments=ARGUMENTS | arguments,
        tiers=tiers,
    )
    return VllmEngine(settings)


async def ask(one: Driven, prompt: list[int]) -> dict[str, Any]:
    """Run a request; return its tokens, its time to first token, and from where its prompt came."""
    began = time.perf_counter()
    answer = one.submit(one.item(prompt, OUTPUT_TOKENS))
    await one.until(lambda: answer.tokens or answer.over)
    ttft_s = time.perf_counter() - began
    await one.until(lambda: answer.over)
    assert answer.finished is not None, answer
    first = next(
        first for batch in one.batches for first in batch.first_tokens if first.request_id == answer.item.request_id
    )
    onboarded = {part.tier: part.tokens for part in first.onboarded}
    return {"tokens": answer.tokens, "ttft_s": ttft_s, "cached": first.cached_tokens, "onboarded": onboarded}


async def settle(one: Driven) -> None:
    """Wait until the tiers have what they were offered."""
    quiet_since, seen = time.monotonic(), -1
    while time.monotonic() - quiet_since < SETTLE_S:
        changes = sum(len(batch.cache_changes) + len(batch.store_changes) for batch in one.batches)
        if changes != seen:
            quiet_since, seen = time.monotonic(), changes
        await asyncio.sleep(0.05)


async def oracle(model: Path, wanted: Sequence[list[int]]) -> list[list[int]]:
    """Return the answers of an engine that computes every prompt."""
    async with driven(engine(model, None, enable_prefix_caching=False), SPEC) as one:
        return [(await ask(one, prompt))["tokens"] for prompt in wanted]


def summary(results: Sequence[dict[str, Any]], right: Sequence[list[int]]) -> dict[str, Any]:
    loaded: Counter[str] = Counter()
    for one in results:
        loaded.update(one["onboarded"])
    times = sorted(one["ttft_s"] for one in results)
    return {
        "requests": len(results),
        "equal": sum(one["tokens"] == tokens for one, tokens in zip(results, right, strict=True)),
        "computed_tokens": sum(PROMPT_TOKENS - one["cached"] for one in results),
        "device_tokens": sum(one["cached"] - sum(one["onboarded"].values()) for one in results),
        "onboarded_tokens": dict(loaded),
        "ttft_p50_ms": round(statistics.median(times) * 1e3, 1),
        "ttft_p95_ms": round(times[min(len(times) - 1, int(len(times) * 0.95))] * 1e3, 1),
    }


def moved(one: Driven) -> dict[str, float]:
    """Return the blocks and bytes that the tiers have moved, by metric."""
    found: dict[str, float] = {}
    for collector in one.engine.collectors():
        for family in collector.collect():
            if family.name.startswith(("kvbm_", "forebay_tier_")):
                for sample in family.samples:
                    label = ",".join(
                        f"{key}={value}"
                        for key, value in sorted(sample.labels.items())
                        if key not in ("worker_id", "rank")
                    )
                    found[sample.name + (f"{{{label}}}" if label else "")] = sample.value
    return {name: value for name, value in found.items() if value}


async def working_set(model: Path, root: Path, bucket: str, rounds: int) -> dict[str, Any]:
    """Run prompts in random order with different tiers. The first round fills the tiers and is reported separately."""
    wanted = prompts()
    right = await oracle(model, wanted)
    order = list(range(PROMPTS)) * rounds
    random.Random(2).shuffle(order)
    memory = KV_BLOCKS * block_bytes(model)
    disk = replace(TierSettings(), disk=root / "a", disk_bytes=8 * memory)
    cases: dict[str, TierSettings | None] = {
        "no tiers": None,
        "host": TierSettings(host_bytes=6 * memory),
        "host + disk": replace(disk, host_bytes=2 * memory),
        "host + disk + store": TierSettings(
            host_bytes=memory,
            disk=root / "b",
            disk_bytes=2 * memory,
            store=f"s3://{BUCKET}/working-set",
            store_endpoint=bucket,
        ),
    }
    found: dict[str, Any] = {}
    for name, tiers in cases.items():
        async with driven(engine(model, tiers), SPEC) as one:
            for prompt in [*wanted, *wanted]:  # the second use passes the filter of disk and store
                await ask(one, prompt)
                await settle(one)
            before = moved(one)
            results = [await ask(one, wanted[at]) for at in order]
            await settle(one)
            found[name] = summary(results, [right[at] for at in order]) | {
                "moved": {
                    key: value - before.get(key, 0.0) for key, value in moved(one).items() if value != before.get(key)
                }
            }
    return found


def block_bytes(model: Path) -> int:
    """Return the bytes of a KV block in float32."""
    config = json.loads((model / "config.json").read_text())
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head * BLOCK * 4)


def main() -> None:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds over the working set")
    rounds = parser.parse_args().rounds
    use_credentials()
    os.environ.update(ENVIRONMENT)
    with tempfile.TemporaryDirectory() as root, s3_server(BUCKET) as bucket:
        model = Path(root) / "model"
        command = [sys.executable, "-m", "tests.harness.models.make_slow_model", str(model)]
        subprocess.run(command, check=True, capture_output=True)
        print(json.dumps(asyncio.run(working_set(model, Path(root), bucket, rounds)), indent=1))


if __name__ == "__main__":
    main()
