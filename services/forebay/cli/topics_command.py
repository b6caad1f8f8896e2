"""Options of `forebay topics`. The code is imported when a command runs, so that --help does not wait for it."""

from pathlib import Path
from typing import Annotated

import typer

from forebay.cli.common.cluster_options import KafkaOptions, TopicPlanOptions
from forebay.cli.common.errors import fail
from forebay.cli.common.option_groups import spread
from forebay.cli.common.recording import KafkaSource

app = typer.Typer(help="Show the records of a log, and manage the topics of a broker.", no_args_is_help=True)


LogArgument = Annotated[
    Path | None,
    typer.Argument(help="Log file of `forebay up` (may be in use) or a recording; omit with --kafka."),
]


@app.command("create")
@spread
def create(
    kafka: KafkaOptions,
    plan: TopicPlanOptions,
    pool: Annotated[list[str] | None, typer.Option(help="Pool that gets a work topic. Repeatable.")] = None,
    upgrade: Annotated[
        bool, typer.Option("--upgrade", help="Create the topics that a new version needs, sized as the existing ones.")
    ] = False,
) -> None:
    """Create missing topics, and check the existing ones. Existing topics stay as they are."""
    from forebay.cli.topics import run_create  # noqa: PLC0415

    run_create(kafka=kafka, pool=pool, plan=None if upgrade else plan)


@app.command("list")
@spread
def list_topics(
    source: KafkaSource,
    log: LogArgument = None,
    lag: Annotated[
        bool,
        typer.Option("--lag", help="Show by how many records each reader on Kafka is behind, and who owns each group."),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON: an object per line, or one with --lag.")] = False,
) -> None:
    """List every topic partition that has records, with its end offset, and its first offset if retention moved it.

    With --lag, lists the readers instead: the commits of consumer groups, and the journals of owners and standbys.
    After the table, one line per group names its owner and its standby routers.
    """
    if lag and (source.kafka is None or log is not None):
        fail("--lag requires --kafka, and no log file")
    from forebay.cli.topics import run_lag, run_list_topics  # noqa: PLC0415

    if lag:
        run_lag(source=source, json=json)
    else:
        run_list_topics(source=source, log=log, json=json)


@app.command("tail")
@spread
def tail(
    where: Annotated[
        list[str], typer.Argument(metavar="[LOG] TOPIC", help="LOG: log file; omit with --kafka. TOPIC: topic name.")
    ],
    source: KafkaSource,
    partition: Annotated[int, typer.Option("--partition", "-p", min=0, help="Partition of the topic.")] = 0,
    count: Annotated[int, typer.Option("--lines", "-n", min=0, help="Print the last N records.")] = 10,
    offset: Annotated[
        int | None, typer.Option(min=0, help="Print the records from this offset on, instead of the last N.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing new records.")] = False,
) -> None:
    """Print records as JSON lines."""
    from forebay.cli.topics import run_tail  # noqa: PLC0415

    run_tail(where=where, source=source, partition=partition, count=count, offset=offset, follow=follow)
