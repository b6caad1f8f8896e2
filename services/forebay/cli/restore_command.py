"""Options of `forebay restore`. The code is imported when the command runs, so that --help does not wait for it."""

from pathlib import Path
from typing import Annotated

import typer

from forebay.cli.common.cluster_options import KafkaOptions, TopicPlanOptions
from forebay.cli.common.option_groups import spread


@spread
def restore(
    recording: Annotated[Path, typer.Argument(help="Recording, or log file of `forebay up`.")],
    kafka: KafkaOptions,
    plan: TopicPlanOptions,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Create a namespace on Kafka with the groups and settings of a recorded log.

    The namespace must have no records. Restored are groups, and the pools, policies, thresholds, disaggregation
    settings, routing rules, canaries and drains of each group. Workers, requests and caches are not restored: workers
    join again.
    """
    from forebay.cli.restore import run_restore  # noqa: PLC0415

    run_restore(recording=recording, kafka=kafka, plan=plan, json=json)
