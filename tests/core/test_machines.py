"""The tables of the fleet and of a request, and the edges of the rules: microseconds, ranks, phases and names."""

from collections.abc import Callable
from itertools import product
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from forebay.core.phases import Phase
from forebay.core.rederive import Rederivation
from forebay.core.restore import restore
from forebay.core.state.active_request import ActiveRequest
from forebay.core.state.fleet import TRANSITIONS as FLEET_TABLE
from forebay.core.state.fleet import Fleet, WorkerPhase
from forebay.core.state.requests import REMEMBER_US, ActiveRequests
from forebay.core.state.submitted_request import request_from_event
from forebay.core.state.transitions import REPORTED, TRANSITIONS, RequestTransition
from forebay.core.state_machine import IllegalTransition
from forebay.core.step import claim
from forebay.core.world import World
from forebay.events.base import pack_u32
from forebay.events.control import BusyThresholds, QueueClass, QueueConfig
from forebay.events.decisions import (
    ConsumedRun,
    OwnerClaimed,
    RequestAborted,
    RequestHeld,
    RequestRejected,
    RequestRouted,
    Stage,
)
from forebay.events.fleet import (
    IngressJoined,
    IngressLost,
    OwnershipAnnounced,
    WorkerDraining,
    WorkerFact,
    WorkerLost,
    WorkerRecovered,
    WorkerSuspect,
)
from forebay.events.progress import (
    AttemptMoved,
    AttemptRejected,
    EncodeFailed,
    EncodeFinished,
    EngineFailed,
    FirstTokenEmitted,
    OutputGrown,
    PrefillFailed,
    PrefillFinished,
    RequestFailed,
    RequestFinished,
    RequestProgress,
    TransferFailed,
)
from forebay.events.requests import RequestCancelled, RequestResumed, RequestSubmitted, RoutingHints
from forebay.events.snapshots import WorkerState
from tests.core.worlds import ENCODED, PROMPTS, Driver, ids_of, joined, pool, prefilled_by, request

# The fleet

UNCHANGING = frozenset({RequestTransition.OUTPUT_GROWN})  # no field and no phase changes
FACTS = (WorkerSuspect, WorkerRecovered, WorkerDraining, WorkerLost)


def fleet_in(phase: WorkerPhase) -> Fleet:
    fleet = Fleet()
    fleet.apply(joined("w"), 3)
    kinds: dict[WorkerPhase, Any] = {
        WorkerPhase.SUSPECT: WorkerSuspect, WorkerPhase.DRAINING: WorkerDraining, WorkerPhase.LOST: WorkerLost,
    }  # fmt: skip
    if phase in kinds:
        fleet.apply(kinds[phase](owner_epoch=0, worker_id="w", worker_epoch=3), 4)
    return fleet


@pytest.mark.parametrize(("phase", "kind"), list(product(WorkerPhase, FACTS)))
def test_the_table_of_the_fleet_has_every_transition(phase: WorkerPhase, kind: type[WorkerFact]) -> None:
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


STAGES: dict[Phase, Stage] = {
    Phase.ENCODE: "encode",
    Phase.REMOTE_PREFILL: "prefill",
    Phase.TRANSFER: "decode",
    Phase.PREFILL: "aggregated",
    Phase.DECODE: "aggregated",
}


def life_in(phase: Phase, *, encoded: bool = False, **changes: Any) -> tuple[ActiveRequests, ActiveRequest]:
    requests = ActiveRequests()
    one = ActiveRequest(request_from_event(request("r", [1, 2], **changes), "default", 0, 1_000))
    requests.add(one)
    if phase is Phase.QUEUED:
        requests.enqueue(one, "default", 10, 1_500)
    elif phase is not Phase.SUBMITTED:
        if encoded:
            requests.route(one, "encode", "e", 2, 0)
            requests.progress(EncodeFinished(**ids_of(one), encoded=ENCODED), 1_500)
        if phase in (Phase.TRANSFER, Phase.WAITING):
            requests.route(one, "prefill", "p", 2, 0)
            requests.progress(PrefillFinished(**ids_of(one), prefilled=prefilled_by("p", 2)), 1_500)
        if phase is not Phase.WAITING:
            requests.route(one, STAGES[phase], "w", 3, 0)
    if phase is Phase.DECODE:
        requests.progress(FirstTokenEmitted(**ids_of(one)), 2_000)
    assert one.phase is phase
    return requests, one


