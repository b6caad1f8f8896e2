"""Outcome of a simulation: what happened to each request, and the metrics of the run."""

import statistics
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from forebay.events.kv import LowerTier
from forebay.events.progress import OnboardedTokens
from forebay.events.scaling import PoolObserved, ScalingDecided

LOWER_TIERS: tuple[LowerTier, ...] = get_args(LowerTier)
FAILURES_SHOWN = 20  # if a trace does not fit, thousands of rows fail for the same reason
NO_WORKER = -1


@dataclass(slots=True)
class RequestOutcome:
    """Outcome of one request. Points in time are virtual microseconds at the client."""

    arrived_us: int
    prompt_tokens: int
    output_tokens: int
    worker: int | None = None  # number of the worker to which the request was routed last; None if it was never routed
    cached_tokens: int = 0  # prompt tokens that the worker found in its cache
    first_us: int = 0  # time of the first output token; 0 if there was none
    last_us: int = 0  # time of the last output token; 0 if the response is not complete
    # Number of attempts. For a disaggregated request, the larger of the numbers of prefill and decode attempts.
    attempts: int = 0
    failure: str = ""  # reason why the response is missing or incomplete; empty on success
    number: int = 0  # number of the request in the workload (`Turn.number`)
    # Number of the prefill worker that computed the prompt, in whose cache the `cached_tokens` were found; None without
    # disaggregation.
    prefiller: int | None = None
    prefilled_us: int = 0  # time at which `prefiller` had computed the prompt; 0 without disaggregation
    transferred_bytes: int = 0  # bytes of KV that the decode worker fetched
    transfer_us: int = 0  # microseconds from the decode worker's request for the KV to the end of the transfer
    host_tokens: int = 0  # the part of `cached_tokens` that was loaded from host memory
    disk_tokens: int = 0  # the part of `cached_tokens` that was loaded from the disk of the worker
    store_tokens: int = 0  # the part of `cached_tokens` that was loaded from the shared store
    load_us: int = 0  # duration of these loads in microseconds

    def record_prompt(self, cached_tokens: int, onboarded: Sequence[OnboardedTokens]) -> None:
        """Record how many tokens of the prompt were not computed, and which of them were loaded from other tiers."""
        self.cached_tokens = min(cached_tokens, self.prompt_tokens)
        self.record_loads(onboarded)

    def record_loads(self, onboarded: Sequence[OnboardedTokens]) -> None:
        """Record which of the cached tokens were loaded from other tiers."""
        tokens: dict[LowerTier, int] = {}
        left = self.cached_tokens  # a later attempt may also have loaded output tokens of earlier attempts
        for one in onboarded:
            tokens[one.tier] = min(one.tokens, left)
            left -= tokens[one.tier]
        self.host_tokens, self.disk_tokens, self.store_tokens = (tokens.get(tier, 0) for tier in LOWER_TIERS)
        self.load_us = max((one.us for one in onboarded), default=0)


class RequestOutcomes:
    """Outcomes of all requests of a run in the order of arrival, stored in columns of about 80 bytes per request.

    Requests of disaggregated fleets, and of fleets with tiers, take another 32 bytes each.
    """

    def __init__(self, served: Iterable[RequestOutcome] = ()) -> None:
        self._columns = {name: array("q") for name in COLUMNS}
        self.failures: dict[int, str] = {}
        for one in served:
            self.append(one)

    def __len__(self) -> int:
        return len(self._columns["arrived_us"])

    def __iter__(self) -> Iterator[RequestOutcome]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, place: int) -> RequestOutcome:
        values: dict[str, int | None] = {name: column[place] for name, column in self._columns.items()}
        for name in WORKERS:
            if values.get(name) == NO_WORKER:
                values[name] = None
        return RequestOutcome(**values, failure=self.failures.get(place, ""))  # type: ignore[arg-type]

    def append(self, served: RequestOutcome) -> None:
        for column in self._columns.values():
            column.append(0)
        self.put(len(self) - 1, served)

    def put(self, place: int, served: RequestOutcome) -> None:
        """Replace the outcome at index `place`."""
        self._make_room(served)
        for name, column in self._columns.items():
            value: int | None = getattr(served, name)
            column[place] = NO_WORKER if value is None else value
        if served.failure:
            self.failures[place] = served.failure

    def _make_room(self, served: RequestOutcome) -> None:
        if served.prefiller is not None and "prefiller" not in self._columns:
            self._columns |= {name: self.column(name) for name in TRANSFER_COLUMNS}
        if (served.host_tokens or served.disk_tokens or served.store_tokens) and "host_tokens" not in self._columns:
            self._columns |= {name: self.column(name) for name in TIER_COLUMNS}

    def column(self, name: str) -> "array[int]":
        """Return one attribute of all requests, in the order of arrival. -1 stands for a worker that is None."""
        if name in self._columns:
            return self._columns[name]
        return array("q", [NO_WORKER if name in WORKERS else 0]) * len(self)


COLUMNS = (
    "arrived_us", "prompt_tokens", "output_tokens", "worker", "cached_tokens", "first_us", "last_us", "attempts",
    "number",
)  # fmt: skip


