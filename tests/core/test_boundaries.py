"""The edges of the core's rules: the very microsecond, the next rank, the phase, the order of names."""

from typing import Any

import msgspec
import pytest

from forebay.core.rederive import Rederivation
from forebay.core.state.fleet import Fleet
from forebay.core.state.prefix_index import PrefixIndex
from forebay.core.state.requests import REMEMBER_US
from forebay.core.step import advance
from forebay.core.world import World
from forebay.events.base import pack_u32, pack_u64
from forebay.events.control import BusyThresholds, PoolConfigured, QueueClass, QueueConfig
from forebay.events.decisions import (
    ConsumedRun,
    OwnerClaimed,
    RequestAborted,
    RequestHeld,
    RequestRejected,
    RequestRouted,
    SnapshotTaken,
)
from forebay.events.fleet import OwnershipAnnounced, WorkerDraining, WorkerLost, WorkerRecovered, WorkerSuspect
from forebay.events.kv import BlocksStored
from forebay.events.metrics import LoadReported
from forebay.events.progress import EngineFailed, FirstTokenEmitted, RequestFinished
from forebay.events.requests import RequestCancelled, RoutingHints
from tests.core.worlds import BLOCK, PROMPTS, Driver, joined, request


def about(drive: Driver, worker_id: str) -> dict[str, Any]:
    return {"owner_epoch": 0, "worker_id": worker_id, "worker_epoch": drive.epoch(worker_id)}


def routes(decided: list[Any]) -> list[tuple[str, str, int]]:
    return [(one.request_id, one.worker_id, one.attempt) for one in decided if isinstance(one, RequestRouted)]


def test_a_deadline_passes_in_its_microsecond_and_not_before() -> None:
    drive = Driver().fleet("a")
    drive("requests", request("r", timeout_us=1_000))
    assert drive.wait(999) == []
    (ended,) = drive.wait(1)
    assert isinstance(ended, RequestAborted)
    assert drive.world.requests.next_due_us() == drive.now_us + REMEMBER_US


def test_an_id_is_forgotten_in_its_microsecond_and_not_before() -> None:
    drive = Driver().fleet("a")
    drive("requests", request("r", nonce=1))
    drive("requests", RequestCancelled(request_id="r"))
    drive.wait(REMEMBER_US - 1)
    assert drive("requests", request("r", nonce=1), after_us=0) == []
    (routed,) = drive("requests", request("r", nonce=1), after_us=1)
    assert isinstance(routed, RequestRouted)


@pytest.mark.parametrize("fact", [WorkerSuspect, WorkerDraining])
def test_only_ready_workers_get_requests(fact: Any) -> None:
    drive = Driver().fleet("a", "b")
    drive("fleet", fact(**about(drive, "a")))
    for number in range(4):
        (routed,) = drive("requests", request(f"r{number}", PROMPTS[0]))
        assert isinstance(routed, RequestRouted)
        assert (routed.worker_id, routed.candidates) == ("b", 1)
    drive("fleet", WorkerDraining(**about(drive, "b")))
    if fact is WorkerSuspect:
        drive("fleet", WorkerLost(**about(drive, "a")))
    (rejected,) = drive("requests", request("late"))
    assert isinstance(rejected, RequestRejected)
    assert rejected.reason == "no_workers"


def test_a_request_that_only_suspect_workers_may_take_is_held_until_one_is_back() -> None:
    drive = Driver().fleet("a", "b")
    for name in ("a", "b"):
        drive("fleet", WorkerSuspect(**about(drive, name)))
    held = [drive("requests", request(f"r{number}", PROMPTS[0])) for number in range(3)]
    assert [type(one) for (one,) in held] == [RequestHeld] * 3
    routed = drive("fleet", WorkerRecovered(**about(drive, "b")))
    assert [(one.request_id, one.worker_id) for one in routed] == [(f"r{number}", "b") for number in range(3)]


