"""The owner releases kept KV that no worker will fetch, however the decode attempt ended."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from forebay.core.state import requests as lifecycle
from forebay.engine_model.model import EngineConfig
from forebay.events.decisions import KvReleased, RequestAborted, RequestRouted
from forebay.events.fleet import WorkerSpec
from forebay.events.progress import FirstTokenEmitted, PrefillFinished, RequestFailed, RequestFinished, TransferFailed
from forebay.events.requests import RoutingHints
from forebay.events.topics import PROGRESS, work_topic
from forebay.events.work import ReleaseKv
from forebay.live.router import standby
from forebay.transport.sqlite.log import SqliteLog
from forebay.workers.engines.mock.engine import MockEngine
from forebay.workers.engines.mock.kv import KvSettings
from forebay.workers.runtime.worker import Worker
from tests.live.disagg import IdleWorkers
from tests.system import BLOCK, MODEL, SPEEDUP, submitted, until

PROMPT = list(range(34))
BLOCKS = 9
SIZES: dict[str, Any] = {
    "block_size": BLOCK, "kv_blocks_total": 256, "max_num_seqs": 16, "max_num_batched_tokens": 256,
}  # fmt: skip


class DisaggregatedSystem(IdleWorkers):
    """A prefill worker with a mock engine that keeps KV for an hour, and decode workers whose events a test emits."""

    def __init__(self, log: SqliteLog) -> None:
        super().__init__(log)
        config = EngineConfig(**SIZES, vocabulary=(7,))
        self.engine = MockEngine(config, speedup=SPEEDUP, kv=KvSettings(lease_s=3600.0))

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        async with self.started(0):
            assert self._group is not None
            spec = WorkerSpec(worker_id="p", model=MODEL, pool="prefill", role="prefill", **SIZES)
            worker = Worker(self.log, self.keeper, spec, self.engine, token="p-1", group=MODEL)
            self._tasks["p"] = self._group.create_task(worker.run())
            for name in ("d", "e"):
                self.join_pool(name, "decode", **SIZES)
            yield

    def leave(self, name: str) -> None:
        self.leases.release(MODEL, name, f"{name}-1")

    async def decoding(self, attempt: int) -> RequestRouted:
        """Wait until the prefill of `attempt` has finished; return the routing to its decode worker."""

        def found() -> list[RequestRouted]:
            routed = self.decisions(RequestRouted)
            return [one for one in routed if (one.stage, one.attempt) == ("decode", attempt)]

        await until(found)
        stats = self.engine.kv_stats()
        assert (stats.held_offers, stats.held_blocks) == (1, BLOCKS)
        return found()[0]

    def decoders(self) -> list[tuple[str, str]]:
        """Return each request and its decode worker, in routing order."""
        return [(one.request_id, one.worker_id) for one in self.decisions(RequestRouted) if one.stage == "decode"]

    async def freed(self, released: int) -> None:
        """Wait until `released` offers were released and none is held; no lease expired."""
        await until(lambda: self.engine.kv_stats().freed.get("released") == released)
        stats = self.engine.kv_stats()
        assert stats.freed == {"released": released} | {reason: 0 for reason in stats.freed if reason != "released"}
        assert (stats.held_offers, stats.held_blocks, self.engine.kept()) == (0, 0, 0)
        await until(lambda: not self.engine.ranks[0].model.pool.used)


Way = Callable[[DisaggregatedSystem, RequestRouted], Awaitable[None]]


async def lost(system: DisaggregatedSystem, routed: RequestRouted) -> None:
    system.leave(routed.worker_id)


async def not_fetched(system: DisaggregatedSystem, routed: RequestRouted) -> None:
    system.emit(routed, TransferFailed, error="the network is gone")


async def failed(system: DisaggregatedSystem, routed: RequestRouted) -> None:
    system.emit(routed, RequestFailed, error="out of memory")


async def finished(system: DisaggregatedSystem, routed: RequestRouted) -> None:
    system.emit(routed, RequestFinished, finish_reason="stop")


async def prefilled_locally(system: DisaggregatedSystem, routed: RequestRouted) -> None:
    system.emit(routed, FirstTokenEmitted, unfetched=True)


async def cancelled(system: DisaggregatedSystem, routed: RequestRouted) -> None:
    system.cancel(routed.request_id)


ENDING: tuple[tuple[Way, str], ...] = (
    (failed, "request_ended"),
    (finished, "request_ended"),
    (prefilled_locally, "not_needed"),
    (cancelled, ""),
)
TRYING_AGAIN: tuple[tuple[Way, str], ...] = ((lost, "worker_lost"), (not_fetched, "not_fetched"))


@pytest.mark.parametrize(("way", "reason"), ENDING)
async def test_disagg_kv_of_an_ended_response_is_released_before_its_lease_expires(
    log: SqliteLog, way: Way, reason: str
) -> None:
    system = DisaggregatedSystem(log)
    async with system.serving(), system.owned(pool=None, fleet=3):
        system.send(submitted("r", PROMPT))
        await way(system, await system.decoding(1))
        await system.freed(1)
    assert [one.reason for one in system.decisions(KvReleased)] == [reason] * bool(reason)
    assert bool(system.decisions(RequestAborted)) == (way is cancelled)


@pytest.mark.parametrize(("way", "reason"), TRYING_AGAIN)
async def test_disagg_only_the_kv_of_the_stale_attempt_is_released(log: SqliteLog, way: Way, reason: str) -> None:
    system = DisaggregatedSystem(log)
    async with system.serving():
        async with system.owned(pool=None, fleet=3, dies=True):
            system.send(submitted("r", PROMPT))
            first = await system.decoding(1)
            await way(system, first)
            second = await system.decoding(2)
            assert system.engine.kv_stats().freed["released"] == 1
            assert second.worker_id != first.worker_id
            (released,) = system.decisions(KvReleased)
        async with replaced(system):
            releases = system.events(work_topic("prefill"), ReleaseKv, released.holder.slot)
            assert [(one.attempt, one.worker_epoch) for one in releases] == [(1, released.holder.worker_epoch)] * 2
            assert system.engine.kv_stats().held_offers == 2, "the KV of the second attempt is still held"
            for name in ("r", "beside"):
                system.cancel(name)
            await system.freed(3)
    assert released.reason == reason


@asynccontextmanager
async def replaced(system: DisaggregatedSystem) -> AsyncIterator[None]:
    """Own the group after a dead owner. Nobody knows which releases that one sent, so they are sent again."""
    async with system.owned(pool=None):
        system.send(submitted("beside", list(range(100, 110))))
        await until(lambda: [one for one in system.events(PROGRESS, PrefillFinished) if one.request_id == "beside"])
        yield


async def test_disagg_all_releases_of_one_event_are_sent_again_after_a_takeover(
    log: SqliteLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standby, "UNCONFIRMED_MAX", 1)  # so that the limit applies to a few releases already
    system = DisaggregatedSystem(log)
    async with system.serving():
        async with system.owned(pool=None, fleet=3, dies=True):
            for name in "mnopq":
                system.send(submitted(name, PROMPT))
            await until(lambda: len(system.decoders()) == 5)
            lost = sorted(name for name, worker_id in system.decoders() if worker_id == "d")
            assert len(lost) > 1
            system.leave("d")
            await until(lambda: system.engine.kv_stats().freed.get("released") == len(lost))
        async with replaced(system):
            releases = system.events(work_topic("prefill"), ReleaseKv, system.decisions(KvReleased)[0].holder.slot)
            assert sorted(one.request_id for one in releases) == sorted(lost * 2)


async def test_disagg_releases_of_an_earlier_request_with_the_same_id_are_not_repeated(
    monkeypatch: pytest.MonkeyPatch, log: SqliteLog
) -> None:
    monkeypatch.setattr(lifecycle, "REMEMBER_US", 0)  # an id may be used again at once, also when `log` is verified
    system = DisaggregatedSystem(log)
    async with system.serving():
        async with system.owned(pool=None, fleet=3, dies=True):
            system.send(submitted("r", PROMPT))
            await failed(system, await system.decoding(1))
            await system.freed(1)
            system.send(submitted("r", list(range(200, 234)), reply_from=100))
            await until(lambda: len(system.decoders()) == 2)
        async with replaced(system):
            releases = system.events(work_topic("prefill"), ReleaseKv, system.decisions(KvReleased)[0].holder.slot)
            assert [one.request_id for one in releases] == ["r"]
            assert system.engine.kv_stats().held_offers == 2, "both offers are still held"


async def test_disagg_a_request_pinned_to_a_lost_decode_worker_ends_and_its_kv_is_released(log: SqliteLog) -> None:
    system = DisaggregatedSystem(log)
    async with system.serving(), system.owned(pool=None, fleet=3):
        system.send(submitted("r", PROMPT, routing=RoutingHints(worker_id="d")))
        await lost(system, await system.decoding(1))
        await system.freed(1)
        await until(lambda: "r" in system.ends())
    (ended,) = system.ends()["r"]
    assert ended.error is not None
    assert (ended.error.status, ended.error.code) == (503, "pinned_worker_lost")
    assert ended.error.message == "worker d was lost, and the request is pinned to it"
