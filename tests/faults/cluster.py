"""A simulated cluster: starts, breaks, restarts and heals the processes of a plan."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from forebay.events.codec import DecodeError, decode, encode
from forebay.events.control import Action, Command, RouterConfig, WorkerCommanded
from forebay.events.requests import RouteQueried
from forebay.events.topics import CONTROL, DECISIONS, FLEET, KV_EVENTS, PROGRESS, REQUESTS, TOKENS
from forebay.ingress.model import DEFAULT_MODEL, Model
from forebay.live.router.router import ready
from forebay.transport.base import Draft, Log, LogError, LogUnavailable
from forebay.transport.kafka.log import KafkaLog
from forebay.transport.kafka.settings import KafkaSettings
from tests.faults.broker import Broker, Faults
from tests.faults.effects import Violation
from tests.faults.indexers import FaustGroup, IndexerService
from tests.faults.invariants import LogChecks
from tests.faults.kafka.client import HOST, Host
from tests.faults.kafka.server import NAMESPACE, FakeKafka
from tests.faults.leases import LeaseStore, VirtualLeases
from tests.faults.loop import START_NS, VirtualLoop
from tests.faults.plan import Fault, Plan
from tests.faults.process import Process
from tests.faults.rules import OTHER_RULES, OWN_RULES
from tests.faults.runtime import EPOCH_NS
from tests.faults.services import (
    BLOCK,
    GROUP,
    PARTITION,
    Connections,
    IngressService,
    RouterService,
    Sizes,
    WorkerService,
    until_failed,
)

logger = logging.getLogger(__name__)

Service = RouterService | WorkerService | IngressService | IndexerService
RESTART_S = 0.3  # until a supervisor starts a process again that ended by itself
TIMEOUT_S = 20.0  # of an ingress, at least the longest deadline of a request
SESSION_LOST_MS = 1_000  # a longer `group_rebalance` expels a member
STALE_S = 5.0  # longer than a lease, and half of it is longer than the silence after which a standby claims
COMMAND_US = 3_000_000  # a lost or slow worker does not respond within this time
OPERATOR_S = 3.0  # until an operator reacts to routers that are not ready
STOP_S_MAX = 40.0  # a router that waits before it tries again waits for up to 30 s
FOREIGN_TOPICS = (REQUESTS, PROGRESS, KV_EVENTS, FLEET, CONTROL, TOKENS, DECISIONS)
POINT_KINDS = (
    "append_rejected", "append_without_ack", "ack_late", "log_full", "read_failed", "lease_error",
    "lease_response_lost", "spurious_wake",
)  # fmt: skip
MODEL = Model(DEFAULT_MODEL)
KAFKA = KafkaSettings("simulated:9092", NAMESPACE)


@dataclass(slots=True)
class Member:
    """One service of the plan and its current process.

    Attributes:
        lease_cut: whether it cannot reach the lease store.
        down: number of faults that keep it from being started again.
        is_lost: whether it never comes back.
        rules: version of the decision rules of its next process; 0 for services without decision rules.
    """

    name: str
    faults: Faults
    lease_cut: bool = False
    process: Process | None = None
    service: Service | None = None
    incarnation: int = 0
    down: int = 0
    is_lost: bool = False
    rules: int = 0


class Cluster:
    """All simulated processes of one plan, with their broker and their lease store.

    Attributes:
        fired: number of faults that happened, by kind.
        violation: first violation that a check found while a process ran.
        failed: name and error of each process that ended with an error.
        kafka: the nodes of the broker, if the plan has the depth `kafka`.
        faust: the consumer group of the instances of the indexer.
    """

    def __init__(self, loop: VirtualLoop, plan: Plan) -> None:
        self.fired: Counter[str] = Counter()
        self.checks = LogChecks()
        self.violation: BaseException | None = None
        self.failed: list[str] = []
        self.broker = Broker(loop, str(plan.seed))
        self.broker.on_append = lambda record, writer: self._check(lambda: self.checks.on_append(record, writer))
        self.kafka = FakeKafka(self.broker, str(plan.seed))
        self.faust = FaustGroup(self.broker, str(plan.seed))
        self._loop = loop
        self.plan = plan
        self._store = LeaseStore(loop)
        self._store.on_forget = lambda *lease: self._check(lambda: self.checks.on_forget(*lease))
        self.members = {name: Member(name, Faults(self._count)) for name in plan.services}
        for name, member in self.members.items():
            if name[0] in "rx":
                member.rules = OWN_RULES
        self._blocked_s = 0.0
        self._is_healed = False

    def start(self) -> None:
        for member in self.members.values():
            self._start(member)
        if self.plan.indexers:
            self.faust.start()

    def ingress(self, name: str) -> tuple[Process, IngressService] | None:
        """Return an ingress that runs and accepts requests, or None."""
        member = self.members[name]
        process, service = member.process, member.service
        assert isinstance(service, IngressService | None)
        if process is None or not process.alive or service is None or service.group is None:
            return None
        return process, service

    def routers(self) -> list[RouterService]:
        return [one.service for one in self._running() if isinstance(one.service, RouterService)]

    def workers(self) -> dict[str, WorkerService]:
        return {one.name: one.service for one in self._running() if isinstance(one.service, WorkerService)}

    def ingresses(self) -> list[IngressService]:
        return [one.service for one in self._running() if isinstance(one.service, IngressService)]

    def operate(self, passed_s: float) -> None:
        """Act as an operator who looks at `/ready` of the routers from time to time, `passed_s` seconds apart.

        If the group has no owner, because the last one died with rules that no router has, the operator starts a
        router with these rules.
        """
        running = [one for one in self._router_members() if one.process is not None and one.process.alive]
        is_blocked = bool(running) and not any(map(_is_ready, running))
        self._blocked_s = self._blocked_s + passed_s if is_blocked else 0.0
        if self._blocked_s >= OPERATOR_S:
            self._blocked_s = 0.0
            self._restart_with(running[0], self.checks.rules)

    def lease_holders(self, kind: str) -> set[str]:
        """Return the names of all holders in the lease store, of kind `worker` or `ingress`."""
        return set(self._store.entries(kind, GROUP))

    def inject(self, fault: Fault) -> None:
        """Begin a fault of the plan, and end it after its duration."""
        if fault.target:
            self._inject(self.members[fault.target], fault)
        else:
            self._inject_into_system(fault)

    def heal(self) -> None:
        """End all faults and start all services that do not run."""
        self._is_healed = True
        self.broker.down = self.broker.full = self._store.down = self.kafka.is_stale = False
        for member in self.members.values():
            member.lease_cut = False
            member.down = int(member.is_lost)
            faults = member.faults
            faults.pending.clear()
            faults.cut = faults.truncates = False
            faults.slowness, faults.lag_s = 1.0, 0.0
            if member.process is not None and member.process.alive:
                member.process.resume()
                member.process.slow_down(1)
                member.process.runtime.set_rate(1.0)
            elif not member.is_lost:
                self._start(member)

    def wall_us(self) -> int:
        """Return the wall clock of clients in microseconds since 1970."""
        return (EPOCH_NS + self._loop.now_ns - START_NS) // 1_000

    async def stop_routers(self) -> None:
        """Stop all routers in order, so that the owner seals its journal."""
        for member in self.members.values():
            if isinstance(member.service, RouterService):
                member.down += 1  # nobody starts it again
                await member.service.stop()
        ends_s = self._loop.time() + STOP_S_MAX
        while stopping := [one.name for one in self._running() if isinstance(one.service, RouterService)]:
            if self._loop.time() > ends_s:
                raise Violation(f"{stopping} did not stop within {STOP_S_MAX:g} s")
            await asyncio.sleep(0.1)

    def _router_members(self) -> list[Member]:
        return [member for name, member in self.members.items() if name.startswith("r")]

    def _restart_with(self, member: Member, rules: int) -> None:
        """Stop a router in order. Its supervisor starts it again with these decision rules."""
        assert member.process is not None
        assert member.service is not None
        member.rules = rules
        member.process.spawn(member.service.stop())

    def _running(self) -> list[Member]:
        return [one for one in self.members.values() if one.process is not None and one.process.alive]

    def _count(self, kind: str) -> None:
        self.fired[kind] += 1

    def _check(self, check: Callable[[], None]) -> None:
        """Run a check, and keep the first violation that it finds."""
        if self.violation is None:
            try:
                check()
            except Violation as violation:
                self.violation = violation

    def _start(self, member: Member) -> None:
        member.incarnation += 1
        process = Process(self._loop, member.name, member.incarnation, str(self.plan.seed), member.rules)
        member.process, member.service = process, self._service(member)
        process.on_end = lambda ended: self._on_end(member, ended)
        process.start(lambda running: self._run(member, running))

    def _service(self, member: Member) -> Service:
        plan, name = self.plan, member.name
        sizes = Sizes(
            kv_blocks=plan.kv_blocks,
            max_num_seqs=plan.max_num_seqs,
            speedup=plan.speedup,
            snapshot_every=plan.snapshot_every,
            router=RouterConfig(),
        )
        if name.startswith("r"):
            return RouterService(sizes)
        if name.startswith("w"):
            return WorkerService(sizes)
        if name.startswith("x"):
            return IndexerService(self.faust, member.faults)
        return IngressService(MODEL, int(name[1:]), TIMEOUT_S)

    async def _run(self, member: Member, process: Process) -> None:
        assert member.service is not None
        log_failed: asyncio.Future[LogError] = self._loop.create_future()

        def on_failure(error: LogError) -> None:
            if not log_failed.done():
                log_failed.set_result(error)

        log = await self._log(member, process, on_failure)
        leases = [
            VirtualLeases(self._store, member.faults, lambda: member.lease_cut, kind, process.label)
            for kind in KINDS_OF_LEASES
        ]
        connections = Connections(log, leases[0], leases[1], log_failed)
        work = asyncio.create_task(member.service.run(process, connections))
        try:
            await until_failed(work, log_failed)
        finally:
            if isinstance(log, KafkaLog):
                log.on_failure = None
                await log.close()

    async def _log(self, member: Member, process: Process, on_failure: Callable[[LogError], None]) -> Log:
        """Connect a process to the broker. Raises LogError."""
        if self.plan.depth == "log":
            return self.broker.connect(process, member.faults, on_failure)
        process.bind(HOST, Host(process, member.faults, self.kafka))
        log = await KafkaLog.open(KAFKA)
        log.on_failure = on_failure
        return log

    def _on_end(self, member: Member, process: Process) -> None:
        """Start a service again that ended. An error other than an expected one is a violation."""
        if member.process is not process:
            return
        if process.error is not None:
            self.failed.append(f"{member.name}: {process.error!r}")
        unexpected = _unexpected(process.error, is_starting=_is_starting(member.service))
        if unexpected is not None and self.violation is None:
            self.violation = unexpected
        if not member.down:
            self._loop.call_main_later(RESTART_S, self._restart, member, process)

    def _restart(self, member: Member, process: Process) -> None:
        if member.process is process and not process.alive and not member.down:
            self._start(member)

    def _inject(self, member: Member, fault: Fault) -> None:
        process, faults = member.process, member.faults
        kind, end_s = fault.kind, fault.duration_ms / 1000
        if kind == "call_failed":
            faults.fail_call(fault.amount)
            return
        if kind in POINT_KINDS:
            faults.pending[kind] = faults.pending.get(kind, 0) + fault.amount
            return
        if process is None or not process.alive or (kind == "loss" and member.is_lost):
            return
        self._count(kind)
        match kind:
            case "kill":
                process.kill()
                self._keep_down(member, end_s)
            case "loss":
                process.kill()
                member.down += 1
                member.is_lost = True
            case "stop":
                assert member.service is not None
                process.spawn(member.service.stop())
                self._keep_down(member, end_s)
            case "upgrade":
                self._restart_with(member, OTHER_RULES if member.rules == OWN_RULES else OWN_RULES)
                self._keep_down(member, end_s)
            case "pause":
                process.pause()
                self._later(end_s, process.resume)
            case "slow_process":
                process.slow_down(fault.amount)
                self._later(end_s, lambda: process.slow_down(1))
            case "network_split":
                self._hold(end_s, faults, "cut", True)
            case "lease_split":
                self._hold(end_s, member, "lease_cut", True)
            case "deaf":  # a worker goes on writing although it is lost
                faults.lag_s, member.lease_cut = fault.amount / 1000, True
                self._later(fault.amount / 1000, lambda: self._hear(member))
            case "slow_network":
                self._hold(end_s, faults, "slowness", float(fault.amount), 1.0)
            case "slow_reader":
                self._hold(end_s, faults, "lag_s", fault.amount / 1000, 0.0)
            case "truncated_fetch":
                self._hold(end_s, faults, "truncates", True)
            case "lease_expiry":
                self._store.expire("worker", GROUP, member.name)
            case "clock_jump":
                process.runtime.skew_ns += fault.amount * 1_000_000
            case "clock_drift":
                process.runtime.set_rate(1.0 + fault.amount / 1000)
            case _:
                raise AssertionError(f"unknown kind of fault: {kind}")

    def _hear(self, member: Member) -> None:
        member.faults.lag_s, member.lease_cut = 0.0, False

    def _inject_into_system(self, fault: Fault) -> None:
        kind, end_s, store, broker = fault.kind, fault.duration_ms / 1000, self._store, self.broker
        self._count(kind)
        match kind:
            case "broker_down":
                self._hold(end_s, broker, "down", True)
            case "disk_full":
                self._hold(end_s, broker, "full", True)
            case "lease_store_down":
                self._hold(end_s, store, "down", True)
            case "lease_flush":
                store.flush()
            case "lease_clock_jump":
                store.skew_ms += fault.amount
            case "leader_change":
                self.kafka.change_leaders()
            case "stale_metadata":
                self.kafka.change_leaders()
                self._hold(end_s, self.kafka, "is_stale", True)
            case "group_rebalance":
                for group in self.kafka.groups.values():
                    (group.expel if fault.duration_ms > SESSION_LOST_MS else group.rebalance)()
            case "repeated_record" | "foreign_decision":
                if records := broker.records((DECISIONS.name, 0)):
                    value = records[-min(fault.amount, len(records))].value
                    value = _of_another_group(value) if kind == "foreign_decision" else value
                    broker.append(Draft(DECISIONS.name, 0, value), 0)
            case "stale_owner":
                self._make_stale(fault)
            case "faust_rebalance":
                self.faust.rebalance()
            case "retention":
                self.faust.begins = self.checks.retained
            case "adapter":  # only of plans that were written by hand
                name = f"adapter-{fault.amount}"
                command = WorkerCommanded(
                    command_id=f"add-{name}-{self.fired[kind]}",
                    model=GROUP,
                    command=Command(action="load_lora", lora_name=name, lora_path="/", placement="auto"),
                    reply_slot=0,
                    timeout_us=COMMAND_US,
                )
                broker.append(Draft(CONTROL.name, PARTITION, encode(CONTROL, command)), 0)
            case "command":
                action: Action = "clear_kv_blocks" if fault.at_ms % 2 else "list_loras"
                command = WorkerCommanded(
                    command_id=f"command-{self.fired[kind]}",
                    model=GROUP,
                    command=Command(action=action),
                    reply_slot=0,
                    timeout_us=COMMAND_US,
                )
                broker.append(Draft(CONTROL.name, PARTITION, encode(CONTROL, command)), 0)
            case "route_query":
                name = f"query-{self.fired[kind]}"
                query = RouteQueried(
                    request_id=name, model=GROUP, prompt_tokens=BLOCK, sequence_hashes=b"", reply_slot=0, tie_seed=7
                )
                broker.append(Draft(REQUESTS.name, PARTITION, encode(REQUESTS, query)), 0)
            case "foreign_record":
                topic = FOREIGN_TOPICS[fault.at_ms % len(FOREIGN_TOPICS)]
                broker.append(Draft(topic.name, 0, b"\xc1 not an event"), 0)
            case _:
                raise AssertionError(f"unknown kind of fault: {kind}")

    def _make_stale(self, fault: Fault) -> None:
        """Pause the owner until another router owns the group. It learns of this late, and polls the leases until then.

        Meanwhile a worker does not renew its lease, so the stale owner has a fact to write.
        """
        owners = [one for one in self._router_members() if _is_owner(one)]
        workers = [one for one in self._running() if isinstance(one.service, WorkerService)]
        if not owners or not workers:
            return
        owner, worker = owners[0], workers[fault.at_ms % len(workers)]
        process = owner.process
        assert process is not None
        process.pause()
        owner.faults.lag_s, worker.lease_cut = STALE_S, True
        self._later(STALE_S / 2, process.resume)
        self._later(STALE_S, lambda: self._hear(owner))
        self._later(STALE_S, lambda: self._hear(worker))

    def _keep_down(self, member: Member, seconds: float) -> None:
        """Keep a service down, and start it again after some seconds."""
        member.down += 1

        def up() -> None:
            if member.down and not self._is_healed:
                member.down -= 1
                process = member.process
                if not member.down and process is not None and not process.alive:
                    self._start(member)

        self._loop.call_main_later(seconds, up)

    def _hold(self, seconds: float, target: object, name: str, value: object, normal: object = False) -> None:
        """Set an attribute for some seconds."""
        setattr(target, name, value)
        self._later(seconds, lambda: setattr(target, name, normal))

    def _later(self, seconds: float, end: Callable[[], None]) -> None:
        self._loop.call_main_later(seconds, end)


def _is_owner(member: Member) -> bool:
    router = member.service.router if isinstance(member.service, RouterService) else None
    is_alive = member.process is not None and member.process.alive
    return is_alive and router is not None and bool(router.owners)


KINDS_OF_LEASES = ("worker", "ingress")


def _is_ready(member: Member) -> bool:
    """Return what `/ready` of a router would report now."""
    assert member.process is not None
    assert isinstance(member.service, RouterService)
    router = member.service.router
    return router is not None and member.process.evaluate(lambda: ready(router)[0])


def _is_starting(service: Service | None) -> bool:
    match service:
        case RouterService():
            return service.router is None
        case WorkerService():
            return service.worker is None
        case IngressService():
            return service.group is None
        case IndexerService():
            return service.indexer is None
        case None:
            return True


def _unexpected(error: BaseException | None, *, is_starting: bool) -> BaseException | None:
    """Return an error of a process that no injected fault explains, or None.

    A log that is unavailable ends a process only while it starts.
    """
    while isinstance(error, BaseExceptionGroup):
        found = (_unexpected(one, is_starting=is_starting) for one in error.exceptions)
        error = next((one for one in found if one is not None), None)
    is_final = isinstance(error, LogError) and (is_starting or not isinstance(error, LogUnavailable))
    return None if error is None or is_final else error


def _of_another_group(value: bytes) -> bytes:
    """Return a journal record as the owner of another group with the same epoch would have written it next."""
    try:
        record = decode(DECISIONS, value)
    except DecodeError:
        return value
    return encode(DECISIONS, msgspec.structs.replace(record, owner_nonce="another", seq=record.seq + 1))
