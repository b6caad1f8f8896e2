"""Pools without configuration are configured by their first lease."""

from forebay.events.control import PoolConfigured, RouterConfig
from forebay.events.decisions import RequestRouted
from forebay.events.topics import CONTROL
from forebay.transport.sqlite.log import SqliteLog
from tests.live.shared import SharedLog
from tests.system import BLOCK, MODEL, System, until

PREFIX = list(range(12))


async def test_a_pool_is_configured_by_its_first_lease_and_follows_the_settings(log: SqliteLog) -> None:
    turns = RouterConfig(mode="round-robin")
    async with System(log).started(workers=2) as system:
        async with system.owned(SharedLog(log), pool=None, router=turns, fleet=2) as owner:
            await system.serve("a", PREFIX)
        async with system.owned(SharedLog(log), pool=None, router=turns):
            pass
        async with system.owned(SharedLog(log), pool=None) as owner:
            assert owner.world.pools["default"].router == RouterConfig()
            await system.serve("b", PREFIX)
        pools = system.events(CONTROL, PoolConfigured)
        assert [(pool.pool, pool.model, pool.block_size, pool.router) for pool in pools] == [
            ("default", MODEL, BLOCK, turns),
            ("default", MODEL, BLOCK, RouterConfig()),
        ]
        assert [routed.mode for routed in system.decisions(RequestRouted)] == ["round-robin", "kv"]


async def test_a_pool_of_another_block_size_does_not_follow_the_settings(log: SqliteLog) -> None:
    async with System(log).started(workers=0) as system:
        system.start_worker("first", block_size=8)
        async with system.owned(pool=None, fleet=1) as owner:
            system.start_worker("second", block_size=4)
            admission = owner.admission
            assert admission is not None
            await until(lambda: admission.refused["spec"])
            assert [worker.spec.worker_id for worker in owner.world.fleet.workers()] == ["first"]
