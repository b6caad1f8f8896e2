"""`forebay simulate --against`: a recording simulated, beside what was lived in it."""

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields

import msgspec
import typer

from forebay.cli.common.errors import complain, explained, fail
from forebay.cli.common.recording import Recording
from forebay.cli.common.terminal import own_stdout
from forebay.cli.common.unverified import DIVERGED, tell_unverified
from forebay.cli.policies.recorded import require_policies
from forebay.cli.replay.verify import shown_progress
from forebay.cli.simulate.against_options import AgainstOptions
from forebay.cli.simulate.fidelity import Playing, fidelity
from forebay.cli.simulate.fidelity_view import show
from forebay.cli.simulate.options import FleetOptions, ShapeOptions, require_routers, settings_of
from forebay.ingress.errors import Unusable
from forebay.replay.observed import Lived, lived
from forebay.replay.verify.verify import OnProgress
from forebay.simulate.settings import policy
from forebay.transport.sqlite.log import SqliteLog

LINK = ("kv_transfer_bandwidth", "kv_transfer_latency_us")  # what is fitted to the recording unless it is given
OWN = ("engine", "delays", *LINK)  # of a fleet's options, what no recording says
BOUNDS = ("ttft", "itl", "e2e", "reuse", "load")
BOUND = re.compile(r"(?P<name>\w+)=(?P<most>\d+(\.\d+)?)")
ABOVE = 1  # the exit code when a simulation is further off than it may be


def held_against(
    options: AgainstOptions,
    fleet: FleetOptions,
    shape: ShapeOptions,
    policies: Sequence[str],
    others: Mapping[str, bool],
    *,
    json: bool,
) -> None:
    """Simulate a recording under its own configuration, and under each of `policies`.

    `others` tells of options that have no place here whether they were given.
    """
    assert options.against is not None
    source = Recording(options.against, None, "", None, "")
    with explained():
        _require_nothing_else(fleet, shape, others)
        bounds = bounds_of(options.fail_above)
        try:
            playing, routers = _playing(options, fleet), {name: policy(name) for name in policies}
        except ValueError as error:
            fail(str(error))
        require_routers(routers.values())
        with own_stdout():
            history = _history(source)
        found = fidelity(history, routers, playing)
    above = found.above(bounds)
    if json:
        told = {"recording": source.name, **msgspec.to_builtins(found), "above": above}
        typer.echo(msgspec.json.encode(told).decode())
    else:
        show(found, source.name)
    for text in above:
        complain(f"--fail-above: {text}")
    tell_unverified(history.unverified)
    if above:
        raise typer.Exit(ABOVE)


def _require_nothing_else(fleet: FleetOptions, shape: ShapeOptions, others: Mapping[str, bool]) -> None:
    """Refuse what the recording says itself. Raises Unusable."""
    given = [name for name, there in others.items() if there]
    for group in (fleet, shape):
        given += [
            f"--{one.name.replace('_', '-')}"
            for one in fields(group)
            if one.name not in OWN and getattr(group, one.name) != one.default
        ]
    if given:
        raise Unusable(f"{' and '.join(given)} with --against: fleet and requests are those of the recording")


def _playing(options: AgainstOptions, fleet: FleetOptions) -> Playing:
    """Raises ValueError."""
    settings = settings_of(fleet)
    link = {name: value for name in LINK if (value := getattr(fleet, name)) is not None}
    return Playing(options.speedup, options.repeat, settings.delays, settings.pools[0].groups[0].engine.timing, link)


def _history(source: Recording) -> Lived:
    """What was lived. Ends the command where the journal and the events part. Raises LogError, Unusable."""
    with shown_progress() as on_progress:
        history = asyncio.run(_lived(source, on_progress))
    if history.divergence is not None:
        told = history.divergence
        complain(f"{source.name}: history diverges at journal offset {told.offset}: {told.reason}")
        complain("`forebay replay verify` tells more")
        raise typer.Exit(DIVERGED)
    return history


def bounds_of(text: str | None) -> dict[str, float]:
    """How far off each figure may be. Raises Unusable."""
    bounds: dict[str, float] = {}
    for one in text.split(",") if text is not None else ():
        said = BOUND.fullmatch(one)
        if said is None or said["name"] not in BOUNDS:
            raise Unusable(f"--fail-above {text}: {one!r} is no NAME=NUMBER of {', '.join(BOUNDS)}")
        bounds[said["name"]] = float(said["most"])
    return bounds


async def _lived(source: Recording, on_progress: OnProgress) -> Lived:
    async with source.opened() as (log, partition):
        if isinstance(log, SqliteLog):
            log.check()
        await require_policies(log, partition)
        return await lived(log, partition, on_progress)