@pytest.mark.parametrize(("phase", "move"), list(product(Phase, RequestTransition)))
def test_the_request_transition_table(phase: Phase, move: RequestTransition) -> None:
    delivery = "external" if move is RequestTransition.MOVED else "worker"
    requests, one = life_in(phase, encoded=phase in (Phase.PREFILL, Phase.REMOTE_PREFILL), delivery=delivery)
    before = requests.digest(), list(requests.snapshot())
    calls: dict[RequestTransition, Callable[[], object]] = {
        RequestTransition.HELD: lambda: requests.enqueue(one, "default", 10, 2_500),
        RequestTransition.ROUTED: lambda: requests.route(one, "aggregated", "w2", 4, 1),
        RequestTransition.TO_BE_ENCODED: lambda: requests.route(one, "encode", "e", 4, 1),
        RequestTransition.TO_BE_PREFILLED: lambda: requests.route(one, "prefill", "p", 4, 1),
        RequestTransition.TO_BE_DECODED: lambda: requests.route(one, "decode", "d", 4, 1),
        RequestTransition.KV_EXPIRED: lambda: requests.expire_prefilled(one),
        RequestTransition.WORKER_LOST: lambda: requests.lose_worker(one),
        RequestTransition.ENDED: lambda: requests.end(one, 3_000),
    }
    reports: dict[RequestTransition, tuple[Any, dict[str, Any]]] = {
        RequestTransition.PREFILLED: (PrefillFinished, {"prefilled": prefilled_by("w", 3)}),
        RequestTransition.NOT_PREFILLED: (PrefillFailed, {"error": "out of blocks"}),
        RequestTransition.ENCODED: (EncodeFinished, {"encoded": ENCODED}),
        RequestTransition.NOT_ENCODED: (EncodeFailed, {"error": "too large"}),
        RequestTransition.NOT_TRANSFERRED: (TransferFailed, {"error": "gone"}),
        RequestTransition.REJECTED: (AttemptRejected, {"error": "not now", "status": 503, "code": ""}),
        RequestTransition.MOVED: (AttemptMoved, {"endpoint": "h:1"}),
        RequestTransition.OUTPUT_GROWN: (OutputGrown, {"output_tokens": 3}),
        RequestTransition.FINISHED: (RequestFinished, {"finish_reason": "stop"}),
        RequestTransition.FAILED: (RequestFailed, {"error": "broken"}),
        RequestTransition.FIRST_TOKEN: (FirstTokenEmitted, {}),
    }

    def perform() -> object:
        if move in calls:
            return calls[move]()
        kind, fields = reports[move]
        return requests.progress(kind(**ids_of(one), **fields), 3_000)

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
    assert drive.finish("r1") == []
    assert drive.world.counts["stale_progress"] == 1
    assert drive.cancel("r1")[0].request_id == "r1"


def test_every_progress_event_has_a_transition() -> None:
    assert set(REPORTED) == set(get_args(RequestProgress))


# The edges of the rules


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
    drive.cancel("r")
    drive.wait(REMEMBER_US - 1)
    assert drive("requests", request("r", nonce=1), after_us=0) == []
    (routed,) = drive("requests", request("r", nonce=1), after_us=1)
    assert isinstance(routed, RequestRouted)


