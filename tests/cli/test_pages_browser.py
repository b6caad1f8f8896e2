"""`/` and `/docs` of a running system in a real browser that can reach only the ingress.

Without Chromium these tests are skipped with the reason, or fail if FOREBAY_REQUIRE_BROWSER=1.
"""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect

from tests.cli.up import Up, running
from tests.harness.browser import Opened, visited

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("browser")]

LINKED = ["docs", "openapi.json", "v1/models", "v1/status", "health", "metrics"]


@pytest.fixture(scope="module")
def up() -> Iterator[Up]:
    with running("--workers", "1") as found:
        yield found


def require_own_requests(found: Opened, up: Up) -> None:
    """Check that the page had no error and requested nothing but files of the ingress."""
    assert found.errors == []
    assert [url for url in found.requests if not url.startswith((f"{up.url}/", "data:"))] == []


def operations(found: Opened) -> list[str]:
    return found.page.locator(".opblock-summary-path").all_inner_texts()


@pytest.mark.slow
@pytest.mark.parametrize("prefix", ["", "/team/forebay"])
def test_the_index_links_to_pages_that_respond(up: Up, browser: Browser, prefix: str) -> None:
    with visited(up.url, "/", browser, prefix=prefix) as found:
        links = [link.evaluate("link => link.href") for link in found.page.get_by_role("link").all()]
        assert links == [f"{up.url}{prefix}/{path}" for path in LINKED]
        expect(found.page.get_by_role("paragraph")).to_contain_text("serving forebay-default")
        assert found.page.evaluate("getComputedStyle(document.body).maxWidth") == "640px"  # the policy allows the style
        for link in links:
            response = found.page.goto(link)
            assert response is not None
            assert response.ok, link
        require_own_requests(found, up)


@pytest.mark.slow
@pytest.mark.parametrize("prefix", ["", "/team/forebay"])
def test_the_docs_list_the_api_and_send_requests(up: Up, browser: Browser, prefix: str) -> None:
    with visited(up.url, "/docs", browser, prefix=prefix) as found:
        models = found.page.locator(".opblock", has=found.page.get_by_text("/v1/models", exact=True)).first
        models.locator(".opblock-summary").click()
        models.get_by_role("button", name="Try it out").click()
        models.get_by_role("button", name="Execute").click()
        expect(models.locator(".live-responses-table .response-col_status").last).to_contain_text("200")
        expect(models.locator(".live-responses-table")).to_contain_text("forebay-default")
        assert f"{up.url}{prefix}/v1/models" in found.requests
        assert {"/health", "/v1/chat/completions", "/v1/embeddings"} <= {
            path.replace("\u200b", "") for path in operations(found)
        }
        require_own_requests(found, up)
