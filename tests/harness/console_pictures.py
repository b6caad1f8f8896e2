"""Create the pictures of the console in README and docs/console.md, from a simulated incident.

In the incident a worker is lost under load, and another router takes over. The real owner decides, on requests that
share prompt prefixes and on engine models whose steps take as long as those of Dynamo's mocker. Time is virtual, and
the same seed always gives the same decisions, so the pictures change only with the code.
"""

import asyncio
import random
import tempfile
from collections.abc import Iterator
from contextlib import chdir, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page

from forebay.events.base import Event
from forebay.events.control import BusyThresholds, BusyThresholdsSet
from forebay.events.fleet import WorkerLost, WorkerSuspect
from forebay.events.topics import CONTROL, Topic
from forebay.replay.record.slice import Window, contents_of, copy, slice_of
from forebay.runtime import use
from forebay.transport.sqlite.recording_writer import RecordingWriter
from tests.console.pages import console_on, page_of
from tests.harness.browser import launched
from tests.logs.stage import BEGINS_US, BLOCK, MODEL, TICK_US, Stage, StageWorker, StoppedTime

SEED = 19
WORKERS = tuple(f"worker-{number}" for number in range(1, 7))
LOST = "worker-3"
REASON = "its lease expired"
SECOND_US = 1_000_000
DIES_S, SUSPECT_S, LOST_S, OPERATOR_S, REJOINS_S, TAKEOVER_S, END_S = 50.0, 51.0, 54.0, 62.0, 80.0, 98.0, 120.0
RATE = 22.0  # requests per second
FAMILIES = 12  # prompts of a family share their first blocks
FAMILY_BLOCKS = (60, 220)
OWN_TOKENS = (40, 600)
OUTPUT_TOKENS = (30, 220)
SPEC: dict[str, Any] = {"kv_blocks_total": 4_096, "max_num_seqs": 64, "max_num_batched_tokens": 2_048}
FOLDER = Path(__file__).resolve().parents[2] / "docs" / "images"
WIDTH = 1_280
BEFORE_US = BEGINS_US + round((DIES_S - 1) * SECOND_US)
AFTER_US = BEGINS_US + round((LOST_S + 1) * SECOND_US)
FLEET_US = BEGINS_US + round((SUSPECT_S + 2) * SECOND_US)  # the worker is dead, but not declared lost yet


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of the workload. `at_us` is relative to the beginning."""

    at_us: int
    name: str
    prompt: list[int]
    max_tokens: int


class VirtualTime(StoppedTime):
    """Runtime whose wall clock is that of a stage, so that the append times of records are virtual, too."""

    def __init__(self) -> None:
        self.stage: Stage | None = None

    def wall_ns(self) -> int:
        """Return the time of the stage in nanoseconds since 1970."""
        return super().wall_ns() if self.stage is None else self.stage.now_us * 1_000


class Incident(Stage):
    """Stage whose engine steps take time. The events of a step are appended at the end of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.begun_us = self.now_us
        self._ends: dict[str, int] = {}  # end of the step of each busy worker
        self._events: dict[str, list[tuple[Topic, Event]]] = {}  # events of these steps
        self._stepping = ""

    def put(self, topic: Topic, event: Event) -> None:
        """Append an event, or keep an event of a step until the step ends."""
        if self._stepping:
            self._events[self._stepping].append((topic, event))
        else:
            super().put(topic, event)

    async def advance(self, until_us: int) -> None:
        """Run owner and workers up to a time relative to the beginning."""
        until_us += self.begun_us
        while self.now_us < until_us:
            due = [end_us for name, end_us in self._ends.items() if name in self.workers]
            at_us = max(self.now_us + TICK_US, min([until_us, *due]))
            for name, end_us in list(self._ends.items()):
                if end_us <= at_us:
                    self._end_step(name)
            self.now_us = at_us - TICK_US
            await self.settle()
            for name, worker in self.workers.items():
                if name not in self._ends:
                    self._begin_step(name, worker)

    def kill(self, name: str) -> None:
        """End the process of a worker in the middle of a step. The owner does not know that yet."""
        self._ends[name] = 1 << 62
        self._events.pop(name, None)

    async def restart(self, name: str) -> None:
        """Let a lost worker join again, with an empty cache."""
        self._ends.pop(name, None)
        await self.join(name, **SPEC)

    def _begin_step(self, name: str, worker: StageWorker) -> None:
        self._stepping, self._events[name] = name, []
        worker.take_work()
        if worker.step():
            self._ends[name] = self.now_us + worker.step_us
        self._stepping = ""

    def _end_step(self, name: str) -> None:
        del self._ends[name]
        for topic, event in self._events.pop(name, ()):
            self.put(topic, event)


