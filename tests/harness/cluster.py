"""The distributed system as processes of this machine, watched through its log.

Demos and tests start the system, inject failures, and read the outcome from the log.
"""

import asyncio
import contextlib
import functools
import inspect
import json
import secrets
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any, Self

import httpx
from aiokafka.admin import AIOKafkaAdminClient

from forebay.core.state.fleet import Fleet, FleetWorker
from forebay.core.state_machine import IllegalTransition
from forebay.core.step import AnyDecision
from forebay.core.world import CORE_VERSION
from forebay.events.codec import DecodeError, decode, unknown_tag
from forebay.events.decisions import OwnerClaimed, RequestRouted
from forebay.events.topics import DECISIONS, FLEET, TOKENS, Topic
from forebay.journal.records import Validity, decode_journal
from forebay.transport.base import Record, records_of
from forebay.transport.directory import Directory
from forebay.transport.heartbeats import RouterHeartbeats
from forebay.transport.kafka.log import KafkaLog
from forebay.transport.kafka.settings import KafkaSettings
from forebay.transport.kafka.topics import TopicPlan, create_topics, partitions_of
from infra.kafka.kafka import HOST, tail
from tests.harness.hosts import Host
from tests.harness.local import free_ports
from tests.harness.processes import PATIENCE_S, STOP_S, ProcessError, Processes, Spawn, spawn

FOREBAY = str(Path(sys.executable).with_name("forebay"))
GROUP = "forebay-default"  # the name of the default model
POOL = "default"
PLAN = TopicPlan(groups=1, slots=16, replies=4, kafka_api=2)  # of one group, which one router owns
READ_MAX = 500
INGRESSES_MAX = 16  # ports; restarts take new ones
VERIFIED_WITHIN_S = 300.0
SILENT_S = 3.0  # standbys write a heartbeat every second


@dataclass(slots=True)
class Ownership:
    """The ownership of a group by one router, as recorded in the journal; times are Kafka's, in microseconds.

    Attributes:
        seal: offset of the `sealed` record that its claim names, or -1.
        decided: number of its decisions, routings included.
        first_routed_us: time of its first routing, or None.
        stale: number of records, which it wrote after a newer claim.
    """

    router: str
    epoch: int
    claimed_us: int
    rules: int = CORE_VERSION
    seal: int = -1
    routed: int = 0
    decided: int = 0
    first_routed_us: int | None = None
    last_routed_us: int | None = None
    stale: int = 0
    routed_us: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Journal:
    """The part of one group's journal that was read so far."""

    position: int = 0
    owners: dict[int, Ownership] = field(default_factory=dict)
    validity: Validity = field(default_factory=Validity)

    def apply(self, record: Record) -> None:
        if record.offset < self.position:
            return  # concurrent waiters may read the same record
        event = self.validity.read(record)
        self.position = record.offset + 1
        if event is None:
            event = decode_journal(record)
            # Otherwise a record of a foreign producer or of another version, or a void claim.
            if event is not None and not isinstance(event, OwnerClaimed) and event.owner_epoch in self.owners:
                self.owners[event.owner_epoch].stale += 1
            return
        if isinstance(event, OwnerClaimed):
            self.owners[record.offset] = Ownership(
                event.owner_id, record.offset, record.at_us, event.core_version, event.seal
            )
            return
        owner = self.owners[event.owner_epoch]
        owner.decided += isinstance(event, AnyDecision)
        if isinstance(event, RequestRouted):
            owner.routed += 1
            owner.first_routed_us = owner.first_routed_us or record.at_us
            owner.last_routed_us = record.at_us
            owner.routed_us.append(record.at_us)


