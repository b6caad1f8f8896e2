"""Ingresses that join and are lost, and what becomes of the requests whose HTTP clients waited there."""

from typing import Any

import pytest

from forebay.core.restore import restore
from forebay.core.state.fleet import Fleet
from forebay.core.state_machine import IllegalTransition
from forebay.events.control import QueueConfig
from forebay.events.decisions import RequestAborted, RequestRouted
from forebay.events.fleet import AnyFleetEvent, IngressJoined, IngressLost, OwnershipAnnounced
from tests.core.worlds import Driver, joined, pool, request


def ingress_joined(name: str = "i", incarnation: str = "one", **changes: Any) -> IngressJoined:
    return IngressJoined(owner_epoch=0, ingress_id=name, incarnation=incarnation, **changes)


def ingress_lost(name: str = "i", incarnation: str = "one", **changes: Any) -> IngressLost:
    return IngressLost(owner_epoch=0, ingress_id=name, incarnation=incarnation, reason="its lease ran out", **changes)


def waiting_at(name: str, incarnation: str) -> Any:
    return request(name, ingress_incarnation=incarnation)


def test_a_lost_ingress_takes_its_requests_with_it_and_no_others() -> None:
    drive = Driver().fleet("a", "b")
    for name, incarnation in (("i", "one"), ("j", "two")):
        drive("fleet", ingress_joined(name, incarnation))
    for name, incarnation in (("r1", "one"), ("r2", "two"), ("by-kafka", ""), ("r3", "one"), ("older", "unknown")):
        drive("requests", waiting_at(name, incarnation))
    made = drive("fleet", ingress_lost())
    assert [type(one) for one in made] == [RequestAborted, RequestAborted]
    assert [(one.request_id, one.reason, one.worker_id != "") for one in made] == [
        ("r1", "ingress_lost", True),
        ("r3", "ingress_lost", True),
    ]
    assert made[0].message == "the ingress i of the request was lost: its lease ran out"
    assert [one.submitted.request_id for one in drive.world.requests.active()] == ["r2", "by-kafka", "older"]
    assert [one.ingress_id for one in drive.world.fleet.ingresses()] == ["j"]


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
    drive("requests", waiting_at("r", "one"))
    before = drive.world.fleet.digest()
    for fact in (ingress_lost(incarnation="two"), ingress_lost("j"), ingress_joined(incarnation="two")):
        assert drive("fleet", fact) == []
    assert drive.world.counts["stale_fleet_event"] == 3
    assert drive.world.fleet.digest() == before
    assert len(drive.world.requests) == 1


def test_a_restarted_ingress_is_another_incarnation() -> None:
    drive = Driver().fleet("a")
    drive("fleet", ingress_joined())
    drive("requests", waiting_at("old", "one"))
    (aborted,) = drive("fleet", ingress_lost())
    drive("fleet", ingress_joined(incarnation="two"))
    drive("requests", waiting_at("new", "two"))
    assert aborted.request_id == "old"
    assert [one.submitted.request_id for one in drive.world.requests.active()] == ["new"]


def test_ingresses_outlive_a_snapshot() -> None:
    drive = Driver().fleet("a")
    drive("fleet", ingress_joined(lease_ttl_ms=3_000))
    drive("requests", waiting_at("r", "one"))
    drive.world.take_consumed()
    after = restore(drive.world.snapshot())
    assert after.digest() == drive.world.digest()
    assert after.fleet.ingresses() == drive.world.fleet.ingresses()
    (aborted,) = Driver(after)("fleet", ingress_lost())
    assert aborted.request_id == "r"


def test_the_digest_tells_incarnations_apart_and_forgets_them() -> None:
    fleet = Fleet()
    digests = [fleet.digest()]
    facts: list[AnyFleetEvent] = [ingress_joined(), ingress_lost(), ingress_joined(incarnation="two")]
    for offset, fact in enumerate(facts):
        fleet.apply(fact, offset)
        digests.append(fleet.digest())
    assert digests[0] == digests[2]
    assert len(set(digests)) == 3


def test_fleet_events_of_a_replaced_owner_are_stale() -> None:
    fleet = Fleet()
    fleet.apply(OwnershipAnnounced(owner_epoch=7), 0)
    with pytest.raises(IllegalTransition, match="owner epoch 0 was replaced by 7"):
        fleet.apply(ingress_joined(), 1)
