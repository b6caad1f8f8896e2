"""The Prometheus queries of the Grafana dashboard, by row."""

import json
import re
from pathlib import Path

DASHBOARD = Path(__file__).resolve().parent.parent / "infra/grafana/dashboards/forebay.json"
APART = "Prefill and decode"  # title of a row


def queries() -> dict[str, list[str]]:
    """Return the expressions by row title. Panels before the first row have the empty title."""
    found: dict[str, list[str]] = {"": []}
    row = found[""]
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        if panel["type"] == "row":
            row = found[panel["title"]] = []
        row += [target["expr"] for target in panel.get("targets", [])]
    return found


def metrics(query: str) -> set[str]:
    """Return the names of forebay's series in an expression."""
    return set(re.findall(r"\b(?:forebay|dynamo)_\w+", query))


def labels(query: str) -> set[str]:
    """Return the labels that an expression groups or selects by."""
    grouped = (name for names in re.findall(r"\bby \(([^)]*)\)", query) for name in names.split(", "))
    return {*grouped, *re.findall(r"(\w+)=~?\"", query)}
