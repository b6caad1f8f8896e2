"""The access log: one record per request, also if its client disconnects or it fails."""

import asyncio
import logging
from typing import Any

import httpx
import pytest

from forebay.ingress.access_log import CLIENT_CLOSED, INCOMPLETE, LOGGER
from tests.ingress.conftest import NAME, Scene
from tests.system import until

PATH = "/v1/completions"
BODY = {"model": NAME, "prompt": "hi", "max_tokens": 9}


def fields(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [record.__dict__["fields"] for record in caplog.records if record.name == LOGGER]


async def test_a_stream_that_fails_is_logged_with_its_error(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    async with scene.served() as (port, _), httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        pending = asyncio.create_task(client.post(PATH, json={**BODY, "stream": True}))
        request = await scene.next_request()
        scene.emit_text(request.request_id, " good")
        scene.ingress.replies.interrupt_all("the log is gone")
        await pending
        await until(lambda: len(fields(caplog)) == 1)
    (found,) = fields(caplog)
    assert (found["error"], found["request_id"], found["model"]) == ("log_unavailable", request.request_id, NAME)
    assert found["prompt_tokens"] > 0


@pytest.mark.parametrize("started", [False, True])
async def test_a_client_that_disconnects_is_logged(
    scene: Scene, caplog: pytest.LogCaptureFixture, *, started: bool
) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    async with scene.served() as (port, _), httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        stream = client.stream("POST", PATH, json={**BODY, "stream": True})
        opening = asyncio.create_task(stream.__aenter__())
        request = await scene.next_request()
        if started:
            scene.emit_text(request.request_id, " good")
            await (await opening).aclose()
        else:
            opening.cancel()
        await until(lambda: len(fields(caplog)) == 1)
    (found,) = fields(caplog)
    if started:
        assert (found["status"], found["error"], found["worker"]) == (200, INCOMPLETE, "w1")
    else:
        assert found["status"] == CLIENT_CLOSED
        assert "worker" not in found


async def test_control_characters_of_a_path_are_escaped_and_probes_are_not_logged(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    async with scene.served() as (port, _), httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        for path in ("/ready", "/live", "/metrics", "/v1/a%0Ab"):
            await client.get(path)
        await until(lambda: len(fields(caplog)) == 1)
    assert fields(caplog)[0]["path"] == "/v1/a\\nb"