def record_incident(out: Path) -> str:
    """Write the recording, and return the ID of a request that was on the worker when it was lost."""
    runtime = VirtualTime()
    with use(runtime):
        return asyncio.run(_record(out, runtime))


async def _record(out: Path, runtime: VirtualTime) -> str:
    stage = Incident()
    runtime.stage = stage
    stage.owner_id = "router-1"
    await stage.begin(*WORKERS, **SPEC)
    arrivals = _arrivals(random.Random(SEED))
    try:
        await _play(stage, arrivals, DIES_S)
        stage.kill(LOST)
        await _play(stage, arrivals, SUSPECT_S)
        await stage.fact(WorkerSuspect, LOST, REASON)
        await _play(stage, arrivals, LOST_S)
        moved = _newest_on(stage, LOST)
        await stage.fact(WorkerLost, LOST, REASON)
        await _play(stage, arrivals, OPERATOR_S)
        thresholds = BusyThresholds(active_decode_blocks_threshold=0.95)
        stage.put(CONTROL, BusyThresholdsSet(model=MODEL, thresholds=thresholds, operator="alice"))
        await _play(stage, arrivals, REJOINS_S)
        await stage.restart(LOST)
        await _play(stage, arrivals, TAKEOVER_S)
        first = stage.owner
        stage.owner_id = "router-2"
        await stage.begin()
        first.drop()
        await _play(stage, arrivals, END_S)
        await stage.owner.close()  # seals the state, so that events applied after the last decision are recorded
        slices = [await slice_of(stage.log, MODEL, 0, Window())]
        contents = await contents_of(stage.log, slices, namespace=stage.log.namespace, source="log", asked={})
        with closing(RecordingWriter.create(out, contents)) as writer:
            await copy(stage.log, writer)
            writer.finish()
    finally:
        stage.log.close()
    return moved


async def _play(stage: Incident, arrivals: list[Arrival], until_s: float) -> None:
    """Submit the requests that arrive by a time, which removes them from `arrivals`."""
    until_us = round(until_s * SECOND_US)
    while arrivals and arrivals[0].at_us <= until_us:
        arrival = arrivals.pop(0)
        await stage.advance(arrival.at_us)
        stage.submit(arrival.name, arrival.prompt, arrival.max_tokens)
    await stage.advance(until_us)


def _arrivals(draw: random.Random) -> list[Arrival]:
    """Return the workload, in the order of its arrivals."""
    blocks = [draw.randint(*FAMILY_BLOCKS) for _ in range(FAMILIES)]
    arrivals: list[Arrival] = []
    at_s = draw.expovariate(RATE)
    while at_s < END_S:
        family = min(draw.randrange(FAMILIES), draw.randrange(FAMILIES))  # the first families are the hottest
        shared = [family * 100_000 + at for at in range(blocks[family] * BLOCK)]
        own = [draw.randrange(1 << 24) for _ in range(draw.randint(*OWN_TOKENS))]
        name = f"chatcmpl-{draw.getrandbits(48):012x}"
        arrivals.append(Arrival(round(at_s * SECOND_US), name, shared + own, draw.randint(*OUTPUT_TOKENS)))
        at_s += draw.expovariate(RATE)
    return arrivals


def _newest_on(stage: Stage, worker_id: str) -> str:
    """Return the ID of the active request that was last routed to a worker."""
    active = [one for one in stage.owner.world.requests.active() if one.worker_id == worker_id]
    return max(active, key=lambda one: one.submitted.request_id).submitted.request_id


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        log = Path("incident.rec")  # relative, because the page shows the path
        request_id = record_incident(log)
        with console_on(log) as console, launched() as browser:
            with _shown(console.url, browser, f"/fleet?at={FLEET_US}", 1_040) as page:
                page.screenshot(path=FOLDER / "console-fleet.png")
            with _shown(console.url, browser, f"/requests/by-id?id={request_id}", 1_000) as page:
                page.get_by_role("heading", name="What would have changed the selection").wait_for()
                page.screenshot(path=FOLDER / "console-request.png")
            with _shown(console.url, browser, f"/time?a={BEFORE_US}&b={AFTER_US}", 900) as page:
                page.screenshot(path=FOLDER / "console-time.png")
            with _shown(console.url, browser, "/what-if?policy=round-robin", 1_000) as page:
                page.get_by_role("button", name="Compare", exact=True).click()
                page.get_by_role("heading", name="The first decision that differs").wait_for()
                page.screenshot(path=FOLDER / "console-what-if.png")


@contextmanager
def _shown(url: str, browser: Browser, fragment: str, height: int) -> Iterator[Page]:
    """Show a view in a window of this height, in pixels."""
    with page_of(url, browser, fragment, width=WIDTH) as found:
        found.page.set_viewport_size({"width": WIDTH, "height": height})
        yield found.page


if __name__ == "__main__":
    main()
