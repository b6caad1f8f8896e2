"""Policies that an operator sets at run time: what they change, how long they are valid, and what digests they have."""

from typing import Any

import msgspec
import pytest

from forebay.core.restore import digest_of_snapshot, restore
from forebay.core.routing.policies import BUILT_IN
from forebay.core.state.pool_registry import PoolEvent, PoolRegistry
from forebay.core.state_machine import digest_of
from forebay.core.step import claim
from forebay.core.world import World
from forebay.events.control import PolicySet, PoolConfigured, RouterConfig
from forebay.events.decisions import RequestRouted
from forebay.events.pools import PoolCanarySet, PoolDrainSet
from tests.core.worlds import BLOCK, Driver, joined, pool, request


def policy(mode: str, name: str = "default", model: str = "m") -> PolicySet:
    return PolicySet(model=model, pool=name, mode=mode)


def routed(drive: Driver, name: str, **fields: Any) -> RequestRouted:
    (decided,) = drive("requests", request(name, **fields))
    assert isinstance(decided, RequestRouted)
    return decided


def copied(world: World) -> World:
    """Return the world of a snapshot, whose digest is that of the original."""
    world.take_consumed()  # a snapshot is taken between journal records
    chunks = list(world.snapshot())
    copy = restore(chunks)
    assert copy.digest() == world.digest() == digest_of_snapshot(chunks)
    return copy


def test_a_policy_applies_to_later_decisions_of_its_pool() -> None:
    drive = Driver().fleet("a", "b")
    drive("control", PoolConfigured(pool="other", model="n", block_size=BLOCK))
    drive("fleet", joined("z", 0, pool="other", model="n"))
    assert routed(drive, "r1").mode == "kv"
    drive("control", policy("round-robin"))
    assert routed(drive, "r2").mode == "round-robin"
    assert routed(drive, "r3", model="n").mode == "kv"
    assert drive.world.pools["default"].router == RouterConfig(mode="round-robin")


def test_a_policy_is_valid_until_the_pool_is_configured_again() -> None:
    drive = Driver().fleet("a")
    configured = drive.world.configured_pools()
    drive("control", policy("random"))
    assert drive.world.configured_pools() == configured, "an owner that takes over keeps the policy"
    assert copied(drive.world).modes == {"default": "kv"}
    assert routed(Driver(copied(drive.world)), "r1").mode == "random"
    drive("control", policy("least-loaded"))
    assert (drive.world.modes, drive.world.configured_pools()) == ({"default": "kv"}, configured)
    drive("control", pool())
    assert (drive.world.modes, routed(drive, "r2").mode) == ({}, "kv")


def test_the_configured_policy_leaves_nothing_in_the_state() -> None:
    changed, untouched = Driver().fleet("a"), Driver().fleet("a")
    changed("control", policy("random"))
    changed("control", policy("kv"))
    for _ in range(2):
        untouched("control", PoolDrainSet(model="m", pool="default", drained=False))
    assert changed.world.digest() == untouched.world.digest()


@pytest.mark.parametrize(
    ("event", "count"),
    [
        (policy("random", "gone"), "unknown_pool"),
        (policy("random", model="n"), "unknown_pool"),
        (policy("mine.Policy"), "policy_not_allowed"),
    ],
    ids=str,
)
def test_a_policy_that_cannot_apply_is_counted(event: PolicySet, count: str) -> None:
    drive = Driver().fleet("a")
    before = dict(drive.world.pools)
    assert drive("control", event) == []
    assert (drive.world.counts[count], drive.world.pools, drive.world.modes) == (1, before, {})


def test_a_custom_policy_that_the_owner_may_run_applies() -> None:
    drive = Driver(custom={"mine.Policy": BUILT_IN["round-robin"]}).fleet("a")
    drive("control", policy("mine.Policy"))
    assert routed(drive, "r").mode == "mine.Policy"


@pytest.mark.parametrize(
    ("mode", "allowed", "expected"),
    [("mine.Policy", (), "kv"), ("mine.Policy", ("mine.Policy",), "mine.Policy"), ("random", (), "random")],
)
def test_an_owner_that_may_not_run_a_policy_returns_to_the_configured_one(
    mode: str, allowed: tuple[str, ...], expected: str
) -> None:
    drive = Driver(custom={"mine.Policy": BUILT_IN["round-robin"]}).fleet("a")
    drive("control", policy(mode))
    claim(drive.world, 7, allowed)
    assert routed(drive, "r").mode == expected


def test_a_policy_routes_requests_that_could_not_be_routed() -> None:
    drive = Driver().fleet("a", mode="direct")
    (refused,) = drive("requests", request("r"))
    assert refused.reason == "unknown_worker"
    drive("control", policy("kv"))
    assert routed(drive, "r2").worker_id == "a"


@pytest.mark.parametrize(
    ("event", "fields"),
    [
        (PoolDrainSet(model="m", pool="a", drained=True, at_us=5), ("m", "a", True, 5)),
        (PoolCanarySet(model="m", pool="a", base="b", share=0.5, at_us=5), ("m", "a", "b", 0.5, 5)),
    ],
    ids=["drain", "canary"],
)
def test_rules_without_an_operator_keep_their_digests(event: PoolEvent, fields: tuple[Any, ...]) -> None:
    registry, named = PoolRegistry(), PoolRegistry()
    registry.apply(event)
    assert registry.digest() == digest_of(fields)
    named.apply(msgspec.structs.replace(event, operator="alice"))
    assert named.digest() == digest_of((*fields, "alice"))
