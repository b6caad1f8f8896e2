"""Requests name the incarnation of their ingress, so that they can be aborted when it is lost."""

import asyncio
from typing import Any

import pytest

from tests.ingress.conftest import NAME, make_scene

INCARNATION = "incarnation-1"
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"model": NAME, "messages": [{"role": "user", "content": "hi"}]}),
    ("/v1/completions", {"model": NAME, "prompt": "hi"}),
    ("/v1/completions", {"model": NAME, "prompt": "hi", "stream": True}),
    ("/v1/embeddings", {"model": NAME, "input": "hi"}),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_a_request_over_http_names_its_ingress(path: str, body: dict[str, Any]) -> None:
    async with make_scene(incarnation=INCARNATION) as scene:
        response = asyncio.create_task(scene.client.post(path, json=body))
        request = await scene.next_request()
        assert request.ingress_incarnation == INCARNATION
        scene.refuse(request.request_id, 503, "no_workers")
        assert (await response).status_code == 503
