"""A recording with every kind of event, for the tests of `replay at`, the export and the SQL cookbook.

The recording has prefix reuse, full caches, a queue, rejections, a worker that is lost with requests in flight, and a
second owner.
"""

import random
from pathlib import Path

from forebay.events.control import PoolConfigured, QueueConfig, RouterConfig
from forebay.events.decisions import RequestHeld, RequestRejected, RequestRouted
from forebay.events.requests import RoutingHints
from forebay.live.owner.owner import Owner
from forebay.transport.sqlite.log import SqliteLog
from tests.system import BLOCK, MODEL, System, submitted, until, until_ended

POOL = PoolConfigured(
    pool="default",
    model=MODEL,
    block_size=BLOCK,
    router=RouterConfig(queue=QueueConfig(threshold=0.5), session_ttl_s=60.0, predicted_ttl_s=1.0),
)
SLOW = "slow"
CONVERSATIONS = 6
TURNS = 4
TURN_TOKENS = 60  # so that the caches of all workers together run full


async def record(path: Path) -> None:
    """Write a new log at `path`."""
    log = SqliteLog.open(path)
    async with System(log).started(workers=3) as system:
        async with system.owned(pool=POOL, snapshot_every=20, owner_id="first") as owner:
            await until(lambda: len(owner.world.fleet) == 3)
            await _converse(system, "talk")
            system.send(submitted("stranger", [1], model="another"))
            await until(lambda: system.decisions(RequestRejected))
            await _lose_a_worker(system, owner)
            await until(lambda: not len(owner.world.requests))
        async with system.owned(pool=POOL, snapshot_every=20, owner_id="second") as owner:
            await until(lambda: len(owner.world.fleet) == 3)
            await _converse(system, "again")
            await until(lambda: not len(owner.world.requests))
    log.close()


async def _converse(system: System, name: str) -> None:
    rng = random.Random(name)
    prompts = [[rng.randrange(50) for _ in range(TURN_TOKENS)] for _ in range(CONVERSATIONS)]
    for turn in range(TURNS):
        for number, prompt in enumerate(prompts):
            prompt += [rng.randrange(50) for _ in range(TURN_TOKENS)]
            hints = RoutingHints(session_id=f"{name}-{number}" if number % 2 else "")
            system.send(submitted(f"{name}-{number}-{turn}", list(prompt), routing=hints))
        for number in range(CONVERSATIONS):
            await until_ended(system, f"{name}-{number}-{turn}")


async def _lose_a_worker(system: System, owner: Owner) -> None:
    system.start_worker(SLOW, speedup=1.0)
    await until(lambda: len(owner.world.fleet) == 4)
    names = [f"stranded-{number}" for number in range(8)]
    for number, name in enumerate(names):
        hints = RoutingHints(allowed_workers=(SLOW, "w1"))
        system.send(submitted(name, [number, *[7] * 160], max_tokens=400, routing=hints))
    await until(lambda: any(one.worker_id == SLOW for one in system.decisions(RequestRouted)))
    await until(lambda: system.decisions(RequestHeld))
    await system.stop_worker(SLOW)
    for name in names:
        await until_ended(system, name)