@pytest.mark.parametrize("fact", [WorkerSuspect, WorkerDraining])
def test_only_ready_workers_get_requests(fact: Any) -> None:
    drive = Driver().fleet("a", "b")
    drive.fact(fact, "a")
    for number in range(4):
        (routed,) = drive("requests", request(f"r{number}", PROMPTS[0]))
        assert isinstance(routed, RequestRouted)
        assert (routed.worker_id, routed.candidates) == ("b", 1)
    drive.fact(WorkerDraining, "b")
    if fact is WorkerSuspect:
        drive.lose("a")
    (rejected,) = drive("requests", request("late"))
    assert isinstance(rejected, RequestRejected)
    assert rejected.reason == "no_workers"


def test_a_request_that_only_suspect_workers_may_take_is_held_until_one_is_back() -> None:
    drive = Driver().fleet("a", "b")
    for name in ("a", "b"):
        drive.fact(WorkerSuspect, name)
    held = [drive("requests", request(f"r{number}", PROMPTS[0])) for number in range(3)]
    assert [type(one) for (one,) in held] == [RequestHeld] * 3
    routed = drive.fact(WorkerRecovered, "b")
    assert [(one.request_id, one.worker_id) for one in routed] == [(f"r{number}", "b") for number in range(3)]


def test_a_request_for_a_suspect_worker_alone_is_held_while_others_are_ready() -> None:
    drive = Driver().fleet("a", "b")
    drive.fact(WorkerSuspect, "a")
    hints = RoutingHints(worker_id="a")
    (held,) = drive("requests", request("r", PROMPTS[0], routing=hints))
    assert isinstance(held, RequestHeld)
    (routed,) = drive.fact(WorkerRecovered, "a")
    assert (routed.request_id, routed.worker_id) == ("r", "a")


def test_suspect_workers_hold_no_more_than_their_share_of_the_queue() -> None:
    queue = QueueConfig(classes=(QueueClass(requests_per_worker_max=2),))
    drive = Driver().fleet("a", queue=queue)
    drive.fact(WorkerSuspect, "a")
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
    drive.fact(WorkerSuspect, "a")
    (rejected,) = drive("requests", request("s", routing=RoutingHints(required_taints=("none has it",))))
    assert rejected.reason == "no_workers"


def test_a_draining_worker_finishes_its_requests() -> None:
    drive = Driver().fleet("a")
    (routed,) = drive("requests", request("r", PROMPTS[0]))
    assert drive.fact(WorkerDraining, "a") == []
    assert drive.world.requests.active()[0].on_worker
    drive.finish(routed)
    assert not len(drive.world.requests)


def test_stranded_requests_move_in_the_order_of_submission_when_a_worker_recovers() -> None:
    drive = Driver().fleet("a", "b")
    drive.fact(WorkerSuspect, "b")
    for name in ("z", "m", "a"):
        drive("requests", request(name, PROMPTS[0]))
    assert drive.lose("a") == []
    assert routes(drive.fact(WorkerRecovered, "b")) == [("z", "b", 2), ("m", "b", 2), ("a", "b", 2)]


def test_engine_failed_alone_moves_no_request() -> None:
    """The worker may have sent all of its output, so only an event of `fleet` reports that the worker is lost."""
    drive = Driver().fleet("a", "b")
    (routed,) = drive("requests", request("r", PROMPTS[0]))
    assert isinstance(routed, RequestRouted)
    before = drive.world.requests.digest()
    assert drive("progress", EngineFailed(worker_id=routed.worker_id, pool="default", engine="mock", error="x")) == []
    assert drive.world.counts == {"engine_failed": 1}
    assert drive.world.requests.digest() == before


def test_a_report_of_the_rank_after_the_last_is_foreign() -> None:
    drive = Driver().fleet("a")
    drive.report("a", rank=1)
    assert drive.world.counts == {"foreign_load_report": 1}


