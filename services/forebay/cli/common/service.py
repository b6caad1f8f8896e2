"""Run the coroutine of a process."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import uvloop

from forebay.cli.common.errors import explained


def run_service(main: Coroutine[Any, Any, None]) -> None:
    """Run the coroutine of a process until it ends. An error ends this program with a one-line message."""
    with explained(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main)
