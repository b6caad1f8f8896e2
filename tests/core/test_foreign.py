"""Progress from a worker that never had the request is foreign; late progress is not."""

import pytest

from forebay.core.restore import restore
from forebay.events.fleet import WorkerLost
from forebay.events.progress import FirstTokenEmitted, RequestFinished
from tests.core.worlds import Driver, joined, request


def first_token(name: str, worker_id: str, epoch: int, attempt: int = 1) -> FirstTokenEmitted:
    return FirstTokenEmitted(request_id=name, attempt=attempt, worker_id=worker_id, worker_epoch=epoch, owner_epoch=0)


def finished(name: str, worker_id: str, epoch: int, attempt: int = 1) -> RequestFinished:
    return RequestFinished(
        request_id=name,
        attempt=attempt,
        worker_id=worker_id,
        worker_epoch=epoch,
        owner_epoch=0,
        finish_reason="stop",
    )


def counts(drive: Driver) -> tuple[int, int]:
    """Return how many progress events had no effect, and how many of them were foreign."""
    return drive.world.counts["stale_progress"], drive.world.counts["foreign_progress"]


def lose(drive: Driver, worker_id: str) -> None:
    drive("fleet", WorkerLost(owner_epoch=0, worker_id=worker_id, worker_epoch=drive.epoch(worker_id)))


def routed(drive: Driver, name: str = "r") -> str:
    """Submit a request; return the worker that was selected for it."""
    (decided,) = drive("requests", request(name))
    return str(decided.worker_id)


@pytest.mark.parametrize("wrong", ["worker", "epoch", "attempt"])
def test_progress_of_a_worker_that_was_not_selected_is_foreign_and_has_no_effect(wrong: str) -> None:
    drive = Driver().fleet("a", "b")
    selected = routed(drive)
    other = "b" if selected == "a" else "a"
    epoch = drive.epoch(selected)
    event = {
        "worker": first_token("r", other, drive.epoch(other)),
        "epoch": first_token("r", selected, epoch + 1),
        "attempt": first_token("r", selected, epoch, attempt=2),
    }[wrong]
    before = drive.world.requests.digest()
    drive("progress", event)
    assert counts(drive) == (1, 1)
    assert drive.world.requests.digest() == before
    drive("progress", first_token("r", selected, epoch))
    assert counts(drive) == (1, 1)
    assert drive.world.requests.digest() != before


def test_late_progress_of_a_lost_worker_is_not_foreign() -> None:
    drive = Driver().fleet("a", "b")
    selected = routed(drive)
    epoch = drive.epoch(selected)
    lose(drive, selected)
    drive("progress", first_token("r", selected, epoch))
    assert counts(drive) == (1, 0)


def test_progress_on_a_request_that_ended_is_not_foreign() -> None:
    drive = Driver().fleet("a")
    epoch = drive.epoch("a")
    routed(drive)
    for _ in range(2):
        drive("progress", finished("r", "a", epoch))
    assert counts(drive) == (1, 0)


def test_progress_on_a_request_that_the_group_does_not_know_is_foreign_from_a_member() -> None:
    drive = Driver().fleet("a")
    epoch = drive.epoch("a")
    drive("progress", first_token("of another group", "a", epoch))
    assert counts(drive) == (1, 1)
    lose(drive, "a")
    drive("progress", first_token("long forgotten", "a", epoch))
    assert counts(drive) == (2, 1)
    drive("fleet", joined("a"))
    drive("progress", first_token("long forgotten", "a", epoch))
    assert counts(drive) == (3, 1)


def test_attempts_before_a_snapshot_are_not_called_foreign() -> None:
    drive = Driver().fleet("a", "b")
    selected = routed(drive)
    epoch = drive.epoch(selected)
    lose(drive, selected)
    drive.world.stamp()  # a snapshot stands between journal records
    again = Driver(restore(list(drive.world.snapshot())))
    again("progress", first_token("r", selected, epoch))
    assert counts(again) == (1, 0)