TRANSFER_COLUMNS = ("prefiller", "prefilled_us", "transferred_bytes", "transfer_us")
TIER_COLUMNS = ("host_tokens", "disk_tokens", "store_tokens", "load_us")
WORKERS = ("worker", "prefiller")


@dataclass(slots=True)
class UtilizationTimeline:
    """Load and throughput of a run over time, in at most 400 bins of equal width.

    The width of a bin grows with the length of the run. Per-worker lists are indexed by worker number, then by bin.
    """

    bin_us: int = 1_000_000  # width of a bin in microseconds. The first bin begins at time 0.
    arrived: list[int] = field(default_factory=list)
    # Prompt tokens of the requests whose prefill ended in the bin.
    prompt_tokens: list[int] = field(default_factory=list)
    cached_tokens: list[int] = field(default_factory=list)  # the part of `prompt_tokens` that was found in the cache
    queued: list[int] = field(default_factory=list)  # requests in the router's queue at the end of the bin
    workers: list[int] = field(default_factory=list)  # members of the fleet at the end of the bin
    computed: list[list[int]] = field(default_factory=list)  # per worker, prompt tokens computed in the bin
    running: list[list[int]] = field(default_factory=list)  # per worker, running sequences at the end of the bin
    # Per worker, sequences waiting in the engine at the end of the bin.
    waiting: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PlannedInterval:
    at_us: int  # end of the interval in virtual microseconds
    observed: tuple[PoolObserved, ...]
    # Decisions at the end of the interval. If there are several, each continues the previous one.
    decisions: tuple[ScalingDecided, ...]
    # Workers of each pool by its name after the decisions: those that run or start, without draining ones.
    sizes: dict[str, int]
    gpu_s: float  # GPU seconds of all worker processes from the start of the run to `at_us`


@dataclass(frozen=True, slots=True)
class TierTraffic:
    """Blocks that the tiers of all ranks have moved."""

    loaded: dict[str, int]  # blocks loaded into device memory, by tier
    written: dict[str, int]
    counters: dict[str, int]  # blocks that were skipped, evicted or stale, as in `TierManager.counters`


@dataclass(slots=True)
class SimulationOutcome:
    """Outcome of a simulation of one policy on one workload."""

    requests: RequestOutcomes = field(default_factory=RequestOutcomes)
    digest: str = ""  # hash of all decisions, in hexadecimal
    # Ids of all workers that ever joined; the index is the worker's number.
    workers: list[str] = field(default_factory=list)
    pools: list[str] = field(default_factory=list)  # pool of each worker, in the order of `workers`
    prefill_workers: tuple[int, ...] = ()
    # GPU seconds of all worker processes. A process counts from its start to its death or the end of the run.
    gpu_s: float = 0.0
    lasted_us: int = 0  # virtual time of the last response or failure
    timeline: UtilizationTimeline = field(default_factory=UtilizationTimeline)  # load and throughput over time
    planned: list[PlannedInterval] = field(default_factory=list)  # intervals of the planner; empty without a planner
    tiers: TierTraffic | None = None  # blocks that the tiers have moved; None if no worker has tiers


def worker_names(outcome: SimulationOutcome) -> list[str]:
    """Return the ids of all workers for display. The ids of prefill workers have a mark."""
    return [
        f"{name} (prefill)" if number in outcome.prefill_workers else name
        for number, name in enumerate(outcome.workers)
    ]


def summary(outcome: SimulationOutcome, workers: int) -> dict[str, Any]:
    """Return the metrics of a run as `forebay simulate --json` prints them. `forebay trace` uses the same names.

    `workers` is the number of workers at the start of the run; more may have joined later.
    """
    workers = max(workers, len(outcome.workers))
    column, failures = outcome.requests.column, outcome.requests.failures
    computed = [0] * workers
    requests = [0] * workers
    prompt_tokens = cached_tokens = output_tokens = 0
    ttft_ms, itl_ms, e2e_ms = array("d"), array("d"), array("d")
    names = (
        "worker",
        "prefiller",
        "prompt_tokens",
        "cached_tokens",
        "output_tokens",
        "arrived_us",
        "first_us",
        "last_us",
    )
    rows = zip(*map(column, names), strict=True)
    for place, (worker, prefiller, prompt, cached, output, arrived_us, first_us, last_us) in enumerate(rows):
        if place in failures:
            continue
        assert worker != NO_WORKER, "a completed request has a worker"
        computed[worker if prefiller == NO_WORKER else prefiller] += prompt - cached
        requests[worker] += 1
        prompt_tokens += prompt
        cached_tokens += cached
        output_tokens += output
        ttft_ms.append((first_us - arrived_us) / 1e3)
        e2e_ms.append((last_us - arrived_us) / 1e3)
        if output > 1:
            itl_ms.append((last_us - first_us) / 1e3 / (output - 1))
    # In a disaggregated fleet the balance is that of the prefill workers, because decode workers compute few prompts.
    balanced = [computed[number] for number in outcome.prefill_workers] or computed
    shown = [{"request": place + 1, "reason": failures[place]} for place in sorted(failures)[:FAILURES_SHOWN]]
    return {
        "requests": len(ttft_ms),
        "failed": len(failures),
        "failures": shown,
        "prefix_reuse": cached_tokens / prompt_tokens if prompt_tokens else 0.0,
        "load_max_over_mean": max(balanced) * len(balanced) / sum(balanced) if sum(balanced) else 0.0,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "ttft_ms": percentiles(ttft_ms),
        "itl_ms": percentiles(itl_ms),
        "e2e_ms": percentiles(e2e_ms),
        "workers": [
            {"requests": count, "computed_tokens": tokens} for count, tokens in zip(requests, computed, strict=True)
        ],
        "digest": outcome.digest,
        **(_transfers(outcome) if outcome.prefill_workers else {}),
        **({} if outcome.tiers is None else {"tiers": _by_tier(outcome, outcome.tiers)}),
        **({"pools": _by_pool(outcome)} if len(_serving(outcome)) > 1 else {}),
    }


