"""Attempts that workers reject: other workers take the requests, and nothing is assumed about the rejected prompts."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.restore import restore
from forebay.core.state.fleet import AVOIDED_S_MAX
from forebay.events.control import QueueConfig
from forebay.events.decisions import RequestAborted, RequestHeld, RequestRouted
from forebay.events.fleet import WorkerLost
from forebay.events.progress import AttemptRejected, FirstTokenEmitted, PrefillFailed, RequestFailed
from forebay.events.requests import RoutingHints
from tests.core.worlds import PROMPTS, Driver, joined, pool, prefill_pool, request

SECOND_US = 1_000_000
WORKERS = ("a", "b", "c")
PROMPT = PROMPTS[0]


def fleet(*names: str) -> Driver:
    """Return workers whose caches the owner assumes."""
    return Driver().fleet(*names, use_kv_events=False)


def ask(drive: Driver, name: str, prompt: Any = PROMPT, **changes: Any) -> Any:
    return drive("requests", request(name, prompt, timeout_us=10**10, **changes))[-1]


def reject(drive: Driver, routed: RequestRouted, after_s: int = 0, **fields: Any) -> Any:
    error: dict[str, Any] = {"error": "not now", "status": 503, "code": "engine_overloaded"} | fields
    return drive.emit(AttemptRejected, routed, retry_after_s=after_s, **error)[-1]


def finish(drive: Driver, routed: RequestRouted) -> None:
    drive.emit(FirstTokenEmitted, routed)
    drive.finish(routed)


def overlap(drive: Driver, worker_id: str, prompt: Any = PROMPT) -> int:
    """Return how many blocks of a prompt the owner assumes a worker to have cached."""
    event = request("probe", prompt)
    submitted = fleet("a")
    submitted("requests", event)
    found = submitted.world.requests.get("probe")
    assert found is not None
    depths = drive.world.routed.depths(found.submitted.blocks)
    return depths.get((worker_id, 0), 0)


def test_a_rejected_request_goes_to_each_other_worker_once_and_then_its_client_gets_the_error() -> None:
    drive = fleet(*WORKERS)
    first = ask(drive, "r")
    second = reject(drive, first)
    third = reject(drive, second)
    assert {first.worker_id, second.worker_id, third.worker_id} == set(WORKERS)
    end = reject(drive, third, error="the last one", status=429, code="slow_down", after_s=7)
    assert isinstance(end, RequestAborted)
    assert (end.reason, end.status, end.code, end.message, end.retry_after_s) == (
        "worker_refused",
        429,
        "slow_down",
        "the last one",
        7,
    )
    assert len(drive.world.requests) == 0


def test_a_rejected_request_does_not_return_to_the_worker_that_has_its_prompt_cached() -> None:
    drive = fleet(*WORKERS)
    cached = ask(drive, "known")
    finish(drive, cached)
    first = ask(drive, "r")
    assert first.worker_id == cached.worker_id
    assert reject(drive, first).worker_id != cached.worker_id


def test_the_number_of_attempts_is_bounded() -> None:
    drive = fleet("a", "b", "c", "d", "e")
    last = ask(drive, "r")
    for _ in range(2):
        last = reject(drive, last)
    assert last.attempt == 3
    assert isinstance(reject(drive, last), RequestAborted)


def test_a_pinned_request_ends_with_the_error_of_its_worker() -> None:
    drive = fleet(*WORKERS)
    routed = ask(drive, "r", routing=RoutingHints(worker_id="b"))
    assert isinstance(reject(drive, routed), RequestAborted)


@pytest.mark.parametrize("how", ["rejected", "failed", "cancelled"])
def test_a_prompt_that_was_not_computed_is_not_assumed_to_be_cached(how: str) -> None:
    drive = fleet("a")
    known, longer = PROMPT[:3], PROMPT
    finish(drive, ask(drive, "known", known))
    kept = overlap(drive, "a")
    assert kept > 0
    routed = ask(drive, "r", longer)
    assert overlap(drive, "a") > kept
    if how == "rejected":
        reject(drive, routed)
    elif how == "failed":
        drive.emit(RequestFailed, routed, error="broken")
    else:
        drive.cancel("r")
    assert overlap(drive, "a") == kept, "what the worker has computed before is still cached"


@pytest.mark.parametrize("end", ["failed", "cancelled"])
def test_a_prompt_that_was_computed_stays_cached_however_the_response_ends(end: str) -> None:
    drive = fleet("a")
    routed = ask(drive, "r")
    drive.emit(FirstTokenEmitted, routed)
    before = overlap(drive, "a")
    if end == "failed":
        drive.emit(RequestFailed, routed, error="broken")
    else:
        drive.cancel("r")
    assert overlap(drive, "a") == before > 0


def test_a_response_without_tokens_has_a_computed_prompt() -> None:
    drive = fleet("a")
    drive.finish(ask(drive, "r"))
    before = overlap(drive, "a")
    reject(drive, ask(drive, "r2"))
    assert overlap(drive, "a") == before > 0


def test_a_prompt_counts_again_once_a_second_request_with_it_is_computed() -> None:
    drive = fleet("a")
    first, second = ask(drive, "r1"), ask(drive, "r2")
    before = overlap(drive, "a")
    reject(drive, first)
    assert overlap(drive, "a") == 0
    finish(drive, second)
    assert overlap(drive, "a") == before


def test_a_failed_remote_prefill_is_not_assumed_to_be_cached() -> None:
    drive = Driver().disagg(["p"], ["d"])
    drive("control", prefill_pool(use_kv_events=False))
    routed = ask(drive, "r")
    assert (routed.stage, routed.worker_id) == ("prefill", "p")
    assert overlap(drive, "p") > 0
    drive.emit(PrefillFailed, routed, error="no room")
    last = next(one for one in reversed(drive.decided) if isinstance(one, RequestRouted))
    assert last.attempt > routed.attempt or last.worker_id != "p"
    drive.cancel("r")
    assert overlap(drive, "p") == 0


def avoided(drive: Driver, rounds: int = 3) -> set[str]:
    """Return the workers that get none of some new requests with other prompts."""
    workers = {one.spec.worker_id for one in drive.world.fleet.workers()}
    probes = [ask(drive, f"probe-{drive.now_us}-{number}", [900 + number]) for number in range(rounds * len(workers))]
    for routed in probes:
        drive.cancel(routed.request_id)
    return workers - {routed.worker_id for routed in probes}


def test_a_worker_that_rejects_repeatedly_is_avoided_for_some_seconds() -> None:
    drive = fleet("a", "b")
    for number in range(2):
        routed = ask(drive, f"r{number}", [500 + number], routing=RoutingHints(worker_id="a"))
        reject(drive, routed)
        assert avoided(drive) == ({"a"} if number else set())
    drive.wait(SECOND_US)
    assert avoided(drive) == set()


def test_a_computed_prompt_ends_a_row_of_rejections() -> None:
    drive = fleet("a", "b")
    for number in range(4):
        routed = ask(drive, f"r{number}", [500 + number], routing=RoutingHints(worker_id="a"))
        reject(drive, routed)
        finish(drive, ask(drive, f"ok{number}", [600 + number], routing=RoutingHints(worker_id="a")))
        assert avoided(drive) == set()


@pytest.mark.parametrize(("asked_s", "pause_s"), [(5, 5), (10**6, AVOIDED_S_MAX)])
def test_a_worker_that_asks_for_a_pause_gets_it_within_a_bound(asked_s: int, pause_s: int) -> None:
    drive = fleet("a", "b")
    reject(drive, ask(drive, "r", routing=RoutingHints(worker_id="a")), after_s=asked_s)
    drive.wait(pause_s * SECOND_US - 10_000)
    assert avoided(drive) == {"a"}
    drive.wait(10_000)
    assert avoided(drive) == set()


def test_avoided_workers_still_get_requests_that_no_other_worker_may_take() -> None:
    drive = fleet("a")
    reject(drive, ask(drive, "r"), after_s=9)
    assert isinstance(ask(drive, "r2"), RequestRouted)
    drive("fleet", joined("b", 1))
    assert ask(drive, "r3").worker_id == "b"
    assert ask(drive, "r4", routing=RoutingHints(worker_id="a")).worker_id == "a"


def test_a_request_returns_to_the_worker_that_rejected_it_if_the_others_are_lost() -> None:
    drive = fleet("a", "b")
    first = ask(drive, "r")
    second = reject(drive, first)
    lost = WorkerLost(owner_epoch=0, worker_id=second.worker_id, worker_epoch=second.worker_epoch, reason="expired")
    (third,) = drive("fleet", lost)
    assert (third.worker_id, third.attempt) == (first.worker_id, 3)


def test_another_pool_of_the_model_takes_what_all_workers_of_a_pool_reject() -> None:
    drive = fleet("a")
    drive("control", msgspec.structs.replace(pool(), pool="other"))
    drive("fleet", joined("b", 0, pool="other"))
    first = ask(drive, "r")
    second = reject(drive, first)
    assert {first.worker_id, second.worker_id} == {"a", "b"}
    assert first.pool != second.pool
    assert isinstance(reject(drive, second), RequestAborted)


def test_requests_wait_for_the_other_workers_while_one_is_avoided() -> None:
    drive = Driver().fleet("a", "b", queue=QueueConfig(threshold=0.5))
    reject(drive, ask(drive, "r", routing=RoutingHints(worker_id="a")), after_s=9)
    assert ask(drive, "r2").worker_id == "b"
    assert isinstance(ask(drive, "r3"), RequestHeld)
    (routed,) = drive.wait(9 * SECOND_US)
    assert (routed.request_id, routed.worker_id) == ("r3", "a")


outcomes = st.lists(
    st.tuples(st.sampled_from(["reject", "accept", "ask", "wait", "cancel"]), st.integers(0, 9), st.integers(0, 40)),
    max_size=60,
)


@given(outcomes)
def test_no_request_is_sent_twice_to_a_worker_that_rejected_it_while_there_is_another(history: list[Any]) -> None:
    drive = fleet(*WORKERS)
    sent: dict[str, list[str]] = {}
    for number, (kind, which, value) in enumerate(history):
        on_worker = [one for one in drive.world.requests.active() if one.on_worker]
        if kind == "ask":
            drive("requests", request(f"r{number}", PROMPTS[which % len(PROMPTS)], timeout_us=10**10))
        elif kind == "wait":
            drive.wait(value * SECOND_US)
        elif on_worker:
            one = on_worker[which % len(on_worker)]
            if kind == "cancel":
                drive.cancel(one.submitted.request_id)
                continue
            of = {
                "request_id": one.submitted.request_id,
                "attempt": one.attempt,
                "worker_id": one.worker_id,
                "worker_epoch": one.worker_epoch,
                "owner_epoch": 0,
            }
            if kind == "accept":
                drive("progress", FirstTokenEmitted(**of))
            else:
                drive("progress", AttemptRejected(**of, error="no", status=429, code="x", retry_after_s=value % 7))
        drive.world.take_consumed()
        assert restore(drive.world.snapshot()).digest() == drive.world.digest()
    for decided in drive.decided:
        if isinstance(decided, RequestRouted):
            sent.setdefault(decided.request_id, []).append(decided.worker_id)
    assert all(len(workers) == len(set(workers)) <= len(WORKERS) for workers in sent.values())