def test_a_request_for_a_suspect_worker_alone_is_held_while_others_are_ready() -> None:
    drive = Driver().fleet("a", "b")
    drive("fleet", WorkerSuspect(**about(drive, "a")))
    hints = RoutingHints(worker_id="a")
    (held,) = drive("requests", request("r", PROMPTS[0], routing=hints))
    assert isinstance(held, RequestHeld)
    (routed,) = drive("fleet", WorkerRecovered(**about(drive, "a")))
    assert (routed.request_id, routed.worker_id) == ("r", "a")


def test_suspect_workers_hold_no_more_than_their_share_of_the_queue() -> None:
    queue = QueueConfig(classes=(QueueClass(requests_per_worker_max=2),))
    drive = Driver().fleet("a", queue=queue)
    drive("fleet", WorkerSuspect(**about(drive, "a")))
    made = [drive("requests", request(f"r{number}"))[0] for number in range(3)]
    assert [type(one) for one in made] == [RequestHeld, RequestHeld, RequestRejected]
    assert made[-1].reason == "queue_full"


@pytest.mark.parametrize("reason", ["busy", "unknown_worker"])
def test_a_request_no_suspect_worker_could_take_is_rejected_at_once(reason: str) -> None:
    drive = Driver().fleet("a", busy=BusyThresholds(active_prefill_tokens_threshold=0))
    hints = RoutingHints(worker_id="x") if reason == "unknown_worker" else RoutingHints()
    drive("requests", request("first", PROMPTS[0]))
    (rejected,) = drive("requests", request("r", routing=hints))
    assert rejected.reason == reason
    drive("fleet", WorkerSuspect(**about(drive, "a")))
    (rejected,) = drive("requests", request("s", routing=RoutingHints(required_taints=("none has it",))))
    assert rejected.reason == "no_workers"


def test_a_draining_worker_finishes_its_requests() -> None:
    drive = Driver().fleet("a")
    (routed,) = drive("requests", request("r", PROMPTS[0]))
    assert drive("fleet", WorkerDraining(**about(drive, "a"))) == []
    assert drive.world.requests.active()[0].on_worker
    drive("progress", RequestFinished(request_id="r", attempt=1, finish_reason="stop", **about(drive, "a")))
    assert not len(drive.world.requests)
    assert isinstance(routed, RequestRouted)


def test_stranded_requests_move_in_the_order_of_submission_when_a_worker_recovers() -> None:
    drive = Driver().fleet("a", "b")
    drive("fleet", WorkerSuspect(**about(drive, "b")))
    for name in ("z", "m", "a"):
        drive("requests", request(name, PROMPTS[0]))
    assert drive("fleet", WorkerLost(**about(drive, "a"))) == []
    assert routes(drive("fleet", WorkerRecovered(**about(drive, "b")))) == [("z", "b", 2), ("m", "b", 2), ("a", "b", 2)]


def test_engine_failed_alone_moves_no_request() -> None:
    """The worker may have sent all of its output, so only an event of `fleet` reports that the worker is lost."""
    drive = Driver().fleet("a", "b")
    (routed,) = drive("requests", request("r", PROMPTS[0]))
    assert isinstance(routed, RequestRouted)
    before = drive.world.requests.digest()
    assert drive("progress", EngineFailed(worker_id=routed.worker_id, pool="default", engine="mock", error="x")) == []
    assert drive.world.counts == {"engine_failed": 1}
    assert drive.world.requests.digest() == before


def test_progress_of_an_earlier_attempt_is_stale() -> None:
    drive = Driver().fleet("a", "b")
    (first,) = drive("requests", request("r", PROMPTS[0]))
    assert isinstance(first, RequestRouted)
    was = about(drive, first.worker_id)
    ((_, other, attempt),) = routes(drive("fleet", WorkerLost(**was)))
    assert attempt == 2
    drive("progress", FirstTokenEmitted(request_id="r", attempt=1, **was))
    drive("progress", FirstTokenEmitted(request_id="r", attempt=1, **about(drive, other)))
    drive("progress", FirstTokenEmitted(request_id="r", attempt=2, **was))
    assert drive.world.counts["stale_progress"] == 3
    assert drive.world.load.rank_load(other, 0).prefill_tokens == len(PROMPTS[0]) * BLOCK + 2
    drive("progress", FirstTokenEmitted(request_id="r", attempt=2, **about(drive, other)))
    assert drive.world.load.rank_load(other, 0).prefill_tokens == 0


