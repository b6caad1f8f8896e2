"""Admission of workers to the prefill and decode pools of one model, and the messages of rejections."""

from typing import Any

import msgspec
import pytest

from forebay.core.state.fleet import Fleet
from forebay.events.codec import decode
from forebay.events.control import PoolConfigured, RouterConfig
from forebay.events.decisions import RequestRouted
from forebay.events.fleet import AnyFleetEvent, WorkerJoined, WorkerLease, WorkerSpec
from forebay.events.topics import CONTROL, FLEET
from forebay.events.transfer import KvLayout
from forebay.live.owner.admission import PoolsByLease, WorkerAdmission
from forebay.transport.base import Lease
from forebay.transport.sqlite.log import SqliteLog
from tests.live.disagg import PROMPT, IdleWorkers
from tests.live.shared import proven
from tests.system import submitted, until

LAYOUT = KvLayout(connector="nixl", dtype="uint8", block_bytes=16_384)
WIDE = msgspec.structs.replace(LAYOUT, dtype="bfloat16", block_bytes=32_768, layers=24)


def spec(worker_id: str, role: str, **changes: Any) -> WorkerSpec:
    fields = {
        "worker_id": worker_id,
        "model": "m",
        "pool": role,
        "role": role,
        "block_size": 16,
        "kv_blocks_total": 8,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "kv_layout": LAYOUT,
        **changes,
    }
    return WorkerSpec(**fields)


def lease(offered: WorkerSpec, *, draining: bool = False) -> Lease:
    payload = msgspec.msgpack.encode(WorkerLease(spec=offered, draining=draining))
    return Lease(worker_id=offered.worker_id, token="t", payload=payload, expires_in_ms=30_000, ttl_ms=30_000)


class PolledAdmission:
    """A WorkerAdmission without an owner: the pools that it appends to `control` apply at once."""

    def __init__(self, log: SqliteLog) -> None:
        self.log = log
        self.admission = WorkerAdmission(log, 0, 7, Fleet(), slots_max=4, by_lease=PoolsByLease("m", RouterConfig()))

    async def poll(self, *leases: Lease) -> None:
        """Poll the leases until nothing changes; pools are configured before their workers join."""
        for _ in range(2):
            await self.admission.update(list(leases), self.pools(), Fleet(), 0)

    def pools(self) -> dict[str, PoolConfigured]:
        made = [decode(CONTROL, record.value) for record in self.log.records(CONTROL.name, 0, 0, 99)]
        return {pool.pool: pool for pool in made}

    def facts(self) -> list[AnyFleetEvent]:
        return [decode(FLEET, record.value) for record in self.log.records(FLEET.name, 0, 0, 99)]

    def joined(self) -> list[str]:
        return [fact.spec.worker_id for fact in self.facts() if isinstance(fact, WorkerJoined)]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            {"kv_layout": WIDE},
            "worker decode-0 was rejected: its KV block layout is bfloat16, 32768 bytes, 24 layers, nixl "
            "connector, but the layout of prefill-0 in the pool prefill is uint8, 16384 bytes, nixl connector",
        ),
        (
            {"kv_layout": msgspec.structs.replace(LAYOUT, connector="tcp")},
            "is uint8, 16384 bytes, tcp connector, but the layout of prefill-0 in the pool prefill is uint8,",
        ),
        (
            {"kv_layout": None, "engine": "vllm"},
            "its KV block layout is not reported by vllm, but the layout of prefill-0 in the pool prefill is",
        ),
    ],
)
async def test_disagg_a_kv_layout_mismatch_is_rejected_naming_both_workers(
    log: SqliteLog, caplog: pytest.LogCaptureFixture, other: dict[str, Any], message: str
) -> None:
    polled = PolledAdmission(log)
    held = [lease(spec("prefill-0", "prefill")), lease(spec("decode-0", "decode", **other))]
    await polled.poll(*held)
    await polled.poll(*held)
    assert message in caplog.text
    assert polled.joined() == ["prefill-0"]
    assert polled.admission.refused == {"kv_layout": 1}, "once for each incarnation"
    await polled.poll(msgspec.structs.replace(held[0], released=True), held[1])
    assert polled.joined() == ["prefill-0", "decode-0"], "it fits once the conflicting worker is gone"


async def test_disagg_workers_of_one_pool_need_the_same_kv_layout(
    log: SqliteLog, caplog: pytest.LogCaptureFixture
) -> None:
    polled = PolledAdmission(log)
    await polled.poll(lease(spec("a", "prefill")), lease(spec("b", "prefill", kv_layout=WIDE)))
    assert polled.joined() == ["a"]
    assert "the layout of a in the pool prefill is uint8" in caplog.text


async def test_disagg_unreported_kv_layouts_are_treated_as_equal(log: SqliteLog) -> None:
    polled = PolledAdmission(log)
    silent = {"kv_layout": None, "engine": "vllm"}
    await polled.poll(lease(spec("p", "prefill", **silent)), lease(spec("d", "decode", **silent)))
    assert polled.joined() == ["p", "d"]
    assert {name: pool.role for name, pool in polled.pools().items()} == {"prefill": "prefill", "decode": "decode"}


async def test_disagg_a_prefill_worker_in_a_pool_of_another_role_is_rejected(
    log: SqliteLog, caplog: pytest.LogCaptureFixture
) -> None:
    polled = PolledAdmission(log)
    await polled.poll(lease(spec("d", "decode")), lease(spec("p", "prefill", pool="decode")))
    assert (
        "its role is prefill, but the pool decode has the role decode: start the worker in another pool" in caplog.text
    )
    assert (polled.joined(), polled.admission.refused) == (["d"], {"spec": 1})


async def test_disagg_decode_workers_wait_until_aggregated_workers_leave(
    log: SqliteLog, caplog: pytest.LogCaptureFixture
) -> None:
    polled = PolledAdmission(log)
    whole = spec("mock-0", "aggregated", pool="default", kv_layout=None)
    apart = [lease(spec("p", "prefill")), lease(spec("d", "decode"))]
    await polled.poll(lease(whole))
    await polled.poll(lease(whole), *apart)
    assert polled.joined() == ["mock-0", "p"]
    assert (
        "worker d was rejected: its role is decode, but m is served by aggregated workers, for example mock-0 in the "
        "pool default: stop the aggregated workers first"
    ) in caplog.text
    assert polled.admission.refused == {"roles": 1}
    await polled.admission.update([lease(whole, draining=True), *apart], polled.pools(), Fleet(), 0)
    assert polled.joined() == ["mock-0", "p", "d"], "in the same poll that finds the aggregated worker draining"
    await polled.poll(lease(spec("mock-1", "aggregated", pool="default")), *apart)
    assert polled.admission.refused == {"roles": 2}, "an aggregated worker is rejected beside disaggregated ones too"


async def test_disagg_disaggregated_pools_replace_aggregated_ones_live(log: SqliteLog) -> None:
    system = IdleWorkers(log)
    system.join("whole", "aggregated", pool="a-pool-whose-name-comes-first")
    async with system.owned(pool=None) as owner:
        await until(lambda: len(owner.world.fleet) == 1)
        system.leases.release("model", "whole", "whole-1")
        await until(lambda: len(owner.world.fleet) == 0)
        system.join("p", "prefill")
        system.join("d", "decode")
        await until(lambda: len(owner.world.fleet) == 2)
        system.send(submitted("r", PROMPT))
        await until(lambda: system.decisions(RequestRouted))
    (routed,) = system.decisions(RequestRouted)
    assert (routed.stage, routed.worker_id) == ("prefill", "p")
    await proven(log)
