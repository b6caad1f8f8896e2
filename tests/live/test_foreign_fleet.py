"""Records on `fleet` that the owner did not write: copies of old records, and forged events."""

import asyncio
from typing import Any

from hypothesis import Phase, given
from hypothesis import strategies as st
from msgspec.structs import replace

from forebay.core.state.fleet import WorkerPhase
from forebay.events.codec import encode
from forebay.events.decisions import RequestRouted
from forebay.events.fleet import (
    FleetEvent,
    IngressJoined,
    IngressLost,
    WorkerDraining,
    WorkerJoined,
    WorkerLost,
    WorkerRecovered,
    WorkerSuspect,
)
from forebay.events.topics import FLEET
from forebay.transport.base import Draft
from forebay.transport.redis.leases import embedded_leases
from forebay.transport.sqlite.log import SqliteLog
from tests.depth import examples
from tests.live.shared import proven
from tests.system import MODEL, System, submitted, until, until_ended

NAMES = ("w0", "w1", "w2")
FACTS = (WorkerSuspect, WorkerRecovered, WorkerDraining, WorkerLost)
REQUESTS_SENT = 6
Forgery = tuple[str, int]


def append(system: System, *events: FleetEvent) -> None:
    system.log.append_soon([Draft(FLEET.name, 0, encode(FLEET, event)) for event in events])


def joined_of(system: System, name: str) -> tuple[int, WorkerJoined]:
    """Return the newest `WorkerJoined` of a worker, with its offset."""
    found = [(at, one) for at, one in enumerate(system.events(FLEET)) if isinstance(one, WorkerJoined)]
    return [(at, one) for at, one in found if one.spec.worker_id == name][-1]


def forge(system: System, kind: str, number: int) -> FleetEvent:
    """Return an event of the newest owner epoch, about a member or about a worker or ingress that does not exist."""
    events = system.events(FLEET)
    if kind == "copy":
        copied: FleetEvent = events[number % len(events)]
        return copied
    offset, joined = joined_of(system, NAMES[number % len(NAMES)])
    of_owner: dict[str, Any] = {"owner_epoch": max(event.owner_epoch for event in events)}
    match kind:
        case "ghost":
            spec = replace(joined.spec, worker_id=f"ghost-{number}", kv_blocks_total=1 << 20)
            return replace(joined, spec=spec, lease=f"forged-{number}", **of_owner)
        case "twin":
            return replace(joined, lease="forged", **of_owner)
        case "ingress":
            return IngressJoined(ingress_id=f"i{number}", incarnation="forged", **of_owner)
        case "no ingress":
            return IngressLost(ingress_id="i0", incarnation="mine", **of_owner)
        case _:
            fact = FACTS[number % len(FACTS)]
            return fact(worker_id=joined.spec.worker_id, worker_epoch=offset, **of_owner)


def is_as_leased(system: System, owner: Any) -> bool:
    """Return whether the fleet has exactly the members with leases, and each worker works in the epoch of the fleet."""
    fleet = {worker.spec.worker_id: worker for worker in owner.world.fleet.workers()}
    ready = all(worker.phase is WorkerPhase.READY for worker in fleet.values())
    epochs = all(system.workers[name].worker_epoch == worker.worker_epoch for name, worker in fleet.items())
    ingresses = [one.incarnation for one in owner.world.fleet.ingresses()]
    return fleet.keys() == set(NAMES) and ready and epochs and ingresses == ["mine"]


async def check(forgeries: list[Forgery]) -> None:
    log, leases = SqliteLog.open(None), embedded_leases()
    async with System(log).started(workers=3) as system, system.owned(ingress_leases=leases) as owner:
        leases.acquire(MODEL, "i0", "mine", b"", 60_000)
        await until(lambda: is_as_leased(system, owner))
        await system.stop_worker("w0")
        system.start_worker("w0")
        await until(lambda: is_as_leased(system, owner) and len(system.events(FLEET, WorkerJoined)) > len(NAMES))
        for kind, number in forgeries:
            append(system, forge(system, kind, number))
            system.send(submitted(f"r{number}-{kind}-{len(system.events(FLEET))}", [1, 2, 3, number]))
            await asyncio.sleep(0)
        for number in range(REQUESTS_SENT):
            system.send(submitted(f"last-{number}", [5, 6, 7, number]))
        for name in [f"last-{number}" for number in range(REQUESTS_SENT)]:
            await until_ended(system, name)
        await until(lambda: is_as_leased(system, owner) and not len(owner.world.requests))
        routed = {one.request_id for one in system.decisions(RequestRouted)}
        failed = {name: ends[0].error for name, ends in system.ends().items() if ends[0].error is not None}
        assert routed
        assert failed == {}
    await proven(log)
    log.close()


@examples(0.3, phases=(Phase.generate,))  # shrinking a hang takes minutes
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["copy", "copy", "ghost", "twin", "fact", "fact", "ingress", "no ingress"]),
            st.integers(0, 40),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_foreign_fleet_records_neither_hang_nor_lose_a_request(forgeries: list[Forgery]) -> None:
    asyncio.run(check(forgeries))
