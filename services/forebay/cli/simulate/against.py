"""`forebay simulate --against`: simulate a recording on its own fleet, and compare the latencies.

All times are of the owner's clock in the recording: a request begins, gets its first token and ends when the owner
applied the events. The metrics cover the requests that completed in the recording and in the simulation.
"""

import asyncio
import json as jsonlib
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from itertools import pairwise
from typing import Any

import click
import msgspec
from msgspec.structs import replace
from rich import box
from rich.table import Table

from forebay.cli.common.errors import explained
from forebay.cli.common.recording import Recording
from forebay.cli.common.tables import in_markup, results
from forebay.cli.common.terminal import own_stdout
from forebay.cli.common.unverified import DIVERGED, tell_unverified
from forebay.cli.policies.allowed import allowed_policies
from forebay.cli.replay.verify import shown_progress
from forebay.cli.simulate.options import AgainstOptions, FleetOptions, ShapeOptions, settings_of
from forebay.cli.simulate.simulations import Work, run_all
from forebay.core.routing.policies import CustomPolicies
from forebay.core.state.holder_bits import HolderKey
from forebay.events.fleet import FleetEvent, WorkerJoined, WorkerLost, WorkerSpec
from forebay.events.names import unknown_name
from forebay.events.requests import RequestCancelled, RequestSubmitted, Sampling
from forebay.events.snapshots import WorkerState
from forebay.events.topics import CONTROL, FLEET, REQUESTS
from forebay.processes.notices import complain
from forebay.replay.observed_history import ObservedHistory, RecordedRequest, observe_history
from forebay.runtime.errors import ConfigError
from forebay.simulate.arrivals import Arrival
from forebay.simulate.outcome import (
    LOWER_TIERS,
    RequestOutcome,
    RequestOutcomes,
    SimulationOutcome,
    summary,
    tier_tokens,
)
from forebay.simulate.pareto import metric_at
from forebay.simulate.resumed import NotSimulable, SimulatedHardware, resume
from forebay.simulate.settings import KV_BYTES_MAX, Delay, Settings, Transfer, tiers_of
from forebay.simulate.tiers.settings import BANDWIDTH_MAX, BYTES_PER_US
from forebay.transport.sqlite.log import SqliteLog

TRANSFER = ("kv_bytes_per_token", "kv_transfer_bandwidth", "kv_transfer_latency_us")
OWN = (*TRANSFER, "engine_profile", "delays", "kv_tier")  # not in a recording
OUTPUT_TOKENS_MAX = (1 << 31) - 1  # maximum of `max_tokens` in a request
GROUPS = 10  # of recorded transfers, by size
NAMES = {"ttft_ms": "TTFT", "itl_ms": "ITL", "e2e_ms": "E2E", "prefill_ms": "prefill", "transfer_ms": "transfer"}
STATISTICS = ("mean", "p50", "p90", "p99")
COUNTS = {
    "prefilled_remotely": "prefilled remotely",
    "transferred_bytes": "KV transferred, bytes",
    "load_max_over_mean": "load, max over mean",
}
MOVED = ("prefilled_remotely", "transferred_bytes")
BOUNDED = {
    "ttft": ("ttft_ms.p50", "ttft_ms.p90"),
    "itl": ("itl_ms.p50", "itl_ms.p90"),
    "e2e": ("e2e_ms.p50", "e2e_ms.p90"),
    "reuse": ("prefix_reuse",),
    "load": ("load_max_over_mean",),
}
BOUND = re.compile(r"(?P<name>\w+)=(?P<most>\d+(\.\d+)?)")
ABOVE = 1  # exit code if an error exceeds its bound


