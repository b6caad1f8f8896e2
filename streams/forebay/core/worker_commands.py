"""Decide about operators' commands, as `forebay.core.dispatch` about requests: send them to workers or reject them."""

from forebay.core.state.commands import LAST_READY, PENDING_MAX, PendingCommand
from forebay.core.state.fleet import FleetWorker, WorkerPhase
from forebay.core.state_machine import IllegalTransition
from forebay.core.world import World
from forebay.events.control import LORA_CHANGES, WorkerCommanded
from forebay.events.decisions import CommandEnded, CommandOutcome, CommandRefusal, CommandSent
from forebay.events.progress import CommandDone, CommandRefused


class _CommandRejected(Exception):
    """The command cannot be sent; the text is fit for the operator."""

    def __init__(self, reason: CommandRefusal, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def submit_command(world: World, event: WorkerCommanded, offset: int) -> list[CommandSent]:
    """Send a command to its workers, or reject it. Return one journal record, or none if it was already submitted."""
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
    try:
        workers = _workers(world, event)
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
    commands.add(
        PendingCommand(
            command_id=event.command_id,
            nonce=event.nonce,
            offset=offset,
            command=event.command,
            reply_slot=event.reply_slot,
            due_us=world.now_us + event.timeout_us,
            outcomes=outcomes,
        )
    )
    return [
        CommandSent(
            **world.stamp(),
            command_id=event.command_id,
            reply_slot=event.reply_slot,
            reply_key=event.nonce,
            action=event.command.action,
            targets=tuple(worker.target for worker in workers),
        )
    ]


def apply_command_response(world: World, event: CommandDone | CommandRefused) -> list[CommandEnded]:
    """Apply a worker's response to a command. Return the record of the command's end, if this is the last response."""
    if isinstance(event, CommandDone) and event.action in LORA_CHANGES:
        # Apply the adapters even if the response is too late for its command: they are loaded all the same.
        try:
            if world.fleet.set_loras(event.worker_id, event.worker_epoch, event.loras):
                world.replan(world.requests.waiting())  # these requests may need the adapter that was loaded
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
        ended.append(
            CommandEnded(
                **world.stamp(),
                command_id=pending.command_id,
                reply_slot=pending.reply_slot,
                reply_key=pending.nonce,
                action=pending.command.action,
                outcomes=tuple(pending.outcomes.values()),
            )
        )
    world.commands.closed.clear()
    return ended


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