def test_a_report_of_the_rank_after_the_last_is_foreign() -> None:
    drive = Driver().fleet("a")
    load = {"running": 1, "waiting": 0, "kv_blocks_used": 0, "kv_blocks_total": 1}
    drive("metrics", LoadReported(worker_id="a", worker_epoch=drive.epoch("a"), rank=1, **load))
    assert drive.world.counts == {"foreign_load_report": 1}


def test_more_hashes_than_tokens_book_no_negative_load() -> None:
    drive = Driver().fleet("a")
    stored = BlocksStored(worker_id="a", worker_epoch=drive.epoch("a"), seq=1, sequence_hashes=pack_u64(PROMPTS[0]))
    drive("kv-events", stored)
    (routed,) = drive("requests", request("r", PROMPTS[0], token_ids=pack_u32([1, 2, 3])))
    assert isinstance(routed, RequestRouted)
    assert drive.world.load.rank_load("a", 0).prefill_tokens == 0
    assert routed.terms.cost == len(PROMPTS[0])


def test_a_model_of_two_pools_goes_to_the_first_by_name() -> None:
    drive = Driver()
    for name in ("z", "b"):
        drive("control", PoolConfigured(pool=name, model="m", block_size=BLOCK))
        drive("fleet", joined(f"in-{name}", pool=name))
    (routed,) = drive("requests", request("r"))
    assert isinstance(routed, RequestRouted)
    assert (routed.pool, routed.worker_id) == ("b", "in-b")


def test_events_of_a_coming_epoch_are_as_foreign_as_those_of_a_past_one() -> None:
    index = PrefixIndex()
    index.add_holder("a", 0, 5)
    before = index.digest()
    for epoch in (4, 6):
        index.apply(BlocksStored(worker_id="a", worker_epoch=epoch, seq=1, sequence_hashes=pack_u64([1])))
    assert (index.counts, index.digest()) == ({"stale_epoch": 2}, before)


def test_events_of_the_announced_owner_stay_valid() -> None:
    fleet = Fleet()
    for offset in (1, 2):
        fleet.apply(OwnershipAnnounced(owner_epoch=7), offset)
    fleet.apply(msgspec.structs.replace(joined("a"), owner_epoch=7), 3)
    fleet.apply(WorkerSuspect(owner_epoch=7, worker_id="a", worker_epoch=3), 4)
    assert [worker.phase for worker in fleet.workers()] == ["suspect"]


def test_a_snapshot_must_match_its_seal() -> None:
    world = World()
    sealed = advance(world)
    followed = Rederivation(World())
    followed.apply(0, OwnerClaimed(owner_id="o", core_version=1), {})
    assert followed.apply(1, msgspec.structs.replace(sealed, owner_epoch=0), {}) is None
    elsewhere = SnapshotTaken(
        core_version=1, owner_epoch=0, seq=1, first_offset=0, chunks=1, digest=sealed.digest, journal_offset=3
    )
    divergence = followed.apply(2, elsewhere, {})
    assert divergence is not None
    assert "does not match the seal" in divergence.reason


def test_a_claim_must_not_consume_events() -> None:
    """What it consumed would be applied by nobody."""
    claimed = OwnerClaimed(owner_id="o", core_version=1, consumed=(ConsumedRun(topic="fleet", count=1, now_us=0),))
    divergence = Rederivation(World()).apply(0, claimed, {"fleet": [None]})
    assert divergence is not None
    assert (divergence.reason, divergence.derived) == ("an ownership claim must not consume events", None)
