"""Filter the ranks that may take a request, before any cost is computed.

The client's conditions come first: one worker, a list of workers, taints, an adapter. Then busy workers are removed. A
rank is busy above any threshold; a worker is busy if all its ranks are. If a filter removes the last rank, it raises
`Ineligible` with a reason that a client understands.

Source: Dynamo's router filtering and request rejection. Dynamo's errors NoEndpoints, AllEligibleWorkersOverloaded and
PinnedWorkerOverloaded are `no_eligible_worker` and `busy` here.
"""

from forebay.core.state.fleet import Fleet
from forebay.core.state.roster import CandidateRank, Roster
from forebay.core.state.submitted_request import SubmittedRequest
from forebay.events.control import BusyThresholds, PoolConfigured
from forebay.events.decisions import RejectReason
from forebay.events.fleet import WorkerSpec
from forebay.events.requests import RoutingHints

NO_THRESHOLDS = BusyThresholds()
NAMES_SHOWN = 4  # names of a client's list that an error message shows


class Ineligible(Exception):
    """No worker may take the request. The text explains this to the client."""

    def __init__(self, reason: RejectReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def filter_eligible(roster: Roster, fleet: Fleet, pool: PoolConfigured, request: SubmittedRequest) -> Roster:
    """Return the ranks that meet the conditions of a request: routing hints, adapter, task and cache namespace.

    `fleet` has the workers of all pools, to explain an unknown worker. Raises Ineligible if no rank meets the
    conditions, or if the hints contradict each other.
    """
    hints, lora_name = request.hints, request.lora_name
    _validate_hints(hints, pool, fleet)
    if not roster.ranks:
        raise Ineligible("no_workers", f"no worker of the pool {pool.pool} is ready")
    is_special = hints.worker_id or hints.allowed_workers or hints.required_taints or lora_name or request.is_external
    if request.task in roster.tasks and not is_special and (roster.salts_cache or not request.is_salted):
        return roster
    found = [at for at, candidate in enumerate(roster.ranks) if _meets_requirements(candidate, request)]
    if not found:
        wanted = _describe_requirements(request)
        raise Ineligible("no_eligible_worker", f"no ready worker of the pool {pool.pool} {wanted}")
    return roster.only(found)


def requirements_key(request: SubmittedRequest) -> tuple[object, ...]:
    """Return a key over the conditions of a request. Requests with equal keys have the same candidates."""
    hints = request.hints
    mode = None if hints.override is None else hints.override.mode
    names = hints.worker_id, hints.rank, hints.allowed_workers, hints.session_id, hints.endpoints, hints.endpoint
    return (*names, hints.required_taints, request.lora_name, request.task, mode, request.is_salted, request.delivery)


def filter_not_busy(roster: Roster, thresholds: BusyThresholds, pool: str) -> Roster:
    """Return the ranks whose workers are not busy. Raises Ineligible, which names `pool`, if every worker is busy."""
    if thresholds == NO_THRESHOLDS:
        return roster
    idle = {candidate.worker.spec.worker_id: None for candidate in roster.ranks if not is_busy(candidate, thresholds)}
    if not idle:
        raise Ineligible("busy", f"every eligible worker of the pool {pool} is busy")
    return roster.only([at for at, candidate in enumerate(roster.ranks) if candidate.worker.spec.worker_id in idle])


def is_busy(candidate: CandidateRank, thresholds: BusyThresholds) -> bool:
    """Return whether a rank is above any of the thresholds, by its booked load or by its last load report."""
    spec, load = candidate.worker.spec, candidate.load
    share = thresholds.active_decode_blocks_threshold
    if share is not None:
        reported = load.reported
        used = load.decode_blocks if reported is None else max(load.decode_blocks, reported.kv_blocks_used)
        if used > share * spec.kv_blocks_total:
            return True
    tokens = thresholds.active_prefill_tokens_threshold
    if tokens is not None and load.prefill_tokens > tokens:
        return True
    multiple = thresholds.active_prefill_tokens_threshold_frac
    return multiple is not None and load.prefill_tokens > multiple * spec.max_num_batched_tokens


def all_above_threshold(roster: Roster, threshold: float) -> bool:
    """Return whether every rank has more prompt tokens to compute than `threshold` engine steps can compute."""
    return bool((roster.columns.prefill_tokens.take(roster.slots) > threshold * roster.step_tokens).all())


def _validate_hints(hints: RoutingHints, pool: PoolConfigured, fleet: Fleet) -> None:
    """Reject hints that contradict each other or name an unknown worker or rank."""
    name = hints.worker_id
    if not name:
        if hints.rank is not None:
            raise Ineligible("contradictory_routing", f"the request names rank {hints.rank}, but no worker")
        mode = pool.router.mode if hints.override is None or hints.override.mode is None else hints.override.mode
        if mode == "direct":
            raise Ineligible("unknown_worker", "the router mode is direct, so the request must name a worker")
        return
    if hints.allowed_workers and name not in hints.allowed_workers:
        raise Ineligible(
            "contradictory_routing", f"the request names worker {name}, which is not one of its allowed workers"
        )
    worker = fleet.get(name)
    if worker is None or worker.spec.pool != pool.pool:
        raise Ineligible("unknown_worker", f"the pool {pool.pool} has no worker {name}")
    if hints.rank is not None and hints.rank not in worker.spec.ranks:
        ranks = worker.spec.ranks
        raise Ineligible(
            "unknown_worker", f"worker {name} has no rank {hints.rank}; ranks are {ranks[0]} to {ranks[-1]}"
        )


def _meets_requirements(candidate: CandidateRank, request: SubmittedRequest) -> bool:
    spec, hints, lora_name = candidate.worker.spec, request.hints, request.lora_name
    can_run = hints.endpoint in spec.endpoints if request.task == "call" else request.task in spec.tasks
    if not can_run or (request.is_salted and not spec.salts_cache):
        return False
    if hints.worker_id and (spec.worker_id != hints.worker_id or hints.rank not in (None, candidate.rank)):
        return False
    if hints.allowed_workers and spec.worker_id not in hints.allowed_workers:
        return False
    if request.is_external and not _has_server(spec, hints):
        return False
    if any(taint not in spec.taints for taint in hints.required_taints):
        return False
    return not lora_name or lora_name in spec.loras


def _has_server(spec: WorkerSpec, hints: RoutingHints) -> bool:
    """Return whether a gateway may send a request to the server of a worker. A server runs all stages of a request."""
    named = spec.endpoint in hints.endpoints if hints.endpoints else bool(spec.endpoint)
    return named and spec.role == "aggregated"


def _describe_requirements(request: SubmittedRequest) -> str:
    hints, lora_name = request.hints, request.lora_name
    wants = [] if request.task == "generate" else [f"can {request.task} {hints.endpoint}".rstrip()]
    if hints.worker_id:
        wants.append(f"is {hints.worker_id}")
    elif hints.allowed_workers:
        wants.append("is one of " + _format_names(hints.allowed_workers))
    if request.is_external:
        names = " that the gateway names: " + _format_names(hints.endpoints) if hints.endpoints else ""
        wants.append(f"has a server{names}")
    if hints.required_taints:
        wants.append("has the taints " + _format_names(hints.required_taints))
    if lora_name:
        wants.append(f"has the adapter {lora_name}")
    if request.is_salted:
        wants.append("separates the cache of the request's namespace")
    return " and ".join(wants)


def _format_names(names: tuple[str, ...]) -> str:
    return ", ".join(names[:NAMES_SHOWN]) + (", …" if len(names) > NAMES_SHOWN else "")
