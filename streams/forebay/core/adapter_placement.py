"""Place the LoRA adapters of the catalog: load them where requests need them, and unload others for them.

Theory of operation. A request whose adapter no ready worker has is queued. At the end of the event, the owner selects a
worker as it would for the request if all workers had the adapter, but prefers workers with a free slot. If there is
none, the worker unloads the adapter that was used least recently, of those that no request uses and that were loaded
some seconds ago. One adapter is loaded at a time on a worker, and on one worker at a time. An adapter gets another
worker if too many requests wait for those that have it.

The commands are those of operators (`forebay.core.state.commands`), so that losses, timeouts and takeovers are, too.
"""

from msgspec.structs import replace

from forebay.core.booking import abort
from forebay.core.phases import Phase
from forebay.core.routing.eligibility import Ineligible
from forebay.core.routing.plan import Plan, StageCandidates
from forebay.core.selection.candidates import find_hosts
from forebay.core.selection.evaluation import evaluate
from forebay.core.state.active_request import ActiveRequest
from forebay.core.state.commands import PENDING_MAX, PendingCommand
from forebay.core.state.fleet import FleetWorker
from forebay.core.state.roster import Roster
from forebay.core.world import World
from forebay.events.control import Command, PoolConfigured
from forebay.events.decisions import AdapterPlaced, CommandOutcome, RequestAborted
from forebay.events.snapshots import AdapterState

LOAD_US = 60_000_000  # an adapter of some hundred megabytes from a slow store
KEPT_US = 5_000_000  # otherwise two adapters of one slot would be loaded in turn, and serve one request each
BLOCKED_US = 100_000  # finding an unused adapter looks at every active request
UNLOAD = "-unload"  # end of the id of the command that makes room
WAITING_MAX = 4  # per worker that has the adapter; a load costs about as much time as some requests


def place_adapters(world: World) -> list[AdapterPlaced | RequestAborted]:
    """Load the adapters that requests wait for, in order of their first requests. Return the decisions."""
    catalog = world.adapters
    if not len(catalog):
        return []
    catalog.unblock(world.now_us)
    loading = {one.command.lora_name for one in world.commands.pending() if one.command.placement == "auto"}
    waiting = [
        (adapter, min(requests, key=_offset), requests)
        for (_, name), ids in _waiting(world).items()
        if (adapter := catalog.get(name)) is not None
        and not adapter.retry_us
        and name not in loading
        and (requests := [request for one in ids if (request := world.requests.get(one)) is not None])
    ]
    decided: list[AdapterPlaced | RequestAborted] = []
    for adapter, first, requests in sorted(waiting, key=lambda one: _offset(one[1])):
        decided += _place(world, adapter, first, requests)
    return decided


def _waiting(world: World) -> dict[tuple[str, str], list[str]]:
    """Return the ids of the requests that wait, by pool and adapter."""
    found = {key: [*ids] for key, ids in world.queues.of_adapters.items()}
    for request_id in [*world.adapters.stranded]:
        request = world.requests.get(request_id)
        if request is None or request.phase is not Phase.WAITING:
            del world.adapters.stranded[request_id]
            continue
        found.setdefault((request.submitted.pool, request.submitted.lora_name), []).append(request_id)
    return found