def test_more_hashes_than_tokens_book_no_negative_load() -> None:
    drive = Driver().fleet("a")
    drive.stored("a", PROMPTS[0])
    (routed,) = drive("requests", request("r", PROMPTS[0], token_ids=pack_u32([1, 2, 3])))
    assert isinstance(routed, RequestRouted)
    assert drive.world.load.rank_load("a", 0).prefill_tokens == 0
    assert routed.terms.cost == len(PROMPTS[0])


def test_events_of_the_announced_owner_stay_valid() -> None:
    fleet = Fleet()
    for offset in (1, 2):
        fleet.apply(OwnershipAnnounced(owner_epoch=7), offset)
    fleet.apply(msgspec.structs.replace(joined("a"), owner_epoch=7), 3)
    fleet.apply(WorkerSuspect(owner_epoch=7, worker_id="a", worker_epoch=3), 4)
    assert [worker.phase for worker in fleet.workers()] == ["suspect"]


def test_a_claim_must_not_consume_events() -> None:
    """What it consumed would be applied by nobody."""
    claimed = OwnerClaimed(owner_id="o", core_version=1, consumed=(ConsumedRun(topic="fleet", count=1, now_us=0),))
    divergence = Rederivation(World()).apply(0, claimed, {"fleet": [None]})
    assert divergence is not None
    assert (divergence.reason, divergence.derived) == ("an ownership claim must not consume events", None)


# Progress from a worker that never had the request is foreign; late progress is not


def emit(drive: Driver, kind: Any, name: str, worker_id: str, epoch: int, attempt: int = 1, **fields: Any) -> None:
    ids: dict[str, Any] = {"request_id": name, "attempt": attempt, "worker_id": worker_id, "worker_epoch": epoch}
    drive("progress", kind(owner_epoch=0, **ids, **fields))


def counts(drive: Driver) -> tuple[int, int]:
    """Return how many progress events had no effect, and how many of them were foreign."""
    return drive.world.counts["stale_progress"], drive.world.counts["foreign_progress"]


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
    ids: dict[str, Any] = {
        "worker": (other, drive.epoch(other)),
        "epoch": (selected, epoch + 1),
        "attempt": (selected, epoch, 2),
    }
    before = drive.world.requests.digest()
    emit(drive, FirstTokenEmitted, "r", *ids[wrong])
    assert counts(drive) == (1, 1)
    assert drive.world.requests.digest() == before
    emit(drive, FirstTokenEmitted, "r", selected, epoch)
    assert counts(drive) == (1, 1)
    assert drive.world.requests.digest() != before


def test_late_progress_of_a_lost_worker_is_not_foreign() -> None:
    drive = Driver().fleet("a", "b")
    selected = routed(drive)
    epoch = drive.epoch(selected)
    drive.lose(selected)
    emit(drive, FirstTokenEmitted, "r", selected, epoch)
    assert counts(drive) == (1, 0)


def test_progress_on_a_request_that_ended_is_not_foreign() -> None:
    drive = Driver().fleet("a")
    epoch = drive.epoch("a")
    routed(drive)
    for _ in range(2):
        emit(drive, RequestFinished, "r", "a", epoch, finish_reason="stop")
    assert counts(drive) == (1, 0)


def test_progress_on_a_request_that_the_group_does_not_know_is_foreign_from_a_member() -> None:
    drive = Driver().fleet("a")
    epoch = drive.epoch("a")
    emit(drive, FirstTokenEmitted, "of another group", "a", epoch)
    assert counts(drive) == (1, 1)
    drive.lose("a")
    emit(drive, FirstTokenEmitted, "long forgotten", "a", epoch)
    assert counts(drive) == (2, 1)
    drive("fleet", joined("a"))
    emit(drive, FirstTokenEmitted, "long forgotten", "a", epoch)
    assert counts(drive) == (3, 1)


