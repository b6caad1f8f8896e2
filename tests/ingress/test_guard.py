"""Who may send requests: API keys, the admin token, web pages, and the header `Host`, on every route."""

import re
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import pytest
import pytest_asyncio
from starlette.routing import Route

from forebay.events.topics import CONTROL, REQUESTS
from forebay.ingress.access_log import PROBES
from forebay.ingress.http.app import build_app
from forebay.ingress.http.guards import PAGES, allowed_hosts, allowed_origins, requires_api_key
from forebay.runtime.errors import ConfigError
from tests.ingress.conftest import (
    ADMIN_TOKEN,
    CHAT,
    COUNT_TOKENS,
    EMBED,
    HEADERS,
    MESSAGES,
    MODULE_LOOP,
    NAME,
    RESPONSES,
    ROUTE,
    TEXT,
    Scene,
    client_of,
    error,
    make_scene,
    text,
)

PUBLIC = {
    *(CHAT, TEXT, EMBED, RESPONSES, MESSAGES, COUNT_TOKENS, ROUTE),
    *("/docs/{name}", "/v1/models", "/v1/models/{name:path}", "/v1/status", "/version"),
    *("/v1/requests/{request_id:path}/explain", "/tokenize", "/detokenize", "/v1/endpoints/{name}"),
    *(RESPONSES + part for part in ("/{response_id}", "/{response_id}/cancel", "/{response_id}/input_items")),
    *("/v1/requests/{request_id}", "/v1/requests/{request_id}/stream", "/v1/requests/{request_id}/cancel"),
}
BODY = {"model": NAME, "prompt": "a", "input": "a", "lora_name": "x", "lora_path": "/x", "action": "pause"}
SHAPES = ({"message", "type", "param", "code"}, {"message", "type", "details"})  # of errors, by API
KEYS = ("first-key", "second-key")
OPEN = {"/", "/docs", "/docs/x", "/health", "/live", "/metrics", "/openapi.json", "/ready", "/version"}
WITH_KEY = {"authorization": "Bearer key"}
PAGE = "https://app.example"
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


def operations(scene: Scene, *, checked: bool = True) -> list[tuple[str, str]]:
    """Return method and path of each route; `checked` omits probes and documentation."""
    found = []
    for route in scene.app.routes:
        assert isinstance(route, Route), f"{route} has no path that this test could ask"
        if not checked or route.path not in PROBES | PAGES:
            found += [(method, route.path) for method in sorted(route.methods or ())]
    assert len(found) >= len(PUBLIC)
    return found


def concrete(path: str) -> str:
    """Return the path of a route with values for its parameters."""
    return re.sub(r"\{[^}]*\}", "x", path)


def admin_paths(scene: Scene) -> set[str]:
    return {path for _, path in operations(scene) if path not in PUBLIC}


def is_untouched(scene: Scene) -> bool:
    """Return whether the topics that clients and operators write to are empty."""
    return not any(list(scene.log.records(topic.name, 0, 0, 10)) for topic in (REQUESTS, CONTROL))


async def test_web_pages_are_rejected_on_every_route(scene: Scene) -> None:
    async with scene.http_client() as (client, _):
        for method, path in operations(scene):
            for origin in FOREIGN:
                headers = {**HEADERS, "origin": origin.format(port=client.base_url.port), "content-type": "text/plain"}
                response = await client.request(method, concrete(path), json=BODY, headers=headers)
                assert error(response) == (403, "foreign_origin"), (method, path, origin)
                assert set(response.json()["error"]) in SHAPES
            for site in ("cross-site", "same-site"):
                response = await client.request(method, concrete(path), json=BODY, headers={"sec-fetch-site": site})
                assert (response.status_code, method, path) == (403, method, path)
    assert is_untouched(scene)
    count = len(operations(scene)) * (len(FOREIGN) + 2)
    assert scene.metric(f'forebay_ingress_refused_total{{code="foreign_origin"}} {count}.0')


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
async def test_a_body_must_be_declared_as_json(scene: Scene, kind: str | None) -> None:
    async with scene.http_client() as (client, _):
        changing = [(method, path) for method, path in operations(scene) if method != "GET"]
        for method, path in changing:
            headers = {"authorization": HEADERS["authorization"], **({} if kind is None else {"content-type": kind})}
            response = await client.request(method, concrete(path), content=b'{"model": "x"}', headers=headers)
            assert error(response) == (415, "unsupported_media_type"), path
    assert is_untouched(scene)


