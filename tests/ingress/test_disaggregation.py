"""GET and POST /disaggregation read and change settings on the log."""

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from forebay.events.codec import decode
from forebay.events.control import (
    BusyThresholdsSet,
    ControlEvent,
    DisaggConfig,
    DisaggregationSet,
    PoolConfigured,
    RouterConfig,
)
from forebay.events.topics import CONTROL
from tests.ingress.conftest import ADMIN_TOKEN, NAME, Scene, make_scene

PATH = "/disaggregation"
DEFAULTS = msgspec.structs.asdict(DisaggConfig())


def pool(name: str, role: Any, model: str = NAME, **disagg: Any) -> PoolConfigured:
    router = RouterConfig(disagg=DisaggConfig(**disagg))
    return PoolConfigured(pool=name, model=model, block_size=4, router=router, role=role)


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    async with make_scene(admin_token=ADMIN_TOKEN) as made:
        made.control(pool("answers", "decode", policy="classic"))
        made.control(pool("prompts", "prefill"))
        yield made


def on_the_log(scene: Scene) -> list[ControlEvent]:
    return [decode(CONTROL, record.value) for record in scene.log.records(CONTROL.name, 0, 0, 1000)]


async def post(scene: Scene, **body: Any) -> dict[str, Any]:
    response = await scene.client.post(PATH, json={"model": NAME, **body})
    assert response.status_code == 200, response.text
    reply: dict[str, Any] = response.json()
    return reply


async def test_disagg_missing_fields_keep_their_value_and_null_is_never_reached(scene: Scene) -> None:
    classic = {"model": NAME, **DEFAULTS, "policy": "classic", "pool": "answers"}
    assert await post(scene) == classic
    assert len(on_the_log(scene)) == 2, "asking changes nothing"
    changed = await post(scene, max_local_prefill_length=10, prefill_busy_threshold=None)
    assert changed == {**classic, "max_local_prefill_length": 10, "prefill_busy_threshold": None}
    assert await post(scene, enforce=True, operator="alice") == {**changed, "enforce": True}
    last = on_the_log(scene)[-1]
    assert isinstance(last, DisaggregationSet)
    expected = DisaggConfig(policy="classic", max_local_prefill_length=10, prefill_busy_threshold=None, enforce=True)
    assert (last.model, last.disagg, last.operator) == (NAME, expected, "alice")
    listed = (await scene.client.get(PATH)).json()
    assert listed == {"disaggregation": [{**changed, "enforce": True}]}, "as POST answers"


async def test_disagg_changes_by_another_ingress_or_a_router_apply(scene: Scene) -> None:
    scene.control(DisaggregationSet(model=NAME, disagg=DisaggConfig(policy="never")))
    scene.control(DisaggregationSet(model="other", disagg=DisaggConfig(policy="always")))
    scene.control(BusyThresholdsSet(model=NAME, thresholds=RouterConfig().busy))
    assert (await post(scene))["policy"] == "never"
    scene.control(pool("answers", "decode", policy="isl_bounding"))
    assert (await post(scene))["policy"] == "isl_bounding"
    scene.control(pool("answers", "aggregated"))
    assert (await scene.client.get(PATH)).json() == {"disaggregation": []}


@pytest.mark.parametrize(
    ("body", "status", "param", "code"),
    [
        ({"model": "gpt", "policy": "never"}, 404, "model", "model_not_found"),
        ({"policy": "never"}, 400, "model", "invalid_value"),
        ({"model": NAME, "policy": "sometimes"}, 400, "policy", "invalid_value"),
        ({"model": NAME, "max_local_prefill_length": -1}, 400, "max_local_prefill_length", "invalid_value"),
        ({"model": NAME, "eff_isl_threshold": 1 << 63}, 400, "eff_isl_threshold", "invalid_value"),
        ({"model": NAME, "eff_isl_ratio_threshold": 1.1}, 400, "eff_isl_ratio_threshold", "invalid_value"),
        ({"model": NAME, "decode_busy_threshold": -0.1}, 400, "decode_busy_threshold", "invalid_value"),
        ({"model": NAME, "decode_busy_threshold": 1.1}, 400, "decode_busy_threshold", "invalid_value"),
        ({"model": NAME, "max_prefill_queue_size": 0}, 400, "max_prefill_queue_size", "invalid_value"),
        ({"model": NAME, "enforce": "yes"}, 400, "enforce", "invalid_value"),
        ({"model": NAME, "limit": 1}, 400, "limit", "unknown_parameter"),
    ],
)
async def test_disagg_invalid_bodies_are_rejected_by_field_name(
    scene: Scene, body: dict[str, Any], status: int, param: str, code: str
) -> None:
    response = await scene.client.post(PATH, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (status, param, code), error
    assert len(on_the_log(scene)) == 2


async def test_disagg_changes_are_rejected_for_aggregated_pools() -> None:
    async with make_scene(admin_token=ADMIN_TOKEN) as scene:
        scene.control(pool("default", "aggregated"))
        scene.control(pool("apart", "decode", model="other"))
        for body in ({}, {"policy": "never"}):
            response = await scene.client.post(PATH, json={"model": NAME, **body})
            assert (response.status_code, response.json()["error"]["code"]) == (409, "not_disaggregated")
        assert len(on_the_log(scene)) == 2


async def test_disagg_changes_are_rejected_while_no_router_has_placed_the_model() -> None:
    async with make_scene(admin_token=ADMIN_TOKEN, find_partition=lambda: None) as scene:
        assert (await scene.client.get(PATH)).json() == {"disaggregation": []}
        assert (await scene.client.post(PATH, json={"model": NAME, "policy": "never"})).status_code == 503


async def test_disagg_a_log_that_cannot_be_written_is_a_503(scene: Scene) -> None:
    await post(scene)
    scene.fail_commits()
    response = await scene.client.post(PATH, json={"model": NAME, "policy": "never"})
    assert (response.status_code, response.json()["error"]["code"]) == (503, "log_unavailable")
    assert (await post(scene))["policy"] == "classic"


async def test_disagg_without_the_admin_api_the_path_is_unknown() -> None:
    async with make_scene(admin_token="") as scene:
        assert (await scene.client.get(PATH)).status_code == 404
