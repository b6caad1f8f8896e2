"""`forebay simulate --against`: compare a simulation with a recording."""

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
from forebay.cli.policies.allowed import allowed_policies
from forebay.cli.replay.verify import shown_progress
from forebay.cli.simulate.against_options import AgainstOptions
from forebay.cli.simulate.fidelity import FidelitySettings, fidelity
from forebay.cli.simulate.fidelity_view import show
from forebay.cli.simulate.options import FleetOptions, ShapeOptions, require_routers, settings_of
from forebay.core.routing.policies import CustomPolicies
from forebay.events.names import unknown_name
from forebay.ingress.errors import Unusable
from forebay.replay.observed import ObservedHistory, observe_history
from forebay.replay.policies import require_allowed
from forebay.replay.verify.verify import OnProgress
from forebay.simulate.settings import policy, tiers_of
from forebay.transport.sqlite.log import SqliteLog

LINK = ("kv_transfer_bandwidth", "kv_transfer_latency_us")  # options that are fitted to the recording by default
TIER_SIZES = ("kv_host_size", "kv_disk_size", "kv_store_size")
OWN = ("engine_profile", "delays", *LINK, *TIER_SIZES)  # fleet options that a recording does not determine
BOUNDS = ("ttft", "itl", "e2e", "reuse", "load")
BOUND = re.compile(r"(?P<name>\w+)=(?P<most>\d+(\.\d+)?)")
ABOVE = 1  # exit code if an error exceeds its bound


def compare_with_recording(
    options: AgainstOptions,
    fleet: FleetOptions,
    shape: ShapeOptions,
    policies: Sequence[str],
    others: Mapping[str, bool],
    *,
    json: bool,
) -> None:
    """Simulate a recording under its own configuration and each of `policies`, and print how far the results are off.

    Exits 1 if an error exceeds its bound.

    Args:
        options: the recording, and the largest error allowed per metric.
        fleet: fleet options. Only those that the recording does not determine (`OWN`) may be set.
        shape: workload options. None of them may be set.
        others: for the name of each option that conflicts with --against, whether it was given.
        json: whether to print JSON.
    """
    assert options.against is not None
    source = Recording(log=options.against)
    with explained():
        _require_nothing_else(fleet, shape, others)
        bounds = bounds_of(options.fail_above)
        try:
            playing, routers = _playing(options, fleet), {name: policy(name) for name in policies}
        except ValueError as error:
            fail(str(error))
        require_routers(routers.values())
        custom = allowed_policies(options.allow_policy, [router.mode for router in routers.values()])
        with own_stdout():
            history = _history(source, custom)
        found = fidelity(history, routers, playing, custom)
    above = found.above(bounds)
    if json:
        output = {"recording": source.name, **msgspec.to_builtins(found), "above": above}
        typer.echo(msgspec.json.encode(output).decode())
    else:
        show(found, source.name)
    for text in above:
        complain(f"--fail-above: {text}")
    tell_unverified(history.unverified)
    if above:
        raise typer.Exit(ABOVE)


def _require_nothing_else(fleet: FleetOptions, shape: ShapeOptions, others: Mapping[str, bool]) -> None:
    """Reject options whose values the recording determines.

    Raises:
        Unusable: such an option was given.
    """
    given = [name for name, there in others.items() if there]
    own = (*OWN, "kv_bytes_per_token") if any(getattr(fleet, name) is not None for name in TIER_SIZES) else OWN
    for group in (fleet, shape):
        given += [
            f"--{one.name.replace('_', '-')}"
            for one in fields(group)
            if one.name not in own and getattr(group, one.name) != one.default
        ]
    if given:
        options = " and ".join(given)
        raise Unusable(f"{options} cannot be combined with --against: the recording determines fleet and requests")


def _playing(options: AgainstOptions, fleet: FleetOptions) -> FidelitySettings:
    """Return the simulation settings from the options.

    Raises:
        ValueError: an option is invalid.
    """
    settings = settings_of(fleet)
    link = {name: value for name in LINK if (value := getattr(fleet, name)) is not None}
    group = settings.pools[0].groups[0]
    return FidelitySettings(
        options.speedup,
        options.repeat,
        settings.delays,
        group.engine.timing,
        link,
        tiers_of(settings, group),
        fleet.kv_bytes_per_token,
    )


def _history(source: Recording, custom: CustomPolicies) -> ObservedHistory:
    """Read the recorded history. Exits if a decision that is derived again differs from the journal.

    Raises:
        LogError: the recording cannot be read.
        Unusable: the recording cannot be replayed.
    """
    with shown_progress() as on_progress:
        history = asyncio.run(_lived(source, on_progress, custom))
    if history.divergence is not None:
        divergence = history.divergence
        complain(f"{source.name}: history diverges at journal offset {divergence.offset}: {divergence.reason}")
        complain("run `forebay replay verify` for details")
        raise typer.Exit(DIVERGED)
    return history


def bounds_of(text: str | None) -> dict[str, float]:
    """Parse `--fail-above` into the maximum error per metric.

    Raises:
        Unusable: a name or a number is invalid.
    """
    bounds: dict[str, float] = {}
    for one in text.split(",") if text is not None else ():
        match = BOUND.fullmatch(one)
        if match is None:
            raise Unusable(
                f"--fail-above {text}: got {one!r}, expected NAME=NUMBER with NAME one of {', '.join(BOUNDS)}"
            )
        if match["name"] not in BOUNDS:
            raise Unusable(f"--fail-above {text}: {unknown_name('metric', match['name'], BOUNDS)}")
        bounds[match["name"]] = float(match["most"])
    return bounds


async def _lived(source: Recording, on_progress: OnProgress, custom: CustomPolicies) -> ObservedHistory:
    async with source.opened() as (log, partition):
        if isinstance(log, SqliteLog):
            log.check()
        await require_allowed(log, partition, custom)
        return await observe_history(log, partition, on_progress, custom)
