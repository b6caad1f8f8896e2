"""What a planner observes first: after earlier events, after a snapshot, and of any history."""

from typing import Any

import msgspec
import pytest
from hypothesis import given

from forebay.core.scaling.observation import ORPHAN_US, GroupObservation
from forebay.events.base import pack_u64
from forebay.events.codec import decode, encode
from forebay.events.control import QueueConfig
from forebay.events.decisions import RequestHeld
from forebay.events.fleet import WorkerDraining, WorkerLost
from forebay.events.kv import BlocksStored
from forebay.events.metrics import LoadReported
from forebay.events.progress import (
    FirstTokenEmitted,
    PrefillFinished,
    RequestFinished,
)
from forebay.events.scaling import PoolObserved, PoolScaling, ScalingObserved
from forebay.events.topics import SCALING
from tests.core.disaggregated import progress_fields
from tests.core.scaling.observing import (
    DISAGGREGATED_DEFAULT,
    LONG,
    POOLS,
    Group,
    finish,
    prompt_tokens,
    scaled,
)
from tests.core.worlds import BLOCK, MEDIA, PROMPTS, Driver, histories, perform_all, prefilled_by, request
from tests.depth import examples


def test_nothing_before_the_first_interval_counts() -> None:
    group = Group()
    group.join("a")
    group.submit("r1", sampling=LONG)
    group.route("r1", "a")
    group.submit("r2", sampling=LONG)
    group.route("r2", "a")
    group.emit(FirstTokenEmitted, "r2", "a", 20)
    group.observation.begin(group.now_us)
    group.emit(FirstTokenEmitted, "r1", "a", 500)
    finish(group, "r1", "a", 100)
    finish(group, "r2", "a", 100)
    seen = group.pool()
    assert (seen.requests, seen.isl, seen.kv_hit_rate) == (0, None, None)
    assert seen.ttft_ms is None, "the start of r1 was not seen as it happened"
    assert seen.itl_ms == 10, "only r1 got its first token in the interval"
    assert seen.osl == 11


def restored(drive: Driver, *pools: PoolScaling) -> dict[str, PoolObserved]:
    """Return the first observation after the start from a snapshot of this world."""
    drive.world.take_consumed()
    found = GroupObservation(pools or (scaled(),))
    found.restore(list(drive.world.snapshot()), 0)
    found.begin(0)
    return {one.pool: one for one in found.observe(1)}


def test_a_snapshot_has_the_workers_and_their_load() -> None:
    drive = Driver().fleet("a", "b", "c")
    drive("fleet", WorkerDraining(owner_epoch=0, worker_id="c", worker_epoch=drive.epoch("c")))
    load = LoadReported(
        worker_id="b", worker_epoch=drive.epoch("b"), running=3, waiting=1, kv_blocks_used=5, kv_blocks_total=64
    )
    drive("metrics", load)
    seen = restored(drive)["default"]
    assert (seen.ready, seen.draining, seen.requests) == (2, 1, 0)
    assert [(one.running, one.waiting, one.kv_tokens) for one in seen.workers] == [(0, 0, 0), (3, 1, 5 * BLOCK)]


def test_a_snapshot_has_the_requests_in_flight() -> None:
    drive = Driver().fleet("a", queue=QueueConfig(threshold=0.4))
    drive("kv-events", BlocksStored(worker_id="a", worker_epoch=0, seq=1, sequence_hashes=pack_u64(PROMPTS[0][:3])))
    (first,) = drive("requests", request("computing", PROMPTS[0][:5]))
    while not isinstance(drive("requests", request(f"r{len(drive.applied)}", PROMPTS[1]))[0], RequestHeld):
        pass
    pending = drive.world.load.rank_load("a", 0).prefill_tokens
    seen = restored(drive)["default"]
    assert (seen.queued, seen.requests) == (1, 0)
    assert first.terms.device_overlap == 3
    assert seen.workers[0].prefill_tokens == pending > 0
    drive("progress", FirstTokenEmitted(**progress_fields(first)))
    assert restored(drive)["default"].workers[0].prefill_tokens == pending - (prompt_tokens(5) - 3 * BLOCK)


