"""Endpoints of a console on recordings, compared with the code of `forebay replay at`, `explain` and `status`."""

import asyncio
import json
import random
import shutil
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from forebay.replay.at import seek_record, seek_time
from forebay.replay.explain.explain import explain
from forebay.replay.states import States
from forebay.replay.status import read_status
from forebay.transport.sqlite.log import SqliteLog
from tests.cli.logs import invoke
from tests.console.serving import PATIENCE_S, body, comparable, console_client, console_settings, error, plain

LOGS = Path(__file__).parents[1] / "logs"
SEED = 20_261_123
MOMENTS = 50

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copy(LOGS / "lost-workers.rec", tmp_path_factory.mktemp("console")))


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client(log: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with console_client(console_settings(log)) as found:
        yield found


@pytest.mark.slow
async def test_fifty_random_moments_equal_replay_at(client: httpx.AsyncClient, log: Path) -> None:
    state = (await body(client, "/v1/console"))["state"]
    draw = random.Random(SEED)
    with closing(SqliteLog.open(log, readonly=True)) as opened:
        for number in range(MOMENTS):
            if number % 2:
                at_us = draw.randint(state["begin_us"], state["end_us"])
                params, position = {"at_us": at_us}, await seek_time(States(opened, 0), at_us)
            else:
                offset = draw.randrange(state["begin_offset"], state["end_offset"])
                params, position = {"offset": offset}, await seek_record(States(opened, 0), offset)
            found = await body(client, "/v1/console/moment", **params)
            assert comparable(found) == comparable(await position.moment()), (SEED, number, params)


async def test_the_newest_status_equals_forebay_status(client: httpx.AsyncClient, log: Path) -> None:
    with closing(SqliteLog.open(log, readonly=True)) as opened:
        expected = plain(await read_status(opened, 0, "model"))
    assert await body(client, "/v1/status") == expected
    fleet = await body(client, "/v1/console/fleet")
    assert fleet["status"] == expected


async def test_the_fleet_of_the_past_has_a_worker_that_was_lost_later(client: httpx.AsyncClient) -> None:
    markers = (await body(client, "/v1/console/markers"))["markers"]
    lost = next(one for one in markers if one["kind"] == "worker_lost")
    before = await body(client, "/v1/console/fleet", at_us=lost["at_us"] - 1)
    after = await body(client, "/v1/console/fleet", at_us=lost["at_us"])
    names = [{one["worker_id"] for one in moment["status"]["workers"]} for moment in (before, after)]
    (gone,) = names[0] - names[1]
    assert gone in lost["text"]
    compared = await body(client, "/v1/console/compare", a_us=lost["at_us"], b_us=lost["at_us"] - 1)
    assert any(change["subject"] == gone for change in compared["changes"]), "the earlier moment is a, in any order"


async def test_requests_are_explained_as_by_replay_explain(client: httpx.AsyncClient, log: Path) -> None:
    page = await body(client, "/v1/console/requests", limit=500)
    assert page["next_before"] is None
    with closing(SqliteLog.open(log, readonly=True)) as opened:
        for row in page["requests"]:
            found = await body(client, f"/v1/requests/{row['request_id']}/explain", number=row["number"])
            expected = plain(await explain(States(opened, 0), row["request_id"]))
            assert found["state"] == row["state"]
            del found["derived_from"], expected["derived_from"]  # a checkpoint may be nearer than a snapshot
            assert found == expected
            assert await body(client, f"/v1/console/requests/{row['number']}") == row


async def test_pages_of_requests_have_every_request_once(client: httpx.AsyncClient) -> None:
    whole = (await body(client, "/v1/console/requests", limit=500))["requests"]
    paged: list[Any] = []
    before: dict[str, int] = {}
    while True:
        page = await body(client, "/v1/console/requests", limit=5, **before)
        paged += page["requests"]
        if page["next_before"] is None:
            break
        before = {"before": page["next_before"]}
    assert paged == whole
    failed = await body(client, "/v1/console/requests", failed=True, limit=500)
    assert failed["requests"] == [one for one in whole if one["state"] in {"failed", "rejected", "aborted"}]


async def test_what_if_equals_replay_diff(client: httpx.AsyncClient, log: Path) -> None:
    job = (await client.post("/v1/console/what-if", json={"policy": "round-robin"})).json()
    async with asyncio.timeout(PATIENCE_S):
        while job["state"] == "running":
            await asyncio.sleep(0.05)
            job = await body(client, f"/v1/console/what-if/{job['job']}")
    assert job["state"] == "done", job
    printed = await asyncio.to_thread(invoke, "replay", "diff", log, "--policy", "round-robin", "--json")
    assert job["report"] == json.loads(printed.stdout)
    assert job["report"]["moved"]["moved"] > 0


async def test_a_what_if_needs_a_change(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/console/what-if", json={"from_us": 0})
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert message == "nothing is changed; give another policy, or at least one setting in sets"


async def test_errors_name_the_value_and_the_remedy(client: httpx.AsyncClient) -> None:
    assert await error(client, "/v1/console/moment", at_us=1) == (
        404,
        "the recording begins at 2025-06-15T15:06:40.010000+00:00 on its owner's clock, after the requested time; give"
        " a later time",
    )
    status, message = await error(client, "/v1/console/requests", state="lost")
    assert (status, "unknown state 'lost'" in message) == (400, True)
    status, message = await error(client, "/v1/console/series", from_us=2, to_us=1)
    assert (status, message) == (400, "to_us is 1; it must be after from_us, which is 2")
    huge = 1 << 63
    for path in ("fleet", "moment", "requests", "scaling"):
        assert (await error(client, f"/v1/console/{path}", at_us=huge))[0] == 400
    assert (await error(client, "/v1/console/series", from_us=1, to_us=huge))[0] == 400
    assert (await error(client, f"/v1/console/requests/{huge}"))[0] == 400
    status, message = await error(client, "/v1/console/requests", limit="many")
    assert (status, message.startswith("limit is 'many': ")) == (400, True)
    assert (await error(client, "/v1/console/requests/999999"))[0] == 404
    assert (await error(client, "/v1/console/records", topic="decisions", offset=999_999))[0] == 404
    assert (await error(client, "/v1/requests/nobody/explain"))[0] == 404
    assert (await error(client, "/v1/console/what-if/nothing"))[0] == 404
    rows = (await body(client, "/v1/console/requests", limit=2))["requests"]
    path = f"/v1/requests/{rows[0]['request_id']}/explain"
    for number in (rows[1]["number"], 999_999):
        status, message = await error(client, path, number=number)
        assert (status, f"was not submitted at offset {number}" in message) == (404, True)


async def test_custom_policies_need_an_option(client: httpx.AsyncClient) -> None:
    for wanted in ({"policy": "os.system"}, {"sets": ["mode=os.system"]}, {"sets": ['default:mode="os.system"']}):
        response = await client.post("/v1/console/what-if", json=wanted)
        assert (response.status_code, response.json()["error"]["code"]) == (400, "policy_not_allowed")
    response = await client.post("/v1/console/what-if", json={"unknown": 1})
    assert response.status_code == 400


async def test_every_route_but_the_page_needs_the_token(client: httpx.AsyncClient) -> None:
    async def without_token(path: str, **headers: str) -> httpx.Response:
        request = client.build_request("GET", path)
        del request.headers["authorization"]
        request.headers.update(headers)
        return await client.send(request)

    paths = [route for route in (await body(client, "/openapi.json"))["paths"] if route.startswith("/v1")]
    assert len(paths) > 10
    for path in paths:
        assert (await without_token(path)).status_code == 401, path
    assert (await without_token("/v1/console", authorization="Bearer wrong")).status_code == 401
    page = await without_token("/")
    assert (page.status_code, "default-src 'none'" in page.headers["content-security-policy"]) == (200, True)
    assert page.headers["x-accel-buffering"] == "no"
    assert (await client.get("/v1/console", headers={"origin": "https://evil.example"})).status_code == 403


async def test_a_record_is_shown_as_by_topics_tail(client: httpx.AsyncClient, log: Path) -> None:
    found = await body(client, "/v1/console/records", topic="decisions", offset=0)
    printed = await asyncio.to_thread(invoke, "topics", "tail", log, "decisions", "--offset", "0", "-n", "1")
    assert {**found, **json.loads(printed.stdout.splitlines()[0])} == found


async def test_an_explanation_has_changes_if_they_are_requested(client: httpx.AsyncClient, log: Path) -> None:
    row = (await body(client, "/v1/console/requests"))["requests"][0]
    path, number = f"/v1/requests/{row['request_id']}/explain", row["number"]
    found = await body(client, path, number=number, changes=True)
    with closing(SqliteLog.open(log, readonly=True)) as opened:
        expected = await explain(States(opened, 0), found["request_id"], with_changes=True)
    assert found["routings"] == plain(expected.routings)
    assert all("changes" not in routing for routing in (await body(client, path, number=number))["routings"])
