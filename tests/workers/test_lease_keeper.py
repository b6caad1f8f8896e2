"""The lease keeper on real leases: renewing, retaking, stepping aside, surviving a store that fails."""

import asyncio
import threading
from collections.abc import Callable
from random import Random
from typing import Any, cast

import pytest

from forebay import runtime
from forebay.transport.base import LeaseError, Leases
from forebay.workers.runtime.lease_keeper import LeaseKeeper
from tests.harness.fake_runtime import FakeRuntime
from tests.workers.conftest import until

GROUP = "model"


class Unreliable:
    """Leases whose next calls fail, with a count of successful renewals."""

    def __init__(self, leases: Leases, failures: int = 0) -> None:
        self._leases = leases
        self.failures = failures
        self.renewed = 0
        self.threads: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            self.threads.add(threading.get_ident())
            if self.failures:
                self.failures -= 1
                raise LeaseError("the store is away")
            result = getattr(self._leases, name)(*arguments)
            self.renewed += name == "renew" and result
            return result

        return call


def held(leases: Leases, worker_id: str) -> str | None:
    """The token that holds the worker's lease now."""
    for lease in leases.poll(GROUP):
        if lease.worker_id == worker_id and lease.expires_in_ms > 0:
            return lease.token
    return None


def holds(leases: Leases, token: str) -> Callable[[], bool]:
    return lambda: held(leases, "w1") == token


def refuse(other: str) -> None:
    raise AssertionError(f"replaced by {other}")


async def test_leases_are_acquired_renewed_and_released_off_the_loop(leases: Leases) -> None:
    store = Unreliable(leases)
    keeper = LeaseKeeper(cast("Leases", store), ttl_s=0.3)
    keeper.start()
    for name in ("w1", "w2"):
        keeper.hold(GROUP, name, f"token-{name}", b"spec", refuse)
    await until(lambda: store.renewed >= 6)
    assert [held(leases, name) for name in ("w1", "w2")] == ["token-w1", "token-w2"]
    assert leases.poll(GROUP)[0].payload == b"spec"
    keeper.release(GROUP, "w1")
    keeper.release(GROUP, "w1")
    await until(lambda: held(leases, "w1") is None)
    await keeper.stop()
    assert held(leases, "w2") is None
    assert len(store.threads) == 1
    assert threading.get_ident() not in store.threads


async def test_failed_store_is_retried(leases: Leases) -> None:
    store = Unreliable(leases, failures=2)
    keeper = LeaseKeeper(cast("Leases", store), ttl_s=0.1)
    keeper.start()
    keeper.hold(GROUP, "w1", "t1", b"", refuse)
    await until(lambda: store.renewed >= 1)
    store.failures = 1
    renewed = store.renewed
    await until(lambda: store.renewed > renewed)
    assert held(leases, "w1") == "t1"
    store.failures = 1
    await keeper.stop()


class Scheduler(FakeRuntime):
    """Runtime that records the steps of lease keepers instead of running them, with seeded randomness."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Callable[[], float | None]] = []
        self._chance = Random(21)

    def random_bytes(self, count: int) -> bytes:
        return self._chance.randbytes(count)

    def start_ticker(self, step: Callable[[], float | None], name: str) -> runtime.Ticker:
        assert name == "lease-keeper"
        self.steps.append(step)
        return Idle()


class Idle:
    def wake(self) -> None:
        pass

    async def ended(self) -> None:
        pass


@pytest.mark.parametrize("is_away", [False, True])
async def test_keepers_that_start_together_do_not_call_the_store_together(leases: Leases, *, is_away: bool) -> None:
    workers = 40
    scheduler = Scheduler()
    with runtime.use(scheduler):
        for number in range(workers):
            keeper = LeaseKeeper(cast("Leases", Unreliable(leases, failures=int(is_away))))
            keeper.start()
            keeper.hold(GROUP, f"w{number}", f"t{number}", b"spec", refuse)
        pauses_s = [step() for step in scheduler.steps]
    assert all(pause_s is not None and 0.49 < pause_s <= 1.0 for pause_s in pauses_s)
    assert len({round(pause_s or 0.0, 2) for pause_s in pauses_s}) > workers / 2


async def test_vanished_lease_is_acquired_again(leases: Leases) -> None:
    store = Unreliable(leases)
    keeper = LeaseKeeper(cast("Leases", store), ttl_s=0.3)
    keeper.start()
    keeper.hold(GROUP, "w1", "t1", b"spec", refuse)
    await until(lambda: store.renewed >= 1)
    leases.release(GROUP, "w1", "t1")
    renewed = store.renewed
    await until(lambda: store.renewed > renewed)
    assert held(leases, "w1") == "t1"
    await keeper.stop()


async def test_replaced_worker_is_notified_once_on_the_loop(leases: Leases) -> None:
    loop_thread = threading.get_ident()
    reported: asyncio.Queue[tuple[str, int]] = asyncio.Queue()
    keeper = LeaseKeeper(leases, ttl_s=0.1)
    keeper.start()
    keeper.hold(GROUP, "w1", "t1", b"", lambda other: reported.put_nowait((other, threading.get_ident())))
    await until(holds(leases, "t1"))
    leases.acquire(GROUP, "w1", "t2", b"", 60_000)
    assert await reported.get() == ("t2", loop_thread)
    await keeper.stop()
    assert reported.empty()
    assert held(leases, "w1") == "t2"


async def test_new_incarnation_replaces_only_its_own_lease(leases: Leases) -> None:
    reported: asyncio.Queue[str] = asyncio.Queue()
    keeper = LeaseKeeper(leases, ttl_s=60.0)
    keeper.start()
    for token in ("t1", "t1.2", "t1.3"):
        keeper.hold(GROUP, "w1", token, b"", reported.put_nowait)
        await until(holds(leases, token))
    leases.acquire(GROUP, "w1", "stranger", b"", 60_000)
    keeper.hold(GROUP, "w1", "t1.4", b"", reported.put_nowait)
    assert await reported.get() == "stranger"
    await keeper.stop()
    assert held(leases, "w1") == "stranger"


async def test_expired_foreign_lease_is_replaced(leases: Leases) -> None:
    keeper = LeaseKeeper(leases, ttl_s=0.1)
    keeper.start()
    keeper.hold(GROUP, "w1", "t1", b"", refuse)
    await until(holds(leases, "t1"))
    leases.acquire(GROUP, "w1", "stranger", b"", 1)
    await until(holds(leases, "t1"))
    await keeper.stop()


async def test_stop_at_any_time_releases_the_lease(leases: Leases) -> None:
    for number in range(50):
        keeper = LeaseKeeper(leases, ttl_s=60.0)
        keeper.start()
        keeper.hold(GROUP, "w1", f"t{number}", b"", refuse)
        await keeper.stop()
        assert held(leases, "w1") is None


async def test_failed_successors_keep_the_first_lease(leases: Leases) -> None:
    store = Unreliable(leases)
    keeper = LeaseKeeper(cast("Leases", store), ttl_s=60.0)
    keeper.start()
    keeper.hold(GROUP, "w1", "t1", b"", refuse)
    await until(holds(leases, "t1"))
    for token in ("t1.2", "t1.3", "t1.4"):
        keeper.hold(GROUP, "w1", token, b"", refuse)
    await until(holds(leases, "t1.4"))
    await keeper.stop()
