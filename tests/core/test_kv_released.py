"""KV that nobody will fetch is given back at once, by who keeps it, and by nobody else."""

from typing import Any

import pytest
from hypothesis import given, note
from hypothesis import strategies as st

from forebay.core.phases import Phase
from forebay.events.decisions import CommandTarget, KvReleased, RequestRouted
from forebay.events.fleet import WorkerLost, WorkerSuspect
from forebay.events.progress import (
    FirstTokenEmitted,
    PrefillFinished,
    RequestFailed,
    RequestFinished,
    TransferFailed,
)
from forebay.events.requests import RequestCancelled, RoutingHints
from tests.core.disaggregated import ask, lost, prefilled, progress_fields
from tests.core.test_disaggregation_histories import Books, join, system
from tests.core.worlds import LEASE_US, PROMPTS, Driver, joined, prefilled_by, request

WAYS: tuple[tuple[str, Any, dict[str, Any]], ...] = (
    ("not_fetched", TransferFailed, {"error": "?"}),
    ("request_ended", RequestFailed, {"error": "?"}),
    ("request_ended", RequestFinished, {"finish_reason": "stop"}),
    ("not_needed", FirstTokenEmitted, {"unfetched": True}),
)


def target(routed: RequestRouted) -> CommandTarget:
    return CommandTarget(
        worker_id=routed.worker_id, worker_epoch=routed.worker_epoch, pool=routed.pool, slot=routed.slot
    )


@pytest.mark.parametrize(("reason", "kind", "fields"), WAYS)
def test_a_decode_worker_that_does_not_fetch_sets_free_what_is_kept(
    reason: str, kind: Any, fields: dict[str, Any]
) -> None:
    drive = Driver().disagg(["p", "q"], ["d"])
    first = ask(drive)
    (then,) = prefilled(drive, first)
    released, *_ = drive("progress", kind(**progress_fields(then), **fields))
    assert isinstance(released, KvReleased)
    assert (released.request_id, released.attempt, released.holder) == ("r", 1, target(first))
    assert released.reason == reason
    assert drive.world.counts[f"kv_released_{reason}"] == 1
    assert not drive("progress", kind(**progress_fields(then), **fields)), "once"


def test_fetched_kv_is_not_released() -> None:
    drive = Driver().disagg(["p"], ["d", "e"])
    (then,) = prefilled(drive, ask(drive))
    assert drive("progress", FirstTokenEmitted(**progress_fields(then))) == []
    (on,) = drive("fleet", lost(drive, then.worker_id))
    assert drive("progress", RequestFinished(**progress_fields(on), finish_reason="stop")) == []


def test_a_lost_holder_gets_no_release() -> None:
    for back in (False, True):
        drive = Driver().disagg(["p", "q"], ["d"])
        first = ask(drive)
        (then,) = prefilled(drive, first)
        drive("fleet", lost(drive, first.worker_id))
        if back:
            drive("fleet", joined(first.worker_id, 7, pool="prefillers", role="prefill"))
        (again,) = drive("progress", TransferFailed(**progress_fields(then), error="gone"))
        assert (again.stage, again.attempt) == ("prefill", 2)


def test_each_attempt_at_a_prompt_is_given_back_by_its_number_before_the_next_is_sent() -> None:
    drive = Driver().disagg(["p"], ["d"])
    routed = ask(drive)
    for attempt in (1, 2):
        (then,) = prefilled(drive, routed)
        released, routed = drive("progress", TransferFailed(**progress_fields(then), error="gone"))
        assert (released.attempt, released.holder.worker_id) == (attempt, "p")
        assert released.seq < routed.seq
    assert (routed.stage, routed.attempt) == ("aggregated", 3)


def test_kv_of_a_request_that_is_for_a_lost_worker_alone_is_given_back() -> None:
    """Its holder stands in the record that ends it, or is told so beside that."""
    for fetching in (False, True):
        drive = Driver().disagg(["p"], ["d", "e"])
        first = ask(drive, routing=RoutingHints(worker_id="d"))
        if fetching:
            (then,) = prefilled(drive, first)
            assert then.worker_id == "d"
        made = drive("fleet", lost(drive, "d"))
        assert [getattr(one, "reason", "") for one in made] == ["pinned_worker_lost"] + fetching * ["worker_lost"]
        assert made[0].worker_id == ("" if fetching else "p"), "who computes it stops"
        assert made[-1].holder == (target(first) if fetching else None)
        assert not len(drive.world.requests)