def test_attempts_before_a_snapshot_are_not_called_foreign() -> None:
    drive = Driver().fleet("a", "b")
    selected = routed(drive)
    epoch = drive.epoch(selected)
    drive.lose(selected)
    drive.world.stamp()  # a snapshot stands between journal records
    again = Driver(restore(list(drive.world.snapshot())))
    emit(again, FirstTokenEmitted, "r", selected, epoch)
    assert counts(again) == (1, 0)


# Ingresses that are lost, and what becomes of the requests whose HTTP clients waited there


def ingress_joined(name: str = "i", incarnation: str = "one", **changes: Any) -> IngressJoined:
    return IngressJoined(owner_epoch=0, ingress_id=name, incarnation=incarnation, **changes)


def ingress_lost(name: str = "i", incarnation: str = "one", **changes: Any) -> IngressLost:
    return IngressLost(owner_epoch=0, ingress_id=name, incarnation=incarnation, reason="its lease ran out", **changes)


def test_a_lost_ingress_takes_its_requests_with_it_and_no_others() -> None:
    drive = Driver().fleet("a", "b")
    for name, incarnation in (("i", "one"), ("j", "two")):
        drive("fleet", ingress_joined(name, incarnation))
    for name, incarnation in (("r1", "one"), ("r2", "two"), ("by-kafka", ""), ("r3", "one"), ("older", "unknown")):
        drive("requests", request(name, ingress_incarnation=incarnation))
    made = drive("fleet", ingress_lost())
    assert [(type(one), one.request_id) for one in made] == [(RequestAborted, "r1"), (RequestAborted, "r3")]
    assert {(one.reason, one.worker_id != "") for one in made} == {("ingress_lost", True)}
    assert made[0].message == "the ingress i of the request was lost: its lease ran out"
    assert [one.submitted.request_id for one in drive.world.requests.active()] == ["r2", "by-kafka", "older"]
    assert [one.ingress_id for one in drive.world.fleet.ingresses()] == ["j"]


def resume(drive: Driver, name: str, incarnation: str) -> None:
    assert drive("requests", RequestResumed(request_id=name, ingress_incarnation=incarnation)) == []


@given(st.lists(st.tuples(st.sampled_from(("resume", "cancel", "lose")), st.sampled_from(("one", "two", "three")))))
@example([("resume", "two"), ("cancel", "two"), ("cancel", "two"), ("lose", "one")])
@example([("resume", "two"), ("resume", "two"), ("lose", "one"), ("lose", "three"), ("cancel", "two")])
@example([("resume", "two"), ("resume", "three"), ("cancel", "one"), ("resume", "one"), ("lose", "two")])
def test_a_request_ends_when_its_last_ingress_is_gone(steps: list[tuple[str, str]]) -> None:
    """Compare the owner with a plain list of the ingresses whose clients wait, through a snapshot after each step."""
    drive = Driver().fleet("a")
    drive("requests", request("r", ingress_incarnation="one"))
    waits, digests = ["one"], dict[tuple[str, ...], int]()
    for step, ingress in steps:
        if step == "resume":
            resume(drive, "r", ingress)
            waits += [ingress] if ingress not in waits else []
        else:
            drive("fleet", ingress_joined(ingress, ingress))
            cancelled = RequestCancelled(request_id="r", ingress_incarnation=ingress)
            made = drive("requests", cancelled) if step == "cancel" else drive("fleet", ingress_lost(ingress, ingress))
            if waits == [ingress]:
                assert [one.reason for one in made] == ["cancelled" if step == "cancel" else "ingress_lost"]
                return
            assert made == []
            waits = [one for one in waits if one != ingress]
        drive = drive.copy()
        assert drive.active().submitted.ingresses == tuple(waits)
        assert drive.world.requests.digest() == digests.setdefault(tuple(waits), drive.world.requests.digest())
    assert len(set(digests.values())) == len(digests)


