"""`forebay status`: owner, workers, requests and topics of a running system or a log."""

import asyncio
import time

import click
import httpx
import msgspec

from forebay.cli.command import StatusCommand
from forebay.cli.common.api_key import VARIABLE, client_headers
from forebay.cli.common.errors import USAGE, complain, explained, fail
from forebay.cli.common.recording import Recording
from forebay.cli.common.terminal import own_stdout, results
from forebay.cli.common.unverified import DIVERGED
from forebay.cli.control.client import IngressClient
from forebay.cli.policies.allowed import allowed_policies
from forebay.cli.status_view import show
from forebay.core.routing.policies import CustomPolicies
from forebay.replay.at import JournalDiverged
from forebay.replay.policies import require_allowed
from forebay.replay.status import GroupStatus, read_status, with_heartbeats
from forebay.transport.heartbeats import RouterHeartbeats
from forebay.transport.history.groups import groups_of

DERIVED_WITHIN_S = 30.0  # an ingress on Kafka derives the status from the log
HEARTBEATS_S = 2.5  # standbys write a heartbeat every second
NOT_READY = 1
WATCH_S = 2.0  # an ingress on Kafka takes a second of CPU time to derive the status


def run_status(options: StatusCommand) -> None:
    def read() -> GroupStatus:
        if options.recording.log is None and options.recording.kafka is None:
            return _query(options.url, options.api_key, options.recording.group)
        options.recording.require_one_source()
        return _derive(options.recording, options.allow_policy)

    def print_status(found: GroupStatus) -> None:
        if options.json:
            click.echo(msgspec.json.encode(found).decode())
        else:
            show(results(soft_wrap=True), found)

    found = read()
    print_status(found)
    while options.watch:
        time.sleep(WATCH_S)
        try:
            found = read()
        except click.exceptions.Exit:  # the message is printed
            continue
        if not options.json:
            click.clear()
        print_status(found)
    if not found.ready:
        raise click.exceptions.Exit(NOT_READY)


def _query(url: str, api_key: str | None, group: str) -> GroupStatus:
    with explained():
        headers = client_headers(api_key)
    client = IngressClient(url, headers, group)
    response = client.request("/v1/status", timeout_s=DERIVED_WITHIN_S)
    answer = client.decode(response, "version")
    if response.status_code == httpx.codes.OK:
        try:
            return msgspec.convert(answer, GroupStatus)
        except msgspec.ValidationError as error:
            fail(f"{url} returned another version of the status ({error}); use the same version of forebay")
    problem = answer["error"]
    hints = {"invalid_api_key": f"; set {VARIABLE} or --api-key", "model_required": "; pass --group NAME"}
    hint = hints.get(str(problem.get("code")), "")
    complain(f"{url}: {problem['message']}{hint}")
    raise click.exceptions.Exit(USAGE if response.is_client_error else NOT_READY)


def _derive(recording: Recording, allow_policy: list[str] | None) -> GroupStatus:
    with explained():
        custom = allowed_policies(allow_policy)
        try:
            with own_stdout():
                return asyncio.run(_read(recording, custom))
        except JournalDiverged as diverged:
            complain(f"{recording.name}: {diverged}")
            raise click.exceptions.Exit(DIVERGED) from None


async def _read(recording: Recording, custom: CustomPolicies) -> GroupStatus:
    async with recording.source() as log:
        placed = await groups_of(log)
        group = recording.group_among(placed)
        partition = placed[group]
        await require_allowed(log, partition, custom)
        if recording.kafka is None:
            return await read_status(log, partition, group, custom)
        heartbeats = RouterHeartbeats(log, group)
        following = asyncio.create_task(heartbeats.follow(partition))
        try:
            found, _ = await asyncio.gather(
                read_status(log, partition, group, custom), asyncio.wait([following], timeout=HEARTBEATS_S)
            )
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        return with_heartbeats(found, heartbeats)
