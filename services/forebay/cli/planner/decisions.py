"""`forebay planner status`: read the decisions of the planner, and derive them again."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import click

from forebay.cli.common.errors import explained, fail
from forebay.cli.common.recording import Source
from forebay.cli.common.tables import print_result, results, shown_reading
from forebay.cli.common.times import time_us
from forebay.cli.common.unverified import DIVERGED
from forebay.cli.planner.command import LIMIT, PlannerStatusCommand
from forebay.cli.planner.view import show_decisions, show_explanation, show_status
from forebay.planner.orders import scaling_on_kafka
from forebay.replay.scaling.decisions import explain_decision, read_decisions
from forebay.replay.scaling.reader import OnProgress
from forebay.replay.scaling.status import read_planner_status
from forebay.transport.base import Log

LATEST = "latest"
NOT_ACTIVE = 1
OFFSET = re.compile(r"\d{1,18}")
FRACTION = re.compile(r"\.(\d{1,6})")
US_PER_S = 1_000_000

FoundT = TypeVar("FoundT")


def run_status(options: PlannerStatusCommand) -> None:
    given = options.pool or options.start or options.changes or options.limit != LIMIT
    if given and not options.history:
        fail("--pool, --from, --changes and --limit require --history")
    if options.history and options.decision:
        fail("--history and --decision exclude each other")
    if options.decision:
        _explain(options)
    elif options.history:
        _show_history(options)
    else:
        _show_status(options)


def _show_status(options: PlannerStatusCommand) -> None:
    now_us = time.time_ns() // 1000 if options.source.log is None else None
    found = _read(options, lambda opened, on_progress: read_planner_status(opened, now_us, on_progress))
    print_result(found, options.json, lambda: show_status(results(soft_wrap=True), found))
    if found.problems:
        raise click.exceptions.Exit(NOT_ACTIVE)


def _show_history(options: PlannerStatusCommand) -> None:
    since_us = time_us("--from", options.start, time.time_ns() // 1000) if options.start else None
    found = _read(
        options,
        lambda opened, on_progress: read_decisions(
            opened, options.limit, options.pool, since_us, is_change=options.changes, on_progress=on_progress
        ),
    )
    print_result(found, options.json, lambda: show_decisions(results(), found))


def _explain(options: PlannerStatusCommand) -> None:
    decision = options.decision
    offset = int(decision) if OFFSET.fullmatch(decision) else None
    window_us = _window_us(decision) if offset is None and decision != LATEST else None
    found = _read(options, lambda opened, on_progress: explain_decision(opened, offset, window_us, on_progress))
    print_result(found, options.json, lambda: show_explanation(results(soft_wrap=True), found))
    if found.decision.verification == "different":
        raise click.exceptions.Exit(DIVERGED)


def _read(options: PlannerStatusCommand, read: Callable[[Log, OnProgress], Awaitable[FoundT]]) -> FoundT:
    """Return what `read` finds on the topic `scaling`."""
    options.source.require_one_source()

    async def run(on_progress: OnProgress) -> FoundT:
        async with _scaling_log(options.source) as opened:
            return await read(opened, on_progress)

    with explained(), shown_reading("deriving decisions") as on_progress:
        return asyncio.run(run(on_progress))


@asynccontextmanager
async def _scaling_log(source: Source) -> AsyncIterator[Log]:
    """Open the log file, or the topic `scaling` on Kafka, to read. Raises LogError if it is unreadable."""
    if source.log is not None:
        async with source.source() as log:
            yield log
        return
    async with scaling_on_kafka(source.settings()) as kafka:
        yield kafka


def _window_us(text: str) -> tuple[int, int]:
    """Return the first microsecond of a time, and the one after its last. A time to the second lasts a second."""
    at_us = time_us("--decision", text, time.time_ns() // 1000)
    fraction = FRACTION.search(text)
    return at_us, at_us + US_PER_S // 10 ** (len(fraction[1]) if fraction is not None else 0)
