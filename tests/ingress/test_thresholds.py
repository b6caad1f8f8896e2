"""GET and POST /busy_threshold read and change settings on the log."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.block_hashes import sequence_hashes
from forebay.events.base import pack_u32
from forebay.events.codec import decode, encode
from forebay.events.control import BusyThresholds, BusyThresholdsSet, ControlEvent, PoolConfigured, RouterConfig
from forebay.events.topics import CONTROL
from forebay.ingress.http.pool_settings import PoolConfigurator
from forebay.transport.base import Draft
from forebay.transport.sqlite.log import SqliteLog
from tests.ingress.conftest import ADMIN_TOKEN, NAME, Scene, make_scene

PATH = "/busy_threshold"
DECODE, PREFILL, SHARE = BusyThresholds.__struct_fields__
OFF = dict.fromkeys(BusyThresholds.__struct_fields__)


def pool(name: str = "default", model: str = NAME, **busy: Any) -> PoolConfigured:
    return PoolConfigured(pool=name, model=model, block_size=4, router=RouterConfig(busy=BusyThresholds(**busy)))


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    async with make_scene(admin_token=ADMIN_TOKEN) as made:
        made.control(pool(active_decode_blocks_threshold=0.5))
        yield made


def on_the_log(scene: Scene) -> list[ControlEvent]:
    return [decode(CONTROL, record.value) for record in scene.log.records(CONTROL.name, 0, 0, 1000)]


async def post(scene: Scene, **body: Any) -> dict[str, Any]:
    response = await scene.client.post(PATH, json={"model": NAME, **body})
    assert response.status_code == 200, response.text
    reply: dict[str, Any] = response.json()
    return reply


async def test_missing_fields_keep_their_value_and_null_disables(scene: Scene) -> None:
    assert await post(scene) == {"model": NAME, **OFF, DECODE: 0.5}
    assert len(on_the_log(scene)) == 1
    assert await post(scene, **{PREFILL: 1000}) == {"model": NAME, DECODE: 0.5, PREFILL: 1000, SHARE: None}
    assert await post(scene, **{DECODE: None, SHARE: 2}) == {"model": NAME, DECODE: None, PREFILL: 1000, SHARE: 2}
    last = on_the_log(scene)[-1]
    assert isinstance(last, BusyThresholdsSet)
    expected = BusyThresholds(active_prefill_tokens_threshold=1000, active_prefill_tokens_threshold_frac=2)
    assert (last.model, last.thresholds) == (NAME, expected)
    listed = (await scene.client.get(PATH)).json()
    assert listed == {"thresholds": [{"model": NAME, "pool": "default", DECODE: None, PREFILL: 1000, SHARE: 2}]}


async def test_a_change_contains_its_operator(scene: Scene) -> None:
    await post(scene, operator="alice")
    assert len(on_the_log(scene)) == 1, "no setting was changed"
    await post(scene, **{PREFILL: 1000}, operator="alice")
    assert [getattr(event, "operator", None) for event in on_the_log(scene)[1:]] == ["alice"]


async def test_changes_by_another_ingress_or_a_router_apply(scene: Scene) -> None:
    await post(scene, **{DECODE: 0.9})
    scene.control(BusyThresholdsSet(model=NAME, thresholds=BusyThresholds(active_prefill_tokens_threshold=7)))
    assert await post(scene) == {"model": NAME, **OFF, PREFILL: 7}
    scene.control(pool(active_decode_blocks_threshold=0.25))
    assert await post(scene) == {"model": NAME, **OFF, DECODE: 0.25}


@pytest.mark.parametrize(
    ("body", "status", "param", "code"),
    [
        ({"model": "gpt", DECODE: 0.5}, 404, "model", "model_not_found"),
        ({DECODE: 0.5}, 400, "model", "invalid_value"),
        ({"model": NAME, DECODE: 1.5}, 400, DECODE, "invalid_value"),
        ({"model": NAME, DECODE: -0.1}, 400, DECODE, "invalid_value"),
        ({"model": NAME, PREFILL: 1.5}, 400, PREFILL, "invalid_value"),
        ({"model": NAME, PREFILL: 1 << 63}, 400, PREFILL, "invalid_value"),
        ({"model": NAME, SHARE: "1"}, 400, SHARE, "invalid_value"),
        ({"model": NAME, "threshold": 1}, 400, "threshold", "unknown_parameter"),
        (b'{"model": "test-model", "active_prefill_tokens_threshold_frac": NaN}', 400, SHARE, "invalid_value"),
        (b"{", 400, None, "invalid_json"),
    ],
)
async def test_invalid_bodies_are_rejected_by_field_name(
    scene: Scene, body: Any, status: int, param: str | None, code: str
) -> None:
    payload = {"content": body} if isinstance(body, bytes) else {"json": body}
    response = await scene.client.post(PATH, **payload)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (status, param, code), error
    assert len(on_the_log(scene)) == 1


async def test_changes_are_rejected_while_no_pool_serves_the_model() -> None:
    async with make_scene(admin_token=ADMIN_TOKEN) as scene:
        scene.control(pool(model="other"))
        assert (await scene.client.get(PATH)).json()["thresholds"] == [{"model": "other", "pool": "default", **OFF}]
        assert await post(scene) == {"model": NAME, **OFF}
        response = await scene.client.post(PATH, json={"model": NAME, DECODE: 0.5})
        assert (response.status_code, response.json()["error"]["code"]) == (503, "no_group")


async def test_changes_are_rejected_while_no_router_has_placed_the_model() -> None:
    async with make_scene(admin_token=ADMIN_TOKEN, find_partition=lambda: None) as scene:
        assert (await scene.client.get(PATH)).json() == {"thresholds": []}
        assert (await scene.client.post(PATH, json={"model": NAME, DECODE: 0.5})).status_code == 503
        assert on_the_log(scene) == []


async def test_without_the_admin_api_the_path_is_unknown() -> None:
    async with make_scene(admin_token="") as scene:
        for response in (await scene.client.get(PATH), await scene.client.post(PATH, json={"model": NAME})):
            assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")


async def test_undecodable_records_are_counted_and_skipped(scene: Scene) -> None:
    scene.log.append_soon([Draft(CONTROL.name, 0, b"\xff")])
    assert (await post(scene))[DECODE] == 0.5
    assert scene.metric("forebay_ingress_undecodable_total 1.0")


async def test_a_log_that_cannot_be_written_is_a_503_and_is_still_read(scene: Scene) -> None:
    await post(scene)
    scene.fail_commits()
    response = await scene.client.post(PATH, json={"model": NAME, DECODE: 0.1})
    assert (response.status_code, response.json()["error"]["code"]) == (503, "log_unavailable")
    assert (await post(scene))[DECODE] == 0.5
    scene.log.close()
    assert (await scene.client.get(PATH)).status_code == 503


BUSY = st.builds(
    BusyThresholds,
    active_decode_blocks_threshold=st.none() | st.floats(0, 1),
    active_prefill_tokens_threshold=st.none() | st.integers(0, 9),
)
MODELS = st.sampled_from("ab")
EVENTS = st.one_of(
    st.builds(BusyThresholdsSet, model=MODELS, thresholds=BUSY),
    st.builds(
        PoolConfigured,
        pool=st.sampled_from("pq"),
        model=MODELS,
        block_size=st.just(4),
        router=st.builds(RouterConfig, busy=BUSY),
    ),
)


@given(steps=st.lists(st.tuples(EVENTS, st.booleans()), max_size=12))
async def test_thresholds_equal_those_of_the_log_at_any_time(steps: list[tuple[ControlEvent, bool]]) -> None:
    log = SqliteLog.open(None)
    pools = PoolConfigurator(log, lambda: 0, lambda: None)
    written: list[ControlEvent] = []
    for event, is_query in steps:
        log.append_soon([Draft(CONTROL.name, 0, encode(CONTROL, event))])
        written.append(event)
        if is_query:
            found = (await pools.configured()).values()
            assert [(one.pool, one.model, one.router.busy) for one in found] == naive(written)
    log.close()


def naive(events: list[ControlEvent]) -> list[tuple[str, str, BusyThresholds]]:
    """Return for each pool the thresholds of the newest record about the pool or its model."""
    found = []
    for name in "pq":
        at = max(
            (at for at, one in enumerate(events) if isinstance(one, PoolConfigured) and one.pool == name), default=-1
        )
        if at >= 0:
            configured = events[at]
            assert isinstance(configured, PoolConfigured)
            later = [
                one.thresholds
                for one in events[at:]
                if isinstance(one, BusyThresholdsSet) and one.model == configured.model
            ]
            found.append((name, configured.model, later[-1] if later else configured.router.busy))
    return found


@pytest.mark.parametrize("block_size", [4, 16])
async def test_prompts_are_hashed_with_the_block_size_of_the_pool(block_size: int) -> None:
    async with make_scene(admin_token=ADMIN_TOKEN, block_size=None) as scene:
        prompt = list(range(100, 140))
        payload = {"model": NAME, "prompt": prompt, "max_tokens": 1}
        refused = await scene.client.post("/v1/completions", json=payload)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_group")
        scene.control(msgspec.structs.replace(pool(model="other"), block_size=5))
        scene.control(msgspec.structs.replace(pool(), block_size=block_size))
        reply = asyncio.create_task(scene.client.post("/v1/completions", json=payload))
        submitted = await scene.next_request()
        scene.end(submitted.request_id)
        assert (await reply).status_code == 200
        assert submitted.sequence_hashes == sequence_hashes(pack_u32(prompt), block_size)
