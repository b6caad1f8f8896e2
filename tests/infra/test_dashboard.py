"""Each query has data on an embedded system under load.

The rows for Kafka are checked in tests/integration/test_dashboard.py. Without Debian's package `prometheus` the tests
that need it are skipped with the reason, or fail if FOREBAY_REQUIRE_PROMETHEUS=1.
"""

import itertools
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from infra.kafka.kafka import HOST
from tests.cli.up import Up, running
from tests.dashboard import (
    APART,
    DASHBOARDS,
    EMBEDDED,
    ROWS,
    SHADOW,
    SHARED,
    dashboards,
    of_rows,
    panels,
    queries,
    without_zero,
)
from tests.harness import fork_server
from tests.harness.cluster import FOREBAY
from tests.harness.local import free_ports
from tests.harness.processes import Processes
from tests.harness.prometheus import problems, require_prometheus, scraping

pytestmark = pytest.mark.timeout(300)

INFRA = DASHBOARDS.parent.parent
ALERTS = INFRA / "prometheus/alerts.yaml"  # rules, which test_alerts.py checks


@pytest.mark.parametrize("name", dashboards())
def test_panels_have_unique_ids_and_places(name: str) -> None:
    dashboard = dashboards()[name]
    shown = [panel for _, panel in panels(dashboard)]
    rows = [panel for panel in dashboard["panels"] if panel["type"] == "row"]
    ids = [panel["id"] for panel in [*rows, *shown]]
    assert len(set(ids)) == len(ids)
    titles = [panel["title"] for panel in shown]
    assert len(set(titles)) == len(titles)
    for group in (dashboard["panels"], *(row["panels"] for row in rows)):
        cells = [cell for panel in group for cell in _cells(panel["gridPos"])]
        assert len(set(cells)) == len(cells), "panels overlap"
    for panel in shown:
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references), panel["title"]


def _cells(place: dict[str, int]) -> Iterator[tuple[int, int]]:
    assert place["x"] + place["w"] <= 24
    columns = range(place["x"], place["x"] + place["w"])
    return itertools.product(columns, range(place["y"], place["y"] + place["h"]))


def test_every_panel_is_in_a_row_whose_mode_is_known() -> None:
    assert queries().keys() == ROWS


def test_rows_of_one_mode_are_collapsed() -> None:
    for dashboard in dashboards().values():
        rows = {panel["title"]: panel["collapsed"] for panel in dashboard["panels"] if panel["type"] == "row"}
        assert rows == {title: title not in SHARED for title in rows}


def test_the_data_source_of_the_panels_is_provisioned() -> None:
    found = yaml.safe_load((INFRA / "grafana/provisioning/datasources/prometheus.yaml").read_text())
    assert [(one["uid"], one["type"]) for one in found["datasources"]] == [("prometheus", "prometheus")]


def test_metrics_without_a_help_text_are_reported() -> None:
    require_prometheus()
    assert problems("metrics", text="forebay_items 1\n") == ["forebay_items no help text"]


def test_the_configuration_of_prometheus_is_valid() -> None:
    require_prometheus()
    for path in sorted({*(INFRA / "prometheus").glob("*.yaml")} - {ALERTS}):
        assert problems("config", str(path)) == []


@contextmanager
def load(url: str) -> Iterator[None]:
    """Complete streamed requests one after the other while the body runs. Every second prompt repeats.

    The first request is for an unknown model and gets an error.
    """
    ending = threading.Event()
    failures: list[str] = []

    def complete_all() -> None:
        with httpx.Client(base_url=url, timeout=60) as client:
            client.post("/v1/completions", json={"model": "unknown", "prompt": "x"})
            for number in itertools.count():
                if ending.is_set():
                    return
                prompt = [(number // 2 * 7_919 + place) % 1_000 for place in range(200)]
                body: dict[str, Any] = {"model": "forebay-default", "prompt": prompt, "max_tokens": 8, "stream": True}
                text = client.post("/v1/completions", json=body).text
                if not text.endswith("data: [DONE]\n\n"):
                    failures.append(text)

    sending = threading.Thread(target=complete_all)
    sending.start()
    try:
        yield
    finally:
        ending.set()
        sending.join()
    assert failures == []


def address(up: Up) -> str:
    return up.url.removeprefix("http://")


def test_queries_have_data_on_an_embedded_system(tmp_path: Path) -> None:
    require_prometheus()
    shown = of_rows(*SHARED, EMBEDDED)
    with (
        running("--workers", "2", "--log", str(tmp_path / "log.db")) as up,
        scraping(tmp_path, {"up": [address(up)]}) as prometheus,
    ):
        # Without requests, rates are zero. Quantiles and ratios are not a number.
        rates = [query for query in shown if "histogram_quantile" not in query and " / " not in query]
        assert prometheus.empty(rates) == []
        assert sum(prometheus.query(of_rows("Requests")[0])) == 0
        with load(up.url):
            assert prometheus.empty([*shown, *without_zero(of_rows("Requests"))]) == []
            assert prometheus.empty(["sum(rate(dynamo_frontend_requests_total[1m])) > 0"]) == []
        assert prometheus.query("sum(forebay_worker_member)") == [2]
        assert prometheus.empty(["forebay_no_such_metric"], within_s=0) == ["forebay_no_such_metric"]
        assert prometheus.lint() == {}


@pytest.mark.slow
def test_queries_about_disaggregation_and_shadows_have_data_on_an_embedded_system(tmp_path: Path) -> None:
    require_prometheus()
    log = tmp_path / "log.db"
    fleet = ("--prefill-workers", "1", "--decode-workers", "1", "--log", str(log))
    with running(*fleet) as up, load(up.url), ExitStack() as stack:
        processes = Processes(tmp_path, fork_server.spawn)
        stack.callback(processes.end_all)
        port = free_ports(1)
        options = ("--policy", "round-robin", "--metrics-port", str(port))
        processes.start("shadow", [FOREBAY, "shadow", str(log), *options])
        with scraping(tmp_path, {"up": [address(up)], "shadow": [f"{HOST}:{port}"]}) as prometheus:
            assert prometheus.empty(of_rows(*SHARED, EMBEDDED, APART, SHADOW)) == []
            assert prometheus.lint() == {}
