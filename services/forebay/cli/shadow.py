"""`forebay shadow`: evaluate another policy or configuration on the live log, read-only."""

import asyncio
import re
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from typing import TextIO

import click
import msgspec
from xxhash import xxh3_64_intdigest

from forebay.cli.command import ShadowCommand
from forebay.cli.common.errors import explained, fail, run_service
from forebay.cli.common.recording import Recording
from forebay.cli.common.terminal import own_stdout
from forebay.cli.common.unverified import DIVERGED
from forebay.cli.policies.allowed import allowed_policies
from forebay.cli.policies.alternative import Alternative
from forebay.events.base import hex_digest
from forebay.events.codec import encode
from forebay.events.shadow import ShadowEvent
from forebay.events.topics import SHADOW
from forebay.live.shadow.shadow import Shadow, ShadowSettings, ShadowSink, TopicSink, shadow_metrics
from forebay.live.standby import RecoveryDiverged
from forebay.processes.metrics_server import metrics_served, process_registry
from forebay.processes.service import until_signal
from forebay.transport.kafka.topics import count_topics
from forebay.transport.sqlite.log import SqliteLog

NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
SUMMARY_S = 10.0  # seconds between two summary lines on stderr, if there were new decisions


def run_shadow(options: ShadowCommand) -> None:
    options.recording.require_one_source()
    if options.name and not NAME.fullmatch(options.name):
        fail(f"invalid --id {options.name!r}: use 1 to 64 letters, digits, dots, dashes and underscores")
    options.logs.start(quiet=("forebay.live.shadow",))  # the command prints the same itself
    with explained():
        chosen = options.given.alternative()
        custom = allowed_policies(options.allow_policy, chosen.modes)
    text = _text(chosen)
    settings = ShadowSettings(
        name=options.name or hex_digest(xxh3_64_intdigest(text.encode()))[:8],
        text=text,
        alternative=chosen.of,
        from_start=options.from_start,
        custom=custom,
    )
    printed_to = sys.stdout if options.json else None
    with own_stdout() if options.json else nullcontext():
        run_service(_serve(options, settings, chosen, printed_to))


async def _serve(
    options: ShadowCommand, settings: ShadowSettings, chosen: Alternative, printed_to: TextIO | None
) -> None:
    registry = process_registry()
    async with _opened(options.recording, settings, printed_to) as shadow:
        registry.register(shadow_metrics(shadow))
        with metrics_served(options.service.metrics_host, options.service.metrics_port, registry):
            try:
                await until_signal(_run(shadow, chosen), stop=shadow.stop)
            except RecoveryDiverged as error:
                fail(str(error), DIVERGED)


async def _run(shadow: Shadow, chosen: Alternative) -> None:
    await shadow.start()
    pools = list(shadow.pools.values())
    if pools:
        chosen.require_pools(pools)
        for given in chosen.idle(pools):
            click.echo(f"forebay: {given} has no effect: it equals the current configuration", err=True)
    name, text = shadow.settings.name, shadow.settings.text
    click.echo(f"forebay: shadow {name}: {text}, decisions from journal offset {shadow.from_offset} on")
    printing = asyncio.create_task(_print_summaries(shadow))
    try:
        await shadow.run()
    finally:
        printing.cancel()
        click.echo(_summary(shadow))


async def _print_summaries(shadow: Shadow) -> None:
    printed = 0
    while True:
        await asyncio.sleep(SUMMARY_S)
        if shadow.statistics.decisions > printed:
            printed = shadow.statistics.decisions
            click.echo(_summary(shadow), err=True)


def _summary(shadow: Shadow) -> str:
    lag = max(0, shadow.end - shadow.position)
    behind = f", {lag} journal records behind" if lag else ""
    return f"forebay: shadow {shadow.settings.name}: {shadow.statistics}{behind}"


@asynccontextmanager
async def _opened(recording: Recording, settings: ShadowSettings, printed_to: TextIO | None) -> AsyncIterator[Shadow]:
    """Open a shadow with its log and its sink."""
    if recording.kafka is not None:
        await count_topics(recording.settings())  # a cluster of an earlier version may lack topic `shadow`
    async with recording.opened(settings.custom) as (log, partition):
        if isinstance(log, SqliteLog) and log.recording is not None:
            fail(f"{recording.name} is a recording, which does not grow; use forebay replay diff instead")
        kept = None if recording.kafka is None else TopicSink(log, partition, settings.name)
        yield Shadow(log, partition, settings, PrintingSink(kept, printed_to))


def _text(chosen: Alternative) -> str:
    """Return the options that define the alternative, and a hash of the content of the policy file."""
    if chosen.base is None:
        return str(chosen)
    return f"{chosen} (content {hex_digest(xxh3_64_intdigest(msgspec.json.encode(chosen.base)))})"


class PrintingSink:
    """Prints a shadow's events as JSON lines, after another sink has stored them, if there is one."""

    def __init__(self, kept: ShadowSink | None, to: TextIO | None) -> None:
        self._kept = kept
        self._to = to

    async def last(self) -> ShadowEvent | None:
        """Return the last event of the other sink; None without one, because nothing else stores events."""
        return None if self._kept is None else await self._kept.last()

    async def write(self, events: Sequence[ShadowEvent]) -> None:
        if self._kept is not None:
            await self._kept.write(events)
        if self._to is not None:
            self._to.write("".join(f"{encode(SHADOW, event).decode()}\n" for event in events))
            self._to.flush()
