"""Block identity, and the tables of the fleet and of a request's life."""

from collections.abc import Callable
from itertools import product
from typing import Any, get_args

import pytest

from forebay.core.block_hashes import block_hashes, extend_chain
from forebay.core.phases import Phase
from forebay.core.state.active_request import ActiveRequest
from forebay.core.state.fleet import TRANSITIONS as FLEET_TABLE
from forebay.core.state.fleet import Fleet, WorkerPhase
from forebay.core.state.requests import ActiveRequests
from forebay.core.state.submitted_request import request_from_event
from forebay.core.state.transitions import REPORTED, TRANSITIONS, RequestTransition
from forebay.core.state_machine import IllegalTransition
from forebay.events.base import pack_u32
from forebay.events.control import QueueConfig
from forebay.events.decisions import RequestHeld, Stage
from forebay.events.fleet import (
    OwnershipAnnounced,
    WorkerDraining,
    WorkerFact,
    WorkerLost,
    WorkerRecovered,
    WorkerSuspect,
)
from forebay.events.progress import (
    AttemptRejected,
    EncodeFailed,
    EncodeFinished,
    FirstTokenEmitted,
    OutputGrown,
    PrefillFailed,
    PrefillFinished,
    RequestFailed,
    RequestFinished,
    RequestProgress,
    TransferFailed,
)
from forebay.events.snapshots import WorkerState
from tests.core.worlds import ENCODED, PROMPTS, Driver, joined, prefilled_by, request

# Block identity


def test_only_full_blocks_are_hashed_and_chains_go_on() -> None:
    assert block_hashes(pack_u32(range(1, 4)), 4) == []
    blocks = block_hashes(pack_u32(range(1, 13)), 4)
    whole = extend_chain(None, blocks)
    assert whole[:2] + extend_chain(whole[1], blocks[2:]) == whole


# The fleet

UNCHANGING = frozenset({RequestTransition.OUTPUT_GROWN})  # no field and no phase changes
FACTS = (WorkerSuspect, WorkerRecovered, WorkerDraining, WorkerLost)


def fleet_in(phase: WorkerPhase) -> Fleet:
    fleet = Fleet()
    fleet.apply(joined("w"), 3)
    if phase is WorkerPhase.SUSPECT:
        fleet.apply(WorkerSuspect(owner_epoch=0, worker_id="w", worker_epoch=3), 4)
    if phase is WorkerPhase.DRAINING:
        fleet.apply(WorkerDraining(owner_epoch=0, worker_id="w", worker_epoch=3), 4)
    if phase is WorkerPhase.LOST:
        fleet.apply(WorkerLost(owner_epoch=0, worker_id="w", worker_epoch=3), 4)
    return fleet


@pytest.mark.parametrize(("phase", "kind"), list(product(WorkerPhase, FACTS)))
def test_the_fleets_table(phase: WorkerPhase, kind: type[WorkerFact]) -> None:
    fleet = fleet_in(phase)
    before = fleet.digest(), list(fleet.snapshot())
    fact: Any = kind(owner_epoch=0, worker_id="w", worker_epoch=3)
    expected = FLEET_TABLE[phase].get(kind)
    if expected is None:
        with pytest.raises(IllegalTransition):
            fleet.apply(fact, 9)
        assert (fleet.digest(), list(fleet.snapshot())) == before
        return
    worker = fleet.apply(fact, 9)
    assert worker is not None
    assert worker.phase is expected
    assert (fleet.get("w") is None) == (expected is WorkerPhase.LOST)


