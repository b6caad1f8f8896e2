"""What scenarios have in common: where they are found, and some traffic."""

import random
from collections.abc import Awaitable, Callable
from typing import Any

from tests.logs.stage import Stage, prompt

Scenario = Callable[[], Awaitable[Stage]]

SCENARIOS: dict[str, Scenario] = {}
FLEET = ("w0", "w1", "w2", "w3")


def scenario(play: Scenario) -> Scenario:
    """Found by its name, with hyphens."""
    SCENARIOS[play.__name__.replace("_", "-")] = play
    return play


async def mixed(stage: Stage, count: int = 24, prefix: str = "r", **changes: Any) -> None:
    """Requests of four families of prompts, some alone and some at once."""
    draw = random.Random(prefix)
    for number in range(count):
        stage.submit(f"{prefix}{number}", prompt(draw.randrange(4), 2 + draw.randrange(5), number), **changes)
        if draw.random() < 0.6:
            await stage.play(draw.randrange(1, 12))
    await stage.play()


async def routed(**router: Any) -> Stage:
    """A pool of four workers under this configuration, with some traffic."""
    stage = await Stage(**router).begin(*FLEET)
    await mixed(stage)
    return stage