def compare_with_recording(
    options: AgainstOptions, fleet: FleetOptions, shape: ShapeOptions, others: Mapping[str, bool], *, json: bool
) -> None:
    """Simulate a recording, and print the error. Exits 1 if an error exceeds its bound.

    `others` has the names of the options that conflict with --against, and whether they were given.
    """
    assert options.against is not None
    source = Recording(log=options.against)
    with explained():
        _require_nothing_else(fleet, shape, others)
        bounds = bounds_of(options.fail_above)
        settings = settings_of(fleet)
        custom = allowed_policies(options.allow_policy)
        with own_stdout():
            history = recorded_history(source, custom)
        if (found := history.divergence) is not None:
            complain(f"{source.name}: history diverges at journal offset {found.offset}: {found.reason}")
            complain("run `forebay verify` for details")
            raise click.exceptions.Exit(DIVERGED)
        result = _compared(history, settings, fleet, options.speedup, custom)
    above = list(_above(result, bounds))
    if json:
        click.echo(jsonlib.dumps({"recording": source.name, **result, "above": above}))
    else:
        _show(source.name, history, result)
    for text in above:
        complain(f"--fail-above: {text}")
    tell_unverified(history.unverified)
    if above:
        raise click.exceptions.Exit(ABOVE)


def _require_nothing_else(fleet: FleetOptions, shape: ShapeOptions, others: Mapping[str, bool]) -> None:
    given = [name for name, there in others.items() if there]
    for group in (fleet, shape):
        changed = (one.name for one in fields(group) if getattr(group, one.name) != one.default)
        given += [f"--{name.replace('_', '-')}" for name in changed if name not in OWN]
    if given:
        options = " and ".join(given)
        raise ConfigError(f"{options} cannot be combined with --against: the recording determines fleet and requests")


def bounds_of(text: str | None) -> dict[str, float]:
    """Parse `--fail-above` into the maximum error per metric. Raises ConfigError if a name or a number is invalid."""
    bounds: dict[str, float] = {}
    for one in text.split(",") if text is not None else ():
        match = BOUND.fullmatch(one)
        if match is None:
            names = ", ".join(BOUNDED)
            raise ConfigError(f"--fail-above {text}: got {one!r}, expected NAME=NUMBER with NAME one of {names}")
        if match["name"] not in BOUNDED:
            raise ConfigError(f"--fail-above {text}: {unknown_name('metric', match['name'], BOUNDED)}")
        bounds[match["name"]] = float(match["most"])
    return bounds


def recorded_history(source: Recording, custom: CustomPolicies) -> ObservedHistory:
    """Read the recorded history up to the first decision that is derived differently from the journal."""

    async def read() -> ObservedHistory:
        async with source.opened(custom) as (log, partition):
            if isinstance(log, SqliteLog):
                log.check()
            return await observe_history(log, partition, on_progress, custom)

    with shown_progress() as on_progress:
        return asyncio.run(read())


