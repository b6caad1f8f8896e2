"""Benchmark of the console's page while a log grows at a given rate of requests.

A process writes a log of seeded traffic at the rate, a console follows it, and Chromium shows a view of it. The table
has the tasks of the page's main thread, the updates of the page, and CPU time and memory of each process. The machine
is shared by all of them, so a slow machine shows longer tasks.
"""

import argparse
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from playwright.sync_api import Page

from tests.benchmarks.bench_replay import MIB
from tests.benchmarks.recordings import Shape, write_recording
from tests.harness.browser import launched
from tests.harness.local import free_ports
from tests.harness.processes import spawn

TOKEN = "bench"
CASES = {"fleet": ("fleet", 8), "requests": ("requests", 8), "time": ("time", 8), "fleet-200": ("fleet", 200)}
"""View and number of workers of each case."""
COLUMNS = (
    *("case", "tasks from 1 ms", "p95 ms", "p95 ms of CPU", "longest ms", "above 50 ms"),
    *("requests/s of the page", "table rows", "heap MiB", "behind s"),
)
LONG_MS = 50.0
READY_S = 60.0
WARM_UP_S = 5.0
TICK_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Tasks:
    """Tasks of the page's main thread that took at least a millisecond.

    Attributes:
        wall_ms: their durations, sorted. Other processes on the same cores make them longer.
        cpu_ms: their CPU times, sorted.
    """

    wall_ms: list[float]
    cpu_ms: list[float]

    @property
    def columns(self) -> str:
        """Columns of the table: number, p95 of both, the longest, and the number of durations above `LONG_MS`."""
        longest, long = max(self.wall_ms, default=0.0), sum(one > LONG_MS for one in self.wall_ms)
        p95 = " | ".join(f"{p95_of(times):.1f}" for times in (self.wall_ms, self.cpu_ms))
        return f"{len(self.wall_ms)} | {p95} | {longest:.1f} | {long}"


def p95_of(times: list[float]) -> float:
    """Return the 95th percentile of sorted times, or 0 if there are none."""
    return times[int(len(times) * 0.95)] if times else 0.0


def write(path: Path, shape: Shape, rate: float) -> None:
    """Write the log at a rate, in a process of its own."""
    import asyncio  # noqa: PLC0415 - the parent must not have an event loop while a browser runs

    asyncio.run(write_recording(path, shape, rate))


@contextmanager
def writing(path: Path, shape: Shape, rate: float) -> Iterator[int]:
    """Write a log in another process while the body runs. Yield the id of the process."""
    process = multiprocessing.get_context("spawn").Process(target=write, args=(path, shape, rate))
    process.start()
    try:
        assert process.pid is not None
        yield process.pid
    finally:
        process.kill()
        process.join()


@contextmanager
def console(path: Path, folder: Path) -> Iterator[tuple[str, int]]:
    """Run a console on a log while the body runs. Yield its address and the id of its process."""
    port = free_ports(1)
    (folder / "token").write_text(TOKEN)
    command = ["-m", "forebay.cli", "console", str(path), "--port", str(port), "--token-file", str(folder / "token")]
    with (folder / "console.log").open("wb") as output:
        process = spawn([sys.executable, *command], output.fileno(), output.fileno())
    url = f"http://127.0.0.1:{port}"
    try:
        ends_s = time.monotonic() + READY_S
        while time.monotonic() < ends_s:
            try:
                found = httpx.get(f"{url}/v1/console", headers={"authorization": f"Bearer {TOKEN}"}).json()
                if found["state"]["is_complete"]:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        else:
            raise SystemExit(f"the console did not follow the log: {(folder / 'console.log').read_text()}")
        yield url, process.pid
    finally:
        process.kill()
        process.wait()


def processes_of(pid: int) -> dict[str, int]:
    """Return the processes of a console by their role."""
    found = {"web": pid}
    listed = subprocess.run(["pgrep", "-P", str(pid), "-a"], capture_output=True, text=True, check=False).stdout
    for line in listed.splitlines():
        child, _, command = line.partition(" ")
        for role in ("indexer", "reader"):
            if f"{role}_process" in command:
                found[role] = int(child)
    return found


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK_S


