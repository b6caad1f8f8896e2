"""The distributed system as processes of this machine, watched through its log.

For the demo and for the tests of take-overs: they start it, harm it, and read from the log what became of it.
"""

import contextlib
import functools
import json
import re
import secrets
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx
from aiokafka.admin import AIOKafkaAdminClient

from forebay.core.state.fleet import Fleet, FleetWorker
from forebay.core.state_machine import IllegalTransition
from forebay.core.step import AnyDecision
from forebay.events.codec import DecodeError, decode
from forebay.events.decisions import OwnerClaimed, RequestRouted
from forebay.events.topics import DECISIONS, FLEET, TOKENS, Topic
from forebay.transport.base import Record
from forebay.transport.directory import Directory
from forebay.transport.history.reader import decode_journal
from forebay.transport.kafka.log import KafkaLog
from forebay.transport.kafka.settings import KafkaSettings
from forebay.transport.kafka.topics import TopicPlan, create_topics, partitions_of
from infra.kafka.kafka import HOST, tail
from tests.harness.hosts import Host
from tests.harness.local import free_ports
from tests.harness.processes import STOP_S, ProcessError, Processes, Spawn, spawn

__all__ = ["GROUP", "Cluster", "Ownership", "ProcessError", "remove_topics"]

FOREBAY = str(Path(sys.executable).with_name("forebay"))
GROUP = "forebay-default"  # the name of the default model
POOL = "default"
PLAN = TopicPlan(groups=1, slots=16, replies=4, kafka_api=2)  # one group: one router owns it and the others stand by
READ_MAX = 500
INGRESSES_MAX = 8  # of one cluster, also those that ended
VERIFIED_WITHIN_S = 300.0
ASSIGNED = re.compile(r"assigned the control partitions \[([\d, ]*)\]")


@dataclass(slots=True)
class Ownership:
    """The time of one owner, as the journal has it; times are Kafka's, in microseconds.

    Attributes:
        router: its id.
        epoch: the offset of its claim.
        claimed_us: when it claimed.
        routed: requests that it routed.
        decided: its decisions, those among them.
        first_routed_us: when it routed the first of them; None while it has not.
        last_routed_us: when it routed the last of them.
        void: records that it wrote after a newer claim.
    """

    router: str
    epoch: int
    claimed_us: int
    routed: int = 0
    decided: int = 0
    first_routed_us: int | None = None
    last_routed_us: int | None = None
    void: int = 0


@dataclass(slots=True)
class _Journal:
    """What was read of one group's journal."""

    position: int = 0
    owners: dict[int, Ownership] = field(default_factory=dict)

    def apply(self, record: Record) -> None:
        if record.offset < self.position:
            return  # two that wait for something read side by side
        event = decode_journal(record)
        self.position = record.offset + 1
        if event is None:
            return  # a foreign producer's
        if isinstance(event, OwnerClaimed):
            self.owners[record.offset] = Ownership(event.owner_id, record.offset, record.at_us)
            return
        owner = self.owners[event.owner_epoch]
        if event.owner_epoch != max(self.owners):
            owner.void += 1
            return
        owner.decided += isinstance(event, AnyDecision)
        if isinstance(event, RequestRouted):
            owner.routed += 1
            owner.first_routed_us = owner.first_routed_us or record.at_us
            owner.last_routed_us = record.at_us