async def test_the_admin_api_requires_its_token(scene: Scene) -> None:
    async with scene.http_client() as (client, _):
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
    assert ADMIN_TOKEN not in repr(scene.group.settings)


async def test_without_a_token_there_is_no_admin_api() -> None:
    async with make_scene(admin_token=ADMIN_TOKEN) as scene:
        admin = [(method, path) for method, path in operations(scene) if path not in PUBLIC]
    async with make_scene() as scene:
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
@MODULE_LOOP
async def test_clients_and_pages_of_the_same_origin_are_served(shared_scene: Scene, headers: dict[str, str]) -> None:
    response = await shared_scene.client.post(TEXT, json=text(model="other"), headers=headers)
    assert error(response) == (404, "model_not_found")


async def test_a_command_without_a_body_needs_no_content_type(scene: Scene) -> None:
    async with scene.http_client() as (client, _):
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
@MODULE_LOOP
async def test_an_unknown_host_is_rejected(
    shared_scene: Scene, listening: tuple[str, str], names: Sequence[str], served: Sequence[str], refused: Sequence[str]
) -> None:
    app = build_app(shared_scene.models, shared_scene.registry, hosts=allowed_hosts(*listening, names))
    async with client_of(app) as client:
        for header in served:
            assert (await client.get("/v1/models", headers={"host": header})).status_code == 200, header
        for header in refused:
            # A page whose name resolves to this machine is of the same origin as it.
            sent = {"host": header, "origin": f"http://{header}", "sec-fetch-site": "same-origin"}
            for path in ("/v1/models", *PAGES, "/nothing"):
                response = await client.get(path, headers=sent)
                assert error(response) == (403, "host_not_allowed"), header
                assert "--allow-host" in response.json()["error"]["message"]
            for path in PROBES:
                assert (await client.get(path, headers=sent)).status_code == 200
        both = [("host", "localhost"), ("host", refused[0] if refused else "x")]
        assert (await client.get("/v1/models", headers=both)).status_code == (403 if refused else 200)


@pytest.mark.parametrize("name", ["http://name", "name:80", "name/path", "", "*", "a b"])
def test_an_allowed_host_is_a_name_or_an_address(name: str) -> None:
    with pytest.raises(ConfigError, match="without scheme and port"):
        allowed_hosts("127.0.0.1", "127.0.0.1", [name])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def keyed() -> AsyncIterator[Scene]:
    """Yield a scene with API keys, whose client has none."""
    async with make_scene(api_keys=KEYS, admin_token=ADMIN_TOKEN) as made:
        del made.client.headers["authorization"]
        yield made