def test_fleet_events_of_other_epochs_and_older_owners_are_stale() -> None:
    fleet = fleet_in(WorkerPhase.READY)
    fleet.apply(OwnershipAnnounced(owner_epoch=7), 5)
    before = fleet.digest()
    for fact in (
        WorkerLost(owner_epoch=6, worker_id="w", worker_epoch=3),
        WorkerLost(owner_epoch=7, worker_id="w", worker_epoch=2),
        WorkerLost(owner_epoch=7, worker_id="x", worker_epoch=3),
        joined("new"),
        OwnershipAnnounced(owner_epoch=1),
    ):
        with pytest.raises(IllegalTransition):
            fleet.apply(fact, 6)
    with pytest.raises(IllegalTransition, match="already in the fleet"):
        fleet_in(WorkerPhase.READY).apply(joined("w"), 8)
    assert (fleet.digest(), fleet.owner_epoch, len(fleet)) == (before, 7, 1)
    restored = Fleet()
    restored.restore_owner(fleet.owner_epoch)
    for chunk in fleet.snapshot():
        assert isinstance(chunk, WorkerState)
        restored.restore(chunk)
    assert restored.digest() == before


# A request's life


STAGES: dict[Phase, Stage] = {
    Phase.ENCODE: "encode",
    Phase.REMOTE_PREFILL: "prefill",
    Phase.TRANSFER: "decode",
    Phase.PREFILL: "aggregated",
    Phase.DECODE: "aggregated",
}


def life_in(phase: Phase, *, encoded: bool = False) -> tuple[ActiveRequests, ActiveRequest]:
    requests = ActiveRequests()
    one = ActiveRequest(request_from_event(request("r", [1, 2]), "default", 0, 1_000))
    requests.add(one)
    if phase is Phase.QUEUED:
        requests.enqueue(one, "default", 10, 1_500)
    elif phase is not Phase.SUBMITTED:
        if encoded:
            requests.route(one, "encode", "e", 2, 0)
            requests.progress(progress_event(EncodeFinished, one, encoded=ENCODED), 1_500)
        if phase in (Phase.TRANSFER, Phase.WAITING):
            requests.route(one, "prefill", "p", 2, 0)
            requests.progress(progress_event(PrefillFinished, one, prefilled=prefilled_by("p", 2)), 1_500)
        if phase is not Phase.WAITING:
            requests.route(one, STAGES[phase], "w", 3, 0)
    if phase is Phase.DECODE:
        requests.progress(first_token(one), 2_000)
    assert one.phase is phase
    return requests, one


def progress_event(kind: type[Any], one: ActiveRequest, **fields: Any) -> Any:
    return kind(
        request_id="r",
        attempt=one.stage_attempt,
        worker_id=one.worker_id,
        worker_epoch=one.worker_epoch,
        owner_epoch=0,
        **fields,
    )


def first_token(one: ActiveRequest) -> FirstTokenEmitted:
    event: FirstTokenEmitted = progress_event(FirstTokenEmitted, one)
    return event


