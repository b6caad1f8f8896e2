"""Common parts of scenarios: registration and traffic."""

import random
from collections.abc import Awaitable, Callable
from typing import Any

from tests.logs.stage import Stage, prompt

Scenario = Callable[[], Awaitable[Stage]]

SCENARIOS: dict[str, Scenario] = {}
FLEET = ("w0", "w1", "w2", "w3")


def scenario(play: Scenario) -> Scenario:
    """Register a scenario under its name, with hyphens."""
    SCENARIOS[play.__name__.replace("_", "-")] = play
    return play


async def mixed(stage: Stage, count: int = 24, prefix: str = "r", **changes: Any) -> None:
    """Send requests of four prompt families, some alone and some together."""
    draw = random.Random(prefix)
    for number in range(count):
        stage.submit(f"{prefix}{number}", prompt(draw.randrange(4), 2 + draw.randrange(5), number), **changes)
        if draw.random() < 0.6:
            await stage.play(draw.randrange(1, 12))
    await stage.play()


async def routed(**router: Any) -> Stage:
    """Return a pool of four workers with this router configuration after some traffic."""
    stage = await Stage(**router).begin(*FLEET)
    await mixed(stage)
    return stage
