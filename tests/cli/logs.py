"""Logs that tests of commands read."""

import asyncio
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from forebay.cli.app import app
from tests.replay.recorder import Recorder

US = 1_000_000


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def made(*arguments: str | Path) -> dict[str, Any]:
    """Make a recording that succeeds and return its JSON output."""
    result = invoke("record", "--json", *arguments)
    assert result.exit_code == 0, result.output
    fields: dict[str, Any] = json.loads(result.stdout)
    for report in fields["verified"].values():
        assert report["verified"] == report["decisions"] > 0
        assert report["divergence"] is None
    return fields


def at(us: int) -> str:
    """Return a time as an option value."""
    return datetime.fromtimestamp(us / US, UTC).isoformat()


def written(made: Recorder, path: Path) -> Path:
    """Write a log, and return its path."""
    asyncio.run(made.log(path)).close()
    return path
