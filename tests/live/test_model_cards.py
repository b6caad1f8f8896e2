"""Admission of workers by their model cards."""

import msgspec
import pytest

from forebay.core.state.fleet import Fleet
from forebay.events.codec import decode
from forebay.events.control import PoolConfigured
from forebay.events.fleet import WorkerJoined, WorkerLease, WorkerSpec
from forebay.events.topics import FLEET
from forebay.live.owner.admission import WorkerAdmission
from forebay.transport.base import Lease
from forebay.transport.sqlite.log import SqliteLog
from tests.live.shared import applied_fleet

POOLS = {
    "default": PoolConfigured(pool="default", model="m", block_size=64),
    "other": PoolConfigured(pool="other", model="n", block_size=64),
}


def lease(worker_id: str, card: str, model: str = "m", pool: str = "default", *, released: bool = False) -> Lease:
    spec = WorkerSpec(
        worker_id=worker_id,
        model=model,
        pool=pool,
        block_size=64,
        kv_blocks_total=8,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        card=card,
    )
    payload = msgspec.msgpack.encode(WorkerLease(spec=spec))
    return Lease(
        worker_id=worker_id, token="t", payload=payload, expires_in_ms=30_000, ttl_ms=30_000, released=released
    )


class Polled:
    """An admission without an owner, which has applied all of `fleet` at each poll."""

    def __init__(self, log: SqliteLog) -> None:
        self.log = log
        self.admission = WorkerAdmission(log, 0, 7, Fleet(), slots_max=16, by_lease=None)

    async def poll(self, *leases: Lease) -> list[str]:
        """Poll these leases, and return the ids of all workers that have joined so far, in order."""
        await self.admission.update(
            list(leases), POOLS, applied_fleet(self.log), self.log.next_offset(FLEET.name, 0), 0
        )
        events = [decode(FLEET, record.value) for record in self.log.records(FLEET.name, 0, 0, 100)]
        return [event.spec.worker_id for event in events if isinstance(event, WorkerJoined)]


async def test_a_worker_with_another_model_card_is_rejected_naming_both(
    log: SqliteLog, caplog: pytest.LogCaptureFixture
) -> None:
    polled, first, second = Polled(log), "a" * 64, "b" * 64
    joined = await polled.poll(lease("a", first), lease("b", second), lease("c", ""), lease("d", first))
    assert joined == ["a", "c", "d"], "a worker without a card fits all others"
    assert polled.admission.refused == {"card": 1}
    assert f"its model card is {second}, but the card of a in the pool default is {first}" in caplog.text
    gone = lease("a", first, released=True), lease("d", first, released=True)
    await polled.poll(*gone, lease("b", second), lease("c", ""))
    joined = await polled.poll(lease("b", second), lease("c", ""))
    assert joined == ["a", "c", "d", "b"], "another card is accepted once no worker has the first one"


async def test_a_worker_of_another_model_may_have_another_card(log: SqliteLog) -> None:
    joined = await Polled(log).poll(lease("a", "a" * 64), lease("b", "b" * 64, "n", "other"))
    assert joined == ["a", "b"]


def test_the_card_does_not_change_the_digest_of_the_state() -> None:
    """Decisions do not depend on it, and journals of versions without cards must be derived with equal digests."""
    digests = set()
    for card in ("", "a" * 64):
        payload = msgspec.msgpack.decode(lease("a", card).payload, type=WorkerLease)
        fleet = Fleet()
        fleet.apply(WorkerJoined(owner_epoch=0, spec=payload.spec, lease="t", slot=0, from_offset=0), 1)
        digests.add(fleet.digest())
    assert len(digests) == 1
