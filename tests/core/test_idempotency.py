"""Idempotency keys: a repeated request is located and never run, until the owner forgets the key."""

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from forebay.core.state import requests
from forebay.core.state.requests import KEEP_KEY_US
from forebay.core.step import claim
from forebay.events.decisions import RequestAborted, RequestRejected, RequestRepeated, RequestRouted
from forebay.events.progress import RequestFailed, RequestFinished
from forebay.events.requests import RequestCancelled, RequestResumed
from tests.core.worlds import Driver, joined, request

KEYS_MAX = 3
HOUR_US = 3_600_000_000
STEPS = ("submit", "submit", "submit", "finish", "fail", "cancel", "complete", "wait", "snapshot")
Step = tuple[str, int]


def submit(drive: Driver, name: str, key: int = 7, **changes: Any) -> tuple[Any, int]:
    """Submit a request. Return its decision and its offset."""
    made = drive.ask(name, idempotency_key=key, timeout_us=requests.KEEP_KEY_US, **changes)
    return made, drive.world.view["requests"] - 1


def end(drive: Driver, name: str, how: str) -> None:
    match how:
        case "finish":
            drive.emit(RequestFinished, name, finish_reason="stop")
        case "fail":
            drive.emit(RequestFailed, name, error="broken")
        case _:
            drive("requests", RequestCancelled(request_id=name, is_complete=how == "complete"))


@given(st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 4)), max_size=60))
@example([("submit", 1), ("finish", 0), ("wait", 2), ("submit", 1), ("wait", 1), ("snapshot", 0), ("submit", 1)])
@example([*(step for key in (1, 2, 3, 4) for step in (("submit", key), ("complete", 0))), ("submit", 2), ("submit", 1)])
def test_a_key_is_known_while_its_request_is_active_and_a_day_after_a_complete_one(steps: list[Step]) -> None:
    """Compare the owner with a plain list of known keys, through snapshots and at the bound of finished keys."""
    drive = Driver().fleet("a", "b")
    active: dict[str, tuple[int, int]] = {}  # key and offset by name; key 0 is none
    finished: list[tuple[int, int, int]] = []  # key, offset and expiry, oldest first
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(requests, "FINISHED_KEYS_MAX", KEYS_MAX)
        for number, (step, of) in enumerate(steps):
            name = next(iter(list(active)[of:]), "")
            if step == "submit":
                decided, offset = submit(drive, f"r{number}", of, nonce=number)
                finished = [one for one in finished if one[2] > drive.now_us]
                known = [*active.values(), *(one[:2] for one in finished)]
                located = next((at for key, at in known if key == of != 0), None)
                if located is None:
                    assert isinstance(decided, RequestRouted)
                    active[f"r{number}"] = (of, offset)
                else:
                    assert isinstance(decided, RequestRepeated)
                    assert (decided.request_id, decided.offset) == (f"r{number}", located)
            elif step == "wait":
                drive.wait(of * 8 * HOUR_US)
                drive("requests", None)
                active = {name: one for name, one in active.items() if drive.world.requests.get(name) is not None}
            elif step == "snapshot":
                drive = drive.copy()
            elif name:
                end(drive, name, step)
                key, offset = active.pop(name)
                if key and step in ("finish", "complete"):
                    finished = [*finished, (key, offset, drive.now_us + KEEP_KEY_US)][-KEYS_MAX:]


def test_a_repetition_is_answered_where_its_client_reads() -> None:
    drive = Driver().fleet("a")
    _, offset = submit(drive, "r")
    made, _ = submit(drive, "again", reply_slot=5, tie_seed=12)
    assert isinstance(made, RequestRepeated)
    assert (made.offset, made.reply_slot, made.reply_key) == (offset, 5, 6)
    assert drive.world.counts["repeated_request"] == 1
    assert [one.submitted.request_id for one in drive.world.requests.active()] == ["r"]


def test_a_repetition_is_located_although_no_worker_could_run_it() -> None:
    drive = Driver().fleet("a")
    submit(drive, "r")
    drive.lose("a")
    assert isinstance(submit(drive, "again")[0], RequestRepeated)
    assert isinstance(submit(drive, "new", 8)[0], RequestRejected)
    drive("fleet", joined("a"))
    assert isinstance(submit(drive, "new again", 8)[0], RequestRouted), "a rejected request has no key"


def test_a_redelivered_submission_is_no_repetition() -> None:
    drive = Driver().fleet("a")
    submit(drive, "r")
    assert drive("requests", request("r", range(1), idempotency_key=8)) != []
    assert drive("requests", drive.applied[-2][1]) == []
    assert drive.world.counts["duplicate_request"] == 1


def test_an_aborted_request_frees_its_key() -> None:
    drive = Driver().fleet("a")
    drive.ask("r", idempotency_key=7, timeout_us=1_000)
    (aborted,) = (one for one in drive.wait(1_000) if isinstance(one, RequestAborted))
    assert (aborted.reason, type(submit(drive, "again")[0])) == ("deadline", RequestRouted)


def test_an_owner_that_does_not_know_the_field_runs_every_request() -> None:
    drive = Driver().fleet("a")
    claim(drive.world, 1, events_version=RequestResumed.SINCE - 1)
    assert [type(submit(drive, name)[0]) for name in ("r", "again")] == [RequestRouted] * 2
