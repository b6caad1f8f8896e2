"""Open a page in the installed headless Chromium, without a network, and collect its errors and requests."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from playwright.sync_api import Browser, BrowserContext, Page, Route, expect, sync_playwright

from tests.harness.local import Missing

Scheme = Literal["light", "dark"]
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PATIENCE_MS = 30_000


@dataclass
class Opened:
    """A page, its errors, and the requests that it made for other resources."""

    page: Page
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


def chromium() -> str:
    """Return the browser to run: FOREBAY_CHROMIUM, or the first one on PATH. Raises Missing."""
    if given := os.environ.get("FOREBAY_CHROMIUM"):
        return given
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        raise Missing(f"no browser: none of {', '.join(NAMES)} is on PATH, and FOREBAY_CHROMIUM names none")
    return found


@contextlib.contextmanager
def launched() -> Iterator[Browser]:
    """Run a browser. No event loop can run in this thread meanwhile. Raises Missing."""
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium's sandbox refuses root
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=arguments)
        try:
            yield browser
        finally:
            browser.close()


@contextlib.contextmanager
def opened(
    path: Path,
    browser: Browser,
    *,
    scheme: Scheme = "light",
    width: int = 1_280,
    height: int = 900,
    scale: float = 1,
) -> Iterator[Opened]:
    """Open the page of a file in a new context of the browser, without a network."""
    context = browser.new_context(
        offline=True,
        color_scheme=scheme,
        viewport={"width": width, "height": height},
        device_scale_factor=scale,
        accept_downloads=True,
    )
    try:
        found = _observed(context)
        found.page.goto(path.resolve().as_uri())
        found.requests.remove(path.resolve().as_uri())
        yield found
    finally:
        context.close()


@contextlib.contextmanager
def visited(
    address: str, path: str, browser: Browser, *, prefix: str = "", scheme: Scheme = "light", width: int = 1_280
) -> Iterator[Opened]:
    """Open `path` of the server at `address`, an origin such as http://127.0.0.1:8000.

    Requests to other origins fail. With a prefix, the page is shown as by a proxy that removes the prefix from paths.
    """
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 900})

    def forward(route: Route) -> None:
        inner = route.request.url.removeprefix(address + prefix)
        if inner == route.request.url:
            route.abort()
        elif prefix:
            route.fulfill(response=route.fetch(url=address + inner))
        else:
            route.continue_()

    try:
        context.route(lambda url: urlsplit(url).scheme in {"http", "https"}, forward)
        found = _observed(context)
        found.page.goto(f"{address}{prefix}{path}")
        yield found
    finally:
        context.close()


def _observed(context: BrowserContext) -> Opened:
    """Return a new page whose errors and requests are collected."""
    context.set_default_timeout(PATIENCE_MS)
    found = Opened(context.new_page())
    found.page.on("pageerror", lambda error: found.errors.append(str(error)))
    found.page.on("console", lambda message: found.errors.append(message.text) if message.type != "log" else None)
    found.page.on("request", lambda request: found.requests.append(request.url))
    return found
