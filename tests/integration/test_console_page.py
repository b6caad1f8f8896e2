"""The console's page in Chromium beside a system on Kafka: views, actions and a takeover.

The tests share one system, and run in this order: the last ones look back at what the first ones did. Without Chromium
they are skipped with the reason, or fail if FOREBAY_REQUIRE_BROWSER=1.
"""

import asyncio
import re
import threading
from collections.abc import Coroutine, Iterator
from contextlib import AsyncExitStack
from typing import Any, TypeVar

import httpx
import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from forebay.events.control import PolicySet
from forebay.events.topics import CONTROL, Topic
from tests.console.conftest import browser
from tests.console.pages import (
    confirm,
    expect_error,
    fleet_of,
    go,
    page_of,
    read,
    review_action,
    wait_indexed,
    wait_until,
)
from tests.console.serving import TOKEN
from tests.harness.cluster import GROUP, Cluster, Ownership
from tests.harness.local import free_ports
from tests.harness.scaling import start_planner, supervised
from tests.integration.conftest import MakeCluster
from tests.integration.stream_clients import TIMEOUT_S, post, prompt

__all__ = ["browser"]

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("browser")]

ROUTERS = ("r1", "r2")
WORKERS = ("w1", "w2", "w3")
PROMPTS = 4
ROUNDS = 4  # requests per prompt: a policy without a cache index sends them to several workers
TAKEOVER_WITHIN_S = 60.0
T = TypeVar("T")
# Method `load` never has enough observations, so only an operator changes the size of the pool.
PLANNER = {"interval_s": 1.0, "method": "load", "min_observations": 1_000}
POOL = {"max_size": 4, "startup_s": 0}
REQUESTS = PROMPTS * ROUNDS


class LoopThread:
    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class ConsoleSystem:
    """A running system with its console.

    Args:
        url: origin of the console's page.
        thread: runs the loop of `cluster`.
    """

    def __init__(self, cluster: Cluster, url: str, thread: LoopThread) -> None:
        self.cluster = cluster
        self.url = url
        self._thread = thread

    def complete(self, *numbers: int) -> None:
        """Send a request per number, one after another, and wait for the responses."""
        self._thread.run(complete(self.cluster, *numbers))

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._thread.run(coroutine)

    def finished(self) -> int:
        return len(read(self.url, "/v1/console/requests", state="finished", limit=500)["requests"])

    def owner(self) -> str:
        return self.run(self.cluster.owner())

    def events(self, topic: Topic, kind: type[T]) -> list[T]:
        """Return the events of a type on a topic, whose partition is that of the group."""
        return self.run(self.cluster.events(topic, kind))

    def forebay(self, name: str, *arguments: str) -> str:
        """Run a command that succeeds on the log of the system, and return its output."""
        code, output = self.run(self.cluster.command(name, *arguments, *self.cluster.where, within_s=TIMEOUT_S))
        assert code == 0, (self.cluster.processes.folder / f"{name}.log").read_text()
        return output

    def kill_owner(self) -> Ownership:
        """Kill the owner, wait until another router has routed a request, and return its ownership."""

        async def replace() -> Ownership:
            owner = await self.cluster.owner()
            self.cluster.kill(owner)
            await complete(self.cluster, PROMPTS)
            return await self.cluster.taken_over(owner, within_s=TAKEOVER_WITHIN_S)

        return self.run(replace())


async def complete(cluster: Cluster, *numbers: int) -> None:
    """Send a request per number, one after another, and wait for the responses."""
    async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
        for number in numbers:
            body = {"model": GROUP, "prompt": prompt(number), "max_tokens": 4}
            (await post(client, f"{cluster.urls['i1']}/v1/completions", json=body)).raise_for_status()


async def start(stack: AsyncExitStack, cluster: Cluster, thread: LoopThread) -> ConsoleSystem:
    """Run two routers, three workers, an ingress, a planner with its supervisor, and a console."""
    await stack.enter_async_context(cluster)
    await cluster.serve(ROUTERS, WORKERS)
    start_planner(cluster, "planner", PLANNER, POOL)
    await stack.enter_async_context(supervised(cluster, "supervisor"))
    port, token_file = free_ports(1), cluster.processes.folder / "console-token"
    token_file.write_text(TOKEN)
    served = ("--port", str(port), "--token-file", str(token_file), "--url", cluster.urls["i1"])
    cluster.begin("console", "console", *cluster.where, "--cache-dir", str(cluster.processes.folder), *served)
    return ConsoleSystem(cluster, f"http://127.0.0.1:{port}", thread)