def test_a_request_of_a_snapshot_continues_and_does_not_arrive_again() -> None:
    drive = Driver().disagg(["p", "q"], ["d"])
    (first,) = drive("requests", request("r", PROMPTS[0], sampling=LONG))
    drive.world.take_consumed()
    found = GroupObservation(DISAGGREGATED_DEFAULT)
    found.restore(list(drive.world.snapshot()), 0)
    found.begin(0)
    _, prefill = found.observe(1)
    assert [one.prefill_tokens for one in prefill.workers] == [prompt_tokens(8), 0]
    kept = prefilled_by(first.worker_id, first.worker_epoch)
    prefilled = PrefillFinished(**progress_fields(first), prefilled=kept)
    found.apply(prefilled, 0, 2)
    (second,) = drive("progress", prefilled)
    found.apply(second, 0, 2)
    found.apply(FirstTokenEmitted(**progress_fields(second)), 1, 10_000)
    found.apply(RequestFinished(**progress_fields(second), finish_reason="stop", output_tokens=3), 2, 30_000)
    decode, prefill = found.observe(30_000)
    assert (decode.requests, decode.osl, decode.itl_ms, decode.ttft_ms) == (0, 3, 10, None)
    assert (prefill.requests, prefill.osl, prefill.ttft_ms, prefill.workers[0].prefill_tokens) == (0, 3, None, 0)


@pytest.mark.parametrize(("after_us", "forgotten"), [(599_000, 0), (600_000, 1)])
def test_a_request_of_a_snapshot_is_forgotten_after_its_deadline(after_us: int, forgotten: int) -> None:
    drive = Driver().fleet("a")
    drive("requests", request("r", PROMPTS[0], timeout_us=1_000_000))
    drive("control", None, 400_000)
    drive.world.take_consumed()
    found = GroupObservation((scaled(),))
    found.restore(list(drive.world.snapshot()), 0)
    found.begin(0)
    found.observe(after_us + ORPHAN_US)
    assert found.forgotten == forgotten


@pytest.mark.parametrize("phase", ["decode", "waiting", "encode"])
def test_requests_of_a_snapshot_without_a_prompt_to_compute(phase: str) -> None:
    drive = Driver().fleet("a").encoders("e")
    (routing,) = drive("requests", request("r", PROMPTS[0], media=(MEDIA,) if phase == "encode" else ()))
    if phase == "decode":
        drive("progress", FirstTokenEmitted(**progress_fields(routing)))
    if phase == "waiting":
        drive("fleet", WorkerLost(owner_epoch=0, worker_id="a", worker_epoch=drive.epoch("a")))
    assert [str(one.phase) for one in drive.world.requests.active()] == [phase]
    seen = restored(drive, scaled(), scaled("encoders", "encode"))
    assert not any(worker.prefill_tokens for pool in seen.values() for worker in pool.workers)


def test_a_request_that_waits_for_a_decode_worker_does_not_occupy_its_prefill_worker() -> None:
    drive = Driver().disagg(["p"], ["d"])
    (first,) = drive("requests", request("r", PROMPTS[0]))
    drive("fleet", WorkerDraining(owner_epoch=0, worker_id="d", worker_epoch=drive.epoch("d")))
    kept = prefilled_by("p", drive.epoch("p"))
    assert drive("progress", PrefillFinished(**progress_fields(first), prefilled=kept)) == []
    drive.world.take_consumed()
    found = GroupObservation(DISAGGREGATED_DEFAULT)
    found.restore(list(drive.world.snapshot()), 0)
    found.begin(1)
    assert [one.worker_id for one in found.observe(2)[1].workers] == ["p"]


@examples(0.3)
@given(histories)
def test_any_history_gives_observations_that_can_be_encoded(history: list[tuple[str, Any]]) -> None:
    drive = perform_all(Driver().fleet("a", "b"), history)
    found = GroupObservation(POOLS)
    offsets: dict[str, int] = {}
    for topic, event, now_us in drive.applied:
        offset = offsets[topic] = offsets.get(topic, -1) + 1
        if event is not None:
            found.apply(event, offset, now_us)
    for offset, decision in enumerate(drive.decided):
        found.apply(decision, offset, drive.now_us)
    seen = ScalingObserved(interval_s=1, pools=found.observe(drive.now_us))
    assert decode(SCALING, encode(SCALING, seen)) == seen
    for pool in msgspec.to_builtins(seen)["pools"]:
        assert all(value >= 0 for value in pool.values() if isinstance(value, int | float))
