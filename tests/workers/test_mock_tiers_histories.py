"""Random histories of a mock engine with KV tiers: the tokens are right, and nothing is left."""

import asyncio
import random
from pathlib import Path

import pytest

from forebay.events.control import Command
from forebay.workers.kv_tiers.settings import TierSettings
from tests.workers.tiered import PROMPT, expected, item_of, tiered


@pytest.mark.parametrize("seed", range(8))
async def test_nothing_is_left_after_random_histories(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    settings = TierSettings(
        host_bytes=24 * 32,
        disk=tmp_path / "disk",
        disk_bytes=1 << 20,
        store=str(tmp_path / "store"),
        write=rng.choice(["through", "eviction"]),
        filter=rng.random() < 0.5,
        io="plain",
    )
    prompts = [[100 + number, *PROMPT[: rng.randint(3, 18)]] * rng.randint(1, 3) for number in range(6)]
    right = [await expected(item_of("a", prompt)) for prompt in prompts]
    async with tiered(settings) as one:
        prompt_of: dict[str, int] = {}
        dropped: set[str] = set()
        for number in range(60):
            name, which = f"r{number}", rng.randrange(len(prompts))
            one.engine.submit(
                item_of(name, prompts[which], store_blocks=rng.choice((0, 3)), kv_pin_s=rng.choice((0, 60)))
            )
            prompt_of[name] = which
            await asyncio.sleep(0)
            match rng.randrange(10):
                case 0:
                    name = rng.choice([*prompt_of])
                    one.engine.cancel(name)
                    dropped.add(name)
                case 1:
                    one.forget()
                case 2:
                    one.engine.reset()
                    dropped.update(prompt_of)
                case 3:
                    await one.engine.command(Command(action="sleep"))
                    await one.engine.command(Command(action="wake_up"))
                case 4:
                    await one.until(lambda: len(one.engine.requests()) < 3)
        await one.idle()
        for name, which in prompt_of.items():
            tokens = one.tokens(name)
            assert tokens == right[which][: len(tokens)]
            assert name in dropped or len(tokens) == 6
