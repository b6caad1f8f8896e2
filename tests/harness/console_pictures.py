"""Create the pictures of the console in docs/images: `python -m tests.harness.console_pictures`.

Runs an embedded system with mock engines and a console, plays a synthetic workload, drains a worker half-way, and takes
a picture of each of three views in Chromium.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any

import httpx
from playwright.sync_api import Browser

from tests.harness.browser import launched
from tests.harness.local import free_ports
from tests.harness.processes import spawn

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
TOKEN = "pictures"
WORKLOAD = "synthetic:requests=1500,rate=30,groups=8,prefix=2048,prompt=700,output=120"
DRAINED = "mock-5"
HALF_WAY_S, READY_S, SETTLE_MS = 25.0, 60.0, 1_500
WIDTH, HEIGHT, SCALE = 1_280, 800, 1.25
FOREBAY = [sys.executable, "-m", "forebay.cli"]


@contextmanager
def system(folder: Path, port: int, console_port: int) -> Iterator[None]:
    """Run `forebay up --console` while the body runs."""
    os.environ |= {"FOREBAY_CONSOLE_TOKEN": TOKEN, "FOREBAY_ADMIN_TOKEN": TOKEN}
    served = ["--port", str(port), "--console", "--console-port", str(console_port), "--admin-api"]
    options = ["--workers", "8", "--log", "run.db", "--speedup", "2", *served]
    with (folder / "up.log").open("wb") as output:
        process = spawn([*FOREBAY, "up", *options], output.fileno(), output.fileno())
    try:
        yield
    finally:
        process.kill()
        process.wait()


def wait_for(client: httpx.Client, path: str, reached: Callable[[Any], bool]) -> Any:
    """Wait until a response of the console fulfils a condition, and return it."""
    ends_s = time.monotonic() + READY_S
    while time.monotonic() < ends_s:
        try:
            response = client.get(path)
            if response.is_success and reached(found := response.json()):
                return found
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise SystemExit(f"the console did not show it at {path}")


def play(client: httpx.Client, url: str) -> None:
    """Play the workload, and drain a worker half-way."""
    trace = subprocess.Popen([*FOREBAY, "trace", WORKLOAD, "--url", url], stdout=subprocess.DEVNULL)
    time.sleep(HALF_WAY_S)
    drain = ["control", "drain-worker", "--worker", DRAINED, "--operator", "alice", "--url", url]
    subprocess.run([*FOREBAY, *drain], check=True, stdout=subprocess.DEVNULL)
    wait_for(client, "/v1/console/markers", lambda found: any(DRAINED in one["text"] for one in found["markers"]))
    trace.wait()


def picture(browser: Browser, address: str, name: str, *, prepare: str = "") -> None:
    """Take a picture of a view, after a click on the button `prepare`, if it is given."""
    context = browser.new_context(viewport={"width": WIDTH, "height": HEIGHT}, device_scale_factor=SCALE)
    page = context.new_page()
    page.goto(address)
    page.wait_for_timeout(SETTLE_MS)
    if prepare:
        page.get_by_role("button", name=prepare).click()
        page.wait_for_timeout(3 * SETTLE_MS)
    page.screenshot(path=IMAGES / f"console-{name}.png")
    context.close()
    print(f"docs/images/console-{name}.png")


def main() -> None:
    """Write the pictures."""
    # The page shows the path of the log as given, so it is relative.
    with tempfile.TemporaryDirectory(prefix="forebay-pictures-") as given, chdir(given):
        port = free_ports(2)
        url, console = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{port + 1}"
        headers = {"authorization": f"Bearer {TOKEN}"}
        with system(Path(given), port, port + 1), httpx.Client(base_url=console, headers=headers, timeout=60) as client:
            wait_for(client, "/v1/console/fleet", lambda found: found["status"]["ready"])
            play(client, url)
            take(client, console)


def take(client: httpx.Client, console: str) -> None:
    """Take the pictures of a console whose workload has ended."""
    markers = client.get("/v1/console/markers").json()["markers"]
    drained_us = next(one["at_us"] for one in markers if one["kind"] == "worker_draining")
    at_us = drained_us + 200_000
    params = {"at_us": at_us, "state": "decode", "limit": 100}
    rows = client.get("/v1/console/requests", params=params).json()["requests"]
    row = max(rows, key=lambda one: (one["cached_tokens"] or 0, one["number"]))
    with launched() as browser:
        picture(browser, f"{console}/#/fleet?at={at_us}&token={TOKEN}", "fleet")
        address = f"{console}/#/requests/{row['number']}?token={TOKEN}&id={row['request_id']}"
        picture(browser, address, "request")
        compared = f"a={drained_us - 10_000_000}&b={drained_us + 3_000_000}"
        picture(browser, f"{console}/#/time?{compared}&token={TOKEN}", "time")


if __name__ == "__main__":
    main()