def _serving(outcome: SimulationOutcome) -> list[str]:
    """Return the pools that generate responses, in order of their first workers."""
    prefill = {*outcome.prefill_workers}
    return list(dict.fromkeys(pool for number, pool in enumerate(outcome.pools) if number not in prefill))


def _by_pool(outcome: SimulationOutcome) -> dict[str, dict[str, Any]]:
    """Return requests, reuse and time to first token of the completed requests by the pool that responded."""
    column, failures = outcome.requests.column, outcome.requests.failures
    found: dict[str, tuple[array[float], list[int]]] = {name: (array("d"), [0, 0]) for name in _serving(outcome)}
    names = ("worker", "prompt_tokens", "cached_tokens", "arrived_us", "first_us")
    for place, (worker, prompt, cached, arrived_us, first_us) in enumerate(zip(*map(column, names), strict=True)):
        if place not in failures:
            ttft_ms, tokens = found[outcome.pools[worker]]
            ttft_ms.append((first_us - arrived_us) / 1e3)
            tokens[0] += prompt
            tokens[1] += cached
    return {
        name: {
            "requests": len(ttft_ms),
            "prefix_reuse": cached / prompt if prompt else 0.0,
            "prompt_tokens": prompt,
            "ttft_ms": percentiles(ttft_ms),
        }
        for name, (ttft_ms, (prompt, cached)) in found.items()
    }


def tier_tokens(requests: Iterable[RequestOutcome]) -> dict[str, int]:
    """Return the prompt tokens of requests by where their KV came from: a tier, or `computed`."""
    tokens = dict.fromkeys(("device", *LOWER_TIERS, "computed"), 0)
    for one in requests:
        tokens["device"] += one.cached_tokens - one.host_tokens - one.disk_tokens - one.store_tokens
        tokens["host"] += one.host_tokens
        tokens["disk"] += one.disk_tokens
        tokens["store"] += one.store_tokens
        tokens["computed"] += one.prompt_tokens - one.cached_tokens
    return tokens


def _by_tier(outcome: SimulationOutcome, traffic: TierTraffic) -> dict[str, Any]:
    """Return the prompt tokens of the completed requests by where their KV came from, and the loads and writes."""
    completed = [one for place, one in enumerate(outcome.requests) if place not in outcome.requests.failures]
    tokens = tier_tokens(completed)
    load_ms = [one.load_us / 1e3 for one in completed if one.host_tokens or one.disk_tokens or one.store_tokens]
    total = sum(tokens.values())
    return {
        "tokens": tokens,
        "shares": {name: count / total if total else 0.0 for name, count in tokens.items()},
        "loads": len(load_ms),
        "load_ms": percentiles(load_ms),
        "loaded_blocks": traffic.loaded,
        "written_blocks": traffic.written,
        "counters": traffic.counters,
    }


def _transfers(outcome: SimulationOutcome) -> dict[str, Any]:
    """Return the metrics of KV transfers, over all completed requests whose prompt a prefill worker computed."""
    column, failures = outcome.requests.column, outcome.requests.failures
    prefill_ms, transfer_ms = array("d"), array("d")
    moved = 0
    names = ("prefiller", "arrived_us", "prefilled_us", "transferred_bytes", "transfer_us")
    for place, (prefiller, arrived_us, prefilled_us, of_it, took_us) in enumerate(
        zip(*map(column, names), strict=True)
    ):
        if prefiller != NO_WORKER and place not in failures:
            prefill_ms.append((prefilled_us - arrived_us) / 1e3)
            transfer_ms.append(took_us / 1e3)
            moved += of_it
    return {
        "prefilled_remotely": len(prefill_ms),
        "transferred_bytes": moved,
        "prefill_ms": percentiles(prefill_ms),
        "transfer_ms": percentiles(transfer_ms),
    }


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return mean, p50, p90 and p99, interpolated between values; an empty dict if there are no values."""
    if not values:
        return {}
    cuts = statistics.quantiles(values, n=100, method="inclusive") if len(values) > 1 else [values[0]] * 99
    return {"mean": statistics.fmean(values), "p50": cuts[49], "p90": cuts[89], "p99": cuts[98]}