def test_a_pinned_request_that_waits_for_its_decode_worker_ends_with_it() -> None:
    drive = Driver().disagg(["p"], ["d", "e"])
    first = ask(drive, routing=RoutingHints(worker_id="d"))
    fact: dict[str, Any] = {"owner_epoch": 0, "worker_id": "d", "worker_epoch": drive.epoch("d")}
    drive("fleet", WorkerSuspect(**fact))
    assert prefilled(drive, first) == [], "it may come back"
    (aborted,) = drive("fleet", WorkerLost(**fact))
    assert (aborted.reason, aborted.holder) == ("pinned_worker_lost", target(first))


# Whatever happens

FAULTS = (
    *("prefilled",) * 4,
    *("first", "unfetched", "not_fetched", "not_fetched", "fail", "finish", "foreign"),
    *("lose", "lose_holder", "lose_decoders", "join", "cancel", "too_late", "too_late", "request"),
)


def perform(drive: Books, number: int, fault: str) -> None:
    under_way = drive.world.requests.active()
    if fault == "request" or not under_way:
        drive("requests", request(f"r{number}", PROMPTS[number % 3], nonce=number, timeout_us=10_000_000))
        return
    one = under_way[number % len(under_way)]
    fields: dict[str, Any] = {
        "request_id": one.submitted.request_id,
        "worker_id": one.worker_id,
        "worker_epoch": one.worker_epoch,
    }
    fields |= {"attempt": one.stage_attempt, "owner_epoch": 0}
    match fault:
        case "prefilled" | "foreign":
            whose = one.worker_epoch + (fault == "foreign")
            kept = prefilled_by(one.worker_id or "p", whose)
            drive("progress", PrefillFinished(**fields, prefilled=kept))
        case "first" | "unfetched":
            drive("progress", FirstTokenEmitted(**fields, unfetched=fault == "unfetched"))
        case "not_fetched":
            drive("progress", TransferFailed(**fields, error="gone"))
        case "fail":
            drive("progress", RequestFailed(**fields, error="broken"))
        case "finish":
            drive("progress", RequestFinished(**fields, finish_reason="stop"))
        case "cancel":
            drive("requests", RequestCancelled(request_id=one.submitted.request_id))
        case "too_late":
            for step in ("lose_decoders", "prefilled"):
                perform(drive, number, step)
            drive.wait(LEASE_US)
            perform(drive, number, "join")
        case "join":
            for slot, name in enumerate("depq"):
                if drive.world.fleet.get(name) is None:
                    join(drive, name, slot)
        case _:
            for name in {"lose": one.worker_id, "lose_holder": one.prefiller_id}.get(fault, "de"):
                if drive.world.fleet.get(name) is not None:
                    drive("fleet", lost(drive, name))


@given(st.lists(st.sampled_from(FAULTS), max_size=40), st.integers(0, 1))
def test_once_all_is_quiet_every_offer_was_fetched_or_given_back_or_went_with_its_holder(
    faults: list[str], disagg: int
) -> None:
    """`Books` compares, after every event, what workers keep with what requests may still fetch."""
    drive = system(0, disagg)
    drive("requests", request("r", PROMPTS[0]))
    for number, fault in enumerate(faults):
        note(f"{number} {fault}")
        perform(drive, number, fault)
    drive.wait(20_000_000)
    assert not len(drive.world.requests)
    assert not drive.offers


def test_no_request_is_left_with_the_kv_of_an_offer_that_was_given_back() -> None:
    drive = Driver().disagg(["p"], ["d"])
    (then,) = prefilled(drive, ask(drive))
    drive("progress", TransferFailed(**progress_fields(then), error="gone"))
    one = drive.world.requests.get("r")
    assert one is not None
    assert (one.phase, one.prefilled) == (Phase.REMOTE_PREFILL, None)
