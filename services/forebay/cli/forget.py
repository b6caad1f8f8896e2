"""`forebay forget`: delete the API keys and the kept answers of a tenant, and list what remains until when."""

import asyncio
import sys
import time
from collections.abc import Iterator
from contextlib import closing

import click

from forebay.cli.command import ForgetCommand
from forebay.cli.common.errors import explained, fail
from forebay.cli.common.recording import kafka_log
from forebay.cli.common.tables import print_table
from forebay.cli.common.terminal import counted
from forebay.cli.keys import require_tenant
from forebay.events.topics import FIXED_TOPICS, FOREVER, work_topic
from forebay.transport.answers import AnswerStore
from forebay.transport.kafka.settings import KafkaSettings
from forebay.transport.kafka.topics import SEGMENT_S, count_topics
from forebay.transport.keys import KeyBook
from forebay.transport.sqlite.recording import utc

ELSEWHERE = (
    "not on Kafka: KV of its prompts in caches of workers and in KV tiers, until it is evicted; logs of ingresses;"
    " recordings"
)


def run_forget(options: ForgetCommand) -> None:
    tenant = options.tenant
    require_tenant(tenant)
    with explained():
        settings = options.kafka.settings()
        what = f"the API keys and the kept answers of {tenant} in the namespace {settings.namespace}"
        if not options.yes:
            if not sys.stdin.isatty():
                fail(f"{what} would be deleted; confirm with --yes")
            click.confirm(f"Delete {what}?", abort=True)
        keys, answers = asyncio.run(_forget(settings, tenant))
    click.echo(f"{tenant}: deleted {counted(keys, 'API key')} and {counted(answers, 'kept answer')}")
    print_table(("topic", "still has", "until at the latest"), _remains(time.time_ns() // 1000))
    click.echo(ELSEWHERE)
    click.echo("answers of its requests in flight may still be kept; run the command again once these have ended")


async def _forget(settings: KafkaSettings, tenant: str) -> tuple[int, int]:
    """Return the numbers of deleted keys and of deleted answers. Raises LogError."""
    await count_topics(settings)
    async with kafka_log(settings) as log:
        with closing(KeyBook(log)) as book, closing(AnswerStore(log)) as store:
            await book.start()
            keys = await book.forget(tenant)  # first, so that the tenant sends no further requests
            return keys, await store.forget(tenant)


def _remains(now_us: int) -> Iterator[tuple[str, str, str]]:
    """Yield each topic with private content, the content, and when the broker has removed it.

    Compaction has removed what was deleted after the time in which a segment is closed.
    """
    for topic in (*FIXED_TOPICS, work_topic("*")):
        kept_s = 0 if topic.is_compacted else topic.retention_s
        until = utc(now_us + (kept_s + SEGMENT_S) * 1_000_000)[:16]
        if topic.holds:
            is_kept = topic.retention_s == FOREVER and not topic.is_compacted
            yield topic.name, ", ".join(topic.holds), "for ever" if is_kept else until
