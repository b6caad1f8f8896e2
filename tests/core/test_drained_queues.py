"""Queued requests of a pool that is drained or loses its workers move to another pool, or are served where they are."""

from typing import Any

import pytest

from forebay.core.restore import restore
from forebay.events.decisions import RequestAborted, RequestHeld, RequestRejected, RequestRouted
from forebay.events.fleet import WorkerLost, WorkerSuspect
from forebay.events.pools import PoolGrid
from forebay.events.progress import RequestFinished
from forebay.events.requests import RoutingHints
from tests.core.disaggregated import progress_fields
from tests.core.pool_rules import one_cell
from tests.core.several_pools import ONE_EACH, add_pools, drain, pool_of, rules, worker_of
from tests.core.worlds import BLOCK, PROMPTS, Driver, request


def ask(drive: Driver, name: str, **hints: Any) -> Any:
    (made,) = drive("requests", request(name, PROMPTS[0][: 8 // BLOCK], routing=RoutingHints(**hints)))
    return made


def finish(drive: Driver, routed: RequestRouted) -> list[Any]:
    return drive("progress", RequestFinished(**progress_fields(routed), finish_reason="length"))


def queued(*grids: PoolGrid, names: tuple[str, ...] = ("a", "b")) -> tuple[Driver, list[RequestRouted]]:
    """Return pools whose workers run one request each, with r-a and r-b queued in the pool a."""
    drive = add_pools(Driver(), *names)
    rules(drive, *(grids or (one_cell("a"),)))
    running = [ask(drive, f"on-{name}", worker_id=f"w-{name}") for name in names]
    assert all(isinstance(one, RequestRouted) for one in running)
    held = [ask(drive, name) for name in ("r1", "r2")]
    assert [(type(one), one.pool) for one in held] == [(RequestHeld, "a")] * 2
    return drive, running


def test_a_queued_request_of_a_drained_pool_moves_once_another_pool_has_room() -> None:
    drive, (_, on_b) = queued()
    assert drain(drive, "a") == [], "the other pool has no room yet"
    (moved,) = finish(drive, on_b)
    assert (moved.request_id, moved.pool, moved.worker_id) == ("r1", "b", "w-b")
    (choice,) = moved.pools
    assert (choice.reason, choice.wanted, [(one.pool, one.reason) for one in choice.skipped]) == (
        "moved",
        "a",
        [("a", "drained")],
    )
    assert moved.waited_us > 0
    (second,) = finish(drive, moved)
    assert (second.request_id, second.pool) == ("r2", "b")
    finish(drive, second)
    assert drive.world.queues.waiting("a") == 0
    assert len(drive.world.requests) == 1


def test_a_queued_request_of_a_drained_pool_is_served_there_if_its_own_worker_is_free_first() -> None:
    drive, (on_a, _) = queued()
    drain(drive, "a")
    (served,) = finish(drive, on_a)
    assert (served.request_id, served.pool, served.pools) == ("r1", "a", ())


def test_a_queued_request_moves_at_once_if_another_pool_has_room_when_the_drain_begins() -> None:
    drive, (_, on_b) = queued()
    assert finish(drive, on_b) == [], "a grid without faster pools keeps the request in its pool"
    (moved,) = drain(drive, "a")
    assert (moved.request_id, moved.pool) == ("r1", "b")
    assert drain(drive, "a", drained=False) == []
    assert drive.world.queues.waiting("a") == 1


def test_a_queued_request_moves_if_its_pool_loses_its_workers() -> None:
    drive, (_, on_b) = queued()
    finish(drive, on_b)
    moved = drive("fleet", WorkerLost(owner_epoch=0, worker_id="w-a", worker_epoch=drive.epoch("w-a")))
    assert isinstance(moved[0], RequestAborted), "the request that names the worker ends"
    assert [(one.request_id, one.pool) for one in moved[1:]] == [("r1", "b")]
    assert [(one.pool, one.reason) for one in moved[1].pools[0].skipped] == [("a", "no_workers")]


def test_the_request_waits_in_its_pool_while_no_other_pool_can_take_it() -> None:
    drive, (on_a, on_b) = queued()
    drain(drive, "b")
    drain(drive, "a")
    assert finish(drive, on_b) == []
    (served,) = finish(drive, on_a)
    assert (served.request_id, served.pool) == ("r1", "a")


def test_a_request_that_names_a_worker_stays() -> None:
    drive, (on_a, on_b) = queued()
    assert isinstance(ask(drive, "pinned", worker_id="w-a", strict_priority=1), RequestHeld)
    drain(drive, "a")
    (moved,) = finish(drive, on_b)
    assert moved.request_id == "r1"
    (served,) = finish(drive, on_a)
    assert (served.request_id, served.pool) == ("pinned", "a")


def test_without_rules_a_queued_request_stays_in_the_pool_without_workers() -> None:
    drive = add_pools(Driver(), "a", "b")
    ask(drive, "on-a")
    assert isinstance(ask(drive, "r1"), RequestHeld)
    lost = drive("fleet", WorkerLost(owner_epoch=0, worker_id="w-a", worker_epoch=drive.epoch("w-a")))
    assert lost == []
    assert drive.world.queues.waiting("a") == 1


@pytest.mark.parametrize("mode", ["none.Such"])
def test_a_moved_request_is_rejected_if_the_policy_of_the_other_pool_fails(mode: str) -> None:
    drive = add_pools(Driver(), "a")
    drive("control", pool_of("b", mode=mode))
    drive("fleet", worker_of("b"))
    rules(drive, one_cell("a"))
    ask(drive, "on-a")
    assert isinstance(ask(drive, "r1"), RequestHeld)
    (rejected,) = drain(drive, "a")
    assert isinstance(rejected, RequestRejected)
    assert (rejected.reason, rejected.pools[0].pool) == ("policy_failed", "b")
    assert len(drive.world.requests) == 1


def test_moves_are_the_same_after_a_snapshot() -> None:
    drive, (_, on_b) = queued()
    drain(drive, "a")
    drive.world.take_consumed()
    copy = Driver(restore(drive.world.snapshot()))
    assert copy.world.digest() == drive.world.digest()
    assert finish(copy, on_b) == finish(drive, on_b)
    assert copy.world.digest() == drive.world.digest()


def test_the_limits_of_the_queue_still_apply_if_no_pool_takes_the_request() -> None:
    drive, _ = queued()
    drain(drive, "a")
    made = drive.wait(round((ONE_EACH.timeout_s + 1) * 1e6))
    ended = {one.request_id: one.reason for one in made}
    assert {"r1", "r2"} <= ended.keys()
    assert {ended["r1"], ended["r2"]} <= {"queue_timeout", "queue_deadline"}


def test_a_queued_request_waits_for_a_suspect_worker() -> None:
    drive, (_, on_b) = queued()
    finish(drive, on_b)
    assert drive("fleet", WorkerSuspect(owner_epoch=0, worker_id="w-a", worker_epoch=drive.epoch("w-a"))) == []
