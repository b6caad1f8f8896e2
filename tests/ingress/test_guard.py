"""Requests that a browser sends for a web page are rejected on every route, without effect."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from starlette.routing import Route

from forebay.events.topics import CONTROL, REQUESTS
from forebay.ingress.errors import Unusable
from forebay.ingress.http.app import build_app
from forebay.ingress.http.origin_guard import PAGES, UNCHECKED, allowed_hosts
from forebay.ingress.http.server import build_server
from forebay.ingress.served import OneModel
from tests.ingress.conftest import ADMIN_TOKEN, HEADERS, NAME, Scene, make_scene
from tests.system import until

PUBLIC = {
    "/docs/{name}",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/models",
    "/v1/models/{name:path}",
    "/v1/requests/{request_id:path}/explain",
    "/v1/route",
    "/v1/status",
    "/tokenize",
    "/detokenize",
    "/version",
}
BODY = {"model": NAME, "prompt": "a", "input": "a", "lora_name": "x", "lora_path": "/x", "action": "pause"}
FOREIGN = [
    "https://evil.example",
    "http://127.0.0.1",
    "https://127.0.0.1:{port}",
    "http://localhost:{port}",
    "null",
    "",
]


@pytest.fixture(scope="module")
def admin_token() -> str:
    return ADMIN_TOKEN


def operations(scene: Scene) -> list[tuple[str, str]]:
    """Return method and path of each route except probes and documentation."""
    found = []
    for route in scene.app.routes:
        assert isinstance(route, Route), f"{route} has no path that this test could ask"
        if route.path not in UNCHECKED | PAGES:
            found += [(method, route.path) for method in sorted(route.methods or ())]
    assert len(found) >= len(PUBLIC)
    return found


def concrete(path: str) -> str:
    """Return the path of a route with values for its parameters."""
    return re.sub(r"\{[^}]*\}", "x", path)


def is_untouched(scene: Scene) -> bool:
    """Return whether the topics that clients and operators write to are empty."""
    return not any(list(scene.log.records(topic.name, 0, 0, 10)) for topic in (REQUESTS, CONTROL))


@asynccontextmanager
async def over_tcp(scene: Scene) -> AsyncIterator[tuple[httpx.AsyncClient, int]]:
    """Yield a client of a real HTTP server that sends only the given headers."""
    listener, port = scene.listen()
    server = build_server(scene.app)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    await until(lambda: server.started)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:
        yield client, port
    server.should_exit = True
    await serving


async def test_web_pages_are_rejected_on_every_route(scene: Scene) -> None:
    async with over_tcp(scene) as (client, port):
        for method, path in operations(scene):
            for origin in FOREIGN:
                headers = {**HEADERS, "origin": origin.format(port=port), "content-type": "text/plain"}
                response = await client.request(method, concrete(path), json=BODY, headers=headers)
                error = response.json()["error"]
                assert (response.status_code, error["code"]) == (403, "foreign_origin"), (method, path, origin)
                assert set(error) == {"message", "type", "param", "code"}
            for site in ("cross-site", "same-site"):
                response = await client.request(method, concrete(path), json=BODY, headers={"sec-fetch-site": site})
                assert (response.status_code, method, path) == (403, method, path)
    assert is_untouched(scene)
    count = len(operations(scene)) * (len(FOREIGN) + 2)
    assert scene.metric(f'forebay_ingress_refused_total{{code="foreign_origin"}} {count}.0')


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
async def test_a_body_must_be_declared_as_json(scene: Scene, kind: str | None) -> None:
    async with over_tcp(scene) as (client, _):
        changing = [(method, path) for method, path in operations(scene) if method != "GET"]
        for method, path in changing:
            headers = {"authorization": HEADERS["authorization"], **({} if kind is None else {"content-type": kind})}
            response = await client.request(method, concrete(path), content=b'{"model": "x"}', headers=headers)
            assert (response.status_code, response.json()["error"]["code"]) == (415, "unsupported_media_type"), path
    assert is_untouched(scene)


async def test_the_admin_api_requires_its_token(scene: Scene) -> None:
    async with over_tcp(scene) as (client, _):
        admin = [(method, path) for method, path in operations(scene) if path not in PUBLIC]
        assert len({path for _, path in admin}) >= 12
        for method, path in admin:
            for given, status in ((None, 401), ("Basic eA==", 401), ("Bearer x", 403), (f"Bearer {ADMIN_TOKEN}x", 403)):
                headers = {} if given is None else {"authorization": given}
                response = await client.request(method, concrete(path), json=BODY, headers=headers)
                assert (response.status_code, method, path) == (status, method, path)
                assert ("www-authenticate" in response.headers) is (status == 401)
                assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert is_untouched(scene)
    assert ADMIN_TOKEN not in repr(scene.ingress.settings)


async def test_without_a_token_there_is_no_admin_api() -> None:
    async with make_scene(admin_token=ADMIN_TOKEN) as scene:
        admin = [(method, path) for method, path in operations(scene) if path not in PUBLIC]
    async with make_scene(admin_token="") as scene:
        assert {path for _, path in operations(scene)} == PUBLIC
        for method, path in admin:
            for token in ("", ADMIN_TOKEN):
                headers = {"authorization": f"Bearer {token}"}
                response = await scene.client.request(method, concrete(path), json=BODY, headers=headers)
                assert (response.status_code, method, path) == (404, method, path)
        assert is_untouched(scene)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"origin": "http://test"},
        {"origin": "http://TEST:80", "sec-fetch-site": "same-origin"},
        {"origin": "http://test", "content-type": "application/json; charset=utf-8"},
        {"sec-fetch-site": "none"},
    ],
)
async def test_clients_and_pages_of_the_same_origin_are_served(scene: Scene, headers: dict[str, str]) -> None:
    response = await scene.client.post("/v1/completions", json={"model": "other", "prompt": "a"}, headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


async def test_a_command_without_a_body_needs_no_content_type(scene: Scene) -> None:
    async with over_tcp(scene) as (client, _):
        response = await client.post("/sleep?level=9", headers={"authorization": HEADERS["authorization"]})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "level")


@pytest.mark.parametrize(
    ("listening", "names", "served", "refused"),
    [
        (
            ("127.0.0.1", "127.0.0.1"),
            (),
            ("localhost", "LOCALHOST:8000", "127.0.0.1:8000", "[::1]:8000", "localhost."),
            ("evil.example", "evil.example:8000", "localhost.evil.example", "user@localhost", "", "127.0.0.1.evil:80"),
        ),
        (("name", "127.0.1.1"), (), ("name:8000", "127.0.1.1", "localhost"), ("evil.example",)),
        (("::1", "::1"), ("Chat.Example",), ("[::1]:8000", "chat.example:1"), ("example", "[::2]")),
        (("0.0.0.0", "0.0.0.0"), (), ("localhost", "any.example"), ()),
        (("0.0.0.0", "0.0.0.0"), ("ingress-1", "::2"), ("ingress-1:8000", "localhost", "[::2]"), ("any.example",)),
        (("::ffff:127.0.0.1", "::ffff:127.0.0.1"), (), ("localhost",), ("any.example",)),
    ],
)
async def test_an_unknown_host_is_rejected(
    scene: Scene,
    listening: tuple[str, str],
    names: tuple[str, ...],
    served: tuple[str, ...],
    refused: tuple[str, ...],
) -> None:
    app = build_app(OneModel(scene.ingress), scene.registry, hosts=allowed_hosts(*listening, names))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        for header in served:
            assert (await client.get("/v1/models", headers={"host": header})).status_code == 200, header
        for header in refused:
            # A page whose name resolves to this machine is of the same origin as it.
            sent = {"host": header, "origin": f"http://{header}", "sec-fetch-site": "same-origin"}
            for path in ("/v1/models", *PAGES, "/nothing"):
                response = await client.get(path, headers=sent)
                error = response.json()["error"]
                assert (response.status_code, error["code"]) == (403, "host_not_allowed"), header
                assert "--allow-host" in error["message"]
            for path in UNCHECKED:
                assert (await client.get(path, headers=sent)).status_code == 200
        both = [("host", "localhost"), ("host", refused[0] if refused else "x")]
        assert (await client.get("/v1/models", headers=both)).status_code == (403 if refused else 200)


@pytest.mark.parametrize("name", ["http://name", "name:80", "name/path", "", "*", "a b"])
def test_an_allowed_host_is_a_name_or_an_address(name: str) -> None:
    with pytest.raises(Unusable, match="without scheme and port"):
        allowed_hosts("127.0.0.1", "127.0.0.1", [name])
