"""Web pages of the origins in --cors-allow-origin use the API; other pages do not."""

from typing import Any

import httpx
import pytest

from forebay.ingress.errors import Unusable
from forebay.ingress.http.origin_guard import allowed_origins
from tests.ingress.conftest import make_scene

PAGE = "https://app.example"
KEY = {"authorization": "Bearer key"}


def preflight(origin: str) -> dict[str, str]:
    return {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-lang",
        "sec-fetch-site": "cross-site",
    }


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
        read = await scene.client.get("/v1/models", headers=page | KEY)
        missing = await scene.client.post("/v1/completions", json=body, headers=page | KEY)
        refused = await scene.client.get("/v1/models", headers=page)
        form = await scene.client.post(
            "/v1/completions", content=b"a", headers={**page, **KEY, "content-type": "text/plain"}
        )
    assert [one.status_code for one in (read, missing, refused, form)] == [200, 404, 401, 415]
    for response in (read, missing, refused, form):
        assert response.headers["access-control-allow-origin"] == PAGE
        assert "x-request-id" in response.headers["access-control-expose-headers"]


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
async def test_other_pages_are_rejected(headers: dict[str, str]) -> None:
    async with make_scene(cors_origins=allowed_origins((PAGE,))) as scene:
        response = await scene.client.request("OPTIONS" if len(headers) > 2 else "GET", "/v1/models", headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (403, "foreign_origin")
    assert "access-control-allow-origin" not in response.headers
    assert response.headers["vary"] == "origin"


async def test_two_origins_must_both_be_allowed() -> None:
    async with make_scene(cors_origins=allowed_origins((PAGE,))) as scene:
        both = httpx.Headers([("origin", "https://evil.example"), ("origin", PAGE)])
        assert (await scene.client.get("/v1/models", headers=both)).status_code == 403


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
    with pytest.raises(Unusable, match="--cors-allow-origin"):
        allowed_origins((given,))
