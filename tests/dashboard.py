"""The Prometheus queries of the Grafana dashboards, by row."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DASHBOARDS = Path(__file__).resolve().parent.parent / "infra/grafana/dashboards"

# Titles of rows. The rows of the first group show data in every mode; the other rows only with the named part.
SHARED = ("Requests", "Routing", "Processes")
EMBEDDED = "Embedded log"
KAFKA = ("Kafka", "Kafka API")
APART = "Prefill and decode"
TIERS = "KV tiers"
SHADOW = "Shadow"
ROWS = {*SHARED, EMBEDDED, *KAFKA, APART, TIERS, SHADOW}


def dashboards() -> dict[str, dict[str, Any]]:
    return {path.name: json.loads(path.read_text()) for path in sorted(DASHBOARDS.glob("*.json"))}


def panels(dashboard: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each panel with the title of its row. A collapsed row contains its panels; others precede theirs."""
    row = ""
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            row = panel["title"]
            yield from ((row, nested) for nested in panel["panels"])
        else:
            yield row, panel


def queries() -> dict[str, list[str]]:
    """Return the expressions of all dashboards by row title."""
    found: dict[str, list[str]] = {}
    for dashboard in dashboards().values():
        for row, panel in panels(dashboard):
            found.setdefault(row, []).extend(target["expr"] for target in panel["targets"])
    return found


def of_rows(*titles: str) -> list[str]:
    found = queries()
    return [query for title in titles for query in found[title]]


def without_zero(expressions: list[str]) -> list[str]:
    """Return expressions without the part after `or`, which shows zero while there is no series."""
    return [expression.partition(" or on ")[0] for expression in expressions]


def metrics(query: str) -> set[str]:
    """Return the names of forebay's series in an expression."""
    return set(re.findall(r"\b(?:forebay|dynamo|kvbm)_\w+", query))


def labels(query: str) -> set[str]:
    """Return the labels that an expression groups or selects by."""
    grouped = (name for names in re.findall(r"\bby \(([^)]*)\)", query) for name in names.split(", "))
    return {*grouped, *re.findall(r"(\w+)=~?\"", query)}
