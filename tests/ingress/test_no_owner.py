"""Without an owner, requests are rejected at once with `Retry-After`."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from forebay.events.requests import RequestCancelled, RequestSubmitted
from forebay.ingress import ingress as ingress_module
from forebay.transport.base import Draft, LogFull
from tests.ingress.conftest import NAME, Scene
from tests.system import until

REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"model": NAME, "messages": [{"role": "user", "content": "Hello"}]}),
    ("/v1/completions", {"model": NAME, "prompt": "Hello"}),
    ("/v1/embeddings", {"model": NAME, "input": "Hello"}),
    ("/v1/route", {"model": NAME, "prompt": "Hello"}),
]


@pytest.mark.parametrize(("path", "body"), REQUESTS)
async def test_without_an_owner_a_request_is_rejected_at_once(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    def tokenised(*_: object, **__: object) -> list[int]:
        raise AssertionError("the text was tokenised before the request was refused")

    monkeypatch.setattr(scene.ingress.model, "encode", tokenised)
    scene.ingress.has_owner = lambda: False
    response = await scene.client.post(path, json=body)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "no_owner")
    assert int(response.headers["retry-after"]) >= 1
    assert scene.requests() == []


async def test_a_submitted_request_continues_without_an_owner(scene: Scene) -> None:
    pending = asyncio.create_task(scene.client.post("/v1/completions", json={"model": NAME, "prompt": "Hello"}))
    request = await scene.next_request()
    scene.ingress.has_owner = lambda: False
    output = scene.emit_text(request.request_id, "Hi")
    scene.end(request.request_id, output=output)
    assert (await pending).status_code == 200


async def test_an_unacknowledged_request_fails_and_is_cancelled(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingress_module, "ACKNOWLEDGED_S", 0.05)
    append, is_back, late = scene.log.append, asyncio.Event(), []

    async def away(drafts: Sequence[Draft]) -> list[int]:
        late.append(asyncio.create_task(append(drafts)))
        await is_back.wait()
        return await late[-1]

    monkeypatch.setattr(scene.log, "append", away)
    response = await scene.client.post("/v1/completions", json={"model": NAME, "prompt": "Hello"})
    assert (response.status_code, response.json()["error"]["code"]) == (503, "log_unavailable")
    assert "retry-after" in response.headers
    await until(lambda: scene.requests(RequestCancelled))
    (request,), (cancelled,) = scene.requests(RequestSubmitted), scene.requests(RequestCancelled)
    assert cancelled.request_id == request.request_id
    await asyncio.gather(*late)


async def test_a_full_log_rejects_one_request_and_keeps_the_others(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    pending = asyncio.create_task(scene.client.post("/v1/completions", json={"model": NAME, "prompt": "Hello"}))
    request = await scene.next_request()

    async def full(_: Sequence[Draft]) -> list[int]:
        raise LogFull("256 MiB wait")

    monkeypatch.setattr(scene.log, "append", full)
    response = await scene.client.post("/v1/completions", json={"model": NAME, "prompt": "Hello"})
    assert (response.status_code, response.json()["error"]["code"]) == (503, "log_unavailable")
    output = scene.emit_text(request.request_id, "Hi")
    scene.end(request.request_id, output=output)
    assert (await pending).status_code == 200