def rss_mib(pid: int) -> float:
    """Return the resident memory of a process."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1_024 / MIB


def traced(page: Page, seconds: float) -> Tasks:
    """Measure the tasks of the page's main thread."""
    session = page.context.new_cdp_session(page)
    events: list[dict[str, Any]] = []
    ended: list[bool] = []
    session.on("Tracing.dataCollected", lambda found: events.extend(found["value"]))
    session.on("Tracing.tracingComplete", lambda _: ended.append(True))
    categories = "disabled-by-default-devtools.timeline,devtools.timeline,toplevel"
    session.send("Tracing.start", {"transferMode": "ReportEvents", "categories": categories})
    page.wait_for_timeout(seconds * 1_000)
    session.send("Tracing.end")
    while not ended:
        page.wait_for_timeout(100)
    main = {
        (event["pid"], event["tid"])
        for event in events
        if event["name"] == "thread_name" and event["args"]["name"] == "CrRendererMain"
    }
    tasks = [
        (event["dur"] / 1_000, event["tdur"] / 1_000)
        for event in events
        if event["name"] == "RunTask" and (event["pid"], event["tid"]) in main and event.get("dur", 0) >= 1_000
    ]
    return Tasks(sorted(wall for wall, _ in tasks), sorted(cpu for _, cpu in tasks))


def measure(page: Page, url: str, view: str, seconds: float) -> str:
    """Show a view, and return the columns of the table that describe its page."""
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.goto(f"{url}/#/{view}?token={TOKEN}")
    page.wait_for_timeout(WARM_UP_S * 1_000)
    before = len(requests)
    tasks = traced(page, seconds)
    rows = page.locator("tr").count()
    page.context.new_cdp_session(page).send("HeapProfiler.collectGarbage")
    heap = page.evaluate("performance.memory.usedJSHeapSize") / MIB
    updates = (len(requests) - before) / seconds
    return f"{tasks.columns} | {updates:.1f} | {rows} | {heap:.1f}"


def run(args: argparse.Namespace, workers: int, cases: list[str], folder: Path) -> list[str]:
    """Measure the cases with this number of workers, print their rows, and return lines about the console."""
    log = folder / "log.db"
    seconds = READY_S + len(cases) * (args.seconds + WARM_UP_S + 5)
    shape = Shape(workers, round(args.rate * seconds), tokens=False)
    with writing(log, shape, args.rate), launched() as browser:
        while not log.exists():
            time.sleep(0.1)
        time.sleep(1.0)
        with console(log, folder) as (url, pid):
            roles = processes_of(pid)
            began_s, used = time.monotonic(), {role: cpu_s(one) for role, one in roles.items()}
            for case in cases:
                page = browser.new_page(viewport={"width": 1_280, "height": 900})
                found = measure(page, url, CASES[case][0], args.seconds)
                page.close()
                state = httpx.get(f"{url}/v1/console", headers={"authorization": f"Bearer {TOKEN}"}).json()["state"]
                print(f"| {case} | {found} | {state['behind_s']:.2f} |", flush=True)
            passed_s = time.monotonic() - began_s
            followed = state["end_offset"] / state["log_end_offset"]
            lines = [f"{workers} workers: {followed:.1%} of the log followed; share of a core, and memory:"]
            for role, one in processes_of(pid).items():
                share = (cpu_s(one) - used.get(role, 0.0)) / passed_s
                lines.append(f"  {role}: {share:.0%}, {rss_mib(one):.0f} MiB")
            return lines


def main() -> None:
    """Run the benchmark of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=1_000.0, help="requests per second (default %(default)g)")
    parser.add_argument("--seconds", type=float, default=10.0, help="measured seconds per case (default %(default)g)")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="cases (default: all)")
    args = parser.parse_args()
    print(f"{args.rate:g} requests/s, {args.seconds:g} s per case; fleet-200 has 200 workers, the others 8\n")
    print(f"| {' | '.join(COLUMNS)} |")
    print(f"|---{'|---:' * (len(COLUMNS) - 1)}|")
    lines = []
    for workers in sorted({CASES[case][1] for case in args.cases}):
        cases = [case for case in args.cases if CASES[case][1] == workers]
        with tempfile.TemporaryDirectory(prefix="forebay-bench-") as folder:
            lines += run(args, workers, cases, Path(folder))
    print("\n" + "\n".join(lines))


if __name__ == "__main__":
    main()