class Cluster:
    """Services on one Kafka and one Redis, under one namespace: use it as an async context manager.

    Logs of the processes and the token of the admin API are in `folder`. Whatever ends the body, every process that was
    started is ended.
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
        self.admin_options = ("--admin-token-file", str(token_file))  # of an ingress and of `forebay control`
        self.urls: dict[str, str] = {}
        self.settings = KafkaSettings(kafka, namespace)
        self._redis_url = redis_url
        self._plan = plan
        first = free_ports(INGRESSES_MAX)
        self._ports = iter(range(first, first + INGRESSES_MAX))
        self._journals: dict[int, _Journal] = {}
        self._routers: dict[str, int] = {}  # and how much each had said when a router last came or went
        self._exit = contextlib.AsyncExitStack()
        self._log: KafkaLog
        self._directory: Directory

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            await create_topics(self.settings, self._plan, [POOL])
            self._log = await KafkaLog.open(self.settings)
            stack.push_async_callback(self._log.close)
            self._directory = Directory(self._log)
            await self._directory.start()
            stack.callback(self._directory.close)
            stack.callback(self.processes.end_all)
            self._exit = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._exit.aclose()

    def router(self, name: str, *options: str) -> None:
        """Start a router."""
        self._service("router", name, "--router-id", name, "--verbose", *options)
        self._routers[name] = 0
        self._members_change(name)

    def worker(self, name: str, *options: str, on: Host | None = None) -> None:
        """Start a worker, a mock one unless options say otherwise, here or `on` another host."""
        self._service("worker", name, "--worker-id", name, "--verbose", *options, on=on)

    def ingress(self, name: str, *options: str) -> str:
        """Start an ingress: its URL, also in `urls`."""
        port = next(self._ports)
        admin = ("--admin-api", *self.admin_options)
        self._service("ingress", name, "--ingress-id", name, "--port", str(port), "--verbose", *admin, *options)
        url = self.urls[name] = f"http://{HOST}:{port}"
        return url

    @property
    def admin_headers(self) -> dict[str, str]:
        """What requests of the admin API send."""
        return {"authorization": f"Bearer {self.admin_token}"}

    def kill(self, name: str, *, alone: bool = False) -> int:
        """Kill -9, or a process `alone` and none of its children: the wall clock in microseconds when that was done."""
        self.processes.check()
        self._members_change(name)
        at_us = self.processes.kill(name, alone=alone)
        self._gone(name)
        return at_us

    def pause(self, name: str) -> None:
        """Stop a process where it is."""
        self.processes.pause(name)
        self._members_change(name)

    def resume(self, name: str) -> None:
        """Let a paused process go on."""
        self.processes.resume(name)
        self._members_change(name)

    async def stop(self, name: str, *, within_s: float = STOP_S) -> None:
        """End a service in the planned way. Raises ProcessError."""
        self._members_change(name)
        await self.processes.stop(name, within_s=within_s)
        self._gone(name)

    async def command(self, name: str, *arguments: str, within_s: float) -> tuple[int, str]:
        """Run one forebay command to its end: exit code and stdout; NAME.log has its stderr. Raises ProcessError."""
        self.begin(name, *arguments)
        return await self.finish(name, within_s=within_s)

    def begin(self, name: str, *arguments: str) -> None:
        """Start a forebay command that ends by itself."""
        output = self.processes.folder / f"{name}.out"
        output.unlink(missing_ok=True)
        self.processes.start(name, [FOREBAY, *arguments], ends=True, output=output)

    async def finish(self, name: str, *, within_s: float) -> tuple[int, str]:
        """Wait for the end of a command: exit code and stdout. Raises ProcessError."""
        code = await self.processes.ended(name, within_s=within_s)
        return code, (self.processes.folder / f"{name}.out").read_text()

    async def verify(self, group: str = GROUP) -> dict[str, Any]:
        """Derive the group's decisions again in a process of its own: the report. Raises ProcessError."""
        return await self._replay("verify", group)

    async def explain(self, request_id: str, group: str = GROUP) -> dict[str, Any]:
        """A request of the group, explained by a process of its own. Raises ProcessError."""
        return await self._replay("explain", group, request_id)

    async def ownerships(self, group: str = GROUP) -> list[Ownership]:
        """All owners that the group had so far, the newest last."""
        partition = self._directory.partition_of(group)
        if partition is None:
            return []
        journal = self._journals.setdefault(partition, _Journal())
        end = await self._log.end(DECISIONS.name, partition)
        while journal.position < end:
            for record in await self._log.read(DECISIONS.name, partition, journal.position, READ_MAX):
                journal.apply(record)
        return [journal.owners[epoch] for epoch in sorted(journal.owners)]

    async def owner(self, group: str = GROUP) -> str | None:
        """The router that owns the group now; None while nobody ever did."""
        owners = await self.ownerships(group)
        return owners[-1].router if owners else None

    async def routed(self, group: str = GROUP) -> int:
        """Requests that were routed so far."""
        return sum(owner.routed for owner in await self.ownerships(group))

    async def decided(self, group: str = GROUP) -> int:
        """Decisions so far, of every kind."""
        return sum(owner.decided for owner in await self.ownerships(group))

    async def taken_over(self, before: str, group: str = GROUP, *, within_s: float) -> Ownership:
        """Wait until another router than `before` owns the group and routed a request. Raises ProcessError."""

        async def routes() -> Ownership | None:
            newest = (await self.ownerships(group))[-1]
            return newest if newest.router != before and newest.routed else None

        return await self.processes.until(f"another router than {before} routes", routes, within_s=within_s)

    async def events(self, topic: Topic, group: str = GROUP) -> list[Any]:
        """All events of a group's control topic, in order, without what is none."""
        partition = self.partition(group)
        assert partition is not None, f"{group} has no partition"
        return [event for _, event in await self._events(topic, partition)]

    async def said(self) -> list[Any]:
        """All events of the reply slots, each slot's in order."""
        found = []
        for slot in range(self._plan.replies):
            found += [event for _, event in await self._events(TOKENS, slot)]
        return found

    def partition(self, group: str = GROUP) -> int | None:
        """The control partition of a group; None while it has none."""
        return self._directory.partition_of(group)

    async def members(self, group: str = GROUP) -> dict[str, FleetWorker]:
        """The workers that are admitted now, by worker id."""
        partition = self._directory.partition_of(group)
        fleet = Fleet()
        for offset, event in [] if partition is None else await self._events(FLEET, partition):
            with contextlib.suppress(IllegalTransition):  # void: of an owner that was replaced
                fleet.apply(event, offset)
        return {worker.spec.worker_id: worker for worker in fleet.workers()}

    async def until_serving(self, workers: int, group: str = GROUP) -> None:
        """Wait until routers agreed who owns, so many workers are admitted and each ingress is ready.

        Raises ProcessError.
        """

        async def admitted() -> bool:
            return len(await self.members(group)) == workers

        await self.until_balanced()
        await self.processes.until(f"{workers} workers are members", admitted)
        async with httpx.AsyncClient() as client:
            for name, url in self.urls.items():
                await self.processes.until(f"{name} is ready", functools.partial(_ready, client, url))

    async def until_balanced(self) -> None:
        """Wait until the routers that run share the control partitions, and placed groups have the owners so chosen.

        Raises ProcessError.
        """

        async def balanced() -> bool:
            shares = {name: self._assigned(name) for name in self._routers if not self.processes[name].paused}
            held = sorted(partition for share in shares.values() for partition in share or ())
            if None in shares.values() or held != list(range(self._plan.groups)):
                return False
            for group, partition in self._directory.groups.partitions.items():
                owners = await self.ownerships(group)
                if not owners or partition not in (shares.get(owners[-1].router) or ()):
                    return False
                told = f"owns {group} since offset {owners[-1].epoch}\n"
                if told not in self.processes[owners[-1].router].said():
                    return False
            return True

        await self.processes.until("the routers share the control partitions", balanced)

    async def _replay(self, command: str, group: str, *arguments: str) -> dict[str, Any]:
        """What a replay command says of a group, as JSON. Raises ProcessError."""
        where = ["--kafka", self.settings.bootstrap, "--namespace", self.namespace, "--group", group, "--json"]
        _, out = await self.command(command, "replay", command, *arguments, *where, within_s=VERIFIED_WITHIN_S)
        if not out:
            raise ProcessError(f"{command} said nothing: {tail(self.processes.folder / f'{command}.log')}")
        report: dict[str, Any] = json.loads(out)
        return report

    def _service(self, kind: str, name: str, *options: str, on: Host | None = None) -> None:
        shared = ["--kafka", self.settings.bootstrap, "--redis", self._redis_url, "--namespace", self.namespace]
        command = [FOREBAY, kind, *shared, *options]
        self.processes.start(name, command if on is None else on.command(*command))

    def _members_change(self, name: str) -> None:
        """What routers say from here on is about the assignment without this one, or with it again."""
        if name in self._routers:
            self._routers = {router: len(self.processes[router].said()) for router in self._routers}

    def _gone(self, name: str) -> None:
        self._routers.pop(name, None)
        self.urls.pop(name, None)

    def _assigned(self, router: str) -> set[int] | None:
        """What a router was last assigned since a router came or went; None when it was not yet."""
        told = ASSIGNED.findall(self.processes[router].said()[self._routers[router] :])
        return {int(number) for number in told[-1].split(",") if number.strip()} if told else None

    async def _events(self, topic: Topic, partition: int) -> list[tuple[int, Any]]:
        found: list[tuple[int, Any]] = []
        position, end = 0, await self._log.end(topic.name, partition)
        while position < end:
            for record in await self._log.read(topic.name, partition, position, READ_MAX):
                position = record.offset + 1
                with contextlib.suppress(DecodeError):  # a foreign producer's
                    found.append((record.offset, decode(topic, record.value)))
        return found


async def remove_topics(kafka: str, namespace: str) -> None:
    """Remove the topics of a namespace, which nobody uses any more, from a broker that stays."""
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