def _compared(
    history: ObservedHistory, settings: Settings, fleet: FleetOptions, speedup: float, custom: CustomPolicies
) -> dict[str, Any]:
    requests = _by_unique_id(history.requests)
    finished = [one.output_tokens for one in requests.values() if one.output_tokens is not None]
    if not finished:
        raise ConfigError("no recorded request finished, so no response length is known; use a longer recording")
    median = max(1, round(statistics.median(finished)))
    specs = _specs(history)
    given = {name: value for name in TRANSFER if (value := getattr(fleet, name)) is not None}
    if given.keys() - {TRANSFER[0]} and all(spec.role != "prefill" for spec in specs):
        raise ConfigError("the recording has no KV transfers; omit the --kv-transfer-* options")
    transfer = replace(_recorded_transfer(history.requests, specs), **given)
    group = settings.pools[0].groups[0]
    # The recorded times include the latencies to the router, and exclude those to clients.
    delays = replace(settings.delays, submit=Delay(), tokens=settings.delays.progress)
    hardware = SimulatedHardware(group.engine.timing, transfer, tiers_of(settings, group))
    arrivals = _arrivals(history, requests, median)
    run = partial(resume, history.state, arrivals, speedup=speedup, delays=delays, hardware=hardware, custom=custom)
    (resumed,) = run_all([Work(len(requests), run)])
    if isinstance(resumed, NotSimulable):
        raise ConfigError(str(resumed))
    if isinstance(resumed, Exception):
        raise resumed
    numbers = {key: number for number, key in enumerate(resumed.ranks)}
    comparable = {name: one for name, one in requests.items() if one.output_tokens is not None and not one.in_flight}
    failures = Counter(resumed.served[name].failure for name in comparable if resumed.served[name].failure)
    pairs = [
        (_observed_outcome(one, numbers), resumed.served[name])
        for name, one in comparable.items()
        if not resumed.served[name].failure
    ]
    if not pairs:
        reasons = f": {failures.most_common(1)[0][0]}" if failures else ""
        raise ConfigError(f"no request completed both in the recording and in the simulation{reasons}")
    prefilling = {spec.worker_id for spec in specs if spec.role == "prefill"}
    prefill_workers = tuple(number for key, number in numbers.items() if key[0] in prefilling)
    observed, simulated = (
        _metrics(side, digest, len(numbers), prefill_workers)
        for side, digest in zip(zip(*pairs, strict=True), ("", resumed.digest), strict=True)
    )
    return {
        "requests": len(requests),
        "workers": len(resumed.ranks),
        "left_out": _left_out(requests.values()),
        "failed": failures.total(),
        "failures": list(failures),
        "same_worker": sum(ours.worker == theirs.worker for ours, theirs in pairs) / len(pairs),
        "observed": observed,
        "simulated": simulated,
        "errors": _errors(observed, simulated),
        "transfer": msgspec.to_builtins(transfer) if prefilling else None,
        "notes": _notes(history, len(requests) - len(finished), median),
    }


def _by_unique_id(requests: Sequence[RecordedRequest]) -> dict[str, RecordedRequest]:
    """Return the requests in order of arrival. Repeated ids, which clients may use, get a suffix."""
    found: dict[str, RecordedRequest] = {}
    for number, one in enumerate(requests):
        found[f"{one.request_id}#{number}" if one.request_id in found else one.request_id] = one
    return found


def _specs(history: ObservedHistory) -> list[WorkerSpec]:
    joined = [one.spec for _, one in history.external_events if isinstance(one, WorkerJoined)]
    return [*(chunk.spec for chunk in history.state if isinstance(chunk, WorkerState)), *joined]


def _arrivals(history: ObservedHistory, requests: Mapping[str, RecordedRequest], median: int) -> list[Arrival]:
    """Return all events in order of time. Unfinished responses get the length `median`."""
    arrivals = [
        Arrival(at_us, FLEET if isinstance(one, FleetEvent) else CONTROL, one) for at_us, one in history.external_events
    ]
    for number, (name, one) in enumerate(requests.items()):
        output_tokens = median if one.output_tokens is None else max(1, one.output_tokens)
        submitted = RequestSubmitted(
            request_id=name,
            model=one.model,
            token_ids=b"",
            withheld_tokens=one.prompt_tokens,
            sequence_hashes=one.sequence_hashes,
            reply_slot=0,
            timeout_us=one.timeout_us,
            tie_seed=one.tie_seed,
            sampling=Sampling(max_tokens=min(output_tokens, OUTPUT_TOKENS_MAX), ignore_eos=True),
            nonce=number,
            lora_name=one.lora_name,
            routing=one.hints,
        )
        arrivals.append(Arrival(one.at_us, REQUESTS, submitted))
    arrivals += [
        Arrival(one.cancelled_us, REQUESTS, RequestCancelled(request_id=name))
        for name, one in requests.items()
        if one.cancelled_us
    ]
    return sorted(arrivals, key=lambda arrival: arrival.at_us)


