"""A rank is sent what its engine can run and a little more; further requests wait, up to a bound and a time."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.phases import Phase
from forebay.events.control import DisaggConfig, QueueConfig
from forebay.events.decisions import RequestAborted, RequestHeld, RequestRejected, RequestRouted, RouteAnswered
from forebay.events.metrics import LoadReported
from forebay.events.progress import FirstTokenEmitted, PrefillFinished, RequestFinished
from forebay.events.requests import RoutingHints
from tests.core.worlds import (
    PROMPTS,
    Driver,
    decode_pool,
    joined,
    prefill_pool,
    prefilled_by,
    prefiller,
    query,
    request,
)

SEQS = 8  # of each worker of `tests.core.worlds`
LIMITED = QueueConfig(run_ahead=0.25, depth=2.0, timeout_s=0.5)
TIMEOUT_US = 500_000
HOUR_US = 3_600_000_000


def submit(drive: Driver, name: str, **changes: Any) -> Any:
    """A request with a deadline far away; what became of it first."""
    return drive("requests", request(name, timeout_us=HOUR_US, **changes))[0]


def progress(drive: Driver, name: str) -> dict[str, Any]:
    one = drive.world.requests.get(name)
    assert one is not None
    return {
        "request_id": name,
        "attempt": one.stage_attempt,
        "worker_id": one.worker_id,
        "worker_epoch": one.worker_epoch,
        "owner_epoch": 0,
    }


def finish(drive: Driver, name: str) -> list[Any]:
    return drive("progress", RequestFinished(**progress(drive, name), finish_reason="length"))


def report(drive: Driver, worker: str, waiting: int, used: int = 1) -> list[Any]:
    event = LoadReported(
        worker_id=worker,
        worker_epoch=drive.epoch(worker),
        running=3,
        waiting=waiting,
        kv_blocks_used=used,
        kv_blocks_total=64,
    )
    return drive("metrics", event)


def active(drive: Driver, worker: str) -> int:
    return drive.world.load.rank_load(worker, 0).active_requests


def test_a_rank_is_sent_its_sequences_and_the_run_ahead_and_the_next_goes_when_one_ends() -> None:
    drive = Driver().fleet("a", "b", queue=LIMITED)
    made = [submit(drive, f"r{at}") for at in range(21)]
    assert [type(one) for one in made] == [RequestRouted] * 20 + [RequestHeld]
    assert (active(drive, "a"), active(drive, "b")) == (10, 10), "8 sequences and a quarter more"
    ended = next(one for one in made if isinstance(one, RequestRouted) and one.worker_id == "b")
    (sent,) = finish(drive, ended.request_id)
    assert (sent.request_id, sent.worker_id, active(drive, "b")) == ("r20", "b", 10)


def test_without_a_limit_a_rank_is_sent_everything_as_it_was_before() -> None:
    drive = Driver().fleet("a")
    assert all(isinstance(submit(drive, f"r{at}"), RequestRouted) for at in range(50))
    assert active(drive, "a") == 50


def test_a_full_rank_is_no_candidate_though_it_has_the_prompt_cached() -> None:
    drive = Driver().fleet("a", "b", queue=LIMITED)
    for at in range(10):
        submit(drive, f"r{at}", routing=RoutingHints(worker_id="a"))
    assert isinstance(submit(drive, "pinned", routing=RoutingHints(worker_id="a")), RequestHeld)
    free = submit(drive, "free")
    assert (free.worker_id, free.candidates) == ("b", 1)


def test_an_engine_that_lets_requests_wait_gets_no_more_until_it_takes_them_up() -> None:
    drive = Driver().fleet("a", queue=LIMITED)
    for at in range(6):
        submit(drive, f"r{at}")
    report(drive, "a", waiting=3)
    assert isinstance(submit(drive, "held"), RequestHeld), "three wait there, and the run-ahead is two"
    (sent,) = report(drive, "a", waiting=2)
    assert sent.request_id == "held"


def test_an_old_report_of_waiting_requests_keeps_nothing_from_an_engine_that_has_ended_them() -> None:
    drive = Driver().fleet("a", queue=LIMITED)
    for at in range(6):
        submit(drive, f"r{at}")
    report(drive, "a", waiting=6)
    assert isinstance(submit(drive, "held"), RequestHeld)
    sent = [one.request_id for at in range(4) for one in finish(drive, f"r{at}")]
    assert sent == ["held"]


def test_the_queue_of_a_pool_is_bounded_by_what_its_ranks_run_and_a_small_one_takes_a_burst() -> None:
    drive = Driver().fleet("a", queue=LIMITED)
    made = [submit(drive, f"r{at}") for at in range(10 + 64 + 1)]
    assert [type(one) for one in made[10:]] == [RequestHeld] * 64 + [RequestRejected]
    assert made[-1].reason == "pool_full"
    assert made[-1].message == "every worker is full, and so is the queue: 64 requests are queued"
    deep = Driver().fleet("a", queue=QueueConfig(run_ahead=0.0, depth=10.0))
    assert [type(submit(deep, f"r{at}")) for at in range(8 + 80 + 1)][8:] == [RequestHeld] * 80 + [RequestRejected]


def test_what_a_topic_holds_is_neither_refused_nor_timed_out() -> None:
    drive = Driver().fleet("a", queue=QueueConfig(run_ahead=0.0, depth=0.0, timeout_s=0.5))
    for at in range(8):
        submit(drive, f"r{at}")
    assert isinstance(submit(drive, "from a topic", patient=True), RequestHeld)
    assert isinstance(submit(drive, "from a client"), RequestRejected)
    assert drive.wait(10 * TIMEOUT_US) == []
    (sent,) = finish(drive, "r0")
    assert sent.request_id == "from a topic"


def test_with_no_depth_nobody_waits() -> None:
    drive = Driver().fleet("a", queue=QueueConfig(run_ahead=0.0, depth=0.0))
    made = [submit(drive, f"r{at}") for at in range(9)]
    assert made[-1].message == "every worker is full, and the pool queues no requests"


def test_a_request_waits_as_long_as_the_limit_and_the_owner_wakes_for_it() -> None:
    drive = Driver().fleet("a", queue=LIMITED)
    for at in range(12):
        submit(drive, f"r{at}")
    held = drive.world.requests.get("r10")
    assert held is not None
    due_us = held.queued_at_us + TIMEOUT_US
    assert drive.world.next_due_us() == due_us == held.queue_due_us
    assert drive.wait(due_us - drive.now_us - 1) == []
    (gone,) = drive.wait(1)
    assert (gone.request_id, gone.reason, gone.worker_id) == ("r10", "queue_timeout", "")
    assert gone.message == "no worker had room for the request within the queue timeout of 0.5 s"
    assert drive.world.counts["aborted_queue_timeout"] == 1
    (sent,) = finish(drive, "r0")
    assert sent.request_id == "r11", "the other was in time"
    assert drive.wait(2 * TIMEOUT_US) == [], "a request that was sent has no limit any more"


def test_a_deadline_before_the_queue_timeout_is_reported_as_deadline() -> None:
    drive = Driver().fleet("a", queue=LIMITED)
    for at in range(10):
        submit(drive, f"r{at}")
    drive("requests", request("short", timeout_us=1_000))
    assert [one.reason for one in drive.wait(TIMEOUT_US)] == ["queue_deadline"]


def test_without_a_timeout_a_request_waits_for_its_deadline() -> None:
    drive = Driver().fleet("a", queue=QueueConfig(run_ahead=0.0))
    for at in range(9):
        submit(drive, f"r{at}")
    assert drive.wait(HOUR_US // 2) == []


def test_where_a_request_would_wait_is_told_with_what_everybody_would_cost() -> None:
    drive = Driver().fleet("a", "b", queue=LIMITED)
    for at in range(20):
        submit(drive, f"r{at}")
    (response,) = drive("requests", query("q"))
    assert isinstance(response, RouteAnswered)
    assert (response.would_wait, len(response.candidates)) == (True, 2)


def test_a_request_of_a_lost_worker_is_not_queued_again() -> None:
    drive = Driver().fleet("a", "b", queue=LIMITED)
    for at in range(20):
        submit(drive, f"r{at}")
    moved = drive.lose("a")
    assert [type(one) for one in moved] == [RequestRouted] * 10
    assert active(drive, "b") == 20, "accepted requests are served, also beyond the limit"


def disagg(queue: QueueConfig) -> Driver:
    drive = Driver()
    drive("control", decode_pool(queue=queue))
    drive("control", prefill_pool(queue=queue))
    drive("fleet", joined("d", 0, role="decode"))
    drive("fleet", prefiller("p", 0))
    return drive


def prefilled(drive: Driver, name: str) -> list[Any]:
    fields = progress(drive, name)
    kept = prefilled_by("p", fields["worker_epoch"])
    return drive("progress", PrefillFinished(**fields, prefilled=kept))


def test_what_is_prefilled_has_its_room_at_the_worker_that_decodes() -> None:
    drive = disagg(LIMITED)
    for at in range(10):
        assert submit(drive, f"r{at}").stage == "prefill"
    assert isinstance(submit(drive, "held"), RequestHeld), "the prefill worker is full"
    for at in range(6):
        prefilled(drive, f"r{at}")
    assert (active(drive, "p"), active(drive, "d")) == (4, 6)
    assert isinstance(submit(drive, "too"), RequestHeld), "four are promised the rest of the decode worker"
    assert drive.world.requests.count_before_response("default") == 4
    drive("progress", FirstTokenEmitted(**progress(drive, "r0")))
    (sent,) = finish(drive, "r0")
    assert (sent.request_id, sent.stage) == ("held", "prefill")
    assert drive.world.requests.count_before_response("default") == 5


def test_prefill_workers_that_are_full_hold_requests_though_decode_workers_have_room() -> None:
    drive = disagg(LIMITED)
    drive("fleet", joined("d2", 1, role="decode"))
    made = [submit(drive, f"r{at}") for at in range(11)]
    assert [type(one) for one in made] == [RequestRouted] * 10 + [RequestHeld]


@pytest.mark.parametrize("policy", ["always", "prefill_load"])
def test_a_full_prefill_worker_is_no_candidate_even_if_the_disaggregation_policy_compared_its_load(policy: Any) -> None:
    drive = Driver()
    drive("control", decode_pool(disagg=DisaggConfig(policy=policy, prefill_busy_threshold=100.0)))
    drive("control", prefill_pool(queue=LIMITED))
    drive("fleet", joined("d", 0, role="decode"))
    for slot, name in enumerate("pq"):
        drive("fleet", prefiller(name, slot))
    drive.stored("p", PROMPTS[0])
    assert [submit(drive, f"r{at}", blocks=PROMPTS[0]).worker_id for at in range(4)] == ["p"] * 4
    report(drive, "p", waiting=4)
    sent = submit(drive, "last", blocks=PROMPTS[0])
    assert (sent.worker_id, sent.candidates, sent.prefill.remote) == ("q", 1, True)


moves = st.lists(
    st.tuples(
        st.sampled_from(["submit"] * 6 + ["finish"] * 3 + ["cancel", "wait", "report", "lose"]), st.integers(0, 99)
    ),
    max_size=150,
)
configs = st.builds(
    QueueConfig,
    run_ahead=st.sampled_from([0.0, 0.25, 2.0]),
    depth=st.sampled_from([0.0, 0.5, 9.0]),
    timeout_s=st.sampled_from([0.0, 0.001, 0.5]),
)


def move(drive: Driver, kind: str, number: int, at: int) -> list[Any]:
    under_way = drive.world.requests.active()
    one = under_way[number % len(under_way)].submitted.request_id if under_way else "nobody"
    sent = [each.submitted.request_id for each in under_way if each.on_worker]
    match kind:
        case "submit":
            return drive("requests", request(f"r{at}", timeout_us=HOUR_US, nonce=at))
        case "finish" if sent:
            return finish(drive, sent[number % len(sent)])
        case "cancel":
            return drive.cancel(one)
        case "wait":
            return drive.wait(number * 5_000)
        case "report":
            return report(drive, "ab"[number % 2], waiting=number % 12) if drive.epoch("ab"[number % 2]) else []
        case "lose" if drive.epoch("a") and number < 20:
            return drive.lose("a")
        case _:
            return []


@given(config=configs, history=moves)
def test_bounds_hold_nothing_is_lost_and_nobody_waits_past_the_limit(
    config: QueueConfig, history: list[tuple[str, int]]
) -> None:
    drive = Driver().fleet("a", "b", queue=config)
    submitted: set[str] = set()
    ended_requests: set[str] = set()
    lost = False
    for at, (kind, number) in enumerate(history):
        ended = {one.submitted.request_id for one in drive.world.requests.active()}
        made = move(drive, kind, number, at)
        submitted |= {f"r{at}"} if kind == "submit" else set()
        ended_requests |= {one.request_id for one in made if isinstance(one, RequestRejected | RequestAborted)}
        under_way = {one.submitted.request_id: one for one in drive.world.requests.active()}
        if kind == "finish":
            ended_requests |= ended - set(under_way)
        assert submitted == set(under_way) | ended_requests, "each request is under way or has ended"
        lost = lost or kind == "lose"
        assert_bounds(drive, config, moved=lost)
    while drive.world.requests.active():
        sent = [one.submitted.request_id for one in drive.world.requests.active() if one.on_worker]
        if sent:
            finish(drive, sent[0])
        else:
            assert drive.world.next_due_us() is not None
            drive.wait(HOUR_US)
    assert drive.world.queues.waiting("default") == 0


def assert_bounds(drive: Driver, config: QueueConfig, *, moved: bool) -> None:
    world = drive.world
    limit = round(SEQS * (1 + (config.run_ahead or 0)))
    for load in world.load.ranks():
        assert moved or load.active_requests <= limit
    depth = config.depth or 0.0
    assert moved or world.queues.waiting("default") <= (2 * max(64, int(depth * SEQS)) if depth else 0)
    for one in world.requests.queued():
        assert one.phase is Phase.QUEUED
        assert not config.timeout_s or one.queued_at_us + round(config.timeout_s * 1e6) > drive.now_us
