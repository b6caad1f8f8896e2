"""Disaggregation in a live owner: the work of each stage, cancellation, and what a new owner sends again."""

from typing import Any

import msgspec
import pytest

from forebay.events.codec import decode, encode
from forebay.events.control import DisaggConfig, RouterConfig
from forebay.events.decisions import CommandTarget, RequestAborted, RequestRouted
from forebay.events.fleet import WorkerLost
from forebay.events.progress import EncodeFinished, PrefillFailed, PrefillFinished
from forebay.events.topics import FLEET, TOKENS, work_topic
from forebay.events.work import WorkCancelled
from forebay.live.owner.effects import encode_effects
from forebay.live.owner.owner import Owner
from forebay.transport.base import Draft
from forebay.transport.sqlite.log import SqliteLog
from tests.core.worlds import ENCODED, MEDIA
from tests.live.disagg import PROMPT, ROLES, IdleWorkers, flush, prefilled_by
from tests.live.shared import samples
from tests.system import MODEL, SLOT, settings, submitted, until, until_ended


async def test_disagg_each_stage_gets_its_work_and_a_new_owner_sends_it_again(log: SqliteLog) -> None:
    system = IdleWorkers(log)
    for role in ROLES:
        system.join_pool(role, role)
    async with system.owned(pool=None, dies=True, fleet=3) as owner:
        assert {name: pool.role for name, pool in owner.world.pools.items()} == {role: role for role in ROLES}
        system.send(submitted("r", PROMPT, media=(MEDIA,)))
        system.emit(await system.routed(1, "encode"), EncodeFinished, encoded=ENCODED)
        prefilling = await system.routed(2, "prefill")
        item = system.item(prefilling)
        assert item.media == (msgspec.structs.replace(MEDIA, content=b""),)
        assert (item.encoded, item.prefilled, len(item.token_ids)) == (ENCODED, None, 4 * len(PROMPT))
        kept = prefilled_by(prefilling)
        system.emit(prefilling, PrefillFinished, prefilled=kept)
        decoding = await system.routed(3, "decode")
        item = system.item(decoding)
        assert (item.media, item.encoded, item.prefilled) == ((MEDIA,), None, kept)
        assert (item.stage, item.attempt, len(item.token_ids)) == ("decode", 1, 4 * len(PROMPT))
        metrics = samples(owner)
    assert metrics["forebay_owner_requests", "transfer"] == 1
    assert metrics["forebay_owner_requests", "decode"] == 0
    assert [metrics["forebay_router_stages_total", stage] for stage in (*ROLES, "aggregated")] == [1, 1, 1, 0]
    assert metrics["forebay_router_prefills_total", "remote", "always"] == 1
    assert metrics["forebay_router_prefills_total", "local", "no_prefill_worker"] == 0, "a series from the start"
    assert ("dynamo_frontend_worker_active_decode_blocks", "decode", "0", "decode") in metrics
    async with system.owned(pool=None):
        await until(lambda: len(system.items()) == 4)
        again = system.item(decoding)
    assert again.owner_epoch > item.owner_epoch
    assert msgspec.structs.replace(again, owner_epoch=item.owner_epoch) == item


async def test_disagg_cancelling_a_request_releases_its_kept_kv(log: SqliteLog) -> None:
    """The first prefill worker fails, so the second keeps the KV, as attempt 2."""
    system = IdleWorkers(log)
    for name in ("p0", "p1"):
        system.join_pool(name, "prefill")
    system.join_pool("d", "decode")
    async with system.owned(pool=None, fleet=3):
        system.send(submitted("r", PROMPT))
        first = await system.routed(1, "prefill")
        system.emit(first, PrefillFailed, error="out of memory")
        second = await system.routed(2, "prefill")
        assert (second.attempt, second.worker_id != first.worker_id) == (2, True)
        system.emit(second, PrefillFinished, prefilled=prefilled_by(second))
        decoding = await system.routed(3, "decode")
        system.cancel("r")
        await until(lambda: len(system.cancelled()) == 2)
    cancelled = {(one.worker_epoch, one.attempt) for one in system.cancelled()}
    assert cancelled == {(second.worker_epoch, 2), (decoding.worker_epoch, 2)}
    (ended,) = system.ends()["r"]
    assert (ended.error and ended.error.code) == "cancelled"


