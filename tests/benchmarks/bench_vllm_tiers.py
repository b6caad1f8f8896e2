"""Measure the KV tiers of real vLLM on a CPU, with a random model. Runs in `.venv-engines`.

The parts are: `working-set`, prompts that need four times the KV memory, with different tiers; `restart`, the same
prompts after the engine was killed; `shared`, two workers and one bucket; `corrupt`, bit flips in every file of the
disk tier. Every answer is compared with that of the same engine without tiers and without prefix caching. The bucket is
a moto server.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from forebay.workers.engines.settings import EngineSettings
from forebay.workers.engines.vllm.engine import VllmEngine
from forebay.workers.kv_tiers.settings import TierSettings
from tests.engines.driven import Driven, driven
from tests.engines.vllm_settings import ENVIRONMENT, SPEC
from tests.harness.models.make_tiny_model import VOCABULARY
from tests.harness.s3_process import s3_server, use_credentials

PARTS = ("working-set", "restart", "shared", "corrupt")
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


def prompts(count: int = PROMPTS, tokens: int = PROMPT_TOKENS, seed: int = 1) -> list[list[int]]:
    """Return prompts of random tokens."""
    draw = random.Random(seed)
    return [[draw.randrange(3, VOCABULARY) for _ in range(tokens)] for _ in range(count)]


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


async def ask(one: Driven, prompt: list[int], **options: Any) -> dict[str, Any]:
    """Run a request; return its tokens, its time to first token, and from where its prompt came."""
    began = time.perf_counter()
    answer = one.submit(replace_item(one.item(prompt, OUTPUT_TOKENS), **options))
    await one.until(lambda: answer.tokens or answer.over)
    ttft_s = time.perf_counter() - began
    await one.until(lambda: answer.over)
    assert answer.finished is not None, answer
    first = next(
        first for batch in one.batches for first in batch.first_tokens if first.request_id == answer.item.request_id
    )
    onboarded = {part.tier: part.tokens for part in first.onboarded}
    return {"tokens": answer.tokens, "ttft_s": ttft_s, "cached": first.cached_tokens, "onboarded": onboarded}


def replace_item(item: Any, **options: Any) -> Any:
    """Return a work item with other fields."""
    return msgspec.structs.replace(item, **options)


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


def summary(
    results: Sequence[dict[str, Any]], right: Sequence[list[int]], tokens: int = PROMPT_TOKENS
) -> dict[str, Any]:
    loaded: Counter[str] = Counter()
    for one in results:
        loaded.update(one["onboarded"])
    times = sorted(one["ttft_s"] for one in results)
    return {
        "requests": len(results),
        "equal": sum(one["tokens"] == tokens for one, tokens in zip(results, right, strict=True)),
        "computed_tokens": sum(tokens - one["cached"] for one in results),
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


async def restart(model: Path, root: Path) -> dict[str, Any]:
    """Fill the disk tier, kill the engine core with SIGKILL, start again, and run the same prompts."""
    wanted = prompts(4, seed=3)
    right = await oracle(model, wanted)
    tiers = TierSettings(disk=root / "restart", disk_bytes=1 << 34)
    first = engine(model, tiers)
    cold: list[dict[str, Any]] = []
    try:
        async with driven(first, SPEC) as one:
            cold = [await ask(one, prompt) for prompt in wanted]
            await settle(one)
            for process in first.core.processes():
                assert process.pid is not None
                os.kill(process.pid, signal.SIGKILL)
    except BaseExceptionGroup as ended:  # the engine has died
        print("killed:", ended, file=sys.stderr)
    async with driven(engine(model, tiers), SPEC) as one:
        warm = [await ask(one, prompt) for prompt in wanted]
    return {"before": summary(cold, right), "after": summary(warm, right)}


async def shared(model: Path, bucket: str) -> dict[str, Any]:
    """Compute prompts on one worker and load them on another, which started before: the router's hint finds them."""
    wanted = prompts(4, seed=4)
    right = await oracle(model, wanted)
    tiers = TierSettings(store=f"s3://{BUCKET}/shared", store_endpoint=bucket)
    async with AsyncExitStack() as stack:
        specs = [msgspec.structs.replace(SPEC, worker_id=name) for name in ("w1", "w2")]
        one, other = [await stack.enter_async_context(driven(engine(model, tiers), spec)) for spec in specs]
        computed = [await ask(one, prompt) for prompt in wanted]
        await settle(one)
        loaded = [await ask(other, prompt, store_blocks=PROMPT_TOKENS // BLOCK) for prompt in wanted]
        return {
            "store": one.spec.kv_store,
            "same_store": one.spec.kv_store == other.spec.kv_store,
            "first worker": summary(computed, right),
            "second worker": summary(loaded, right),
        }


async def corrupt(model: Path, root: Path) -> dict[str, Any]:
    """Flip a byte in every file of the disk tier, and run the same prompts."""
    wanted = prompts(4, seed=5)
    right = await oracle(model, wanted)
    tiers = TierSettings(disk=root / "corrupt", disk_bytes=1 << 34)
    async with driven(engine(model, tiers), SPEC) as one:
        for prompt in wanted:
            await ask(one, prompt)
            await settle(one)
        files = [path for path in (root / "corrupt").rglob("*.kv") if path.is_file()]
        draw = random.Random(6)
        for path in files:
            content = bytearray(path.read_bytes())
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
            path.write_bytes(content)
        results = [await ask(one, prompt) for prompt in wanted]
        return {"files": len(files)} | summary(results, right) | {"moved": moved(one)}


def block_bytes(model: Path) -> int:
    """Return the bytes of a KV block in float32."""
    config = json.loads((model / "config.json").read_text())
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head * BLOCK * 4)


def main() -> None:
    """Run the parts of the command line and print their measurements."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=(*PARTS, []), help="parts to run; all by default")
    parser.add_argument(
        "--model", type=Path, help="model directory; by default a model is made in a temporary directory"
    )
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds over the working set")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    use_credentials()
    os.environ.update(ENVIRONMENT)
    with tempfile.TemporaryDirectory() as temporary, s3_server(BUCKET) as bucket:
        root = Path(temporary)
        model = arguments.model
        if model is None:
            model = root / "model"
            command = [sys.executable, "-m", "tests.harness.models.make_slow_model", str(model)]
            subprocess.run(command, check=True, capture_output=True)
        runs: dict[str, Callable[[], Any]] = {
            "working-set": lambda: asyncio.run(working_set(model, root, bucket, arguments.rounds)),
            "restart": lambda: asyncio.run(restart(model, root)),
            "shared": lambda: asyncio.run(shared(model, bucket)),
            "corrupt": lambda: asyncio.run(corrupt(model, root)),
        }
        found = {name: runs[name]() for name in arguments.parts or PARTS}
    print(json.dumps(found) if arguments.json else json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
