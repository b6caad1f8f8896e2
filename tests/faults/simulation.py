"""Run one plan: start the cluster, break it while clients use it, heal it, and check every invariant."""

import asyncio
import gc
import logging
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from forebay.core.state.fleet import WorkerPhase
from forebay.core.state.reply_slot import ResponseState, apply
from forebay.core.world import World
from forebay.events.base import U32_BYTES
from forebay.events.codec import DecodeError, decode
from forebay.events.topics import CONTROL, DECISIONS, FLEET, PROGRESS, REQUESTS, TOKENS
from forebay.events.usage import UsageEntry
from forebay.journal.usage import derive
from forebay.live.indexer import indexer
from forebay.live.standby import Standby
from forebay.replay.verify.verify import verify
from forebay.transport.base import Log, LogError, Record
from tests.faults.broker import Broker, Faults
from tests.faults.clients import FOREIGN_SLOTS, Client
from tests.faults.cluster import Cluster
from tests.faults.effects import Violation
from tests.faults.external import ExternalClient
from tests.faults.indexers import CheckedReplica
from tests.faults.invariants import check_worker, check_world
from tests.faults.kafka.clients import KafkaClient
from tests.faults.kafka.patches import fake_clients
from tests.faults.loop import NS_PER_S, START_NS, Livelocked, Stalled, VirtualLoop
from tests.faults.plan import SPAN_MS, Plan, PlannedRequest
from tests.faults.process import Process
from tests.faults.rules import OTHER_RULES, OWN_RULES, Rules
from tests.faults.services import GROUP, PARTITION

FAULTS_END_S = SPAN_MS / 1000 + 2.0
# Everything must have ended this long after the faults: the longest deadline, twice the recovery of a lost group, and
# the retries of a router, which wait up to 30 s.
QUIET_S_MAX = 90.0
CHECK_S = 0.5
AnyClient = Client | KafkaClient


@dataclass(slots=True)
class Result:
    """Result of one simulation.

    Attributes:
        violation: the first violation, as text; empty if there was none.
        failed: name and error of each process that ended with an error.
        trace_hash: hash of all choices and records.
    """

    plan: Plan
    violation: str = ""
    choices: int = 0
    callbacks: int = 0
    virtual_s: float = 0.0
    cpu_s: float = 0.0
    fired: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    trace_hash: str = ""
    partitions: dict[tuple[str, int], list[Record]] = field(default_factory=dict)


def simulate(plan: Plan) -> Result:
    """Run one plan, and return its result. An error of the simulation itself is a violation, too."""
    result, began_s = Result(plan), time.process_time()
    gc.freeze()  # so that the collection at the end looks only at what the simulation left
    clients_of_kafka = fake_clients() if plan.depth == "kafka" else nullcontext()
    replicas = patch.object(indexer, "Replica", CheckedReplica)
    with _quiet() as warned, Rules() as rules, clients_of_kafka, replicas:
        loop = VirtualLoop(str(plan.seed))
        loop.use_rules = rules.use
        cluster = Cluster(loop, plan)
        loop.set_exception_handler(partial(_note_crash, cluster))
        clients = [_client(cluster, planned, number) for number, planned in enumerate(plan.requests)]
        try:
            loop.run(_run(loop, cluster, clients))
        except Violation as violation:
            result.violation = str(violation)
        except Livelocked as livelock:
            result.violation = str(livelock)
        except Stalled:
            result.violation = "nothing will happen any more, but requests are pending"
        except Exception as error:  # noqa: BLE001 - the result names the seed and the plan
            at = traceback.extract_tb(error.__traceback__)[-1]
            result.violation = f"the simulation crashed at {Path(at.filename).name}:{at.lineno}: {error!r}"
        # Discarding the loop below also warns, about tasks that did not begin before their process was killed.
        if not result.violation and warned:
            result.violation = f"a process warned: {warned[0].message}"
        result.choices, result.callbacks, result.trace_hash = loop.choices, loop.callbacks, loop.trace_hash
        result.virtual_s = loop.time() - START_NS / NS_PER_S
        result.fired, result.failed = cluster.fired, cluster.failed
        result.outcomes = Counter(f"{client.outcome.state} {client.outcome.detail}".strip() for client in clients)
        result.partitions = cluster.broker.partitions
        del cluster, clients
        loop.discard()
        del loop
        gc.collect()
    result.cpu_s = time.process_time() - began_s
    return result


