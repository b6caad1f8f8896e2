"""A Prometheus server that scrapes a running system, and the checks of its `promtool`.

Both are in Debian's package `prometheus`, of which only the two programs are needed.
"""

import contextlib
import itertools
import json
import math
import os
import shutil
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from infra.kafka.kafka import HOST, tie
from tests.harness.local import Missing, free_ports

PATIENCE_S = 120.0
POLL_S = 0.1
SCRAPE_INTERVAL = "2s"  # also the timeout of a scrape on a busy machine; rate() needs two scrapes


def require_prometheus() -> None:
    """Skip the test if Prometheus is not installed, or fail if FOREBAY_REQUIRE_PROMETHEUS=1."""
    try:
        for name in ("prometheus", "promtool"):
            _program(name)
    except Missing as missing:
        if os.environ.get("FOREBAY_REQUIRE_PROMETHEUS") == "1":
            pytest.fail(str(missing), pytrace=False)
        pytest.skip(str(missing))


def _program(name: str) -> str:
    """Return the path of a program. Raises Missing."""
    found = shutil.which(name, path=os.environ.get("FOREBAY_PROMETHEUS")) or shutil.which(name)
    if found is None:
        raise Missing(f"no {name} in the folder FOREBAY_PROMETHEUS or on PATH; Debian's package is prometheus")
    return found


def problems(*check: str, text: str = "") -> list[str]:
    """Run `promtool check` with these arguments and `text` as its input, and return the lines of its complaints."""
    command = [_program("promtool"), "check", *check]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
    return lines or [f"exit code {done.returncode}"] if done.returncode else []


def rule_failures(folder: Path, rules: Path, alert: str, series: Mapping[str, str], *, fires: bool) -> list[str]:
    """Evaluate the rules on series for 30 minutes, and return the complaints of promtool about the state at the end.

    Args:
        alert: Alert whose state is checked.
        series: Values per minute of each series, in promtool's notation.
    """
    firing = f'count(ALERTS{{alertname="{alert}", alertstate="firing"}}) > bool 0'
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {"expr": firing, "eval_time": "30m", "exp_samples": [{"labels": "{}", "value": 1}] if fires else []}
        ],
    }
    path = folder / "test.json"  # JSON is YAML, too
    path.write_text(json.dumps({"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": [test]}))
    done = subprocess.run([_program("promtool"), "test", "rules", path], capture_output=True, text=True, check=False)
    return [] if done.returncode == 0 else (done.stdout + done.stderr).splitlines()


@dataclass(frozen=True, slots=True)
class Prometheus:
    """A running Prometheus.

    Attributes:
        targets: The addresses that it scrapes, by job.
    """

    api: httpx.Client
    targets: Mapping[str, list[str]]

    def query(self, expression: str) -> list[float]:
        """Return the current values of an expression, without NaN."""
        response = self.api.get("/api/v1/query", params={"query": expression})
        assert response.status_code == httpx.codes.OK, f"{expression}: {response.text}"
        values = [float(found["value"][1]) for found in response.json()["data"]["result"]]
        return [value for value in values if not math.isnan(value)]

    def unscraped(self) -> dict[str, str]:
        """Return the reason for each target that is not scraped."""
        active: list[dict[str, Any]] = self.api.get("/api/v1/targets").json()["data"]["activeTargets"]
        return {one["scrapeUrl"]: one["lastError"] or one["health"] for one in active if one["health"] != "up"}

    def empty(self, expressions: Iterable[str], within_s: float = PATIENCE_S) -> list[str]:
        """Wait until each expression had a value, and return those that had none."""
        remaining = list(expressions)
        deadline = time.monotonic() + within_s
        while (remaining := [one for one in remaining if not self.query(one)]) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return remaining

    def lint(self) -> dict[str, list[str]]:
        """Return the complaints of `promtool check metrics` about each target that has one."""
        addresses = [address for group in self.targets.values() for address in group]
        shown = {one: self.api.get(f"http://{one}/metrics").text for one in addresses}
        found = {one: problems("metrics", text=text) for one, text in shown.items()}
        return {one: lines for one, lines in found.items() if lines}


@contextlib.contextmanager
def scraping(folder: Path, targets: Mapping[str, list[str]]) -> Iterator[Prometheus]:
    """Run a Prometheus in `folder` that scrapes these addresses by job, and wait until it scraped each of them."""
    jobs = [{"job_name": job, "static_configs": [{"targets": given}]} for job, given in targets.items()]
    settings = {"scrape_interval": SCRAPE_INTERVAL, "scrape_timeout": SCRAPE_INTERVAL}
    (folder / "prometheus.yaml").write_text(json.dumps({"global": settings, "scrape_configs": jobs}))
    addresses = [address for given in targets.values() for address in given]
    first = free_ports(len(addresses) + 1)  # targets that start meanwhile may not listen yet
    port = next(one for one in itertools.count(first) if f"{HOST}:{one}" not in addresses)
    options = [f"--config.file={folder / 'prometheus.yaml'}", f"--storage.tsdb.path={folder / 'prometheus'}"]
    log = folder / "prometheus.log"
    with log.open("wb") as output:
        server = subprocess.Popen(
            [*tie(), _program("prometheus"), *options, f"--web.listen-address={HOST}:{port}", "--log.level=warn"],
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        with httpx.Client(base_url=f"http://{HOST}:{port}", timeout=PATIENCE_S) as api:
            prometheus = Prometheus(api, targets)
            deadline = time.monotonic() + PATIENCE_S
            while (missing := _missing(prometheus)) != {}:
                assert server.poll() is None, log.read_text()
                assert time.monotonic() < deadline, f"{missing}\n{log.read_text()}"
                time.sleep(POLL_S)
            yield prometheus
    finally:
        server.terminate()
        server.wait()


def _missing(prometheus: Prometheus) -> dict[str, str]:
    """Return why the server or a target is not ready yet."""
    try:
        ready = prometheus.api.get("/-/ready")
    except httpx.TransportError as error:
        return {"prometheus": str(error)}
    return prometheus.unscraped() if ready.status_code == httpx.codes.OK else {"prometheus": ready.text}
