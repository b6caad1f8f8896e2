"""Write the JSON Schemas and docs/events.md from the event types: `make schemas`."""

import json
from pathlib import Path

from forebay.events.schema import document, registry
from tests.harness import recordings

ROOT = Path(__file__).resolve().parents[2]
REGISTRY = ROOT / "schemas/forebay/events/registry"
DOCUMENT = ROOT / "docs/events.md"


def main() -> None:
    """Replace the whole registry; schemas of removed topics are deleted."""
    REGISTRY.mkdir(exist_ok=True)
    for stale in REGISTRY.glob("*.json"):
        stale.unlink()
    for stem, schema in registry().items():
        (REGISTRY / f"{stem}.json").write_text(json.dumps(schema, indent=2, ensure_ascii=False) + "\n")
    DOCUMENT.write_text(page())


def page() -> str:
    """Return the text of docs/events.md: the events, and the files that store them."""
    return document() + recordings.chapter()


if __name__ == "__main__":
    main()