@pytest.fixture(scope="module")
def system(browser: Browser, make_cluster: MakeCluster) -> Iterator[ConsoleSystem]:
    """Run a system with a console, and send requests of which the caches have some.

    It needs the browser, so that nothing is started without Chromium. The loop of the browser runs in the thread of the
    tests, so the loop that controls the processes has a thread of its own.
    """
    thread, stack = LoopThread(), AsyncExitStack()
    try:
        system = thread.run(start(stack, make_cluster("console"), thread))
        wait_indexed(system.url)
        system.complete(*[*range(PROMPTS)] * ROUNDS)
        wait_until(lambda: system.finished() == REQUESTS, "the console shows all requests as finished")
        yield system
    finally:
        thread.run(stack.aclose())
        thread.close()


def workers_of(page: Page) -> Locator:
    return page.get_by_role("table", name="Workers and ranks")


def test_every_view_shows_the_live_system(system: ConsoleSystem, browser: Browser) -> None:
    owner = system.owner()
    (standby,) = {*ROUTERS} - {owner}
    with page_of(system.url, browser) as found:
        page, main = found.page, found.page.get_by_role("main")
        expect(page.get_by_role("heading", level=1)).to_have_text(
            "Ready: 3 workers, 0 requests in flight, no problems."
        )
        assert fleet_of(page) == [(name, "ready", "0") for name in WORKERS]
        expect(main).to_contain_text(f"{owner} owns group {GROUP}")
        expect(main).to_contain_text(f"Standbys: {standby}.")
        page.get_by_role("link", name="Requests", exact=True).click()
        table = page.get_by_role("table", name="Requests")
        expect(table.get_by_role("row")).to_have_count(REQUESTS + 1)
        system.complete(0)
        expect(table.get_by_role("row")).to_have_count(REQUESTS + 2)
        # The owner writes no record about the end of a request while it is idle.
        expect(table.get_by_text("finished")).to_have_count(REQUESTS + 1)
        go(page, "/time")
        joined = page.get_by_role("table", name="Markers")
        for name in (*WORKERS, owner):
            expect(joined).to_contain_text(name)
        go(page, "/scaling")
        expect(page.get_by_role("heading", level=1)).to_have_text("The planner is active. It scales 1 pool.")
        expect(page.get_by_role("banner")).to_contain_text("up to date")


def test_an_operator_changes_the_policy_of_a_pool(system: ConsoleSystem, browser: Browser) -> None:
    token = system.cluster.admin_token
    with page_of(system.url, browser) as found:
        title = "Change the policy of a pool"
        dialog = review_action(found.page, title, "mallory", "wrong", pool="default", policy="round-robin")
        confirm(dialog)
        expect(dialog.get_by_role("alert")).to_contain_text("token")
        expect_error(found, "403")
        assert system.events(CONTROL, PolicySet) == []
        dialog = review_action(found.page, title, "bob", token, pool="default", policy="round-robin")
        expect(dialog).to_contain_text(f"the pool default of {GROUP} routes by round-robin, by bob")
        confirm(dialog)
        expect(dialog).to_contain_text("policy round-robin")
        dialog.get_by_role("button", name="Close").click()
        expect(found.page.get_by_role("table", name="Pools")).to_contain_text("round-robin")
    assert [(one.operator, one.mode) for one in system.events(CONTROL, PolicySet)] == [("bob", "round-robin")]


def test_a_size_that_an_operator_sets_is_shown(system: ConsoleSystem, browser: Browser) -> None:
    system.forebay("size", "planner", "set", f"{GROUP}/default", "1", "--operator", "carol")
    with page_of(system.url, browser, "/scaling") as found:
        expect(found.page.get_by_role("main")).to_contain_text("carol has set 1")
        go(found.page, "/fleet")
        expect(workers_of(found.page).get_by_role("row").filter(has_text="default-0")).to_contain_text("ready")


def test_a_takeover_is_a_marker_and_a_missing_standby_a_problem(system: ConsoleSystem, browser: Browser) -> None:
    with page_of(system.url, browser) as found:
        page, before = found.page, system.owner()
        newest = system.kill_owner()
        alone = f"No standby for group {GROUP}: if its router fails, requests wait until one is started"
        expect(page.get_by_role("main")).to_contain_text(alone)
        expect(page.get_by_role("main")).to_contain_text(f"{newest.router} owns group {GROUP}")
        takeovers = [one for one in read(system.url, "/v1/console/markers")["markers"] if one["kind"] == "takeover"]
        go(page, "/time")
        takeover = page.get_by_role("table", name="Markers").get_by_role("row").filter(has_text=takeovers[-1]["text"])
        expect(takeover).to_contain_text(newest.router)
        takeover.get_by_role("link").click()
        expect(page).to_have_url(re.compile(f"at={takeovers[-1]['at_us']}$"))
        # A claim has no clock reading, so the state shows the new owner from the old owner's last decision on.
        decided_us = read(system.url, "/v1/console/requests", limit=500)["requests"][-1]["routed_us"]
        for at_us, owner in ((takeovers[-1]["at_us"], newest.router), (decided_us, before)):
            go(page, f"/fleet?at={at_us}")
            expect(page.get_by_role("main")).to_contain_text(f"{owner} owns group {GROUP}")