def test_disagg_a_prefill_rejection_ends_the_response() -> None:
    holder = CommandTarget(worker_id="p", worker_epoch=9, pool="prefill", slot=5)
    fields: dict[str, Any] = {"request_id": "r", "reply_slot": SLOT, "message": "no", "attempt": 2, "pool": "decode"}
    refused = RequestAborted(owner_epoch=3, reason="prefill_refused", status=422, code="too_long", **fields)
    (draft,) = encode_effects(MODEL, refused)
    error = decode(TOKENS, draft.value).error
    assert (error.status, error.code, error.message) == (422, "too_long", "no")
    given_up = RequestAborted(owner_epoch=3, reason="prefill_failed", holder=holder, **fields)
    at_holder, answer = encode_effects(MODEL, given_up)
    assert (at_holder.topic, at_holder.partition) == (work_topic("prefill").name, 5)
    assert decode(work_topic("prefill"), at_holder.value) == WorkCancelled(
        request_id="r", attempt=2, owner_epoch=3, worker_epoch=9, group=MODEL, worker_id="p"
    )
    assert decode(TOKENS, answer.value).error.code == "prefill_failed"


@pytest.mark.parametrize("enforce", [False, True])
async def test_disagg_without_prefill_workers_a_request_is_local_or_rejected(log: SqliteLog, *, enforce: bool) -> None:
    system = IdleWorkers(log)
    system.join_pool("d", "decode")
    router = RouterConfig(disagg=DisaggConfig(enforce=enforce))
    async with system.owned(pool=None, router=router, fleet=1) as owner:
        system.send(submitted("r", PROMPT))
        if enforce:
            await until_ended(system, "r")
        else:
            routed = await system.routed(1, "aggregated")
            assert routed.prefill is not None
            assert (routed.prefill.remote, routed.prefill.reason) == (False, "no_prefill_worker")
        metrics = samples(owner)
    assert metrics.get(("forebay_router_prefills_total", "local", "no_prefill_worker"), 0) == (not enforce)
    assert metrics.get(("forebay_router_requests_rejected_total", "no_workers"), 0) == enforce


async def test_disagg_work_moved_within_one_turn_is_sent_only_to_its_last_worker(log: SqliteLog) -> None:
    """Both prefill workers are lost in the turn that routes to them, so the request is prefilled locally."""
    system = IdleWorkers(log)
    owner = Owner(log, system.leases, settings(pool=None))
    for name, role in (("p0", "prefill"), ("p1", "prefill"), ("d", "decode")):
        system.join_pool(name, role)
    await owner.start()
    assert owner.admission is not None
    for _ in range(2):  # pools come first, then their workers
        await owner.admission.update(
            system.leases.poll(MODEL), owner.world.pools, owner.world.fleet, owner.world.view["fleet"]
        )
        await owner.turn()
    lost = [
        WorkerLost(owner_epoch=owner.journal.epoch, worker_id=name, worker_epoch=worker.worker_epoch)
        for name in ("p0", "p1")
        if (worker := owner.world.fleet.get(name)) is not None
    ]
    system.send(submitted("r", PROMPT))
    log.append_soon([Draft(FLEET.name, 0, encode(FLEET, event)) for event in lost])
    await flush(log)
    await owner.turn()
    await flush(log)
    made = [(one.stage, one.attempt) for one in system.decisions(RequestRouted)]
    assert made[0] == ("prefill", 1)
    assert made[-1] == ("aggregated", 1)
    assert [(one.stage, one.attempt) for one in system.items()] == [("aggregated", 1)]
    await owner.close()


async def test_disagg_disaggregated_pools_replace_aggregated_ones_live(log: SqliteLog) -> None:
    system = IdleWorkers(log)
    system.join_pool("whole", "aggregated", pool="a-pool-whose-name-comes-first")
    async with system.owned(pool=None, fleet=1) as owner:
        system.leases.release("model", "whole", "whole-1")
        await until(lambda: len(owner.world.fleet) == 0)
        system.join_pool("p", "prefill")
        system.join_pool("d", "decode")
        await until(lambda: len(owner.world.fleet) == 2)
        system.send(submitted("r", PROMPT))
        await until(lambda: system.decisions(RequestRouted))
    (routed,) = system.decisions(RequestRouted)
    assert (routed.stage, routed.worker_id) == ("prefill", "p")
