"""`forebay topics`: show the records of a log, and create and inspect the topics of a broker."""

import asyncio
from contextlib import AsyncExitStack

import click
import msgspec
from aiokafka.admin import AIOKafkaAdminClient

from forebay.cli.command import TopicsAclsCommand, TopicsCreateCommand, TopicsListCommand, TopicsTailCommand
from forebay.cli.common.errors import explained, fail
from forebay.cli.common.recording import Recording, Source, kafka_log
from forebay.cli.common.tables import print_table
from forebay.events.names import unknown_name
from forebay.events.topics import DECISIONS
from forebay.journal.start import recorded_view
from forebay.processes.names import named
from forebay.processes.notices import complain
from forebay.transport.base import Log, Record
from forebay.transport.directory import Directory
from forebay.transport.heartbeats import RouterHeartbeats
from forebay.transport.kafka.acls import ROLES, acls_of, create_acls
from forebay.transport.kafka.settings import KafkaSettings
from forebay.transport.kafka.topics import count_topics, create_topics, partitions_of, plan_of
from forebay.transport.readable import readable
from forebay.transport.sqlite.log import SqliteLog

FOLLOW_S = 0.2
PAGE = 500
HEARTBEAT_WAIT_S = 3.0  # standbys write every second; allow two to be late
READ_BY = ("indexer", "kafka-api")  # names of consumer groups, without namespace


def run_create(options: TopicsCreateCommand) -> None:
    async def run(settings: KafkaSettings) -> list[str]:
        sizes = await plan_of(settings) if options.upgrade else options.plan.plan()
        created = await create_topics(settings, sizes, [] if options.upgrade else pools)
        await count_topics(settings)
        return created

    with explained():
        pools = [named("--pool", "pool", name) for name in options.pool or ["default"]]
        created = asyncio.run(run(options.kafka.settings()))
    for name in created:
        click.echo(f"created {name}")
    if options.upgrade and not created:
        click.echo("this version needs no further topics")


def run_list(options: TopicsListCommand) -> None:
    source = options.source
    if options.lag:
        if source.kafka is None or source.log is not None:
            fail("--lag requires --kafka, and no log file")
        _list_lags(source, json=options.json)
        return
    source.require_one_source()
    with explained():
        found = asyncio.run(_topics(source))
    for topic, partition, first, end in found:
        if options.json:
            click.echo(msgspec.json.encode({"topic": topic, "partition": partition, "first": first, "end": end}))
            continue
        click.echo(f"{topic}/{partition}\t{end}" + (f"\tfrom {first}" if first else ""))


def run_tail(options: TopicsTailCommand) -> None:
    recording = options.source.recording(options.where, "TOPIC")
    with explained():
        asyncio.run(_tail(recording, options.where[-1], options))


def run_acls(options: TopicsAclsCommand) -> None:
    users: dict[str, list[str]] = {}
    for given in options.user or ():
        role, _, name = given.partition("=")
        if role not in ROLES:
            fail(f"--user {given}: {unknown_name('role', role, list(ROLES))}")
        if not name:
            fail(f"--user {given}: expected ROLE=NAME")
        users.setdefault(role, []).append(name)
    with explained():
        settings = options.kafka.settings()
        acls = [
            one for role in ROLES for name in users.get(role, [role]) for one in acls_of(settings, ROLES[role], name)
        ]
        if options.apply:
            asyncio.run(create_acls(settings, acls))
    if options.apply:
        click.echo(f"created {len(acls)} ACLs on {settings.bootstrap}")
    else:
        print_table(("user", "resource", "name", "operation"), acls)


def _list_lags(source: Source, *, json: bool) -> None:
    with explained():
        found, groups = asyncio.run(_lags(source.settings()))
    if json:
        names = ("reader", "topic", "at", "end")
        readers = [{**dict(zip(names, one, strict=True)), "lag": one[3] - one[2]} for one in found]
        click.echo(msgspec.json.encode({"readers": readers, "groups": groups}))
        return
    rows = ((reader, topic, str(at), str(end), str(end - at)) for reader, topic, at, end in found)
    print_table(("reader", "topic", "at", "end", "lag"), rows)
    for line in groups:
        click.echo(line)


