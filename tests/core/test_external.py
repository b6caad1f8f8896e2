"""External requests: decided and booked like any other, but a gateway sends them to the servers of workers."""

from typing import Any

import pytest

from forebay.core.phases import Phase
from forebay.core.step import claim
from forebay.events.control import QueueConfig
from forebay.events.decisions import RequestAborted, RequestHeld, RequestRejected, RequestRouted
from forebay.events.progress import AttemptMoved, AttemptRejected, FirstTokenEmitted, RequestFinished
from forebay.events.requests import RoutingHints
from tests.core.worlds import MEDIA, Driver, joined, pool, worker_of
from tests.core.worlds import query as queried

SERVERS = {name: f"10.0.0.{at}:8000" for at, name in enumerate("abc")}
REJECTED: dict[str, Any] = {"error": "too many requests", "status": 429, "code": "engine_overloaded"}


def drive_of(*names: str, **router: Any) -> Driver:
    """Return a world of workers with servers, and of the worker `plain` without one."""
    drive = Driver()
    drive("control", pool(**router))
    for slot, name in enumerate(names):
        drive("fleet", joined(name, slot, endpoint=SERVERS[name]))
    drive("fleet", joined("plain", 9))
    return drive


def ask(drive: Driver, name: str = "r", **changes: Any) -> Any:
    return drive.ask(name, delivery="external", **changes)


def test_only_workers_whose_servers_the_gateway_may_use_are_candidates() -> None:
    drive = drive_of("a", "b")
    drive.stored("plain")
    assert (ask(drive).candidates, drive.ask("internal").worker_id) == (2, "plain")
    drive.finish("r")
    drive.stored("a")
    assert ask(drive, "any").worker_id == "a"
    assert ask(drive, "one", endpoints=(SERVERS["b"],)).worker_id == "b"
    refused = ask(drive, "none", endpoints=(SERVERS["c"], "h:1"))
    text = f"no ready worker of the pool default has a server that the gateway names: {SERVERS['c']}, h:1"
    assert (type(refused), refused.reason, refused.message) == (RequestRejected, "no_eligible_worker", text)
    for name in "ab":
        drive.lose(name)
    assert ask(drive, "lost").message == "no ready worker of the pool default has a server"


def test_a_server_encodes_images_itself_and_runs_all_stages() -> None:
    drive = drive_of("a").encoders("e")
    assert ask(drive, media=(MEDIA,)).stage == "aggregated"
    decoding = Driver().disagg("p", "d")
    decoding("fleet", worker_of("default", "decode", endpoint=SERVERS["a"]))
    assert ask(decoding).reason == "no_eligible_worker"


def test_a_queued_external_request_is_routed_when_a_server_has_room() -> None:
    drive = drive_of("a", queue=QueueConfig(run_ahead=0.0))
    drive("fleet", worker_of("default", endpoint=SERVERS["b"]))
    here: dict[str, Any] = {"endpoints": (SERVERS["b"],)}
    ask(drive, **here)
    assert isinstance(ask(drive, "next", **here), RequestHeld)
    (routed,) = drive.copy().finish("r")
    assert (routed.request_id, routed.worker_id) == ("next", "w-default")


@pytest.mark.parametrize("pinned", ["", "a"])
@pytest.mark.parametrize("begins", [False, True])
def test_the_loss_of_its_worker_aborts_it_once(pinned: str, begins: bool) -> None:
    drive = drive_of("a", "b")
    ask(drive, endpoints=(SERVERS["a"],), worker_id=pinned)
    if begins:
        drive.emit(FirstTokenEmitted, "r")
    (aborted,) = drive.copy().lose("a")
    assert (type(aborted), aborted.reason, aborted.worker_id) == (RequestAborted, "pinned_worker_lost", "")


def test_the_loss_of_the_worker_in_its_hint_does_not_matter_after_a_move() -> None:
    drive = drive_of("a", "b")
    ask(drive, worker_id="a")
    drive.emit(AttemptMoved, "r", endpoint=SERVERS["b"])
    assert drive.lose("a") == []
    assert drive.active().worker_id == "b"
    (aborted,) = drive.lose("b")
    assert (aborted.reason, aborted.holder) == ("pinned_worker_lost", None)


def test_a_rejection_by_its_server_aborts_it_although_others_are_ready() -> None:
    drive = drive_of("a", "b")
    routed = ask(drive)
    (aborted,) = drive.emit(AttemptRejected, "r", **REJECTED)
    assert (aborted.reason, aborted.status, aborted.message) == ("worker_refused", 429, "too many requests")
    assert drive.world.load.rank_load(routed.worker_id, 0).active_requests == 0


def test_the_booking_moves_to_the_server_that_the_gateway_used() -> None:
    drive = drive_of("a", "b")
    drive.stored("a")
    first = ask(drive, session_id="s")
    (moved,) = drive.emit(AttemptMoved, first, endpoint=SERVERS["b"])
    assert (first.worker_id, moved.worker_id, moved.attempt, moved.candidates) == ("a", "b", 2, 1)
    assert isinstance(moved, RequestRouted)
    loads = [drive.world.load.rank_load(name, 0) for name in "ab"]
    assert [(load.active_requests, load.prefill_tokens > 0) for load in loads] == [(0, False), (1, True)]
    assert drive.active().submitted.hints.session_id == "s"
    assert drive.emit(RequestFinished, first, finish_reason="stop") == []
    assert drive.world.counts["stale_progress"] == 1
    drive.emit(FirstTokenEmitted, moved)
    assert drive.emit(AttemptMoved, moved, endpoint=SERVERS["a"]) == [], "it has begun there"
    assert drive.active().phase is Phase.DECODE


@pytest.mark.parametrize("endpoint", ["10.9.9.9:1", SERVERS["c"]])
def test_a_server_that_no_ready_worker_has_ends_the_booking(endpoint: str) -> None:
    drive = drive_of("a", "b", "c")
    drive.lose("c")
    ask(drive)
    (aborted,) = drive.emit(AttemptMoved, "r", endpoint=endpoint)
    assert (aborted.reason, aborted.worker_id) == ("worker_refused", "")
    assert aborted.message.startswith(f"the gateway used the server {endpoint}: no ready worker")
    assert drive.world.load.rank_load("a", 0).active_requests == drive.world.load.rank_load("b", 0).active_requests == 0


def test_other_requests_do_not_move() -> None:
    drive = drive_of("a", "b")
    routed = drive.ask(worker_id="a")
    assert drive.emit(AttemptMoved, routed, endpoint=SERVERS["b"]) == []
    assert (drive.active().worker_id, drive.world.counts["stale_progress"]) == ("a", 1)
    hinted = queried("q", routing=RoutingHints(endpoints=(SERVERS["a"],)))
    assert len(drive("requests", hinted)[0].candidates) == 3, "a query is not for a gateway"


def test_an_owner_that_does_not_know_external_requests_treats_them_as_others() -> None:
    drive = drive_of("a")
    claim(drive.world, 1, events_version=AttemptMoved.SINCE - 1)
    drive.stored("plain")
    assert ask(drive, endpoints=(SERVERS["a"],)).worker_id == "plain"
    assert not drive.active().submitted.is_external
