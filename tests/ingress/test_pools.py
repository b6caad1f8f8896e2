"""Pools over the admin API: GET and POST of busy thresholds, disaggregation and rules, as events on the log."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.block_hashes import sequence_hashes
from forebay.core.state.pool_settings import PoolSettings
from forebay.events.base import pack_u32
from forebay.events.codec import decode, encode
from forebay.events.control import (
    BusyThresholds,
    BusyThresholdsSet,
    ControlEvent,
    DisaggConfig,
    DisaggregationSet,
    PolicySet,
    PoolConfigured,
    RouterConfig,
)
from forebay.events.pools import GridPool, PoolCanarySet, PoolDrainSet, PoolGrid, PoolRouting, PoolRoutingConfigured
from forebay.events.topics import CONTROL
from forebay.ingress import group
from forebay.ingress.pool_settings import PoolConfigurator
from forebay.transport.base import Draft
from forebay.transport.directory import Directory
from forebay.transport.sqlite.log import SqliteLog
from tests.core.worlds import setting
from tests.ingress.conftest import ADMIN_TOKEN, NAME, Scene, error, make_scene
from tests.system import until

BUSY, DISAGG, POOLS = "/busy_threshold", "/disaggregation", "/v1/pools"
DECODE, PREFILL, SHARE = BusyThresholds.__struct_fields__
OFF = dict.fromkeys(BusyThresholds.__struct_fields__)
CLASSIC = {"model": NAME, **msgspec.structs.asdict(DisaggConfig(policy="classic")), "pool": "answers"}
GRID = {
    "isl_max": 8_192,
    "target_max_ms": 1_000,
    "pools": [{"pool": "short", "priority": 0}, {"pool": "long", "priority": 1}],
    "cells": [["short"], ["long"]],
}


def pool(name: str = "default", role: Any = "aggregated", model: str = NAME, **router: Any) -> PoolConfigured:
    return PoolConfigured(pool=name, model=model, block_size=4, router=RouterConfig(**router), role=role)


def busy(**thresholds: Any) -> PoolConfigured:
    return pool(busy=BusyThresholds(**thresholds))


def disagg(role: Any = "decode", **settings: Any) -> PoolConfigured:
    return pool("answers", role, disagg=DisaggConfig(**settings))


HALF = busy(active_decode_blocks_threshold=0.5)
SPLIT = (disagg(policy="classic"), pool("prompts", "prefill"))
LISTED = (pool("short"), pool("long"), pool("foreign", model="other"))


@asynccontextmanager
async def with_pools(*pools: PoolConfigured, **settings: Any) -> AsyncIterator[Scene]:
    async with make_scene(admin_token=ADMIN_TOKEN, **settings) as scene:
        for one in pools:
            scene.control(one)
        yield scene


def appended(scene: Scene, after: int) -> list[ControlEvent]:
    """Return the events after the configuration of the pools, without their times."""
    records = scene.log.records(CONTROL.name, 0, after, 1000)
    events = [decode(CONTROL, record.value) for record in records]
    return [msgspec.structs.replace(event, at_us=0) if hasattr(event, "at_us") else event for event in events]


async def read(scene: Scene, path: str) -> Any:
    response = await scene.client.get(path)
    assert response.status_code == 200, response.text
    return response.json()


async def post(scene: Scene, path: str, **body: Any) -> Any:
    response = await scene.client.post(path, json={"model": NAME, **body})
    assert response.status_code == 200, response.text
    return response.json()


async def test_missing_thresholds_keep_their_value_and_null_disables() -> None:
    async with with_pools(HALF) as scene:
        assert await post(scene, BUSY, operator="alice") == {"model": NAME, **OFF, DECODE: 0.5}
        assert appended(scene, 1) == [], "no setting was changed"
        changed = await post(scene, BUSY, **{PREFILL: 1000}, operator="alice")
        assert changed == {"model": NAME, DECODE: 0.5, PREFILL: 1000, SHARE: None}
        changed = await post(scene, BUSY, **{DECODE: None, SHARE: 2})
        assert changed == {"model": NAME, DECODE: None, PREFILL: 1000, SHARE: 2}
        first, last = appended(scene, 1)
        expected = BusyThresholds(active_prefill_tokens_threshold=1000, active_prefill_tokens_threshold_frac=2)
        assert last == BusyThresholdsSet(model=NAME, thresholds=expected)
        assert isinstance(first, BusyThresholdsSet)
        assert first.operator == "alice"
        assert await read(scene, BUSY) == {"thresholds": [{**changed, "pool": "default"}]}


async def test_disagg_missing_fields_keep_their_value() -> None:
    async with with_pools(*SPLIT) as scene:
        assert await post(scene, DISAGG) == CLASSIC
        assert appended(scene, 2) == [], "asking changes nothing"
        changed = await post(scene, DISAGG, max_local_prefill_length=10, prefill_busy_threshold=None)
        assert changed == {**CLASSIC, "max_local_prefill_length": 10, "prefill_busy_threshold": None}
        assert await post(scene, DISAGG, enforce=True, operator="alice") == {**changed, "enforce": True}
        after = DisaggConfig(policy="classic", max_local_prefill_length=10, prefill_busy_threshold=None, enforce=True)
        assert appended(scene, 2)[-1] == DisaggregationSet(model=NAME, disagg=after, operator="alice")
        assert await read(scene, DISAGG) == {"disaggregation": [{**changed, "enforce": True}]}, "as POST answers"


async def test_disagg_settings_are_read_as_soon_as_a_router_has_placed_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    placed: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    monkeypatch.setattr(Directory, "placed", lambda *_: placed)
    monkeypatch.setattr(group, "POLL_S", 3_600.0)
    async with with_pools() as scene:
        running = asyncio.create_task(scene.models.run())
        await asyncio.sleep(0.01)
        scene.control(disagg(policy="always", enforce=True))
        placed.set_result(0)
        await until(lambda: scene.only.is_enforced)
        running.cancel()


async def test_changes_by_another_ingress_or_a_router_apply() -> None:
    async with with_pools(HALF, *SPLIT) as scene:
        await post(scene, BUSY, **{DECODE: 0.9})
        scene.control(BusyThresholdsSet(model=NAME, thresholds=BusyThresholds(active_prefill_tokens_threshold=7)))
        assert await post(scene, BUSY) == {"model": NAME, **OFF, PREFILL: 7}
        scene.control(busy(active_decode_blocks_threshold=0.25))
        scene.control(disagg())
        found = {one["pool"]: one[DECODE] for one in (await read(scene, BUSY))["thresholds"]}
        assert found == {"default": 0.25, "answers": None, "prompts": None}
        scene.control(DisaggregationSet(model=NAME, disagg=DisaggConfig(policy="never")))
        scene.control(DisaggregationSet(model="other", disagg=DisaggConfig(policy="always")))
        assert (await post(scene, DISAGG))["policy"] == "never"
        scene.control(disagg(policy="isl_bounding"))
        assert (await post(scene, DISAGG))["policy"] == "isl_bounding"
        scene.control(disagg("aggregated"))
        assert await read(scene, DISAGG) == {"disaggregation": []}


async def test_changes_need_a_pool_of_the_model() -> None:
    async with with_pools(pool(model="other"), pool("apart", "decode", model="other")) as scene:
        assert await post(scene, BUSY) == {"model": NAME, **OFF}
        for path, body, status, code in (
            (BUSY, {DECODE: 0.5}, 503, "no_group"),
            (DISAGG, {}, 409, "not_disaggregated"),
            (DISAGG, {"policy": "never"}, 409, "not_disaggregated"),
        ):
            response = await scene.client.post(path, json={"model": NAME, **body})
            assert error(response) == (status, code)
        assert appended(scene, 2) == []


CHANGES: Sequence[tuple[str, dict[str, Any]]] = (
    (BUSY, {DECODE: 0.5}),
    (DISAGG, {"policy": "never"}),
    (f"{POOLS}/drain", {"pool": "short"}),
)


async def test_nothing_is_changed_while_no_router_has_placed_the_model() -> None:
    async with with_pools(is_placed=False) as scene:
        assert (await read(scene, BUSY), await read(scene, DISAGG)) == ({"thresholds": []}, {"disaggregation": []})
        assert (await read(scene, POOLS))["pools"] == []
        for path, body in CHANGES:
            response = await scene.client.post(path, json={"model": NAME, **body})
            assert error(response) == (503, "no_group")
        assert appended(scene, 0) == []


async def test_a_change_that_the_owner_cannot_read_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PoolDrainSet, "SINCE", 2)
    path, body = CHANGES[2]
    async with with_pools(*LISTED) as scene:
        assert error(await scene.client.post(path, json={"model": NAME, **body})) == (503, "router_outdated")
        assert appended(scene, 3) == []
        scene.group.pools.owner_events = lambda: 2
        await post(scene, path, **body)


async def test_a_log_that_cannot_be_written_is_a_503_and_is_still_read() -> None:
    async with with_pools(*LISTED, disagg()) as scene:
        scene.log.append_soon([Draft(CONTROL.name, 0, b"\xff")])
        before = [await read(scene, path) for path in (BUSY, DISAGG, POOLS)]
        assert scene.metric("forebay_ingress_undecodable_total 1.0"), "the record was skipped"
        scene.fail_commits()
        for path, body in CHANGES:
            response = await scene.client.post(path, json={"model": NAME, **body})
            assert error(response) == (503, "log_unavailable")
        assert [await read(scene, path) for path in (BUSY, DISAGG, POOLS)] == before
        scene.log.close()
        assert (await scene.client.get(BUSY)).status_code == 503


@given(seed=st.integers(0, 999), queries=st.lists(st.booleans(), max_size=12))
async def test_settings_equal_those_of_the_log_at_any_time(seed: int, queries: list[bool]) -> None:
    log, chance, expected = SqliteLog.open(None), random.Random(seed), PoolSettings()
    pools = PoolConfigurator(log, lambda: 0, lambda: None)
    for is_query in queries:
        event = setting(chance)
        log.append_soon([Draft(CONTROL.name, 0, encode(CONTROL, event))])
        expected.apply(event)
        if is_query:
            assert await pools.configured() == expected.in_effect()
    log.close()


@pytest.mark.parametrize("block_size", [4, 16])
async def test_prompts_are_hashed_with_the_block_size_of_the_pool(block_size: int) -> None:
    async with with_pools(block_size=None) as scene:
        payload = {"model": NAME, "prompt": [*range(100, 140)], "max_tokens": 1}
        refused = await scene.client.post("/v1/completions", json=payload)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_group")
        scene.control(msgspec.structs.replace(pool(model="other"), block_size=5))
        scene.control(msgspec.structs.replace(pool(), block_size=block_size))
        reply = scene.start("/v1/completions", payload)
        submitted = await scene.next_request()
        scene.end(submitted.request_id)
        assert (await reply).status_code == 200
        assert submitted.sequence_hashes == sequence_hashes(pack_u32(range(100, 140)), block_size)


def rows(rules: dict[str, Any]) -> dict[str, tuple[bool, Any]]:
    return {one["pool"]: (one["drained"], one["canary"]) for one in rules["pools"]}


async def test_rules_are_written_to_the_log_and_read_from_it() -> None:
    name = "Zoë"
    async with with_pools(*LISTED) as scene:
        row = {"role": "aggregated", "block_size": 4, "policy": "kv", "drained": False, "canary": None}
        pools = [{"pool": name, **row} for name in ("long", "short")]
        assert await read(scene, POOLS) == {"model": NAME, "retry": False, "grids": [], "pools": pools}
        shown = await post(scene, f"{POOLS}/routing", grids=[GRID], retry=True, operator=name)
        assert (shown["retry"], {**shown["grids"][0], **GRID}) == (True, shown["grids"][0])
        shown = await post(scene, f"{POOLS}/canary", pool="long", base="short", share=0.25, operator=name)
        assert rows(shown) == {"long": (False, {"base": "short", "share": 0.25}), "short": (False, None)}
        shown = await post(scene, f"{POOLS}/drain", pool="long", operator=name)
        assert rows(shown)["long"] == (True, {"base": "short", "share": 0.25})
        assert rows(await post(scene, f"{POOLS}/canary", pool="long"))["long"] == (True, None)
        shown = await post(scene, f"{POOLS}/drain", pool="long", drained=False)
        assert rows(shown)["long"] == (False, None)
        assert shown == await read(scene, POOLS)
        grid_pools = (GridPool(pool="short", priority=0), GridPool(pool="long", priority=1))
        grid = PoolGrid(isl_max=8_192, target_max_ms=1_000.0, pools=grid_pools, cells=(("short",), ("long",)))
        assert appended(scene, 3) == [
            PoolRoutingConfigured(model=NAME, routing=PoolRouting(grids=(grid,), retry=True), operator=name),
            PoolCanarySet(model=NAME, pool="long", base="short", share=0.25, operator=name),
            PoolDrainSet(model=NAME, pool="long", drained=True, operator=name),
            PoolCanarySet(model=NAME, pool="long"),
            PoolDrainSet(model=NAME, pool="long", drained=False),
        ]
        scene.control(PoolDrainSet(model=NAME, pool="short", drained=True))  # by another ingress
        scene.control(PoolDrainSet(model="other", pool="foreign", drained=True))
        scene.control(PoolRoutingConfigured(model="other", routing=PoolRouting(retry=False)))
        shown = await read(scene, POOLS)
        assert (rows(shown), shown["retry"]) == ({"long": (False, None), "short": (True, None)}, True)


async def policies(scene: Scene) -> dict[str, str]:
    return {one["pool"]: one["policy"] for one in (await read(scene, POOLS))["pools"]}


async def test_the_policy_of_a_pool_is_changed_and_reset() -> None:
    async with with_pools(*LISTED) as scene:
        pools = scene.group.pools
        pools.allowed_policies = lambda: ("mine.Policy",)
        await post(scene, f"{POOLS}/policy", pool="short", mode="round-robin", operator="alice")
        await post(scene, f"{POOLS}/policy", pool="long", mode="mine.Policy")
        changed = {"long": "mine.Policy", "short": "round-robin"}
        assert await policies(scene) == changed
        assert appended(scene, 3) == [
            PolicySet(model=NAME, pool="short", mode="round-robin", operator="alice"),
            PolicySet(model=NAME, pool="long", mode="mine.Policy"),
        ]
        pools.allowed_policies = lambda: None
        assert await policies(scene) == changed, "no owner has reset anything yet"
        pools.allowed_policies = lambda: ()
        assert await policies(scene) == {"long": "kv", "short": "round-robin"}, "an owner may not run it"
        pools.allowed_policies = lambda: ("mine.Policy",)
        assert await policies(scene) == {"long": "kv", "short": "round-robin"}, "a later owner does not set it again"
        scene.control(pool("short"))
        scene.control(PolicySet(model=NAME, pool="gone", mode="random"))
        assert await policies(scene) == {"long": "kv", "short": "kv"}, "a new configuration resets it"
