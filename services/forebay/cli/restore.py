"""`forebay restore`: give a new namespace the groups and settings of a recorded log, for example after a disaster."""

import asyncio
import time
from contextlib import closing
from typing import Any

import click
from rich.progress import Progress

from forebay.cli.command import RestoreCommand
from forebay.cli.common.errors import explained, fail
from forebay.cli.common.recording import kafka_log
from forebay.cli.common.tables import counting_bar, print_result
from forebay.cli.common.terminal import counted, printable
from forebay.processes.notices import complain
from forebay.replay.group_settings import RestoredGroup, restored_groups, write_group
from forebay.transport.kafka.settings import KafkaSettings
from forebay.transport.kafka.topics import TopicPlan, count_topics, create_topics, partitions_of
from forebay.transport.sqlite.log import SqliteLog

NOT_RESTORED = "not restored: workers, leases, requests, sessions, caches, and the journal of the planner"


def run_restore(options: RestoreCommand) -> None:
    with explained():
        settings = options.kafka.settings()
        with closing(SqliteLog.open(options.recording, readonly=True)) as log:
            groups = asyncio.run(restored_groups(log))
        with counting_bar() as progress:
            created = asyncio.run(restore_into(groups, settings, options.plan.plan(), progress))
    for group in groups:
        if group.read.undecodable:
            complain(
                f"{group.name}: {counted(group.read.undecodable, 'record')} of `control` did not decode and had no"
                " effect; `forebay topics tail` shows them"
            )
    print_result(_plain(groups, settings, created), options.json, lambda: _show(groups, settings, created))


async def restore_into(
    groups: list[RestoredGroup], settings: KafkaSettings, plan: TopicPlan, progress: Progress
) -> int:
    """Create the topics, append the groups, and return the number of created topics."""
    highest = groups[-1].partition
    if highest >= plan.groups:
        name = groups[-1].name
        fail(
            f"--partitions groups={plan.groups}: {name} uses the control partition {highest}; expected at least"
            f" {highest + 1}"
        )
    await _require_empty(settings, progress)
    task = progress.add_task("creating topics", total=None)
    pools = sorted({pool for group in groups for pool in group.pools})
    created = await create_topics(settings, plan, pools)
    partitions = (await count_topics(settings)).groups
    if highest >= partitions:
        fail(
            f"the control topics of {settings.namespace} have {partitions} partitions, but {groups[-1].name} uses"
            f" partition {highest}; delete these topics or choose another namespace"
        )
    progress.update(task, description="restoring groups", total=len(groups), completed=0)
    async with kafka_log(settings) as log:
        for group in groups:
            await write_group(log, group, time.time_ns() // 1000)
            progress.advance(task)
    return len(created)


async def _require_empty(settings: KafkaSettings, progress: Progress) -> None:
    """End the command if a topic of the namespace has, or ever had, a record."""
    there = await partitions_of(settings)
    places = [(topic, number) for topic in sorted(there) for number in range(there[topic])]
    task = progress.add_task("checking the namespace", total=len(places))
    async with kafka_log(settings) as log:
        for topic, number in places:
            if end := await log.end(topic, number):
                fail(
                    f"the namespace {settings.namespace} on {settings.bootstrap} is in use: {topic}/{number} ends at"
                    f" offset {end}; pass a new --namespace, and start no service in it before the restore"
                )
            progress.advance(task)
    progress.remove_task(task)


def _plain(groups: list[RestoredGroup], settings: KafkaSettings, created: int) -> dict[str, Any]:
    return {
        "namespace": settings.namespace,
        "topics_created": created,
        "groups": [
            {
                "name": group.name,
                "partition": group.partition,
                "pools": group.pools,
                "policies": group.policies,
                "restored": group.counts,
                "read": group.read,
            }
            for group in groups
        ],
    }


def _show(groups: list[RestoredGroup], settings: KafkaSettings, created: int) -> None:
    click.echo(f"namespace {settings.namespace}: {counted(created, 'topic')} created, {counted(len(groups), 'group')}")
    for group in groups:
        pools = ", ".join(group.pools) or "none"
        click.echo(printable(f"group     {group.name}: control partition {group.partition}, pools {pools}"))
        click.echo("  restored " + ", ".join(f"{count} {name}" for name, count in group.counts.items()))
        read = group.read
        click.echo(f"  from     {counted(read.settings, 'change')} of settings; skipped {read.commands} commands")
        for policy in group.policies:
            click.echo(printable(f"  start every router with --allow-policy {policy}"))
    click.echo(NOT_RESTORED)
    click.echo(f"next: start routers, workers and ingresses with --namespace {settings.namespace}")