def test_only_a_request_with_an_ingress_is_resumed_and_only_at_one() -> None:
    drive = Driver().fleet("a")
    for name in ("", "one"):
        drive("requests", request(f"of {name}", ingress_incarnation=name))
    for name, ingress in (("of ", "two"), ("unknown", "two"), ("of one", "")):
        resume(drive, name, ingress)
    waits = [one.submitted.ingresses for one in drive.world.requests.active()]
    assert (waits, drive.world.counts["resumed_without_effect"]) == ([(), ("one",)], 3)


@pytest.mark.parametrize(("waits", "by"), [("one", "one"), ("one", ""), ("", "one"), ("", "")])
def test_an_ingress_cancels_its_requests_and_those_that_outlive_theirs(waits: str, by: str) -> None:
    drive = Driver().fleet("a")
    drive("requests", request("r", ingress_incarnation=waits))
    (aborted,) = drive("requests", RequestCancelled(request_id="r", ingress_incarnation=by))
    assert (type(aborted), aborted.reason) == (RequestAborted, "cancelled")


def test_an_owner_that_cannot_read_resumptions_ignores_them() -> None:
    drive = Driver().fleet("a")
    claim(drive.world, 1, events_version=RequestResumed.SINCE - 1)
    drive("requests", request("r", ingress_incarnation="one"))
    resume(drive, "r", "two")
    assert drive.active().submitted.ingresses == ("one",)
    (aborted,) = drive("requests", RequestCancelled(request_id="r", ingress_incarnation="two"))
    assert isinstance(aborted, RequestAborted)


def test_aborting_orphans_frees_room_for_queued_requests() -> None:
    drive = Driver()
    drive("fleet", ingress_joined())
    drive("control", pool(queue=QueueConfig(threshold=0.5)))
    drive("fleet", joined("a"))
    drive("requests", request("big", range(40), ingress_incarnation="one"))
    (held,) = drive("requests", request("next", range(100, 140)))
    made = drive("fleet", ingress_lost())
    assert [type(one) for one in made] == [RequestAborted, RequestRouted]
    assert made[1].request_id == held.request_id == "next"


def test_a_loss_of_another_incarnation_or_of_nobody_changes_nothing() -> None:
    drive = Driver().fleet("a")
    drive("fleet", ingress_joined())
    drive("requests", request("r", ingress_incarnation="one"))
    before = drive.world.fleet.digest()
    for fact in (ingress_lost(incarnation="two"), ingress_lost("j"), ingress_joined(incarnation="two")):
        assert drive("fleet", fact) == []
    assert drive.world.counts["stale_fleet_event"] == 3
    assert drive.world.fleet.digest() == before
    assert len(drive.world.requests) == 1


def test_ingresses_outlive_a_snapshot() -> None:
    drive = Driver().fleet("a")
    drive("fleet", ingress_joined(lease_ttl_ms=3_000))
    drive("requests", request("r", ingress_incarnation="one"))
    after = drive.copy()
    assert after.world.fleet.ingresses() == drive.world.fleet.ingresses()
    (aborted,) = after("fleet", ingress_lost())
    assert aborted.request_id == "r"


@pytest.mark.parametrize(("owner_events", "decisions"), [(1, 0), (2, 1), (3, 1)])
def test_the_version_of_the_owner_decides_whether_an_event_has_an_effect(
    monkeypatch: pytest.MonkeyPatch, owner_events: int, decisions: int
) -> None:
    drive = Driver().fleet("a")
    claim(drive.world, 7, (), owner_events)
    monkeypatch.setattr(RequestSubmitted, "SINCE", 2)
    assert len(drive("requests", request("one", ()))) == decisions
    assert drive.world.view["requests"] == 1
    assert drive.world.counts["undecodable"] == 1 - decisions


def test_a_snapshot_keeps_the_version_of_its_owner() -> None:
    world = World()
    claim(world, 7, (), 5)
    assert restore(world.snapshot()).owner_events == 5
    claim(world, 9)
    assert restore(world.snapshot()).owner_events == 1
