"""`forebay status`: owner, workers, requests and topics of a running system or a log."""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path

import click
import msgspec
from rich.console import Console, RenderableType

from forebay.cli.command import StatusCommand
from forebay.cli.common.credentials import API_KEY_VARIABLE, client_headers
from forebay.cli.common.errors import OTHER_RULES, USAGE, explained, fail
from forebay.cli.common.recording import Recording
from forebay.cli.common.tables import print_table, results, span, titled_table
from forebay.cli.common.terminal import own_stdout, printable
from forebay.cli.common.unverified import DIVERGED
from forebay.cli.control.client import ADMIN_TOKEN_ERRORS, TOKEN_HINT, IngressClient
from forebay.cli.policies.allowed import allowed_policies
from forebay.core.routing.policies import CustomPolicies
from forebay.journal.groups import groups_of
from forebay.replay.at import JournalDiverged
from forebay.replay.policies import require_allowed
from forebay.replay.status import GroupStatus, OwnerStatus, RankStatus, WorkerStatus, read_status, with_heartbeats
from forebay.transport.base import Log
from forebay.transport.heartbeats import HEARTBEATS_S, RouterHeartbeats
from forebay.transport.sqlite.log import SqliteLog
from forebay.transport.sqlite.recording import utc

DERIVED_WITHIN_S = 30.0  # an ingress on Kafka derives the status from the log
NOT_READY = 1
WATCH_S = 2.0  # an ingress on Kafka takes a second of CPU time to derive the status
TENANTS_MAX = 10  # shown as text
RECENT_US = 2 * 3_600_000_000  # older times are shown without their age


def run_status(options: StatusCommand) -> None:
    def read() -> list[GroupStatus]:
        if options.recording.log is None and options.recording.kafka is None:
            with explained():
                headers = client_headers(options.api_key)
            return _query(IngressClient(options.url, headers, options.recording.group), options.admin_token_file)
        options.recording.require_one_source()
        return _derive(options.recording, options.allow_policy)

    def print_status(found: list[GroupStatus]) -> None:
        if options.json:
            for status in found:
                click.echo(msgspec.json.encode(status).decode())
        elif len(found) == 1:
            show(results(soft_wrap=True), found[0])
        else:
            print_table(("model", "workers", "active", "queued", "owner", "state"), map(_summary, found))
            click.echo("`forebay status --group MODEL` shows one of them")

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
    if not all(status.ready for status in [one for one in found if one.workers] or found):
        raise click.exceptions.Exit(NOT_READY)


def _query(client: IngressClient, token_file: Path | None) -> list[GroupStatus]:
    """Return the status of the models of an ingress. The admin token is sent only to an address that requires it."""
    url = client.url
    response = client.request("/v1/status", timeout_s=DERIVED_WITHIN_S)
    answer = client.decode(response, "version")
    if response.status_code == HTTPStatus.OK:
        try:
            return [msgspec.convert(answer, GroupStatus)]
        except msgspec.ValidationError as error:
            fail(f"{url} returned another version of the status ({error}); use the same version of forebay")
    problem = answer["error"]
    code = str(problem.get("code"))
    if not client.model and (models := problem.get("models")):
        return [status for model in models for status in _query(replace(client, model=model), token_file)]
    if code in ADMIN_TOKEN_ERRORS:
        admin = IngressClient.of(url, token_file, client.model)
        if admin.headers not in ({}, client.headers):
            return _query(admin, token_file)
    hints = {"invalid_api_key": f"; set {API_KEY_VARIABLE} or --api-key", "model_required": "; pass --group NAME"}
    hints |= dict.fromkeys(ADMIN_TOKEN_ERRORS, TOKEN_HINT)
    exit_code = USAGE if response.is_client_error else NOT_READY
    fail(f"{url}: {problem['message']}{hints.get(code, '')}", OTHER_RULES if code == "other_rules" else exit_code)


def _derive(recording: Recording, allow_policy: list[str] | None) -> list[GroupStatus]:
    with explained():
        custom = allowed_policies(allow_policy)
        try:
            with own_stdout():
                return asyncio.run(_read(recording, custom))
        except JournalDiverged as diverged:
            fail(f"{recording.name}: {diverged}", DIVERGED)


async def _read(recording: Recording, custom: CustomPolicies) -> list[GroupStatus]:
    async with recording.source() as log:
        placed = await groups_of(log)
        groups = await recording.groups_among(log, placed)
        if not groups:
            fail(f"{recording.name} has no groups yet; start a router and a worker")
        found = await asyncio.gather(*(_read_group(log, placed[group], group, custom) for group in groups))
        if recording.group or len(found) > 1:
            return found
        return [msgspec.structs.replace(found[0], others=tuple(name for name in placed if name != groups[0]))]