async def status(scene: Scene, method: str, path: str, key: str | None) -> tuple[int, str]:
    """Return the status and error code of a request with this bearer token."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    response = await scene.client.request(method, path, json=BODY if method == "POST" else None, headers=headers)
    is_json = response.content and response.headers["content-type"] == "application/json"
    return error(response) if is_json and response.json().get("error") else (response.status_code, "")


@MODULE_LOOP
async def test_every_route_is_open_or_requires_a_key_or_the_admin_token(keyed: Scene) -> None:
    found: dict[str, set[str]] = {"open": set(), "key": set(), "admin": set()}
    for method, path in operations(keyed, checked=False):
        code = (await status(keyed, method, concrete(path), None))[1]
        found[{"invalid_api_key": "key", "admin_token_missing": "admin"}.get(code, "open")].add(concrete(path))
    assert found["open"] <= OPEN
    assert found["key"] >= {CHAT, TEXT, EMBED, RESPONSES, ROUTE, "/v1/models"}
    assert found["admin"] == {concrete(path) for path in admin_paths(keyed)}
    assert all(requires_api_key(path) for path in ("/tokenize", "/detokenize", "/v1/anything"))
    assert is_untouched(keyed)


@MODULE_LOOP
async def test_an_api_key_opens_no_admin_route_and_the_admin_token_no_other_route(keyed: Scene) -> None:
    for method, path in operations(keyed, checked=False):
        if concrete(path) in OPEN:
            continue
        admin = not requires_api_key(path)
        refused = (403, "admin_token_wrong") if admin else (401, "invalid_api_key")
        assert await status(keyed, method, concrete(path), KEYS[0] if admin else ADMIN_TOKEN) == refused, path
    status_code, code = await status(keyed, "GET", "/busy_threshold", ADMIN_TOKEN)
    assert (status_code, code) == (200, "")
    assert (await status(keyed, "POST", "/v1/commands", ADMIN_TOKEN))[1] not in ("invalid_api_key", "admin_token_wrong")


async def test_the_admin_api_is_only_on_its_port(keyed: Scene) -> None:
    """The port also has the routes that `forebay control` reads. All require the admin token."""
    admin = admin_paths(keyed)
    async with make_scene(api_keys=KEYS, admin_token=ADMIN_TOKEN, admin_port=1) as scene:
        assert {path for _, path in operations(scene)} == PUBLIC
        assert not admin & (await scene.client.get("/openapi.json")).json()["paths"].keys()
        refused = {(401, "invalid_api_key"), (404, "not_found"), (405, "method_not_allowed")}
        for path in admin:
            for key in (None, KEYS[0], ADMIN_TOKEN):
                assert await status(scene, "POST", concrete(path), key) in refused, path
        app = scene.app.admin
        assert app is not None
        paths = {route.path for route in app.routes if isinstance(route, Route)}
        assert paths == admin | {"/v1/models", "/v1/models/{name:path}", "/v1/status"}
        async with client_of(app) as client:
            client.base_url = "http://127.0.0.1"
            for route in app.routes:
                assert isinstance(route, Route)
                for method in route.methods or ():
                    for key, code in ((None, "admin_token_missing"), (KEYS[0], "admin_token_wrong")):
                        headers = {} if key is None else {"authorization": f"Bearer {key}"}
                        response = await client.request(method, concrete(route.path), headers=headers)
                        assert error(response) == (401 if key is None else 403, code), route.path
            for path in ("/v1/models", "/v1/pools"):
                assert (await client.get(path, headers=HEADERS)).status_code == httpx.codes.OK
            for path in (*OPEN, TEXT, "/tokenize"):
                assert error(await client.get(path, headers=HEADERS)) == (404, "not_found")
            for headers, code in (({"host": "evil.example"}, "host_not_allowed"), ({"origin": PAGE}, "foreign_origin")):
                assert error(await client.get("/v1/pools", headers={**HEADERS, **headers})) == (403, code)
        assert is_untouched(scene)


@MODULE_LOOP
@pytest.mark.parametrize(
    "given",
    [
        *([], ["first-key"], ["Basic first-key"], ["Bearer"], ["Bearer "], ["Bearer first-ke"], ["Bearer first-keyy"]),
        ["Bearer first-key second-key"],
        ["Bearer first-key", "Bearer first-key"],
        ["Bearer f\xefrst-key"],
    ],
)
async def test_requests_without_a_valid_key_get_401(keyed: Scene, given: list[str]) -> None:
    headers = [(b"authorization", value.encode("latin-1")) for value in given]
    before = keyed.refusals()
    response = await keyed.client.get("/v1/models", headers=headers)
    found = response.json()["error"]
    assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")
    assert (found["code"], found["type"], found["param"]) == ("invalid_api_key", "invalid_request_error", None)
    assert "first" not in response.text
    assert keyed.refusals() - before == {"invalid_api_key": 1}


@MODULE_LOOP
@pytest.mark.parametrize(
    "headers",
    [
        *({"authorization": given} for given in ("Bearer first-key", "bearer second-key", "BEARER  first-key")),
        {"x-api-key": "first-key"},
        {"x-api-key": "first-key", "authorization": "Basic of-a-proxy"},
    ],
)
async def test_each_key_is_accepted(keyed: Scene, headers: dict[str, str]) -> None:
    assert (await keyed.client.get("/v1/models", headers=headers)).status_code == 200


@MODULE_LOOP
@pytest.mark.parametrize("given", [["first"], ["Bearer first-key"], ["first-key", "first-key"]])
async def test_a_wrong_x_api_key_gets_401(keyed: Scene, given: list[str]) -> None:
    response = await keyed.client.get("/v1/models", headers=[("x-api-key", value) for value in given])
    assert error(response) == (401, "invalid_api_key")


@MODULE_LOOP
async def test_the_document_names_the_key(keyed: Scene) -> None:
    whole = (await keyed.client.get("/openapi.json")).json()
    assert "ApiKey" in whole["components"]["securitySchemes"]
    for path, found in whole["paths"].items():
        for operation in found.values():
            assert (operation.get("security") == [{"ApiKey": []}]) is requires_api_key(path), path
            assert not requires_api_key(path) or "401" in operation["responses"]


@MODULE_LOOP
async def test_a_key_is_no_part_of_settings_and_logs(keyed: Scene, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG"):
        await status(keyed, "GET", "/v1/models", KEYS[0])
        await status(keyed, "GET", "/v1/models", "guessed-key")
    assert not re.search("first-key|guessed-key", caplog.text + repr(keyed.group.settings))


async def test_the_admin_token_must_differ_from_the_keys() -> None:
    with pytest.raises(ConfigError, match="the admin token is also an API key"):
        async with make_scene(api_keys=(ADMIN_TOKEN,), admin_token=ADMIN_TOKEN):
            pass


ASKED = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,x-stainless-lang"}


def preflight(origin: str) -> dict[str, str]:
    return {**ASKED, "origin": origin, "sec-fetch-site": "cross-site"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def paged() -> AsyncIterator[Scene]:
    """Yield a scene that allows requests from `PAGE`."""
    async with make_scene(cors_origins=allowed_origins((PAGE,))) as made:
        yield made


@pytest.mark.parametrize("allowed", [PAGE, "*"])
async def test_a_preflight_request_needs_no_key(allowed: str) -> None:
    async with make_scene(api_keys=("key",), cors_origins=allowed_origins((allowed,))) as scene:
        headers = {**preflight(PAGE), "access-control-request-private-network": "true"}
        response = await scene.client.request("OPTIONS", "/v1/chat/completions", headers=headers)
    assert (response.status_code, response.content) == (204, b"")
    assert response.headers["access-control-allow-origin"] == PAGE
    assert "POST" in response.headers["access-control-allow-methods"]
    assert response.headers["access-control-allow-headers"] == headers["access-control-request-headers"]
    assert response.headers["access-control-allow-private-network"] == "true"
    assert response.headers["vary"] == "origin"


@pytest.mark.parametrize("allowed", [PAGE, "*"])
async def test_a_page_of_an_allowed_origin_reads_responses_and_errors(allowed: str) -> None:
    async with make_scene(api_keys=("key",), cors_origins=allowed_origins((allowed,))) as scene:
        del scene.client.headers["authorization"]
        page = {"origin": PAGE, "sec-fetch-site": "cross-site"}
        body: Any = {"model": "other", "prompt": "a"}
        read = await scene.client.get("/v1/models", headers=page | WITH_KEY)
        missing = await scene.client.post("/v1/completions", json=body, headers=page | WITH_KEY)
        refused = await scene.client.get("/v1/models", headers=page)
        form = await scene.client.post(
            "/v1/completions", content=b"a", headers={**page, **WITH_KEY, "content-type": "text/plain"}
        )
    assert [one.status_code for one in (read, missing, refused, form)] == [200, 404, 401, 415]
    for response in (read, missing, refused, form):
        assert response.headers["access-control-allow-origin"] == PAGE
        assert response.headers["access-control-expose-headers"] == "*"


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "http://app.example"},
        {"origin": "https://app.example:8443"},
        {"sec-fetch-site": "cross-site"},
        preflight("https://evil.example"),
    ],
)
@MODULE_LOOP
async def test_other_pages_are_rejected(paged: Scene, headers: dict[str, str]) -> None:
    response = await paged.client.request("OPTIONS" if len(headers) > 2 else "GET", "/v1/models", headers=headers)
    assert error(response) == (403, "foreign_origin")
    assert "access-control-allow-origin" not in response.headers
    assert response.headers["vary"] == "origin"


@MODULE_LOOP
async def test_two_origins_must_both_be_allowed(paged: Scene) -> None:
    both = httpx.Headers([("origin", "https://evil.example"), ("origin", PAGE)])
    assert (await paged.client.get("/v1/models", headers=both)).status_code == 403


@pytest.mark.parametrize(
    ("given", "origin"),
    [
        ("https://App.Example:443", "https://app.example"),
        ("http://localhost:3000", "http://localhost:3000"),
        ("HTTP://[::1]:80", "http://[::1]"),
        ("*", "*"),
    ],
)
def test_origins_are_compared_as_browsers_send_them(given: str, origin: str) -> None:
    assert allowed_origins((given,)) == {origin}


@pytest.mark.parametrize(
    "given",
    ["", "null", "app.example", "https://", "https://app.example/", "https://a@app.example", "ftp://app.example",
     "https://app.example:x", "https://*.example", "https://app.example?a"],
)  # fmt: skip
def test_other_values_are_rejected(given: str) -> None:
    with pytest.raises(ConfigError, match="--cors-allow-origin"):
        allowed_origins((given,))
