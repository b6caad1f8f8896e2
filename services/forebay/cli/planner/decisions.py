"""`forebay planner status`, `history` and `explain`: read the decisions of the planner, and derive them again."""

import asyncio
import re
import time
from pathlib import Path

import msgspec
import typer

from forebay.cli.common.errors import complain, explained, fail
from forebay.cli.common.recording import KafkaSource
from forebay.cli.common.terminal import results
from forebay.cli.common.times import time_us
from forebay.cli.common.unverified import DIVERGED
from forebay.cli.planner.command import LATEST
from forebay.cli.planner.explain_view import show_explanation
from forebay.cli.planner.source import require_one_source, scaling_log, shown_reading
from forebay.cli.planner.tables import show_history, show_status
from forebay.replay.scaling.decisions import ScalingExplanation, ScalingHistory, explain_decision, read_history
from forebay.replay.scaling.journal import OnProgress
from forebay.replay.scaling.status import PlannerStatus, read_planner_status

NOT_ACTIVE = 1
OFFSET = re.compile(r"\d{1,18}")
FRACTION = re.compile(r"\.(\d{1,6})")
US_PER_S = 1_000_000


def run_status(*, source: KafkaSource, log: Path | None, json: bool) -> None:
    """Run `forebay planner status`. command.py documents its options."""
    require_one_source(source, log)
    now_us = time.time_ns() // 1000 if log is None else None

    async def read(on_progress: OnProgress) -> PlannerStatus:
        async with scaling_log(source, log) as opened:
            return await read_planner_status(opened, now_us, on_progress)

    with explained(), shown_reading() as on_progress:
        found = asyncio.run(read(on_progress))
    if json:
        typer.echo(msgspec.json.encode(found).decode())
    else:
        show_status(results(soft_wrap=True), found)
    if found.problems:
        raise typer.Exit(NOT_ACTIVE)


def run_history(
    *,
    source: KafkaSource,
    log: Path | None,
    pool: str,
    since: str,
    changes: bool,
    limit: int,
    verify: bool,
    json: bool,
) -> None:
    """Run `forebay planner history`. command.py documents its options."""
    require_one_source(source, log)
    since_us = time_us("--since", since, time.time_ns() // 1000) if since else None

    async def read(on_progress: OnProgress) -> ScalingHistory:
        async with scaling_log(source, log) as opened:
            return await read_history(opened, limit, pool, since_us, is_change=changes, on_progress=on_progress)

    with explained(), shown_reading() as on_progress:
        found = asyncio.run(read(on_progress))
    if json:
        typer.echo(msgspec.json.encode(found).decode())
    else:
        show_history(results(), found)
    verification = found.verification
    if verify and (verification.different or verification.other_rules):
        if verification.other_rules:
            complain(f"not verified: {verification.other_rules} decisions by rules of another version")
        raise typer.Exit(DIVERGED)


def run_explain(*, where: list[str], source: KafkaSource, json: bool) -> None:
    """Run `forebay planner explain`. command.py documents its options."""
    if len(where) != (1 if source.kafka else 2):
        fail("expected LOG and DECISION, or DECISION and --kafka")
    log = None if source.kafka else Path(where[0])
    name = where[-1]
    offset = int(name) if OFFSET.fullmatch(name) else None
    window_us = _window_us(name) if offset is None and name != LATEST else None

    async def read(on_progress: OnProgress) -> ScalingExplanation:
        async with scaling_log(source, log) as opened:
            return await explain_decision(opened, offset, window_us, on_progress)

    with explained(), shown_reading() as on_progress:
        found = asyncio.run(read(on_progress))
    if json:
        typer.echo(msgspec.json.encode(found).decode())
    else:
        show_explanation(results(soft_wrap=True), found)
    if found.decision.verification == "different":
        raise typer.Exit(DIVERGED)


def _window_us(text: str) -> tuple[int, int]:
    """Return the first microsecond of a time, and the one after its last. A time to the second lasts a second."""
    at_us = time_us("DECISION", text, time.time_ns() // 1000)
    fraction = FRACTION.search(text)
    return at_us, at_us + US_PER_S // 10 ** (len(fraction[1]) if fraction is not None else 0)