async def _read_group(log: Log, partition: int, group: str, custom: CustomPolicies) -> GroupStatus:
    await require_allowed(log, partition, custom)
    if isinstance(log, SqliteLog):
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


def _summary(status: GroupStatus) -> tuple[str, ...]:
    owner = "none" if status.owner.alive is False or status.owner.epoch < 0 else status.owner.owner_id
    active = status.requests.in_flight - status.requests.queued
    state = "; ".join(status.problems) or "ready"
    return status.group, str(len(status.workers)), str(active), str(status.requests.queued), owner, state


def show(console: Console, status: GroupStatus) -> None:
    for name, text in _facts(status):
        console.print(printable(f"{name:<10} {text}"), markup=False)
    for table in (_workers(status), _topics(status)):
        console.print()
        console.print(table)


def _facts(status: GroupStatus) -> Iterator[tuple[str, str]]:
    yield "group", f"{status.group}, {'ready' if status.ready else 'not ready'}"
    if status.others:
        yield "others", f"{', '.join(status.others)}, without ready workers; --group NAME shows one of them"
    for problem in status.problems:
        yield "problem", problem
    if status.owner.epoch >= 0:
        yield "owner", _owner(status.owner)
    if status.owner.standbys is not None:
        yield "standbys", ", ".join(status.owner.standbys) or "none"
    source = "as its owner sees it" if status.source == "owner" else "derived from the log"
    yield "state", f"{source}, newest event {recent_time(status.at_us)}" if status.at_us else source
    requests = status.requests
    phases = ", ".join(f"{count:,} {phase}" for phase, count in requests.by_phase.items())
    yield "requests", f"{requests.in_flight:,} in flight" + (f": {phases}" if phases else "")
    for tenant in requests.tenants[:TENANTS_MAX]:
        yield "tenant", f"{tenant.tenant}: {tenant.in_flight:,} in flight, {tenant.queued:,} queued"
    for pool in status.pools:
        text = f"{pool.pool}: {pool.role}, policy {pool.policy}, {pool.routed:,} routed, {pool.queued:,} queued"
        if pool.canary_of is not None:
            text += f", canary of {pool.canary_of} with {pool.canary_share:.1%} of its requests"
        yield "pool", text + (", drained" if pool.drained else "")


def _owner(owner: OwnerStatus) -> str:
    parts = [owner.owner_id or "unknown, because its claim is no longer on the log", f"epoch {owner.epoch}"]
    if owner.since_us is not None:
        after = f" after up to {owner.outage_us / 1e6:.3f} s without an owner" if owner.outage_us else ""
        parts.append(f"since {recent_time(owner.since_us)}{after}")
    if owner.heartbeat_age_s is not None:
        parts.append(f"heartbeat {owner.heartbeat_age_s:.1f} s ago")
    elif owner.alive is False:
        parts.append("no heartbeat")
    elif owner.alive is None:
        parts.append("a log does not show whether it runs")
    return ", ".join(parts)


def clock(at_us: int) -> str:
    """Return a time to the second."""
    try:
        return f"{utc(at_us).partition('.')[0]}Z"
    except OverflowError:  # the clock of a damaged record
        return f"{at_us} us"


def recent_time(at_us: int) -> str:
    age_us = time.time_ns() // 1_000 - at_us
    return f"{clock(at_us)} ({span(age_us)} ago)" if 0 <= age_us < RECENT_US else clock(at_us)


def _workers(status: GroupStatus) -> RenderableType:
    rows = [_row(worker, rank) for worker in status.workers for rank in worker.ranks]
    columns = ("worker", "state", "role", "pool", "active", "run+wait", "prefill", "KV used", "cached")
    return titled_table("workers", columns, rows, {"worker", "state", "role", "pool"}, "none")


def _row(worker: WorkerStatus, rank: RankStatus) -> tuple[str, ...]:
    return (
        f"{worker.worker_id}/{rank.rank}",
        worker.state,
        worker.role,
        worker.pool,
        str(rank.active_requests),
        "" if rank.running is None else f"{rank.running}+{rank.waiting}",
        str(rank.prefill_tokens),
        f"{'?' if rank.kv_blocks_used is None else rank.kv_blocks_used}/{rank.kv_blocks_total}",
        str(rank.cached_blocks),
    )


def _topics(status: GroupStatus) -> RenderableType:
    rows = [
        (f"{topic.topic}/{topic.partition}", str(topic.applied), str(topic.end), str(topic.lag))
        for topic in status.topics
    ]
    return titled_table("topics", ("topic", "applied", "end", "lag"), rows, {"topic"}, "none")