@pytest.mark.parametrize(("phase", "move"), list(product(Phase, RequestTransition)))
def test_the_request_transition_table(phase: Phase, move: RequestTransition) -> None:
    requests, one = life_in(phase, encoded=phase in (Phase.PREFILL, Phase.REMOTE_PREFILL))
    before = requests.digest(), list(requests.snapshot())
    moves: dict[RequestTransition, Callable[[], object]] = {
        RequestTransition.HELD: lambda: requests.enqueue(one, "default", 10, 2_500),
        RequestTransition.ROUTED: lambda: requests.route(one, "aggregated", "w2", 4, 1),
        RequestTransition.TO_BE_ENCODED: lambda: requests.route(one, "encode", "e", 4, 1),
        RequestTransition.TO_BE_PREFILLED: lambda: requests.route(one, "prefill", "p", 4, 1),
        RequestTransition.TO_BE_DECODED: lambda: requests.route(one, "decode", "d", 4, 1),
        RequestTransition.PREFILLED: lambda: requests.progress(
            progress_event(PrefillFinished, one, prefilled=prefilled_by("w", 3)), 3_000
        ),
        RequestTransition.NOT_PREFILLED: lambda: requests.progress(
            progress_event(PrefillFailed, one, error="out of blocks"), 3_000
        ),
        RequestTransition.ENCODED: lambda: requests.progress(
            progress_event(EncodeFinished, one, encoded=ENCODED), 3_000
        ),
        RequestTransition.NOT_ENCODED: lambda: requests.progress(
            progress_event(EncodeFailed, one, error="too large"), 3_000
        ),
        RequestTransition.NOT_TRANSFERRED: lambda: requests.progress(
            progress_event(TransferFailed, one, error="gone"), 3_000
        ),
        RequestTransition.REJECTED: lambda: requests.progress(
            progress_event(AttemptRejected, one, error="not now", status=503, code=""), 3_000
        ),
        RequestTransition.KV_EXPIRED: lambda: requests.expire_prefilled(one),
        RequestTransition.OUTPUT_GROWN: lambda: requests.progress(
            progress_event(OutputGrown, one, output_tokens=3), 3_000
        ),
        RequestTransition.FINISHED: lambda: requests.progress(
            progress_event(RequestFinished, one, finish_reason="stop"), 3_000
        ),
        RequestTransition.FAILED: lambda: requests.progress(progress_event(RequestFailed, one, error="broken"), 3_000),
        RequestTransition.FIRST_TOKEN: lambda: requests.progress(first_token(one), 3_000),
        RequestTransition.WORKER_LOST: lambda: requests.lose_worker(one),
        RequestTransition.ENDED: lambda: requests.end(one, 3_000),
    }
    perform = moves[move]
    rule = TRANSITIONS[move]
    if phase not in rule.sources or (rule.guard is not None and not rule.guard(one)):
        with pytest.raises(IllegalTransition):
            perform()
        assert (requests.digest(), list(requests.snapshot())) == before
        return
    perform()
    assert (requests.digest() == before[0]) == (move in UNCHANGING)
    assert (requests.get("r") is None) == (rule.target is None)
    assert one.phase is (rule.target or phase)
    restored = ActiveRequests()
    for chunk in requests.snapshot():
        restored.restore(chunk)
    assert restored.digest() == requests.digest()
    assert restored.next_due_us() == requests.next_due_us()


def test_progress_of_unknown_requests_and_attempts_is_rejected() -> None:
    requests, one = life_in(Phase.PREFILL)
    before = requests.digest()
    other: dict[str, Any] = {"worker_id": "w", "worker_epoch": 3, "owner_epoch": 0, "finish_reason": "stop"}
    for name, attempt in (("x", 1), ("r", 2)):
        with pytest.raises(IllegalTransition):
            requests.progress(RequestFinished(**other, request_id=name, attempt=attempt), 9)
    assert requests.digest() == before
    assert requests.progress(RequestFinished(**other, request_id="r", attempt=1), 9) is one


def test_ended_requests_leave_no_deadline_behind() -> None:
    requests = ActiveRequests()
    for number in range(500):
        one = ActiveRequest(request_from_event(request(f"r{number}", timeout_us=10_000 + number), "default", number, 0))
        requests.add(one)
        requests.route(one, "aggregated", "w", 3, 0)
        if number % 100:
            requests.end(one, 10)
    assert requests.next_due_us() == 10_000
    assert [one.submitted.request_id for one in requests.expired(10_250)] == ["r0", "r100", "r200"]
    assert requests.next_due_us() == 10_300
    # An id that comes back with another deadline is not ended by the old one.
    again = ActiveRequest(request_from_event(request("again", timeout_us=50), "default", 900, 0))
    requests.add(again)
    requests.end(again, 10)
    requests.expired(200_000_000)
    requests.add(ActiveRequest(request_from_event(request("again", timeout_us=10**9), "default", 901, 200_000_000)))
    assert requests.expired(200_000_001) == []


def test_progress_of_a_queued_request_without_a_worker_is_stale() -> None:
    drive = Driver().fleet("a", queue=QueueConfig(threshold=0.0))
    drive("requests", request("r0", PROMPTS[0]))
    (held,) = drive("requests", request("r1", PROMPTS[0]))
    assert isinstance(held, RequestHeld)
    event = RequestFinished(
        request_id="r1", attempt=0, worker_id="", worker_epoch=0, owner_epoch=0, finish_reason="stop"
    )
    assert drive("progress", event) == []
    assert drive.world.counts["stale_progress"] == 1
    assert drive.cancel("r1")[0].request_id == "r1"


def test_every_progress_event_has_a_transition() -> None:
    assert set(REPORTED) == set(get_args(RequestProgress))