async def _topics(source: Source) -> list[tuple[str, int, int, int]]:
    """Return topic, partition, first offset and end offset of every partition that has records."""
    async with source.source(is_complete=False) as log:
        if isinstance(log, SqliteLog):
            starts = log.starts()
            return [(topic, number, starts.get((topic, number), 0), end) for topic, number, end in log.topics()]
        partitions = await partitions_of(log.settings)
        places = [(topic, number) for topic in sorted(partitions) for number in range(partitions[topic])]
        ends = [(topic, number, 0, await log.end(topic, number)) for topic, number in places]
        return [place for place in ends if place[3]]


async def _tail(recording: Recording, topic: str, options: TopicsTailCommand) -> None:
    partition, start = options.partition, options.offset
    async with recording.source(is_complete=False) as log:
        if isinstance(log, SqliteLog):
            known = {name: number + 1 for name, number, _ in log.topics()}
        else:
            known = await partitions_of(log.settings)
        if topic not in known:
            fail(f"{recording.name}: {unknown_name('topic', topic, sorted(known))}")
        if partition >= known[topic] and not isinstance(log, SqliteLog):  # its client would retry forever
            fail(f"topic {topic} has {known[topic]} partitions, counted from 0; got --partition {partition}")
        begin = await log.begin(topic, partition)
        if start is not None and start < begin:
            complain(f"{topic}/{partition} begins at offset {begin}; earlier records were removed by retention")
        offset = max(begin, start if start is not None else await log.end(topic, partition) - options.count)
        offset = await _print_from(log, topic, partition, offset)
        while options.follow:
            await asyncio.sleep(FOLLOW_S)
            offset = await _print_from(log, topic, partition, offset)


async def _print_from(log: Log, topic: str, partition: int, offset: int) -> int:
    end = await log.end(topic, partition)
    while offset < end:
        records: list[Record] = await log.read(topic, partition, offset, PAGE)
        if not records:
            return end
        for record in records:
            click.echo(msgspec.json.encode(readable(record)).decode())
            offset = record.offset + 1
    return offset


async def _lags(settings: KafkaSettings) -> tuple[list[tuple[str, str, int, int]], list[str]]:
    """Return (name, topic, position, end offset) of each reader, and a line per group that has a partition."""
    counts = await count_topics(settings)
    found = []
    async with kafka_log(settings) as log, AsyncExitStack() as stack:
        admin = AIOKafkaAdminClient(**settings.client_options())
        stack.push_async_callback(admin.close)
        await admin.start()
        for group in READ_BY:
            offsets = await admin.list_consumer_group_offsets(settings.topic(group))
            for place, committed in sorted(offsets.items()):
                topic = place.topic.removeprefix(settings.topic(""))
                end = await log.end(topic, place.partition)
                found.append((group, f"{topic}/{place.partition}", committed.offset, end))
        for partition in range(counts.groups):
            for topic, position in sorted((await recorded_view(log, partition)).items()):
                end = await log.end(topic, partition)
                found.append((f"owner of {partition}", f"{topic}/{partition}", position, end))
        groups, standbys = await _groups(log)
    return found + standbys, groups


async def _groups(log: Log) -> tuple[list[str], list[tuple[str, str, int, int]]]:
    """Return a line per placed group, and the journal position of each standby."""
    directory = Directory(log)
    await directory.start()
    lines, standbys = [], []
    for group, partition in sorted(directory.groups.partitions.items()):
        heartbeats = RouterHeartbeats(log, group)
        following = asyncio.create_task(heartbeats.follow(partition))
        await asyncio.wait([following], timeout=HEARTBEAT_WAIT_S)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        owner = heartbeats.owner.router_id if heartbeats.owner is not None else "none"
        names = [beat.router_id for beat in heartbeats.standbys()]
        lines.append(f"{group}, partition {partition}: owner {owner}, {len(names)} standbys {' '.join(names)}".rstrip())
        end = await log.end(DECISIONS.name, partition)
        standbys += [
            (f"standby {beat.router_id}", f"{DECISIONS.name}/{partition}", beat.position, max(end, beat.position))
            for beat in heartbeats.standbys()
        ]
    directory.close()
    return lines, standbys
