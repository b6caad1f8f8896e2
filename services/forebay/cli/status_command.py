"""Options of `forebay status`. The code is imported when a command runs, so that --help does not wait for it."""

from typing import Annotated

import typer

from forebay.cli.common.api_key import ClientKeyOption
from forebay.cli.common.option_groups import spread
from forebay.cli.common.recording import Recording
from forebay.cli.control.client import URL, UrlOption
from forebay.cli.policies.allowed import AllowPolicyOption


@spread
def status(
    recording: Recording,
    url: UrlOption = URL,
    api_key: ClientKeyOption = None,
    allow_policy: AllowPolicyOption = None,
    json: Annotated[bool, typer.Option("--json", help="Print the status as one JSON object.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Read and show the status again every 2 s.")] = False,
) -> None:
    """Show the owner, workers, requests and topics of a running system or a log.

    Without LOG and --kafka, the ingress at --url is queried. Exits 1 if the system cannot serve requests.
    """
    from forebay.cli.status import run_status  # noqa: PLC0415

    run_status(recording=recording, url=url, api_key=api_key, allow_policy=allow_policy, json=json, watch=watch)
