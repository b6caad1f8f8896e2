"""Options of `forebay index`. The code is imported when a command runs, so that --help does not wait for it."""

from typing import Annotated

import typer

from forebay.cli.common.option_groups import spread
from forebay.cli.common.recording import KafkaSource, LogArgument
from forebay.cli.policies.allowed import AllowPolicyOption


@spread
def index(
    source: KafkaSource,
    log: LogArgument = None,
    group: Annotated[str, typer.Option(help="Model to read, if the log has several.")] = "",
    worker: Annotated[str, typer.Option(help="Print only the blocks of this worker.")] = "",
    allow_policy: AllowPolicyOption = None,
) -> None:
    """Print the cached blocks of each worker at the journal's end, as `kv.blocks_stored` events.

    Each event is a line of JSON, in the form of topic `kv-events`: hashes are base64 of little-endian u64. Each rank's
    events are numbered from 1. Applied to an empty index, they restore the same index.
    """
    from forebay.cli.index import run_dump  # noqa: PLC0415

    run_dump(source=source, log=log, group=group, worker=worker, allow_policy=allow_policy)
