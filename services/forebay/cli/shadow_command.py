"""Options of `forebay shadow`. The code is imported when a command runs, so that --help does not wait for it."""

from typing import Annotated

import typer

from forebay.cli.common.cluster_options import ServiceOptions
from forebay.cli.common.logs import LoggingOptions
from forebay.cli.common.option_groups import spread
from forebay.cli.common.recording import Recording
from forebay.cli.policies.allowed import AllowPolicyOption
from forebay.cli.policies.alternative import AlternativeOptions


@spread
def shadow(
    given: AlternativeOptions,
    name: Annotated[
        str,
        typer.Option(help="Name by which a restart on Kafka resumes this shadow. Default: a hash of the alternative."),
    ] = "",
    from_start: Annotated[
        bool,
        typer.Option(
            "--from-start",
            help="Begin at the first decision in the journal instead of the next new one."
            " No effect on a shadow that has run before, which resumes.",
        ),
    ] = False,
    allow_policy: AllowPolicyOption = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print the events of the shadow on stdout as JSON lines.")
    ] = False,
    *,
    recording: Recording,
    service: ServiceOptions,
    logs: LoggingOptions,
) -> None:
    """Report for every decision of a running system what another policy or configuration would decide.

    The shadow is a separate process that only reads the log. On Kafka it writes its events to topic `shadow`, and
    nowhere else. It runs until stopped. Started again under the same name on Kafka, it resumes at its last position.
    Exits 1 if a recorded decision cannot be derived again.
    """
    from forebay.cli.shadow import run_shadow  # noqa: PLC0415

    run_shadow(
        given=given,
        name=name,
        from_start=from_start,
        allow_policy=allow_policy,
        json=json,
        recording=recording,
        service=service,
        logs=logs,
    )
