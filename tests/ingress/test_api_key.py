"""An API key protects the routes that use the model, and no other routes."""

import asyncio
import re
from collections.abc import AsyncIterator

import httpx
import openai
import pytest
from starlette.routing import Route

from forebay.events.topics import CONTROL, REQUESTS
from forebay.ingress.errors import Unusable
from forebay.ingress.http.api_key import requires_api_key
from tests.ingress.conftest import ADMIN_TOKEN, NAME, Scene, make_scene

KEYS = ("first-key", "second-key")
JSON = {"content-type": "application/json"}
OPEN = {"/", "/docs", "/docs/x", "/health", "/live", "/metrics", "/openapi.json", "/ready", "/version"}
BODY = {"model": NAME, "prompt": "a", "input": "a", "lora_name": "x", "lora_path": "/x", "action": "pause"}


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    async with make_scene(api_keys=KEYS, admin_token=ADMIN_TOKEN) as made:
        del made.client.headers["authorization"]
        yield made


def operations(scene: Scene) -> list[tuple[str, str]]:
    """Return the methods and concrete paths of all routes."""
    routes = [route for route in scene.app.routes if isinstance(route, Route)]
    return [(method, re.sub(r"\{.*\}", "x", one.path)) for one in routes for method in sorted(one.methods or ())]


async def status(scene: Scene, method: str, path: str, key: str | None) -> tuple[int, str]:
    """Return the status and error code of a request with this bearer token."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    response = await scene.client.request(method, path, json=BODY if method == "POST" else None, headers=headers)
    is_json = response.content and response.headers["content-type"] == "application/json"
    return response.status_code, (response.json().get("error") or {}).get("code", "") if is_json else ""


async def test_every_route_is_open_or_requires_a_key_or_the_admin_token(scene: Scene) -> None:
    found: dict[str, set[str]] = {"open": set(), "key": set(), "admin": set()}
    for method, path in operations(scene):
        code = (await status(scene, method, path, None))[1]
        found[{"invalid_api_key": "key", "admin_token_missing": "admin"}.get(code, "open")].add(path)
    assert found["open"] <= OPEN
    assert found["key"] >= {"/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/models", "/v1/route"}
    assert found["admin"] >= {"/v1/commands", "/v1/loras", "/v1/loras/x", "/pause", "/busy_threshold"}
    assert all(requires_api_key(path) for path in ("/tokenize", "/detokenize", "/v1/anything"))
    assert not any(list(scene.log.records(topic.name, 0, 0, 10)) for topic in (REQUESTS, CONTROL))


async def test_an_api_key_opens_no_admin_route_and_the_admin_token_no_other_route(scene: Scene) -> None:
    for method, path in operations(scene):
        if path in OPEN:
            continue
        admin = not requires_api_key(path)
        refused = (403, "admin_token_wrong") if admin else (401, "invalid_api_key")
        assert await status(scene, method, path, KEYS[0] if admin else ADMIN_TOKEN) == refused, path
    status_code, code = await status(scene, "GET", "/busy_threshold", ADMIN_TOKEN)
    assert (status_code, code) == (200, "")
    assert (await status(scene, "POST", "/v1/commands", ADMIN_TOKEN))[1] not in ("invalid_api_key", "admin_token_wrong")


@pytest.mark.parametrize(
    "given",
    [
        [],
        ["first-key"],
        ["Basic first-key"],
        ["Bearer"],
        ["Bearer "],
        ["Bearer first-ke"],
        ["Bearer first-keyy"],
        ["Bearer first-key second-key"],
        ["Bearer first-key", "Bearer first-key"],
        ["Bearer f\xefrst-key"],
    ],
)
async def test_requests_without_a_valid_key_get_401(scene: Scene, given: list[str]) -> None:
    headers = [(b"authorization", value.encode("latin-1")) for value in given]
    response = await scene.client.get("/v1/models", headers=headers)
    error = response.json()["error"]
    assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")
    assert (error["code"], error["type"], error["param"]) == ("invalid_api_key", "invalid_request_error", None)
    assert "first" not in response.text
    assert scene.metric('forebay_ingress_refused_total{code="invalid_api_key"} 1.0')


@pytest.mark.parametrize("given", ["Bearer first-key", "bearer second-key", "BEARER  first-key"])
async def test_each_key_is_accepted(scene: Scene, given: str) -> None:
    assert (await scene.client.get("/v1/models", headers={"authorization": given})).status_code == 200


async def test_the_openai_client_sends_its_key(scene: Scene) -> None:
    async with scene.served() as (port, _):
        for key in (KEYS[1], "wrong"):
            client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=0)
            async with client:
                pending = asyncio.create_task(client.completions.create(model=NAME, prompt="a"))
                if key == "wrong":
                    with pytest.raises(openai.AuthenticationError) as caught:
                        await pending
                    assert caught.value.code == "invalid_api_key"
                else:
                    request = await scene.next_request()
                    scene.end(request.request_id, output=scene.emit_text(request.request_id, " b"))
                    assert (await pending).choices[0].text == " b"


async def test_the_document_names_the_key(scene: Scene) -> None:
    whole = (await scene.client.get("/openapi.json")).json()
    assert "ApiKey" in whole["components"]["securitySchemes"]
    for path, found in whole["paths"].items():
        for operation in found.values():
            assert (operation.get("security") == [{"ApiKey": []}]) is requires_api_key(path), path
            assert not requires_api_key(path) or "401" in operation["responses"]


async def test_a_key_is_no_part_of_settings_and_logs(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG"):
        await status(scene, "GET", "/v1/models", KEYS[0])
        await status(scene, "GET", "/v1/models", "guessed-key")
    assert not re.search("first-key|guessed-key", caplog.text + repr(scene.ingress.settings))


async def test_the_admin_token_must_differ_from_the_keys() -> None:
    with pytest.raises(Unusable, match="the admin token is also an API key"):
        async with make_scene(api_keys=(ADMIN_TOKEN,), admin_token=ADMIN_TOKEN):
            pass


async def test_without_keys_every_client_is_served() -> None:
    async with make_scene() as scene:
        transport = httpx.ASGITransport(scene.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=JSON) as client:
            assert (await client.get("/v1/models")).status_code == 200