def _recorded_transfer(requests: Iterable[RecordedRequest], specs: Sequence[WorkerSpec]) -> Transfer:
    """Return the time of recorded KV transfers as a model: a line through the medians of groups of equal size."""
    sizes = {spec.model: spec.block_size for spec in specs}
    moved = [one for one in requests if one.prefiller is not None and one.model in sizes]
    per_token = [spec.kv_layout.block_bytes / spec.block_size for spec in specs if spec.kv_layout is not None] or [
        one.kept_bytes / (-(-one.prompt_tokens // sizes[one.model]) * sizes[one.model])
        for one in moved
        if one.kept_bytes
    ]
    transfer = Transfer(kv_transfer_bandwidth=0.0)
    if per_token:
        bytes_per_token = max(1, min(KV_BYTES_MAX, round(statistics.median(per_token))))
        transfer = replace(transfer, kv_bytes_per_token=bytes_per_token)
    by_size = sorted((one.transferred_bytes, one.transfer_us) for one in moved if one.transfer_us)
    if not by_size:
        return transfer
    ends = [len(by_size) * at // GROUPS for at in range(GROUPS + 1)]
    groups = [by_size[first:end] for first, end in pairwise(ends) if end > first]
    size, us = ([statistics.median(one[at] for one in group) for group in groups] for at in (0, 1))
    line = statistics.linear_regression(size, us) if size[0] < size[-1] else None
    if line is None or line.slope <= 0:
        return replace(transfer, kv_transfer_latency_us=round(statistics.median(us)))
    if line.intercept < 0:
        line = statistics.linear_regression(size, us, proportional=True)
    bandwidth = min(BANDWIDTH_MAX, 1 / (line.slope * BYTES_PER_US))
    return replace(transfer, kv_transfer_bandwidth=bandwidth, kv_transfer_latency_us=round(line.intercept))


def _observed_outcome(one: RecordedRequest, numbers: dict[HolderKey, int]) -> RequestOutcome:
    """Return the recorded outcome of a finished request. Unknown ranks are added to `numbers`."""
    worker, prefiller = (
        None if rank is None else numbers.setdefault(rank, len(numbers)) for rank in (one.worker, one.prefiller)
    )
    outcome = RequestOutcome(
        arrived_us=one.at_us,
        prompt_tokens=one.prompt_tokens,
        output_tokens=one.output_tokens or 0,
        worker=worker,
        cached_tokens=one.cached_tokens,
        first_us=one.first_us or one.last_us,
        last_us=one.last_us,
        prefiller=prefiller,
        prefilled_us=one.prefilled_us,
        transferred_bytes=one.transferred_bytes,
        transfer_us=one.transfer_us,
    )
    outcome.record_loads(one.onboarded)
    return outcome


def _metrics(
    outcomes: Sequence[RequestOutcome], digest: str, workers: int, prefill_workers: tuple[int, ...]
) -> dict[str, Any]:
    """Return the metrics as `forebay simulate` prints them, with the shares of prompt tokens by tier."""
    outcome = SimulationOutcome(RequestOutcomes(outcomes), digest, prefill_workers=prefill_workers)
    tokens = tier_tokens(outcomes)
    shares = {f"from {tier}": tokens[tier] / sum(tokens.values()) for tier in LOWER_TIERS}
    return {**summary(outcome, workers), **shares}


def _errors(observed: Mapping[str, Any], simulated: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the error per metric: simulated minus observed, in percent of the observed value.

    Errors of shares are in percentage points. An error is None if only the observed value is 0. Metrics without a value
    on both sides, and tiers from which nothing was loaded, are left out.
    """
    found: dict[str, float | None] = {}
    for path in (*(f"{name}.{of}" for name in NAMES for of in STATISTICS), *COUNTS):
        ours, theirs = metric_at(observed, path), metric_at(simulated, path)
        if ours is not None and theirs is not None:
            found[path] = 100 * (theirs - ours) / ours if ours else (None if theirs else 0.0)
    for share in ("prefix_reuse", *(f"from {tier}" for tier in LOWER_TIERS)):
        if share == "prefix_reuse" or observed[share] or simulated[share]:
            found[share] = 100 * (simulated[share] - observed[share])
    return found


def _above(result: Mapping[str, Any], bounds: Mapping[str, float]) -> Iterable[str]:
    for name, most in bounds.items():
        for path in BOUNDED[name]:
            error = result["errors"].get(path, 0.0)
            if error is None or abs(error) > most:
                unit = "points" if path == "prefix_reuse" else "%"
                size = "undefined, because the observed value is 0" if error is None else f"{error:+.2f} {unit}"
                yield f"error of {path.replace('.', ' ')} is {size}; the bound is {most:g}"


def _left_out(requests: Iterable[RecordedRequest]) -> dict[str, int]:
    found = Counter[str]()
    for one in requests:
        if one.in_flight:
            found["in flight at the beginning"] += 1
        elif one.output_tokens is None:
            ended = "rejected or never routed" if one.worker is one.prefiller is None else "unfinished"
            found["cancelled by their clients" if one.cancelled_us else ended] += 1
    return dict(found)


def _notes(history: ObservedHistory, assumed: int, median: int) -> list[str]:
    joined, lost = (
        sum(isinstance(one, kind) for _, one in history.external_events) for kind in (WorkerJoined, WorkerLost)
    )
    notes = []
    if any(isinstance(chunk, WorkerState) for chunk in history.state):
        notes.append("Caches start with the blocks of the index, whose recency is unknown; other tiers start empty.")
    if joined or lost:
        notes.append(f"{joined:,} workers joined with empty caches and {lost:,} were lost, as recorded.")
    if assumed:
        text = f"{assumed:,} unfinished requests are simulated with the median response length of the others"
        notes.append(f"{text}, {median:,} tokens.")
    if history.commands:
        notes.append(f"{history.commands:,} commands to workers are ignored, because simulated engines have none.")
    return notes


def _show(name: str, history: ObservedHistory, result: Mapping[str, Any]) -> None:
    observed, simulated = result["observed"], result["simulated"]
    console = results()
    table = Table(title=f"{observed['requests']:,} requests", box=box.SIMPLE, padding=(0, 1, 0, 0))
    for column in ("", "observed", "simulated", "error"):
        table.add_column(column, justify="right" if column else "left")
    for path, error in result["errors"].items():
        latency, _, of = path.partition(".")
        label = f"{NAMES[latency]} {of}, ms" if of else COUNTS.get(path, path.replace("_", " "))
        width = ",.2f" if of else ",.0f" if path in MOVED else ".4f"
        unit = "%" if of or path in COUNTS else "points"
        off = "none observed" if error is None else f"{error:+.2f} {unit}"
        values = [f"{metric_at(side, path):{width}}" for side in (observed, simulated)]
        table.add_row(label, *values, off)
    seconds = (history.end_us - history.begin_us) / 1e6
    lines = [
        ("recording", f"{name}: {result['requests']:,} requests in {seconds:,.1f} s, {result['workers']} worker ranks")
    ]
    lines += [("left out", ", ".join(f"{count:,} {why}" for why, count in result["left_out"].items()))]
    lines += [("placement", f"{result['same_worker']:.1%} of the requests ran on the same worker in both")]
    if result["failed"]:
        lines += [("failed", f"{result['failed']:,} requests that completed in the recording; {result['failures'][0]}")]
    if (transfer := result["transfer"]) is not None:
        bandwidth = transfer["kv_transfer_bandwidth"]
        rate = f"{bandwidth:.4g} GB/s" if bandwidth else "unlimited bandwidth"
        text = f"{transfer['kv_transfer_latency_us']:,} us latency and {rate}"
        lines += [("transfers", f"{text}, {transfer['kv_bytes_per_token']:,} bytes per token")]
    console.print(table)
    for title, text in (*lines, *(("note", note) for note in result["notes"])):
        if text:
            console.print(f"{title:<12}{in_markup(text)}")
