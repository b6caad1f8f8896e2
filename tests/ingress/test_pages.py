"""The pages `/` and `/docs`: forms, headers, escaped names. tests/cli/test_up_api.py opens them in a browser."""

from importlib.metadata import version

import pytest

from tests.ingress.conftest import NAME, Scene, make_scene

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"


async def test_the_index_is_a_page_for_browsers_and_json_for_other_clients(scene: Scene) -> None:
    page = await scene.client.get("/", headers={"accept": BROWSER})
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "<script" not in page.text
    assert version("forebay") in page.text
    plain = await scene.client.get("/", headers={"accept": "*/*"})
    found = plain.json()
    assert (found["name"], found["version"], found["model"]) == ("forebay", version("forebay"), NAME)
    assert page.headers["vary"] == plain.headers["vary"] == "accept"
    for path in found["links"].values():
        assert f'href="{path}"' in page.text
        is_served = path != "v1/status"  # a scene has no owner
        assert (await scene.client.get(f"/{path}")).status_code == (200 if is_served else 501), path


@pytest.mark.parametrize("path", ["/", "/docs", "/docs/start.js", "/docs/swagger-ui.css", "/docs/swagger-ui-bundle.js"])
async def test_pages_have_a_strict_policy(scene: Scene, path: str) -> None:
    response = await scene.client.get(path, headers={"accept": BROWSER})
    assert response.status_code == 200
    policy = response.headers["content-security-policy"]
    for part in ("default-src 'none'", "base-uri 'none'", "frame-ancestors 'none'"):
        assert part in policy
    assert "'unsafe-eval'" not in policy
    assert "http" not in policy
    assert response.headers["x-content-type-options"] == "nosniff"


async def test_other_sites_may_link_to_pages_but_not_load_their_files(scene: Scene) -> None:
    elsewhere = {"sec-fetch-site": "cross-site", "accept": BROWSER}
    for path, status in (("/", 200), ("/docs", 200), ("/docs/start.js", 403)):
        assert (await scene.client.get(path, headers=elsewhere)).status_code == status, path


@pytest.mark.parametrize("name", ["index.html", "__init__.py", "main.py", "..%2Fmain.py"])
async def test_docs_serve_no_other_files(scene: Scene, name: str) -> None:
    assert (await scene.client.get(f"/docs/{name}")).status_code == 404


async def test_the_name_of_a_model_is_escaped() -> None:
    async with make_scene(model_name="<b>&x", admin_token="") as scene:
        page = (await scene.client.get("/", headers={"accept": BROWSER})).text
        assert "<b>" not in page
        assert "&lt;b&gt;&amp;x" in page
