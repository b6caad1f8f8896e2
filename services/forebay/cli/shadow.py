"""`forebay shadow`: another policy or configuration on the live log, which it only reads."""

import asyncio
import re
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NoReturn, TextIO

import msgspec
import typer
from prometheus_client import CollectorRegistry
from xxhash import xxh3_64_intdigest

from forebay.cli.common.cluster import (
    LOOPBACK,
    NAMESPACE,
    KafkaSource,
    MetricsHostOption,
    MetricsPortOption,
    NamespaceOption,
    PropertiesOption,
    VerboseOption,
    kafka_settings,
    run_service,
    start_logging,
    until_signal,
)
from forebay.cli.common.errors import complain, explained, fail
from forebay.cli.common.metrics_server import metrics_served
from forebay.cli.common.recording import GroupOption, LogArgument, Recording
from forebay.cli.common.terminal import own_stdout
from forebay.cli.common.unverified import DIVERGED
from forebay.cli.policies.alternative import Alternative, PolicyConfigOption, PolicyOption, SetOption, alternative
from forebay.cli.policies.recorded import require_policies
from forebay.cli.shadow_lines import Printing, file_sink
from forebay.events.base import hex_digest
from forebay.events.topics import DECISIONS
from forebay.live.router.standby import RecoveryDiverged
from forebay.live.shadow.metrics import ShadowMetrics
from forebay.live.shadow.shadow import Shadow, ShadowSettings
from forebay.live.shadow.topic import TopicSink
from forebay.transport.kafka.position import KafkaPosition
from forebay.transport.kafka.topics import count_topics
from forebay.transport.sqlite.log import SqliteLog

NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
SHADOW_GROUP = "shadow-"  # and the name of the shadow: the consumer group that its position is committed for
SUMMARY_S = 10.0  # between two lines on stderr, if anything was decided


@dataclass(frozen=True, slots=True)
class _Options:
    recording: Recording
    settings: ShadowSettings
    chosen: Alternative
    out: Path | None
    printed_to: TextIO | None
    metrics_host: str
    metrics_port: int | None


def shadow(
    log: LogArgument = None,
    sets: SetOption = None,
    policy: PolicyOption = None,
    policy_config: PolicyConfigOption = None,
    name: Annotated[
        str, typer.Option(help="Tells this shadow from others, and what it is if started again; made up when empty.")
    ] = "",
    from_start: Annotated[
        bool, typer.Option("--from-start", help="If it is new, begin with the first decision, not the next.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="With LOG: append its events to this file, as JSON lines.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print its events as JSON lines.")] = False,
    kafka: KafkaSource = None,
    namespace: NamespaceOption = NAMESPACE,
    kafka_config: PropertiesOption = None,
    group: GroupOption = "",
    metrics_port: MetricsPortOption = None,
    metrics_host: MetricsHostOption = LOOPBACK,
    verbose: VerboseOption = False,
) -> None:
    """Say at every decision of a running system what another policy or configuration would have chosen.

    It follows the log as a process of its own, reading only: on Kafka its events go to the topic `shadow`, and nowhere
    else. It goes on until it is told to end; started again under the same name it goes on where it was. Exit 1 when
    a recorded decision cannot be derived again.
    """
    recording = Recording(log, kafka, namespace, kafka_config, group)
    recording.require_one_source()
    if out is not None and kafka is not None:
        fail("--out is for a log file: on Kafka the events are in the topic shadow")
    if name and not NAME.fullmatch(name):
        fail(f"--name {name!r}: a name has 1 to 64 letters, digits, dots, dashes and underscores")
    start_logging(verbose=verbose)
    with explained():
        chosen = alternative(sets, policy, policy_config)
    text = _text(chosen)
    settings = ShadowSettings(
        name=name or hex_digest(xxh3_64_intdigest(text.encode()))[:8],
        text=text,
        alternative=chosen.of,
        from_start=from_start,
    )
    options = _Options(recording, settings, chosen, out, sys.stdout if json else None, metrics_host, metrics_port)
    with own_stdout() if json else nullcontext():
        run_service(_serve(options))


async def _serve(options: _Options) -> None:
    """Run a shadow until SIGINT or SIGTERM. Raises LogError."""
    registry = CollectorRegistry()
    async with _opened(options) as shadow:
        registry.register(ShadowMetrics(shadow))
        with metrics_served(options.metrics_host, options.metrics_port, registry):
            try:
                await until_signal(_run(shadow, options), stop=shadow.stop)
            except RecoveryDiverged as error:
                _diverged(error)


async def _run(shadow: Shadow, options: _Options) -> None:
    await shadow.start()
    pools = list(shadow.pools.values())
    if pools:
        options.chosen.require_pools(pools)
        for given in options.chosen.idle(pools):
            typer.echo(f"forebay: {given} changes nothing: the pools are configured so", err=True)
    name, text = shadow.settings.name, shadow.settings.text
    typer.echo(f"forebay: shadow {name}: {text}, decisions from journal offset {shadow.from_offset} on")
    telling = asyncio.create_task(_tell(shadow))
    try:
        await shadow.run()
    finally:
        telling.cancel()
        typer.echo(_summary(shadow))


async def _tell(shadow: Shadow) -> None:
    """A line on stderr every so often."""
    told = 0
    while True:
        await asyncio.sleep(SUMMARY_S)
        if shadow.statistics.decisions > told:
            told = shadow.statistics.decisions
            typer.echo(_summary(shadow), err=True)


def _summary(shadow: Shadow) -> str:
    lag = max(0, shadow.end - shadow.position)
    behind = f", {lag} journal records behind" if lag else ""
    return f"forebay: shadow {shadow.settings.name}: {shadow.statistics}{behind}"


def _diverged(error: RecoveryDiverged) -> NoReturn:
    complain(str(error))
    raise typer.Exit(DIVERGED)


@asynccontextmanager
async def _opened(options: _Options) -> AsyncIterator[Shadow]:
    """A shadow with its log and its sink. Raises LogError, Unusable."""
    recording, settings = options.recording, options.settings
    async with AsyncExitStack() as stack:
        if recording.kafka is None:
            log, partition = await stack.enter_async_context(recording.opened())
            if isinstance(log, SqliteLog) and log.recording is not None:
                fail(f"{recording.name} is a recording, and does not go on: ask it by forebay replay diff")
            kept = None if options.out is None else stack.enter_context(file_sink(options.out, settings.name))
            await require_policies(log, partition)
            yield Shadow(log, partition, settings, Printing(kept, options.printed_to))
            return
        kafka = kafka_settings(recording.kafka, recording.namespace, recording.kafka_config)
        await count_topics(kafka)  # a cluster may be older than the topic `shadow`
        log, partition = await stack.enter_async_context(recording.opened())
        await require_policies(log, partition)
        sink = Printing(TopicSink(log, partition, settings.name), options.printed_to)
        position = await KafkaPosition.open(kafka, DECISIONS.name, partition, SHADOW_GROUP + settings.name)
        stack.push_async_callback(position.close)
        yield Shadow(log, partition, settings, sink, position.update)


def _text(chosen: Alternative) -> str:
    """What is changed, as it was given; a file's content counts, too."""
    if chosen.base is None:
        return str(chosen)
    return f"{chosen} (content {hex_digest(xxh3_64_intdigest(msgspec.json.encode(chosen.base)))})"