def _place(
    world: World, adapter: AdapterState, first: ActiveRequest, requests: list[ActiveRequest]
) -> list[AdapterPlaced | RequestAborted]:
    pool = world.pools[first.submitted.pool]
    ready = {candidate.worker.spec.worker_id for candidate in world.roster(pool.pool).ranks}
    holders = ready.intersection(one.worker_id for one in adapter.holders)
    if holders and len(requests) <= WAITING_MAX * len(holders):
        return []
    try:
        hosts = find_hosts(world, pool, first.submitted, Ineligible("no_eligible_worker", ""))
    except Ineligible as failed:
        return [] if holders else [abort(world, one, "adapter_failed", str(failed)) for one in requests]
    plan = None if hosts is None else _select(world, pool, adapter, first, hosts)
    if plan is None:
        world.adapters.put(replace(adapter, retry_us=world.now_us + BLOCKED_US))
        return []
    worker = plan.selected.worker
    is_full = len(worker.spec.loras) >= worker.spec.max_loras
    unloaded = _unused(world, worker) if is_full else None
    command_id = f"adapter-{world.seq}"
    while world.commands.known_nonce(command_id) is not None:  # an operator may use any id
        command_id += "-"
    if unloaded is not None:
        unload = Command(action="unload_lora", lora_name=unloaded, placement="auto")
        _command(world, worker, f"{command_id}{UNLOAD}", unload)
        # From now on, no request for this adapter may go to the worker.
        left = tuple(name for name in worker.spec.loras if name != unloaded)
        world.fleet.set_loras(worker.spec.worker_id, worker.worker_epoch, left)
        world.adapters.sync(worker.spec.worker_id, left, world.now_us)
    name, path, digest = adapter.lora_name, adapter.lora_path, adapter.lora_digest
    load = Command(action="load_lora", lora_name=name, lora_path=path, lora_digest=digest, placement="auto")
    _command(world, worker, command_id, load)
    world.counts["adapters_loaded"] += 1
    world.counts["adapters_unloaded"] += unloaded is not None
    return [
        AdapterPlaced(
            **world.stamp(),
            command_id=command_id,
            lora_name=name,
            target=worker.target,
            reason="waiting" if holders else "missing",
            waiting=len(requests),
            unloaded=unloaded or "",
            candidates=len(plan.table),
            terms=plan.table.terms(plan.at),
        )
    ]


def _select(
    world: World, pool: PoolConfigured, adapter: AdapterState, first: ActiveRequest, hosts: Roster
) -> Plan | None:
    """Select the rank whose worker loads an adapter; None if no worker can load it now."""
    if len(world.commands) + 2 > PENDING_MAX:
        return None
    pending = [one for one in world.commands.pending() if one.command.placement == "auto"]
    loading = {worker_id for one in pending for worker_id in one.outcomes}
    specs = {at: candidate.worker for at, candidate in enumerate(hosts.ranks)}
    able = [
        at
        for at, worker in specs.items()
        if worker.spec.worker_id not in loading and adapter.lora_name not in worker.spec.loras
    ]
    free = [at for at in able if len(specs[at].spec.loras) < specs[at].spec.max_loras]
    found = free or [at for at in able if _unused(world, specs[at]) is not None]
    if not found:
        return None
    try:
        view = StageCandidates("aggregated", pool, hosts.only(found), first.submitted, first.attempt)
        return evaluate(world, view)
    except Ineligible:
        return None  # the policy failed; the request gets the error once it is routed


def _unused(world: World, worker: FleetWorker) -> str | None:
    """Return the adapter that a worker used least recently and can unload now, or None."""
    spec = worker.spec
    used = {one.submitted.lora_name for one in world.requests.of_worker(spec.worker_id, worker.worker_epoch)}
    idle = [
        (holder.used_us, at, name)
        for at, name in enumerate(spec.loras)
        if name not in used and (one := world.adapters.get(name)) is not None
        for holder in one.holders
        if holder.worker_id == spec.worker_id and holder.loaded_us + KEPT_US <= world.now_us
    ]
    return min(idle)[2] if idle else None


def _command(world: World, worker: FleetWorker, command_id: str, command: Command) -> None:
    spec = worker.spec
    outcome = CommandOutcome(worker_id=spec.worker_id, worker_epoch=worker.worker_epoch, pool=spec.pool)
    due_us = world.now_us + LOAD_US
    world.commands.add(PendingCommand(command_id, 0, 0, command, 0, due_us, {spec.worker_id: outcome}))


def _offset(request: ActiveRequest) -> int:
    return request.submitted.offset