class Cluster:
    """Services on one Kafka and one Redis in one namespace, as an async context manager.

    Logs of the processes and the token of the admin API are in `folder`. Leaving the context ends every started
    process.
    """

    def __init__(
        self,
        kafka: str,
        redis_url: str,
        namespace: str,
        folder: Path,
        plan: TopicPlan = PLAN,
        *,
        spawn: Spawn = spawn,
    ) -> None:
        self.namespace = namespace
        self.processes = Processes(folder, spawn)
        self.admin_token = secrets.token_hex(16)
        token_file = folder / "admin-token"
        token_file.write_text(self.admin_token)
        self.admin_options = ("--token-file", str(token_file))  # of an ingress and of `forebay control`
        self.urls: dict[str, str] = {}
        self.settings = KafkaSettings(kafka, namespace)
        self._redis_url = redis_url
        self._plan = plan
        first = free_ports(INGRESSES_MAX)
        self._ports = iter(range(first, first + INGRESSES_MAX))
        self._journals: dict[int, _Journal] = {}
        self._routers: set[str] = set()
        self._exit = contextlib.AsyncExitStack()
        self.log: KafkaLog
        self._directory: Directory

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            await create_topics(self.settings, self._plan, [POOL])
            self.log = await KafkaLog.open(self.settings)
            stack.push_async_callback(self.log.close)
            self._directory = Directory(self.log)
            await self._directory.start()
            stack.callback(self._directory.close)
            stack.callback(self.processes.end_all)
            self._exit = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._exit.aclose()

    @property
    def where(self) -> tuple[str, ...]:
        """Return the options of a command for Kafka and the namespace."""
        return "--kafka", self.settings.bootstrap, "--namespace", self.namespace

    @property
    def admin_headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.admin_token}"}

    async def serve(
        self,
        routers: Sequence[str] = ("r1",),
        workers: Sequence[str] = ("w1",),
        ingresses: Sequence[str] = ("i1",),
        *,
        router: Sequence[str] = (),
        worker: Sequence[str] = (),
        ingress: Sequence[str] = (),
    ) -> None:
        """Start services with these names and the options of their kind. If there are workers, wait until all serve."""
        for name in routers:
            self.router(name, *router)
        for name in workers:
            self.worker(name, *worker)
        for name in ingresses:
            self.ingress(name, *ingress)
        if workers:
            await self.until_serving(len(workers))

    def router(self, name: str, *options: str, program: str = FOREBAY) -> None:
        self.processes.start(name, [*self.command_of("router", program), "--id", name, *options])
        self._routers.add(name)

    def worker(self, name: str, *options: str, on: Host | None = None, program: str = FOREBAY) -> None:
        """Start a worker, by default a mock one, on this host or on `on`."""
        command = [*self.command_of("worker", program), "--id", name, *options]
        self.processes.start(name, command if on is None else on.command(*command))

    def ingress(self, name: str, *options: str, program: str = FOREBAY) -> str:
        """Start an ingress and return its URL, which is also added to `urls`."""
        port = next(self._ports)
        own = ("--id", name, "--port", str(port), "--admin-api", *self.admin_options)
        self.processes.start(name, [*self.command_of("ingress", program), *own, *options])
        url = self.urls[name] = f"http://{HOST}:{port}"
        return url

    def kill(self, name: str, *, alone: bool = False) -> int:
        """Kill a process with SIGKILL, with its children unless `alone`; return the wall clock in microseconds."""
        self.processes.check()
        at_us = self.processes.kill(name, alone=alone)
        self._forget(name)
        return at_us

    async def stop(self, name: str, *, within_s: float = STOP_S) -> None:
        """Stop a service gracefully. Raises ProcessError."""
        await self.processes.stop(name, within_s=within_s)
        self._forget(name)

    async def command(self, name: str, *arguments: str, within_s: float, program: str = FOREBAY) -> tuple[int, str]:
        """Run a forebay command; return exit code and stdout. NAME.log has its stderr. Raises ProcessError."""
        self.begin(name, *arguments, program=program)
        return await self.finish(name, within_s=within_s)

    async def printed(self, name: str, *arguments: str, within_s: float) -> str:
        """Run a forebay command on this cluster and return its stdout. Raises ProcessError if it fails."""
        code, out = await self.command(name, *arguments, *self.where, within_s=within_s)
        if code:
            raise ProcessError(f"{name} ended with code {code}: {tail(self.processes.folder / f'{name}.log')}")
        return out

    def begin(self, name: str, *arguments: str, program: str = FOREBAY) -> None:
        """Start a forebay command that is expected to end by itself."""
        output = self.processes.folder / f"{name}.out"
        output.unlink(missing_ok=True)
        self.processes.start(name, [program, *arguments], ends=True, output=output)

    async def finish(self, name: str, *, within_s: float) -> tuple[int, str]:
        """Wait for the end of a command; return exit code and stdout. Raises ProcessError."""
        code = await self.processes.ended(name, within_s=within_s)
        return code, (self.processes.folder / f"{name}.out").read_text()

    async def until(
        self,
        what: str,
        fetch: Callable[[], Any],
        reached: Callable[[Any], object] = bool,
        *,
        within_s: float = PATIENCE_S,
    ) -> Any:
        """Return what `fetch`, a function or a coroutine function, returns once it is accepted. Raises ProcessError.

        Args:
            reached: accepts a value; by default any truthy one.
        """

        async def accepted() -> tuple[Any] | None:
            found = fetch()
            found = await found if inspect.isawaitable(found) else found
            return (found,) if reached(found) else None

        return (await self.processes.until(what, accepted, within_s=within_s))[0]

    async def require_verified(self, group: str = GROUP, *options: str) -> dict[str, Any]:
        """Require that every decision of the group is derived equal, and return the report of `verify`."""
        report = await self.verify(group, *options)
        assert (report["divergence"], report["verified"]) == (None, report["decisions"])
        return report

    async def verify(self, group: str = GROUP, *options: str, program: str = FOREBAY) -> dict[str, Any]:
        """Verify the group's decisions in a separate process and return the report. Raises ProcessError."""
        return await self._replay("verify", group, *options, program=program)

    async def explain(self, request_id: str, group: str = GROUP) -> dict[str, Any]:
        """Explain a request of the group in a separate process and return the report. Raises ProcessError."""
        return await self._replay("explain", group, request_id)

    async def ownerships(self, group: str = GROUP) -> list[Ownership]:
        """Return all ownerships of the group so far, newest last."""
        partition = self._directory.partition_of(group)
        if partition is None:
            return []
        journal = self._journals.setdefault(partition, _Journal())
        end = await self.log.end(DECISIONS.name, partition)
        while journal.position < end:
            for record in await self.log.read(DECISIONS.name, partition, journal.position, READ_MAX):
                journal.apply(record)
        return [journal.owners[epoch] for epoch in sorted(journal.owners)]

    async def owner(self, group: str = GROUP) -> str:
        owners = await self.ownerships(group)
        assert owners, f"no router has claimed {group}"
        return owners[-1].router

    async def routed(self, group: str = GROUP) -> int:
        return sum(owner.routed for owner in await self.ownerships(group))

    async def decided(self, group: str = GROUP) -> int:
        """Return the number of decisions of every kind so far."""
        return sum(owner.decided for owner in await self.ownerships(group))

    async def taken_over(self, before: str, group: str = GROUP, *, within_s: float) -> Ownership:
        """Wait until another router than `before` owns the group and routed a request. Raises ProcessError."""

        async def routes() -> Ownership | None:
            newest = (await self.ownerships(group))[-1]
            return newest if newest.router != before and newest.routed else None

        return await self.processes.until(f"another router than {before} routes", routes, within_s=within_s)

    async def events(self, topic: Topic, kind: type | UnionType = object, group: str = GROUP) -> list[Any]:
        """Return the events of a type on a group's control topic, in order."""
        found = await self._events(topic, self.partition(group))
        return [event for _, event in found if isinstance(event, kind)]

    async def unknown(self, topic: Topic, tag: str) -> list[int]:
        """Return the times of records with this tag, which this version does not know, on a control topic of the group.

        The times are Kafka's, in microseconds.
        """
        end = await self.log.end(topic.name, self.partition())
        records = [record async for record in records_of(self.log, topic, self.partition(), 0, end)]
        return [record.at_us for record in records if unknown_tag(topic, record.value) == tag]

    async def replies(self) -> list[Any]:
        """Return all events of the reply slots, in order within each slot."""
        found = []
        for slot in range(self._plan.replies):
            found += [event for _, event in await self._events(TOKENS, slot)]
        return found

    def partition(self, group: str = GROUP) -> int:
        """Return the control partition of a group, which must have been placed."""
        partition = self._directory.partition_of(group)
        assert partition is not None, f"{group} has no partition"
        return partition

    async def members(self, group: str = GROUP) -> dict[str, FleetWorker]:
        partition = self._directory.partition_of(group)
        fleet = Fleet()
        for offset, event in [] if partition is None else await self._events(FLEET, partition):
            with contextlib.suppress(IllegalTransition):  # a stale event of a replaced owner
                fleet.apply(event, offset)
        return {worker.spec.worker_id: worker for worker in fleet.workers()}

    async def until_members(
        self, *names: str, count: int | None = None, group: str = GROUP, within_s: float = PATIENCE_S
    ) -> None:
        """Wait until the group has exactly these members, or `count` members. Raises ProcessError."""
        what = f"the members are {', '.join(names)}" if count is None else f"{count} workers are members"

        def are(members: dict[str, FleetWorker]) -> bool:
            return members.keys() == {*names} if count is None else len(members) == count

        await self.until(what, lambda: self.members(group), are, within_s=within_s)

    async def until_joined(self, router: str) -> None:
        """Wait until a router follows its groups. Raises ProcessError."""
        text = f"router {router} follows the groups of"
        await self.until(f"{router} runs", self.processes[router].output, lambda output: text in output)

    async def until_serving(self, workers: int, group: str = GROUP) -> None:
        """Wait until ownership is settled, `workers` workers are admitted and each ingress is ready.

        Raises ProcessError.
        """
        await self.until_owned()
        await self.until_members(count=workers, group=group)
        async with httpx.AsyncClient() as client:
            for name, url in self.urls.items():
                await self.processes.until(f"{name} is ready", functools.partial(_ready, client, url))

    async def until_owned(self) -> None:
        """Wait until one of the running routers owns each placed group, and the other routers follow it.

        Raises ProcessError.
        """
        groups = self._directory.groups.partitions
        heartbeats = {group: RouterHeartbeats(self.log, group) for group in groups}
        following = [asyncio.create_task(beats.follow(groups[name])) for name, beats in heartbeats.items()]

        async def owned() -> bool:
            running = {name for name in self._routers if not self.processes[name].paused}
            for beats in heartbeats.values():
                owner = beats.owner.router_id if beats.owner is not None and beats.has_owner else None
                others = {beat.router_id for beat in beats.standbys(SILENT_S)}
                if owner not in running or not running <= {owner, *others}:
                    return False
            return True

        try:
            await self.processes.until("a router owns each group, and the others follow it", owned)
        finally:
            for task in following:
                task.cancel()
            await asyncio.gather(*following, return_exceptions=True)

    async def _replay(self, command: str, group: str, *arguments: str, program: str = FOREBAY) -> dict[str, Any]:
        """Return the JSON report of a replay command on a group. Raises ProcessError."""
        where = [*self.where, "--group", group, "--json"]
        _, out = await self.command(command, command, *arguments, *where, within_s=VERIFIED_WITHIN_S, program=program)
        if not out:
            raise ProcessError(f"{command} printed nothing: {tail(self.processes.folder / f'{command}.log')}")
        report: dict[str, Any] = json.loads(out)
        return report

    def command_of(self, kind: str, program: str = FOREBAY) -> list[str]:
        """Return the command of a service with the options that all services share."""
        return [program, kind, *self.where, "--redis", self._redis_url]

    def _forget(self, name: str) -> None:
        self._routers.discard(name)
        self.urls.pop(name, None)

    async def _events(self, topic: Topic, partition: int) -> list[tuple[int, Any]]:
        found: list[tuple[int, Any]] = []
        position, end = 0, await self.log.end(topic.name, partition)
        while position < end:
            for record in await self.log.read(topic.name, partition, position, READ_MAX):
                position = record.offset + 1
                with contextlib.suppress(DecodeError):  # a record of a foreign producer
                    found.append((record.offset, decode(topic, record.value)))
        return found


async def remove_topics(kafka: str, namespace: str) -> None:
    """Remove the topics of an unused namespace from a broker that keeps running."""
    settings = KafkaSettings(kafka, namespace)
    names = [settings.topic(name) for name in await partitions_of(settings)]
    admin = AIOKafkaAdminClient(**settings.client_options())
    await admin.start()
    try:
        await admin.delete_topics(names)
    finally:
        await admin.close()


async def _ready(client: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await client.get(f"{url}/ready")).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False
