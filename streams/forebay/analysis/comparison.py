"""Simulate a recording on its own fleet, and compare the latencies.

All times are of the owner's clock in the recording: a request begins, gets its first token and ends when the owner
applied the events. The metrics cover the requests that completed in the recording and in the simulation.
"""

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec
from msgspec.structs import replace

from forebay.core.routing.policies import CustomPolicies
from forebay.core.state.holder_bits import HolderKey
from forebay.events.fleet import FleetEvent, WorkerJoined, WorkerLost, WorkerSpec
from forebay.events.requests import RequestCancelled, RequestSubmitted, Sampling
from forebay.events.snapshots import WorkerState
from forebay.events.topics import CONTROL, FLEET, REQUESTS
from forebay.replay.observed_history import ObservedHistory, ObservedRequest
from forebay.runtime.errors import ConfigError
from forebay.simulate.arrivals import Arrival
from forebay.simulate.cluster import OnArrived
from forebay.simulate.outcome import (
    LOWER_TIERS,
    RequestOutcome,
    RequestOutcomes,
    SimulationOutcome,
    summary,
    tier_tokens,
)
from forebay.simulate.pareto import metric_at
from forebay.simulate.resumed import SimulatedHardware, resume
from forebay.simulate.settings import KV_BYTES_MAX, Delay, Settings, Transfer, tiers_of
from forebay.simulate.tiers.settings import BANDWIDTH_MAX, BYTES_PER_US

TRANSFER = ("kv_bytes_per_token", "kv_transfer_bandwidth", "kv_transfer_latency_us")
OUTPUT_TOKENS_MAX = (1 << 31) - 1  # maximum of `max_tokens` in a request
GROUPS = 10  # of recorded transfers, by size
NAMES = {"ttft_ms": "TTFT", "itl_ms": "ITL", "e2e_ms": "E2E", "prefill_ms": "prefill", "transfer_ms": "transfer"}
STATISTICS = ("mean", "p50", "p90", "p99")
COUNTS = {
    "prefilled_remotely": "prefilled remotely",
    "transferred_bytes": "KV transferred, bytes",
    "load_max_over_mean": "load, max over mean",
}


def compared(
    history: ObservedHistory,
    settings: Settings,
    given: Mapping[str, Any],
    speedup: float,
    custom: CustomPolicies,
    on_arrived: OnArrived,
) -> dict[str, Any]:
    """Simulate a recording on its own fleet, and return the metrics of both sides and the errors, as printed in JSON.

    Args:
        history: observed history, without a divergence.
        settings: latencies, tiers, and the timing of the engines of all workers.
        given: fields of `Transfer` that override the values found in the recording.
        speedup: how much faster than their model the recorded engines ran.
        on_arrived: called with the number of requests that have arrived.

    Raises ConfigError if the recording cannot be simulated, or has no request to compare.
    """
    requests = _by_unique_id(history.requests)
    finished = [one.output_tokens for one in requests.values() if one.output_tokens is not None]
    if not finished:
        raise ConfigError("no recorded request finished, so no response length is known; use a longer recording")
    median = max(1, round(statistics.median(finished)))
    specs = _specs(history)
    if given.keys() - {TRANSFER[0]} and all(spec.role != "prefill" for spec in specs):
        raise ConfigError("the recording has no KV transfers; omit the --kv-transfer-* options")
    transfer = replace(_observed_transfer(history.requests, specs), **given)
    group = settings.pools[0].groups[0]
    # The recorded times include the latencies to the router, and exclude those to clients.
    delays = replace(settings.delays, submit=Delay(), tokens=settings.delays.progress)
    hardware = SimulatedHardware(group.engine.timing, transfer, tiers_of(settings, group))
    arrivals = _arrivals(history, requests, median)
    resumed = resume(
        history.state, arrivals, on_arrived, speedup=speedup, delays=delays, hardware=hardware, custom=custom
    )
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


def _by_unique_id(requests: Sequence[ObservedRequest]) -> dict[str, ObservedRequest]:
    """Return the requests in order of arrival. Repeated ids, which clients may use, get a suffix."""
    found: dict[str, ObservedRequest] = {}
    for number, one in enumerate(requests):
        found[f"{one.request_id}#{number}" if one.request_id in found else one.request_id] = one
    return found


def _specs(history: ObservedHistory) -> list[WorkerSpec]:
    joined = [one.spec for _, one in history.external_events if isinstance(one, WorkerJoined)]
    return [*(chunk.spec for chunk in history.state if isinstance(chunk, WorkerState)), *joined]


def _arrivals(history: ObservedHistory, requests: Mapping[str, ObservedRequest], median: int) -> list[Arrival]:
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


def _observed_transfer(requests: Iterable[ObservedRequest], specs: Sequence[WorkerSpec]) -> Transfer:
    """Return the time of observed KV transfers as a model: a line through the medians of groups of equal size."""
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


def _observed_outcome(one: ObservedRequest, numbers: dict[HolderKey, int]) -> RequestOutcome:
    """Return the observed outcome of a finished request. Unknown ranks are added to `numbers`."""
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


def _left_out(requests: Iterable[ObservedRequest]) -> dict[str, int]:
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
