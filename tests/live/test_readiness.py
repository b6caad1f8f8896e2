"""A router waits for the seal of an owner with other rules, and reports that it cannot take over until then."""

import pytest
from prometheus_client import CollectorRegistry

from forebay.core.world import CORE_VERSION
from forebay.events.codec import encode
from forebay.events.decisions import OwnerClaimed
from forebay.events.heartbeats import RouterHeartbeat
from forebay.events.topics import DECISIONS, HEARTBEATS
from forebay.live.router.readiness import ReadinessMetrics, ready
from forebay.transport.base import Draft
from forebay.transport.sqlite.log import SqliteLog
from tests.live.programs import OTHER, Program
from tests.live.routings import routing
from tests.system import MODEL, System, until

BLOCKED = (
    f"group {MODEL}: the owner test runs version {OTHER} of the rules, this program has version {CORE_VERSION}: it"
    " takes over at the next planned stop of the owner"
)


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> Program:
    return Program(monkeypatch, OTHER)


async def test_a_router_takes_over_from_an_owner_with_other_rules_that_sealed(log: SqliteLog, other: Program) -> None:
    async with System(log).started(workers=1) as system:
        await other.serve(system, "a", seals=True)
        async with routing(system, "new") as router:
            router.assign({0})
            await until(lambda: 0 in router.owners)
            await system.serve("b", list(range(12)))
            assert ready(router) == (True, "ready")
        assert [claim.core_version for claim in system.decisions(OwnerClaimed)] == [OTHER, CORE_VERSION]


async def test_a_router_does_not_claim_an_unsealed_journal_of_other_rules(log: SqliteLog, other: Program) -> None:
    """The router is not ready while the group has no owner at all."""
    async with System(log).started(workers=1) as system:
        await other.serve(system, "a", seals=False)
        async with routing(system, "new") as router:
            registry = CollectorRegistry()
            registry.register(ReadinessMetrics(router))

            def is_blocked() -> float | None:
                return registry.get_sample_value("forebay_router_blocked", {"group": MODEL})

            router.assign({0})
            end = log.next_offset(HEARTBEATS.name, 0)
            await until(is_blocked)
            assert ready(router) == (False, BLOCKED)
            await until(lambda: log.next_offset(HEARTBEATS.name, 0) >= end + 2)
            beat = RouterHeartbeat(group=MODEL, router_id="test", role="owner", owner_epoch=0)
            await log.append([Draft(HEARTBEATS.name, 0, encode(HEARTBEATS, beat))])
            await until(lambda: ready(router) == (True, BLOCKED))
            assert log.next_offset(DECISIONS.name, 0) == len(system.decisions())
        assert [claim.core_version for claim in system.decisions(OwnerClaimed)] == [OTHER]
