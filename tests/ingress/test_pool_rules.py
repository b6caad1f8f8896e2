"""GET /v1/pools and POST /v1/pools/... read and change the rules for the choice of pools on the log."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from forebay.events.codec import decode
from forebay.events.control import ControlEvent, PolicySet, PoolConfigured, RouterConfig
from forebay.events.pools import GridPool, PoolCanarySet, PoolDrainSet, PoolGrid, PoolRouting, PoolRoutingConfigured
from forebay.events.topics import CONTROL
from tests.ingress.conftest import ADMIN_TOKEN, MODULE_LOOP, NAME, Scene, make_scene

GRID = {
    "isl_max": 8_192,
    "target_max_ms": 1_000,
    "pools": [{"pool": "short", "priority": 0}, {"pool": "long", "priority": 1}],
    "cells": [["short"], ["long"]],
}


def pool(name: str, role: Any = "aggregated", model: str = NAME) -> PoolConfigured:
    return PoolConfigured(pool=name, model=model, block_size=4, router=RouterConfig(), role=role)


@asynccontextmanager
async def scene_with_pools() -> AsyncIterator[Scene]:
    async with make_scene(admin_token=ADMIN_TOKEN) as made:
        made.control(pool("short"))
        made.control(pool("long"))
        made.control(pool("foreign", model="other"))
        yield made


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    async with scene_with_pools() as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_scene() -> AsyncIterator[Scene]:
    async with scene_with_pools() as made:
        yield made


def appended(scene: Scene) -> list[ControlEvent]:
    """Return the events after the configuration of the pools, without their times."""
    records = scene.log.records(CONTROL.name, 0, 3, 1000)
    return [msgspec.structs.replace(decode(CONTROL, record.value), at_us=0) for record in records]


async def post(scene: Scene, rule: str, **body: Any) -> dict[str, Any]:
    response = await scene.client.post(f"/v1/pools/{rule}", json={"model": NAME, **body})
    assert response.status_code == 200, response.text
    reply: dict[str, Any] = response.json()
    return reply


async def listed(scene: Scene) -> dict[str, Any]:
    response = await scene.client.get("/v1/pools")
    assert response.status_code == 200, response.text
    reply: dict[str, Any] = response.json()
    return reply


def rows(rules: dict[str, Any]) -> dict[str, tuple[bool, Any]]:
    return {one["pool"]: (one["drained"], one["canary"]) for one in rules["pools"]}


async def test_rules_are_written_to_the_log_and_read_from_it(scene: Scene) -> None:
    assert await listed(scene) == {
        "model": NAME,
        "retry": False,
        "grids": [],
        "pools": [
            {
                "pool": name,
                "role": "aggregated",
                "block_size": 4,
                "policy": "kv",
                "drained": False,
                "canary": None,
            }
            for name in ("long", "short")
        ],
    }
    shown = await post(scene, "routing", grids=[GRID], retry=True)
    assert (shown["retry"], {**shown["grids"][0], **GRID}) == (True, shown["grids"][0])
    shown = await post(scene, "canary", pool="long", base="short", share=0.25)
    assert rows(shown) == {"long": (False, {"base": "short", "share": 0.25}), "short": (False, None)}
    shown = await post(scene, "drain", pool="long")
    assert rows(shown)["long"] == (True, {"base": "short", "share": 0.25})
    shown = await post(scene, "canary", pool="long")
    assert rows(shown)["long"] == (True, None)
    shown = await post(scene, "drain", pool="long", drained=False)
    assert rows(shown)["long"] == (False, None)
    assert shown == await listed(scene)
    pools = (GridPool(pool="short", priority=0), GridPool(pool="long", priority=1))
    grid = PoolGrid(isl_max=8_192, target_max_ms=1_000.0, pools=pools, cells=(("short",), ("long",)))
    assert appended(scene) == [
        PoolRoutingConfigured(model=NAME, routing=PoolRouting(grids=(grid,), retry=True)),
        PoolCanarySet(model=NAME, pool="long", base="short", share=0.25),
        PoolDrainSet(model=NAME, pool="long", drained=True),
        PoolCanarySet(model=NAME, pool="long"),
        PoolDrainSet(model=NAME, pool="long", drained=False),
    ]


async def test_the_policy_of_a_pool_is_changed(scene: Scene) -> None:
    scene.ingress.pools.allowed_policies = lambda: ("mine.Policy",)
    shown = await post(scene, "policy", pool="long", mode="round-robin", operator="alice")
    assert {one["pool"]: one["policy"] for one in shown["pools"]} == {"long": "round-robin", "short": "kv"}
    await post(scene, "policy", pool="long", mode="mine.Policy")
    assert appended(scene) == [
        PolicySet(model=NAME, pool="long", mode="round-robin", operator="alice"),
        PolicySet(model=NAME, pool="long", mode="mine.Policy"),
    ]
    scene.control(pool("long"))
    scene.control(PolicySet(model=NAME, pool="gone", mode="random"))
    assert {one["policy"] for one in (await listed(scene))["pools"]} == {"kv"}, "a new configuration resets it"


async def test_a_takeover_resets_a_policy_that_the_owner_may_not_run(scene: Scene) -> None:
    scene.ingress.pools.allowed_policies = lambda: ("mine.Policy",)
    await post(scene, "policy", pool="long", mode="mine.Policy")
    await post(scene, "policy", pool="short", mode="random")

    async def policies() -> dict[str, str]:
        return {one["pool"]: one["policy"] for one in (await listed(scene))["pools"]}

    scene.ingress.pools.allowed_policies = lambda: None
    assert await policies() == {"long": "mine.Policy", "short": "random"}, "no owner has reset anything yet"
    scene.ingress.pools.allowed_policies = lambda: ()
    assert await policies() == {"long": "kv", "short": "random"}
    scene.ingress.pools.allowed_policies = lambda: ("mine.Policy",)
    assert await policies() == {"long": "kv", "short": "random"}, "a later owner does not set it again"


async def test_every_rule_contains_its_operator(scene: Scene) -> None:
    name = "Zoë"
    await post(scene, "routing", grids=[GRID], operator=name)
    await post(scene, "canary", pool="long", base="short", share=0.25, operator=name)
    await post(scene, "drain", pool="long", operator=name)
    assert [getattr(event, "operator", None) for event in appended(scene)] == [name] * 3


async def test_rules_of_another_ingress_and_another_model_are_told_apart(scene: Scene) -> None:
    scene.control(PoolDrainSet(model=NAME, pool="short", drained=True))
    scene.control(PoolDrainSet(model="other", pool="foreign", drained=True))
    scene.control(PoolRoutingConfigured(model="other", routing=PoolRouting(retry=True)))
    shown = await listed(scene)
    assert (rows(shown), shown["retry"]) == ({"long": (False, None), "short": (True, None)}, False)


@MODULE_LOOP
@pytest.mark.parametrize(
    ("rule", "body", "status", "param", "code", "message"),
    [
        ("drain", {"pool": "shot"}, 404, "pool", "unknown_pool", "unknown pool 'shot'; did you mean short?"),
        ("drain", {"pool": "foreign"}, 404, "pool", "unknown_pool", "unknown pool 'foreign'; pools are: long, short"),
        ("canary", {"pool": "x", "base": "short"}, 404, "pool", "unknown_pool", None),
        ("canary", {"pool": "long", "base": "shot"}, 404, "base", "unknown_pool", None),
        ("canary", {"pool": "long", "base": "long"}, 400, "base", "invalid_value", None),
        ("canary", {"pool": "long", "base": "short", "share": 1.5}, 400, "share", "invalid_value", None),
        ("canary", {"pool": "long", "basis": "short"}, 400, "basis", "unknown_parameter", None),
        ("policy", {"pool": "shot", "mode": "kv"}, 404, "pool", "unknown_pool", None),
        (
            "policy",
            {"pool": "short", "mode": "round"},
            404,
            "mode",
            "unknown_policy",
            "unknown policy 'round'; did you mean round-robin?",
        ),
        (
            "policy",
            {"pool": "short", "mode": "their.Policy"},
            404,
            "mode",
            "unknown_policy",
            "the policy 'their.Policy' is not allowed on the router; its operator can start it with --allow-policy and"
            " the path of the class",
        ),
        ("policy", {"pool": "short"}, 400, "mode", "invalid_value", None),
        ("drain", {"pool": "short", "operator": "x" * 257}, 400, "operator", "invalid_value", None),
        ("drain", {"pool": "short", "operator": "a\n"}, 400, "operator", "invalid_value", None),
        ("drain", {"pool": ""}, 400, "pool", "invalid_value", None),
        ("drain", {"model": "gpt", "pool": "short"}, 404, "model", "model_not_found", None),
        ("routing", {"grids": [{**GRID, "role": "decode"}]}, 404, "grids[0].pools", "unknown_pool", None),
        (
            "routing",
            {"grids": [{**GRID, "isl_max": 0}]},
            400,
            "grids",
            "invalid_value",
            "grids[0]: isl_max is 0; it must be above isl_min, 0",
        ),
        (
            "routing",
            {"grids": [{**GRID, "cells": [["short"], ["lng"]]}]},
            400,
            "grids",
            "invalid_value",
            "grids[0]: the pool 'lng' of a cell or override is missing in pools: short, long",
        ),
        (
            "routing",
            {"grids": [{**GRID, "isl_mx": 5}]},
            400,
            "grids",
            "invalid_value",
            "grids[0]: unknown parameter 'isl_mx'; did you mean isl_max?",
        ),
        ("routing", {"grids": [GRID, GRID]}, 400, "grids", "invalid_value", "duplicate grid for the role aggregated"),
    ],
)
async def test_invalid_rules_are_rejected_by_name_and_change_nothing(
    shared_scene: Scene, rule: str, body: dict[str, Any], status: int, param: str, code: str, message: str | None
) -> None:
    response = await shared_scene.client.post(f"/v1/pools/{rule}", json={"model": NAME, **body})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (status, param, code), error
    assert message in (None, error["message"])
    assert appended(shared_scene) == []


async def test_rules_are_not_changed_while_no_router_has_placed_the_model() -> None:
    async with make_scene(admin_token=ADMIN_TOKEN, find_partition=lambda: None) as scene:
        assert (await listed(scene))["pools"] == []
        response = await scene.client.post("/v1/pools/drain", json={"model": NAME, "pool": "short"})
        assert (response.status_code, response.json()["error"]["code"]) == (503, "no_group")


async def test_a_log_that_cannot_be_written_is_a_503(scene: Scene) -> None:
    await listed(scene)
    scene.fail_commits()
    response = await scene.client.post("/v1/pools/drain", json={"model": NAME, "pool": "short"})
    assert (response.status_code, response.json()["error"]["code"]) == (503, "log_unavailable")
    assert rows(await listed(scene))["short"] == (False, None)