def _client(cluster: Cluster, planned: PlannedRequest, number: int) -> AnyClient:
    if planned.on_kafka:
        return KafkaClient(cluster, planned)
    return (ExternalClient if planned.external else Client)(cluster, planned, number)


def _note_crash(cluster: Cluster, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Keep an exception that ended a callback. Those of tasks reach whoever awaits the task."""
    if "handle" in context and cluster.violation is None:
        cluster.violation = context["exception"]


@contextmanager
def _quiet() -> Iterator[list[warnings.WarningMessage]]:
    """Silence what the services log about injected faults, and what finalisers of killed processes report.

    Yields a list that collects warnings, for example about coroutines that nothing awaits.
    """
    hook, level = sys.unraisablehook, logging.root.manager.disable
    sys.unraisablehook = lambda _: None
    logging.disable(logging.CRITICAL)
    was_enabled = gc.isenabled()
    gc.disable()  # finalisers would run at moments that depend on the history of the interpreter
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", RuntimeWarning)
            yield warned
    finally:
        if was_enabled:
            gc.enable()
        sys.unraisablehook = hook
        logging.disable(level)


async def _run(loop: VirtualLoop, cluster: Cluster, clients: list[AnyClient]) -> None:
    plan = cluster.plan
    began_s = loop.time()
    cluster.start()
    for fault in plan.faults:
        loop.call_main_later(fault.at_ms / 1000, cluster.inject, fault)
    sending = [
        loop.create_task(_send(client, planned.at_ms)) for client, planned in zip(clients, plan.requests, strict=True)
    ]
    while loop.time() < began_s + FAULTS_END_S:
        await asyncio.sleep(CHECK_S)
        cluster.operate(CHECK_S)
        _raise_early(cluster, clients)
    cluster.heal()
    await asyncio.gather(*sending)
    await _until_quiet(loop, cluster, clients)
    worlds = _standby_digests(cluster)
    await cluster.stop_routers()
    if plan.indexers:
        await _until_indexed(loop, cluster, clients, worlds)
    _raise_early(cluster, clients)
    cluster.checks.check_effects()
    cluster.checks.check_ends()
    _check_responses(cluster, clients)
    for client in clients:
        client.check()
    await _check_journal(loop, cluster, worlds)
    await _in_process(loop, cluster, cluster.checks.rules, lambda log: _check_usage(log, cluster, clients))


async def _send(client: AnyClient, at_ms: int) -> None:
    await asyncio.sleep(at_ms / 1000)
    await client.run()


def _raise_early(cluster: Cluster, clients: list[AnyClient]) -> None:
    """Raise a violation that does not need a quiet system to be seen."""
    if cluster.violation is not None:
        if isinstance(cluster.violation, Violation):
            raise cluster.violation
        raise Violation(f"a process failed: {cluster.violation!r}") from cluster.violation
    for one in cluster.routers():
        for owner in one.router.owners.values() if one.router is not None else ():
            cluster.checks.check_fleet(owner.world)
    for client in clients:
        client.outcome.check()


async def _until_quiet(loop: VirtualLoop, cluster: Cluster, clients: list[AnyClient]) -> None:
    """Wait until every request has ended and no state is left of it. Raises Violation if that takes too long."""
    ends_s = loop.time() + QUIET_S_MAX
    while True:
        await asyncio.sleep(CHECK_S)
        cluster.operate(CHECK_S)
        _raise_early(cluster, clients)
        try:
            _check_quiet(cluster, clients)
        except Violation as violation:
            if loop.time() < ends_s:
                continue
            raise Violation(f"{QUIET_S_MAX:g} s after the last fault: {violation}") from violation
        return


def _check_quiet(cluster: Cluster, clients: list[AnyClient]) -> None:
    waiting = [client.outcome.name for client in clients if not client.is_done]
    if waiting:
        raise Violation(f"requests wait: {waiting}")
    if cluster.broker.is_awaiting(REQUESTS.name):
        raise Violation("requests are on their way to the broker")
    world = _owned_world(cluster)
    for topic in (REQUESTS, PROGRESS, FLEET, CONTROL):
        end = len(cluster.broker.records((topic.name, PARTITION)))
        if world.view.get(topic.name, 0) < end:
            raise Violation(f"the owner has applied {world.view.get(topic.name, 0)} of {end} records of {topic.name}")
    check_world(world)
    workers = cluster.workers()
    for name, service in workers.items():
        check_worker(name, service, world)
    ready = {worker.spec.worker_id for worker in world.fleet.workers() if worker.phase is WorkerPhase.READY}
    if ready != workers.keys():
        raise Violation(f"the owner has the ready workers {sorted(ready)}, but {sorted(workers)} run")
    ingresses = {name for name, member in cluster.members.items() if name[0] == "i" and not member.is_lost}
    for kind, wanted in (("worker", workers.keys()), ("ingress", ingresses)):
        if cluster.lease_holders(kind) != wanted:
            raise Violation(f"leases of kind {kind}: {sorted(cluster.lease_holders(kind))}, expected {sorted(wanted)}")
    for one in cluster.ingresses():
        if one.group is None or len(one.group.replies) or one.group.front.admission.in_flight:
            raise Violation("an ingress still has requests in flight")


async def _until_indexed(
    loop: VirtualLoop, cluster: Cluster, clients: list[AnyClient], digests: dict[int, int]
) -> None:
    """Wait until each instance of the indexer has caught up, and add the digest of its state. Raises Violation."""
    ends_s = loop.time() + QUIET_S_MAX
    while problem := cluster.faust.why_behind():
        if loop.time() >= ends_s:
            raise Violation(f"{QUIET_S_MAX:g} s after the end of the journal: {problem}")
        await asyncio.sleep(CHECK_S)
        _raise_early(cluster, clients)
    world, end = cluster.faust.world(), len(cluster.broker.records((DECISIONS.name, PARTITION)))
    if cluster.checks.rules != OWN_RULES:
        return  # at most the indexer has loaded the sealed snapshot of the owner
    if world is None:
        raise Violation("an indexer has no state although the owner had its decision rules")
    if digests.setdefault(end, world.digest()) != world.digest():
        raise Violation(f"an indexer and a standby have different states at journal offset {end}")


def _owned_world(cluster: Cluster) -> World:
    """Return the state of the only owner. Raises Violation if the group has no owner or several.

    A router may have died right after its claim. The previous owner then continues until its next decision.
    """
    owners = [owner for one in cluster.routers() if one.router is not None for owner in one.router.owners.values()]
    if len(owners) != 1:
        raise Violation(f"the group has {len(owners)} owners")
    (owner,) = owners
    newer = [claim for claim in cluster.checks.claims if claim > owner.journal.epoch]
    if cluster.checks.decided.intersection(newer):
        raise Violation(f"the owner has epoch {owner.journal.epoch}, but there are newer claims: {newer}")
    return owner.world


def _standby_digests(cluster: Cluster) -> dict[int, int]:
    """Return the digest of each standby that derives the journal, by its position in the journal.

    One that has not read the newest claim may still follow an owner with other rules, whose records it derives.
    """
    return {
        standby.position: standby.world.digest()
        for one in cluster.routers()
        if one.router is not None
        for standby in one.router.standbys.values()
        if standby.failed is None and standby.blocked is None and standby.validity.rules == cluster.checks.rules
    }


def _check_responses(cluster: Cluster, clients: list[AnyClient]) -> None:
    """Check that each accepted request has exactly the response on the log that its client received.

    No two requests with one idempotency key have a complete response, unless an owner ended one of them too late.
    """
    keys = {accepted.offset: accepted.submitted.idempotency_key for accepted in cluster.checks.accepted}
    answered: dict[int, str] = {}
    received = {client.outcome.request_id: client.outcome for client in clients if client.outcome.state != "foreign"}
    slots: dict[int, dict[str, ResponseState]] = {}
    for accepted in cluster.checks.accepted:
        one = accepted.submitted
        slots.setdefault(one.reply_slot, {})[one.request_id] = ResponseState(one.reply_key)
    for slot, replies in slots.items():
        for record in cluster.broker.records((TOKENS.name, slot)):
            with suppress(DecodeError):
                apply(replies, decode(TOKENS, record.value), GROUP)
    for accepted in cluster.checks.accepted:
        submitted = accepted.submitted
        name = submitted.request_id
        reply = slots[submitted.reply_slot][name]
        if reply.located is not None:
            if keys.get(reply.located.offset) != submitted.idempotency_key or reply.tokens or reply.ended:
                raise Violation(f"{name} was run, or located at another key: {reply.located}")
            continue
        if reply.gap:
            raise Violation(f"{name}: tokens are missing in its reply slot")
        if name in cluster.checks.effects.external:
            if reply.tokens or (reply.ended is not None and reply.ended.error is None):
                raise Violation(f"{name}: somebody wrote output of an external request")
            continue
        if reply.ended is None:
            raise Violation(f"{name} was accepted at offset {accepted.offset}, but its response never ended")
        is_whole = reply.ended.error is None and reply.ended.finish_reason != "cancelled"
        if reply.tokens != accepted.expected[: len(reply.tokens)] or (is_whole and reply.tokens != accepted.expected):
            raise Violation(f"{name}: its response on the log is {reply.tokens}, expected {accepted.expected}")
        key = submitted.idempotency_key if is_whole and name not in cluster.checks.aborted else 0
        if key and (before := answered.setdefault(key, name)) != name:
            raise Violation(f"{before} and {name} have the same idempotency key, and both were run")
        outcome = received.get(name)
        is_foreign = submitted.reply_slot >= FOREIGN_SLOTS
        if outcome is not None and outcome.state == "finished" and not is_foreign and outcome.tokens != reply.tokens:
            raise Violation(f"{name}: the client received {outcome.tokens}, the log has {reply.tokens}")


async def _check_journal(loop: VirtualLoop, cluster: Cluster, digests: dict[int, int]) -> None:
    """Derive the journal again, from the beginning and from snapshots, each part with its own rules. Compare states.

    All standbys in `digests` have the rules of the last owner, because others derive nothing.
    """
    if not cluster.checks.claims:
        raise Violation("no router ever owned the group")
    last = cluster.checks.rules
    others = {OWN_RULES, OTHER_RULES} - {last}
    verified = await _in_process(loop, cluster, last, lambda log: _verify(log, digests))
    if len(cluster.checks.versions) > 1:
        for rules in others:
            verified += await _in_process(loop, cluster, rules, lambda log: _verify(log, {}))
    if verified != cluster.checks.decisions:
        raise Violation(f"{verified} of {cluster.checks.decisions} decisions were verified, by all versions together")


async def _check_usage(log: Log, cluster: Cluster, clients: list[AnyClient]) -> int:
    """Check that each request is charged at most once, and a complete one with what its client received.

    A request that an owner ended too late, because the last event of its worker was lost, may cost less.
    """
    charged = {entry.key_id: entry for entry in await derive(log, PARTITION)}
    for client in clients:
        outcome = client.outcome
        entry = charged.get(outcome.name, UsageEntry(hour_us=0))
        tokens = len(outcome.tokens)
        if entry.requests > 1 or entry.output_tokens > outcome.sampling.max_tokens:
            raise Violation(f"{outcome.name} is charged twice: {entry}")
        is_whole = outcome.state == "finished" and outcome.request_id not in cluster.checks.aborted
        if isinstance(client, Client) and is_whole:
            found = entry.requests - entry.incomplete, entry.prompt_tokens, entry.output_tokens
            if found != (1, len(outcome.prompt) // U32_BYTES, tokens):
                raise Violation(f"{outcome.name} is charged {entry}, but its client received {tokens} tokens")
    return len(charged)


async def _in_process(
    loop: VirtualLoop, cluster: Cluster, rules: int, work: Callable[[Log], Coroutine[object, object, int]]
) -> int:
    """Return the result of `work` in a process with these decision rules."""
    process = Process(loop, "verify", 1, "verify", rules)
    log = Broker.connect(cluster.broker, process, Faults(lambda _: None), lambda _: None)
    result: asyncio.Future[int] = loop.create_future()

    async def main(_: Process) -> None:
        try:
            result.set_result(await work(log))
        except Violation as violation:
            result.set_exception(violation)
        except LogError as error:
            result.set_exception(Violation(f"the journal cannot be verified: {error}"))

    process.start(main)
    return await result


async def _verify(log: Log, digests: dict[int, int]) -> int:
    """Verify the decisions that were made with the rules of this process, and return their number."""
    report = await verify(log, PARTITION)
    if report.divergence is not None:
        raise Violation(f"the journal diverges: {report.divergence}")
    if report.verified != report.decisions:
        raise Violation(f"{report.verified} of {report.decisions} decisions were verified")
    for position, digest in digests.items():
        replica = Standby(log, PARTITION, waits_for_seal=True)
        await replica.catch_up(position)
        if replica.world.digest() != digest:
            raise Violation(f"a standby has another state at journal offset {position} than the log")
    return report.verified
