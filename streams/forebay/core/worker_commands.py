"""Decide about operators' commands, as `forebay.core.dispatch` about requests: send them to workers or reject them."""

from msgspec.structs import replace

from forebay.core.state.adapters import ADAPTERS_MAX
from forebay.core.state.commands import LAST_READY, PENDING_MAX, PendingCommand
from forebay.core.state.fleet import FleetWorker, WorkerPhase
from forebay.core.state_machine import IllegalTransition
from forebay.core.world import World
from forebay.events.control import LORA_CHANGES, WorkerCommanded
from forebay.events.decisions import CommandEnded, CommandOutcome, CommandRefusal, CommandSent
from forebay.events.progress import CommandDone, CommandRefused
from forebay.events.snapshots import AdapterState
from forebay.events.versions import PLACEMENT_SINCE

FAILED_US = 30_000_000  # a store of adapters that was unreachable may be back


class _CommandRejected(Exception):
    """The command cannot be sent; the text is fit for the operator."""

    def __init__(self, reason: CommandRefusal, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def submit_command(world: World, event: WorkerCommanded, offset: int) -> list[CommandSent | CommandEnded]:
    """Send a command to its workers, or reject it. Return its journal records, or none if it was already submitted."""
    commands = world.commands
    known = commands.known_nonce(event.command_id)
    if known is not None:
        if known == event.nonce:
            world.counts["duplicate_command"] += 1
            return []
        return [
            _reject(
                world,
                event,
                "duplicate_id",
                f"the command id {event.command_id} was already used for a different command",
            )
        ]
    if world.owner_events < PLACEMENT_SINCE:  # the owner did not know the field
        event = replace(event, command=replace(event.command, placement="workers"))
    try:
        workers = _change_catalog(world, event)
        workers = _workers(world, event) if workers is None else workers
    except _CommandRejected as rejected:
        commands.remember(event.command_id, event.nonce, world.now_us)
        return [_reject(world, event, rejected.reason, str(rejected))]
    emptied = _emptied_pools(world, workers) if event.command.action == "drain" else frozenset()
    outcomes = {
        worker.spec.worker_id: CommandOutcome(
            worker_id=worker.spec.worker_id,
            worker_epoch=worker.worker_epoch,
            pool=worker.spec.pool,
            message=LAST_READY if worker.spec.pool in emptied else "",
        )
        for worker in workers
    }
    pending = PendingCommand(
        command_id=event.command_id,
        nonce=event.nonce,
        offset=offset,
        command=event.command,
        reply_slot=event.reply_slot,
        due_us=world.now_us + event.timeout_us,
        outcomes=outcomes,
    )
    sent = CommandSent(
        **world.stamp(),
        command_id=event.command_id,
        reply_slot=event.reply_slot,
        reply_key=event.nonce,
        action=event.command.action,
        targets=tuple(worker.target for worker in workers),
    )
    if not workers:  # the command only changed the catalog
        commands.remember(event.command_id, event.nonce, world.now_us)
        return [sent, _ended(world, pending)]
    commands.add(pending)
    return [sent]


def apply_command_response(world: World, event: CommandDone | CommandRefused) -> list[CommandEnded]:
    """Apply a worker's response to a command. Return the record of the command's end, if this is the last response."""
    if isinstance(event, CommandDone) and event.action in LORA_CHANGES:
        # Apply the adapters even if the response is too late for its command: they are loaded all the same.
        try:
            if world.fleet.set_loras(event.worker_id, event.worker_epoch, event.loras):
                world.adapters.sync(event.worker_id, event.loras, world.now_us)
                world.replan(world.requests.waiting())  # these requests may need the adapter that was loaded
            _learn_digest(world, event)
        except IllegalTransition:
            world.counts["foreign_adapters"] += 1
    try:
        world.commands.apply_response(event)
    except IllegalTransition:
        world.counts["stale_command_response"] += 1
    return end_commands(world)


def end_commands(world: World) -> list[CommandEnded]:
    """End the commands that are pending at no worker any more. Return their journal records."""
    ended = []
    for pending in world.commands.closed:
        world.commands.end(pending, world.now_us)
        world.counts.update(f"command_{outcome.status}" for outcome in pending.outcomes.values())
        ended.append(_ended(world, pending))
        if pending.command.placement == "auto":
            _end_placement(world, pending)
    world.commands.closed.clear()
    return ended


def _ended(world: World, pending: PendingCommand) -> CommandEnded:
    return CommandEnded(
        **world.stamp(),
        command_id=pending.command_id,
        reply_slot=pending.reply_slot,
        reply_key=pending.nonce,
        action=pending.command.action,
        outcomes=tuple(pending.outcomes.values()),
        placed=world.adapters.names() if pending.command.action == "list_loras" else (),
    )


def _end_placement(world: World, pending: PendingCommand) -> None:
    """Note which workers could not load an adapter of the catalog. A worker that left is not at fault."""
    for outcome in pending.outcomes.values() if pending.command.action == "load_lora" else ():
        until_us = world.now_us + FAILED_US if outcome.status in ("refused", "timed_out") else 0
        world.adapters.fail(pending.command.lora_name, outcome.worker_id, until_us, outcome.message)
    world.replan()


def _learn_digest(world: World, event: CommandDone) -> None:
    """Require the digest of the first load of an adapter from all later loads."""
    pending = world.commands.get(event.command_id)
    if pending is None or pending.command.placement != "auto" or not event.lora_digest:
        return
    adapter = world.adapters.get(pending.command.lora_name)
    if adapter is not None and adapter.lora_path == pending.command.lora_path:
        world.adapters.put(replace(adapter, lora_digest=event.lora_digest))


def _change_catalog(world: World, event: WorkerCommanded) -> list[FleetWorker] | None:
    """Apply a command that adds an adapter to the catalog or removes it, and return the workers that get the command.

    Return None if the command does not concern the catalog.
    """
    command, catalog = event.command, world.adapters
    known = catalog.get(command.lora_name)
    if command.action == "load_lora" and command.placement == "auto":
        if world.pool_of(event.model) is None:
            raise _CommandRejected("unknown_model", f"no pool serves the model {event.model}")
        if known is None and len(catalog) >= ADAPTERS_MAX:
            raise _CommandRejected("too_many_adapters", f"the catalog has {len(catalog)} adapters, the maximum")
        if known is not None and (known.model, known.lora_path) != (event.model, command.lora_path):
            text = f"the catalog has {known.lora_name} from {known.lora_path}; unload it first, or use another name"
            raise _CommandRejected("adapter_exists", text)
        if known is None:
            name, path, digest = command.lora_name, command.lora_path, command.lora_digest
            catalog.put(AdapterState(lora_name=name, model=event.model, lora_path=path, lora_digest=digest))
            for worker in world.fleet.workers():
                catalog.sync(worker.spec.worker_id, worker.spec.loras, world.now_us)
            world.strand_waiting()
            world.replan()
        return []
    removes = command.action == "unload_lora" and not event.worker_ids and not event.pool
    if removes and known is not None and known.model == event.model:
        catalog.remove(command.lora_name)
        having = [one for one in world.fleet.workers() if command.lora_name in one.spec.loras]
        return [one for one in having if one.phase is WorkerPhase.READY]
    return None


def _workers(world: World, event: WorkerCommanded) -> list[FleetWorker]:
    """Return the workers that a command addresses, in order of worker id. Raises _CommandRejected."""
    if len(world.commands) >= PENDING_MAX:
        raise _CommandRejected(
            "too_many_commands", f"{len(world.commands)} commands are in flight, the maximum of a group"
        )
    if not world.pools:
        raise _CommandRejected("no_workers", "no worker has joined yet")
    pools = {name for name, pool in world.pools.items() if pool.model == event.model}
    if not pools:
        raise _CommandRejected("unknown_model", f"no pool serves the model {event.model}")
    if event.pool:
        if event.pool not in pools:
            raise _CommandRejected("unknown_pool", f"the model {event.model} has no pool {event.pool}")
        pools = {event.pool}
    if event.worker_ids:
        return [_ready_worker(world, name, pools) for name in sorted(set(event.worker_ids))]
    members = [worker for worker in world.fleet.workers() if worker.spec.pool in pools]
    ready = [worker for worker in members if worker.phase is WorkerPhase.READY]
    if not ready:
        where = f"of the pool {event.pool}" if event.pool else f"of {event.model}"
        raise _CommandRejected("no_workers", f"no worker {where} is ready")
    return ready


def _emptied_pools(world: World, drained: list[FleetWorker]) -> frozenset[str]:
    """Return the pools that have no ready worker besides the workers `drained`."""
    names = {worker.spec.worker_id for worker in drained}
    others = (one for one in world.fleet.workers() if one.spec.worker_id not in names)
    left = {one.spec.pool for one in others if one.phase is WorkerPhase.READY}
    return frozenset(worker.spec.pool for worker in drained) - left


def _ready_worker(world: World, name: str, pools: set[str]) -> FleetWorker:
    worker = world.fleet.get(name)
    if worker is None or worker.spec.pool not in pools:
        raise _CommandRejected("unknown_worker", f"unknown worker {name}")
    if worker.phase is not WorkerPhase.READY:
        raise _CommandRejected("worker_not_ready", f"worker {name} is {worker.phase}")
    return worker


def _reject(world: World, event: WorkerCommanded, reason: CommandRefusal, message: str) -> CommandSent:
    world.counts[f"command_{reason}"] += 1
    return CommandSent(
        **world.stamp(),
        command_id=event.command_id,
        reply_slot=event.reply_slot,
        reply_key=event.nonce,
        action=event.command.action,
        reason=reason,
        message=message,
    )
