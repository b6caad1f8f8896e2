"""A scenario of requests, in which the owner can die after any append."""

import asyncio

from forebay.live.owner.owner import Owner
from tests.harness.faulty_log import Crashed, FaultyLog
from tests.system import System, settings, submitted, until

PREFIX = list(range(12))


async def scenario(system: System) -> None:
    """Send requests that end in each possible way, one after another, under whichever owner runs."""
    for number in range(6):
        await system.serve(f"r{number}", [*PREFIX, number, number, number, number], nonce=number)
    system.send(submitted("r0", [*PREFIX, 0, 0, 0, 0], nonce=0))
    await system.serve("wrong", PREFIX, model="another")
    system.send(submitted("gone", PREFIX, max_tokens=100))
    system.cancel("gone")


SENT = {*(f"r{number}" for number in range(6)), "wrong", "gone"}


def all_ended(system: System, owner: Owner) -> bool:
    return set(system.ends()) >= SENT and not len(owner.world.requests)


async def run_until_append(system: System, appends: int, **changes: int) -> bool:
    """Run an owner that is killed at append number `appends` + 1; return whether the kill happened."""
    owner = Owner(FaultyLog(system.log, appends), system.leases, settings(**changes))
    try:
        await owner.start()
        running = asyncio.create_task(owner.run())
        await until(lambda: running.done() or all_ended(system, owner))
        await owner.stop()
        await running
        await owner.close()
    except Crashed:
        return True
    return False
