"""Requests without an owner, with a log that is late or full, and the incarnation of their ingress."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from forebay.events.requests import RequestCancelled, RequestSubmitted
from forebay.ingress import ingress as ingress_module
from forebay.transport.base import Draft, LogFull
from tests.ingress.conftest import NAME, Scene, make_scene
from tests.system import until

REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"model": NAME, "messages": [{"role": "user", "content": "Hello"}]}),
    ("/v1/completions", {"model": NAME, "prompt": "Hello"}),
    ("/v1/embeddings", {"model": NAME, "input": "Hello"}),
    ("/v1/route", {"model": NAME, "prompt": "Hello"}),
]


@pytest.mark.parametrize(("path", "body"), REQUESTS[:3])
async def test_a_request_names_its_ingress(path: str, body: dict[str, Any]) -> None:
    """So it can be aborted when the ingress is lost."""
    async with make_scene(incarnation="incarnation-1") as scene:
        response = scene.start(path, body)
        request = await scene.next_request()
        assert request.ingress_incarnation == "incarnation-1"
        scene.refuse(request.request_id, 503, "no_workers")
        assert (await response).status_code == 503


@pytest.mark.parametrize(("path", "body"), REQUESTS)
async def test_without_an_owner_a_request_is_rejected_at_once(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    def tokenized(*_: object, **__: object) -> list[int]:
        raise AssertionError("the text was tokenized before the request was refused")

    monkeypatch.setattr(scene.ingress.model, "encode", tokenized)
    scene.ingress.has_owner = lambda: False
    response = await scene.client.post(path, json=body)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "no_owner")
    assert int(response.headers["retry-after"]) >= 1
    assert scene.requests() == []


async def test_a_submitted_request_continues_without_an_owner(scene: Scene) -> None:
    pending = scene.start(*REQUESTS[1])
    request = await scene.next_request()
    scene.ingress.has_owner = lambda: False
    scene.reply(request.request_id, "Hi")
    assert (await pending).status_code == 200


class LateLog:
    """Appends at once, but acknowledges only after `is_back` is set."""

    def __init__(self, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_back = asyncio.Event()
        self.late: list[asyncio.Task[list[int]]] = []
        self._append_now = scene.log.append
        monkeypatch.setattr(scene.log, "append", self._append)

    async def _append(self, drafts: Sequence[Draft]) -> list[int]:
        self.late.append(asyncio.create_task(self._append_now(drafts)))
        await self.is_back.wait()
        return await self.late[-1]


@pytest.mark.parametrize("is_silent", [False, True])
async def test_an_unacknowledged_request_fails_and_is_cancelled(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, *, is_silent: bool
) -> None:
    monkeypatch.setattr(ingress_module, "ACKNOWLEDGED_S", 3_600 if is_silent else 0.05)
    monkeypatch.setattr(ingress_module, "CHECKED_S", 0.01)
    scene.ingress.owner_silent_s = lambda: 0.8 if is_silent else 0.1
    log = LateLog(scene, monkeypatch)
    response = await scene.start(*REQUESTS[1])
    assert (response.status_code, response.json()["error"]["code"]) == (503, "log_unavailable")
    assert "retry-after" in response.headers
    await until(lambda: scene.requests(RequestCancelled))
    (request,), (cancelled,) = scene.requests(RequestSubmitted), scene.requests(RequestCancelled)
    assert cancelled.request_id == request.request_id
    await asyncio.gather(*log.late)


async def test_a_request_waits_for_a_late_acknowledgement_while_the_owner_beats(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingress_module, "CHECKED_S", 0.01)
    checked = asyncio.Event()

    def silent_s() -> float:
        checked.set()
        return 0.1

    scene.ingress.owner_silent_s = silent_s
    log = LateLog(scene, monkeypatch)
    pending = scene.start(*REQUESTS[1])
    request = await scene.next_request()
    await checked.wait()
    log.is_back.set()
    scene.reply(request.request_id, "Hi")
    assert (await pending).status_code == 200


async def test_a_full_log_rejects_one_request_and_keeps_the_others(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    pending = scene.start(*REQUESTS[1])
    request = await scene.next_request()

    async def full(_: Sequence[Draft]) -> list[int]:
        raise LogFull("256 MiB wait")

    monkeypatch.setattr(scene.log, "append", full)
    response = await scene.start(*REQUESTS[1])
    assert (response.status_code, response.json()["error"]["code"]) == (503, "log_unavailable")
    scene.reply(request.request_id, "Hi")
    assert (await pending).status_code == 200
